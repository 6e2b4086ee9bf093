"""A card's memory that a test makes up: in this process, or in a file for a daemon that is another one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from tierd.daemon.card import CardError, Other, Reading

GIB = 1 << 30


class MadeUpCard:
    """`CardReader`. `memory` says how much each process of ours has on it; a game has `others_bytes`.

    `meanwhile` is called on the thread that reads, when the figures are taken.
    """

    def __init__(self, memory: Callable[[], Mapping[int, int]], total_bytes: int = 24 * GIB) -> None:
        self.total_bytes = total_bytes
        self.others_bytes = 0
        self.error = ""
        self.listed = True
        self.closed = False
        self.pids: Collection[int] = ()
        self.memory = memory
        self.meanwhile: Callable[[], object] = lambda: None

    def read(self, pids: Collection[int]) -> Reading | None:
        self.pids = pids
        if self.error:
            raise CardError(self.error)
        used = dict(self.memory())
        if not self.listed or used.keys().isdisjoint(pids):
            return None
        used |= {4242: self.others_bytes} if self.others_bytes else {}
        others = [Other(pid, "game", size) for pid, size in used.items() if pid not in pids]
        ours = sum(size for pid, size in used.items() if pid in pids)
        whole = sum(used.values())
        self.meanwhile()
        return Reading(self.total_bytes, self.total_bytes - whole, ours, whole - ours, tuple(others))

    def close(self) -> None:
        self.closed = True


class FileCard:
    """`CardReader`, whose figures stand in a file: `{"free_bytes": ..., "others_bytes": ...}` or `{"error": ...}`.

    `{"hangs": "open"}` or "read": that never comes back. Beside the file `.reading` says that a read has begun, and
    `.closed` that the library was let go of.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._may_hang("open")

    def read(self, pids: Collection[int]) -> Reading | None:
        self._path.with_suffix(".reading").touch()
        self._may_hang("read")
        told = json.loads(self._path.read_text())
        if "error" in told:
            raise CardError(told["error"])
        others = (Other(4242, "game", told["others_bytes"]),)
        return Reading(24 * GIB, told["free_bytes"], GIB, told["others_bytes"], others)

    def close(self) -> None:
        self._path.with_suffix(".closed").touch()

    def _may_hang(self, what: str) -> None:
        if json.loads(self._path.read_text()).get("hangs") == what:
            threading.Event().wait(600)
