"""Experts that stay in memory: the rules one by one, and how often a trace of a mixture finds what it needs."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from tierd.tiers.weights_policy import ExpertPolicy


def passes(policy: ExpertPolicy, count: int) -> None:
    for _ in range(count):
        policy.next_pass()


def test_the_one_that_was_used_least_goes() -> None:
    policy = ExpertPolicy(4)
    policy.next_pass()
    for expert, times in enumerate((3, 1, 2)):
        for _ in range(times):
            policy.use(expert, 1.0, was_there=False)
    assert policy.worthless(np.array([0, 1, 2])) == 1
    assert policy.worthless(np.array([2, 0])) == 0
    assert policy.worthless(np.array([0, 1, 2, 3])) == 3


def test_old_uses_count_less_and_less() -> None:
    policy = ExpertPolicy(2, half_life=10.0)
    policy.next_pass()
    for _ in range(3):
        policy.use(0, 1.0, was_there=False)
    passes(policy, 10)
    policy.use(1, 1.0, was_there=False)
    assert policy.worthless(np.array([0, 1])) == 1
    passes(policy, 10)
    policy.use(1, 1.0, was_there=False)
    assert policy.worthless(np.array([0, 1])) == 0


def test_rows_of_a_long_prompt_count_by_their_share() -> None:
    policy = ExpertPolicy(2)
    policy.use(0, 0.1, was_there=False)
    policy.use(1, 0.2, was_there=False)
    assert policy.worthless(np.array([0, 1])) == 0


def test_of_two_that_are_used_alike_the_one_that_is_there_stays() -> None:
    policy = ExpertPolicy(2)
    policy.use(0, 1.0, was_there=True)
    policy.use(1, 1.1, was_there=False)
    assert policy.worthless(np.array([0, 1])) == 1
    assert policy.worthless(np.array([1, 0])) == 0
    policy.gone(0)
    assert policy.worthless(np.array([0, 1])) == 0


def test_a_guess_takes_no_place_of_one_that_is_used_more() -> None:
    policy = ExpertPolicy(3)
    policy.use(0, 1.0, was_there=True)
    policy.use(1, 1.2, was_there=False)
    policy.use(2, 2.0, was_there=False)
    assert not policy.wants(1, 0)
    assert policy.wants(2, 0)
    assert policy.wants(0, 1) is False


def test_millions_of_passes_change_no_order() -> None:
    policy = ExpertPolicy(2, half_life=1.0)
    for _ in range(1500):
        policy.next_pass()
        policy.use(0, 1.0, was_there=True)
        policy.use(1, 2.0, was_there=True)
        assert [policy.worthless(np.array(held)) for held in ([0, 1], [1, 0])] == [0, 1]


def trace(seed: int, layers: int, experts: int, used: int, steps: int, turns: int) -> list[list[int]]:
    """What each layer of each pass asks for: popularities fall off as 1 / rank, and change `turns` times."""
    rng = np.random.default_rng(seed)
    asked: list[list[int]] = []
    for step in range(steps):
        if step % -(-steps // (turns + 1)) == 0:
            ranks = np.array([rng.permutation(experts) for _ in range(layers)])
        for layer in range(layers):
            chances = 1.0 / (1 + ranks[layer])
            chosen = rng.choice(experts, used, replace=False, p=chances / chances.sum())
            asked.append((layer * experts + chosen).tolist())
    return asked


def hits_of_policy(asked: list[list[int]], layers: int, count: int, capacity: int) -> float:
    policy, held, hits = ExpertPolicy(count), list[int](), 0
    for number, wanted in enumerate(asked):
        if number % layers == 0:
            policy.next_pass()
        for expert in wanted:
            hits += expert in held
            policy.use(expert, 1.0, was_there=expert in held)
        for expert in wanted:
            if expert in held:
                continue
            if len(held) == capacity:
                others = [one for one in held if one not in wanted]
                victim = others[policy.worthless(np.array(others))]
                held.remove(victim)
                policy.gone(victim)
            held.append(expert)
    return hits / sum(map(len, asked))


def hits_of_lru(asked: list[list[int]], capacity: int) -> float:
    held, hits = OrderedDict[int, None](), 0
    for wanted in asked:
        for expert in wanted:
            hits += expert in held
            held[expert] = None
            held.move_to_end(expert)
            if len(held) > capacity:
                held.popitem(last=False)
    return hits / sum(map(len, asked))


@pytest.mark.parametrize("turns", [0, 2])
@pytest.mark.parametrize(("share", "more"), [(0.25, 0.1), (0.5, 0.02)])
def test_more_is_there_than_least_recently_used_would_have(share: float, more: float, turns: int) -> None:
    layers, experts = 8, 16
    asked = trace(1, layers, experts, 2, 360, turns)
    capacity = int(share * layers * experts)
    ours, lru = hits_of_policy(asked, layers, layers * experts, capacity), hits_of_lru(asked, capacity)
    assert ours > lru + more, (ours, lru)
