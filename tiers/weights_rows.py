"""Rows of an embedding that lies on the disk: the panels that a pass needs, gathered into one block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import xxhash

from tierd.tiers.aio import MAX_BATCH
from tierd.tiers.errors import WeightsLost
from tierd.tiers.links import Link
from tierd.tiers.mover import Job, JobClass, Mover
from tierd.tiers.store_io import Bytes, aligned_block, huge_block
from tierd.tiers.weights_file import Span, WeightFile
from tierd.tiers.weights_read import RETRY_S


class PanelReader:
    """Threading: the step thread alone calls it. Reads run as awaited jobs of the mover.

    Args:
        record: its name, for errors.
        sections: of the table: where each starts in the file, and bytes of one of its panels.
        digests: hex XXH3-128 of each panel of each section. [sections][panels]
        max_panels: of one pass.
    """

    def __init__(
        self,
        file: WeightFile,
        mover: Mover,
        record: str,
        sections: Sequence[tuple[int, int]],
        digests: Sequence[Sequence[str]],
        max_panels: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._mover = mover
        self._record = record
        self._sections = tuple(sections)
        # Half a million hex texts would take 40 MB.
        self._digests = [np.array([int(text[16:], 16) for text in table], np.uint64) for table in digests]
        self._clock = clock
        self._lock = threading.Lock()
        self.blocks = [huge_block(max_panels * panel_bytes) for _, panel_bytes in sections]
        self.read_bytes = self.retries = self.lost = 0
        self.waited_s = 0.0

    @property
    def memory_bytes(self) -> int:
        """Memory held."""
        return sum(block.nbytes for block in self.blocks)

    def gather(self, panels: npt.NDArray[np.int64], deadline_s: float) -> None:
        """Fill the start of `blocks` with these panels, at most `max_panels`, until the next call. [panels]

        Raises WeightsLost when one can't be read, is not what was imported, or has not come at `deadline_s`.
        """
        start_s = self._clock()
        size = MAX_BATCH // len(self._sections)
        jobs = [self._job(panels[first : first + size], first) for first in range(0, len(panels), size)]
        accepted = [self._mover.submit(job, JobClass.NOW, start_s) for job in jobs]
        in_time = self._mover.wait_for(
            [job for job, there in zip(jobs, accepted, strict=True) if there], deadline_s - self._clock()
        )
        self.waited_s += self._clock() - start_s
        if not in_time:
            for job in jobs:
                self._mover.cancel(job)
            # What still runs writes into these blocks whenever it comes.
            self.blocks = [huge_block(block.nbytes) for block in self.blocks]
        errors = [job.completion.error for job in jobs if job.completion is not None and job.completion.error]
        if errors or not in_time or not all(accepted):
            with self._lock:
                self.lost += 1
            if not in_time:
                raise WeightsLost(self._record, "not in time")
            if errors and isinstance(errors[0], WeightsLost):
                raise errors[0]
            raise WeightsLost(self._record, str(errors[0]) if errors else "the queue of the disk is full")

    def _job(self, panels: npt.NDArray[np.int64], first: int) -> Job:
        call = partial(self._read, panels, first, self.blocks)
        num_bytes = len(panels) * sum(panel_bytes for _, panel_bytes in self._sections)
        return Job(call, Link.DISK_READ, num_bytes, awaited=True)

    def _read(self, panels: npt.NDArray[np.int64], first: int, blocks: Sequence[Bytes]) -> None:
        """Read some panels to place `first` and on. Runs on a thread of the mover."""
        for attempt in range(2):
            try:
                if self._read_once(panels, first, blocks):
                    return
                problem = "the bytes on the disk are not those of the import"
            except OSError as exc:
                problem = f"reading failed twice: {exc.strerror or exc}"
            if attempt == 0:
                with self._lock:
                    self.retries += 1
                time.sleep(RETRY_S)
        raise WeightsLost(self._record, problem)

    def _read_once(self, panels: npt.NDArray[np.int64], first: int, blocks: Sequence[Bytes]) -> bool:
        spans = [
            Span(start + int(panel) * panel_bytes, panel_bytes)
            for start, panel_bytes in self._sections
            for panel in panels
        ]
        memory = aligned_block(sum(span.blocks_bytes for span in spans))
        starts = np.cumsum([0, *(span.blocks_bytes for span in spans)]).tolist()
        self._file.read(
            [(span.blocks_offset, memory[at : at + span.blocks_bytes]) for span, at in zip(spans, starts, strict=False)]
        )
        for number, (span, at) in enumerate(zip(spans, starts, strict=False)):
            section, place = divmod(number, len(panels))
            found = memory[at + span.lead : at + span.lead + span.num_bytes]
            if xxhash.xxh3_128_intdigest(found.data) & _LOW != int(self._digests[section][panels[place]]):
                return False
            to = (first + place) * span.num_bytes
            blocks[section][to : to + span.num_bytes] = found
        with self._lock:
            self.read_bytes += memory.nbytes
        return True


_LOW = (1 << 64) - 1
