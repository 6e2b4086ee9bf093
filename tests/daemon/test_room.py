"""Memory that is shared between engines."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from front_harness import make_model, make_settings, running, set_options, text, until
from hypothesis import given
from hypothesis import strategies as st

from tierd.daemon import prepare, supervisor
from tierd.daemon.child import EngineProcess, EngineState
from tierd.daemon.errors import EngineFailed, OutOfSpace
from tierd.daemon.machine import Machine
from tierd.daemon.room import Arenas, Held, divide, left_of, regrown, total_of
from tierd.daemon.supervisor import Model, NoRoom

GB = 4096 * 250_000
BYTES = st.integers(0, 20 * GB)
HELD = st.dictionaries(
    st.sampled_from("abcde"), st.builds(Held, st.builds(Arenas, BYTES, BYTES), BYTES, BYTES), min_size=1, max_size=4
)


@given(usable=st.integers(0, 100 * GB), held=HELD, fixed=BYTES, least=BYTES)
def test_a_division_stays_under_the_cap_and_takes_nothing_it_does_not_need(usable, held, fixed, least):
    division = divide(usable, held, fixed, least)
    device = sum(one.arenas.device for one in held.values())
    host = sum(one.arenas.host for one in held.values())
    if division is None:
        return
    assert division.newcomer.device >= least
    assert division.newcomer.device + sum(one.device for one in division.others.values()) == device
    assert division.newcomer.host + sum(one.host for one in division.others.values()) == host
    for name, arenas in division.others.items():
        assert arenas.device <= held[name].arenas.device and arenas.host <= held[name].arenas.host
    assert device + host + fixed + sum(one.weights + one.workspace for one in held.values()) <= usable


def test_no_room_where_weights_would_not_fit_or_pages_would_be_too_few():
    held = {"a": Held(Arenas(4 * GB, 2 * GB), 2 * GB, GB)}
    assert divide(10 * GB, held, GB, GB) == ({"a": Arenas(2 * GB, GB)}, Arenas(2 * GB, GB))
    assert divide(10 * GB, held, GB + 1, GB) is None
    assert divide(10 * GB, held, GB, 2 * GB + 1) is None


@given(usable=st.integers(0, 100 * GB), held=HELD, fixed=BYTES, least=BYTES, wish=st.builds(Arenas, BYTES, BYTES))
def test_a_wish_is_met_whole_or_not_at_all(usable, held, fixed, least, wish):
    division = divide(usable, held, fixed, least, wish)
    if division is None:
        return
    assert division.newcomer == wish
    for name, arenas in division.others.items():
        assert arenas.device >= min(least, held[name].arenas.device)
        assert arenas.device <= held[name].arenas.device and arenas.host <= held[name].arenas.host
    taken = [wish, *division.others.values(), *(Arenas(one.weights, one.workspace) for one in held.values())]
    assert sum(map(sum, taken)) + fixed <= usable


def test_a_wish_is_met_by_the_others_and_beyond_their_arenas_by_free_memory():
    held = {"a": Held(Arenas(4 * GB, 2 * GB), GB, 0)}
    assert divide(10 * GB, held, GB, GB, Arenas(3 * GB, 0)) == ({"a": Arenas(GB, 2 * GB)}, Arenas(3 * GB, 0))
    assert divide(10 * GB, held, GB, GB, Arenas(5 * GB, 0)) == ({"a": Arenas(2 * GB, GB)}, Arenas(5 * GB, 0))
    assert divide(9 * GB, held, GB, GB, Arenas(5 * GB, 0)) is None


@given(cap=st.builds(Arenas, BYTES, BYTES), held=HELD)
def test_who_stays_grows_up_to_the_cap(cap, held):
    grown = regrown(cap, held)
    before = left_of(cap, {name: one.arenas for name, one in held.items()})
    for name, arenas in grown.items():
        assert arenas.device >= held[name].arenas.device and arenas.host >= held[name].arenas.host
    added = sum(grown[name].device - held[name].arenas.device for name in held)
    assert added <= before.device
    if len(held) == 1:
        (arenas,) = grown.values()
        assert arenas.device == max(cap.device, held[next(iter(held))].arenas.device)


@pytest.fixture
def machine() -> Machine:
    """16 GB: device 4, host 2.4, and 8 for weights."""
    return Machine(16 * GB, 16 * GB, 100 * GB)


async def _arenas(front, name):
    """What an engine of the front was given last: at its start, or by a resize."""
    held = front.prepare._held[name]
    return held.arenas


@contextlib.asynccontextmanager
async def _front(tmp_path, machine, **changes):
    async with running(make_settings(tmp_path, **changes), max_loaded=0, machine=machine) as front:
        yield front


async def test_two_models_that_fit_stay_loaded_and_share_the_arenas(fake_models, tmp_path, machine):
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        alone = await _arenas(front, "alpha")
        assert alone.device == 4 * GB
        await front.service.load("beta")
        assert set(front.supervisor.engines) == {"alpha", "beta"}
        assert await _arenas(front, "alpha") == Arenas(alone.device // 2, alone.host // 2)
        both = [await _arenas(front, name) for name in ("alpha", "beta")]
        assert sum(one.device for one in both) == alone.device and sum(one.host for one in both) == alone.host
        await front.service.unload("beta")
        await until(lambda: front.prepare._held["alpha"].arenas == alone)


async def test_a_model_that_does_not_fit_beside_takes_the_place_of_the_least_recently_used(tmp_path, machine):
    for name in ("alpha", "beta", "gamma"):
        make_model(tmp_path / "models", name, weights_bytes=3 * GB)
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        await front.service.load("beta")
        await front.service.load("gamma")
        assert set(front.supervisor.engines) == {"beta", "gamma"}
        assert not front.metrics.engine_deaths


async def test_a_busy_engine_is_waited_for(tmp_path, machine):
    for name in ("alpha", "beta"):
        make_model(tmp_path / "models", name, weights_bytes=6 * GB, token_s=0.02)
    async with _front(tmp_path, machine) as front:
        first, second = await front.connect(), await front.connect()
        first.generate(1, "x", model="alpha", max_tokens=30)
        await until(lambda: "alpha" in front.supervisor.engines and front.engine().streams)
        second.generate(1, "y", model="beta", max_tokens=2)
        assert (await first.until_end(1))[-1].ev == "done"
        assert (await second.until_end(1))[-1].ev == "done"
        assert set(front.supervisor.engines) == {"beta"}


async def test_an_engine_whose_requests_need_its_memory_keeps_it(fake_models, tmp_path, machine):
    set_options(fake_models / "alpha", refuse_resize=True)
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        alone = await _arenas(front, "alpha")
        wire = await front.connect()
        wire.generate(1, "x", model="beta", max_tokens=2)
        assert text(await wire.until_end(1))
        assert set(front.supervisor.engines) == {"beta"} and await _arenas(front, "beta") == alone


async def test_one_that_ends_while_a_newcomer_is_prepared_is_waited_for(fake_models, tmp_path, machine):
    engines: dict[str, EngineProcess] = {}

    def probe() -> Machine:
        engines.pop("alpha", None)  # the machine is looked at in a thread: the front goes on
        return machine

    async with _front(tmp_path, probe) as front:
        await front.service.load("alpha")
        engines.update(front.supervisor.engines)
        with pytest.raises(NoRoom):
            await front.prepare(Model("beta", fake_models / "beta"), engines)


async def test_pinned_models_stay(tmp_path, machine):
    for name in ("alpha", "beta"):
        make_model(tmp_path / "models", name, weights_bytes=6 * GB)
    async with _front(tmp_path, machine, pinned_models=("alpha",), keep_alive_s=0.0) as front:
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
    async with _front(tmp_path, lambda: machine._replace(available_ram=free[0]), pinned_models=("alpha",)) as front:
        await front.service.load("alpha")
        alone = await _arenas(front, "alpha")
        free[0] = GB
        with pytest.raises(OutOfSpace):
            await front.service.load("beta")
        assert await _arenas(front, "alpha") == alone, "it had made room for nothing"
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
    async with _front(tmp_path, machine, pinned_models=("alpha", "beta")) as front:
        await front.service.load("beta")
        await front.service.load("alpha")
        set_options(fake_models / "beta", refuse_resize=True)
        front.engine("beta").kill()
        await until(lambda: "beta" not in front.supervisor.engines)
        await front.service.load("beta")
        both = [await _arenas(front, name) for name in ("alpha", "beta")]
        monkeypatch.setattr(prepare, "LEAST_ARENA_BYTES", GB)
        with pytest.raises(OutOfSpace, match="gamma does not fit"):
            await front.service.load("gamma")
        assert [await _arenas(front, name) for name in ("alpha", "beta")] == both


async def test_what_the_others_give_up_counts_as_free(fake_models, tmp_path, machine):
    """The arenas of the first one are full, and hardly anything else is free."""
    fronts = []

    def probe():
        held = fronts[0].prepare._held
        return machine._replace(available_ram=8 * GB - sum(held["alpha"].arenas)) if held else machine

    async with _front(tmp_path, probe) as front:
        fronts.append(front)
        await front.service.load("alpha")
        assert probe().available_ram < (await _arenas(front, "alpha")).device // 2
        await front.service.load("beta")
        assert set(front.supervisor.engines) == {"alpha", "beta"}


async def test_a_resize_waits_until_a_newcomer_has_its_part(fake_models, tmp_path, machine):
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        async with front.prepare._one_at_a_time:
            resizing = asyncio.create_task(front.service.resize("alpha", {"device_bytes": GB}))
            await asyncio.sleep(0)
            assert not front.engine().resizes
        await resizing
        await asyncio.gather(front.service.load("beta"), front.service.resize("alpha", {"device_bytes": GB // 2}))
        assert total_of(held.arenas for held in front.prepare._held.values()) == front.prepare._cap


async def test_what_resize_gave_counts(fake_models, tmp_path, machine):
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        await front.service.resize("alpha", {"device_bytes": 2 * GB, "host_bytes": 0})
        await front.service.load("beta")
        assert await _arenas(front, "beta") == Arenas(GB, 0)


async def test_what_resize_gave_lasts_as_long_as_the_daemon(fake_models, tmp_path, machine):
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        await front.service.resize("alpha", {"device_bytes": 2 * GB})
        host = (await _arenas(front, "alpha")).host
        front.engine().kill()
        await until(lambda: not front.supervisor.engines)
        await front.service.load("alpha")
        assert await _arenas(front, "alpha") == Arenas(2 * GB, host)


@pytest.mark.parametrize("device", [3 * GB, 6 * GB])
async def test_what_resize_gave_is_there_again_beside_another_model(fake_models, tmp_path, machine, device):
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        await front.service.load("beta")
        await front.service.resize("alpha", {"device_bytes": device})
        before = [await _arenas(front, name) for name in ("alpha", "beta")]
        await front.service.unload("alpha")
        await until(lambda: front.prepare._held["beta"].arenas != before[1])
        await front.service.load("alpha")
        assert [await _arenas(front, name) for name in ("alpha", "beta")] == before
        assert not front.engine().notices


async def test_less_than_resize_gave_is_told(tmp_path, machine):
    make_model(tmp_path / "models", "alpha")
    make_model(tmp_path / "models", "beta", weights_bytes=6 * GB)
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        await front.service.resize("alpha", {"device_bytes": 9 * GB})
        await front.service.unload("alpha")
        await front.service.load("beta")
        await front.service.load("alpha")
        (notice,) = front.engine().notices
        assert "GB of device memory instead of the 9.2 GB that `tierd resize` gave it" in notice


async def test_auto_is_what_the_daemon_would_choose(fake_models, tmp_path, machine):
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        alone = await _arenas(front, "alpha")
        await front.service.resize("alpha", {"device_bytes": GB, "host_bytes": 0})
        await front.service.resize("alpha", {"device_bytes": "auto", "host_bytes": "auto"})
        assert await _arenas(front, "alpha") == alone
        await front.service.load("beta")
        await front.service.resize("alpha", {"device_bytes": GB})
        assert (await front.service.resize("alpha", {"device_bytes": "auto"}))["device_bytes"] == alone.device // 2


async def test_a_resize_that_does_not_fit_says_what_does(tmp_path, machine):
    for name in ("alpha", "beta"):
        make_model(tmp_path / "models", name, weights_bytes=2 * GB)
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        await front.service.load("beta")
        refused = r"^966 GB of device memory do not fit: .* leave 6\.\d GB of 14.7 GB"
        with pytest.raises(OutOfSpace, match=refused) as caught:
            await front.service.resize("alpha", {"device_bytes": 900 << 30})
        hint = str(caught.value.hint)
        most = int(hint.split("--device-mem ")[1].split("MB")[0]) * 10**6
        await front.service.resize("alpha", {"device_bytes": most})


async def test_weights_that_were_given_up_are_there_for_pages_and_for_another_model(tmp_path, machine):
    make_model(tmp_path / "models", "alpha", weights_bytes=8 * GB)
    make_model(tmp_path / "models", "beta", weights_bytes=2 * GB)
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        with pytest.raises(OutOfSpace, match="weights, workspace and other models leave"):
            await front.service.resize("alpha", {"device_bytes": 7 * GB})
        await front.service.resize("alpha", {"weights_bytes": 2 * GB})
        await front.service.resize("alpha", {"device_bytes": 7 * GB})
        await front.service.load("beta")
        assert set(front.supervisor.engines) == {"alpha", "beta"}
        with pytest.raises(OutOfSpace, match=r"of weights memory do not fit: pages, .* of 14.7 GB") as caught:
            await front.service.resize("alpha", {"weights_bytes": 5 * GB})
        most = int(str(caught.value.hint).split("--weights-mem ")[1].split("MB")[0]) * 10**6
        await front.service.resize("alpha", {"weights_bytes": most})


@pytest.mark.parametrize("has", [GB, 2 * GB, 5 * GB])
async def test_after_a_refusal_the_weights_count_that_the_engine_has(tmp_path, machine, has):
    path = make_model(tmp_path / "models", "alpha", weights_bytes=8 * GB)
    set_options(path, refuse_resize=True, status={"weights": {"memory_bytes": has}})
    async with _front(tmp_path, machine, weights_mem=2 * GB) as front:
        await front.service.load("alpha")
        before = front.prepare._held["alpha"]
        with pytest.raises(OutOfSpace, match="running requests need it"):
            await front.service.resize("alpha", {"weights_bytes": 6 * GB, "device_bytes": GB})
        assert front.prepare._held["alpha"] == before._replace(weights=has)


async def test_a_refusal_by_an_engine_that_says_nothing_changes_nothing(tmp_path, machine):
    path = make_model(tmp_path / "models", "alpha", weights_bytes=8 * GB)
    set_options(path, refuse_resize=True)
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        before = front.prepare._held["alpha"]
        with pytest.raises(OutOfSpace, match="running requests need it"):
            await front.service.resize("alpha", {"weights_bytes": 6 * GB})
        assert front.prepare._held["alpha"] == before


class Slow:
    """An engine of alpha that does what it is asked when it may."""

    model = "alpha"

    def __init__(self):
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def call(self, op, args, timeout_s):
        self.asked.set()
        await self.may_answer.wait()
        return dict(args)


async def test_a_resize_is_booked_although_its_client_has_gone(fake_models, tmp_path, machine):
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        prepare, slow, size = front.prepare, Slow(), {"device_bytes": GB}
        resizing = asyncio.create_task(prepare.resize(slow, size, 10.0))
        await slow.asked.wait()
        resizing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resizing
        assert prepare._one_at_a_time.locked(), "others would count with what it had before"
        slow.may_answer.set()
        await until(lambda: not prepare._one_at_a_time.locked())
        assert (prepare._held["alpha"].arenas.device, prepare._cap.device) == (GB, GB)
        assert prepare._resized == {"alpha": size}


async def test_who_goes_away_before_a_resize_begins_has_changed_nothing(fake_models, tmp_path, machine):
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        prepare, slow = front.prepare, Slow()
        async with prepare._one_at_a_time:
            resizing = asyncio.create_task(prepare.resize(slow, {"device_bytes": GB}, 10.0))
            await asyncio.sleep(0)
            resizing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await resizing
        await front.service.resize("alpha", {"host_bytes": 0})
        assert not slow.asked.is_set() and prepare._held["alpha"].arenas.device == 4 * GB


async def test_an_engine_that_has_ended_is_not_resized(fake_models, tmp_path, machine):
    async with _front(tmp_path, machine) as front:
        with pytest.raises(EngineFailed, match="alpha has ended"):
            await front.prepare.resize(Slow(), {"weights_bytes": "auto"}, 10.0)


async def test_nothing_is_kept_of_a_model_that_found_no_room_nor_of_one_that_ended(tmp_path, machine):
    for name in ("alpha", "beta"):
        make_model(tmp_path / "models", name, weights_bytes=6 * GB)
    async with _front(tmp_path, machine, pinned_models=("alpha",)) as front:
        await front.service.load("alpha")
        with pytest.raises(OutOfSpace, match="beta does not fit beside alpha"):
            await front.service.load("beta")
        assert front.prepare._needs.keys() == front.prepare._held.keys() == {"alpha"}
        await front.service.unload("alpha")
        await until(lambda: not front.prepare._held)
        assert not front.prepare._needs


@pytest.mark.parametrize("free, weights", [(16 * GB, 5 * GB), (9 * GB // 2, 2 * GB)])
async def test_weights_that_resize_gave_beyond_the_setting_come_back_where_there_is_room(
    tmp_path, machine, free, weights
):
    make_model(tmp_path / "models", "alpha", weights_bytes=6 * GB)
    make_model(tmp_path / "models", "beta")
    now = [machine]
    async with _front(tmp_path, lambda: now[0], weights_mem=2 * GB, host_mem=0) as front:
        await front.service.load("beta")
        await front.service.load("alpha")
        await front.service.resize("alpha", {"weights_bytes": 5 * GB})
        await front.service.unload("alpha")
        await until(lambda: front.prepare._held["beta"].arenas.device == 4 * GB)
        now[0] = machine._replace(available_ram=free)
        await front.service.load("alpha")
        assert set(front.supervisor.engines) == {"alpha", "beta"}
        assert front.prepare._held["alpha"].weights == weights
        assert ["no room for more" in text for text in front.engine("alpha").notices] == [True] * (weights < 5 * GB)


async def test_the_workspace_counts_beside_weights_that_are_resized(tmp_path, machine):
    make_model(tmp_path / "models", "alpha", weights_bytes=8 * GB)
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        usable = 16 * GB - 16 * GB // 10
        whole = {"device_bytes": usable - 2 * GB, "host_bytes": 0, "weights_bytes": 2 * GB}
        with pytest.raises(OutOfSpace, match="of device memory do not fit") as caught:
            await front.service.resize("alpha", whole)
        given = dict(zip(*[iter(str(caught.value.hint).split("`")[1].split()[3:])] * 2, strict=True))
        most = {f"{flag[2:-4]}_bytes": int(size.removesuffix("MB")) * 10**6 for flag, size in given.items()}
        assert most.keys() == whole.keys() and most["weights_bytes"] == 2 * GB
        await front.service.resize("alpha", most)
        await front.service.resize("alpha", {"weights_bytes": "auto", "device_bytes": "auto", "host_bytes": "auto"})


async def test_a_model_larger_than_the_memory_gets_back_what_it_had_unasked(tmp_path, machine):
    make_model(tmp_path / "models", "alpha", weights_bytes=40 * GB)
    async with _front(tmp_path, machine) as front:
        await front.service.load("alpha")
        before = front.prepare._held["alpha"]
        for size in ("device_bytes", "weights_bytes"):
            await front.service.resize("alpha", {size: GB})
            await front.service.resize("alpha", {size: "auto"})
        assert front.prepare._held["alpha"] == before


async def test_what_resize_gave_has_to_fit_beside_the_weights_when_it_comes_back(tmp_path, machine):
    make_model(tmp_path / "models", "alpha", weights_bytes=6 * GB)
    free = [machine.available_ram]
    async with _front(tmp_path, lambda: machine._replace(available_ram=free[0])) as front:
        await front.service.load("alpha")
        await front.service.resize("alpha", {"device_bytes": 7 * GB, "host_bytes": 0})
        for free[0], device in ((machine.available_ram, 7 * GB), (12 * GB, 3 * GB)):
            await front.service.unload("alpha")
            await front.service.load("alpha")
            assert (await _arenas(front, "alpha")).device == device
        assert front.engine().notices
