"""What to evict first. Pure: no clock, no threads, no bytes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

HALF_LIFE_S = 600.0  # a page that nobody asked for in this time is half as likely to be asked for
_MAX_HITS = 255  # a page that was very popular once must be able to age

WRITE_GROUP_PAGES = 32  # one fdatasync each; 32 pages of 0.7 MB keep an NVMe drive busy for some 10 ms
WRITE_GROUP_WAIT_S = 0.05  # how long a page may wait for others to share its fdatasync
MAX_RESERVE_PAGES = 64


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """Seconds to compute one token at position p: `token_s + p * position_s` (projections, then attention).

    Only the ratio matters for the order of eviction. The default is that of a small model on a CPU, where attention
    over 4,000 tokens costs as much as all matrices.
    """

    token_s: float = 0.004
    position_s: float = 1e-6


def rank(last_use_s: float, hits: int, tokens: int, first_position: int, num_bytes: int, cost: RecomputeCost) -> float:
    """How much a page is worth keeping; the lowest is evicted first.

    The value is `seconds to recompute * chance of use / bytes`, where the chance halves every `HALF_LIFE_S` without a
    use and grows with the uses seen. Its logarithm orders pages in the same way and needs no clock: what time takes
    from one page it takes from all, so a rank stays right until the page is used again.
    """
    seconds = tokens * (cost.token_s + (first_position + tokens / 2) * cost.position_s)
    return last_use_s / HALF_LIFE_S + math.log2((1 + min(hits, _MAX_HITS)) * seconds / num_bytes)


def reserve_pages(slots: int) -> int:
    """Device slots to keep free ahead of need, where making room means waiting for a copy."""
    return min(slots // 16, MAX_RESERVE_PAGES)


class Rankable(Protocol):
    """What a `VictimHeap` holds: anything that remembers by a bit whether a heap holds it."""

    queued: int


T = TypeVar("T", bound=Rankable)


class VictimHeap(Generic[T]):
    """Candidates for eviction from one tier, the least valuable on top.

    Whoever changes a page calls `offer` when it may have become a candidate. Entries go stale: a page that is used,
    pinned or gone stays in the heap and is looked at again when it comes to the top. So `offer` and `pop` cost
    O(log n) amortized and nothing ever scans the pages.

    Args:
        bit: this heap's bit in `queued`; a page is in each heap at most once.
        eligible: whether the page may be evicted from this tier now.
        value: its rank now.
    """

    def __init__(self, bit: int, eligible: Callable[[T], bool], value: Callable[[T], float]) -> None:
        self._bit = bit
        self._eligible = eligible
        self._value = value
        self._heap: list[tuple[float, int, T]] = []
        self._serial = 0  # breaks ties by age, and keeps pages themselves from being compared

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, page: T) -> None:
        """Makes the page a candidate if it is eligible and not in the heap yet."""
        if not page.queued & self._bit and self._eligible(page):
            self._push(page, self._value(page))

    def pop(self) -> T | None:
        """Takes the least valuable eligible page out of the heap; None if there is none.

        A page that comes back unevicted must be offered again.
        """
        while self._heap:
            entered, _, page = heapq.heappop(self._heap)
            page.queued &= ~self._bit
            if not self._eligible(page):
                continue  # offered again when it becomes eligible
            value = self._value(page)
            if value > entered and self._heap and value > self._heap[0][0]:
                self._push(page, value)  # used since it was offered, and no longer the least
                continue
            return page
        return None

    def _push(self, page: T, value: float) -> None:
        page.queued |= self._bit
        self._serial += 1
        heapq.heappush(self._heap, (value, self._serial, page))
