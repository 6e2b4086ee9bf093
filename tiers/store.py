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
from typing import NamedTuple, Self, TypeVar

import numpy as np

from tierd.tiers.errors import LostReason, PageLost, StoreBroken, StoreError, StoreFull
from tierd.tiers.index import ASIDE_NAMES, PageMeta, Row, is_damage, set_aside
from tierd.tiers.opening import OpenStore, open_store
from tierd.tiers.page import PageKey
from tierd.tiers.records import Records, pack_page
from tierd.tiers.slot import FILE_BYTES, STEP_BYTES, SlotGeometry
from tierd.tiers.store_io import Buffer, Bytes, OsIO, StoreIO, aligned_block, is_full

T = TypeVar("T")

__all__ = ["PageMeta", "Store", "StoreStatistics"]

CLOSE_WAIT_S = 10.0


class StoreStatistics(NamedTuple):
    """Figures of a store since it was opened; slots as they are now."""

    capacity_slots: int
    used_slots: int
    free_slots: int
    quarantined_slots: int
    slot_bytes: int
    disk_bytes: int  # what the slab files take, used or not
    pages_written: int
    bytes_written: int
    pages_read: int
    bytes_read: int
    syncs: int  # fdatasync of slab files
    commits: int  # index transactions
    lost_pages: int  # pages that failed a check and became a miss
    grow_refusals: int
    direct_io: bool
    failure: str  # why the store is off, empty while it works


