"""The NVMe tier: pages that outlive the process, in slab files with an index.

Order of a write: header and record with one aligned write, fdatasync for the group, then the index rows in one
transaction. Order of a removal: the row, then the slot. So a row never names bytes that are not durable, and opening
after a crash is the ordinary opening: it reads the index and no page.

What a power cut leaves behind is harmless by construction: a slot without a row is free space, and a slot that was
overwritten while an old row survived holds another key and generation than the row, which the read finds out.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

from tierd.tiers.errors import PageLost, StoreBroken, StoreError, StoreFull
from tierd.tiers.index import PageMeta, Row, is_damage
from tierd.tiers.opening import OpenStore, open_store
from tierd.tiers.page import PageKey
from tierd.tiers.reader import Reader
from tierd.tiers.records import Located, Records, pack_page
from tierd.tiers.slot import FILE_BYTES, STEP_BYTES, SlotGeometry
from tierd.tiers.store_io import Buffer, Bytes, OsIO, StoreIO, aligned_block, is_full
from tierd.tiers.store_stats import StoreStatistics, StoreTally, Verified

T = TypeVar("T")

__all__ = ["Located", "PageMeta", "Store", "StoreStatistics", "Verified"]

CLOSE_WAIT_S = 10.0


class Store:
    """Durable pages of one namespace in one directory.

    Notes:
        `read_into`, `locate` and `read_section` may run in any thread, several at once, also while another thread
        writes. The other methods take one lock: they are safe from any thread, but wait for a write in progress, so
        call them from the thread that writes. `touch`, `free_slots` and `statistics` never wait.

        After a failed sync, a failed index or a directory that went away the store is *off*: writes raise StoreBroken,
        reads are misses. Nothing is retried: a failed fdatasync may have dropped what it was to write. Opening it again
        starts from what is durable.
    """

    def __init__(self, parts: OpenStore, namespace: bytes) -> None:
        """For `open`: takes over the open parts."""
        self.notes: list[str] = parts.notes
        self._parts = parts
        self._index = parts.index
        self._slabs = parts.slabs
        self._records = Records(parts.slabs, namespace)
        self._tally = StoreTally(parts.slabs)
        self.geometry = parts.slabs.geometry
        self._next_generation = parts.index.opens << 32  # a generation is never used twice, crash or not
        self._lock = threading.RLock()
        self._failure = ""
        self._closed = False
        self._reader = Reader(parts, self._records, self._tally, self._lock, self)

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        record_bytes: int,
        namespace: bytes,
        capacity_bytes: int,
        sections: int = 1,
        section_bytes: int = 0,
        min_free_bytes: int = 0,
        io: StoreIO | None = None,
        file_bytes: int = FILE_BYTES,
        step_bytes: int = STEP_BYTES,
    ) -> Self:
        """Open the store of a directory, or make one.

        Args:
            record_bytes: bytes of every page.
            namespace: 16 bytes that stand for everything that makes pages comparable.
            capacity_bytes: bound of the slab files. The index comes on top, about 250 bytes a page.
            sections, section_bytes: equal parts of a record that `read_section` reads alone; if not given, one of all.
            min_free_bytes: what growing must leave free on the file system.
            file_bytes: bound of one slab file. A store keeps what it was made with; another value starts afresh.
            step_bytes: how much of a slab file is preallocated at a time.

        A damaged index, or one of another version, namespace or size, is set aside; `notes` says so. Raises StoreLocked
        when another process has it open, StoreBroken when the directory or the disk can't be used, ValueError.
        """
        if len(namespace) != 16:
            raise ValueError(f"a namespace is 16 bytes, not {len(namespace)}")
        parts = open_store(
            OsIO() if io is None else io,
            directory,
            SlotGeometry(record_bytes, file_bytes, step_bytes, sections, section_bytes),
            namespace=namespace,
            capacity_bytes=capacity_bytes,
            min_free_bytes=min_free_bytes,
        )
        return cls(parts, namespace)

    def pages(self) -> Iterator[PageMeta]:
        """Every durable page, in no particular order of parents and children. Reads the index only."""
        with self._lock:
            self._require_usable()
            with self._guard([]):
                self._index.flush_touches()
        yield from self._index.metas()

    def write(self, batch: Sequence[tuple[PageMeta, Buffer]]) -> None:
        """Store pages; all are durable when this returns, none is visible when it raises.

        A page whose key is stored already is replaced. Records on 4096-byte boundaries are written as they lie, others
        through a copy. Raises StoreFull (nothing changed, the store goes on), StoreBroken (it is off from now on) and
        ValueError for a page that can't be one.
        """
        packed = [pack_page(meta, record, self.geometry.record_bytes) for meta, record in batch]
        if len({meta.key for meta, _, _ in packed}) != len(packed):
            raise ValueError("a key stands in the batch twice")
        if not packed:
            return
        with self._lock:
            self._require_present()
            slots: list[int] = []
            rows: list[tuple[Row, PageMeta]] = []
            with self._guard(slots):
                slots += self._slabs.allocate(len(packed))
                for slot, (meta, tokens, record) in zip(slots, packed, strict=True):
                    row = Row(slot, meta.key, meta.parent, tokens, self._next_generation)
                    self._next_generation += 1
                    self._records.write(row, record)
                    rows.append((row, meta))
                self._slabs.sync(slots)
                replaced = self._index.add(rows)
            self._slabs.mark_used(slots)
            self._slabs.release(replaced)
            self._tally.commit(pages_written=len(slots))
            # Files that somebody deleted took the pages with them: don't call them durable.
            self._require_present(slots)

    def read_into(self, key: PageKey, dest: Bytes) -> None:
        """Copy a page into dest and verify it. uint8[record_bytes]

        Raises PageLost for whatever is wrong. Then dest is of no use, and the page is gone unless the store is off.
        """
        self._reader.read_into(key, dest)

    def read_many(self, keys: Sequence[PageKey], dests: Sequence[Bytes]) -> list[PageLost | None]:
        """Do what `read_into` does for each page, with less work; what that would raise, None for a page that is right.

        A few pages at a time, so that there are some for other threads: uint8[record_bytes] each.
        """
        return self._reader.read_many(keys, dests)

    def locate(self, key: PageKey) -> Located | None:
        """Look a page up and check its header, for `read_section`; None when there is no such page.

        It stays readable until the page is removed or rewritten: the caller keeps it. Raises PageLost.
        """
        return self._reader.locate(key)

    def read_section(self, located: Located, section: int, dest: Bytes, count: int = 1) -> int:
        """Read one section of a page, or `count` of them that follow each other, and verify them.

        O_DIRECT reads whole blocks, so dest is an aligned uint8[span_bytes(count)] or more; returns where in it the
        first section starts. Raises PageLost, ABSENT if the page was removed or rewritten.
        """
        return self._reader.read_section(located, section, dest, count)

    def locate_many(self, keys: Sequence[PageKey]) -> list[Located | PageLost]:
        """Do what `locate` does for each page, with less work; ABSENT for pages that there are not."""
        return self._reader.locate_many(keys)

    def read_section_many(
        self, pages: Sequence[Located], section: int, dest: Bytes, count: int = 1
    ) -> tuple[int, list[PageLost | None]]:
        """Do what `read_section` does for each page, with less work: where the section starts, and what is wrong.

        dest: an aligned uint8[n, span_bytes(count) or more whole blocks], a row for each page.
        """
        return self._reader.read_section_many(pages, section, dest, count)

    @property
    def section_bytes(self) -> int:
        """Bytes of a section as `read_section` gives it."""
        return self.geometry.section_bytes

    def span_bytes(self, count: int) -> int:
        """Bytes of the aligned buffer that `read_section` needs for `count` sections."""
        return self.geometry.span_bytes(count)

    def remove(self, keys: Iterable[PageKey]) -> None:
        """Forget pages; unknown keys are skipped. Durable when this returns. Raises StoreFull, StoreBroken."""
        with self._lock:
            self._slabs.release(self._change(lambda: self._index.remove(keys)))

    def touch(self, usage: Mapping[PageKey, tuple[int, float]]) -> None:
        """Note (hits, last_use_s) of pages. Kept in memory until the next commit, so a crash may forget it."""
        self._index.touch(usage)

    def clear(self) -> None:
        """Forget every page, give the disk space back, leave no token in the index. Raises StoreFull, StoreBroken."""
        with self._lock:
            self._slabs.release(self._change(self._index.clear))
            with self._guard([]):
                self._slabs.shrink()
            self._change(self._index.compact)

    def require_room(self) -> None:
        """Raise StoreFull unless the file system has what changes of the index may need, StoreBroken as writes do."""
        with self._lock:
            self._change(self._slabs.require_room)

    def gc(self) -> int:
        """Give back disk space that nothing uses; returns bytes of slab files. Raises StoreFull, StoreBroken."""
        with self._lock:
            self._change(self._index.compact)
            self._parts.remove_aside()
            with self._guard([]):
                return self._slabs.shrink()

    def inspect(self, repair: bool) -> list[str]:
        """Findings of `check`. With `repair` the look-up by key is made anew if there are any."""
        findings = self.check()
        if repair and findings:
            with self._lock, self._guard([]):
                self._index.rebuild()
        return findings

    def verify_pages(self, after_slot: int, count: int, repair: bool) -> Verified:
        """Read and check the next pages by slot, no more than so many. With `repair` those that fail are removed.

        Any thread, beside all other work. Raises StoreBroken when the store is off, or goes off meanwhile.
        """
        dest = aligned_block(self._slabs.geometry.slot_bytes)[: self.geometry.record_bytes]
        with self._lock:
            self._require_usable()
            with self._guard([]):
                rows = self._index.rows_after(after_slot, count)
        found = Verified([PageKey(row.key) for row in rows], [], [], rows[-1].slot if rows else max(after_slot, 0))
        for row in rows:
            with self._lock:  # for one page at a time, so that writes get their turn
                self._require_usable()
                if self._index.lookup(row.key) != row:
                    continue  # removed or rewritten since its row was read
                try:
                    self._records.read(row, dest)
                except PageLost as lost:
                    found.findings.append(f"page {row.key.hex()} in slot {row.slot}: {lost}")
                    if repair and self.drop(row, lost):
                        found.findings[-1] += "; removed"
                        found.removed.append(PageKey(row.key))
        return found

    def missing(self, keys: Sequence[PageKey]) -> list[PageKey]:
        """Which of these pages the store has not. Any thread; never waits for a write. Raises StoreBroken."""
        self._require_usable()
        try:
            known = self._index.lookup_many(keys)
        except StoreError as exc:
            self.turn_off(str(exc), exc)
            raise
        return [key for key in keys if key not in known]

    def check(self) -> list[str]:
        """Findings of a look at the ledger and the index; empty when right. Reads no page. Raises StoreBroken."""
        with self._lock:
            self._require_present()
            with self._guard([]):
                findings = self._slabs.check() + self._index.check()
                slots = self._index.slots().tolist()
            if set(slots) != self._slabs.used_slots():
                findings.append(f"the index has {len(slots)} rows, not in the {self._slabs.used} slots in use")
            if self._slabs.reserved:
                findings.append(f"{self._slabs.reserved} slots are reserved at rest")
            return findings

    @property
    def capacity_slots(self) -> int:
        """Pages that the store can hold."""
        return self._slabs.capacity_slots

    @property
    def quarantined_slots(self) -> int:
        """Slots that are not used again before the store is reopened."""
        return self._slabs.quarantined

    @property
    def free_slots(self) -> int:
        """Pages that still fit, if the file system has the space."""
        return self._slabs.free_slots

    def statistics(self) -> StoreStatistics:
        """Figures of now."""
        return self._tally.statistics(self._failure)

    def close(self) -> None:
        """Wait for the reads in progress, then release everything. Harmless when closed."""
        if self._closed:
            return
        readers = self._tally.close(CLOSE_WAIT_S)
        if readers:
            raise StoreBroken(f"{readers} reads did not end in {CLOSE_WAIT_S} s; the store stays open")
        with self._lock:
            self._closed = True
            if not self._failure:
                with contextlib.suppress(StoreError):
                    self._index.flush_touches()
            self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_usable(self) -> None:
        if self._closed:
            raise StoreBroken("the store is closed")
        if self._failure:
            raise StoreBroken(self._failure)

    def _require_present(self, slots: Sequence[int] = ()) -> None:
        """Raise StoreBroken when the store is off, or when its directory or files were removed or replaced."""
        self._require_usable()
        if not self._parts.is_present() or not self._slabs.are_linked(slots):
            raise self._fail(f"{self._parts.directory} was removed or replaced", ())

    @property
    def failure(self) -> str:
        """Why the store is off; empty while it works."""
        return self._failure

    def turn_off(self, reason: str, cause: StoreError | None = None) -> None:
        """For the reader: what it found means that nothing more can be read or written."""
        with self._lock:
            self._fail(reason, (), cause)

    def _fail(self, reason: str, slots: Iterable[int], cause: StoreError | None = None) -> StoreBroken:
        """Turn the store off; returns the error to raise. Slots in flight are set aside with it."""
        self._slabs.quarantine(slots)
        if isinstance(cause, StoreBroken) and is_damage(cause):
            # Opening looks less closely than the query that stumbled: without this it would stumble there each time.
            self._parts.set_aside()
        place = str(self._parts.directory)
        where = reason if place in reason else f"{reason} ({place})"
        self._failure = f"{where}; it is on again when the model is loaded anew: `tierd unload MODEL`, then ask"
        self.notes.append(self._failure)
        return StoreBroken(self._failure)

    @contextlib.contextmanager
    def _guard(self, slots: list[int]) -> Iterator[None]:
        """Turn what goes wrong into StoreFull with the reserved slots freed, or StoreBroken with the store off."""
        try:
            yield
        except StoreFull:
            self._slabs.release(slots)  # no row names them: what was written there is free space
            raise
        except StoreBroken as exc:
            raise self._fail(str(exc), slots, exc) from exc
        except OSError as exc:
            if is_full(exc):
                self._slabs.release(slots)
                raise StoreFull(f"no space left on the disk: {exc.strerror}") from exc
            raise self._fail(f"the disk failed: {exc.strerror or exc}", slots) from exc
        except BaseException as exc:  # an interrupt between two steps: nobody knows what is durable
            self._fail(f"interrupted by {type(exc).__name__}", slots)
            raise

    def _change(self, change: Callable[[], T]) -> T:
        """Run a change of the index."""
        self._require_present()
        with self._guard([]):
            result = change()
        self._tally.commit()
        return result

    def drop(self, row: Row, lost: PageLost) -> bool:
        """For the reader: remove a row that failed a check, and set its slot aside; False when it was gone already."""
        with self._lock:
            if self._failure:
                return True
            try:
                with self._guard([]):
                    removed = self._index.remove_row(row)
            except StoreError:  # full, or off by now: the row stays, and the next read finds the same
                self._tally.lose(lost.reason)
                return True
            if removed:
                self._slabs.quarantine([row.slot])
                self._tally.lose(lost.reason)
            return removed
