from __future__ import annotations

import random
import time
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tierd.tiers.policy import (
    HALF_LIFE_S,
    CostEstimator,
    RecomputeCost,
    VictimHeap,
    rank,
    reserve_pages,
    worth_writing,
)


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
    one_page_now = rank(HALF_LIFE_S, 1, 16, 0, 4096, cost)
    twice_the_bytes_later = rank(2 * HALF_LIFE_S, 1, 16, 0, 8192, cost)
    assert abs(one_page_now - twice_the_bytes_later) < 1e-9


def test_a_page_that_came_back_outlives_one_that_did_not_and_cost_more() -> None:
    cost = RecomputeCost()
    shared = rank(0, 1, 16, 0, 4096, cost)
    assert shared > rank(1800, 0, 16, 8000, 4096, cost)
    assert shared < rank(2 * 3600, 0, 16, 0, 4096, cost)


def test_popularity_is_bounded() -> None:
    cost = RecomputeCost()
    assert rank(0, 10**9, 16, 0, 4096, cost) < rank(15 * HALF_LIFE_S, 0, 16, 0, 4096, cost)


def test_cost_of_a_run_is_the_sum_of_its_tokens() -> None:
    cost = RecomputeCost(0.002, 1e-6)
    each = sum(0.002 + (position + 0.5) * 1e-6 for position in range(100, 116))
    assert abs(cost.seconds(16, 100) - each) < 1e-12


def test_the_estimator_starts_with_the_default() -> None:
    estimator = CostEstimator()
    assert estimator.cost == RecomputeCost()
    estimator.add(0, 5.0, 1.0)
    estimator.add(8, 5.0, 0.0)
    assert estimator.cost == RecomputeCost()


def test_the_estimator_finds_height_and_slope() -> None:
    rng, estimator = random.Random(3), CostEstimator()
    for _ in range(200):
        rows, position = rng.choice([1, 64, 512]), rng.uniform(0, 8000)
        estimator.add(rows, position, rows * (0.001 + 2e-6 * position) * rng.uniform(0.9, 1.1))
    cost = estimator.cost
    assert abs(cost.token_s / 0.001 - 1) < 0.25
    assert abs(cost.position_s / 2e-6 - 1) < 0.1


def test_short_prompts_alone_move_the_height_and_keep_the_shape() -> None:
    estimator, default = CostEstimator(), RecomputeCost()
    for _ in range(50):
        estimator.add(64, 32.0, 64 * 0.0004)
    cost = estimator.cost
    assert abs(cost.token_s / 0.0004 - 1) < 0.05
    assert abs(cost.position_s / cost.token_s / (default.position_s / default.token_s) - 1) < 0.05


def test_the_estimator_follows_a_machine_that_changes() -> None:
    estimator = CostEstimator()
    for _ in range(200):
        estimator.add(64, 1000.0, 64 * 0.001)
    for _ in range(200):
        estimator.add(64, 1000.0, 64 * 0.01)
    assert abs(estimator.cost.seconds(1, 1000) / 0.01 - 1) < 0.05


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(0, 1e5), st.floats(1e-6, 10)), min_size=1, max_size=30))
def test_no_token_is_ever_free(steps: list[tuple[int, float, float]]) -> None:
    estimator = CostEstimator()
    for step in steps:
        estimator.add(*step)
    cost = estimator.cost
    assert cost.token_s > 0
    assert cost.position_s >= 0


def test_with_half_of_the_writes_left_every_page_is_written() -> None:
    assert worth_writing(0, False, 0.6)
    assert not worth_writing(0, True, 0.4)
    assert not worth_writing(3, False, 0.4)
    assert worth_writing(3, True, 0.4)


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


def test_the_least_value_is_that_of_the_next_victim() -> None:
    victims = heap()
    assert victims.least() == float("inf")
    for value in (3, 1, 2):
        victims.offer(Page(value))
    assert victims.least() == 1
    victim = victims.pop()
    assert victim is not None
    assert victim.value == 1


def test_a_rank_does_not_depend_on_how_fast_the_machine_is() -> None:
    slow, fast = RecomputeCost(0.004, 1e-6), RecomputeCost(0.0004, 1e-7)
    assert abs(rank(0, 1, 16, 900, 4096, slow) - rank(0, 1, 16, 900, 4096, fast)) < 1e-9


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
