"""What is sooner for a missing expert: never later than the link alone, and what the processors cost is learned."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations

import pytest

from tierd.daemon.engine.model.misses import ComputeCost, computed_elsewhere


def per_row(seconds: float) -> Callable[[int], float]:
    return lambda rows: rows * seconds


def test_one_expert_goes_the_way_that_is_sooner() -> None:
    assert computed_elsewhere([(7, 1)], {7}, 0, 2.0, per_row(1.0)) == [7]
    assert computed_elsewhere([(7, 3)], {7}, 0, 2.0, per_row(1.0)) == []
    assert computed_elsewhere([(7, 2)], {7}, 0, 2.0, per_row(1.0)) == [], "the link leaves something behind"
    assert computed_elsewhere([(7, 3)], {7}, 1, 2.0, per_row(1.0)) == [7], "it would wait for another"
    assert computed_elsewhere([(7, 1)], set(), 0, 2.0, per_row(1.0)) == [], "it lies on the disk"
    assert computed_elsewhere([], set(), 3, 2.0, per_row(1.0)) == []


def test_of_several_both_sides_take_some_at_once() -> None:
    missing = [(1, 9), (2, 1), (3, 1), (4, 1)]
    assert computed_elsewhere(missing, {1, 2, 3, 4}, 0, 1.0, per_row(1.0)) == [2, 3]
    assert computed_elsewhere(missing, {1, 4}, 0, 1.0, per_row(1.0)) == [4]
    assert computed_elsewhere(missing, {1, 2, 3, 4}, 0, 1.0, per_row(1e-3), max_rows=2) == [2, 3]
    assert computed_elsewhere(missing, {1, 2, 3, 4}, 0, 1.0, per_row(0.1)) == [2, 3, 4]


@pytest.mark.parametrize("seed", range(30))
def test_no_other_choice_of_the_fewest_rows_ends_earlier(seed: int) -> None:
    chance = random.Random(seed)
    missing = [(number, chance.randint(1, 6)) for number in range(chance.randint(1, 6))]
    can = {number for number, _ in missing if chance.random() < 0.8}
    ahead, fetch_s = chance.randint(0, 2), chance.uniform(0.1, 5)
    cost = ComputeCost({1: chance.uniform(0.1, 2), 8: chance.uniform(2, 9)})
    rows = dict(missing)

    def end_s(computed: tuple[int, ...]) -> float:
        return max(sum(cost.of(rows[one]) for one in computed), (ahead + len(missing) - len(computed)) * fetch_s)

    found = computed_elsewhere(missing, can, ahead, fetch_s, cost.of)
    assert set(found) <= can
    least = min(end_s(some) for count in range(len(can) + 1) for some in combinations(sorted(can), count))
    assert end_s(tuple(found)) == pytest.approx(least)


def test_costs_lie_between_what_is_known_and_grow_beyond_it() -> None:
    cost = ComputeCost({8: 2.0, 1: 1.0})
    assert [cost.of(rows) for rows in (1, 8, 16)] == [1.0, 2.0, 4.0] and 1.0 < cost.of(4) < 2.0
    with pytest.raises(ValueError, match="costs at numbers of rows"):
        ComputeCost({})


def test_costs_follow_what_is_measured_and_no_single_odd_time() -> None:
    cost = ComputeCost({1: 1.0, 64: 10.0})
    cost.learn([1], 1000.0)
    assert cost.of(1) < 1.5
    for _ in range(60):
        cost.learn([1, 1, 1], 6.0)
    assert cost.of(1) == pytest.approx(2.0, rel=0.01) and cost.of(64) == 10.0
