"""A front that gives way to other programs on a card that is made up, with engines that are."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from front_harness import Daemon, Front, Wire, make_model, make_settings, running, until
from made_up_card import GIB, MadeUpCard

from tierd.daemon import card_watch
from tierd.daemon.card import Reading
from tierd.daemon.card_watch import CardWatch
from tierd.daemon.machine import Machine

RESERVE = 2 * GIB
STEP = 512 << 20


class Scene:
    """A front, its watch and the card; `look` is one look, `seconds` after the last one."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.now_s = 0.0
        self.card = MadeUpCard(lambda: sum(arena.current_bytes for arena in self.watch._arenas.values()))
        self.watch = CardWatch(self.card, RESERVE, front.supervisor, front.prepare, lambda: self.now_s)

    async def look(self, seconds: float = 2.0) -> dict[str, Any]:
        self.now_s += seconds
        await self.watch.look()
        return self.watch.told()

    def press(self, free_bytes: int) -> None:
        """Another program takes all but so much of what our engines leave."""
        ours = self.card._arenas() + self.card.fixed_bytes
        self.card.others_bytes = self.card.total_bytes - ours - free_bytes

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


async def test_what_a_newcomer_leaves_of_it_is_not_more_than_was_given(tmp_path: Path, machine: Machine) -> None:
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


async def test_a_driver_that_hangs_turns_it_off(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_watch, "READ_S", 0.05)
    async with scene(tmp_path, machine, {"alpha": {}}) as one:
        loop, held = asyncio.get_running_loop(), asyncio.Event()

        def hangs(pids: object) -> Reading | None:
            asyncio.run_coroutine_threadsafe(held.wait(), loop).result(20)
            return None

        one.card.read = hangs  # type: ignore[method-assign]
        await one.look()
        assert "did not answer" in one.watch.off
        held.set()


async def test_processes_that_are_never_listed_turn_it_off(tmp_path: Path, machine: Machine) -> None:
    async with scene(tmp_path, machine, {"alpha": {}}) as one:
        one.card.listed = False
        for _ in range(card_watch.UNLISTED - 1):
            await one.look()
        assert not one.watch.off
        one.card.listed = True
        await one.look()
        one.card.listed = False
        for _ in range(card_watch.UNLISTED):
            assert not one.watch.off
            await one.look()
        assert "container" in one.watch.off


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


def test_a_daemon_that_can_watch_no_card_does_not_start(tmp_path: Path, daemon: Callable[..., Daemon]) -> None:
    refused = daemon(yield_device_mem=RESERVE)
    refused.process.wait(20)
    said = refused.end()
    assert refused.process.returncode == 78 and "the card can't be watched: NVML" in said
