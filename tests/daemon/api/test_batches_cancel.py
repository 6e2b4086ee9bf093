"""Batches that are cancelled: whenever, and whatever the disk does, they come to an end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from batch_rig import Clock, Gate, a_while, asked, begin, broken, lines, runner_of, upload
from front_harness import Front

from tests.waiting import until
from tierd.daemon.api import batches, batches_run
from tierd.daemon.api.batches import ENDED, WINDOW_S, Batch
from tierd.daemon.api.files import Files
from tierd.daemon.batch import Output
from tierd.daemon.errors import Conflict
from tierd.daemon.models import catalog


@pytest.mark.parametrize(
    ("texts", "save"), [(["hi"], 0), (["hi"], 1), (["hi"], 2), (["!hang"], 1), (["!hang"], 2), ([], 0), ([], 1)]
)
async def test_a_cancel_at_any_save_of_a_batch_ends_it(
    front: Front, monkeypatch: pytest.MonkeyPatch, texts: list[str], save: int
) -> None:
    """`save`: the number of the one that is under way. Without texts a batch fails; one that hangs has no third."""
    gate = Gate(batches.Batches.save, save).over(monkeypatch, batches.Batches, "save")
    async with runner_of(front, Clock()) as runner:
        begun = asyncio.create_task(begin(runner, *texts))
        await until(lambda: gate.reached.is_set() or front.service.live)
        if save:
            await begun
        (batch_id,) = runner._tasks or [""]
        cancels = [asyncio.create_task(runner.cancel(batch_id, "")) for _ in range(2 if save else 0)]
        await a_while()
        gate.open.set()
        batch = await begun
        for told in await asyncio.gather(*cancels, return_exceptions=True):
            assert isinstance(told, Batch | Conflict)  # Conflict: it has ended
        if not save:
            await runner.cancel(batch.id, "")
        await until(lambda: batch.status in ENDED and not runner._tasks)
        async with runner.stores() as (files, known):
            assert not known.unfinished() and not files._coming
    assert batches.Batches(front.settings.batches_dir).unfinished() == []


@pytest.mark.parametrize("model", ["alpha", "nobody", "unreadable"])
async def test_a_cancel_that_meets_the_end_of_the_first_look_ends_the_batch(
    front: Front, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    async with runner_of(front, Clock()) as runner:
        looking = Gate(_raises if model == "unreadable" else catalog.find).over(monkeypatch, catalog, "find")
        batch = await begin(runner, "hi", model=model)
        await until(looking.reached.is_set)
        saving = Gate(batches.Batches.save).over(monkeypatch, batches.Batches, "save")
        cancelling = asyncio.create_task(runner.cancel(batch.id, ""))
        await until(saving.reached.is_set)
        looking.open.set()
        await until(lambda: getattr(runner._disk, "_waiters", None))  # it wants to note what it found
        saving.open.set()
        await cancelling
        await until(lambda: batch.status == "cancelled" and not runner._tasks)


async def test_a_cancel_that_cannot_be_written_still_ends_the_batch(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with runner_of(front, Clock()) as runner:
        batch = await begin(runner, "!hang")
        await until(lambda: front.service.live)
        monkeypatch.setattr(batches.Batches, "save", broken(batches.Batches.save, "cancelling"))
        with pytest.raises(OSError):
            await runner.cancel(batch.id, "")
        await until(lambda: batch.status == "cancelled")


async def test_an_end_that_cannot_be_written_can_be_cancelled(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    async with runner_of(front, Clock()) as runner:
        file_id = await upload(runner, "hi")
        with monkeypatch.context() as patch:
            patch.setattr(Files, "add", _raises)
            batch = await runner.create(asked(file_id), "")
            await until(lambda: not runner._tasks)
        assert batch.status not in ENDED
        await runner.cancel(batch.id, "")
        await until(lambda: batch.status == "cancelled")
        assert (await lines(runner, batch.output_file_id)).keys() == {"0"}


def _raises(*_: Any) -> None:
    raise OSError(5, "input/output error")


async def test_a_client_that_leaves_while_its_batch_is_made_leaves_none_behind_that_does_not_run(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with runner_of(front, Clock()) as runner:
        file_id = await upload(runner, "hi")
        gate = Gate(batches.Batches.add).over(monkeypatch, batches.Batches, "add")
        making = asyncio.create_task(runner.create(asked(file_id), ""))
        await until(gate.reached.is_set)
        making.cancel()
        await a_while()
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await making
        async with runner.stores() as (_, known):
            (job,) = known
        await until(lambda: job.batch.status == "completed")


async def test_a_batch_can_be_cancelled_while_it_is_told_what_is_too_late(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    async with runner_of(front, clock) as runner:
        await begin(runner, *["!hang"] * 5)
        await until(lambda: front.service.live)
    clock.now_s += WINDOW_S + 1
    monkeypatch.setattr(batches_run, "EXPIRED_AT_ONCE", 2)
    gate = Gate(Output.write).over(monkeypatch, Output, "write")
    async with runner_of(front, clock) as runner:
        await until(gate.reached.is_set)
        async with runner.stores() as (_, known):
            (job,) = known.unfinished()
        await runner.cancel(job.batch.id, "")
        gate.open.set()
        await until(lambda: job.batch.status == "cancelled")
    assert gate.calls == 1
