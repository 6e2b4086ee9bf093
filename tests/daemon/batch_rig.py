"""Batches inside of a daemon, for tests: begun, watched, held up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from front_harness import Front

from tierd.daemon.api import batches
from tierd.daemon.api.batches import Batch, BatchRequest
from tierd.daemon.api.batches_run import Runner
from tierd.daemon.api.files import File
from tierd.daemon.batch import CHAT_URL


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


async def upload(runner: Runner, *texts: str, tenant: str = "", **more: Any) -> str:
    """Chats of these texts as a file. `more`: fields of each."""
    content = "".join(
        json.dumps({"custom_id": str(n), "method": "POST", "url": CHAT_URL, "body": {
            "model": "alpha", "messages": [{"role": "user", "content": text}], "max_tokens": 2} | more}) + "\n"
        for n, text in enumerate(texts)
    )  # fmt: skip
    async with runner.stores() as (files, _):
        (file_id,) = files.book()
        files.path(file_id).write_text(content)
        files.path(file_id).chmod(0o600)
        files.add(tenant, File(file_id, len(content), 1, "in.jsonl", "batch"), 1.0)
    return file_id


def asked(file_id: str) -> BatchRequest:
    return BatchRequest(input_file_id=file_id, endpoint=CHAT_URL, completion_window="24h")


async def begin(runner: Runner, *texts: str, tenant: str = "", **more: Any) -> Batch:
    return await runner.create(asked(await upload(runner, *texts, tenant=tenant, **more)), tenant)


async def lines(runner: Runner, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    async with runner.stores() as (files, _):
        return {line["custom_id"]: line for line in map(json.loads, files.path(file_id).read_text().splitlines())}


def broken(save: Callable[..., None], status: str) -> Callable[..., None]:
    def fails(store: batches.Batches, job: batches.Job) -> None:
        if job.batch.status == status:
            raise OSError(5, "input/output error")
        save(store, job)

    return fails


class Gate:
    """Holds the calls of a function up, from a numbered one on, until it is opened."""

    def __init__(self, function: Callable[..., Any], first: int = 0) -> None:
        self.calls = self.ended = 0
        self.reached = threading.Event()
        self.open = threading.Event()
        self._function = function
        self._first = first

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.calls += 1
        if self.calls > self._first:
            self.reached.set()
            assert self.open.wait(20)
        try:
            return self._function(*args, **more)
        finally:
            self.ended += 1

    def over(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> Gate:
        """Stands before a function of a class or module."""
        patch.setattr(owner, name, lambda *args, **more: self(*args, **more))
        return self


async def a_while() -> None:
    """Let others have the loop: what they can do, they have done then."""
    for _ in range(20):
        await asyncio.sleep(0)
