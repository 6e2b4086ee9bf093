"""Several answers to one request, over engines that live, die and are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest
from fake_engine import logprob, text_of, token, whole_text
from front_harness import set_options, until

from tierd.daemon import choices
from tierd.daemon.errors import BadRequest, QuotaExceeded, TooBusy
from tierd.daemon.limits import MAX_SEED
from tierd.daemon.protocol import TERMINAL, Message, Sampling, Submit
from tierd.daemon.tenants import Allowance

SAMPLED = Sampling(temperature=0.8, seed=5, max_tokens=6)


def asked(**fields):
    return Submit("alpha", **({"prompt": "hello", "sampling": SAMPLED} | fields))


async def run(front, submit):
    async with contextlib.aclosing(front.service.run(front.service.submit(submit), "test")) as events:
        told = [event async for event in events]
    assert [event.ev for event in told if event.ev in TERMINAL] == [told[-1].ev], "one end, at the end"
    return [event for event in told if event.ev != "progress"]


def texts(events):
    """The text of every choice."""
    said = {}
    for event in events:
        if event.ev == "text":
            said[event.data["choice"]] = said.get(event.data["choice"], "") + event.data["text"]
    return said


def ends(events):
    return sorted(event.data["choice"] for event in events if event.ev == "choice")


async def test_n_answers_have_seeds_that_follow_each_other(front):
    events = await run(front, asked(n=3))
    assert texts(events) == {n: whole_text("hello", 6, 5 + n) for n in range(3)}
    assert ends(events) == [0, 1, 2] and events[0].ev == "accepted"
    assert [event.ev for event in events].count("accepted") == 1
    assert events[-1].data["usage"] == {"prompt_tokens": 1, "completion_tokens": 18, "cached_tokens": 2}
    assert front.metrics.requests["test", "done"] == 1 and front.metrics.completion_tokens == 18


async def test_each_choice_ends_after_its_text_and_says_why(front):
    events = await run(front, asked(n=2))
    for choice in range(2):
        mine = [event for event in events if event.data.get("choice") == choice]
        assert [event.ev for event in mine[:-1]] == ["text"] * (len(mine) - 1) and mine[-1].ev == "choice"
        assert mine[-1].data == {"choice": choice, "finish": "length", "stop": None}


async def test_one_answer_is_no_choice(front):
    events = await run(front, asked())
    assert not any("choice" in event.data or event.ev == "choice" for event in events)


async def test_best_of_gives_the_likeliest_by_the_mean_and_keeps_its_figures(front):
    def mean(seed):
        return sum(logprob(token("hello", seed, n), "", 0)["logprob"] for n in range(6)) / 6

    best = sorted(range(5, 10), key=mean, reverse=True)[:2]
    events = await run(front, asked(n=2, best_of=5))
    assert texts(events) == {n: whole_text("hello", 6, seed) for n, seed in enumerate(best)}
    assert not any("logprobs" in event.data or "logprob_sum" in event.data for event in events)
    assert events[-1].data["usage"]["completion_tokens"] == 30
    asked_for = await run(front, asked(n=1, best_of=2, logprobs=1))
    assert all(event.data["logprobs"] for event in asked_for if event.ev == "text")


async def test_answers_that_are_held_back_are_said_to_be_worked_on(front, monkeypatch):
    monkeypatch.setattr(choices, "PROGRESS_S", 0.0)
    monkeypatch.setattr(choices, "_COMPACT_EVENTS", 3)
    stream = front.service.submit(asked(best_of=2))
    async with contextlib.aclosing(front.service.run(stream, "test")) as events:
        told = [event async for event in events]
    held = [event for event in told if event.ev == "progress" and event.data.get("stage") == "answers"]
    assert held and held[0].data["total"] == 2
    assert texts(told)[0] in [whole_text("hello", 6, seed) for seed in (5, 6)]


async def test_several_prompts_count_on(front):
    submits = [asked(n=2), asked(prompt="other words", n=2)]
    events = await run(front, submits)
    assert texts(events) == {
        0: whole_text("hello", 6, 5), 1: whole_text("hello", 6, 6),
        2: whole_text("other words", 6, 5), 3: whole_text("other words", 6, 6),
    }  # fmt: skip
    assert events[-1].data["usage"] == {"prompt_tokens": 3, "completion_tokens": 24, "cached_tokens": 4}


async def test_seeds_wrap_at_the_end_of_their_range(front):
    sampling = Sampling(temperature=0.8, seed=MAX_SEED, max_tokens=2)
    events = await run(front, asked(n=2, sampling=sampling))
    assert texts(events)[1] == whole_text("hello", 2, -MAX_SEED)


async def test_tool_calls_of_several_answers_keep_their_order(front):
    messages = (Message("user", "!calls=2"),)
    events = await run(front, asked(prompt=None, messages=messages, n=2))
    for choice in range(2):
        pieces = [p for e in events if e.data.get("choice") == choice for p in e.data.get("calls", ())]
        assert [piece["id"] for piece in pieces if "id" in piece] == ["call_0", "call_1"]
    assert [event.data["finish"] for event in events if event.ev == "choice"] == ["tool_calls"] * 2


async def test_a_refusal_of_one_ends_all_as_one_refusal(front):
    events = await run(front, asked(prompt="!refuse", n=3))
    assert [event.ev for event in events] == ["refused"]
    assert front.engine().streams == 0


async def test_a_failure_after_acceptance_fails_the_whole(front):
    set_options(front.settings.models_dir / "alpha", token_s=0.005)
    events = await run(front, [asked(sampling=Sampling(max_tokens=200)), asked(prompt="!refuse")])
    assert events[-1].ev in ("failed", "refused")  # which of the two prompts came first is not decided
    assert front.engine().streams == 0 and front.service.live == 0


async def test_every_answer_outlives_its_engine(front):
    set_options(front.settings.models_dir / "alpha", token_s=0.005)
    sampling = Sampling(temperature=0.8, seed=5, max_tokens=40)
    running = asyncio.create_task(run(front, asked(n=4, sampling=sampling)))
    await until(lambda: any(len(stream.live.tokens) > 20 for stream in front.service._places))
    os.kill(front.engine().pid, signal.SIGKILL)
    events = await running
    assert texts(events) == {n: whole_text("hello", 40, 5 + n) for n in range(4)}
    assert events[-1].ev == "done" and events[-1].data["usage"]["cached_tokens"] == 2
    assert front.metrics.resumed_streams == 1


@pytest.mark.long  # three engines have to die for it
async def test_a_request_that_kills_engines_fails_once(front, monkeypatch):
    monkeypatch.setattr("tierd.daemon.failures.CRASH_WINDOW_S", 0.0)
    events = await run(front, asked(prompt="!die", n=2))
    assert [event.ev for event in events] == ["failed"] and front.service.live == 0


async def test_cancel_ends_every_answer_with_one_aborted(front):
    set_options(front.settings.models_dir / "alpha", token_s=0.01)
    stream = front.service.submit(asked(n=3, sampling=Sampling(max_tokens=4000)))
    told = []
    async with contextlib.aclosing(front.service.run(stream, "test")) as events:
        async for event in events:
            told.append(event)
            if event.ev == "text" and not stream.cancelled:
                stream.cancel()
    assert told[-1].ev == "aborted" and [event.ev for event in told].count("aborted") == 1
    assert told[-1].data["usage"]["completion_tokens"] >= 1
    await until(lambda: front.engine().streams == 0)


async def test_closing_the_iterator_cancels_every_answer_in_the_engine(front):
    set_options(front.settings.models_dir / "alpha", token_s=0.01)
    stream = front.service.submit(asked(n=3, sampling=Sampling(max_tokens=4000)))
    async with contextlib.aclosing(front.service.run(stream, "test")) as events:
        async for event in events:
            if event.ev == "text":
                break
    assert front.engine().streams == 0 and front.service.live == 0
    async with asyncio.timeout(10):
        while (await front.service.status())["engines"][0]["cancelled"] < 3:
            pass


async def test_the_unix_socket_tells_choices(front):
    wire = await front.connect()
    wire.send(1, "generate", model="alpha", prompt="hello", n=2, sampling={"max_tokens": 3, "temperature": 0})
    events = await wire.until_end(1)
    assert texts(events) == dict.fromkeys((0, 1), whole_text("hello", 3)) and ends(events) == [0, 1]
    await wire.close()


async def test_answers_count_against_the_queue_and_the_quota(front, monkeypatch):
    with pytest.raises(BadRequest, match="65 answers"):
        front.service.submit([asked(n=33), asked(n=32)])
    stream = front.service.submit(asked(prompt="!hang", n=64))
    events = front.service.run(stream, "test")
    await anext(events)
    bound = front.settings.max_streams + front.settings.max_queue
    assert 64 < bound < 64 * 10
    waiting = [front.service.submit(asked(n=64)) for _ in range(1, bound // 64)]
    with pytest.raises(TooBusy):
        front.service.submit(asked(n=64))
    for one in waiting:
        front.service.release(one)
    monkeypatch.setattr(front.service.tenants, "allowance", lambda tenant: Allowance(0, 66))
    with pytest.raises(QuotaExceeded):
        front.service.submit(asked(n=3))
    front.service.release(front.service.submit(asked(n=2)))
    await events.aclose()


def test_beams_are_one_stream():
    assert choices.answers_of(asked(n=3, beam_width=4)) == 1 and choices.answers_of(asked(n=3)) == 3
    assert choices.answers_of(asked(n=2, best_of=5)) == 5


@pytest.mark.parametrize("n", [1, 2])
async def test_beams_of_several_prompts_count_on(front, n):
    sampling = Sampling(max_tokens=3)
    submits = [asked(prompt=prompt, n=n, beam_width=2, sampling=sampling) for prompt in ("a", "b")]
    events = await run(front, submits)
    said = [whole_text(prompt, 3, seed) for prompt in "ab" for seed in range(n)]
    assert texts(events) == dict(enumerate(said)) and ends(events) == list(range(2 * n))
    assert events[-1].data["usage"]["completion_tokens"] == 6 * n


async def test_beams_of_one_prompt_are_told_as_the_engine_tells_them(front):
    events = await run(front, asked(n=2, beam_width=2, sampling=Sampling(max_tokens=3)))
    assert texts(events) == {n: whole_text("hello", 3, n) for n in range(2)} and ends(events) == [0, 1]


async def test_the_text_of_the_fake_engine_depends_on_the_seed():
    assert text_of(token("hello", 5, 0)) != text_of(token("hello", 6, 0))
