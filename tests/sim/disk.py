"""A disk in memory, for the real store: it forgets what was not synced, tears sectors, and fails in every known way.

One directory of files. Slab files are bytes here, with their durable bytes beside them; a crash chooses between the two
sector by sector. SQLite can't run on bytes that we hold, so the index is a SQLite database in memory behind the file's
name: what was committed survives a crash, as `synchronous = FULL` promises, and an open transaction does not.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.sim.database import Connection
from tests.tiers.faults import PowerCut
from tierd.tiers.store_io import StoreIO

SECTOR = 512
DIRECTORY_FD = 3


@dataclass(slots=True)
class Faults:
    """How often a call goes wrong, from 0 to 1; `full` is a state that the simulation turns on and off."""

    read_error: float = 0.0
    write_error: float = 0.0
    sync_error: float = 0.0
    index_error: float = 0.0
    short: float = 0.0  # a transfer moves only a part
    interrupted: float = 0.0
    flip: float = 0.0  # a bit of what is written comes to lie wrong
    misdirected: float = 0.0  # a write lands elsewhere in the file
    dropped: float = 0.0  # a write is acknowledged and lost
    full: bool = False


class File:
    """Bytes as the process sees them, and as they would be after a power cut; or the database behind the index."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.data = bytearray()
        self.durable = bytearray()
        self.unsynced: set[int] = set()  # sectors
        self.links = 1
        self.shared = False  # with a clone
        self._database: sqlite3.Connection | None = None

    @property
    def database(self) -> sqlite3.Connection:
        if self._database is None:
            self._database = sqlite3.connect(":memory:", isolation_level=None)
        return self._database

    def clone(self) -> File:
        """A file of the same content, all of it durable. It shares the bytes until one of the two writes."""
        twin = File(self.number)
        twin.data = twin.durable = self.data
        self.durable = self.data
        self.unsynced.clear()
        twin.shared = self.shared = True
        if self._database is not None:
            self._database.backup(twin.database)
        return twin

    def _own(self) -> None:
        if self.shared:
            self.data, self.durable, self.shared = bytearray(self.data), bytearray(self.durable), False

    def write(self, at: int, data: bytes) -> None:
        self._own()
        if len(self.data) < at + len(data):
            self.data.extend(bytes(at + len(data) - len(self.data)))
        self.data[at : at + len(data)] = data
        self.unsynced.update(range(at // SECTOR, (at + len(data) - 1) // SECTOR + 1))

    def resize(self, size: int) -> None:
        if size == len(self.data):
            return
        self._own()
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))

    def sync(self) -> None:
        if self.shared:
            return
        del self.durable[len(self.data) :]
        self.durable.extend(bytes(len(self.data) - len(self.durable)))
        for sector in self.unsynced:
            piece = slice(sector * SECTOR, (sector + 1) * SECTOR)
            self.durable[piece] = self.data[piece]
        self.unsynced.clear()

    def crash(self, keep: float, rng: random.Random) -> None:
        """Each unsynced sector, and the size, is kept with this chance."""
        self._own()
        if rng.random() >= keep:
            self.resize(len(self.durable))
        for sector in sorted(self.unsynced):
            if rng.random() >= keep:
                piece = slice(sector * SECTOR, min((sector + 1) * SECTOR, len(self.data)))
                if piece.start < piece.stop:
                    old = bytes(self.durable[piece])
                    self.data[piece] = old + bytes(piece.stop - piece.start - len(old))
        self.unsynced.clear()
        self.durable = bytearray(self.data)
        if self._database is not None and self._database.in_transaction:
            self._database.rollback()

    def close(self) -> None:
        if self._database is not None:
            self._database.close()


