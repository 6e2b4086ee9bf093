"""Places of batches: gathered, given back, and no more of them than a tenant's batches may have together."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from batch_rig import Clock, a_while, begin, runner_of
from front_harness import Front, make_settings, running

from tests.waiting import until
from tierd.daemon import batch_run, keys, tenants
from tierd.daemon.api.batches_places import Share
from tierd.daemon.errors import QuotaExceeded
from tierd.daemon.protocol import Submit
from tierd.daemon.tenants import Allowance


async def hold(share: Share, count: int, entered: list[int]) -> None:
    async with share.of(count):
        entered.append(count)
        await asyncio.Event().wait()


async def test_several_places_are_had_together_in_the_order_of_asking() -> None:
    share, entered = Share(4), list[int]()
    tasks = []
    for count in (3, 2, 1, 9):
        tasks.append(asyncio.create_task(hold(share, count, entered)))
        await a_while()
    assert entered == [3]  # a single one could have been had, but not by who asked last
    for ended, now in [(0, [3, 2, 1]), (1, [3, 2, 1]), (2, [3, 2, 1, 9])]:
        tasks[ended].cancel()
        await a_while()
        assert entered == now
    tasks[3].cancel()
    await asyncio.wait(tasks)


async def test_who_is_cancelled_while_it_gathers_gives_back_what_it_has() -> None:
    share, entered = Share(3), list[int]()
    tasks = [asyncio.create_task(hold(share, 2, entered)) for _ in range(2)]
    await a_while()
    tasks[1].cancel()
    await a_while()
    tasks.append(asyncio.create_task(hold(share, 1, entered)))
    await a_while()
    assert entered == [2, 1]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@pytest.mark.parametrize(("allowed", "half"), [(4, 2), (1, 1)])
async def test_all_batches_of_a_key_have_half_of_its_limit_together(front: Front, allowed: int, half: int) -> None:
    key, _ = keys.add(front.settings.keys_file, "one", max_requests=allowed)
    tenant = tenants.of_key(key)
    async with runner_of(front, Clock()) as runner:
        made = [await begin(runner, *["!hang"] * 5, tenant=tenant) for _ in range(2)]
        await until(lambda: front.service.live >= half and all(batch.status == "in_progress" for batch in made))
        await a_while()
        with contextlib.ExitStack() as stack:
            for _ in range(allowed - half):
                stream = front.service.submit(Submit(model="alpha", prompt="hi"), tenant)
                stack.callback(front.service.release, stream)
            with pytest.raises(QuotaExceeded):
                front.service.submit(Submit(model="alpha", prompt="hi"), tenant)
        await begin(runner, "!hang")
        await until(lambda: front.service.live == half + 1)  # others have their own


async def test_a_request_for_several_answers_takes_as_many_places(front: Front) -> None:
    key, _ = keys.add(front.settings.keys_file, "one", max_requests=8)
    tenant = tenants.of_key(key)
    async with runner_of(front, Clock()) as runner:
        batch = await begin(runner, *["!hang"] * 5, tenant=tenant, n=2)
        await until(lambda: batch.status == "in_progress" and front.service.live == 2)
        await a_while()
        front.service.release(front.service.submit(Submit(model="alpha", prompt="hi", n=4), tenant))


async def test_a_request_that_waits_to_be_asked_again_ends_nothing_and_keeps_nobody_out(
    front_of_one: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "BUSY_S", 0.0)  # where another deadline is not given
    service, refused = front_of_one.service, []
    key, _ = keys.add(service.settings.keys_file, "one", max_requests=1)
    tenant = tenants.of_key(key)
    admit = service.tenants.admit

    def watched(name: str, live: int) -> Allowance:
        try:
            return admit(name, live)
        except QuotaExceeded:
            refused.append(name)
            raise

    monkeypatch.setattr(service.tenants, "admit", watched)
    stream = service.submit(Submit(model="alpha", prompt="hi"), tenant)
    async with runner_of(front_of_one, Clock()) as runner:
        waits = await begin(runner, "hi", tenant=tenant)
        await until(lambda: len(refused) == 2)
        other = await begin(runner, "hi")
        await until(lambda: other.status == "completed")
        assert waits.status == "in_progress"
        service.release(stream)
        await until(lambda: waits.status == "completed")
        assert waits.request_counts.completed == 1


@pytest.fixture
async def front_of_one(fake_models, tmp_path):
    async with running(make_settings(tmp_path, max_streams=1)) as front:
        yield front
