"""Speculation: what is drafted, how much of it, and that the tokens are those that come one by one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon.engine.fakes import VOCAB, expected
from tests.daemon.engine.live import Live
from tests.daemon.engine.rig import END, Rig
from tierd.daemon.engine.scheduler import Chunk, Limits, Phase, Snapshot, Stream, plan
from tierd.daemon.engine.speculate import (
    INDEXED_AT_ONCE,
    MAX_DRAFT,
    MAX_INDEXED,
    UNMEASURED_SHARE,
    Draft,
    Lookup,
    Pace,
    Speculate,
    Speculator,
    best_length,
)

PROMPT = [5, 9, 2, 7, 1, 1, 8, 3, 30, 31]
CYCLE = [11, 12, 13, 14, 15, 16, 17]


def copying(tokens: np.ndarray, _positions: np.ndarray) -> np.ndarray:
    """Logits of a model that goes on as the text did the last time it said its last token."""
    history = tokens.tolist()
    logits = np.full(VOCAB, -4.0, np.float32)
    logits[(sum(history[-3:]) * 7) % END] = 0.0
    if history[-1] in history[:-1]:
        place = len(history) - 2 - history[-2::-1].index(history[-1])
        logits[history[place + 1]] = 4.0
    return logits


def rig(mode: Speculate, **more: int) -> Rig:
    one = Rig(**more)
    one.streams._steps.speculator.mode = mode
    return one


def test_what_followed_the_last_time_is_found() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 2, 3, 6, 9, 1, 2, 3]
    assert Lookup().find(tokens, 3) == [4, 5, 9]  # three tokens that agree say more than two that came later
    assert Lookup().find([*tokens[:-3], 8, 2, 3], 3) == [6, 9, 8]
    assert Lookup().find([1, 2, 3, 4], 3) == [] == Lookup().find([1], 3) == Lookup().find([], 3)


def test_what_repeats_itself_goes_on_beyond_its_end() -> None:
    assert Lookup().find([7, 1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert Lookup().find([5, 5, 5], 4) == [5, 5, 5, 5]


def test_a_long_prompt_is_indexed_by_and_by_and_only_its_end() -> None:
    tokens = [*range(100_000, 100_000 + 3 * MAX_INDEXED)]
    lookup = Lookup()
    for _ in range(MAX_INDEXED // INDEXED_AT_ONCE + 2):
        lookup.find(tokens, 4)
        assert lookup._seen <= len(tokens)
    assert lookup._seen == len(tokens) and len(lookup._next) <= 2 * MAX_INDEXED
    assert lookup.find([*tokens, *tokens[-500:-497]], 2) == tokens[-497:-495]
    assert lookup.find([*tokens, *tokens[:3]], 2) == []


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 60))
def test_a_lookup_that_grew_finds_what_a_new_one_finds(tokens: list[int], cut: int) -> None:
    grown = Lookup()
    for end in range(min(cut, len(tokens)), len(tokens)):
        grown.find(tokens[:end], 5)
    assert grown.find(tokens, 5) == Lookup().find(tokens, 5)


def test_the_pace_follows_how_often_drafts_were_right() -> None:
    pace = Pace()
    for _ in range(20):
        assert pace.learn([1, 2, 3], [1, 2, 3, 9]) == 3
    assert pace.chance > 0.95
    for _ in range(20):
        assert pace.learn([1, 2, 3], [7]) == 0
    assert pace.chance < 0.05
    assert Pace().learn([1, 2, 3], [1, 5]) == 1 and Pace().learn([], [1]) == 0


@pytest.mark.parametrize(
    ("chance", "share", "streams", "least", "most"),
    [
        (0.95, 0.2, 1, 4, 12),  # beside resident weights
        (0.95, 0.01, 1, 12, 15),  # beside streamed ones
        (0.2, 0.2, 1, 0, 0),
        (0.3, 0.01, 1, 2, 5),
        (0.95, 0.2, 8, 0, 0),  # eight streams wait for the draft of one
        (0.95, 1.0, 1, 0, 0),
    ],
)
def test_how_much_is_drafted(chance: float, share: float, streams: int, least: int, most: int) -> None:
    assert least <= best_length(chance, MAX_DRAFT, share, streams) <= most


def test_nothing_is_drafted_until_drafts_would_have_been_right() -> None:
    speculator, draft, tokens = Speculator(), Draft(), [*CYCLE, *CYCLE]
    lengths = []
    for place in range(12):
        lengths.append(speculator.propose(draft, tokens, 50, 1))
        tokens.append(CYCLE[place % 7])
        draft.learn(tokens[-1:])
    assert lengths[0] == 0 and lengths[-1] >= 3
    assert Speculator(Speculate.OFF).propose(draft, tokens, 50, 1) == 0 and not draft.tokens
    assert Speculator(Speculate.ON).propose(Draft(), tokens, 50, 1) > 0
    assert Speculator(Speculate.ON).propose(Draft(), tokens, 2, 1) == 2
    assert Speculator(Speculate.ON).propose(Draft(), tokens, 0, 1) == 0


def test_a_cost_is_measured_and_one_that_forbids_drafts_fades() -> None:
    speculator, draft = Speculator(), Draft(pace=Pace(0.9))
    for _ in range(30):
        speculator.measure(step_s=0.05, plain_s=0.01, rows=2)
    assert speculator.row_share == pytest.approx(2.0, rel=0.01)
    for _ in range(1000):
        found = speculator.propose(draft, [1, 2, 3, 4, 1, 2, 3], 4, 1)
        if found:
            break
    assert found and UNMEASURED_SHARE < speculator.row_share < 1.0
    speculator.measure(step_s=0.05, plain_s=0.0, rows=2)  # nothing to compare with yet


def test_drafts_take_rows_that_nobody_else_needs() -> None:
    limits = Limits(max_rows=12, max_streams=4, page_tokens=4)

    def decoding(number: int, drafted: int) -> Stream:
        return Stream(number, (1.0, number), Phase.DECODE, 9, 8, 3, 12, drafted=drafted)

    chunks = plan(Snapshot((decoding(1, 6), decoding(2, 9)), 100, 100), limits).chunks
    assert chunks == (Chunk(1, 8, 7, True), Chunk(2, 8, 5, True))
    chunks = plan(Snapshot((decoding(1, 6),), 0, 0), limits).chunks
    assert chunks == (Chunk(1, 8, 4, True),)  # as far as its page goes, and nobody is preempted for them
    prompt = Stream(3, (1.0, 3), Phase.PREFILL, 40)
    assert plan(Snapshot((decoding(1, 6), prompt), 100, 100), limits).chunks[0] == Chunk(1, 8, 1, True)


@pytest.mark.parametrize("mode", Speculate)
def test_the_tokens_are_those_that_come_one_by_one(mode: Speculate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.daemon.engine.fakes.logits_for", copying)
    prompt = [*PROMPT, *CYCLE, 50, *CYCLE[:3]]
    one = rig(mode)
    one.submit(1, prompt, 60, logprobs=1)
    one.run()
    tokens = [*prompt]
    for _ in range(60):
        tokens.append(int(np.argmax(copying(np.array(tokens), np.arange(0)))))
    assert one.tokens(1) == tokens[len(prompt) :]
    entries = [entry["token"] for data in one.of(1, "text") for entry in data["logprobs"]]
    assert entries == one.tokens(1)
    totals = one.streams.totals
    assert totals.generated_tokens == 60 and (totals.steps < 40) is (mode is not Speculate.OFF)
    assert (totals.right_drafts > 20) is (mode is not Speculate.OFF) is (totals.drafted_tokens > 0)


def test_only_tokens_that_were_drawn_are_known_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierd.daemon.engine.speculate.GRAM_TOKENS", (1,))
    one = rig(Speculate.ON)
    prompt = PROMPT * 3
    one.submit(1, prompt, 40)  # of a model that does not repeat itself: every draft is wrong
    one.run()
    answer = expected(prompt, 40)
    assert one.tokens(1) == answer and one.streams.totals.drafted_tokens > 0
    one.submit(2, [*prompt, *answer, 1], 4)
    one.run()
    assert one.of(2, "done")[0]["usage"].cached_tokens == len(prompt) + 39
    assert one.tokens(2) == expected([*prompt, *answer, 1], 4)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize("finish", ["length", "stop", "end"])
def test_draws_and_ends_are_the_same(temperature: float, finish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.daemon.engine.fakes.logits_for", copying)
    sampling = {"temperature": temperature, "seed": 3, "presence_penalty": 0.2, "ignore_eos": finish != "end"}
    if finish == "stop":
        sampling["stop"] = (bytes(CYCLE[2:5]).decode(),)
    found = []
    for mode in (Speculate.OFF, Speculate.ON):
        one = rig(mode)
        one.submit(1, [*PROMPT, END, *CYCLE, *PROMPT], 50, sampling=sampling)
        one.run()
        (done,) = one.of(1, "done")
        text = "".join(data["text"] for data in one.of(1, "text"))
        found.append((one.tokens(1), text, done["finish"], done["usage"].completion_tokens))
    assert found[0] == found[1]


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**9))
def test_random_lives_with_drafts(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tierd.daemon.engine.speculate.GRAM_TOKENS", (1,))  # there is always something to draft
        live_through(seed)


def live_through(seed: int) -> None:
    chance = random.Random(seed)
    one = rig(Speculate.ON, slots=14, host=chance.choice((0, 9)), store=chance.choice((0, 40)), max_streams=3)
    wanted: dict[int, tuple[list[int], int]] = {}
    for number in range(1, 9):
        prompt = [chance.choice((1, 2)) for _ in range(chance.randint(1, 20))]
        wanted[number] = (prompt, chance.randint(1, 16))
        one.submit(number, *wanted[number], priority=chance.randint(0, 2))
        one.turn(chance.randint(0, 6))
        one.disturb(number, chance)
    one.run()
    for number, (prompt, count) in wanted.items():
        if one.terminal(number) != ["aborted"]:
            assert one.terminal(number) == ["done"] and one.tokens(number) == expected(prompt, count)


@pytest.mark.long
def test_two_hundred_prompts_on_and_off(models_dir: Path, tmp_path: Path) -> None:
    """The default model; greedy and drawn, some of them copying."""
    chance = random.Random(1)
    words = "the engine keeps pages of memory and moves them ahead of use while it reads a file".split()
    submits = []
    for number in range(200):
        text = " ".join(chance.choice(words) for _ in range(chance.randint(4, 12)))
        prompt = text if number % 2 else f"{text}. {text[: len(text) // 2]}"
        sampling = {} if number % 4 else {"temperature": 0.8, "seed": number}
        submits.append({"prompt": prompt, "max_tokens": 12, **sampling})
    found = []
    for mode in ("off", "on"):
        model = models_dir / "smollm2-135m"
        with Live(model, tmp_path / mode, device=900, nvme=0, speculate=mode) as live:
            found.append([tokens for at in range(0, 200, 40) for tokens, _ in live.run(submits[at : at + 40])])
            totals = live.engine.loop._streams.totals
            assert (totals.right_drafts > 20) is (mode == "on")
    assert found[0] == found[1]
