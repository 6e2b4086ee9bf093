"""What to evict first. Pure: no clock, no threads, no bytes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

HALF_LIFE_S = 600.0  # a page that nobody asked for in this time is half as likely to be asked for
_MAX_HITS = 255  # a page that was very popular once must be able to age
# A page that was asked for again is so much likelier to be asked for once more than one that was only computed. 2**6:
# a prompt that nobody repeats displaces a prefix used twice only after six half-lives without a use, which is an hour.
_PROVEN = 64

WRITE_GROUP_PAGES = 32  # one fdatasync each; 32 pages of 0.7 MB keep an NVMe drive busy for some 10 ms
WRITE_GROUP_WAIT_S = 0.05  # how long a page may wait for others to share its fdatasync
MAX_RESERVE_PAGES = 64
_EVERYTHING_SHARE = 0.5  # of the day's writes are for any page


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """Seconds to compute one token at position p: `token_s + p * position_s` (projections, then attention).

    The default is that of a small model on a CPU, where attention over 4,000 tokens costs as much as all matrices.
    """

    token_s: float = 0.004
    position_s: float = 1e-6

    def seconds(self, tokens: int, first_position: int) -> float:
        """Seconds to compute `tokens` tokens in a row."""
        return tokens * (self.token_s + (first_position + tokens / 2) * self.position_s)


class CostEstimator:
    """The `RecomputeCost` of this machine, from what steps took: a straight line through (position, seconds a row).

    Least squares, each step weighted by its rows, older steps by `FADE` for each later one (about the last 50 count).
    A step tells only about the positions that it had, and steps of short prompts alone say nothing about the slope.
    So `PRIOR_ROWS` imagined rows lie on a line with the default's ratio of slope to height through the mean of what
    was measured: as measured positions spread, they count for less and less.
    """

    FADE = 0.98
    PRIOR_ROWS = 256.0
    PRIOR_SPREAD = 512.0  # of their positions around the mean

    def __init__(self) -> None:
        self._rows = 0.0  # weighted sums: of 1, x, y, x * x, x * y
        self._x = self._y = self._xx = self._xy = 0.0

    def add(self, rows: int, position: float, seconds: float) -> None:
        """Takes a step in.

        Args:
            rows: tokens that were computed.
            position: mean of their positions.
            seconds: what the whole step took.
        """
        if rows <= 0 or seconds <= 0.0:
            return
        each_s = seconds / rows
        self._rows = self._rows * self.FADE + rows
        self._x = self._x * self.FADE + rows * position
        self._y = self._y * self.FADE + rows * each_s
        self._xx = self._xx * self.FADE + rows * position * position
        self._xy = self._xy * self.FADE + rows * position * each_s

    @property
    def cost(self) -> RecomputeCost:
        """The estimate; the default before the first step."""
        default = RecomputeCost()
        if not self._rows:
            return default
        mean_x, mean_y = self._x / self._rows, self._y / self._rows
        ratio = default.position_s / default.token_s
        slope = mean_y * ratio / (1.0 + ratio * mean_x)  # of the imagined rows
        imagined = self.PRIOR_ROWS * self.PRIOR_SPREAD**2
        spread = max(0.0, self._xx - self._x * mean_x)
        together = self._xy - self._x * mean_y
        slope = max(0.0, (together + imagined * slope) / (spread + imagined))
        # A line that would fall below nothing at the start goes through the origin almost: no token is free.
        height = max(mean_y - slope * mean_x, mean_y / 100.0)
        return RecomputeCost(height, slope)


def rank(last_use_s: float, hits: int, tokens: int, first_position: int, num_bytes: int, cost: RecomputeCost) -> float:
    """How much a page is worth keeping; the lowest is evicted first.

    The value is `seconds to recompute * chance of use / bytes`. The chance halves every `HALF_LIFE_S` without a use
    and grows with the uses seen; the first use after the computation proves that the page is shared at all, and makes
    the chance `_PROVEN` times what it was. So pages that only one prompt ever had go before those of a prefix that
    came back, however many they are. Among themselves the oldest goes first, for the deeper a page lies, the less
    likely is a second prompt that goes so far with the first: about as much less as it costs more.

    The logarithm of the value orders pages in the same way and needs no clock: what time takes from one page it takes
    from all, so a rank stays right until the page is used again. In the same way the seconds are counted in those of a
    token at the start: all pages of a tier are computed by one machine, and a rank does not jump when it is measured.
    """
    work = cost.seconds(tokens, first_position if hits else 0) / cost.token_s
    chance = 1 + _PROVEN * min(hits, _MAX_HITS)
    return last_use_s / HALF_LIFE_S + math.log2(chance * work / num_bytes)


def worth_writing(hits: int, is_full: bool, left_share: float) -> bool:
    """Whether a page deserves a write of its store.

    While more than half of the day's writes are left, every page does. The rest is for pages that came back: one that
    only one prompt ever had, and a partial one, which the next turn replaces, can be computed again. A page that is not
    written now is asked about again when it is used.

    Args:
        left_share: of the day's writes, from 0 (nothing left) to 1.
    """
    return left_share > _EVERYTHING_SHARE or (hits > 0 and is_full)


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

    def peek(self) -> T | None:
        """The page that `pop` would give; it stays a candidate."""
        page = self.pop()
        if page is not None:
            self._push(page, self._value(page))
        return page

    def least(self) -> float:
        """The value of the page that `pop` would give; infinite if there is none."""
        page = self.peek()
        return math.inf if page is None else self._value(page)

    def before(self, page: T) -> int:
        """How many candidates would go before this one, by the values with which they came: a page used since stands
        too early. Looks at all of them."""
        value = self._value(page)
        return sum(entered < value for entered, _, _ in self._heap)

    def _push(self, page: T, value: float) -> None:
        page.queued |= self._bit
        self._serial += 1
        heapq.heappush(self._heap, (value, self._serial, page))
