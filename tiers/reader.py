"""Reads of the store: look up, read, check, and what a failed check means for the page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tierd.tiers.aio import MAX_BATCH
from tierd.tiers.errors import LostReason, PageLost, StoreError
from tierd.tiers.index import Row
from tierd.tiers.opening import OpenStore
from tierd.tiers.page import PageKey
from tierd.tiers.records import Located, Records, check_dest
from tierd.tiers.store_io import ALIGN_BYTES, Bytes
from tierd.tiers.store_stats import StoreTally

T = TypeVar("T")


class Owner(Protocol):
    """What a reader needs of its store."""

    @property
    def failure(self) -> str: ...
    def turn_off(self, reason: str, cause: StoreError | None = None) -> None: ...
    def drop(self, row: Row, lost: PageLost) -> bool: ...


class Reader:
    """The reads of one open store. Any thread, several at once. See `Store` for what the methods mean.

    Args:
        lock: held by whoever changes the store.
        owner: hears of pages that failed, and of a store that is of no use any more.
    """

    def __init__(
        self, parts: OpenStore, records: Records, tally: StoreTally, lock: threading.RLock, owner: Owner
    ) -> None:
        self._directory = parts.directory
        self._index = parts.index
        self._slabs = parts.slabs
        self._geometry = parts.slabs.geometry
        self._slot_bytes = parts.slabs.geometry.slot_bytes
        self._records = records
        self._tally = tally
        self._lock = lock
        self._owner = owner

    def read_into(self, key: PageKey, dest: Bytes) -> None:
        """See `Store.read_into`."""
        check_dest(dest, self._geometry.record_bytes, exact=True)
        self._read_row(key, lambda row: self._records.read(row, dest), self._slot_bytes, pages=1)

    def read_many(self, keys: Sequence[PageKey], dests: Sequence[Bytes]) -> list[PageLost | None]:
        """See `Store.read_many`. Whatever is not right at once goes the way of a single page, which finds out why."""
        for dest in dests:
            check_dest(dest, self._geometry.record_bytes, exact=True)
        right: set[int] = set()
        try:
            self._enter()
        except PageLost as off:
            return [off] * len(keys)
        try:
            rows = self._lookup(keys)
            pages = enumerate(zip(keys, dests, strict=True))
            known = [(number, rows[key], dest) for number, (key, dest) in pages if key in rows]
            for part in _batches(len(known)):
                chunk = known[part]
                found = self._records.read_batch([row for _, row, _ in chunk], [dest for _, _, dest in chunk])
                right |= {number for (number, _, _), good in zip(chunk, found, strict=True) if good}
            if not self._slabs.are_linked([row.slot for row in rows.values()]):
                right.clear()
        finally:
            self._tally.leave(len(right) * self._slot_bytes, pages=len(right))
        return [None if number in right else self._lost(keys[number], dests[number]) for number in range(len(keys))]

    def locate_many(self, keys: Sequence[PageKey]) -> list[Located | PageLost]:
        """See `Store.locate_many`."""
        if not keys:
            return []
        located: dict[bytes, Located] = {}
        try:
            self._enter()
        except PageLost as off:
            return [off] * len(keys)
        try:
            rows = self._lookup(keys)
            wanted = list(rows.values())
            for part in _batches(len(wanted)):
                batch = self._records.locate_batch(wanted[part])
                located |= {found.row.key: found for found in batch if found is not None}
            if not self._slabs.are_linked([row.slot for row in rows.values()]):
                located.clear()
        finally:
            self._tally.leave(len(located) * self._geometry.header_bytes)
        return [located[key] if key in located else self._located(key) for key in keys]

    def read_section_many(
        self, pages: Sequence[Located], section: int, dest: Bytes, count: int
    ) -> tuple[int, list[PageLost | None]]:
        """See `Store.read_section_many`."""
        span_bytes = self._geometry.span_bytes(count)
        fits = dest.ndim == 2 and dest.shape[1] >= span_bytes and not dest.shape[1] % ALIGN_BYTES
        if not fits or len(dest) != len(pages):
            raise ValueError(f"dest is {dest.dtype}{dest.shape}, for {len(pages)} pages of {span_bytes} bytes")
        check_dest(dest.reshape(-1), dest.nbytes)
        start = self._records.section_start(section, count)
        right: list[bool] = []
        try:
            self._enter()
        except PageLost as off:
            return start, [off] * len(pages)
        try:
            for part in _batches(len(pages)):
                right += self._records.read_sections_batch(pages[part], section, count, dest[part])
        finally:
            self._tally.leave(sum(right) * span_bytes, sections=sum(right))
        lost = [
            None if good else self._lost_section(page, section, line, count)
            for page, line, good in zip(pages, dest, right, strict=True)
        ]
        return start, lost

    def locate(self, key: PageKey) -> Located | None:
        """See `Store.locate`."""
        try:
            return self._read_row(key, self._records.locate, self._geometry.header_bytes, pages=0)
        except PageLost as lost:
            if lost.reason is LostReason.ABSENT:
                return None
            raise

    def read_section(self, located: Located, section: int, dest: Bytes, count: int) -> int:
        """See `Store.read_section`."""
        span_bytes = self._geometry.span_bytes(count)
        check_dest(dest, span_bytes)
        self._enter()
        passed_bytes = 0
        try:
            start = self._records.read_sections(located, section, count, dest)
            passed_bytes = span_bytes
        except PageLost as lost:
            if not self._owner.drop(located.row, lost):
                raise PageLost(LostReason.ABSENT, "removed or rewritten since it was located") from lost
            raise
        finally:
            self._tally.leave(passed_bytes, sections=passed_bytes > 0)
        return start

    def _enter(self) -> None:
        """Keep the files open for a read, up to `_tally.leave`. Raises PageLost when the store is off."""
        if self._owner.failure or not self._tally.enter():
            raise PageLost(LostReason.STORE_OFF, self._owner.failure)

    def _lost(self, key: PageKey, dest: Bytes) -> PageLost | None:
        try:
            self.read_into(key, dest)
        except PageLost as lost:
            return lost
        return None

    def _located(self, key: PageKey) -> Located | PageLost:
        try:
            return self.locate(key) or PageLost(LostReason.ABSENT)
        except PageLost as lost:
            return lost

    def _lost_section(self, page: Located, section: int, dest: Bytes, count: int) -> PageLost | None:
        try:
            self.read_section(page, section, dest, count)
        except PageLost as lost:
            return lost
        return None

    def _read_row(self, key: PageKey, read: Callable[[Row], T], num_bytes: int, *, pages: int) -> T:
        """Look a page up, read something of it and count that. Raises PageLost."""
        self._enter()
        found = None
        try:
            found = self._read_once(key, read)
            if found is None:
                # The owner removed or rewrote the page while we read: no fault of the slot. Again, without writers.
                with self._lock:
                    found = self._read_once(key, read)
        finally:
            self._tally.leave(num_bytes if found else 0, pages=pages if found else 0)
        if found is None:
            raise PageLost(LostReason.ABSENT)
        return found[0]

    def _read_once(self, key: PageKey, read: Callable[[Row], T]) -> tuple[T] | None:
        """What was read, or None if the row went away meanwhile. Raises PageLost."""
        try:
            row = self._index.lookup(key)
        except StoreError as exc:
            self._owner.turn_off(str(exc), exc)
            row = None
        if row is None:
            raise PageLost(LostReason.STORE_OFF if self._owner.failure else LostReason.ABSENT)
        try:
            result = read(row)
        except PageLost as lost:
            self._require_linked(row.slot)
            if self._owner.drop(row, lost):
                raise
            return None
        self._require_linked(row.slot)
        return (result,)

    def _lookup(self, keys: Sequence[PageKey]) -> dict[bytes, Row]:
        try:
            return self._index.lookup_many(keys)
        except StoreError:
            return {}  # the single page meets it again, and turns the store off

    def _require_linked(self, slot: int) -> None:
        """Turn the store off and raise PageLost when the slot's file was deleted: its owner wanted the pages gone."""
        if not self._slabs.are_linked([slot]):
            self._owner.turn_off(f"the slab files in {self._directory} were removed")
            raise PageLost(LostReason.STORE_OFF, self._owner.failure)


def _batches(count: int) -> list[slice]:
    return [slice(first, first + MAX_BATCH) for first in range(0, count, MAX_BATCH)]
