"""Disks that fail: a `StoreIO` whose calls can be counted, broken, cut short, killed or forgotten.

Every call of the store goes through `HookedIO.around`, also the statements on its SQLite connections (named "sql BEGIN"
and so on), so one subclass is one kind of fault.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from tierd.tiers.store_io import OsIO, StoreIO

TRANSFERS = ("preadv", "pwritev")
GATE_TIMEOUT_S = 20.0
CLOSERS = ("close", "sql close")  # these do their work before they fail: a test must not leak


class HookedIO:
    """Passes every call on to the operating system; subclasses override `around`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._os = OsIO()

    def as_io(self) -> StoreIO:
        return cast(StoreIO, self)

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return call(*args)

    def run(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        self.names.append(name)
        return self.around(name, call, args)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.run(name, lambda *rest: function(*rest, **kwargs), *args)

        return call

    def connect(self, path: Path) -> Any:
        return _Connection(self, cast(sqlite3.Connection, self.run("connect", self._os.connect, path)))


class _Connection:
    """A SQLite connection whose statements are calls of the hooked IO."""

    def __init__(self, hooks: HookedIO, real: sqlite3.Connection) -> None:
        self._hooks = hooks
        self._real = real

    def execute(self, sql: str, *args: Any) -> Any:
        return self._hooks.run(f"sql {sql.split()[0]}", self._real.execute, sql, *args)

    def executemany(self, sql: str, *args: Any) -> Any:
        return self._hooks.run(f"sql {sql.split()[0]}", self._real.executemany, sql, *args)

    def close(self) -> None:
        self._hooks.run("sql close", self._real.close)


class GatedDisk(HookedIO):
    """Notes where reads begin; fails so many of those at an offset; holds those that begin while `gate` is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets: list[int] = []
        self.failing: dict[int, int] = {}
        self.gate = threading.Event()
        self.gate.set()

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "preadv_batch":
            raise OSError(errno.ENOSYS, "one by one, so that each is seen")
        if name == "preadv" and args[0] >= 0 and len(args[1]):
            offset = args[2]
            self.offsets.append(offset)
            assert self.gate.wait(GATE_TIMEOUT_S)
            if self.failing.get(offset, 0) > 0:
                self.failing[offset] -= 1
                raise OSError(errno.EIO, "Input/output error")
        return call(*args)


def failure(name: str, code: int) -> Exception:
    """What call `name` raises when the system says `code`."""
    if name == "connect" or name.startswith("sql"):
        exc = sqlite3.OperationalError(f"injected {errno.errorcode[code]}")
        exc.sqlite_errorcode = sqlite3.SQLITE_FULL if code in (errno.ENOSPC, errno.EDQUOT) else sqlite3.SQLITE_IOERR
        return exc
    return OSError(code, os.strerror(code))


class FaultyIO(HookedIO):
    """Call k (from 0) fails with an errno, or every call from k on does.

    Args:
        late: the call does its work, and then fails: a commit that happened but is reported as failed.
        only: count and fail only calls of these names.
    """

    def __init__(
        self, k: int, code: int = errno.EIO, *, forever: bool = False, late: bool = False, only: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.k = k
        self.code = code
        self.forever = forever
        self.late = late
        self.only = only
        self.count = 0
        self.fired = 0
        self.armed = True

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if not self.armed or (self.only and name not in self.only):
            return call(*args)
        hit = self.count == self.k or (self.forever and self.count > self.k)
        self.count += 1
        if not hit:
            return call(*args)
        self.fired += 1
        if self.late or name in CLOSERS:
            result = call(*args)
            if name == "open":
                os.close(result)  # the caller never hears of the descriptor, and no kernel leaves one behind a failure
        raise failure(name, self.code)


class ShortIO(HookedIO):
    """Transfers move a random part, and are interrupted now and then."""

    def __init__(self, seed: int, align: int = 4096) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._align = align

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name not in TRANSFERS:
            return call(*args)
        if self._random.random() < 0.3:
            raise InterruptedError(errno.EINTR, "interrupted")
        fd, views, offset = args
        total = sum(len(view) for view in views)
        wanted = min(-(-self._random.randrange(1, total + 1) // self._align) * self._align, total)
        part = []
        for view in views:
            part.append(view[:wanted])
            wanted -= len(part[-1])
        return call(fd, [view for view in part if len(view)], offset)


class KillIO(HookedIO):
    """The process kills itself at the k-th call of a name: before it, after it, or with half of a write done."""

    def __init__(self, name: str, k: int, when: str) -> None:
        super().__init__()
        self._point = name
        self._left = k
        self._when = when

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name.replace(" ", "_") != self._point:
            return call(*args)
        self._left -= 1
        if self._left >= 0:
            return call(*args)
        if self._when == "torn":
            fd, views, offset = args
            call(fd, [views[0][: max(512, len(views[0]) // 2 // 4096 * 4096)]], offset)
        elif self._when == "after":
            call(*args)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


class PowerCut(BaseException):
    """The machine lost power at this call."""


class AmnesicIO(HookedIO):
    """Remembers what was not synced, so that `lose` can take it back: what a power cut does to slab files.

    SQLite's own files are taken to be as durable as it says. Call k raises `PowerCut`, and so do all after it.
    """

    def __init__(self, k: int, *, forget_syncs: bool = False) -> None:
        super().__init__()
        self._k = k
        self._forget_syncs = forget_syncs  # a lying disk: to see that the tests notice
        self._writes: list[tuple[str, int, bytes, bytes]] = []  # path, offset, before, after
        self._synced_sizes: dict[str, int] = {}
        self._created: set[str] = set()
        self.cut = False

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self.cut:
            if name in CLOSERS:
                return call(*args)
            raise PowerCut
        if len(self.names) > self._k:
            self.cut = True
            if name in CLOSERS:
                return call(*args)
            raise PowerCut
        if name == "open":
            return self._open(call, args)
        path = os.readlink(f"/proc/self/fd/{args[0]}") if args and isinstance(args[0], int) else ""
        if "slab-" in path:
            if name == "pwritev":
                return self._write(path, call, args)
            if name in ("fallocate", "ftruncate"):
                self._synced_sizes.setdefault(path, os.path.getsize(path))
        if name in ("fdatasync", "fsync") and not self._forget_syncs:
            call(*args)
            self._writes = [write for write in self._writes if write[0] != path]
            self._synced_sizes.pop(path, None)
            self._created = {made for made in self._created if os.path.dirname(made) != path}
            return None
        return call(*args)

    def _open(self, call: Callable[..., Any], args: tuple[Any, ...]) -> int:
        fd: int = call(*args)
        if "slab-" in str(args[0]) and args[1] & os.O_CREAT:
            self._created.add(os.readlink(f"/proc/self/fd/{fd}"))
        return fd

    def _write(self, path: str, call: Callable[..., Any], args: tuple[Any, ...]) -> int:
        _, views, offset = args
        after = b"".join(views)
        with open(path, "rb") as file:
            file.seek(offset)
            before = file.read(len(after)).ljust(len(after), b"\0")
        moved: int = call(*args)
        self._writes.append((path, offset, before, after))
        return moved

    def lose(self, mode: str, seed: int = 0) -> None:
        """Take unsynced writes back: "kept" none, "lost" all, "torn" each 512-byte sector by chance."""
        rng = random.Random(seed)
        if mode == "kept":
            return
        for path, offset, before, after in reversed(self._writes):
            with open(path, "r+b", buffering=0) as file:
                for at in range(0, len(after), 512):
                    if mode == "lost" or rng.random() < 0.5:
                        os.pwrite(file.fileno(), before[at : at + 512], offset + at)
        for path, size in self._synced_sizes.items():
            if os.path.exists(path) and (mode == "lost" or rng.random() < 0.5):
                os.truncate(path, min(size, os.path.getsize(path)))
        for path in self._created:
            if os.path.exists(path):
                os.unlink(path)


def flip(path: Path, *offsets: int) -> None:
    """A bit of the byte at each of these offsets; called again it is as before."""
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 4]))
