"""Stand-ins for what a pager works with: a mover that runs when told, a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierd.tiers.errors import LostReason, PageLost, StoreFull
from tierd.tiers.links import LinkGroup
from tierd.tiers.mover import Job, Mover, _Entry
from tierd.tiers.page import PageKey
from tierd.tiers.store import PageMeta, Store, Verified


class ManualMover(Mover):
    """No threads: a job runs when the test says so, in the order the test says (the store's in their own order)."""

    def _start(self, counts: dict[LinkGroup, int]) -> list[threading.Thread]:
        return []

    @property
    def queued(self) -> int:
        """Jobs that could run now; of the writer's only the first."""
        return len(self._runnable())

    def run(self, number: int = 0) -> bool:
        """Runs the number-th of the jobs that could run; False if there is none."""
        entries = self._runnable()
        if number >= len(entries):
            return False
        job = entries[number].job
        self._lanes[job.link.group].remove(job)
        self._meters[job.link].begin(self._clock(), 0.0)
        self._run(job)
        return True

    def run_all(self) -> int:
        """Runs everything queued."""
        count = 0
        while self.run():
            count += 1
        return count

    def wait(self, timeout_s: float) -> bool:
        """The caller would sleep: the threads would work meanwhile."""
        self.run_all()
        return bool(self._done)

    def wait_for(self, jobs: Iterable[Job], timeout_s: float) -> bool:
        """The caller would sleep: the threads would work meanwhile."""
        self.run_all()
        return super().wait_for(jobs, 0.0)

    def _runnable(self) -> list[_Entry]:
        lanes = self._lanes
        free = sorted(lanes[LinkGroup.COPIES].entries + lanes[LinkGroup.DISK_READS].entries)
        return free + sorted(lanes[LinkGroup.DISK_WRITES].entries)[:1]


class MemoryStore(Store):
    """Durable pages in a dictionary, with faults on demand. It lives on when its pager is gone: that is a restart."""

    def __init__(self, capacity: int = 1000) -> None:
        self.notes = []
        self.capacity = capacity
        self.rows: dict[PageKey, tuple[PageMeta, bytes]] = {}
        self.reads: list[PageKey] = []
        self.groups: list[int] = []
        self.fail_write: Exception | None = None
        self.no_room: Exception | None = None
        self.fail_read: Callable[[PageKey], Exception | None] = lambda _key: None
        self.before_read: Callable[[npt.NDArray[np.uint8]], None] = lambda _dest: None

    @property
    def capacity_slots(self) -> int:
        return self.capacity

    @property
    def quarantined_slots(self) -> int:
        return 0

    @property
    def free_slots(self) -> int:
        return self.capacity - len(self.rows)

    def pages(self) -> Iterator[PageMeta]:
        yield from [meta for meta, _ in self.rows.values()]

    def write(self, batch: Sequence[tuple[PageMeta, Any]]) -> None:
        if self.fail_write is not None:
            raise self.fail_write
        new = sum(meta.key not in self.rows for meta, _ in batch)
        if len(self.rows) + new > self.capacity:
            raise StoreFull("the test's store is full")
        self.groups.append(len(batch))
        for meta, row in batch:
            self.rows[meta.key] = (meta, bytes(row))

    def require_room(self) -> None:
        if self.no_room is not None:
            raise self.no_room

    def read_into(self, key: PageKey, dest: npt.NDArray[np.uint8]) -> None:
        self.reads.append(key)
        self.before_read(dest)
        error = self.fail_read(key)
        if error is not None:
            if isinstance(error, PageLost):
                self.rows.pop(key, None)
            raise error
        if key not in self.rows:
            raise PageLost(LostReason.ABSENT)
        dest[:] = np.frombuffer(self.rows[key][1], np.uint8)

    def read_many(
        self, keys: Sequence[PageKey], dests: Sequence[npt.NDArray[np.uint8]]
    ) -> list[PageLost | None]:
        found: list[PageLost | None] = []
        for key, dest in zip(keys, dests, strict=True):
            try:
                self.read_into(key, dest)
                found.append(None)
            except PageLost as lost:
                found.append(lost)
        return found

    def remove(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self.rows.pop(key, None)

    def touch(self, usage: Mapping[PageKey, tuple[int, float]]) -> None:
        for key, (hits, last_use_s) in usage.items():
            if key not in self.rows:
                continue
            meta, record = self.rows[key]
            self.rows[key] = (PageMeta(meta.key, meta.parent, meta.tokens, hits, last_use_s), record)

    def clear(self) -> None:
        self.rows.clear()

    def gc(self) -> int:
        return 0

    def inspect(self, repair: bool) -> list[str]:
        return []

    def verify_pages(self, after_slot: int, count: int, repair: bool) -> Verified:
        """A row's place in the dictionary is its slot."""
        keys = list(self.rows)[after_slot + 1 : after_slot + 1 + count]
        return Verified(keys, [], [], after_slot + len(keys))

    def missing(self, keys: Sequence[PageKey]) -> list[PageKey]:
        return [key for key in keys if key not in self.rows]

    def close(self) -> None:
        pass
