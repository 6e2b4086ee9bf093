"""What happened to the daemon and its engines, for `tierd top`: the newest entries. Of pages the engines tell."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

MAX_ENTRIES = 500


class History:
    """A bounded log. Threading: for one event loop.

    Args:
        wall: Unix time.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._entries: deque[dict[str, Any]] = deque(maxlen=MAX_ENTRIES)
        self._number = 0

    def tell(self, kind: str, text: str) -> None:
        """Something happened: `load`, `unload`, `crash`, `notice` or `batch`."""
        self._number += 1
        at_s = round(self._wall(), 3)
        self._entries.append({"number": self._number, "kind": kind, "text": text, "at_s": at_s})

    def since(self, number: int) -> list[dict[str, Any]]:
        """The entries after the one with this number, the oldest first; 0 for all that are kept."""
        return [entry for entry in self._entries if entry["number"] > number]
