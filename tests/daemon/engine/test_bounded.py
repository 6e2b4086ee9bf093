"""Requests that see a window of their text, with or without sinks: their tokens, and what becomes of their pages."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counts import counted
from tests.daemon.engine.fakes import PAGE, expected
from tests.daemon.engine.rig import Rig
from tierd.daemon.engine.step_plain import generate
from tierd.daemon.errors import BadRequest, ContextLengthExceeded, Unsupported
from tierd.daemon.kv_mode import Kind
from tierd.daemon.protocol import Sampling, Submit

PROMPT = [5, 9, 2, 7, 1, 1, 8, 3, 30, 31]
LONG = [(place * 7 + place // 5) % 60 for place in range(90)]
MODES: list[tuple[str, int, int]] = [
    ("window=16", 16, 0), ("window=21", 21, 0), ("sinks=3,window=17", 17, 3), ("sinks=30,window=16", 16, 30),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "window", "sinks"), MODES)
@pytest.mark.parametrize("max_rows", [8, 16, 37])
def test_alone_it_says_what_its_mode_lets_it_see(mode: str, window: int, sinks: int, max_rows: int) -> None:
    rig = Rig(max_rows=max_rows)
    rig.submit(1, LONG, 40, kv_mode=mode)
    rig.run()
    assert rig.tokens(1) == expected(LONG, 40, window, sinks) != expected(LONG, 40)
    assert rig.of(1, "done")[0]["usage"].kv_mode == mode


@pytest.mark.parametrize(("mode", "window", "sinks"), MODES)
def test_the_plain_loop_says_the_same(mode: str, window: int, sinks: int) -> None:
    rig = Rig()
    sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=40)
    request = rig.intake.request(1, Submit("m", tokens=tuple(LONG), sampling=sampling, kv_mode=mode), rig.clock())
    found = generate(rig.pager, rig.streams._runner, request, 16, rig.clock)
    assert found == expected(LONG, 40, window, sinks)
    rig.check_quiet()


def test_what_is_shorter_than_the_window_is_exact() -> None:
    rig = Rig()
    rig.submit(1, PROMPT, 20, kv_mode="window=64")
    rig.submit(2, PROMPT, 20, kv_mode="sinks=4,window=40")
    rig.submit(3, PROMPT, 20, kv_mode="exact")
    rig.run()
    assert rig.tokens(1) == rig.tokens(2) == rig.tokens(3) == expected(PROMPT, 20)


def test_beside_others_it_says_what_it_says_alone() -> None:
    rig = Rig(max_streams=8, slots=200)
    wanted: dict[int, list[int]] = {}
    for number in range(1, 9):
        prompt = [(number * 3 + place) % 60 for place in range(5 + 11 * number)]
        mode: dict[str, Any] = {}
        window = sinks = 0
        if number % 3:
            name, window, sinks = MODES[number % 4]
            mode = {"kv_mode": name}
        rig.submit(number, prompt, 30, **mode)
        wanted[number] = expected(prompt, 30, window, sinks)
    rig.run()
    assert {number: rig.tokens(number) for number in wanted} == wanted


@pytest.mark.parametrize("mode", ["window=16", "sinks=3,window=16"])
def test_its_pages_stay_few_and_the_others_get_those_it_gives_back(mode: str) -> None:
    """30 pages in all, and 45 pages of text beside a request that needs 13 of them."""
    rig = Rig(slots=30, context=600)
    rig.submit(1, LONG[:40], 140, kv_mode=mode)
    rig.submit(2, PROMPT, 42)
    held = []
    while len(rig.streams):
        rig.turn()
        held += [
            request.lease.num_pages
            for request in rig.streams
            if request.mode is not None and request.lease is not None and request.computed > 60
        ]
    assert rig.terminal(1) == rig.terminal(2) == ["done"]
    assert rig.streams.totals.preemptions == 0
    assert max(held) <= 16 // PAGE + 3  # the window, the page that is written, those at both ends, the one with sinks
    window, sinks = 16, 3 if "sinks" in mode else 0
    assert rig.tokens(1) == expected(LONG[:40], 140, window, sinks)
    assert rig.tokens(2) == expected(PROMPT, 42)
    rig.check_quiet()


def test_a_prompt_beyond_all_memory_fits_a_window() -> None:
    rig = Rig(slots=14, context=1000, max_rows=8)
    prompt = [place % 59 for place in range(300)]
    rig.submit(1, prompt, 10, kv_mode="window=16")
    rig.run()
    assert rig.tokens(1) == expected(prompt, 10, 16)


def test_a_prompt_shorter_than_its_sinks() -> None:
    rig = Rig(max_rows=8)
    rig.submit(1, PROMPT, 60, kv_mode="sinks=30,window=16")
    rig.run()
    assert rig.tokens(1) == expected(PROMPT, 60, 16, 30)


def test_text_with_sinks_has_no_end() -> None:
    rig = Rig(context=40)
    rig.submit(1, PROMPT, 150, kv_mode="sinks=4,window=20")
    rig.submit(2, LONG, 20, kv_mode="sinks=4,window=20")
    rig.submit(3, PROMPT, None, kv_mode="sinks=4,window=20")
    rig.run()
    assert rig.tokens(1) == expected(PROMPT, 150, 20, 4)
    assert rig.tokens(2) == expected(LONG, 20, 20, 4)
    assert len(rig.tokens(3)) == 40  # a context full, when nobody says how much
    assert {rig.of(number, "done")[0]["finish"] for number in (1, 2, 3)} == {"length"}
    with pytest.raises(ContextLengthExceeded):
        rig.submit(4, LONG, 5, kv_mode="window=20")


@pytest.mark.parametrize(("mode", "exact"), [("window=18", 18), ("sinks=3,window=18", 21)])
def test_the_exact_part_is_shared_and_the_rest_is_not(mode: str, exact: int) -> None:
    rig = Rig(slots=128)
    rig.submit(1, LONG, 20, kv_mode=mode)
    rig.run()
    text = [*LONG, *rig.tokens(1)]
    rig.submit(2, text, 9)
    rig.run()
    assert rig.tokens(2) == expected(text, 9)
    assert rig.of(2, "done")[0]["usage"].cached_tokens == exact // PAGE * PAGE
    rig.submit(3, text, 9, kv_mode=mode)  # of what is exact all is known by now, and nothing else is of use
    rig.run()
    assert rig.of(3, "done")[0]["usage"].cached_tokens == exact
    window, sinks = 18, exact - 18
    assert rig.tokens(3) == expected(text, 9, window, sinks)


def test_the_exact_part_comes_back_from_the_disk() -> None:
    rig = Rig(slots=40, store=200)
    rig.submit(1, LONG, 4, kv_mode="sinks=8,window=24")
    rig.run()
    assert rig.pager.flush(rig.clock() + 10.0) == 0
    for number in range(2, 6):
        rig.submit(number, [number] * 100, 4)
        rig.run()
    rig.submit(9, LONG, 40, kv_mode="sinks=8,window=24")
    rig.run()
    assert rig.of(9, "done")[0]["timings"].hit_nvme > 0
    assert rig.tokens(9) == expected(LONG, 40, 24, 8)


def test_preempted_it_begins_again_and_says_the_same() -> None:
    rig = Rig(slots=16, max_rows=8)
    rig.submit(1, PROMPT, 50)
    rig.submit(2, LONG[:30], 60, kv_mode="window=20")
    rig.run()
    assert rig.streams.totals.preemptions > 0
    assert rig.tokens(1) == expected(PROMPT, 50) and rig.tokens(2) == expected(LONG[:30], 60, 20)
    assert len(rig.of(2, "accepted")) == 1


def test_a_lost_page_with_sinks_is_computed_from_the_beginning() -> None:
    rig = Rig(slots=16, store=200, max_rows=8)
    rig.submit(1, LONG[:40], 60, kv_mode="sinks=3,window=16")
    rig.turn(20)
    (request,) = rig.streams
    assert request.lease is not None and request.lease.dropped
    (node,) = request.lease.nodes
    rig.pager.promoter.hole(request.lease, 0) if node.device < 0 else request.lease.absent.add(0)
    rig.streams._arrive(rig.clock())
    assert rig.streams.totals.preemptions == 1
    rig.run()
    assert rig.tokens(1) == expected(LONG[:40], 60, 16, 3)


@pytest.mark.parametrize("resumed", [5, 39])
def test_a_resumed_one_goes_on_where_it_was(resumed: int) -> None:
    rig = Rig()
    said = expected(PROMPT, 60, 16, 3)
    rig.submit(1, PROMPT, 60, kv_mode="sinks=3,window=16", resume=tuple(said[:resumed]))
    rig.run()
    assert rig.tokens(1) == said[resumed:]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kv_mode": "window=8"}, "needs a window of 16"),
        ({"kv_mode": "sinks=100,window=101"}, "sees 201 tokens, the model's context holds 200"),
        ({"kv_mode": "h2=64"}, "knows no 'h2'"),
        ({"kv_mode": "window=32", "beam_width": 3}, "beam search keeps the whole context"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message) as refused:
        Rig().submit(1, PROMPT, 5, **more)
    assert refused.value.param == "kv_mode" and refused.value.hint


OF_EACH_KIND = {
    Kind.WINDOW: "window=32", Kind.SINKS: "sinks=4,window=32", Kind.SELECT: "select=4", Kind.H2O: "h2o=64",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "mode"), OF_EACH_KIND.items())
def test_a_card_refuses_by_name_what_it_does_not_have(kind: Kind, mode: str) -> None:
    rig = Rig()
    object.__setattr__(rig.intake.facts, "modes", frozenset(set(Kind) - {kind}))
    with pytest.raises(Unsupported, match=f"kv_mode {mode} is not there on the card yet"):
        rig.submit(1, PROMPT, 5, kv_mode=mode)
    rig.submit(2, PROMPT, 5, kv_mode="exact")
    object.__setattr__(rig.intake.facts, "modes", frozenset({kind}))
    rig.submit(3, PROMPT, 5, kv_mode=mode)


def test_a_window_that_no_device_holds_is_told() -> None:
    rig = Rig(slots=10, host=100)
    rig.submit(1, LONG, 5, kv_mode="window=60")
    rig.run()
    (failed,) = rig.of(1, "failed")
    assert failed["code"] == "out_of_space" and "kv_mode window=60" in failed["message"]


def test_logits_that_are_no_numbers_end_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    hidden = rig.decoder.hidden

    def broken(rows: np.ndarray) -> np.ndarray:
        out = hidden(rows)
        tokens = rig.decoder._batch[0]
        out[tokens[rows] == 50, 7] = np.nan
        return out

    monkeypatch.setattr(rig.decoder, "hidden", broken)
    rig.submit(1, PROMPT)
    rig.submit(2, [3, 4, 50])
    rig.submit(3, [3, 4, 50], beam_width=2)
    rig.run()
    assert rig.tokens(1) == expected(PROMPT, 8)
    assert rig.terminal(2) == rig.terminal(3) == ["failed"]


@settings(max_examples=counted(200, 4), deadline=None)
@given(st.integers(0, 10**9))
def test_random_lives_with_modes_leave_nothing_that_is_wrong(seed: int) -> None:
    """Modes and none, of texts that begin alike, in little memory; afterwards each text once more, exactly."""
    chance = random.Random(seed)
    rig = Rig(
        slots=chance.choice((16, 24)), host=chance.choice((0, 9)), store=chance.choice((0, 60)), max_streams=3,
        max_rows=chance.choice((8, 16)), context=400,
    )  # fmt: skip
    wanted: dict[int, list[int]] = {}
    texts: dict[int, list[int]] = {}
    aborted: set[int] = set()
    for number in range(1, 8):
        prompt = [chance.choice((1, 2)) if place > 20 else place for place in range(chance.randint(1, 60))]
        name, window, sinks = chance.choice([*MODES, ("exact", 0, 0)])
        count = chance.randint(1, 40 if window else 8)
        wanted[number] = expected(prompt, count, window, sinks)
        texts[number] = [*prompt, *wanted[number]]
        rig.submit(number, prompt, count, kv_mode=name, priority=chance.randint(0, 2))
        rig.turn(chance.randint(0, 9))
        if chance.random() < 0.2:
            aborted.add(number)
            rig.streams.cancel(number)
    rig.run()
    for number, tokens in wanted.items():
        if number not in aborted and rig.terminal(number) == ["done"]:
            assert rig.tokens(number) == tokens
    for number, text in texts.items():
        if len(text) <= 50:
            rig.submit(100 + number, text, 4)
            rig.run()
            assert rig.tokens(100 + number) == expected(text, 4)
