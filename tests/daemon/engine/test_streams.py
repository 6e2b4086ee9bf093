"""Requests from arrival to their one end, on pages that give wrong tokens when they are wrong."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon.engine.fakes import expected
from tests.daemon.engine.rig import END, Rig, fail
from tierd.daemon.engine.outbox import TELL_EVERY_S
from tierd.daemon.engine.scheduler import Phase
from tierd.daemon.engine.streams import STILL_S, STUCK_S
from tierd.daemon.errors import BadRequest
from tierd.tiers.evict import Evictor

PROMPT = [5, 9, 2, 7, 1, 1, 8, 3, 30, 31]


def test_a_request_alone() -> None:
    rig = Rig()
    rig.submit(1, PROMPT)
    rig.run()
    assert [event.ev for event in rig.events][0] == "accepted" and rig.terminal(1) == ["done"]
    assert rig.tokens(1) == expected(PROMPT, 8)
    (done,) = rig.of(1, "done")
    assert done["finish"] == "length"
    assert (done["usage"].prompt_tokens, done["usage"].completion_tokens, done["usage"].cached_tokens) == (10, 8, 0)
    assert done["timings"].recomputed == 10 and done["timings"].ttft_ms > 0
    assert "".join(data["text"] for data in rig.of(1, "text")) == bytes(expected(PROMPT, 8)).decode()


def test_the_background_gives_its_only_place_and_says_the_same_afterwards() -> None:
    rig = Rig(max_streams=1)
    rig.submit(1, PROMPT, max_tokens=40, priority=100)
    rig.turn(5)
    rig.submit(2, PROMPT[::-1], max_tokens=8)
    rig.run()
    ends = [event.id for event in rig.events if event.ev == "done"]
    assert ends == [2, 1] and rig.streams.totals.preemptions == 1
    assert rig.tokens(1) == expected(PROMPT, 40) and rig.tokens(2) == expected(PROMPT[::-1], 8)


def test_the_second_time_only_what_is_new_is_computed() -> None:
    rig = Rig()
    rig.submit(1, PROMPT)
    rig.run()
    rows = rig.decoder.rows
    rig.submit(2, PROMPT)
    rig.run()
    assert rig.tokens(2) == rig.tokens(1)
    (done,) = rig.of(2, "done")
    assert done["usage"].cached_tokens == 9 and done["timings"].hit_device == 9 and done["timings"].recomputed == 1
    assert rig.decoder.rows - rows == 1 + 7
    assert rig.of(2, "accepted") == [{"prompt_tokens": 10, "cached_tokens": 9}]


def test_another_turn_finds_the_answer_in_the_cache() -> None:
    rig = Rig()
    rig.submit(1, PROMPT)
    rig.run()
    second = [*PROMPT, *rig.tokens(1), 40, 41]
    rig.submit(2, second)
    rig.run()
    assert rig.tokens(2) == expected(second, 8)
    assert rig.of(2, "done")[0]["usage"].cached_tokens == 17  # the last token of an answer is drawn, not computed


def test_tenants_share_nothing() -> None:
    rig = Rig()
    rig.submit(1, PROMPT, tenant="a")
    rig.run()
    rig.submit(2, PROMPT, tenant="b")
    rig.run()
    assert rig.of(2, "done")[0]["usage"].cached_tokens == 0


def test_a_mixed_batch_says_what_each_would_say_alone() -> None:
    rig = Rig(max_streams=8)
    prompts = {number: [(number * 3 + place) % 60 for place in range(3 + 5 * number)] for number in range(1, 9)}
    for number, prompt in prompts.items():
        rig.submit(number, prompt, 12)
    rig.run()
    for number, prompt in prompts.items():
        assert rig.tokens(number) == expected(prompt, 12)
    assert max(rig.decoder.batches) > 8


def test_pages_go_down_and_are_read_there() -> None:
    rig = Rig(slots=8, host=16)
    for number in range(1, 4):
        rig.submit(number, [number] * 12, 4)
        rig.run()
    assert rig.pager.statistics().demotions
    rig.submit(9, [1] * 12, 4)
    rig.run()
    assert rig.tokens(9) == expected([1] * 12, 4)
    timings = rig.of(9, "done")[0]["timings"]
    assert timings.hit_host > 0 and timings.hit_device + timings.hit_host + timings.recomputed == 12


def test_preempted_when_pages_run_out_and_nothing_is_lost() -> None:
    rig = Rig(slots=10)
    prompts = {number: [number * 7 + place for place in range(9)] for number in (1, 2, 3)}
    for number, prompt in prompts.items():
        rig.submit(number, prompt, 20)
    rig.run()
    assert rig.streams.totals.preemptions > 0
    for number, prompt in prompts.items():
        assert rig.tokens(number) == expected(prompt, 20)
        assert len(rig.of(number, "accepted")) == 1
    assert rig.events[-1].id != 1  # the first in rank is not the last to end


def test_an_end_token_ends() -> None:
    for seed in range(500):
        prompt = [seed % 60, seed // 60, 3]
        answer = expected(prompt, 30)
        if END in answer[:30]:
            break
    cut = answer.index(END)
    rig = Rig()
    rig.submit(1, prompt, 40, sampling={"ignore_eos": False})
    rig.submit(2, prompt, 30)
    rig.run()
    assert rig.tokens(1) == answer[:cut] and rig.of(1, "done")[0]["finish"] == "stop"
    assert rig.of(1, "done")[0]["usage"].completion_tokens == cut + 1
    assert rig.tokens(2) == answer


def test_a_stop_string_ends_and_is_not_shown() -> None:
    answer = expected(PROMPT, 8)
    stop = bytes(answer[3:5]).decode()
    rig = Rig()
    rig.submit(1, PROMPT, 8, sampling={"stop": (stop,)})
    rig.run()
    text = "".join(data["text"] for data in rig.of(1, "text"))
    assert text == bytes(answer).decode().split(stop)[0]
    assert rig.of(1, "done")[0]["finish"] == "stop"


def test_the_context_ends_an_answer() -> None:
    rig = Rig(context=15)
    rig.submit(1, PROMPT, None)
    rig.run()
    assert len(rig.tokens(1)) == 5 and rig.of(1, "done")[0]["finish"] == "length"
    with pytest.raises(BadRequest, match="15 tokens; the context holds 15"):
        rig.submit(2, [1] * 15)


@pytest.mark.parametrize("cut", [1, 5, 11])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_request_goes_on_where_it_was(cut: int, temperature: float) -> None:
    sampling = {"temperature": temperature, "seed": 5, "frequency_penalty": 0.5}
    whole = Rig()
    whole.submit(1, PROMPT, 12, sampling=sampling)
    whole.run()
    tokens = whole.tokens(1)
    resumed = Rig()
    resumed.submit(1, PROMPT, 12, sampling=sampling, resume=tuple(tokens[:cut]))
    resumed.run()
    assert resumed.tokens(1) == tokens[cut:]
    (done,) = resumed.of(1, "done")
    assert (done["usage"].prompt_tokens, done["usage"].completion_tokens) == (10, 12)
    assert done["timings"].recomputed == 10


def test_a_resumed_request_may_have_nothing_left_to_say() -> None:
    rig = Rig()
    rig.submit(1, PROMPT, 3, resume=(1, 2, 3))
    rig.submit(2, PROMPT, 9, resume=(33, 34), sampling={"stop": ('!"',)})
    rig.run()
    assert [event.ev for event in rig.events] == ["done", "done"]
    assert rig.of(1, "done")[0]["finish"] == "length" and rig.of(2, "done")[0]["finish"] == "stop"
    assert rig.decoder.rows == 0


def test_cancel_ends_within_one_step_and_keeps_complete_pages() -> None:
    rig = Rig()
    rig.submit(1, PROMPT, 50)
    rig.turn(6)
    rig.streams.cancel(1)
    rig.streams.cancel(1)
    rig.run()
    said = rig.tokens(1)
    assert rig.terminal(1) == ["aborted"]
    assert rig.of(1, "aborted")[0]["usage"].completion_tokens == len(said)
    rig.submit(2, [*PROMPT, *said, 1])
    rig.run()
    assert rig.of(2, "done")[0]["usage"].cached_tokens == len(PROMPT) + len(said) - 1


def test_cancelled_while_its_pages_are_fetched() -> None:
    rig = Rig(slots=8, store=100)
    for number in (1, 2, 3):
        rig.submit(number, [number] * 12, 4)
        rig.run()
        rig.pager.flush(rig.clock() + 10.0)
    rig.submit(4, [1] * 12, 4)
    rig.streams.turn()
    assert rig.streams.count(Phase.FETCHING) == 1
    rig.streams.cancel(4)
    rig.run()
    assert rig.terminal(4) == ["aborted"]


def test_what_goes_wrong_with_one_request_ends_that_one() -> None:
    rig = Rig()
    rig.submit(1, PROMPT)
    rig.submit(2, [9, 9, 9])
    rig.turn(2)
    request = rig.streams._requests[2]
    request.sampler.sample = lambda *_: 1 / 0  # type: ignore[method-assign,return-value,assignment]
    rig.run()
    assert rig.terminal(1) == ["done"] and rig.terminal(2) == ["failed"]
    assert rig.of(2, "failed")[0]["code"] == "internal_error" and "zero" not in str(rig.of(2, "failed"))
    assert rig.tokens(1) == expected(PROMPT, 8)


@pytest.mark.parametrize("method", ["match", "fetch", "allocate", "commit"])
def test_a_failing_page_table_ends_the_request(method: str) -> None:
    rig = Rig()
    fail(rig.pager, method, RuntimeError("broken"))
    rig.submit(1, PROMPT)
    for _ in range(20):
        rig.streams.turn() if method != "commit" else _turn_or_fail(rig)
    rig.events += rig.streams.take_events()
    assert rig.terminal(1) == ["failed"]


@pytest.mark.parametrize("broken", ["remember", "beams"])
def test_an_end_that_cannot_be_told_is_a_failure_of_that_request(broken: str) -> None:
    rig = Rig()
    rig.submit(1, [1, 2, 3], max_tokens=8)
    rig.submit(2, [4, 5, 6], max_tokens=3, **({"beam_width": 2, "n": 2} if broken == "beams" else {}))
    request = next(request for request in rig.streams if request.id == 2)
    obj, method = (request, "remember") if request.beams is None else (request.beams, "stream")
    fail(obj, method, RuntimeError("broken"))
    rig.run()  # no lease is left at its end
    assert rig.terminal(1) == ["done"] and len(rig.tokens(1)) == 8
    assert rig.terminal(2) == ["failed"]


def _turn_or_fail(rig: Rig) -> None:
    try:
        rig.streams.turn()
    except RuntimeError as exc:
        rig.streams.fail_all(exc)


def test_pages_that_never_come_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    for number in (1, 2):
        rig.submit(number, [number] * 9, 20)
    rig.turn(3)
    monkeypatch.setattr(rig.pager, "allocate", lambda *_: False)  # eviction promises and never keeps
    rig.turn(6)
    assert rig.terminal(1) == rig.terminal(2) == []
    monkeypatch.setattr(Evictor, "under_way", True)
    rig.clock.now_s += STUCK_S - 1
    rig.turn(2)
    assert rig.terminal(2) == []
    rig.clock.now_s += 2
    rig.turn(2)
    assert rig.terminal(1) == [] and rig.terminal(2) == ["failed"]  # the last in rank gives way
    assert rig.of(2, "failed")[0]["code"] == "out_of_space"
    rig.clock.now_s += STUCK_S + 1
    rig.turn(2)
    assert rig.terminal(1) == ["failed"] and rig.of(1, "failed")[0]["code"] == "out_of_space"


def test_where_nothing_can_move_a_request_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.submit(1, PROMPT, 20)
    rig.turn(3)
    monkeypatch.setattr(rig.pager, "allocate", lambda *_: False)
    rig.clock.now_s += STILL_S / 2
    rig.turn(2)
    assert rig.terminal(1) == []
    rig.clock.now_s += STILL_S
    rig.turn(2)
    assert rig.terminal(1) == ["failed"]


def test_a_failing_step_comes_out_and_the_next_one_works() -> None:
    rig = Rig()
    rig.submit(1, PROMPT)
    rig.decoder.fail_with = RuntimeError("kernel")
    with pytest.raises(RuntimeError, match="kernel"):
        rig.turn(3)
    rig.streams.fail_all(BadRequest("x"))
    rig.decoder.fail_with = None
    rig.submit(2, PROMPT)
    rig.run()
    assert rig.terminal(1) == ["failed"] and rig.tokens(2) == expected(PROMPT, 8)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9))
def test_random_lives_end_once_and_leave_nothing(seed: int) -> None:
    chance = random.Random(seed)
    rig = Rig(slots=12, host=chance.choice((0, 9)), store=chance.choice((0, 40)), max_streams=3)
    wanted: dict[int, tuple[list[int], int]] = {}
    aborted: set[int] = set()
    for number in range(1, 14):
        prompt = [chance.choice((1, 2)) for _ in range(chance.randint(1, 20))]
        wanted[number] = (prompt, chance.randint(1, 12))
        rig.submit(number, *wanted[number], priority=chance.randint(0, 2))
        rig.turn(chance.randint(0, 6))
        if chance.random() < 0.3:
            victim = chance.randint(1, number)
            aborted.add(victim)
            rig.streams.cancel(victim)
    rig.run()
    for number, (prompt, count) in wanted.items():
        assert len(rig.terminal(number)) == 1
        if number not in aborted:
            assert rig.terminal(number) == ["done"]
            assert rig.tokens(number) == expected(prompt, count)
            timings, usage = rig.of(number, "done")[0]["timings"], rig.of(number, "done")[0]["usage"]
            assert timings.hit_device + timings.hit_host + timings.hit_nvme == usage.cached_tokens
            assert usage.cached_tokens + timings.recomputed == usage.prompt_tokens == len(prompt)


def test_text_comes_at_once_and_then_in_pieces_of_a_twentieth_of_a_second() -> None:
    rig = Rig()
    rig.submit(1, PROMPT, 60)
    told_s = []
    while len(rig.streams):
        before = len(rig.of(1, "text"))
        rig.turn()
        if len(rig.of(1, "text")) > before:
            told_s.append(rig.clock.now_s)
    pieces = rig.of(1, "text")
    assert len(pieces[0]["tokens"]) == 1  # nobody waits for the first one
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(told_s[:-1])]
    assert min(gaps_s) >= TELL_EVERY_S - 0.002 and max(gaps_s) < 2 * TELL_EVERY_S
    assert len(rig.tokens(1)) == 60 and len(pieces) < 20


def test_an_idle_day_is_no_wait_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.submit(1, PROMPT)
    rig.run()
    rig.clock.now_s += 86_400.0
    allocate = rig.pager.allocate
    monkeypatch.setattr(rig.pager, "allocate", lambda *_: False)
    rig.submit(2, PROMPT)
    rig.turn(2)
    assert rig.terminal(2) == []
    monkeypatch.setattr(rig.pager, "allocate", allocate)
    rig.run()
    assert rig.terminal(2) == ["done"]


def test_a_request_may_wish_that_the_beginning_of_its_prompt_stays() -> None:
    rig = Rig()
    rig.submit(1, PROMPT, 3)
    rig.streams._requests[1].keep = ((9, 300.0), (2, 600.0))  # two whole pages, and none
    rig.run()
    assert [node.num_tokens for node in rig.pager.index.nodes.values() if node.kept] == [4, 4]
    assert rig.of(1, "accepted")[0]["keep_tokens"] == [9, 2]