class Store:
    """Durable pages of one namespace in one directory.

    Notes:
        `read_into` may run in any thread, several at once, also while another thread writes. The other methods take one
        lock: they are safe from any thread, but wait for a write in progress, so call them from the thread that writes.
        `touch`, `free_slots` and `statistics` never wait.

        After a failed sync, a failed index or a directory that went away the store is *off*: writes raise StoreBroken,
        reads are misses. Nothing is retried, for after a failed fdatasync the kernel may have dropped what it failed to
        write. Opening the store again starts from what is durable.
    """

    def __init__(self, parts: OpenStore, namespace: bytes) -> None:
        """For `open`: takes over the open parts."""
        self.notes: list[str] = parts.notes
        self._parts = parts
        self._index = parts.index
        self._slabs = parts.slabs
        self._records = Records(parts.slabs, namespace)
        self._record_bytes = parts.slabs.geometry.record_bytes
        self._next_generation = parts.index.opens << 32  # a generation is never used twice, crash or not
        self._lock = threading.RLock()
        self._readers = 0
        self._readers_changed = threading.Condition()
        self._failure = ""
        self._closed = False
        self._pages_written = self._pages_read = self._commits = self._lost_pages = 0

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        record_bytes: int,
        namespace: bytes,
        capacity_bytes: int,
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
            min_free_bytes: what growing must leave free on the file system.
            file_bytes: bound of one slab file. A store keeps what it was made with; another value starts afresh.
            step_bytes: how much of a slab file is preallocated at a time.

        A damaged index, or one of another version, namespace or size, is set aside; `notes` says so. Raises StoreLocked
        when another process has it open, StoreBroken when the directory or the disk can't be used.
        """
        if len(namespace) != 16 or record_bytes < 1:
            raise ValueError("namespace is 16 bytes, a record at least one")
        parts = open_store(
            OsIO() if io is None else io,
            directory,
            SlotGeometry(record_bytes, file_bytes, step_bytes),
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
        packed = [pack_page(meta, record, self._record_bytes) for meta, record in batch]
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
            self._commits += 1
            self._pages_written += len(slots)
            # Files that somebody deleted took the pages with them: don't call them durable.
            self._require_present(slots)

    def read_into(self, key: PageKey, dest: Bytes) -> None:
        """Copy a page into dest and verify it. uint8[record_bytes]

        Raises PageLost for whatever is wrong; then dest holds nothing to be used, and the page is gone from the store
        unless the store itself is off.
        """
        if dest.dtype != np.uint8 or dest.shape != (self._record_bytes,) or not dest.flags.c_contiguous:
            raise ValueError(f"dest is {dest.dtype}{dest.shape}, not uint8[{self._record_bytes}]")
        with self._reading(), contextlib.ExitStack() as stack:
            for _ in range(2):
                row = self._lookup(key)
                if row is None:
                    break
                lost = self._records.read(row, dest)
                if not self._is_linked(row.slot):
                    break
                if lost is None:
                    self._pages_read += 1
                    return
                if self._drop(row):
                    raise lost
                # The owner removed or rewrote the page while we read: no fault of the slot. Once more, without writers.
                stack.enter_context(self._lock)
        raise PageLost(LostReason.STORE_OFF if self._failure else LostReason.ABSENT)

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

    def gc(self) -> int:
        """Give back disk space that nothing uses; returns bytes of slab files. Raises StoreFull, StoreBroken."""
        with self._lock:
            self._change(self._index.compact)
            for name in ASIDE_NAMES:
                with contextlib.suppress(OSError):
                    self._parts.io.unlink(name, dir_fd=self._parts.dir_fd)
            with self._guard([]):
                return self._slabs.shrink()

    def verify(self, repair: bool) -> list[str]:
        """Read and check every page; returns findings. With `repair` the pages that fail are removed.

        Raises StoreBroken when the store is off, or goes off meanwhile.
        """
        dest = aligned_block(self._slabs.geometry.slot_bytes)[: self._record_bytes]
        findings = self.check()
        if repair and findings:
            with self._lock, self._guard([]):
                self._index.rebuild()
        for row in self._index.rows():
            with self._lock:  # for one page at a time, so that writes get their turn
                self._require_usable()
                if self._index.lookup(row.key) != row:
                    continue  # removed or rewritten since the chunk was read
                lost = self._records.read(row, dest)
                if lost is None:
                    continue
                findings.append(f"page {row.key.hex()} in slot {row.slot}: {lost}")
                if repair and self._drop(row):
                    findings[-1] += "; removed"
        return findings

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
    def free_slots(self) -> int:
        """Pages that still fit, if the file system has the space."""
        return self._slabs.free_slots

    def statistics(self) -> StoreStatistics:
        """Figures of now; not one snapshot when a write is in progress."""
        slabs = self._slabs
        return StoreStatistics(
            capacity_slots=slabs.capacity_slots,
            used_slots=slabs.used,
            free_slots=slabs.free_slots,
            quarantined_slots=slabs.quarantined,
            slot_bytes=slabs.geometry.slot_bytes,
            disk_bytes=slabs.backed_bytes,
            pages_written=self._pages_written,
            bytes_written=self._pages_written * slabs.geometry.slot_bytes,
            pages_read=self._pages_read,
            bytes_read=self._pages_read * slabs.geometry.slot_bytes,
            syncs=slabs.syncs,
            commits=self._commits,
            lost_pages=self._lost_pages,
            grow_refusals=slabs.grow_refusals,
            direct_io=slabs.direct,
            failure=self._failure,
        )

    def close(self) -> None:
        """Wait for the reads in progress, then release everything. Harmless when closed."""
        with self._readers_changed:
            if self._closed:
                return
            self._closed = True
            # A descriptor must not be closed under a read: its number could be another file's by then.
            if not self._readers_changed.wait_for(lambda: self._readers == 0, CLOSE_WAIT_S):
                self._closed = False
                raise StoreBroken(f"{self._readers} reads did not end in {CLOSE_WAIT_S} s; the store stays open")
        with self._lock:
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
        if not self._parts.is_present() or not all(self._slabs.is_linked(slot) for slot in slots):
            raise self._fail(f"{self._parts.directory} was removed or replaced", ())

    def _fail(self, reason: str, slots: Iterable[int], cause: StoreError | None = None) -> StoreBroken:
        """Turn the store off; returns the error to raise. Slots in flight are set aside with it."""
        self._slabs.quarantine(slots)
        if isinstance(cause, StoreBroken) and is_damage(cause):
            # Opening looks less closely than the query that stumbled: without this it would stumble there each time.
            with contextlib.suppress(OSError):
                set_aside(self._parts.io, self._parts.dir_fd)
        self._failure = f"{reason}. The store in {self._parts.directory} is off until opened again; check the disk"
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
        self._commits += 1
        return result

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Keep the files open for a read. Raises PageLost when the store is off."""
        with self._readers_changed:
            if self._closed or self._failure:
                raise PageLost(LostReason.STORE_OFF, self._failure)
            self._readers += 1
        try:
            yield
        finally:
            with self._readers_changed:
                self._readers -= 1
                self._readers_changed.notify_all()

    def _lookup(self, key: PageKey) -> Row | None:
        try:
            return self._index.lookup(key)
        except StoreError as exc:
            with self._lock:
                self._fail(str(exc), (), exc)
            return None

    def _is_linked(self, slot: int) -> bool:
        """False, and the store is off, when the slot's file was deleted: its owner wanted the pages gone."""
        linked = self._slabs.is_linked(slot)
        if not linked:
            with self._lock:
                self._fail(f"the slab files in {self._parts.directory} were removed", ())
        return linked

    def _drop(self, row: Row) -> bool:
        """Remove a row whose slot failed a check, and set the slot aside; False when the row was gone already."""
        with self._lock:
            if self._failure:
                return True
            try:
                with self._guard([]):
                    removed = self._index.remove_row(row)
            except StoreError:  # full, or off by now: the row stays, and the next read finds the same
                self._lost_pages += 1
                return True
            if removed:
                self._slabs.quarantine([row.slot])
                self._lost_pages += 1
            return removed
