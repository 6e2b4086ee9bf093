"""A front that gives way to other programs on a card that is made up, with engines that are."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from front_harness import Daemon, Front, Wire, make_model, make_settings, running, until
from made_up_card import GIB, MadeUpCard

from tierd.daemon import card_watch
from tierd.daemon.card import CardThread, Nvml
from tierd.daemon.card_watch import CardWatch
from tierd.daemon.child import EngineState
from tierd.daemon.errors import BadConfig
from tierd.daemon.lifecycle import _watched_card
from tierd.daemon.machine import Machine

RESERVE = 2 * GIB
STEP = 512 << 20


class Scene:
    """A front, its watch and the card; `look` is one look, `seconds` after the last one."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.now_s = 0.0
        self.card = MadeUpCard(self._memory)
        self.thread = CardThread(lambda: self.card)
        self.watch = CardWatch(self.thread, RESERVE, front.supervisor, front.prepare, lambda: self.now_s)

    def _memory(self) -> dict[int, int]:
        """What each engine has on the card: its arena, and weights."""
        found = {}
        for name, engine in list(self.front.supervisor.engines.items()):
            if engine.pid is not None:
                booked = self.front.prepare.device_bytes(name) or 0
                found[engine.pid] = min(self.front.prepare.books.yielded.get(name, booked), booked) + GIB
        return found

    async def look(self, seconds: float = 2.0) -> dict[str, Any]:
        self.now_s += seconds
        await self.watch.look()
        return self.watch.told()

    def press(self, free_bytes: int) -> None:
        """Another program takes all but so much of what our engines leave."""
        self.card.others_bytes = self.card.total_bytes - sum(self._memory().values()) - free_bytes

    async def device_bytes(self, name: str = "alpha") -> int:
        status = await self.front.engine(name).call("status", {}, 5)
        return int(status["tiers"]["device"]["total_bytes"])

    def events(self, kind: str) -> list[str]:
        return [entry["text"] for entry in self.front.supervisor.history.since(0) if entry["kind"] == kind]


@contextlib.asynccontextmanager
async def scene(tmp_path: Path, machine: Machine, models: dict[str, dict[str, Any]]) -> AsyncIterator[Scene]:
    for name, options in models.items():
        make_model(tmp_path / "models", name, **{"on_card": True, **options})
    async with running(make_settings(tmp_path, device_mem=4 * GIB), max_loaded=0, machine=machine) as front:
        for name in models:
            await front.service.load(name)
        one = Scene(front)
        yield one
        if not one.card.closed:
            one.watch.close()
            await until(lambda: one.card.closed)


async def test_an_engine_gives_way_and_takes_its_memory_back(tmp_path: Path, machine: Machine) -> None:
    async with scene(tmp_path, machine, {"alpha": {}}) as one:
        assert (await one.look())["yielded_bytes"] == 0
        one.press(free_bytes=GIB)
        told = await one.look()
        assert (told["yielded_bytes"], told["yields"], told["state"]) == (STEP, 1, "watching")
        assert await one.device_bytes() == 4 * GIB - STEP
        told = await one.look()
        assert told["yielded_bytes"] == GIB and (await one.look())["yielded_bytes"] == GIB
        assert told["others"][0]["name"] == "game"
        assert "instead of 4.3 GB" in one.events("resize")[0] and "game, pid 4242" in one.events("resize")[0]
        one.card.others_bytes = 0
        assert [(await one.look(10.0))["yielded_bytes"] for _ in range(4)] == [GIB, GIB, GIB, 0]
        assert await one.device_bytes() == 4 * GIB and one.watch.told()["returns"] == 1
        assert one.card.pids == [one.front.engine().pid]


async def test_what_running_requests_need_stays(tmp_path: Path, machine: Machine) -> None:
    async with scene(tmp_path, machine, {"alpha": {"needed_bytes": 4 * GIB - STEP}}) as one:
        await one.look()
        one.press(free_bytes=0)
        for _ in range(5):
            await one.look()
        assert await one.device_bytes() == 4 * GIB - STEP


async def test_an_engine_that_refuses_is_left_alone_for_a_while(tmp_path: Path, machine: Machine) -> None:
    async with scene(tmp_path, machine, {"alpha": {"needs_bytes": 4 * GIB}}) as one:
        await one.look()
        one.press(free_bytes=0)
        for _ in range(5):
            await one.look()
        assert one.front.engine().resizes == 1 and await one.device_bytes() == 4 * GIB
        await one.look(card_watch.RETRY_S)
        assert one.front.engine().resizes == 2 and not one.watch.off


