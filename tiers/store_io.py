"""The one seam between the disk store and the operating system.

Every system call of the store goes through a `StoreIO`, so that tests can make call k fail, shorten it, or lose what
was not synced. `OsIO` is the real one. Below it stand the loops that make short transfers and interruptions invisible.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tierd.tiers import memory
from tierd.tiers.aio import AioReader, Arrived
from tierd.tiers.errors import StoreBroken, StoreLocked

ALIGN_BYTES = 4096  # O_DIRECT wants offsets, lengths and addresses in logical blocks; no device has larger ones
SQLITE_BUSY_S = 5.0
MAX_STALLS = 64  # transfers in a row that moved nothing before we call it an error
_LOOK_S = 0.05

Bytes: TypeAlias = npt.NDArray[np.uint8]
Buffer: TypeAlias = Bytes | memoryview


class StoreIO(Protocol):
    """The system calls of the store. Each raises OSError (connect: sqlite3.Error) like the call it stands for."""

    def mkdir(self, path: Path) -> None: ...
    def open(self, name: str | Path, flags: int, *, dir_fd: int | None = None) -> int: ...
    def close(self, fd: int) -> None: ...
    def flock(self, fd: int) -> None: ...
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...
    def preadv_batch(
        self,
        reader: AioReader,
        fd: int,
        offsets: npt.NDArray[np.int64],
        vectors: npt.NDArray[np.uint64],
        arrived: Arrived | None = None,
    ) -> npt.NDArray[np.int64]: ...
    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...
    def fdatasync(self, fd: int) -> None: ...
    def fsync(self, fd: int) -> None: ...
    def fallocate(self, fd: int, offset: int, length: int) -> None: ...
    def ftruncate(self, fd: int, length: int) -> None: ...
    def fchmod(self, fd: int, mode: int) -> None: ...
    def fstat(self, fd: int) -> os.stat_result: ...
    def lstat(self, path: Path) -> os.stat_result: ...
    def fstatvfs(self, fd: int) -> os.statvfs_result: ...
    def listdir(self, fd: int) -> list[str]: ...
    def rename(self, source: str, target: str, *, dir_fd: int) -> None: ...
    def unlink(self, name: str, *, dir_fd: int) -> None: ...
    def connect(self, path: Path) -> sqlite3.Connection: ...


class OsIO:
    """The real system calls. Files are private (0600), never inherited by a child, never reached through a link."""

    def mkdir(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def open(self, name: str | Path, flags: int, *, dir_fd: int | None = None) -> int:
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def flock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Somebody who only looks whether the store is in use holds it for microseconds. An owner keeps it.
            time.sleep(_LOOK_S)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def preadv_batch(
        self,
        reader: AioReader,
        fd: int,
        offsets: npt.NDArray[np.int64],
        vectors: npt.NDArray[np.uint64],
        arrived: Arrived | None = None,
    ) -> npt.NDArray[np.int64]:
        return reader.read(fd, offsets, vectors, arrived)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        os.posix_fallocate(fd, offset, length)

    def ftruncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def fchmod(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def lstat(self, path: Path) -> os.stat_result:
        return os.lstat(path)

    def fstatvfs(self, fd: int) -> os.statvfs_result:
        return os.fstatvfs(fd)

    def listdir(self, fd: int) -> list[str]:
        return os.listdir(fd)

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        os.rename(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def connect(self, path: Path) -> sqlite3.Connection:
        # isolation_level None: transactions are ours, spelled out. The store serializes the use of each connection.
        return sqlite3.connect(path, timeout=SQLITE_BUSY_S, isolation_level=None, check_same_thread=False)


def is_full(exc: OSError) -> bool:
    """True when the call failed for want of space or quota: a state of the disk, not damage."""
    return exc.errno in (errno.ENOSPC, errno.EDQUOT)


def aligned_block(size_bytes: int) -> Bytes:
    """A zeroed buffer that starts on a page boundary, as O_DIRECT needs. uint8[size_bytes]"""
    return np.frombuffer(memory.block(size_bytes), dtype=np.uint8, count=size_bytes)


def huge_block(size_bytes: int) -> Bytes:
    """Memory on a page boundary, in large pages where the system has them: kernels read it in pieces. uint8[size]"""
    return np.frombuffer(memory.block(size_bytes, large_pages=True), dtype=np.uint8, count=size_bytes)


def is_aligned(buffer: Bytes) -> bool:
    """True when O_DIRECT can transfer this array as it lies."""
    return address_of(buffer) % ALIGN_BYTES == 0 and buffer.nbytes % ALIGN_BYTES == 0


def address_of(buffer: Bytes) -> int:
    """Where a contiguous array lies in memory."""
    if buffer.flags.writeable and buffer.nbytes:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer.data))  # a third of the time of the other way
    return buffer.ctypes.data


def read_full(io: StoreIO, fd: int, buffers: Sequence[Buffer], offset: int, align: int = 1) -> int:
    """Fill the buffers from offset on; the count is short only at the end of the file."""
    return _transfer(io.preadv, fd, buffers, offset, align, writing=False)


def write_full(io: StoreIO, fd: int, buffers: Sequence[Buffer], offset: int, align: int = 1) -> None:
    """Write the buffers whole, or raise OSError."""
    _transfer(io.pwritev, fd, buffers, offset, align, writing=True)


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: Sequence[Buffer],
    offset: int,
    align: int,
    *,
    writing: bool,
) -> int:
    views = [buffer.data if isinstance(buffer, np.ndarray) else buffer for buffer in buffers]
    total = sum([view.nbytes for view in views])
    done = stalls = 0
    rest = views
    while done < total:
        try:
            moved = call(fd, rest, offset + done)
            interrupted = False
        except InterruptedError:  # os.* retries by itself (PEP 475), another StoreIO need not
            moved, interrupted = 0, True
        if moved == total:
            return total
        if moved == 0 and not writing and not interrupted:
            return done  # end of file
        # With O_DIRECT the next call must start on a block again, so an odd tail is transferred twice.
        step = moved if done + moved == total else moved - moved % align
        done += step
        stalls = 0 if step else stalls + 1
        if stalls > MAX_STALLS:
            raise OSError(errno.EIO, f"no progress in {MAX_STALLS} calls")
        rest = _rest(views, done)
    return done


def _rest(views: list[memoryview], skip: int) -> list[memoryview]:
    """The views without their first `skip` bytes."""
    rest = []
    for view in [view.cast("B") for view in views]:
        if skip < len(view):
            rest.append(view[skip:])
        skip = max(0, skip - len(view))
    return rest


MAKE_WRITABLE = "make it writable, or give another place with --cache-dir"


def open_directory(io: StoreIO, directory: Path) -> int:
    """Create the private directory if need be and open it. Raises StoreBroken when it is not ours or can't be had."""
    try:
        io.mkdir(directory)
        dir_fd = io.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST):
            raise StoreBroken(f"{directory} is a link or a file; remove it, and a directory takes its place") from exc
        raise StoreBroken(f"can't use {directory}: {exc.strerror}; {MAKE_WRITABLE}") from exc
    try:
        info = io.fstat(dir_fd)
        if info.st_uid != os.geteuid():
            raise StoreBroken(
                f"{directory} belongs to user {info.st_uid}, not to us; remove it or choose another cache directory"
            )
        if stat.S_IMODE(info.st_mode) & 0o077:
            io.fchmod(dir_fd, 0o700)
    except OSError as exc:
        io.close(dir_fd)
        raise StoreBroken(f"can't make {directory} private: {exc.strerror}") from exc
    except BaseException:
        io.close(dir_fd)
        raise
    return dir_fd


def lock_directory(io: StoreIO, directory: Path, dir_fd: int) -> int:
    """Take the lock of the directory for the life of the descriptor. Raises StoreLocked with the owner's pid."""
    lock_fd = io.open("lock", os.O_RDWR | os.O_CREAT, dir_fd=dir_fd)
    try:
        io.flock(lock_fd)
    except BlockingIOError as exc:
        pid = _read_pid(io, lock_fd)
        io.close(lock_fd)
        raise StoreLocked(str(directory), pid) from exc
    except BaseException:
        io.close(lock_fd)
        raise
    try:
        io.ftruncate(lock_fd, 0)
        write_full(io, lock_fd, [memoryview(f"{os.getpid()}\n".encode())], 0)
    except OSError:
        # The pid is only for the message of whoever comes second (the lock is the flock, which dies with its process),
        # so a full disk must not keep us from opening.
        return lock_fd
    except BaseException:
        io.close(lock_fd)
        raise
    return lock_fd


def _read_pid(io: StoreIO, lock_fd: int) -> int | None:
    block = bytearray(20)
    try:
        text = bytes(block[: read_full(io, lock_fd, [memoryview(block)], 0)]).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
