"""The ring through which pages that are in no memory pass: read from the store section by section while a step runs.

A step computes layer after layer, and needs of such a page only the section of the layer it is at. So the sections of
all these pages are read just ahead of it into one part of the ring while it computes on another, and the step sees
addresses. What it reads is what was written, checksums included: the bits are those of a page in memory.

Sections that follow each other lie side by side in a page, so one read takes several: a virtual NVMe drive that gives
0.5 GB/s in reads of 24 KiB (8 threads) gives 1.0 GB/s in reads of 96 KiB. That many sections are one *stage*.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tierd.tiers.errors import LostReason, PageLost, StagingLost
from tierd.tiers.links import Link
from tierd.tiers.mover import Job, JobClass, Mover
from tierd.tiers.page import PageKey
from tierd.tiers.records import Located
from tierd.tiers.store import Store
from tierd.tiers.store_io import Bytes, address_of, huge_block

READ_BYTES = 128 << 10  # of one page at a time, in whole sections
RING_STAGES = 2
GROUP_PAGES = 16  # read by one job: 2 MB at `READ_BYTES`, so that other reads wait a few milliseconds for a thread
MAX_GROUPS = 64  # jobs of one stage
CLOSE_WAIT_S = 30.0


class StagingStats(NamedTuple):
    """What has passed through a ring."""

    flows: int
    read_bytes: int
    waited_s: float  # that steps stood still for a section
    ring_bytes: int  # held now
    peak_bytes: int  # held at most


class Staging:
    """A ring and its memory, which is kept from step to step until `release`.

    Threading: the step thread alone calls it and its flow. Reads run as awaited jobs of the mover.

    Args:
        store: where the pages lie.
        mover: reads them.
        sections: of each page, as the store was opened with.
        section_bytes: of each.
        read_bytes: how much of one page a read takes, rounded down to whole sections, at least one.
        stages: parts of the ring, 2 or 3: with more, reads may run further ahead.
        clock: of the deadlines.
        allocate: makes the ring's parts, of so many bytes each.
    """

    def __init__(
        self,
        store: Store,
        mover: Mover,
        sections: int,
        section_bytes: int,
        *,
        read_bytes: int = READ_BYTES,
        stages: int = RING_STAGES,
        clock: Callable[[], float] = time.monotonic,
        allocate: Callable[[int], Bytes] = huge_block,
    ) -> None:
        if (store.geometry.sections, store.section_bytes) != (sections, section_bytes):
            raise ValueError(
                f"{sections} sections of {section_bytes} bytes; the store has {store.geometry.sections} of "
                f"{store.section_bytes}"
            )
        if stages < 2:
            raise ValueError(f"a ring of {stages} stages can't read ahead")
        self.store = store
        self.mover = mover
        self.sections = sections
        self.section_bytes = section_bytes
        self.stage_sections = min(max(1, read_bytes // section_bytes), sections)
        self.num_stages = -(-sections // self.stage_sections)
        self.ring_stages = min(stages, self.num_stages)
        self.span_bytes = store.span_bytes(self.stage_sections)
        self.stored_bytes = store.geometry.span_bytes(self.stage_sections)  # read of a page for a stage
        self.clock = clock
        self._allocate = allocate
        self._ring: list[Bytes] = []  # [pages * span_bytes] each
        self.known: dict[PageKey, Located] = {}  # the pages of the last flow: the next step needs most of them again
        self._flow: Flow | None = None
        self._flows = self._read_bytes = self._peak_bytes = 0
        self._waited_s = 0.0

    def __repr__(self) -> str:
        return f"<Staging: {self.num_stages} stages of {self.stage_sections} sections, {self.ring_bytes} bytes>"

    def bytes_for(self, num_pages: int) -> int:
        """Memory that a flow of so many pages takes."""
        return self.ring_stages * num_pages * self.span_bytes

    @property
    def ring_bytes(self) -> int:
        """Memory held now."""
        return sum(part.nbytes for part in self._ring)

    def statistics(self) -> StagingStats:
        """Counters since the start."""
        return StagingStats(self._flows, self._read_bytes, self._waited_s, self.ring_bytes, self._peak_bytes)

    def open(self, keys: Sequence[PageKey], overlap: bool = True) -> Flow:
        """Start reading these pages, for one step; to be closed, as a context manager.

        Args:
            keys: pages that stay in the store until the flow is closed.
            overlap: read ahead. Otherwise each stage is read when it is asked for.

        Raises ValueError when a flow is open.
        """
        if self._flow is not None:
            raise ValueError("the ring serves one flow at a time")
        self._reserve(len(keys))
        self._flows += 1
        self._flow = Flow(self, self._ring, keys, overlap)
        return self._flow

    def release(self) -> None:
        """Give the memory back. Raises ValueError while a flow is open."""
        if self._flow is not None:
            raise ValueError("a flow is open")
        self._ring = []
        self.known = {}

    def closed(self, at_rest: bool, known: dict[PageKey, Located], read_bytes: int, waited_s: float) -> None:
        """For the flow: it has ended. Memory that a stuck read may still fill is never used again."""
        self._flow = None
        self.known = known
        self._read_bytes += read_bytes
        self._waited_s += waited_s
        if not at_rest:
            self._ring = []

    def _reserve(self, num_pages: int) -> None:
        part_bytes = num_pages * self.span_bytes
        if self._ring and self._ring[0].nbytes >= part_bytes:
            return
        self._ring = []  # before the new one is there, for both may not fit
        self._ring = [self._allocate(part_bytes) for _ in range(self.ring_stages)] if num_pages else []
        self._peak_bytes = max(self._peak_bytes, self.ring_bytes)


class Flow:
    """The sections of some pages, in order. The reads of a stage start when the step is done with the one it replaces.

    Attributes:
        memories: what the addresses point into.
    """

    def __init__(self, staging: Staging, ring: Sequence[Bytes], keys: Sequence[PageKey], overlap: bool) -> None:
        """For `Staging.open`."""
        self.memories: list[npt.NDArray[np.uint8]] = list(ring)
        self._staging = staging
        self._keys = list(keys)
        self._overlap = overlap
        self._rows = [part[: len(keys) * staging.span_bytes].reshape(-1, staging.span_bytes) for part in ring]
        places = np.arange(len(keys), dtype=np.int64) * staging.span_bytes
        self._bases = [places + address_of(part) for part in ring]
        self._located: list[Located | PageLost | None] = [staging.known.get(key) for key in keys]  # None: by the jobs
        self._leads = [0] * staging.num_stages  # from the start of a row to its first section
        self._jobs: list[tuple[int, range, Job]] = []  # stage, pages, and their read; those that ended well are removed
        self._lost: dict[int, str] = {}  # pages, and why
        self._bad: dict[PageKey, PageLost] = {}  # those of them that the store has lost
        self._started = 0  # stages
        self._next = 0  # section
        self._closing = False
        self._read_bytes = 0
        self._waited_s = 0.0
        if overlap:
            self._start(staging.ring_stages)

    def section(self, index: int, deadline_s: float) -> npt.NDArray[np.int64]:
        """Where this section of every page lies: addresses in the order of the keys, valid until the next call.

        Sections are asked for one after the other, from 0. Raises StagingLost when one can't be read, or has not come
        at `deadline_s`; nothing more can be had from the flow then.
        """
        staging = self._staging
        if index != self._next or index >= staging.sections or self._closing:
            raise ValueError(f"section {index} was asked for where {self._next} of {staging.sections} is next")
        stage, number = divmod(index, staging.stage_sections)
        if not self._keys:
            self._next += 1
            return np.empty(0, dtype=np.int64)
        if number == 0:
            self._start(stage + staging.ring_stages if self._overlap else stage + 1)
            self._wait(stage, deadline_s)
        self._next += 1
        part = stage % staging.ring_stages
        addresses: npt.NDArray[np.int64] = self._bases[part] + (self._leads[stage] + number * staging.section_bytes)
        return addresses

    def close(self) -> None:
        """Cancel the reads that wait, and wait for those that run."""
        if self._closing:
            return
        self._closing = True
        mover = self._staging.mover
        running = [job for _, _, job in self._jobs if job.completion is None and not mover.cancel(job)]
        at_rest = mover.wait_for(running, CLOSE_WAIT_S)
        pages = zip(self._keys, self._located, strict=True)
        known = {key: where for key, where in pages if isinstance(where, Located)}
        self._staging.closed(at_rest, known, self._read_bytes, self._waited_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, end: int) -> None:
        """Submit the reads of all stages before `end` that are not yet."""
        staging = self._staging
        size = max(GROUP_PAGES, -(-len(self._keys) // MAX_GROUPS))
        for stage in range(self._started, min(end, staging.num_stages)):
            due_s = staging.clock()  # a step waits for it: before reads that have time
            for first in range(0, len(self._keys), size):
                pages = range(first, min(first + size, len(self._keys)))
                dest = self._rows[stage % staging.ring_stages][pages.start : pages.stop]
                read = partial(self._read, stage, pages, dest)
                job = Job(read, Link.DISK_READ, len(pages) * staging.stored_bytes, dest=dest, awaited=True)
                if not staging.mover.submit(job, JobClass.NOW, due_s):
                    self._lost |= dict.fromkeys(pages, "the queue of the disk is full")
                    return
                self._jobs.append((stage, pages, job))
            self._started = stage + 1

    def _read(self, stage: int, pages: range, dest: Bytes) -> list[tuple[int, PageLost]]:
        """Read one stage of some pages; which of them are lost. Runs on a thread of the mover.

        [pages, span_bytes]
        """
        store, located = self._staging.store, self._located
        first = stage * self._staging.stage_sections
        count = min(self._staging.stage_sections, self._staging.sections - first)
        if self._closing:
            return []
        unknown = [page for page in pages if located[page] is None]  # those of the first stage, or it runs right now
        for page, answer in zip(unknown, store.locate_many([self._keys[page] for page in unknown]), strict=True):
            located[page] = answer
        lost: list[tuple[int, PageLost]] = []
        found: list[tuple[int, Located]] = []
        for page in pages:
            match located[page]:
                case PageLost() as exc:
                    lost.append((page, exc))
                case Located() as where:
                    found.append((page, where))
        if lost:  # the step is given up anyway
            return lost
        self._leads[stage], ends = store.read_section_many([where for _, where in found], first, dest, count)
        for (page, where), line, end in zip(found, dest, ends, strict=True):
            if end is not None:
                read = partial(store.read_section, section=first, dest=line, count=count)
                again = self._read_again(page, where, end, read)
                lost += [(page, again)] if again is not None else []
        return lost

    def _read_again(
        self, page: int, where: Located, lost: PageLost, read: Callable[[Located], object]
    ) -> PageLost | None:
        """A page known from an earlier flow may have been written anew since: look it up and read it once more."""
        if lost.reason is not LostReason.ABSENT or self._staging.known.get(self._keys[page]) is not where:
            return lost
        try:
            found = self._staging.store.locate(self._keys[page])
            if found is None:
                return lost
            self._located[page] = found
            read(found)
        except PageLost as again:
            return again
        return None

    def _wait(self, stage: int, deadline_s: float) -> None:
        """Wait for a stage. Raises StagingLost with every page that is known to be lost by now."""
        staging = self._staging
        start_s = staging.clock()
        jobs = [job for at, _, job in self._jobs if at == stage]
        in_time = staging.mover.wait_for(jobs, max(0.0, deadline_s - start_s))
        self._waited_s += staging.clock() - start_s
        lost, left = self._lost, []
        for at, pages, job in self._jobs:
            done = job.completion
            if done is None:
                left.append((at, pages, job))
                if at == stage:
                    lost |= dict.fromkeys(pages, "not in time")
            elif done.error is not None:
                lost |= dict.fromkeys(pages, str(done.error))
            elif isinstance(done.result, list):
                lost |= {page: str(error) for page, error in done.result}
                self._bad |= {self._keys[page]: error for page, error in done.result}
                self._read_bytes += job.num_bytes
        self._jobs = left
        if lost or not in_time:
            raise StagingLost([self._keys[page] for page in sorted(lost)], lost[min(lost)], self._bad)
