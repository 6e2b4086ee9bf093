"""The slab files of the store: equal slots on preallocated disk space, bounded by construction."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tierd.tiers.aio import MAX_BATCH, AioReader
from tierd.tiers.errors import StoreBroken, StoreFull
from tierd.tiers.slot import SlotGeometry
from tierd.tiers.store_io import ALIGN_BYTES, Buffer, StoreIO, aligned_block, is_full, read_full, write_full

_FREE, _RESERVED, _USED, _QUARANTINED = range(4)  # states of a slot, one byte each in Slabs._state
INDEX_SPARE_BYTES = 8 << 20  # kept for the index: its log, and its file where rows are added or rewritten
_SLAB_NAME = re.compile(r"slab-(\d{5})\.pages")


class Slabs:
    """The slab files and the ledger of their slots.

    Every slot is free, reserved (being written), used (the index has a row) or quarantined (not trusted until the store
    is opened again). Files grow lazily, front to back, by whole steps of preallocated space.

    Notes:
        Not locked: the store calls `allocate`, `mark_used`, `release`, `quarantine` and `shrink` under its lock. `read`
        may run in any thread at any time, for no descriptor is closed before `close`.
    """

    def __init__(
        self,
        io: StoreIO,
        dir_fd: int,
        geometry: SlotGeometry,
        *,
        capacity_slots: int,
        min_free_bytes: int,
        direct: bool,
    ) -> None:
        """Open the files there are. Raises OSError; the caller closes what was opened with `close`."""
        self.geometry = geometry
        self.capacity_slots = capacity_slots
        self.direct = direct
        self.notes: list[str] = []
        self.used = self.reserved = self.quarantined = self.grow_refusals = self.syncs = 0
        self._io = io
        self._dir_fd = dir_fd
        self._min_free_bytes = max(min_free_bytes, INDEX_SPARE_BYTES)
        self._align = ALIGN_BYTES if direct else 1
        # Asked for at each read; the geometry computes them anew each time.
        self._slot_bytes, self._file_slots = geometry.slot_bytes, geometry.file_slots
        self._aio = AioReader()
        self._no_batches = False
        self._state = np.zeros(capacity_slots, dtype=np.uint8)
        self._free: list[int] = []  # free slots that have disk space; the lowest is last
        num_files = -(-capacity_slots // geometry.file_slots)
        self._fds = [-1] * num_files
        self._sizes = [0] * num_files  # slots of each file that have disk space
        try:
            self._open_files()
        except BaseException:
            self.close()
            raise
        self._rebuild_free()

    def _open_files(self) -> None:
        for name in sorted(self._io.listdir(self._dir_fd)):
            match = _SLAB_NAME.fullmatch(name)
            if match is None:
                continue
            index = int(match[1])
            if index >= len(self._fds):
                self._io.unlink(name, dir_fd=self._dir_fd)
                self.notes.append(f"{name} lies beyond the capacity: removed")
                continue
            fd = self._open_file(name)
            if fd is None:
                continue
            self._fds[index] = fd
            size_bytes = self._io.fstat(fd).st_size
            self._sizes[index] = min(size_bytes // self.geometry.slot_bytes, self._file_limit(index))
            if size_bytes != self._sizes[index] * self.geometry.slot_bytes:
                self._io.ftruncate(fd, self._sizes[index] * self.geometry.slot_bytes)
                self.notes.append(f"{name} was {size_bytes} bytes long: cut to {self._sizes[index]} slots")

    def _open_file(self, name: str) -> int | None:
        """Open a slab file that exists; something else under its name is moved out of the way."""
        flags = os.O_RDWR | (os.O_DIRECT if self.direct else 0)
        try:
            fd = self._io.open(name, flags, dir_fd=self._dir_fd)
            try:
                if stat.S_ISREG(self._io.fstat(fd).st_mode):
                    return fd
            except BaseException:
                self._io.close(fd)
                raise
            self._io.close(fd)
        except OSError as exc:
            if exc.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
        self._io.rename(name, f"{name}.aside", dir_fd=self._dir_fd)
        self.notes.append(f"{name} was not a file: moved to {name}.aside")
        return None

    def _file_limit(self, index: int) -> int:
        """Slots that file `index` may have: the last file ends at the capacity."""
        return min(self.geometry.file_slots, self.capacity_slots - index * self.geometry.file_slots)

    def _rebuild_free(self) -> None:
        backed = self._backed_slots()
        self._free = backed[self._state[backed] == _FREE][::-1].tolist()

    def _backed_slots(self) -> npt.NDArray[np.int64]:
        """Slots that have disk space, ascending. int64[n]"""
        per_file = self.geometry.file_slots
        return np.concatenate(
            [np.arange(i * per_file, i * per_file + size, dtype=np.int64) for i, size in enumerate(self._sizes)]
            or [np.empty(0, dtype=np.int64)]
        )

    def adopt(self, slots: npt.NDArray[np.int64]) -> None:
        """Mark the slots of the index as used, once, after opening. int64[n], none of them in `unbacked_ranges`."""
        self._state[slots] = _USED
        self.used = len(slots)
        self._rebuild_free()

    def unbacked_ranges(self) -> list[tuple[int, int]]:
        """Ranges [first, end) of slots without disk space: a row that names one of them has lost its page."""
        per_file = self.geometry.file_slots
        ranges = [
            (index * per_file + size, index * per_file + self._file_limit(index))
            for index, size in enumerate(self._sizes)
            if size < self._file_limit(index)
        ]
        return [*ranges, (self.capacity_slots, 1 << 62)]

    @property
    def free_slots(self) -> int:
        """Slots that a write could take, disk space permitting."""
        return self.capacity_slots - self.used - self.reserved - self.quarantined

    @property
    def backed_bytes(self) -> int:
        """Disk space that the files take."""
        return sum(self._sizes) * self.geometry.slot_bytes

    def allocate(self, count: int) -> list[int]:
        """Reserve slots, growing files as needed. Raises StoreFull or OSError, and reserves none then."""
        if count > self.free_slots:
            raise StoreFull(f"{count} pages do not fit: {self.free_slots} of {self.capacity_slots} slots are free")
        while len(self._free) < count:
            self._grow(count - len(self._free))
        slots = [self._free.pop() for _ in range(count)]
        self._state[slots] = _RESERVED
        self.reserved += count
        return slots

    def mark_used(self, slots: Sequence[int]) -> None:
        """Reserved slots whose rows are durable."""
        self._state[list(slots)] = _USED
        self.reserved -= len(slots)
        self.used += len(slots)

    def release(self, slots: Iterable[int]) -> None:
        """Free slots that are reserved, or used and whose rows are durably gone."""
        for slot in slots:
            self._leave(slot)
            self._state[slot] = _FREE
            self._free.append(slot)

    def quarantine(self, slots: Iterable[int]) -> None:
        """Never use these slots again before the store is reopened."""
        for slot in slots:
            self._leave(slot)
            self._state[slot] = _QUARANTINED
            self.quarantined += 1

    def _leave(self, slot: int) -> None:
        if self._state[slot] == _RESERVED:
            self.reserved -= 1
        elif self._state[slot] == _USED:
            self.used -= 1
        else:
            raise AssertionError(f"slot {slot} is neither reserved nor used")

    def _grow(self, wanted: int) -> None:
        index = next(i for i, size in enumerate(self._sizes) if size < self._file_limit(i))
        room = self._file_limit(index) - self._sizes[index]
        step = min(max(self.geometry.step_slots, wanted), room)
        vfs = self._io.fstatvfs(self._dir_fd)
        spare_bytes = vfs.f_bavail * vfs.f_frsize - self._min_free_bytes
        step = min(step, spare_bytes // self.geometry.slot_bytes)
        if step < 1:
            self.grow_refusals += 1
            raise StoreFull(f"the file system has {vfs.f_bavail * vfs.f_frsize} bytes left, too few to grow the store")
        if not self._extend(index, step) and not (step > 1 and self._extend(index, 1)):
            self.grow_refusals += 1
            raise StoreFull("the file system refused to grow the store: no space or quota left")

    def _extend(self, index: int, count: int) -> bool:
        """Give file `index` space for `count` more slots; False when the disk is full (and nothing changed)."""
        if self._fds[index] < 0:
            try:
                self._fds[index] = self._create(f"slab-{index:05d}.pages")
            except OSError as exc:
                if is_full(exc):
                    return False
                raise
        fd, slot_bytes, size = self._fds[index], self.geometry.slot_bytes, self._sizes[index]
        try:
            self._io.fallocate(fd, size * slot_bytes, count * slot_bytes)
        except OSError as exc:
            # A refused fallocate may have taken part of the space.
            self._io.ftruncate(fd, size * slot_bytes)
            if is_full(exc):
                return False
            raise
        self._sizes[index] = size + count
        first = index * self.geometry.file_slots + size
        self._free[:0] = range(first + count - 1, first - 1, -1)
        return True

    def require_room(self) -> None:
        """Raise OSError unless the file system has space for the index; asked by taking it, which quotas refuse too."""
        fd = self._io.open("probe", os.O_RDWR | os.O_CREAT | os.O_TRUNC, dir_fd=self._dir_fd)
        try:
            self._io.fallocate(fd, 0, INDEX_SPARE_BYTES)
        finally:
            self._io.close(fd)
            self._io.unlink("probe", dir_fd=self._dir_fd)

    def _create(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self.direct else 0)
        fd = self._io.open(name, flags, dir_fd=self._dir_fd)
        try:
            self._io.fsync(self._dir_fd)  # the name must outlive a power cut, as the rows do
        except BaseException:
            self._io.close(fd)
            raise
        return fd

    def _locate(self, slot: int) -> tuple[int, int]:
        index, local = divmod(slot, self._file_slots)
        return self._fds[index], local * self._slot_bytes

    def read(self, slot: int, buffers: Sequence[Buffer], skip_bytes: int = 0) -> int:
        """Read the slot, without its first `skip_bytes`; the count is short at the end of the file. Raises OSError."""
        fd, offset = self._locate(slot)
        return read_full(self._io, fd, buffers, offset + skip_bytes, self._align)

    def read_batch(
        self,
        slots: Sequence[int],
        vectors: npt.NDArray[np.uint64],
        arrived: Callable[[int], None],
        skip_bytes: int = 0,
    ) -> None:
        """Read several slots at once, without their first `skip_bytes`.

        Args:
            vectors: address and length of the buffers that each slot fills in turn, aligned. uint64[n, buffers, 2]
            arrived: told the number of each slot that was read whole, as they come: what it does, the disk goes on
                with the others meanwhile.

        Slots that it is not told of were not read: there are no batches without O_DIRECT and where the system has none.
        """
        if not self.direct or self._no_batches or len(slots) > MAX_BATCH:
            return
        places = [self._locate(slot) for slot in slots]
        offsets = np.array([offset + skip_bytes for _, offset in places], dtype=np.int64)
        for fd in {fd for fd, _ in places}:
            chosen = [number for number, place in enumerate(places) if place[0] == fd]
            wanted = vectors[chosen, :, 1].sum(axis=1).tolist()

            def came(piece: int, moved: int, chosen: list[int] = chosen, wanted: list[int] = wanted) -> None:
                if moved == wanted[piece]:
                    arrived(chosen[piece])

            try:
                self._io.preadv_batch(self._aio, fd, offsets[chosen], vectors[chosen], came)
            except OSError as exc:
                self._no_batches = exc.errno in (errno.ENOSYS, errno.EPERM, errno.EAGAIN)
                return

    def write(self, slot: int, buffers: Sequence[Buffer]) -> None:
        """Write from the start of the slot. Durable after `sync`. Raises OSError."""
        fd, offset = self._locate(slot)
        write_full(self._io, fd, buffers, offset, self._align)

    def sync(self, slots: Iterable[int]) -> None:
        """Make the writes to these slots durable.

        Raises StoreBroken: then none of them is, and no second try can tell otherwise, for the kernel forgets what it
        could not write. That holds for a full disk as well.
        """
        for fd in {self._locate(slot)[0] for slot in slots}:
            try:
                self._io.fdatasync(fd)
            except OSError as exc:
                raise StoreBroken(f"fdatasync failed ({exc.strerror or exc}): these pages are not durable") from exc
            self.syncs += 1

    def are_linked(self, slots: Iterable[int]) -> bool:
        """False when the file of one of these slots was deleted under us, or can't be asked."""
        try:
            return all(self._io.fstat(fd).st_nlink for fd in {self._locate(slot)[0] for slot in slots})
        except OSError:
            return False

    def shrink(self) -> int:
        """Give the free tail of every file back to the file system; returns bytes. Raises OSError."""
        before = self.backed_bytes
        for index, size in enumerate(self._sizes):
            first = index * self.geometry.file_slots
            taken = np.flatnonzero(self._state[first : first + size])
            keep = int(taken[-1]) + 1 if len(taken) else 0
            if keep < size:
                self._sizes[index] = keep  # first, so that an error can't leave slots without space on the free list
                self._rebuild_free()
                self._io.ftruncate(self._fds[index], keep * self.geometry.slot_bytes)
        return before - self.backed_bytes

    def check(self) -> list[str]:
        """Findings of a look at the ledger; empty when right. Reads no page."""
        findings = []
        counts = np.bincount(self._state, minlength=4)
        for name, state, count in (
            ("reserved", _RESERVED, self.reserved),
            ("used", _USED, self.used),
            ("quarantined", _QUARANTINED, self.quarantined),
            ("free", _FREE, self.free_slots),
        ):
            if counts[state] != count:
                findings.append(f"{counts[state]} slots are {name}, the ledger says {count}")
        if len(set(self._free)) != len(self._free):
            findings.append("a slot is on the free list twice")
        backed = self._backed_slots()
        if sorted(self._free) != backed[self._state[backed] == _FREE].tolist():
            findings.append("the free list is not the set of free slots with disk space")
        for index, size in enumerate(self._sizes):
            if size and self._io.fstat(self._fds[index]).st_size != size * self.geometry.slot_bytes:
                findings.append(f"slab {index} is not {size} slots long")
        return findings

    def used_slots(self) -> set[int]:
        """The slots that the ledger says have a row."""
        return set(np.flatnonzero(self._state == _USED).tolist())

    def close(self) -> None:
        """Close the files."""
        self._aio.close()
        for index, fd in enumerate(self._fds):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    self._io.close(fd)
            self._fds[index] = -1


def remove_slabs(io: StoreIO, dir_fd: int) -> int:
    """Delete the slab files of a store that nobody has open; returns how many. Raises OSError."""
    names = [name for name in io.listdir(dir_fd) if _SLAB_NAME.fullmatch(name)]
    for name in names:
        io.unlink(name, dir_fd=dir_fd)
    return len(names)


def probe(io: StoreIO, dir_fd: int, slot_bytes: int, *, direct: bool) -> None:
    """Write a slot of a scratch file, sync, read it back and compare. Raises OSError when the disk can't do that."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
    fd = io.open("probe", flags, dir_fd=dir_fd)
    try:
        align = ALIGN_BYTES if direct else 1
        wrote, found = aligned_block(slot_bytes), aligned_block(slot_bytes)
        wrote[:] = np.arange(slot_bytes) % 251
        write_full(io, fd, [wrote], 0, align)
        io.fdatasync(fd)
        if read_full(io, fd, [found], 0, align) != slot_bytes or not np.array_equal(wrote, found):
            raise OSError(f"{slot_bytes} bytes came back changed")
    finally:
        io.close(fd)
        io.unlink("probe", dir_fd=dir_fd)
