"""Requests whose rows choose the pages they read: their tokens, and what becomes of their pages."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counts import counted
from tests.daemon.engine.exact_prompts import live_at_random
from tests.daemon.engine.fakes import PAGE, expected, expected_selecting
from tests.daemon.engine.rig import Rig
from tierd.daemon.engine.selection import Selection
from tierd.daemon.engine.step_plain import generate
from tierd.daemon.engine.stepping import MAX_LOST_STEPS
from tierd.daemon.errors import BadRequest
from tierd.daemon.kv_mode import PAGE_TOKENS
from tierd.daemon.protocol import Sampling, Submit

SELECT, READ = "select=4", 4 * PAGE_TOKENS
LONG = [(place * 7 + place // 5) % 60 for place in range(90)]


@pytest.mark.parametrize(("length", "max_rows"), [(90, 8), (89, 16), (88, 37), (9, 16)])
def test_alone_it_says_what_the_pages_say_that_it_chooses(length: int, max_rows: int) -> None:
    rig, prompt = Rig(max_rows=max_rows), LONG[:length]
    rig.submit(1, prompt, 70, kv_mode=SELECT)
    rig.run()
    assert rig.tokens(1) == expected_selecting(prompt, 70, READ) != expected(prompt, 70)
    assert rig.of(1, "done")[0]["usage"].kv_mode == SELECT


def test_the_plain_loop_says_the_same() -> None:
    rig = Rig()
    sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=40)
    request = rig.intake.request(1, Submit("m", tokens=tuple(LONG), sampling=sampling, kv_mode=SELECT), rig.clock())
    found = generate(rig.pager, rig.streams._runner, request, 16, rig.clock)
    assert found == expected_selecting(LONG, 40, READ)
    rig.check_quiet()


def test_as_long_as_there_are_no_more_pages_it_is_exact() -> None:
    rig = Rig()
    rig.submit(1, LONG, 60, kv_mode="select=10")
    rig.run()
    assert rig.tokens(1) == expected(LONG, 60)
    rig.submit(2, [*LONG, *rig.tokens(1)], 5)
    rig.run()
    assert rig.of(2, "done")[0]["usage"].cached_tokens >= len(LONG) + 56, "and what it computed is known"


def test_it_reads_no_more_pages_than_it_may() -> None:
    rig = Rig()
    rig.submit(1, LONG, 50, kv_mode=SELECT)
    rig.run()
    assert rig.decoder.chosen == [READ // PAGE] * 49, "the first token came with the prompt"


def test_beside_others_it_says_what_it_says_alone() -> None:
    rig = Rig(max_streams=8, slots=250)
    wanted: dict[int, list[int]] = {}
    for number in range(1, 7):
        prompt = [(number * 3 + place) % 60 for place in range(20 + 12 * number)]
        mode: dict[str, Any] = {"kv_mode": SELECT} if number % 3 else {}
        rig.submit(number, prompt, 20, **mode)
        wanted[number] = expected_selecting(prompt, 20, READ) if mode else expected(prompt, 20)
    rig.run()
    assert {number: rig.tokens(number) for number in wanted} == wanted


def test_the_prompt_is_shared_and_the_answer_is_not() -> None:
    rig = Rig(slots=128)
    rig.submit(1, LONG, 30, kv_mode=SELECT)
    rig.run()
    text = [*LONG, *rig.tokens(1)]
    rig.submit(2, text, 9)
    rig.run()
    assert rig.tokens(2) == expected(text, 9)
    assert rig.of(2, "done")[0]["usage"].cached_tokens == len(LONG)
    rig.submit(3, LONG, 30, kv_mode=SELECT)
    rig.run()
    assert rig.tokens(3) == text[len(LONG) :] and rig.of(3, "done")[0]["usage"].cached_tokens == len(LONG) - 1


def test_pages_that_are_not_chosen_may_lie_below_and_on_the_disk() -> None:
    for host in (24, 0):
        rig = Rig(slots=16, host=host, store=200, max_rows=8)
        rig.submit(1, LONG, 40, kv_mode=SELECT)
        rig.run()
        assert rig.tokens(1) == expected_selecting(LONG, 40, READ)
        assert rig.streams.totals.preemptions == 0 and (rig.picked.reads > 0) == (host == 0)


def reading() -> Rig:
    """A request that has begun to read what it chose from the disk."""
    rig = Rig(slots=16, store=200, max_rows=8)
    rig.submit(1, LONG, 40, kv_mode=SELECT)
    while not rig.picked.reads:
        rig.turn()
    return rig


def test_a_page_that_is_lost_on_the_disk_is_computed_again() -> None:
    rig = reading()
    (request,) = rig.streams
    assert request.lease is not None
    rig.picked.lost = [node.key for node in request.lease.nodes if not node.readable]
    before = rig.streams.totals.lost_steps
    rig.turn(3)
    rig.picked.lost = []
    rig.run()
    assert rig.streams.totals.lost_steps > before
    assert rig.tokens(1) == expected_selecting(LONG, 40, READ)


class Everything(list[bytes]):
    """All keys."""

    def __contains__(self, key: object) -> bool:
        return True


def test_lost_pages_with_good_steps_between_leave_the_disk_on() -> None:
    rig = reading()
    (request,) = rig.streams
    for number in range(1, MAX_LOST_STEPS + 1):
        assert request.lease is not None
        # What lies before it is in memory: computed again, it streams nothing.
        rig.picked.lost = [next(node.key for node in request.lease.nodes if not node.readable)]
        while rig.streams.totals.lost_steps < number:
            rig.turn()
        rig.picked.lost = []
        before, read_bytes = rig.staged.passes, rig.picked.read_bytes
        while rig.picked.read_bytes == read_bytes:
            assert rig.pager.writeback.on
            rig.turn()
        assert rig.staged.passes == before
    rig.run()
    assert rig.streams.totals.lost_steps == MAX_LOST_STEPS
    assert rig.tokens(1) == expected_selecting(LONG, 40, READ)


def test_lost_pages_in_a_row_turn_the_disk_off() -> None:
    rig = reading()
    rig.picked.lost = rig.staged.lost = Everything()
    rig.run()
    assert not rig.pager.writeback.on and rig.streams.totals.lost_steps == MAX_LOST_STEPS


def test_where_no_rows_can_choose_one_request_fails_and_the_others_go_on() -> None:
    rig = Rig(selects=False)
    rig.submit(1, LONG, 4, kv_mode=SELECT)
    rig.submit(2, LONG[:20], 4)
    rig.run()
    assert rig.of(1, "failed")[0]["code"] == "unsupported_parameter"
    assert rig.tokens(2) == expected(LONG[:20], 4)


def test_preempted_it_computes_its_answer_again_and_says_the_same() -> None:
    rig = Rig()
    rig.submit(1, LONG, 60, kv_mode=SELECT)
    for turns in (20, 25, 30):
        rig.turn(turns)
        (request,) = rig.streams
        rig.streams._preempt(request)
        assert request.selection is None
    rig.run()
    assert rig.tokens(1) == expected_selecting(LONG, 60, READ) and len(rig.of(1, "accepted")) == 1


@pytest.mark.parametrize("resumed", [1, 5, 39])
def test_a_resumed_one_goes_on_where_it_was(resumed: int) -> None:
    said = expected_selecting(LONG, 60, READ)
    rig = Rig()
    rig.submit(1, LONG, 60, kv_mode=SELECT, resume=tuple(said[:resumed]))
    rig.run()
    assert rig.tokens(1) == said[resumed:]


def test_cancelled_its_prompt_stays_known() -> None:
    rig = Rig()
    rig.submit(1, LONG, 60, kv_mode=SELECT)
    rig.turn(30)
    rig.streams.cancel(1)
    rig.check_quiet()
    rig.submit(2, LONG, 4)
    rig.run()
    assert rig.of(2, "done")[0]["usage"].cached_tokens >= len(LONG) - PAGE
    assert rig.tokens(2) == expected(LONG, 4)


class Worth:
    """Bounds of pages that are worth what a test says."""

    def __init__(self, worth: list[float]) -> None:
        self._worth = np.array(worth, np.float32)

    def learn(self, layer: int, first: int, addresses: np.ndarray) -> None:
        raise AssertionError

    def worth(self, layer: int, query: np.ndarray, first: int, stop: int) -> np.ndarray:
        return self._worth[first:stop]


def test_the_first_page_the_newest_two_and_the_worthiest_are_read() -> None:
    query = np.zeros((1, 1), np.float32)
    selection = Selection(Worth([0.0, 0.1, 0.5, 0.2, 0.2, 0.4, 0.9, 0.9]), [0, 24])
    assert selection.places(0, query, 8, 6).tolist() == [0, 2, 3, 5, 6, 7], "of equals the first"
    assert selection.places(0, query, 8, 4).tolist() == [0, 2, 6, 7]
    assert selection.places(1, query, 8, 4).tolist() == [4, 5, 6, 7], "a layer with a window of its own"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kv_mode": "select=3"}, "needs 4 to 1048576 pages"),
        ({"kv_mode": "select=8,window=64"}, "takes select alone, without window"),
        ({"kv_mode": "select=8", "beam_width": 3}, "beam search keeps the whole context"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message) as refused:
        Rig().submit(1, LONG, 5, **more)
    assert refused.value.param == "kv_mode" and refused.value.hint


def test_an_answer_that_no_device_holds_is_told() -> None:
    rig = Rig(slots=10, host=100)
    rig.submit(1, LONG, 60, kv_mode=SELECT)
    rig.run()
    (failed,) = rig.of(1, "failed")
    assert failed["code"] == "out_of_space" and "all but the exact pages lie on the device" in failed["message"]


@settings(max_examples=counted(200, 4), deadline=None)
@given(st.integers(0, 10**9))
def test_random_lives_leave_nothing_that_is_wrong(seed: int) -> None:
    live_at_random(seed, SELECT, partial(expected_selecting, read=READ), 20)
