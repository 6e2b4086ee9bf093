"""Requests that keep the pages which their rows look at most: their tokens, and what becomes of their pages."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counts import counted
from tests.daemon.engine.exact_prompts import live_at_random
from tests.daemon.engine.fakes import PAGE, expected, expected_thinning
from tests.daemon.engine.rig import Rig
from tierd.daemon.engine.heavy import OBSERVED_TOKENS, Heavy
from tierd.daemon.engine.request import Request
from tierd.daemon.engine.step_plain import generate
from tierd.daemon.errors import BadRequest, ContextLengthExceeded
from tierd.daemon.protocol import Sampling, Submit

H2O, KEPT = "h2o=64", 64
LONG = [(place * 7 + place // 5) % 60 for place in range(90)]


@pytest.mark.parametrize(("length", "max_rows"), [(90, 8), (89, 16), (88, 37), (9, 16)])
def test_alone_it_says_what_the_pages_say_that_are_left(length: int, max_rows: int) -> None:
    rig, prompt = Rig(max_rows=max_rows), LONG[:length]
    rig.submit(1, prompt, 100, kv_mode=H2O)
    rig.run()
    assert rig.tokens(1) == expected_thinning(prompt, 100, KEPT) != expected(prompt, 100)
    assert rig.of(1, "done")[0]["usage"].kv_mode == H2O


def test_the_plain_loop_says_the_same() -> None:
    rig = Rig()
    sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=70)
    request = rig.intake.request(1, Submit("m", tokens=tuple(LONG), sampling=sampling, kv_mode=H2O), rig.clock())
    assert generate(rig.pager, rig.streams._runner, request, 16, rig.clock) == expected_thinning(LONG, 70, KEPT)
    rig.check_quiet()


def test_as_long_as_it_all_fits_it_is_exact() -> None:
    rig = Rig()
    rig.submit(1, LONG, 60, kv_mode="h2o=160")
    rig.run()
    assert rig.tokens(1) == expected(LONG, 60)
    rig.submit(2, [*LONG, *rig.tokens(1)], 5)
    rig.run()
    assert rig.of(2, "done")[0]["usage"].cached_tokens >= len(LONG) + 56, "and what it computed is known"


def test_beside_others_it_says_what_it_says_alone() -> None:
    rig = Rig(max_streams=8, slots=250)
    wanted: dict[int, list[int]] = {}
    for number in range(1, 7):
        prompt = [(number * 3 + place) % 60 for place in range(20 + 12 * number)]
        mode: dict[str, Any] = {"kv_mode": H2O} if number % 3 else {}
        rig.submit(number, prompt, 60, **mode)
        wanted[number] = expected_thinning(prompt, 60, KEPT) if mode else expected(prompt, 60)
    rig.run()
    assert {number: rig.tokens(number) for number in wanted} == wanted


def answering(rig: Rig, turns: int) -> Request:
    """A request that has written some of its answer."""
    rig.submit(1, LONG, 100, kv_mode=H2O)
    rig.turn(turns)
    (request,) = rig.streams
    assert request.generated > 1
    return request


def test_it_holds_no_more_pages_than_it_may_and_its_prompt_leaves() -> None:
    rig = Rig()
    request = answering(rig, 20)
    while len(rig.streams):
        if request.lease is not None and request.computed > len(LONG):
            assert len(request.lease.nodes) == 1 and request.lease.num_pages <= KEPT // PAGE
            assert request.seen(0.0, rig.streams._limits).pages <= KEPT // PAGE
        rig.turn()
    assert rig.tokens(1) == expected_thinning(LONG, 100, KEPT)
    assert rig.pager.device.cached >= len(LONG) // PAGE - 1, "others find it"


def test_what_the_device_has_no_room_for_stays_where_it_is() -> None:
    rig = Rig(slots=17, host=80)
    request = answering(rig, 20)
    assert request.lease is not None and request.lease.dropped and len(request.lease.nodes) > 1
    rig.run()
    assert rig.tokens(1) == expected_thinning(LONG, 100, KEPT)


@pytest.mark.parametrize(("length", "slots", "kept"), [(90, 32, 64), (88, 32, 64), (124, 33, 64), (188, 49, 96)])
def test_where_the_prompt_fits_with_two_pages_the_answer_takes_the_place_of_what_is_thinned_out(
    length: int, slots: int, kept: int
) -> None:
    prompt = [(place * 7 + place // 5) % 60 for place in range(length)]
    rig = Rig(slots=slots, max_rows=8, context=400)
    rig.submit(1, prompt, 100, kv_mode=f"h2o={kept}")
    rig.run()
    assert rig.terminal(1) == ["done"] and rig.tokens(1) == expected_thinning(prompt, 100, kept)
    assert rig.streams.totals.preemptions == 0


def test_what_is_kept_is_told_once_and_not_gathered_anew_in_every_turn() -> None:
    rig = Rig(slots=17, host=80)
    request = answering(rig, 20)
    assert request.lease is not None and request.heavy is not None
    seen = set()
    while request.computed % PAGE != 3:
        rig.turn()
    for _ in range(3):  # copying is blocked
        assert len(request.lease.nodes) > 1 and request.lease.kept is request.heavy.numbers
        seen.add(id(request.heavy.numbers))
        rig.turn()
    assert len(seen) <= 2 and request.heavy.numbers == frozenset(request.heavy.kept.tolist())
    rig.run()


@pytest.mark.parametrize("host", [0, 12])
def test_pages_that_are_left_may_lie_on_the_disk(host: int) -> None:
    rig = Rig(slots=17, host=host, store=200, max_rows=8)
    rig.submit(1, LONG, 60, kv_mode=H2O)
    rig.run()
    assert rig.tokens(1) == expected_thinning(LONG, 60, KEPT)


def test_a_page_that_is_lost_has_it_begin_again() -> None:
    rig = Rig(slots=17, store=200, max_rows=8)
    request = answering(rig, 15)
    assert request.lease is not None and request.heavy is not None
    known, seen = request.lease.nodes, request.heavy.numbers
    rig.staged.lost = [node.key for number, node in enumerate(known) if number in seen and not node.readable]
    assert rig.staged.lost, "rows read it on the disk"
    before = rig.streams.totals.lost_steps, rig.streams.totals.preemptions
    rig.turn(3)
    assert rig.streams.totals.lost_steps > before[0]
    rig.staged.lost = []
    rig.run()
    assert rig.streams.totals.preemptions > before[1]
    assert rig.tokens(1) == expected_thinning(LONG, 100, KEPT)


def test_the_prompt_is_shared_and_the_answer_is_not() -> None:
    rig = Rig(slots=128)
    rig.submit(1, LONG, 30, kv_mode=H2O)
    rig.run()
    text = [*LONG, *rig.tokens(1)]
    rig.submit(2, text, 9)
    rig.run()
    assert rig.tokens(2) == expected(text, 9)
    assert rig.of(2, "done")[0]["usage"].cached_tokens == len(LONG) // PAGE * PAGE
    rig.submit(3, LONG, 30, kv_mode=H2O)
    rig.run()
    assert rig.tokens(3) == text[len(LONG) :]
    assert rig.of(3, "done")[0]["usage"].cached_tokens == len(LONG) - OBSERVED_TOKENS


def test_preempted_it_computes_its_answer_again_and_says_the_same() -> None:
    rig = Rig()
    rig.submit(1, LONG, 100, kv_mode=H2O)
    for turns in (5, 20, 45, 40):
        rig.turn(turns)
        (request,) = rig.streams
        rig.streams._preempt(request)
        assert request.heavy is None
    rig.run()
    assert rig.tokens(1) == expected_thinning(LONG, 100, KEPT) and len(rig.of(1, "accepted")) == 1


@pytest.mark.parametrize("resumed", [1, 6, 59])
def test_a_resumed_one_goes_on_where_it_was(resumed: int) -> None:
    said = expected_thinning(LONG, 100, KEPT)
    rig = Rig()
    rig.submit(1, LONG, 100, kv_mode=H2O, resume=tuple(said[:resumed]))
    rig.run()
    assert rig.tokens(1) == said[resumed:]


def test_a_wish_that_the_prompt_stays_is_granted() -> None:
    rig = Rig()
    request = rig.intake.request(
        1, Submit("m", tokens=tuple(LONG), sampling=Sampling(max_tokens=30), kv_mode=H2O), rig.clock()
    )
    request.keep = ((80, 1000.0),)
    rig.streams.add(request)
    rig.run()
    assert sum(node.kept for node in rig.pager.index.nodes.values()) == 80 // PAGE


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kv_mode": "h2o=63"}, "needs 64 .4 pages. to 16777216 tokens to keep, not 63"),
        ({"kv_mode": "h2o=many"}, "needs a number of tokens after h2o=, not 'many'"),
        ({"kv_mode": "h2o=64,window=64"}, "takes h2o alone, without window"),
        ({"kv_mode": "h2o=64", "beam_width": 3}, "beam search keeps the whole context"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message) as refused:
        Rig().submit(1, LONG, 5, **more)
    assert refused.value.param == "kv_mode" and refused.value.hint


def test_a_prompt_that_no_memory_holds_is_refused_whatever_would_be_kept_of_it() -> None:
    with pytest.raises(ContextLengthExceeded, match="the memory given to tierd holds 80"):
        Rig(slots=20).submit(1, LONG, 5, kv_mode=H2O)


def test_an_answer_that_no_device_holds_is_told() -> None:
    rig = Rig(slots=10, host=100)
    rig.submit(1, LONG, 60, kv_mode=H2O)
    rig.run()
    (failed,) = rig.of(1, "failed")
    assert failed["code"] == "out_of_space" and "all but the exact pages lie on the device" in failed["message"]


@pytest.mark.parametrize(
    ("length", "slots", "message"),
    [
        (124, 32, "of 129 tokens needs the 33 pages that it has until it is thinned out; all tiers together hold 32"),
        (90, 31, "it is more than half of the device's 31; all tiers together hold 31"),
    ],
)
def test_a_prompt_that_leaves_no_room_to_thin_it_out_is_told(length: int, slots: int, message: str) -> None:
    rig = Rig(slots=slots)
    rig.submit(1, [place % 50 for place in range(length)], 60, kv_mode=H2O)
    rig.run()
    (failed,) = rig.of(1, "failed")
    assert failed["code"] == "out_of_space" and message in failed["message"]


def test_the_first_page_the_newest_and_the_heaviest_are_kept() -> None:
    heavy = Heavy(6, 3, 8, PAGE)
    heavy.take(32, np.repeat(np.array([[0, 1, 5, 2, 9, 1, 0, 0]], np.float64), 24, 0))
    assert heavy.decide(32).tolist() == [0, 2, 4, 6, 7, 8] and heavy.thinned
    assert heavy.observes(30, 33) == 1 and not heavy.is_due(33) and heavy.is_due(36)
    heavy.take(36, np.repeat(np.array([[0, 1, 0, 0, 0, 9]], np.float64), 4, 0))
    assert heavy.decide(36).tolist() == [0, 2, 4, 7, 8, 9], "page 6 was hardly looked at"


def test_what_was_looked_at_long_ago_fades() -> None:
    heavy = Heavy(4, 2, 0, PAGE)
    masses = np.zeros((5 * PAGE, 5))
    masses[PAGE : 2 * PAGE, 1], masses[4 * PAGE :, 2] = 1.05, 1.0
    heavy.take(5 * PAGE, masses)
    assert heavy.decide(5 * PAGE).tolist() == [0, 2, 4, 5]


@settings(max_examples=counted(200, 4), deadline=None)
@given(st.integers(0, 10**9))
def test_random_lives_leave_nothing_that_is_wrong(seed: int) -> None:
    live_at_random(seed, H2O, partial(expected_thinning, kept=KEPT), 25)