@dataclass(slots=True)
class SimDisk:
    """A `StoreIO`. `calls_left` counts down to a power cut in the middle of whatever is being done."""

    rng: random.Random
    faults: Faults = field(default_factory=Faults)
    calls_left: int | None = None
    limit_bytes: int = 1 << 30
    calls: int = 0
    fired: dict[str, int] = field(default_factory=dict)  # faults that happened, by kind
    on_call: Callable[[str], None] | None = None  # told of each call by name before it is done; may raise for it
    _names: dict[str, File] = field(default_factory=dict)
    _durable_names: dict[str, File] = field(default_factory=dict)
    _fds: dict[int, File | None] = field(default_factory=dict)
    _next_fd: int = DIRECTORY_FD
    _next_number: int = 1
    _connections: int = 0

    def as_io(self) -> StoreIO:
        return cast(StoreIO, self)

    @property
    def open_files(self) -> int:
        """Descriptors and connections that nobody has closed."""
        return len(self._fds) + self._connections

    def crash(self, keep: float) -> None:
        """The machine goes down and comes up again: names and sectors that were not synced are kept by chance."""
        before = {id(file): file for file in (*self._names.values(), *self._durable_names.values())}
        if self.rng.random() >= keep:
            self._names = dict(self._durable_names)
        self._durable_names = dict(self._names)
        for file in self._names.values():
            before.pop(id(file), None)
            file.crash(keep, self.rng)
        for file in before.values():
            file.close()
        self._fds.clear()
        self._connections = 0
        self.calls_left = None

    def damage(self) -> str:
        """Somebody else writes into the directory; says what he did."""
        slabs = [file for name, file in self._names.items() if name.startswith("slab-") and len(file.data) > SECTOR]
        if not slabs:
            return ""
        file = self.rng.choice(slabs)
        choice = self.rng.randrange(3)
        if choice == 0:
            at = self.rng.randrange(len(file.data))
            file.write(at, bytes([file.data[at] ^ (1 << self.rng.randrange(8))]))
            return f"bit flipped at {at}"
        slots = range(0, len(file.data), 8192)
        first, second = self.rng.choice(slots), self.rng.choice(slots)
        one, two = bytes(file.data[first : first + 8192]), bytes(file.data[second : second + 8192])
        if len(one) < 8192 or len(two) < 8192:
            return ""
        file.write(second, one)
        if choice == 1:
            file.write(first, two)
        return f"slot {first // 8192} {'swapped with' if choice == 1 else 'copied over'} {second // 8192}"

    def clone(self) -> SimDisk:
        """Another disk with the same content, healthy. Nobody may have files open."""
        assert not self.open_files
        twin = SimDisk(random.Random(0), limit_bytes=self.limit_bytes, _next_number=self._next_number)
        twin._names = {name: file.clone() for name, file in self._names.items()}
        twin._durable_names = dict(twin._names)
        return twin

    def close_all(self) -> None:
        for file in {id(file): file for file in (*self._names.values(), *self._durable_names.values())}.values():
            file.close()

    # -- the calls -------------------------------------------------------------------------------------------------

    def mkdir(self, path: Path) -> None:
        self._enter("mkdir")

    def open(self, name: str | Path, flags: int, *, dir_fd: int | None = None) -> int:
        self._enter("open")
        if dir_fd is None:
            return self._new_fd(None)
        file = self._names.get(str(name))
        if file is not None and flags & os.O_EXCL and flags & os.O_CREAT:
            raise FileExistsError(errno.EEXIST, "exists", str(name))
        if file is None:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, "no such file", str(name))
            self._maybe_full()
            file = self._names[str(name)] = File(self._next_number)
            self._next_number += 1
        if flags & os.O_TRUNC:
            file.resize(0)
        return self._new_fd(file)

    def close(self, fd: int) -> None:
        self._fds.pop(fd)

    def flock(self, fd: int) -> None:
        self._enter("flock")

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._enter("preadv")
        self._maybe(self.faults.interrupted, "interrupted", errno.EINTR)
        self._maybe(self.faults.read_error, "read error", errno.EIO)
        file, done = self._file(fd), 0
        for buffer in buffers:
            buffer[:] = b"\xaa" * len(buffer)
        limit = self._shortened(sum(map(len, buffers)))
        for buffer in buffers:
            piece = file.data[offset + done : offset + min(done + len(buffer), limit)]
            buffer[: len(piece)] = piece
            done += len(piece)
            if len(piece) < len(buffer):
                break
        return done

    def preadv_batch(self, *_: object) -> Any:
        raise OSError(errno.ENOSYS, "no batches: the store reads piece by piece, through `preadv`")

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        data = b"".join(buffers)
        file = self._file(fd)
        try:
            self._enter("pwritev")
        except PowerCut:
            file.write(offset, data[: self.rng.randrange(0, len(data) + 1, SECTOR)] or b"\0")
            raise
        self._maybe(self.faults.interrupted, "interrupted", errno.EINTR)
        self._maybe(self.faults.write_error, "write error", errno.EIO)
        self._maybe_full()
        moved = self._shortened(len(data))
        if self._happens(self.faults.dropped, "dropped write"):
            return moved
        if self._happens(self.faults.flip, "flip"):
            wrong = bytearray(data)
            wrong[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            data = bytes(wrong)
        if len(file.data) > len(data) and self._happens(self.faults.misdirected, "misdirected write"):
            offset = self.rng.randrange(0, len(file.data) - len(data) + 1, 4096)
        file.write(offset, data[:moved])
        return moved

    def fdatasync(self, fd: int) -> None:
        self._enter("fdatasync")
        self._maybe(self.faults.sync_error, "sync error", errno.EIO)
        self._file(fd).sync()

    def fsync(self, fd: int) -> None:
        self._enter("fsync")
        self._maybe(self.faults.sync_error, "sync error", errno.EIO)
        file = self._fds[fd]
        if file is None:
            self._durable_names = dict(self._names)
        else:
            file.sync()

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        self._enter("fallocate")
        self._maybe_full()
        if self._used() + length > self.limit_bytes:
            raise OSError(errno.ENOSPC, "the disk is full")
        file = self._file(fd)
        file.resize(max(len(file.data), offset + length))

    def ftruncate(self, fd: int, length: int) -> None:
        self._enter("ftruncate")
        self._file(fd).resize(length)

    def fchmod(self, fd: int, mode: int) -> None:
        self._enter("fchmod")

    def fstat(self, fd: int) -> Any:
        self._enter("fstat")
        return self._stat(self._fds[fd])

    def lstat(self, path: Path) -> Any:
        self._enter("lstat")
        if path.name not in self._names and path.suffix == "":
            return self._stat(None)
        if path.name not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", path.name)
        return self._stat(self._names[path.name])

    def fstatvfs(self, fd: int) -> Any:
        self._enter("fstatvfs")
        free = 0 if self.faults.full else max(0, self.limit_bytes - self._used())
        return SimpleNamespace(f_bavail=free // 4096, f_frsize=4096)

    def listdir(self, fd: int) -> list[str]:
        self._enter("listdir")
        return sorted(self._names)

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        self._enter("rename")
        if source not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", source)
        self._names[target] = self._names.pop(source)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        self._enter("unlink")
        if name not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        self._names.pop(name).links = 0

    def connect(self, path: Path) -> Any:
        self._enter("connect")
        self._connections += 1
        return Connection(self, self._names[path.name].database)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _enter(self, name: str) -> None:
        self.calls += 1
        if self.on_call is not None:
            self.on_call(name)
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise PowerCut

    def _happens(self, chance: float, kind: str) -> bool:
        if chance and self.rng.random() < chance:
            self.fired[kind] = self.fired.get(kind, 0) + 1
            return True
        return False

    def _maybe(self, chance: float, kind: str, code: int) -> None:
        if self._happens(chance, kind):
            raise OSError(code, kind)

    def _maybe_full(self) -> None:
        if self.faults.full:
            self.fired["full"] = self.fired.get("full", 0) + 1
            raise OSError(errno.ENOSPC, "the disk is full")

    def _shortened(self, total: int) -> int:
        if total > 4096 and self._happens(self.faults.short, "short"):
            return self.rng.randrange(4096, total, 4096)
        return total

    def _used(self) -> int:
        return sum(len(file.data) for file in self._names.values())

    def _file(self, fd: int) -> File:
        file = self._fds[fd]
        assert file is not None, "a directory is no file"
        return file

    def _new_fd(self, file: File | None) -> int:
        fd = self._next_fd
        self._next_fd += 1  # never used twice: a stale descriptor shows at once
        self._fds[fd] = file
        return fd

    def _stat(self, file: File | None) -> Any:
        if file is None:
            return SimpleNamespace(
                st_dev=1, st_ino=0, st_mode=stat.S_IFDIR | 0o700, st_uid=os.geteuid(), st_nlink=1, st_size=0
            )
        return SimpleNamespace(
            st_dev=1, st_ino=file.number, st_mode=stat.S_IFREG | 0o600, st_uid=os.geteuid(), st_nlink=file.links,
            st_size=len(file.data),
        )  # fmt: skip
