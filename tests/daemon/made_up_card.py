"""A card's memory that a test makes up: in this process, or in a file for a daemon that is another one."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tierd.daemon.card import CardError, Other, Reading

GIB = 1 << 30


class MadeUpCard:
    """`CardReader`. `arenas` says how much our engines have on it; the rest of what is ours is `fixed_bytes`."""

    def __init__(self, arenas: Any, total_bytes: int = 24 * GIB, fixed_bytes: int = GIB) -> None:
        self.total_bytes = total_bytes
        self.fixed_bytes = fixed_bytes
        self.others_bytes = 0
        self.error = ""
        self.listed = True
        self.closed = False
        self.pids: Collection[int] = ()
        self._arenas = arenas

    def read(self, pids: Collection[int]) -> Reading | None:
        self.pids = pids
        if self.error:
            raise CardError(self.error)
        if not self.listed:
            return None
        ours = self._arenas() + self.fixed_bytes
        others = (Other(4242, "game", self.others_bytes),) if self.others_bytes else ()
        free = self.total_bytes - ours - self.others_bytes
        return Reading(self.total_bytes, free, ours, self.others_bytes, others)

    def close(self) -> None:
        self.closed = True


class FileCard:
    """`CardReader`, whose figures stand in a file: `{"free_bytes": ..., "others_bytes": ...}` or `{"error": ...}`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, pids: Collection[int]) -> Reading | None:
        told = json.loads(self._path.read_text())
        if "error" in told:
            raise CardError(told["error"])
        others = (Other(4242, "game", told["others_bytes"]),)
        return Reading(24 * GIB, told["free_bytes"], GIB, told["others_bytes"], others)

    def close(self) -> None:
        """Nothing is held."""
