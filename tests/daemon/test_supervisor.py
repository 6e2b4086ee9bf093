"""Engines come, make room for each other, and go."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import whole_text
from front_harness import make_settings, running, set_options, text, until

from tierd.daemon import supervisor
from tierd.daemon.child import EngineState
from tierd.daemon.errors import TooBusy


async def test_an_idle_engine_is_flushed_and_ended_and_comes_back(fake_models, tmp_path):
    async with running(make_settings(tmp_path, keep_alive_s=0.3)) as front:
        wire = await front.connect()
        wire.generate(1, "one", max_tokens=4, temperature=0)
        await wire.until_end(1)
        assert "alpha" in front.supervisor.engines
        await until(lambda: not front.supervisor.engines)
        assert (fake_models / "alpha" / "flushed").exists()
        assert not front.metrics.engine_deaths
        wire.generate(2, "two", max_tokens=4, temperature=0)
        assert text(await wire.until_end(2)) == whole_text("two", 4)
        await wire.close()


async def test_a_busy_engine_is_kept_and_looking_at_it_does_not_keep_it(fake_models, tmp_path):
    set_options(fake_models / "alpha", token_s=0.02)
    async with running(make_settings(tmp_path, keep_alive_s=0.2)) as front:
        wire = await front.connect()
        wire.generate(1, "long", max_tokens=40)
        assert (await wire.until_end(1))[-1].ev == "done"  # 0.8 s
        for _ in range(40):
            if not (await wire.call("status"))["engines"]:
                break
            await asyncio.sleep(0.05)
        assert not front.supervisor.engines
        await wire.close()


async def test_zero_unloads_at_once_and_never_never(fake_models, tmp_path):
    async with running(make_settings(tmp_path, keep_alive_s=0.0)) as front:
        wire = await front.connect()
        wire.generate(1, "one", max_tokens=2)
        assert (await wire.until_end(1))[-1].ev == "done"
        await until(lambda: not front.supervisor.engines)
        await wire.close()
    async with running(make_settings(tmp_path, keep_alive_s=None)) as front:
        await front.service.load("alpha")
        assert (await front.service.ps())["engines"][0]["expires_in_s"] is None


async def test_another_model_takes_the_place_of_an_idle_one(front):
    wire = await front.connect()
    for number, model in enumerate(("alpha", "beta", "alpha", "beta"), start=1):
        wire.generate(number, "x", model=model, max_tokens=4, temperature=0)
        assert text(await wire.until_end(number)) == whole_text("x", 4)
        assert list(front.supervisor.engines) == [model]
    assert (front.settings.models_dir / "alpha" / "flushed").exists()
    await wire.close()


async def test_another_model_waits_for_a_busy_one(front):
    set_options(front.settings.models_dir / "alpha", token_s=0.02)
    wire = await front.connect()
    wire.generate(1, "long", max_tokens=40)
    while (await wire.next()).ev != "text":
        pass
    other = await front.connect()
    other.generate(1, "short", model="beta", max_tokens=2)
    progress = await other.next()
    assert progress.ev == "progress" and progress.data["stage"] == "room"
    assert (await wire.until_end(1))[-1].ev == "done"
    assert (await other.until_end(1))[-1].ev == "done"
    await wire.close()
    await other.close()


async def test_a_model_that_is_always_in_use_makes_room_in_the_end(front, monkeypatch):
    monkeypatch.setattr(supervisor, "PATIENCE_S", 0.2)
    set_options(front.settings.models_dir / "alpha", token_s=0.01)
    ended = asyncio.Event()

    async def keep_busy(first_id):
        wire = await front.connect()
        number = first_id
        while not ended.is_set():
            wire.generate(number, "again", max_tokens=20)
            assert (await wire.until_end(number))[-1].ev == "done"
            number += 1

    async with asyncio.TaskGroup() as group:
        for first_id in (1, 1000):
            group.create_task(keep_busy(first_id))
        await until(lambda: "alpha" in front.supervisor.engines and front.engine().streams)
        other = await front.connect()
        other.generate(1, "x", model="beta", max_tokens=2)
        async with asyncio.timeout(8):
            assert (await other.until_end(1))[-1].ev == "done"
        ended.set()


async def test_requests_of_two_models_all_end(front):
    wires = [await front.connect() for _ in range(12)]
    for number, wire in enumerate(wires):
        wire.generate(1, f"n{number}", model=("alpha", "beta")[number % 2], max_tokens=4, temperature=0)
    answers = await asyncio.gather(*(wire.until_end(1) for wire in wires))
    assert [text(events) for events in answers] == [whole_text(f"n{n}", 4) for n in range(12)]


async def test_two_engines_side_by_side(fake_models, tmp_path):
    async with running(make_settings(tmp_path), max_loaded=2) as front:
        await asyncio.gather(front.service.load("alpha"), front.service.load("beta"))
        assert set(front.supervisor.engines) == {"alpha", "beta"}


async def test_waiting_for_room_has_a_deadline(front):
    set_options(front.settings.models_dir / "alpha", token_s=0.02)
    wire = await front.connect()
    wire.generate(1, "!hang")
    await until(lambda: "alpha" in front.supervisor.engines and front.engine().streams)
    model, _ = front.service.shelf.find("beta")
    with pytest.raises(TooBusy):
        await front.supervisor.acquire(model, 0.2)
    assert not front.supervisor._waiters
    with pytest.raises(TooBusy, match=r"in use \(1 stream\)"):
        await front.service.unload("alpha")


async def test_whoever_comes_to_a_retiring_engine_waits_for_the_next_one(front):
    wire, other = await front.connect(), await front.connect()
    wire.generate(1, "!hang")
    await until(lambda: "alpha" in front.supervisor.engines and front.engine().streams)
    last = front.engine()
    front.supervisor.retire("alpha")
    other.generate(2, "x", max_tokens=2, temperature=0)
    progress = await other.next()
    assert progress.ev == "progress" and "the last engine to end" in progress.data["text"]
    wire.send(3, "cancel", target=1)
    assert text(await other.until_end(2)) == whole_text("x", 2)
    assert front.engine() is not last


async def test_unload_while_it_loads(front):
    set_options(front.settings.models_dir / "alpha", start_s=5.0)
    load = asyncio.create_task(front.service.load("alpha"))
    await until(lambda: "alpha" in front.supervisor.engines and front.engine().pid)
    load.cancel()
    assert await front.service.unload("alpha") == {"unloaded": ["alpha"]}
    assert not front.metrics.engine_deaths


async def test_a_model_that_says_why_it_fails_is_not_tried_three_times(front):
    set_options(front.settings.models_dir / "alpha", fail={"code": "out_of_space", "message": "too big"})
    wire = await front.connect()
    wire.generate(1, "x")
    (end,) = await wire.until_end(1)
    assert (end.ev, end.data["code"]) == ("failed", "out_of_space")
    assert front.metrics.engine_deaths["alpha"] == 1
    set_options(front.settings.models_dir / "alpha")
    front.supervisor._failures.refused["alpha"].until_s = 0.0
    await front.service.load("alpha")
    assert front.engine().state is EngineState.READY


async def test_deaths_of_engines_that_were_of_use_are_no_loop(front):
    wire = await front.connect()
    for number in range(1, 10, 2):
        wire.generate(number, "ok", max_tokens=2)
        assert (await wire.until_end(number))[-1].ev == "done"
        wire.generate(number + 1, f"!crash=1 {number}", max_tokens=3, temperature=0)
        assert text(await wire.until_end(number + 1)) == whole_text(f"!crash=1 {number}", 3)
    assert front.metrics.engine_deaths["alpha"] == 5


async def test_a_model_that_cannot_be_prepared_fails(front):
    async def prepare(model, engines):
        raise RuntimeError("no disk")

    front.supervisor._prepare = prepare
    wire = await front.connect()
    wire.generate(1, "x")
    (end,) = await wire.until_end(1)
    assert end.ev == "failed" and "no disk" not in end.data["message"]
    await until(lambda: not front.supervisor.engines)


async def test_an_engine_that_hangs_at_its_start_is_killed(front, monkeypatch):
    monkeypatch.setattr(supervisor, "START_SILENCE_S", 0.5)
    set_options(front.settings.models_dir / "alpha", start_s=20.0)
    wire = await front.connect()
    wire.generate(1, "x")
    (end,) = await wire.until_end(1)
    assert end.ev == "failed" and "3 times" in end.data["message"]


async def test_one_engine_may_be_kept_for_longer_or_shorter_than_the_others(fake_models, tmp_path):
    async with running(make_settings(tmp_path, keep_alive_s=None)) as front:
        await front.service.load("alpha")
        front.service.keep_loaded("alpha", 100.0)
        assert 90 < front.supervisor.expires_in_s(front.engine()) <= 100
        front.service.keep_loaded("alpha", None)
        assert front.supervisor.expires_in_s(front.engine()) is None
        front.service.keep_loaded("alpha", 0.0)
        await until(lambda: not front.supervisor.engines)
        await front.service.load("alpha")  # the next engine is kept as the settings say
        assert front.supervisor.expires_in_s(front.engine()) is None
        front.service.keep_loaded("beta", 0.0)  # nothing of it is loaded: nothing to keep
