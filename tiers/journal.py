"""What happened to pages, for whoever looks: the newest entries. Many like things soon after each other are one."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tierd.tiers.page import PageKey, Tier
from tierd.tiers.prefix import NOWHERE, Node

MAX_ENTRIES = 1000
_OPEN_S = 1.0  # what an entry sums up, at the most


class What(enum.StrEnum):
    """What an entry tells."""

    EVICT = "evict"  # a copy went to make room
    SPILL = "spill"  # the same, of a page that a request needs: it reads it below
    DEMOTE = "demote"  # copied from the device to CPU memory
    RESTORE = "restore"  # came from disk to memory
    PERSIST = "persist"  # became durable
    DAMAGE = "damage"  # a page on disk failed its check
    PREFIX = "prefix"  # somebody pinned, dropped, persisted or evicted one
    RESIZE = "resize"  # an arena has another size
    PREEMPT = "preempt"  # requests gave their pages back for others
    FAILURE = "failure"  # requests failed
    ENGINE = "engine"  # it began


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry.

    Attributes:
        number: grows by one.
        at_s: of the pager's clock, when the last of it happened.
        count: how often it happened.
        text: what happened, where the kind does not say it all.
        key: of the page it happened to last, None when it concerns none.
        tier, slot: where that page's copy came to lie, or lay until then; slot NOWHERE on disk.
    """

    number: int
    what: What
    at_s: float
    count: int
    text: str
    key: PageKey | None
    tier: Tier | None
    slot: int


@dataclass(slots=True)
class _Open:
    """An entry that may grow yet."""

    count: int
    node: Node
    slot: int
    at_s: float


class Journal:
    """A bounded record. Not thread-safe: only the pager's thread calls it.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self._number = 0
        self._open: dict[tuple[What, Tier], _Open] = {}
        self._opened_s = 0.0

    def page(self, what: What, node: Node, tier: Tier, slot: int = NOWHERE) -> None:
        """It happened to a page. Costs about a microsecond, for a device that is full loses pages in every step."""
        now_s = self._clock()
        if self._open and now_s - self._opened_s >= _OPEN_S:
            self._close()
        found = self._open.get((what, tier))
        if found is None:
            if not self._open:
                self._opened_s = now_s
            self._open[what, tier] = _Open(1, node, slot, now_s)
            return
        found.count += 1
        found.node, found.slot, found.at_s = node, slot, now_s

    def tell(self, what: What, text: str, node: Node | None = None, count: int = 1) -> None:
        """An entry of its own: something that does not happen all the time."""
        self._close()
        key, tier, slot = None, None, NOWHERE
        if node is not None:
            key, tier = node.key, node.nearest if node.has_copy else None
            slot = node.device if node.device >= 0 else node.host
        self._add(what, self._clock(), count, text, key, tier, slot)

    def since(self, number: int) -> list[Entry]:
        """The entries after the one with this number, the oldest first; 0 for all that are kept."""
        self._close()
        missing = self._number - number
        if missing >= len(self._entries):
            return list(self._entries)
        return [self._entries[place] for place in range(len(self._entries) - max(missing, 0), len(self._entries))]

    def _close(self) -> None:
        """What was summed up until now is told as it is: it grows no more."""
        for (what, tier), found in sorted(self._open.items(), key=lambda item: item[1].at_s):
            self._add(what, found.at_s, found.count, "", found.node.key, tier, found.slot)
        self._open.clear()

    def _add(
        self, what: What, at_s: float, count: int, text: str, key: PageKey | None, tier: Tier | None, slot: int
    ) -> None:
        self._number += 1
        self._entries.append(Entry(self._number, what, at_s, count, text, key, tier, slot))
