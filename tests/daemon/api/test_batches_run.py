"""Batches inside of a daemon: time that is over, keys that are gone, restarts, a second daemon."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from batch_rig import Clock, Gate, a_while, asked, begin, broken, lines, runner_of, upload
from front_harness import Front, make_settings, running

from tests.waiting import until
from tierd.daemon import keys, tenants
from tierd.daemon.api import batches, batches_run
from tierd.daemon.api.batches import ENDED, WINDOW_S
from tierd.daemon.batch import Output, Requests
from tierd.daemon.errors import BadRequest, Conflict, Draining, NotFound, OutOfSpace


async def test_what_is_not_answered_in_time_is_told_so(front: Front) -> None:
    clock = Clock()
    async with runner_of(front, clock) as runner:
        batch = await begin(runner, "hi", "!hang")
        await until(lambda: batch.request_counts.completed == 1)
    clock.now_s += WINDOW_S + 1
    async with runner_of(front, clock) as runner:  # the first was ended as by a stop of the daemon
        async with runner.stores() as (_, known):
            (job,) = known.unfinished()
        await until(lambda: job.batch.status in ENDED)
        batch = job.batch
        assert batch.status == "expired" and batch.expired_at == int(clock.now_s)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
        assert (await lines(runner, batch.output_file_id)).keys() == {"0"}
        (line,) = (await lines(runner, batch.error_file_id)).values()
        assert line["error"]["code"] == "batch_expired" and line["response"] is None


async def test_a_stop_leaves_a_batch_for_the_next_start(front: Front) -> None:
    clock = Clock()
    async with runner_of(front, clock) as runner:
        batch = await begin(runner, "hi", "!still")
        await until(lambda: batch.request_counts.completed == 1)
    assert batch.status == "in_progress" and front.service.live == 0
    async with runner_of(front, clock) as runner:
        async with runner.stores() as (_, known):
            (job,) = known.unfinished()
        await until(lambda: job.batch.status in ENDED)
        assert job.batch.status == "completed" and job.batch.request_counts.completed == 2


async def test_a_cancel_that_the_daemon_did_not_live_to_finish(front: Front) -> None:
    async with runner_of(front, Clock()) as runner:
        batch = await begin(runner, "!hang")
        await until(lambda: front.service.live)
        async with runner.stores() as (_, known):
            job = known.get(batch.id, "")
            job.batch.status = "cancelling"
            known.save(job)
            job.batch.status = "in_progress"
    async with runner_of(front, Clock()) as runner:
        async with runner.stores() as (_, known):
            job = known.get(batch.id, "")
        await until(lambda: job.batch.status in ENDED)
        assert job.batch.status == "cancelled" and job.batch.output_file_id is None


async def test_the_batch_of_a_key_ends_with_the_key(front: Front) -> None:
    key, _ = keys.add(front.settings.keys_file, "one", max_requests=2)
    tenant = tenants.of_key(key)
    async with runner_of(front, Clock()) as runner:
        batch = await begin(runner, "hi", "!still", "ho", tenant=tenant)
        await until(lambda: batch.request_counts.completed == 1 and front.service.live)
        assert front.service.live == 1  # half of what the key may have
        with pytest.raises(NotFound):
            await runner.cancel(batch.id, "")
        keys.remove(front.settings.keys_file, "one")
        (stream,) = front.service._places
        stream.cancel()
        await until(lambda: batch.status in ENDED)
        assert batch.status == "failed" and batch.errors is not None and batch.errors.data[0].code == "unauthorized"
        assert batch.output_file_id and batch.error_file_id  # what was done is not lost


async def test_files_that_are_not_theirs_or_not_input(front: Front) -> None:
    async with runner_of(front, Clock()) as runner:
        file_id = await upload(runner, "hi", tenant="key:a")
        with pytest.raises(NotFound):
            await runner.create(asked(file_id), "")
        batch = await begin(runner, "hi")
        await until(lambda: batch.status in ENDED)
        with pytest.raises(BadRequest):
            await runner.create(asked(str(batch.output_file_id)), "")
        await front.service.drain(0.0)
        with pytest.raises(Draining):
            await runner.create(asked(file_id), "key:a")


async def test_a_second_daemon_keeps_off(fake_models: Path, tmp_path: Path, front: Front) -> None:
    async with runner_of(front, Clock()):
        async with running(make_settings(tmp_path, socket=tmp_path / "run2" / "t.sock")) as other:
            async with runner_of(other, Clock()) as second:
                with pytest.raises(Conflict):
                    async with second.stores():
                        pass


async def test_a_disk_that_fails_ends_the_batch(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    async with runner_of(front, Clock()) as runner:
        monkeypatch.setattr(batches.Batches, "save", broken(batches.Batches.save, "in_progress"))
        batch = await begin(runner, "hi")
        await until(lambda: batch.status == "failed")
        assert batch.errors is not None and batch.errors.data[0].message == "the disk failed"


async def test_what_batches_write_is_bounded_in_number(front: Front) -> None:
    async with runner_of(front, Clock()) as runner:
        async with runner.stores() as (files, _):
            files._max_files = 4
        file_id = await upload(runner, "hi")
        made = []
        with pytest.raises(OutOfSpace):
            for _ in range(9):
                made.append(await runner.create(asked(file_id), ""))
                await until(lambda: made[-1].status == "completed")
        assert len(made) == 2  # a file each, and room for two is asked for
        async with runner.stores() as (files, known):
            assert len(list(files.directory.glob("file-*.jsonl"))) == 3 and len(list(known)) == 2


async def test_what_batches_write_is_bounded_in_bytes(front: Front) -> None:
    async with runner_of(front, Clock()) as runner:
        file_id = await upload(runner, *["hi"] * 9)
        async with runner.stores() as (files, _):
            files._max_total_bytes = most = files.path(file_id).stat().st_size + 1500
        batch = await runner.create(asked(file_id), "")
        await until(lambda: batch.status in ENDED)
        assert batch.status == "failed" and batch.errors and batch.errors.data[0].code == "out_of_space"
        assert await lines(runner, batch.output_file_id)
        async with runner.stores() as (files, _):
            assert sum(path.stat().st_size for path in files.directory.glob("file-*.jsonl")) <= most


async def test_answers_are_for_nobody_else_to_read(front: Front) -> None:
    before = os.umask(0o022)
    try:
        async with runner_of(front, Clock()) as runner:
            batch = await begin(runner, "hi", "!refuse")
            await until(lambda: batch.status == "completed")
            async with runner.stores() as (files, _):
                modes = {path.name: path.stat().st_mode & 0o077 for path in files.directory.iterdir()}
        assert batch.output_file_id and batch.error_file_id and set(modes.values()) == {0}
    finally:
        os.umask(before)


async def test_batches_wait_for_their_turn_the_oldest_first(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_run, "MAX_RUNNING", 1)
    clock = Clock()
    async with runner_of(front, clock) as runner:
        made = []
        for text in ("!hang", "hi", "ho"):
            made.append(await begin(runner, text))
            clock.now_s += 1
        await until(lambda: front.service.live)
        assert [batch.status for batch in made] == ["in_progress", "validating", "validating"]
        await runner.cancel(made[1].id, "")  # one that waits
        await until(lambda: made[1].status == "cancelled")
    async with runner_of(front, clock) as runner:
        async with runner.stores() as (_, known):
            first, last = (job.batch for job in known.unfinished())
        await until(lambda: front.service.live)
        assert (first.id, first.status, last.status) == (made[0].id, "in_progress", "validating")
        await runner.cancel(first.id, "")
        await until(lambda: last.status == "completed")


async def test_files_are_looked_through_one_at_a_time_and_no_further_than_needed(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, most, seen = 0, 0, []

    class Watched(Requests):
        def __init__(self, *args: Any, **more: Any) -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            super().__init__(*args, **more)
            seen.append(self)
            inside -= 1

    monkeypatch.setattr(batches_run, "Requests", Watched)
    monkeypatch.setattr(batches_run, "MAX_REQUESTS", 2)
    async with runner_of(front, Clock()) as runner:
        texts = ["hi"] * 500
        made = [await begin(runner, *texts) for _ in range(4)]
        await until(lambda: all(batch.status in ENDED for batch in made))
        for batch in made:
            assert batch.errors and batch.errors.data[0].message == "the file has more than 2 lines"
    assert most == 1 and {one.total for one in seen} == {2}


async def test_a_stop_does_not_wait_until_all_is_told_that_is_too_late(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    async with runner_of(front, clock) as runner:
        await begin(runner, *["!hang"] * 5)
        await until(lambda: front.service.live)
    clock.now_s += WINDOW_S + 1
    with monkeypatch.context() as patch:
        patch.setattr(batches_run, "EXPIRED_AT_ONCE", 2)
        gate = Gate(Output.write).over(patch, Output, "write")
        async with runner_of(front, clock) as runner:
            await until(gate.reached.is_set)
            closing = asyncio.create_task(runner.close())
            await a_while()
            gate.open.set()
            await closing
        assert gate.calls == 1
    gate = Gate(Output.write).over(monkeypatch, Output, "write")
    gate.open.set()
    async with runner_of(front, clock) as runner:
        async with runner.stores() as (_, known):
            (job,) = known.unfinished()
        await until(lambda: job.batch.status == "expired")
        assert len(await lines(runner, job.batch.error_file_id)) == job.batch.request_counts.failed == 5
    assert gate.calls == 1  # the other three together