async def test_what_a_newcomer_leaves_of_it_is_not_more_than_was_given(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierd.prepare")
    async with scene(tmp_path, machine, {"alpha": {}}) as one:
        await one.look()
        one.press(free_bytes=0)
        for _ in range(6):
            await one.look()
        assert await one.device_bytes() == 2 * GIB
        make_model(tmp_path / "models", "beta", on_card=True)
        await one.front.service.load("beta")
        assert await one.device_bytes("beta") == 2 * GIB and await one.device_bytes("alpha") == 2 * GIB
        await one.front.service.unload("beta")
        await until(lambda: one.front.prepare.device_bytes("alpha") == 4 * GIB)
        assert await one.device_bytes("alpha") == 2 * GIB  # the card is still full
        (told,) = [text for text in caplog.messages if text.startswith("alpha has")][-1:]
        assert f"alpha has {2 * GIB} bytes of pages on the device now" in told
        one.card.others_bytes = 0
        for _ in range(5):
            await one.look(10.0)
        assert await one.device_bytes("alpha") == 4 * GIB


async def test_a_size_that_a_user_gives_is_the_new_most(tmp_path: Path, machine: Machine) -> None:
    async with scene(tmp_path, machine, {"alpha": {}}) as one:
        await one.look()
        one.press(free_bytes=GIB)
        await one.look()
        await one.front.service.resize("alpha", {"device_bytes": GIB})
        assert (await one.look())["yielded_bytes"] == 0
        one.card.others_bytes = 0
        for _ in range(5):
            await one.look(10.0)
        assert await one.device_bytes() == GIB


async def test_an_error_of_the_driver_turns_it_off_and_is_told_once(tmp_path: Path, machine: Machine) -> None:
    async with scene(tmp_path, machine, {"alpha": {}}) as one:
        await one.look()
        one.press(free_bytes=GIB)
        await one.look()
        one.card.error = "NVML: GPU is lost"
        await asyncio.wait_for(one.watch.run(), 10)
        told = one.watch.told()
        assert (told["state"], told["reason"]) == ("off", "NVML: GPU is lost")
        (notice,) = one.events("notice")
        assert "GPU is lost" in notice and "537 MB stay given" in notice
        await until(lambda: one.card.closed)


async def test_a_driver_that_hangs_turns_it_off(tmp_path: Path, machine: Machine) -> None:
    async with scene(tmp_path, machine, {"alpha": {}}) as one:
        loop, held = asyncio.get_running_loop(), asyncio.Event()

        one.card.meanwhile = lambda: asyncio.run_coroutine_threadsafe(held.wait(), loop).result(20)
        one.thread.answer_s = 0.05
        await one.look()
        assert "did not answer" in one.watch.off
        held.set()


async def test_processes_that_are_never_listed_turn_it_off(tmp_path: Path, machine: Machine) -> None:
    async with scene(tmp_path, machine, {"alpha": {}}) as one:
        one.card.listed = False
        for _ in range(card_watch.UNLISTED - 1):
            assert (await one.look())["state"] == "unknown"
        assert not one.watch.off
        one.card.listed = True
        await one.look()
        one.card.listed = False
        for _ in range(card_watch.UNLISTED):
            assert not one.watch.off
            await one.look()
        assert "container" in one.watch.off


async def test_engines_that_start_or_stand_still_are_no_other_programs(tmp_path: Path, machine: Machine) -> None:
    async with scene(tmp_path, machine, {"alpha": {}, "beta": {}}) as one:
        make_model(tmp_path / "models", "gamma", on_card=True, start_s=600)
        loading = asyncio.create_task(one.front.service.load("gamma"))
        await until(lambda: "gamma" in one.front.supervisor.engines and one.front.engine("gamma").pid)
        memory = one._memory()
        one.card.total_bytes = sum(memory.values()) + GIB  # less than the reserve is free, and it's our doing
        os.kill(one.front.engine("beta").pid, signal.SIGSTOP)
        try:
            told = await one.look()
        finally:
            os.kill(one.front.engine("beta").pid, signal.SIGCONT)
        assert one.front.engine("gamma").state is EngineState.STARTING
        assert (told["state"], told["others_bytes"], told["others"]) == ("watching", 0, [])
        assert set(one.card.pids) == memory.keys() and len(memory) == 3
        assert one._memory() == memory  # nobody gave anything
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


async def test_what_is_on_the_card_is_unknown_while_no_engine_answers(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path, machine, {"alpha": {}}) as one:
        assert (await one.look())["state"] == "watching"
        monkeypatch.setattr(card_watch, "ANSWER_S", 0.05)
        os.kill(one.front.engine().pid, signal.SIGSTOP)
        try:
            told = await one.look()
        finally:
            os.kill(one.front.engine().pid, signal.SIGCONT)
        assert told["state"] == "unknown" and "free_bytes" not in told


async def test_while_memory_is_given_for_something_else_a_look_changes_nothing(
    tmp_path: Path, machine: Machine
) -> None:
    async with scene(tmp_path, machine, {"alpha": {}}) as one:
        await one.look()
        one.press(free_bytes=GIB)
        async with one.front.prepare._one_at_a_time:
            told = await asyncio.wait_for(one.look(), 10)
        assert told["yielded_bytes"] == 0 and one.front.engine().resizes == 0
        assert (await one.look())["yielded_bytes"] == STEP  # no refusal was booked


async def test_a_resize_since_the_look_began_is_not_undone(tmp_path: Path, machine: Machine) -> None:
    async with scene(tmp_path, machine, {"alpha": {}}) as one:
        await one.look()
        one.press(free_bytes=GIB)
        loop = asyncio.get_running_loop()

        def resize() -> None:
            work = one.front.service.resize("alpha", {"device_bytes": 5 * GIB})
            asyncio.run_coroutine_threadsafe(work, loop).result(20)

        one.card.meanwhile = resize
        await one.look()
        assert await one.device_bytes() == 5 * GIB


async def test_an_engine_on_the_processors_is_told_once(tmp_path: Path, machine: Machine) -> None:
    async with scene(tmp_path, machine, {"alpha": {"on_card": False}}) as one:
        assert (await one.look())["state"] == "idle"
        await one.look()
        assert [text for text in one.front.engine().notices if "yield_device_mem" in text] == [
            "yield_device_mem does nothing for alpha: it computes on the processors"
        ]


# -- a daemon ------------------------------------------------------------------------------------------------------


async def test_a_daemon_gives_way(tmp_path: Path, daemon: Callable[..., Daemon]) -> None:
    make_model(tmp_path / "models", "alpha", on_card=True)
    card = tmp_path / "card.json"
    card.write_text(json.dumps({"free_bytes": GIB, "others_bytes": 20 * GIB}))
    one = daemon(device_mem=GIB, host_mem=0, yield_device_mem=RESERVE, card=str(card))
    await asyncio.to_thread(one.wait)
    wire = await Wire.connect(one.socket)
    assert (await wire.call("status"))["card"]["state"] == "idle"
    await wire.call("load", model="alpha")
    for _ in range(400):
        told = (await wire.call("status"))["card"]
        if told["yielded_bytes"]:
            break
        await asyncio.sleep(0.05)
    assert told["state"] == "watching" and told["yielded_bytes"] >= STEP
    events = (await wire.call("events", after=0))["events"]
    assert any(event["kind"] == "resize" and "game, pid 4242" in event["text"] for event in events)
    await wire.close()


async def test_a_daemon_ends_while_the_driver_hangs(tmp_path: Path, daemon: Callable[..., Daemon]) -> None:
    make_model(tmp_path / "models", "alpha", on_card=True)
    card = tmp_path / "card.json"
    card.write_text(json.dumps({"hangs": "read"}))
    one = daemon(device_mem=GIB, host_mem=0, yield_device_mem=RESERVE, card=str(card))
    await asyncio.to_thread(one.wait)
    wire = await Wire.connect(one.socket)
    await wire.call("load", model="alpha")
    await until(card.with_suffix(".reading").exists)
    await wire.close()
    said = await asyncio.to_thread(one.end)  # kills it and raises when it does not end
    assert one.process.returncode == 0 and "stopped" in said


def test_a_daemon_whose_driver_hangs_at_the_start_says_so(tmp_path: Path, daemon: Callable[..., Daemon]) -> None:
    card = tmp_path / "card.json"
    card.write_text(json.dumps({"hangs": "open"}))
    refused = daemon(yield_device_mem=RESERVE, card=str(card), times={"ANSWER_S": 0.1})
    refused.process.wait(20)
    said = refused.end()
    assert refused.process.returncode == 78 and "did not answer within 0.1 s" in said


def test_a_start_that_fails_later_lets_go_of_the_card(tmp_path: Path, daemon: Callable[..., Daemon]) -> None:
    card = tmp_path / "card.json"
    card.write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        refused = daemon(yield_device_mem=RESERVE, card=str(card), listen=listen)
        refused.process.wait(20)
    assert "cannot listen" in refused.end() and card.with_suffix(".closed").exists()


def test_a_daemon_that_can_watch_no_card_does_not_start(tmp_path: Path, daemon: Callable[..., Daemon]) -> None:
    refused = daemon(yield_device_mem=RESERVE)
    refused.process.wait(20)
    said = refused.end()
    assert refused.process.returncode == 78 and "the card can't be watched: NVML" in said


def test_a_card_that_is_off_has_nothing_to_give_way_in(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="card is off"):
        _watched_card(make_settings(tmp_path, yield_device_mem=1 << 30, card="off"), Nvml)
