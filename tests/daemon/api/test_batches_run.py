"""Batches inside of a daemon: time that is over, keys that are gone, restarts, a second daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from front_harness import Front, make_settings, running

from tierd.daemon import keys, tenants
from tierd.daemon.api import batches
from tierd.daemon.api.batches import ENDED, WINDOW_S, Batch, BatchRequest
from tierd.daemon.api.batches_run import Runner
from tierd.daemon.api.files import File
from tierd.daemon.batch import CHAT_URL
from tierd.daemon.errors import BadRequest, Conflict, Draining, NotFound


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@contextlib.asynccontextmanager
async def runner_of(front: Front, clock: Clock) -> AsyncIterator[Runner]:
    runner = Runner(front.service, clock)
    await runner.start()
    try:
        yield runner
    finally:
        await runner.close()


async def upload(runner: Runner, *texts: str, tenant: str = "") -> str:
    """Chats of these texts as a file."""
    content = "".join(
        json.dumps({"custom_id": str(n), "method": "POST", "url": CHAT_URL, "body": {
            "model": "alpha", "messages": [{"role": "user", "content": text}], "max_tokens": 2}}) + "\n"
        for n, text in enumerate(texts)
    )  # fmt: skip
    async with runner.stores() as (files, _):
        file_id = files.new_id()
        files.path(file_id).write_text(content)
        files.add(tenant, File(file_id, len(content), 1, "in.jsonl", "batch"), 1.0)
    return file_id


def asked(file_id: str) -> BatchRequest:
    return BatchRequest(input_file_id=file_id, endpoint=CHAT_URL, completion_window="24h")


async def begin(runner: Runner, *texts: str, tenant: str = "") -> Batch:
    return await runner.create(asked(await upload(runner, *texts, tenant=tenant)), tenant)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  (a state of another task)
            await asyncio.sleep(0.005)


async def lines(runner: Runner, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    async with runner.stores() as (files, _):
        return {line["custom_id"]: line for line in map(json.loads, files.path(file_id).read_text().splitlines())}


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
        monkeypatch.setattr(batches.Batches, "save", _broken(batches.Batches.save))
        batch = await begin(runner, "hi")
        await until(lambda: batch.status == "failed")
        assert batch.errors is not None and batch.errors.data[0].message == "the disk failed"


def _broken(save: Callable[..., None]) -> Callable[..., None]:
    def fails(store: batches.Batches, job: batches.Job) -> None:
        if job.batch.status == "in_progress":
            raise OSError(5, "input/output error")
        save(store, job)

    return fails


