"""Requests that come at once with one prefix: it is computed once, and nobody waits in vain or for long."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon.engine.fakes import PAGE, expected
from tests.daemon.engine.rig import Rig
from tierd.daemon.engine.sharing import common_pages
from tierd.daemon.errors import EngineFailed

# Long enough, at 4 tokens a page, for waiting to be worth it: a step has 128 rows at least.
LONG = [place * 7 % 60 for place in range(400)]


def rig(**more: int) -> Rig:
    return Rig(**{"slots": 400, "max_streams": 8, "max_rows": 64, "context": 800} | more)


def submit_all(one: Rig, tails: list[list[int]], count: int = 4) -> None:
    for number, tail in enumerate(tails, 1):
        one.submit(number, [*LONG, *tail], count)


def leased_peak(one: Rig) -> int:
    """Runs to the end; the most device pages that were under leases at once."""
    peak = 0
    while len(one.streams):
        one.turn()
        stats = one.pager.statistics().device
        peak = max(peak, stats.used_pages)
    return peak


def test_common_pages_are_found_in_a_chain() -> None:
    keys = [bytes([place]) for place in range(10)]
    other = keys[:6] + [b"x"] * 5
    assert common_pages(keys, other, 2) == 6 and common_pages(keys, keys[:4], 0) == 4
    assert common_pages(other, other, 11) == 11


def test_answers_to_one_prompt_compute_and_hold_it_once() -> None:
    one = rig()
    submit_all(one, [[]] * 8, 6)
    peak = leased_peak(one)
    for number in range(1, 9):
        assert one.tokens(number) == expected(LONG, 6)
    pages = len(LONG) // PAGE
    assert one.decoder.rows <= len(LONG) + 8 * (PAGE + 6)
    assert peak <= pages + 8 * 3
    one.check_quiet()


def test_fifty_clients_with_one_new_system_prompt_compute_it_once() -> None:
    one = rig()
    tails = [[number, number + 1, 9] for number in range(1, 51)]
    submit_all(one, tails)
    one.run()
    for number, tail in enumerate(tails, 1):
        assert one.tokens(number) == expected([*LONG, *tail], 4)
    assert one.decoder.rows <= len(LONG) + 50 * (3 + PAGE + 4)
    done = [one.of(number, "done")[0]["usage"].cached_tokens for number in range(1, 51)]
    accepted = [one.of(number, "accepted")[0]["cached_tokens"] for number in range(1, 51)]
    assert done == accepted and sorted(done)[0] == 0 and sorted(done)[1] >= len(LONG) - PAGE


def test_what_a_waiting_one_was_spared_counts_as_cached_and_as_computed_once() -> None:
    one = rig()
    submit_all(one, [[1, 2], [3, 4]])
    one.run()
    totals = one.streams.totals
    assert totals.prompt_tokens - totals.cached_tokens == totals.prefill_rows == one.decoder.rows - 2 * 3
    timings = one.of(2, "done")[0]["timings"]
    assert timings.hit_device == one.of(2, "done")[0]["usage"].cached_tokens == len(LONG)


def test_different_salts_share_nothing() -> None:
    one = rig()
    for number, tenant in enumerate(("a", "b"), 1):
        one.submit(number, LONG, 4, tenant=tenant)
    one.run()
    assert [one.of(number, "done")[0]["usage"].cached_tokens for number in (1, 2)] == [0, 0]
    assert one.decoder.rows == 2 * (len(LONG) + 3)


@pytest.mark.parametrize("how", ["cancel", "fail", "preempt"])
def test_when_the_leader_goes_another_one_leads(how: str) -> None:
    one = rig()
    submit_all(one, [[1], [2], [3]])
    one.turn(2)
    assert one.streams._following.keys() == {2, 3}
    before = one.decoder.rows
    leader = one.streams._requests[1]
    match how:
        case "cancel":
            one.streams.cancel(1)
        case "fail":
            one.streams.fail(leader, EngineFailed("x"))
        case _:
            one.streams._preempt(leader)
    one.run()
    for number in (2, 3):
        assert one.tokens(number) == expected([*LONG, number], 4)
    assert one.terminal(1) == [{"cancel": "aborted", "fail": "failed", "preempt": "done"}[how]]
    assert one.decoder.rows <= before + len(LONG) + 4 * (PAGE + 4)  # what the leader had computed stays


def test_one_of_higher_rank_that_comes_later_takes_the_lead() -> None:
    one = rig()
    submit_all(one, [[1], [2]])
    one.turn(2)
    one.submit(9, [*LONG, 9], 4, priority=-1)
    one.turn()
    assert {number: found.leader for number, found in one.streams._following.items()} == {1: 9, 2: 9}
    one.run()
    for number in (1, 2, 9):
        assert one.tokens(number) == expected([*LONG, number], 4)
    assert one.decoder.rows <= len(LONG) + 3 * (2 * PAGE + 4)
    for number in (1, 2, 9):
        usage, timings = one.of(number, "done")[0]["usage"], one.of(number, "done")[0]["timings"]
        assert timings.hit_device == usage.cached_tokens <= len(LONG)
    computed = sum(401 - one.of(number, "done")[0]["usage"].cached_tokens for number in (1, 2, 9))
    assert computed <= one.decoder.rows - 9


def test_a_short_chat_is_held_up_by_no_more_than_the_tokens_that_it_shares() -> None:
    one = rig(max_rows=64)
    one.submit(1, LONG, 4)
    one.submit(2, LONG[:8] + [50] * 10, 4)
    one.turn()
    assert one.decoder.batches == [8]
    one.turn()
    assert one.of(2, "text") and one.decoder.batches == [8, 15]


def test_a_chunk_of_the_leader_ends_where_they_part() -> None:
    one = rig(max_rows=300)
    one.submit(1, LONG, 4)
    one.submit(2, LONG[:40] + [50] * 300, 4)
    one.turn()
    assert one.decoder.batches == [40]
    one.run()
    assert one.tokens(2) == expected(LONG[:40] + [50] * 300, 4)
    assert one.of(2, "done")[0]["usage"].cached_tokens == 40


def test_waiting_ones_lose_and_find_pages_of_a_small_memory() -> None:
    one = rig(slots=110, host=0)
    submit_all(one, [[number] * 9 for number in range(1, 7)], 12)
    one.run()
    for number in range(1, 7):
        assert one.tokens(number) == expected([*LONG, *[number] * 9], 12)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**9))
def test_random_families_of_prompts(seed: int) -> None:
    chance = random.Random(seed)
    one = Rig(
        slots=chance.choice((70, 130)), host=chance.choice((0, 60)), store=chance.choice((0, 300)),
        max_streams=chance.choice((2, 5)), max_rows=chance.choice((16, 64)), context=400,
    )  # fmt: skip
    stems = [[chance.randrange(60) for _ in range(200)] for _ in range(2)]
    wanted: dict[int, tuple[list[int], int]] = {}
    aborted: set[int] = set()
    for number in range(1, 11):
        stem = chance.choice(stems)
        prompt = stem[: chance.choice((20, 100, 150, 200))] + [number] * chance.randint(0, 20)
        wanted[number] = (prompt, chance.randint(1, 6))
        one.submit(number, *wanted[number], priority=chance.choice((0, 0, -1)), tenant=chance.choice(("", "", "b")))
        one.turn(chance.choice((0, 0, 1, 3)))
        if chance.random() < 0.2:
            aborted.add(chance.randint(1, number))
            one.streams.cancel(max(aborted))
    one.run()
    for number, (prompt, count) in wanted.items():
        if one.terminal(number) != ["aborted"]:
            assert one.terminal(number) == ["done"] and one.tokens(number) == expected(prompt, count)
            timings, usage = one.of(number, "done")[0]["timings"], one.of(number, "done")[0]["usage"]
            assert timings.hit_device + timings.hit_host + timings.hit_nvme == usage.cached_tokens
