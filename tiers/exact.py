"""Exact copies of a few packed pages in memory: those that running requests need, and as many known ones as fit.

A copy belongs to the page of the same key. It is worth no more than computing a few tokens again, so it lies in memory
alone, and the one that was used least recently goes when another one needs its slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tierd.tiers.arena import Arena, SlotState
from tierd.tiers.copies import copy_on_host
from tierd.tiers.gpu import Row
from tierd.tiers.page import PageKey


@dataclass(slots=True, eq=False)
class Copy:
    """An exact copy of a page, or of its first `tokens` tokens. Without a `key` it has one owner, who writes to it."""

    slot: int
    tokens: int = 0
    key: PageKey | None = None
    pins: int = 1


class ExactStats(NamedTuple):
    """Pages of the copies, and their bytes."""

    total_pages: int
    used_pages: int
    cached_pages: int
    total_bytes: int


class ExactPages:
    """Copies in an arena of their own.

    Not thread-safe: only the pager's thread calls it. Whoever creates it has counted what running requests pin at most:
    there is always a slot for them.

    Args:
        arena: the memory, which nobody else uses.
        copy: a row of it to another one; returns when it is there.
    """

    def __init__(self, arena: Arena, copy: Callable[[Row, Row], None] = copy_on_host) -> None:
        self.arena = arena
        self._copy = copy
        self._known: dict[PageKey, Copy] = {}
        self._idle: OrderedDict[PageKey, None] = OrderedDict()  # not pinned, the one used last behind

    def find(self, key: PageKey, tokens: int) -> Copy | None:
        """The known copy of a page that holds so many tokens, pinned."""
        copy = self._known.get(key)
        if copy is None or copy.tokens < tokens:
            return None
        if not copy.pins:
            del self._idle[key]
            self.arena.set_state(copy.slot, SlotState.PINNED)
        copy.pins += 1
        return copy

    def make(self, first: Copy | None = None) -> Copy:
        """A new copy, pinned, of a page that is about to be written; it begins with what is in `first`."""
        if not self.arena.num_free and self._idle:
            self._forget(self._known[next(iter(self._idle))])
        slot = self.arena.alloc(SlotState.PRIVATE)
        if slot is None:
            raise AssertionError(f"{self.arena}: requests pin more copies than were counted")
        if first is None:
            return Copy(slot)
        self._copy(self.arena.row(slot), self.arena.row(first.slot))
        return Copy(slot, first.tokens)

    def name(self, copy: Copy, key: PageKey, tokens: int) -> None:
        """Makes a copy known, unless another one of its page is: nobody writes to it from here on."""
        if copy.key is None and key not in self._known:
            copy.key, copy.tokens = key, tokens
            self._known[key] = copy
            self.arena.set_state(copy.slot, SlotState.PINNED)

    def drop(self, copy: Copy) -> None:
        """Ends a pin. A copy without a key is gone then."""
        copy.pins -= 1
        if copy.pins:
            return
        if copy.key is None:
            self.arena.drop(copy.slot)
            return
        self._idle[copy.key] = None
        self.arena.set_state(copy.slot, SlotState.IDLE)

    def address(self, copy: Copy) -> int:
        """Where its record lies."""
        return self.arena.address(copy.slot)

    def statistics(self) -> ExactStats:
        """What there is now."""
        arena = self.arena
        return ExactStats(arena.total, arena.used, arena.cached, arena.total * arena.record_bytes)

    def check(self) -> list[str]:
        """Findings about the books of the copies; empty when all is right."""
        findings = self.arena.check()
        slots = [copy.slot for copy in self._known.values()]
        if len(set(slots)) != len(slots):
            findings.append("exact: two known copies lie in one slot")
        for key, copy in self._known.items():
            wanted = SlotState.PINNED if copy.pins else SlotState.IDLE
            state = self.arena.state(copy.slot)
            if state is not wanted or (key in self._idle) != (not copy.pins):
                findings.append(f"exact: slot {copy.slot} has {copy.pins} pins and is {state.name}")
        if len(self._known) != self.arena.counts[SlotState.PINNED] + self.arena.counts[SlotState.IDLE]:
            findings.append("exact: a slot that counts as known is not")
        return findings

    def _forget(self, copy: Copy) -> None:
        assert copy.key is not None
        del self._known[copy.key], self._idle[copy.key]
        self.arena.drop(copy.slot)
