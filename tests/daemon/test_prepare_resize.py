"""Memory of engines that somebody resizes: what fits, what is booked, what comes back."""

from __future__ import annotations

import asyncio

import pytest
from front_harness import make_model, set_options, until
from memory_rig import GB, arenas_of, roomy_front

from tierd.daemon.errors import EngineFailed, OutOfSpace
from tierd.daemon.room import Arenas, total_of


async def test_a_resize_waits_until_a_newcomer_has_its_part(fake_models, tmp_path, machine):
    async with roomy_front(tmp_path, machine) as front:
        await front.service.load("alpha")
        async with front.prepare._one_at_a_time:
            resizing = asyncio.create_task(front.service.resize("alpha", {"device_bytes": GB}))
            await asyncio.sleep(0)
            assert not front.engine().resizes
        await resizing
        await asyncio.gather(front.service.load("beta"), front.service.resize("alpha", {"device_bytes": GB // 2}))
        assert total_of(held.arenas for held in front.prepare.books.held.values()) == front.prepare.books.cap


async def test_what_resize_gave_counts(fake_models, tmp_path, machine):
    async with roomy_front(tmp_path, machine) as front:
        await front.service.load("alpha")
        await front.service.resize("alpha", {"device_bytes": 2 * GB, "host_bytes": 0})
        await front.service.load("beta")
        assert arenas_of(front, "beta") == Arenas(GB, 0)


async def test_what_resize_gave_lasts_as_long_as_the_daemon(fake_models, tmp_path, machine):
    async with roomy_front(tmp_path, machine) as front:
        await front.service.load("alpha")
        await front.service.resize("alpha", {"device_bytes": 2 * GB})
        host = arenas_of(front, "alpha").host
        front.engine().kill()
        await until(lambda: not front.supervisor.engines)
        await front.service.load("alpha")
        assert arenas_of(front, "alpha") == Arenas(2 * GB, host)


@pytest.mark.parametrize("device", [3 * GB, 6 * GB])
async def test_what_resize_gave_is_there_again_beside_another_model(fake_models, tmp_path, machine, device):
    async with roomy_front(tmp_path, machine) as front:
        await front.service.load("alpha")
        await front.service.load("beta")
        await front.service.resize("alpha", {"device_bytes": device})
        before = [arenas_of(front, name) for name in ("alpha", "beta")]
        await front.service.unload("alpha")
        await until(lambda: front.prepare.books.held["beta"].arenas != before[1])
        await front.service.load("alpha")
        assert [arenas_of(front, name) for name in ("alpha", "beta")] == before
        assert not front.engine().notices


async def test_less_than_resize_gave_is_told(tmp_path, machine):
    make_model(tmp_path / "models", "alpha")
    make_model(tmp_path / "models", "beta", weights_bytes=6 * GB)
    async with roomy_front(tmp_path, machine) as front:
        await front.service.load("alpha")
        await front.service.resize("alpha", {"device_bytes": 9 * GB})
        await front.service.unload("alpha")
        await front.service.load("beta")
        await front.service.load("alpha")
        (notice,) = front.engine().notices
        assert "GB of device memory instead of the 9.2 GB that `tierd resize` gave it" in notice


async def test_auto_is_what_the_daemon_would_choose(fake_models, tmp_path, machine):
    async with roomy_front(tmp_path, machine) as front:
        await front.service.load("alpha")
        alone = arenas_of(front, "alpha")
        await front.service.resize("alpha", {"device_bytes": GB, "host_bytes": 0})
        await front.service.resize("alpha", {"device_bytes": "auto", "host_bytes": "auto"})
        assert arenas_of(front, "alpha") == alone
        await front.service.load("beta")
        await front.service.resize("alpha", {"device_bytes": GB})
        assert (await front.service.resize("alpha", {"device_bytes": "auto"}))["device_bytes"] == alone.device // 2


async def test_a_resize_that_does_not_fit_says_what_does(tmp_path, machine):
    for name in ("alpha", "beta"):
        make_model(tmp_path / "models", name, weights_bytes=2 * GB)
    async with roomy_front(tmp_path, machine) as front:
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
    async with roomy_front(tmp_path, machine) as front:
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
    async with roomy_front(tmp_path, machine, weights_mem=2 * GB) as front:
        await front.service.load("alpha")
        before = front.prepare.books.held["alpha"]
        with pytest.raises(OutOfSpace, match="running requests need it"):
            await front.service.resize("alpha", {"weights_bytes": 6 * GB, "device_bytes": GB})
        assert front.prepare.books.held["alpha"] == before._replace(weights=has)


async def test_a_refusal_by_an_engine_that_says_nothing_changes_nothing(tmp_path, machine):
    path = make_model(tmp_path / "models", "alpha", weights_bytes=8 * GB)
    set_options(path, refuse_resize=True)
    async with roomy_front(tmp_path, machine) as front:
        await front.service.load("alpha")
        before = front.prepare.books.held["alpha"]
        with pytest.raises(OutOfSpace, match="running requests need it"):
            await front.service.resize("alpha", {"weights_bytes": 6 * GB})
        assert front.prepare.books.held["alpha"] == before


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
    async with roomy_front(tmp_path, machine) as front:
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
        assert (prepare.books.held["alpha"].arenas.device, prepare.books.cap.device) == (GB, GB)
        assert prepare._resized == {"alpha": size}


async def test_who_goes_away_before_a_resize_begins_has_changed_nothing(fake_models, tmp_path, machine):
    async with roomy_front(tmp_path, machine) as front:
        await front.service.load("alpha")
        prepare, slow = front.prepare, Slow()
        async with prepare._one_at_a_time:
            resizing = asyncio.create_task(prepare.resize(slow, {"device_bytes": GB}, 10.0))
            await asyncio.sleep(0)
            resizing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await resizing
        await front.service.resize("alpha", {"host_bytes": 0})
        assert not slow.asked.is_set() and prepare.books.held["alpha"].arenas.device == 4 * GB


async def test_an_engine_that_has_ended_is_not_resized(fake_models, tmp_path, machine):
    async with roomy_front(tmp_path, machine) as front:
        with pytest.raises(EngineFailed, match="alpha has ended"):
            await front.prepare.resize(Slow(), {"weights_bytes": "auto"}, 10.0)


async def test_nothing_is_kept_of_a_model_that_found_no_room_nor_of_one_that_ended(tmp_path, machine):
    for name in ("alpha", "beta"):
        make_model(tmp_path / "models", name, weights_bytes=6 * GB)
    async with roomy_front(tmp_path, machine, pinned_models=("alpha",)) as front:
        await front.service.load("alpha")
        with pytest.raises(OutOfSpace, match="beta does not fit beside alpha"):
            await front.service.load("beta")
        assert front.prepare.books.needs.keys() == front.prepare.books.held.keys() == {"alpha"}
        await front.service.unload("alpha")
        await until(lambda: not front.prepare.books.held)
        assert not front.prepare.books.needs


@pytest.mark.parametrize("free, weights", [(16 * GB, 5 * GB), (9 * GB // 2, 2 * GB)])
async def test_weights_that_resize_gave_beyond_the_setting_come_back_where_there_is_room(
    tmp_path, machine, free, weights
):
    make_model(tmp_path / "models", "alpha", weights_bytes=6 * GB)
    make_model(tmp_path / "models", "beta")
    now = [machine]
    async with roomy_front(tmp_path, lambda: now[0], weights_mem=2 * GB, host_mem=0) as front:
        await front.service.load("beta")
        await front.service.load("alpha")
        await front.service.resize("alpha", {"weights_bytes": 5 * GB})
        await front.service.unload("alpha")
        await until(lambda: front.prepare.books.held["beta"].arenas.device == 4 * GB)
        now[0] = machine._replace(available_ram=free)
        await front.service.load("alpha")
        assert set(front.supervisor.engines) == {"alpha", "beta"}
        assert front.prepare.books.held["alpha"].weights == weights
        assert ["no room for more" in text for text in front.engine("alpha").notices] == [True] * (weights < 5 * GB)


async def test_the_workspace_counts_beside_weights_that_are_resized(tmp_path, machine):
    make_model(tmp_path / "models", "alpha", weights_bytes=8 * GB)
    async with roomy_front(tmp_path, machine) as front:
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
    async with roomy_front(tmp_path, machine) as front:
        await front.service.load("alpha")
        before = front.prepare.books.held["alpha"]
        for size in ("device_bytes", "weights_bytes"):
            await front.service.resize("alpha", {size: GB})
            await front.service.resize("alpha", {size: "auto"})
        assert front.prepare.books.held["alpha"] == before


async def test_what_resize_gave_has_to_fit_beside_the_weights_when_it_comes_back(tmp_path, machine):
    make_model(tmp_path / "models", "alpha", weights_bytes=6 * GB)
    free = [machine.available_ram]
    async with roomy_front(tmp_path, lambda: machine._replace(available_ram=free[0])) as front:
        await front.service.load("alpha")
        await front.service.resize("alpha", {"device_bytes": 7 * GB, "host_bytes": 0})
        for free[0], device in ((machine.available_ram, 7 * GB), (12 * GB, 3 * GB)):
            await front.service.unload("alpha")
            await front.service.load("alpha")
            assert arenas_of(front, "alpha").device == device
        assert front.engine().notices
