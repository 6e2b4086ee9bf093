"""Generations over engines that live, die, stand still and are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest
from fake_engine import whole_text
from front_harness import set_options, text, until

from tierd.daemon import stream
from tierd.daemon.protocol import Sampling, Submit


def names(events):
    return [event.ev for event in events if event.ev != "text"]


async def test_streams_what_the_engine_says(front):
    wire = await front.connect()
    wire.generate(1, "hello", max_tokens=20, temperature=0)
    events = await wire.until_end(1)
    assert names(events) == ["accepted", "done"]
    assert text(events) == whole_text("hello", 20)
    assert events[-1].data["usage"]["completion_tokens"] == 20
    assert events[-1].data["timings"]["load_ms"] > 0
    await wire.close()


@pytest.mark.parametrize("at", [0, 1, 7])
async def test_engine_killed_in_the_middle_gives_the_same_text(front, at):
    wire = await front.connect()
    prompt = f"!crash={at}"
    wire.generate(1, prompt, max_tokens=20, temperature=0)
    events = await wire.until_end(1)
    assert names(events) == ["accepted", "done"]
    assert text(events) == whole_text(prompt, 20)
    # What the dead engine computed for this very request is not a hit.
    assert events[-1].data["usage"] == {"prompt_tokens": 1, "completion_tokens": 20, "cached_tokens": 2}
    assert front.metrics.engine_deaths == {"alpha": 1}
    assert front.metrics.resumed_streams == 1
    await wire.close()


async def test_a_sampled_stream_keeps_its_seed_over_a_death(front):
    set_options(front.settings.models_dir / "alpha", token_s=0.005)
    wire = await front.connect()
    for request_id in (1, 2):
        wire.generate(request_id, "say", max_tokens=30, temperature=0.9)
    while (await wire.next()).ev != "text":
        pass
    seeds = [live.live.submit.sampling.seed for live in front.service._places]
    os.kill(front.engine().pid, signal.SIGKILL)
    texts = {1: "", 2: ""}
    ended = 0
    while ended < 2:
        event = await wire.next()
        if event.ev == "text":
            texts[event.id] += event.data["text"]
        ended += event.ev == "done"
    assert len(set(seeds)) == 2
    for request_id, seed in zip((1, 2), seeds, strict=True):
        assert whole_text("say", 30, seed).endswith(texts[request_id])
        assert texts[request_id].count(" ") >= 28
    await wire.close()


async def test_crash_loop_ends_the_stream_with_the_last_words_and_backs_off(front):
    wire = await front.connect()
    wire.generate(1, "!die", max_tokens=5)
    (end,) = await wire.until_end(1)
    assert end.ev == "failed" and end.data["code"] == "engine_failed"
    assert "3 times" in end.data["message"] and "dies on arrival" in end.data["message"]
    wire.generate(2, "innocent", max_tokens=5)
    (refused,) = await wire.until_end(2)
    assert refused.ev == "failed"  # within the back-off, at once
    front.supervisor._failures.refused["alpha"].until_s = 0.0
    wire.generate(3, "innocent", max_tokens=5)
    assert text(await wire.until_end(3)) != ""
    await wire.close()


async def test_a_request_that_kills_engines_fails_alone_in_time(front, monkeypatch):
    monkeypatch.setattr("tierd.daemon.failures.CRASH_WINDOW_S", 0.0)  # deaths that are far apart
    wire = await front.connect()
    wire.generate(1, "!die", max_tokens=5)
    (end,) = await wire.until_end(1)
    assert end.ev == "failed" and "worked on this request" in end.data["message"]
    wire.generate(2, "innocent", max_tokens=5)
    assert names(await wire.until_end(2)) == ["accepted", "done"]
    await wire.close()


async def test_a_stream_that_gets_on_outlives_many_engines(front, monkeypatch):
    monkeypatch.setattr("tierd.daemon.failures.CRASH_WINDOW_S", 0.0)
    wire = await front.connect()
    wire.generate(1, "!always=4", max_tokens=18, temperature=0)
    events = await wire.until_end(1)
    assert names(events) == ["accepted", "done"] and text(events) == whole_text("!always=4", 18)
    assert front.metrics.engine_deaths["alpha"] == 4
    await wire.close()


async def test_an_engine_that_stands_still_is_replaced(front, monkeypatch):
    monkeypatch.setattr(stream, "SILENCE_S", 0.2)
    monkeypatch.setattr(stream, "PROBE_S", 0.2)
    wire = await front.connect()
    wire.generate(1, "!freeze", max_tokens=8, temperature=0)
    events = await wire.until_end(1)
    assert names(events) == ["accepted", "done"] and text(events) == whole_text("!freeze", 8)
    await wire.close()


async def test_silence_of_a_living_engine_is_no_death(front, monkeypatch):
    monkeypatch.setattr(stream, "SILENCE_S", 0.05)
    set_options(front.settings.models_dir / "alpha", token_s=0.2)
    wire = await front.connect()
    wire.generate(1, "slow", max_tokens=3)
    assert names(await wire.until_end(1)) == ["accepted", "done"]
    assert not front.metrics.engine_deaths
    await wire.close()


async def test_an_engine_that_breaks_the_protocol_is_replaced(front):
    wire = await front.connect()
    wire.generate(1, "!garbage", max_tokens=8, temperature=0)
    events = await wire.until_end(1)
    assert names(events) == ["accepted", "done"] and text(events) == whole_text("!garbage", 8)
    await wire.close()


async def test_a_refusal_of_the_engine_is_passed_on(front):
    wire = await front.connect()
    wire.generate(1, "!refuse")
    (end,) = await wire.until_end(1)
    assert end.ev == "refused" and end.data["code"] == "context_length_exceeded" and "4096" in end.data["message"]
    await wire.close()


async def test_cancel_ends_with_aborted_and_reaches_the_engine(front):
    set_options(front.settings.models_dir / "alpha", token_s=0.01)
    wire = await front.connect()
    wire.generate(1, "long", max_tokens=4000)
    while (await wire.next()).ev != "text":
        pass
    wire.send(2, "cancel", target=1)
    assert (await wire.until_end(1))[-1].ev == "aborted"
    status = await wire.call("status")
    assert status["engines"][0]["cancelled"] == 1 and status["queue"]["live"] == 0
    await wire.close()


async def test_cancel_while_the_model_loads(front):
    set_options(front.settings.models_dir / "alpha", start_s=1.0)
    wire = await front.connect()
    wire.generate(1, "early")
    while (await wire.next()).ev != "progress":
        pass
    wire.send(2, "cancel", target=1)
    assert names(await wire.until_end(1)) == ["aborted"]
    await wire.close()


async def test_an_engine_that_ignores_a_cancel_is_not_waited_for(front, monkeypatch):
    monkeypatch.setattr(stream, "CANCEL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(stream, "SILENCE_S", 0.2)
    monkeypatch.setattr("tierd.daemon.child.EngineProcess.cancel", lambda self, stream_id: None)
    wire = await front.connect()
    wire.generate(1, "!hang")
    assert (await wire.next()).ev == "progress"
    await until(lambda: front.supervisor.engines["alpha"].streams)
    wire.send(2, "cancel", target=1)
    assert (await wire.until_end(1))[-1].ev == "aborted"
    await wire.close()


async def test_closing_the_iterator_cancels_in_the_engine(front):
    set_options(front.settings.models_dir / "alpha", token_s=0.01)
    stream_of = front.service.submit(Submit("alpha", prompt="long", sampling=Sampling(max_tokens=4000)))
    async with contextlib.aclosing(front.service.run(stream_of, "test")) as events:
        async for event in events:
            if event.ev == "text":
                break
    await asyncio.sleep(0.05)
    status = await front.service.status()
    assert status["engines"][0]["cancelled"] == 1
    assert front.engine().streams == 0 and front.service.live == 0
    assert front.metrics.requests["test", "aborted"] == 1
