"""Engines that share memory: who comes, who makes room, who has to go."""

from __future__ import annotations

import time

import pytest
from front_harness import make_model, set_options, text, until
from memory_rig import GB, arenas_of, roomy_front

from tierd.daemon import books, supervisor
from tierd.daemon.child import EngineProcess, EngineState
from tierd.daemon.errors import OutOfSpace
from tierd.daemon.machine import Machine
from tierd.daemon.room import Arenas
from tierd.daemon.supervisor import Model, NoRoom


async def test_two_models_that_fit_stay_loaded_and_share_the_arenas(fake_models, tmp_path, machine):
    async with roomy_front(tmp_path, machine) as front:
        await front.service.load("alpha")
        alone = arenas_of(front, "alpha")
        assert alone.device == 4 * GB
        await front.service.load("beta")
        assert set(front.supervisor.engines) == {"alpha", "beta"}
        assert arenas_of(front, "alpha") == Arenas(alone.device // 2, alone.host // 2)
        both = [arenas_of(front, name) for name in ("alpha", "beta")]
        assert sum(one.device for one in both) == alone.device and sum(one.host for one in both) == alone.host
        await front.service.unload("beta")
        await until(lambda: front.prepare.books.held["alpha"].arenas == alone)


async def test_a_model_that_does_not_fit_beside_takes_the_place_of_the_least_recently_used(tmp_path, machine):
    for name in ("alpha", "beta", "gamma"):
        make_model(tmp_path / "models", name, weights_bytes=3 * GB)
    async with roomy_front(tmp_path, machine) as front:
        await front.service.load("alpha")
        await front.service.load("beta")
        await front.service.load("gamma")
        assert set(front.supervisor.engines) == {"beta", "gamma"}
        assert not front.metrics.engine_deaths


async def test_several_that_need_the_room_of_another_are_all_served(tmp_path, machine, monkeypatch):
    names = ("alpha", "beta", "gamma", "delta")
    for name in names:
        make_model(tmp_path / "models", name, weights_bytes=6 * GB)
    launched: list[str] = []
    launch = supervisor.Supervisor._launch

    def counted(self: supervisor.Supervisor, model: Model) -> None:
        launched.append(model.name)
        launch(self, model)

    def probe() -> Machine:
        time.sleep(0.05)  # a look at the machine takes a while: others are tried meanwhile
        return machine

    monkeypatch.setattr(supervisor.Supervisor, "_launch", counted)
    async with roomy_front(tmp_path, probe) as front:
        await front.service.load("alpha")
        wires = [await front.connect() for _ in names[1:]]
        for wire, name in zip(wires, names[1:], strict=True):
            wire.generate(1, "x", model=name, max_tokens=2)
        for wire in wires:
            assert text(await wire.until_end(1))
    assert set(launched) == set(names) and len(launched) < 40


async def test_a_busy_engine_is_waited_for(tmp_path, machine):
    for name in ("alpha", "beta"):
        make_model(tmp_path / "models", name, weights_bytes=6 * GB, token_s=0.02)
    async with roomy_front(tmp_path, machine) as front:
        first, second = await front.connect(), await front.connect()
        first.generate(1, "x", model="alpha", max_tokens=30)
        await until(lambda: "alpha" in front.supervisor.engines and front.engine().streams)
        second.generate(1, "y", model="beta", max_tokens=2)
        assert (await first.until_end(1))[-1].ev == "done"
        assert (await second.until_end(1))[-1].ev == "done"
        assert set(front.supervisor.engines) == {"beta"}


async def test_an_engine_whose_requests_need_its_memory_keeps_it(fake_models, tmp_path, machine):
    set_options(fake_models / "alpha", refuse_resize=True)
    async with roomy_front(tmp_path, machine) as front:
        await front.service.load("alpha")
        alone = arenas_of(front, "alpha")
        wire = await front.connect()
        wire.generate(1, "x", model="beta", max_tokens=2)
        assert text(await wire.until_end(1))
        assert set(front.supervisor.engines) == {"beta"} and arenas_of(front, "beta") == alone


async def test_one_that_ends_while_a_newcomer_is_prepared_is_waited_for(fake_models, tmp_path, machine):
    engines: dict[str, EngineProcess] = {}

    def probe() -> Machine:
        engines.pop("alpha", None)  # the machine is looked at in a thread: the front goes on
        return machine

    async with roomy_front(tmp_path, probe) as front:
        await front.service.load("alpha")
        engines.update(front.supervisor.engines)
        with pytest.raises(NoRoom):
            await front.prepare(Model("beta", fake_models / "beta"), engines)


async def test_pinned_models_stay(tmp_path, machine):
    for name in ("alpha", "beta"):
        make_model(tmp_path / "models", name, weights_bytes=6 * GB)
    async with roomy_front(tmp_path, machine, pinned_models=("alpha",), keep_alive_s=0.0) as front:
        await front.service.load("alpha")
        assert front.supervisor.expires_in_s(front.engine()) is None
        with pytest.raises(OutOfSpace, match="beta does not fit beside alpha") as caught:
            await front.service.load("beta")
        assert "pinned_models" in str(caught.value.hint)
        assert front.engine().state is EngineState.READY
        await front.service.unload("alpha")
        await front.service.load("beta")


async def test_memory_that_lacks_for_a_moment_is_looked_for_again(fake_models, tmp_path, machine, monkeypatch):
    free = [machine.available_ram]

    def probe() -> Machine:
        return machine._replace(available_ram=free[0])

    async with roomy_front(tmp_path, probe, pinned_models=("alpha",)) as front:
        await front.service.load("alpha")
        alone = arenas_of(front, "alpha")
        free[0] = GB
        with pytest.raises(OutOfSpace):
            await front.service.load("beta")
        assert arenas_of(front, "alpha") == alone, "it had made room for nothing"
        await front.service.resize("alpha", {"device_bytes": GB, "host_bytes": 0})
        await front.service.load("beta")
        await front.service.unload("beta")
        await front.service.resize("alpha", {"device_bytes": alone.device, "host_bytes": alone.host})
        monkeypatch.setattr(supervisor, "CROWDED_S", 0.2)
        with pytest.raises(OutOfSpace):
            await front.service.load("beta")
        free[0] = machine.available_ram
        await until(lambda: front.supervisor._crowded["beta"][1] < time.monotonic())
        await front.service.load("beta")


async def test_who_shrank_for_nothing_grows_again(fake_models, tmp_path, machine, monkeypatch):
    make_model(tmp_path / "models", "gamma")
    async with roomy_front(tmp_path, machine, pinned_models=("alpha", "beta")) as front:
        await front.service.load("beta")
        await front.service.load("alpha")
        set_options(fake_models / "beta", refuse_resize=True)
        front.engine("beta").kill()
        await until(lambda: "beta" not in front.supervisor.engines)
        await front.service.load("beta")
        both = [arenas_of(front, name) for name in ("alpha", "beta")]
        monkeypatch.setattr(books, "LEAST_ARENA_BYTES", GB)
        with pytest.raises(OutOfSpace, match="gamma does not fit"):
            await front.service.load("gamma")
        assert [arenas_of(front, name) for name in ("alpha", "beta")] == both


async def test_what_the_others_give_up_counts_as_free(fake_models, tmp_path, machine):
    """The arenas of the first one are full, and hardly anything else is free."""
    fronts = []

    def probe():
        held = fronts[0].prepare.books.held
        return machine._replace(available_ram=8 * GB - sum(held["alpha"].arenas)) if held else machine

    async with roomy_front(tmp_path, probe) as front:
        fronts.append(front)
        await front.service.load("alpha")
        assert probe().available_ram < arenas_of(front, "alpha").device // 2
        await front.service.load("beta")
        assert set(front.supervisor.engines) == {"alpha", "beta"}
