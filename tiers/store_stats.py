"""What a store counts: what it did, and the reads that are going on."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from tierd.tiers.errors import LostReason
from tierd.tiers.page import PageKey
from tierd.tiers.slab import Slabs


class Verified(NamedTuple):
    """What a look at some stored pages has found."""

    keys: list[PageKey]  # of all of them
    findings: list[str]
    removed: list[PageKey]
    last_slot: int


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Figures of a store since it was opened; slots as they are now."""

    capacity_slots: int
    used_slots: int
    free_slots: int
    quarantined_slots: int
    slot_bytes: int
    disk_bytes: int  # what the slab files take, used or not
    pages_written: int
    bytes_written: int  # to slab files: headers and padding included, the index not
    pages_read: int  # whole ones
    section_reads: int  # reads of one or more sections of a page
    bytes_read: int  # from slab files, of reads that passed their checks
    syncs: int  # fdatasync of slab files
    commits: int  # index transactions
    lost_pages: int  # pages that failed a check or could not be read, and became a miss
    lost_by_reason: dict[str, int]  # the same by `LostReason`
    grow_refusals: int
    direct_io: bool
    failure: str  # why the store is off, empty while it works


class StoreTally:
    """The counters of a store beside those of its slabs. Thread-safe: several threads read at once.

    It counts the reads in progress, too, so that no descriptor is closed under one: its number could be another file's.
    """

    def __init__(self, slabs: Slabs) -> None:
        self.pages_written = 0
        self.commits = 0
        self.pages_read = 0
        self.section_reads = 0
        self.bytes_read = 0
        self.lost: Counter[str] = Counter()
        self._slabs = slabs
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._readers = 0
        self._closed = False

    def enter(self) -> bool:
        """Begin a read, to be ended with `leave`; False when the store is being closed."""
        with self._lock:
            if not self._closed:
                self._readers += 1
            return not self._closed

    def leave(self, num_bytes: int = 0, *, pages: int = 0, sections: int = 0) -> None:
        """End a read, and count what passed its checks."""
        with self._lock:
            self._readers -= 1
            self.bytes_read += num_bytes
            self.pages_read += pages
            self.section_reads += sections
            if self._closed and not self._readers:
                self._idle.notify_all()

    def close(self, wait_s: float) -> int:
        """Let no read begin and wait for those in progress; returns how many still are: reads may begin again then."""
        with self._lock:
            self._closed = True
            self._closed = self._idle.wait_for(lambda: not self._readers, wait_s)
            return self._readers

    def commit(self, pages_written: int = 0) -> None:
        """The index committed a change, perhaps with new pages."""
        with self._lock:
            self.commits += 1
            self.pages_written += pages_written

    def lose(self, reason: LostReason) -> None:
        """A page is lost."""
        with self._lock:
            self.lost[reason] += 1

    def statistics(self, failure: str) -> StoreStatistics:
        """Figures of now; not one snapshot when a write is in progress."""
        slabs, lost = self._slabs, dict(self.lost)
        return StoreStatistics(
            capacity_slots=slabs.capacity_slots,
            used_slots=slabs.used,
            free_slots=slabs.free_slots,
            quarantined_slots=slabs.quarantined,
            slot_bytes=slabs.geometry.slot_bytes,
            disk_bytes=slabs.backed_bytes,
            pages_written=self.pages_written,
            bytes_written=self.pages_written * slabs.geometry.slot_bytes,
            pages_read=self.pages_read,
            section_reads=self.section_reads,
            bytes_read=self.bytes_read,
            syncs=slabs.syncs,
            commits=self.commits,
            lost_pages=sum(lost.values()),
            lost_by_reason=lost,
            grow_refusals=slabs.grow_refusals,
            direct_io=slabs.direct,
            failure=failure,
        )
