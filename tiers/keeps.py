"""Pins with a time to live: which pages are kept until when. Pure bookkeeping over keys; the clock is an argument.

Times are of the wall clock, in seconds since 1970, because they are compared after a restart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tierd.tiers.page import PageKey

MAX_TTL_S = 86_400.0  # a longer wish is one for a day; so is one that a clock that was wrong has left behind
MAX_KEEPS = 1024  # wishes at once; the one that ends soonest goes for a new one
# A wish repeated by every request of a conversation is written down anew only when that gains so much of it.
_WORTH = 0.05


class Added(NamedTuple):
    """What came of a wish. `displaced`: another that had to go for it, whose pages are not kept for it any more."""

    gained: bool  # False: it is met already
    displaced: PageKey | None = None


class Keeps:
    """Ends of wishes by the key of the last page that they cover."""

    def __init__(self, until_s: Mapping[PageKey, float], now_s: float) -> None:
        self._until_s = {key: min(until, now_s + MAX_TTL_S) for key, until in until_s.items() if until > now_s}
        self._next_s = min(self._until_s.values(), default=math.inf)  # none ends before; perhaps later

    def __len__(self) -> int:
        return len(self._until_s)

    def __iter__(self) -> Iterator[PageKey]:
        return iter(self._until_s)

    def __contains__(self, key: object) -> bool:
        return key in self._until_s

    def until_s(self) -> dict[PageKey, float]:
        """All of them."""
        return dict(self._until_s)

    def add(self, key: PageKey, ttl_s: float, now_s: float) -> Added:
        """Prolongs a wish, or takes a new one in."""
        ttl_s = min(ttl_s, MAX_TTL_S)
        if now_s + ttl_s <= self._until_s.get(key, now_s) + ttl_s * _WORTH:
            return Added(False)
        displaced = None
        if key not in self._until_s and len(self._until_s) >= MAX_KEEPS:
            displaced = self.soonest()
            if displaced is not None:
                del self._until_s[displaced]
        self._until_s[key] = now_s + ttl_s
        self._next_s = min(self._next_s, now_s + ttl_s)
        return Added(True, displaced)

    def drop(self, keys: set[PageKey]) -> bool:
        """Forgets some; whether there were any."""
        found = self._until_s.keys() & keys
        for key in found:
            del self._until_s[key]
        return bool(found)

    def soonest(self) -> PageKey | None:
        """The one that ends first."""
        return min(self._until_s, key=self._until_s.__getitem__, default=None)

    def expire(self, now_s: float) -> bool:
        """Forgets those that have ended; whether there were any. Cheap when it is too early for that."""
        if now_s < self._next_s:
            return False
        ended = self.drop({key for key, until in self._until_s.items() if until <= now_s})
        self._next_s = min(self._until_s.values(), default=math.inf)
        return ended
