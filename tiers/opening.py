"""Opening a store directory: lock, probe, index, slabs, in this order; what can't be used is set aside."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass, field
from pathlib import Path

from tierd.tiers.errors import StoreBroken, StoreFull
from tierd.tiers.index import ASIDE_NAME, ASIDE_NAMES, INDEX_NAME, SIDE_FILES, Identity, Index, IndexUnusable
from tierd.tiers.slab import Slabs, probe, remove_slabs
from tierd.tiers.slot import SlotGeometry
from tierd.tiers.store_io import MAKE_WRITABLE, StoreIO, is_full, lock_directory, open_directory

# Slabs never take the last of the disk: the log of the index needs room, or nothing could be removed any more.
INDEX_RESERVE_BYTES = 2 << 20


@dataclass(slots=True)
class OpenStore:
    """The parts of an open store directory.

    Args:
        places: path, device and inode of the directory and the index, to notice when they are replaced.
    """

    io: StoreIO
    directory: Path
    dir_fd: int
    lock_fd: int
    index: Index
    slabs: Slabs
    places: list[tuple[Path, int, int]]
    notes: list[str] = field(default_factory=list)

    def is_present(self) -> bool:
        """False when the directory or the index was removed or replaced since it was opened."""
        try:
            return all(_identify(self.io.lstat(path)) == (dev, ino) for path, dev, ino in self.places)
        except OSError:
            return False

    def set_aside(self) -> None:
        """Move the open index out of the way, if that can be done: the next opening starts afresh."""
        with contextlib.suppress(OSError):
            set_aside(self.io, self.dir_fd)

    def remove_aside(self) -> None:
        """Delete what was set aside."""
        for name in ASIDE_NAMES:
            with contextlib.suppress(OSError):
                self.io.unlink(name, dir_fd=self.dir_fd)

    def close(self) -> None:
        """Release everything; the lock last, for it lets the next owner in."""
        self.index.close()
        self.slabs.close()
        close_quietly(self.io, self.dir_fd)
        close_quietly(self.io, self.lock_fd)


def open_store(
    io: StoreIO,
    directory: Path,
    geometry: SlotGeometry,
    *,
    namespace: bytes,
    capacity_bytes: int,
    min_free_bytes: int,
) -> OpenStore:
    """Open or make the store of a directory. Raises StoreLocked or StoreBroken, and leaves nothing open then."""
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        try:
            dir_fd = open_directory(io, directory)
            stack.callback(close_quietly, io, dir_fd)
            lock_fd = lock_directory(io, directory, dir_fd)
            stack.callback(close_quietly, io, lock_fd)
            direct = _probe(io, dir_fd, geometry.slot_bytes, notes)
            identity = Identity(
                namespace, geometry.record_bytes, geometry.sections, geometry.section_bytes, geometry.file_slots
            )
            index = _open_index(io, directory, dir_fd, identity, notes)
            stack.callback(index.close)
            slabs = Slabs(
                io,
                dir_fd,
                geometry,
                capacity_slots=max(0, capacity_bytes) // geometry.slot_bytes,
                min_free_bytes=max(min_free_bytes, INDEX_RESERVE_BYTES),
                direct=direct,
            )
            stack.callback(slabs.close)
            notes += slabs.notes
            lost = index.remove_ranges(slabs.unbacked_ranges())
            if lost:
                notes.append(f"{lost} pages lay where the slab files do not reach: dropped")
            slabs.adopt(index.slots())
            places = [(path, *_identify(io.lstat(path))) for path in (directory, directory / INDEX_NAME)]
        except OSError as exc:
            closed = exc.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
            todo = MAKE_WRITABLE if closed else "check the disk"
            raise StoreBroken(f"can't open the store in {directory}: {exc.strerror or exc}; {todo}") from exc
        except StoreFull as exc:
            raise StoreBroken(f"can't open the store in {directory}: {exc}; make room on the disk") from exc
        stack.pop_all()
    return OpenStore(io, directory, dir_fd, lock_fd, index, slabs, places, notes)


def set_aside(io: StoreIO, dir_fd: int) -> None:
    """Move the index out of the way, in place of the one set aside before. Raises OSError."""
    for suffix in ("", *SIDE_FILES):
        try:
            io.rename(INDEX_NAME + suffix, ASIDE_NAME + suffix, dir_fd=dir_fd)
        except FileNotFoundError:
            # A log of the index set aside before must not be taken for a part of this one.
            with contextlib.suppress(FileNotFoundError):
                io.unlink(ASIDE_NAME + suffix, dir_fd=dir_fd)
    io.fsync(dir_fd)


def close_quietly(io: StoreIO, fd: int) -> None:
    """Close a descriptor nothing was written through."""
    with contextlib.suppress(OSError):
        io.close(fd)


def _identify(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _probe(io: StoreIO, dir_fd: int, slot_bytes: int, notes: list[str]) -> bool:
    """Try O_DIRECT with a real slot, then plain I/O; True for O_DIRECT. Raises OSError when neither works."""
    try:
        probe(io, dir_fd, slot_bytes, direct=True)
        return True
    except OSError as exc:
        notes.append(f"no O_DIRECT here ({exc.strerror or exc}): reads and writes go through the page cache")
    try:
        probe(io, dir_fd, slot_bytes, direct=False)
    except OSError as exc:
        if not is_full(exc):
            raise
        # What is stored can still be read, and pages replaced.
        notes.append("the disk is full: the self-test of the disk was left out")
    return False


def _open_index(io: StoreIO, directory: Path, dir_fd: int, identity: Identity, notes: list[str]) -> Index:
    """Open the index; one that can't be used is set aside, and the slabs it spoke of are freed. Raises OSError."""
    new = INDEX_NAME not in io.listdir(dir_fd)
    if not new:
        try:
            return Index.open(io, directory, dir_fd, identity)
        except IndexUnusable as exc:
            notes.append(f"the index can't be used: {exc}; set aside, and the store starts empty")
            set_aside(io, dir_fd)
    # Slots without an index are of no use, and would count against the capacity twice.
    removed = remove_slabs(io, dir_fd)
    if new and removed:
        notes.append("there was no index for the slab files: the store starts empty")
    try:
        return Index.open(io, directory, dir_fd, identity)
    except IndexUnusable as exc:
        raise StoreBroken(f"a new index in {directory} can't be used ({exc}); check the disk") from exc
