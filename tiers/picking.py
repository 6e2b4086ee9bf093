"""Single sections of pages that are in no memory, read when a step asks for them: it has chosen what it needs only now.

Where all that a step needs is known beforehand, `staging` reads it ahead. What is chosen layer by layer is read here,
and the step waits. It is little: some pages of one layer. What is read is what was written, checksums included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from tierd.tiers.errors import LostReason, PageLost, StagingLost
from tierd.tiers.links import Link
from tierd.tiers.mover import Job, JobClass, Mover
from tierd.tiers.page import PageKey
from tierd.tiers.records import Located
from tierd.tiers.store import Store
from tierd.tiers.store_io import Bytes, address_of, huge_block

GROUP_PAGES = 16  # read by one job
MAX_BYTES = 256 << 20  # of sections that are kept
MAX_KNOWN = 65_536  # pages of which it is remembered where they lie
CLOSE_WAIT_S = 30.0


class Picker:
    """Threading: the step thread alone calls it. Reads run as awaited jobs of the mover.

    What was read is kept for a while, the last used the longest: most of it is chosen again by the next token. A key
    stands for what its page says, so what is kept is never out of date.

    Attributes:
        memory: what the addresses of the last `read` point into.
        read_bytes: since the start.

    Args:
        store: where the pages lie.
        mover: reads them.
        clock: of the deadlines.
        allocate: makes memory of so many bytes.
        max_bytes: what is kept takes at most, unless one `read` needs more.
    """

    def __init__(
        self, store: Store, mover: Mover, *, clock: Callable[[], float] = time.monotonic,
        allocate: Callable[[int], Bytes] = huge_block, max_bytes: int = MAX_BYTES,
    ) -> None:  # fmt: skip
        self.memory: Bytes = np.empty(0, np.uint8)
        self.read_bytes = 0
        self._store = store
        self._mover = mover
        self._sections, self._section_bytes = store.geometry.sections, store.section_bytes
        self._slot_bytes = -(-self._section_bytes // 64) * 64
        self._clock = clock
        self._allocate = allocate
        self._max_bytes = max_bytes
        self._known: dict[PageKey, Located] = {}  # pages of this step and of those before
        self._slots: dict[tuple[PageKey, int], int] = {}  # of sections that are kept, the last used last
        self._free: list[int] = []
        self._target: Bytes = np.empty(0, np.uint8)  # what reads fill

    def read(self, keys: Sequence[PageKey], section: int, deadline_s: float) -> npt.NDArray[np.int64]:
        """Where this section of each page lies, valid until the next call. Raises StagingLost.

        Args:
            keys: pages that stay in the store meanwhile; each once.
            section: which.
            deadline_s: when the wait is given up.
        """
        self._reserve(len(keys))
        missing = []
        for key in keys:
            if (slot := self._slots.pop((key, section), None)) is None:
                missing.append(key)
            else:
                self._slots[key, section] = slot
        if missing:
            lead, rows = self._fetch(missing, section, deadline_s)
            slots = self.memory.reshape(-1, self._slot_bytes)
            for key, row in zip(missing, rows, strict=True):
                slot = self._free.pop() if self._free else self._slots.pop(next(iter(self._slots)))
                slots[slot, : self._section_bytes] = row[lead : lead + self._section_bytes]
                self._slots[key, section] = slot
        places = np.array([self._slots[key, section] for key in keys], np.int64)
        return address_of(self.memory) + places * self._slot_bytes

    def release(self) -> None:
        """Gives the memory back."""
        self.memory = self._target = np.empty(0, np.uint8)
        self._known, self._slots, self._free = {}, {}, []

    def _reserve(self, pages: int) -> None:
        """Room for what two steps choose, in all layers, as far as that is allowed."""
        wanted = 2 * pages * self._sections
        slots = max(min(wanted, self._max_bytes // self._slot_bytes), pages)
        if slots * self._slot_bytes > len(self.memory):
            self.memory = np.empty(0, np.uint8)  # before the new one is there, for both may not fit
            self.memory, self._slots = self._allocate(slots * self._slot_bytes), {}
            self._free = list(range(slots))
        if len(self._known) > MAX_KNOWN:
            self._known = {}

    def _fetch(self, keys: Sequence[PageKey], section: int, deadline_s: float) -> tuple[int, Bytes]:
        """Reads a section of some pages: rows, and where in each it starts. Raises StagingLost."""
        span_bytes, stored_bytes = self._store.span_bytes(1), self._store.geometry.span_bytes(1)
        if len(self._target) < len(keys) * span_bytes:
            self._target = self._allocate(len(keys) * span_bytes)
        rows = self._target[: len(keys) * span_bytes].reshape(-1, span_bytes)
        jobs: list[Job] = []
        lost: dict[PageKey, str] = {}
        for first in range(0, len(keys), GROUP_PAGES):
            group, dest = keys[first : first + GROUP_PAGES], rows[first : first + GROUP_PAGES]
            read = partial(self._read, group, section, dest)
            job = Job(read, Link.DISK_READ, len(group) * stored_bytes, dest=dest, awaited=True)
            if not self._mover.submit(job, JobClass.NOW, self._clock()):
                lost |= dict.fromkeys(keys[first:], "the queue of the disk is full")
                break
            jobs.append(job)
        self._await(jobs, deadline_s)
        bad: dict[PageKey, PageLost] = {}
        lead = 0
        for number, job in enumerate(jobs):
            group, done = keys[number * GROUP_PAGES : (number + 1) * GROUP_PAGES], job.completion
            if done is None or done.error is not None:
                lost |= dict.fromkeys(group, "not in time" if done is None else str(done.error))
            elif isinstance(done.result, tuple):
                lead, missed = done.result
                bad |= missed
                self.read_bytes += job.num_bytes
        lost |= {key: str(error) for key, error in bad.items()}
        if lost:
            raise StagingLost([key for key in keys if key in lost], next(iter(lost.values())), bad)
        return lead, rows

    def _await(self, jobs: Sequence[Job], deadline_s: float) -> None:
        if self._mover.wait_for(jobs, max(0.0, deadline_s - self._clock())):
            return
        running = [job for job in jobs if job.completion is None and not self._mover.cancel(job)]
        if not self._mover.wait_for(running, CLOSE_WAIT_S):
            self._target = np.empty(0, np.uint8)  # memory that a stuck read may still fill is never used again

    def _read(self, keys: Sequence[PageKey], section: int, dest: Bytes) -> tuple[int, dict[PageKey, PageLost]]:
        """Reads into rows of `dest` [pages, span_bytes]; where in each the section starts, and which pages are lost.
        Runs on a thread of the mover."""
        store, remembered = self._store, {key: self._known[key] for key in keys if key in self._known}
        missing = [key for key in keys if key not in remembered]
        lost: dict[PageKey, PageLost] = {}
        for key, answer in zip(missing, store.locate_many(missing), strict=True):
            if isinstance(answer, PageLost):
                lost[key] = answer
            else:
                self._known[key] = answer
        if lost:  # the step is given up anyway
            return 0, lost
        lead, ends = store.read_section_many([self._known[key] for key in keys], section, dest)
        for key, line, end in zip(keys, dest, ends, strict=True):
            if end is not None and (again := self._read_again(key, section, line, end, remembered)) is not None:
                lost[key] = again
        return lead, lost

    def _read_again(
        self, key: PageKey, section: int, dest: Bytes, end: PageLost, remembered: dict[PageKey, Located]
    ) -> PageLost | None:
        """A page known from an earlier call may have been written anew since: look it up and read it once more."""
        self._known.pop(key, None)
        if end.reason is not LostReason.ABSENT or key not in remembered:
            return end
        try:
            found = self._store.locate(key)
            if found is None:
                return end
            self._store.read_section(found, section, dest)
        except PageLost as again:
            return again
        self._known[key] = found
        return None
