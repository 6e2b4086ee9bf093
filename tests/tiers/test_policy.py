from __future__ import annotations

import random
import time
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tierd.tiers.policy import HALF_LIFE_S, RecomputeCost, VictimHeap, rank, reserve_pages


@dataclass(eq=False)
class Page:
    value: float
    eligible: bool = True
    queued: int = 0


def heap() -> VictimHeap[Page]:
    return VictimHeap(1, lambda page: page.eligible, lambda page: page.value)


def test_rank_prefers_recent_popular_long_and_deep() -> None:
    cost = RecomputeCost()
    base = rank(1000, 1, 16, 0, 4096, cost)
    assert rank(1001, 1, 16, 0, 4096, cost) > base
    assert rank(1000, 2, 16, 0, 4096, cost) > base
    assert rank(1000, 1, 15, 0, 4096, cost) < base
    assert rank(1000, 1, 16, 5000, 4096, cost) > base
    assert rank(1000, 1, 16, 0, 8192, cost) < base


def test_a_half_life_halves_the_chance() -> None:
    cost = RecomputeCost()
    used_once_now = rank(HALF_LIFE_S, 0, 16, 0, 4096, cost)
    used_twice_before = rank(0, 1, 16, 0, 4096, cost)
    assert abs(used_once_now - used_twice_before) < 1e-9


def test_popularity_is_bounded() -> None:
    cost = RecomputeCost()
    assert rank(0, 10**9, 16, 0, 4096, cost) < rank(9 * HALF_LIFE_S, 0, 16, 0, 4096, cost)


@given(st.lists(st.tuples(st.floats(0, 9), st.booleans(), st.floats(0, 9), st.booleans()), max_size=40))
def test_the_heap_gives_the_least_eligible_page(pages: list[tuple[float, bool, float, bool]]) -> None:
    victims = heap()
    made = []
    for value, eligible, later, still in pages:
        page = Page(value, eligible)
        victims.offer(page)
        victims.offer(page)  # a second offer changes nothing
        made.append(page)
        page.value = max(value, later)  # values only grow: a page is used
        page.eligible = eligible and still
    wanted = sorted(page.value for page in made if page.eligible)
    found = []
    while (victim := victims.pop()) is not None:
        assert victim.eligible
        assert not victim.queued
        found.append(victim.value)
    assert found == wanted
    assert len(victims) == 0


def test_a_page_is_offered_again_when_it_is_eligible_again() -> None:
    victims, page = heap(), Page(1)
    victims.offer(page)
    page.eligible = False
    assert victims.pop() is None
    page.eligible = True
    assert victims.pop() is None  # nobody offered it
    victims.offer(page)
    assert victims.pop() is page


def test_reserve() -> None:
    assert [reserve_pages(slots) for slots in (0, 15, 16, 160, 100_000)] == [0, 0, 1, 10, 64]


def test_eviction_does_not_scan() -> None:
    # 100,000 candidates; the bound is far above what is measured (3 us a page), and far below a scan (10 ms).
    rng = random.Random(1)
    victims = heap()
    pages = [Page(rng.random()) for _ in range(100_000)]
    for page in pages:
        victims.offer(page)
    start_s = time.perf_counter()
    for _ in range(1000):
        victim = victims.pop()
        assert victim is not None
        victim.value += 1
        victims.offer(victim)
    assert time.perf_counter() - start_s < 0.5
