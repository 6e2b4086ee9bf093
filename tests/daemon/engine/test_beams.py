"""Beam search: transformers' answers, and the pages that hypotheses share, lose and give back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon.engine.fakes import PAGE, logits_for
from tests.daemon.engine.families import VOCAB, prepare, reference
from tests.daemon.engine.live import Live
from tests.daemon.engine.rig import END, Rig
from tierd.daemon.engine.beams import MAX_RESTARTS, BeamSearch, Hypothesis
from tierd.daemon.errors import Unsupported
from tierd.daemon.protocol import Sampling, Submit

PROMPT = [5, 9, 2, 7, 1, 1, 8, 3, 30, 31]


def theirs(model, prompt: list[int], width: int, count: int, ends: list[int]) -> list[list[int]]:
    """All beams of transformers, the best first, without what pads them."""
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), num_beams=width,
            num_return_sequences=width, max_new_tokens=count, do_sample=False, eos_token_id=ends or None,
            pad_token_id=VOCAB - 1,
        )  # fmt: skip
    answers = []
    for row in found[:, len(prompt) :].tolist():
        cut = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
        answers.append(row[:cut])
    return answers


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch wait for one another: on a busy machine that takes a hundred times longer than computing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def search(logits_of, prompt: list[int], width: int, count: int, ends: list[int]) -> BeamSearch:
    found = BeamSearch(width, frozenset(ends), count)
    while not found.over:
        found.advance(logits_of([[*prompt, *hypothesis.tokens] for hypothesis in found.running]))
    return found


def fake_logits(batch: list[list[int]]) -> np.ndarray:
    positions = np.arange(len(batch[0]), dtype=np.int32)
    return np.stack([logits_for(np.array(tokens, np.int32), positions) for tokens in batch])


def oracle(prompt: list[int], width: int, count: int, ends: tuple[int, ...] = ()) -> list[Hypothesis]:
    return search(fake_logits, prompt, width, count, list(ends)).ended


@pytest.mark.parametrize(("width", "ends"), [(2, []), (4, [7]), (5, [3, 40, 77]), (8, list(range(60)))])
def test_the_search_finds_what_transformers_finds(width: int, ends: list[int]) -> None:
    model = reference("llama", seed=width)

    def logits_of(batch: list[list[int]]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor(batch)).logits[:, -1].numpy()

    prompt = [200, 5, 5, 9]
    found = search(logits_of, prompt, width, 12, ends)
    assert [list(one.tokens) for one in found.ended] == theirs(model, prompt, width, 12, ends)


def test_the_engine_finds_what_transformers_finds(tmp_path: Path) -> None:
    model = reference("llama", seed=3)
    prompt = np.random.default_rng(2).integers(0, VOCAB, 37).tolist()
    with Live(prepare(model, tmp_path), tmp_path / "cache", device=40, nvme=0) as live:
        submit = Submit("m", tokens=tuple(prompt), sampling=Sampling(ignore_eos=True, max_tokens=24), beam_width=4, n=4)
        live.engine.loop.submit(live.engine.intake.request(1, submit, 0.0))
        told: dict[int, list[int]] = {}
        while (event := live.events.get(timeout=60)).ev != "done":
            if event.ev == "text":
                told[event.data["choice"]] = event.data["tokens"]
    assert [told[choice] for choice in range(4)] == theirs(model, prompt, 4, 24, [])


@pytest.mark.parametrize("length", [7, 8, 9, 10])
def test_the_best_answer_is_told_at_the_end_as_one_stream(length: int) -> None:
    rig = Rig()
    rig.submit(1, PROMPT[:length], 12, beam_width=3)
    rig.run()
    (best, *_) = oracle(PROMPT[:length], 3, 12)
    assert [event.ev for event in rig.events] == ["accepted", "text", "done"]
    assert rig.tokens(1) == list(best.tokens) and "choice" not in rig.of(1, "text")[0]
    assert rig.of(1, "text")[0]["text"] == bytes(best.tokens).decode()
    (done,) = rig.of(1, "done")
    assert done["finish"] == "length" and done["usage"].completion_tokens == 12


def test_several_answers_are_the_best_hypotheses() -> None:
    rig = Rig()
    rig.submit(1, PROMPT, 12, beam_width=4, n=3)
    rig.run()
    answers = oracle(PROMPT, 4, 12)[:3]
    assert [data["tokens"] for data in rig.of(1, "text")] == [list(answer.tokens) for answer in answers]
    assert [data["choice"] for data in rig.of(1, "choice")] == [0, 1, 2]
    assert rig.of(1, "done")[0]["usage"].completion_tokens == 36 and rig.terminal(1) == ["done"]


def test_an_end_token_ends_a_hypothesis_and_is_not_told() -> None:
    for seed in range(200):
        prompt = [seed % 60, 4, seed // 60]
        (best, *_) = oracle(prompt, 4, 10, (END,))
        if best.ended:
            break
    rig = Rig()
    rig.submit(1, prompt, 10, beam_width=4, sampling={"ignore_eos": False})
    rig.run()
    assert rig.tokens(1) == list(best.tokens[:-1]) and rig.of(1, "done")[0]["finish"] == "stop"
    assert rig.of(1, "done")[0]["usage"].completion_tokens == len(best.tokens)


def test_pages_of_the_prompt_are_held_once_and_all_are_given_back() -> None:
    prompt = [place * 7 % 60 for place in range(160)]
    rig = Rig(slots=64, context=400)
    rig.submit(1, prompt, 16, beam_width=8)
    used = []
    while len(rig.streams):
        rig.turn()
        used.append(rig.pager.statistics().device.used_pages)
    assert rig.tokens(1) == list(oracle(prompt, 8, 16)[0].tokens)
    assert len(prompt) // PAGE + 8 <= max(used) <= len(prompt) // PAGE + 8 * 5 - 15
    rig.check_quiet()
    assert rig.decoder.rows <= len(prompt) + 8 * 16
    rig.submit(2, [*prompt, 1], 1)
    rig.run()
    assert rig.of(2, "done")[0]["usage"].cached_tokens == len(prompt)


def test_beams_and_streams_go_on_side_by_side() -> None:
    rig = Rig()
    for number in (1, 2, 3, 4):
        rig.submit(number, PROMPT[: number + 4], 14, beam_width=4 if number % 2 else 0)
    rig.run()
    for number in (1, 3):
        assert rig.tokens(number) == list(oracle(PROMPT[: number + 4], 4, 14)[0].tokens)
    for number in (2, 4):
        assert rig.tokens(number) == list(oracle(PROMPT[: number + 4], 1, 14)[0].tokens)


@pytest.mark.parametrize("how", ["cancel", "fail"])
@pytest.mark.parametrize("turns", [2, 3, 4, 9])
def test_one_that_ends_early_gives_everything_back(how: str, turns: int) -> None:
    rig = Rig()
    rig.submit(1, PROMPT, 30, beam_width=4)
    for _ in range(turns):
        rig.streams.turn()  # copies are still on their way
    if how == "cancel":
        rig.streams.cancel(1)
    else:
        rig.streams.fail_all(RuntimeError("x"))
    rig.turn(3)
    assert rig.terminal(1) == ["aborted" if how == "cancel" else "failed"]
    rig.check_quiet()


def test_a_preempted_search_begins_again() -> None:
    rig = Rig()
    rig.submit(1, PROMPT, 12, beam_width=4)
    for turns in (3, 5, 6):
        rig.turn(turns)
        rig.streams._preempt(rig.streams._requests[1])
    rig.run()
    assert rig.tokens(1) == list(oracle(PROMPT, 4, 12)[0].tokens)
    assert len(rig.of(1, "accepted")) == 1 and rig.of(1, "done")[0]["usage"].cached_tokens == 0


def test_copies_that_never_work_end_the_search() -> None:
    rig = Rig()
    rig.submit(1, PROMPT, 12, beam_width=4)
    rig.mover.copy_job = lambda *_: (_ for _ in ()).throw(AssertionError)  # type: ignore[method-assign,assignment]
    rig.pager.promoter.copy_private = lambda *_: None  # type: ignore[method-assign]
    for _ in range(200):
        rig.streams.turn()
    rig.events += rig.streams.take_events()
    assert rig.terminal(1) == ["failed"] and rig.streams.totals.preemptions == MAX_RESTARTS
    rig.check_quiet()


def test_more_beams_than_a_step_has_room_for_are_refused() -> None:
    rig = Rig(slots=3, host=50)
    rig.submit(1, PROMPT, 4, beam_width=4)
    rig.run()
    assert rig.terminal(1) == ["failed"] and "for 3 beams, not for 4" in rig.of(1, "failed")[0]["message"]


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"sampling": {"temperature": 0.5}}, "temperature"), ({"sampling": {"stop": ("a",)}}, "stop"),
        ({"sampling": {"repetition_penalty": 1.1}}, "repetition_penalty"), ({"logprobs": 1}, "logprobs"),
        ({"sampling": {"logit_bias": {1: 1.0}}}, "logit_bias"),
    ],
)  # fmt: skip
def test_what_beams_cannot_do_is_refused_by_name(more: dict, name: str) -> None:
    with pytest.raises(Unsupported) as caught:
        Rig().submit(1, PROMPT, 4, beam_width=4, **more)
    assert caught.value.param == name


def test_one_beam_is_greedy() -> None:
    rig = Rig()
    rig.submit(1, PROMPT, 12, beam_width=1, sampling={"temperature": None})
    rig.submit(2, PROMPT, 12)
    rig.run()
    assert rig.tokens(1) == rig.tokens(2)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**9))
def test_random_searches_under_pressure(seed: int) -> None:
    chance = random.Random(seed)
    slots, host, store = chance.choice([(6, 20, 0), (6, 0, 80), (5, 9, 80), (12, 20, 0), (30, 0, 0)])
    rig = Rig(slots=slots, host=host, store=store, max_streams=3, max_rows=chance.choice((8, 32)))
    wanted: dict[int, tuple[list[int], int, int]] = {}
    aborted: set[int] = set()
    for number in range(1, 7):
        prompt = [chance.choice((1, 2, 3)) for _ in range(chance.randint(1, 14))]
        wanted[number] = (prompt, chance.choice((0, 2, 4)), chance.randint(1, 8))
        rig.submit(number, prompt, wanted[number][2], beam_width=wanted[number][1], priority=chance.randint(0, 1))
        rig.turn(chance.randint(0, 4))
        if chance.random() < 0.2:
            aborted.add(number)
            rig.streams.cancel(number)
    rig.run()
    for number, (prompt, width, count) in wanted.items():
        if rig.terminal(number) != ["aborted"]:
            assert rig.terminal(number) == ["done"]
            assert rig.tokens(number) == list(oracle(prompt, max(width, 1), count)[0].tokens)
