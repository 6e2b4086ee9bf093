"""The engine process on a tiny model: started, spoken to, stopped, killed."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.daemon.engine.families import prepare, reference
from tierd.daemon.engine import assemble
from tierd.daemon.engine.worker import _Worker
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.protocol import TERMINAL, Event, FrameDecoder, Request, encode, to_event

pytestmark = pytest.mark.usefixtures("no_files_left")

RECORD_BYTES = 8192  # a page of the tiny model: 2 layers, 2 heads of 16, 16 tokens, fp32
END = 267  # `<|im_end|>` of the tiny tokenizer
PROMPT = [place % 200 + 20 for place in range(70)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(reference("qwen2, tied"), tmp_path_factory.mktemp("tiny"))


class Worker:
    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket) -> None:
        self.process, self.sock = process, sock
        self.decoder = FrameDecoder()
        self.events: list[Event] = []
        self.number = 0

    async def read(self) -> bool:
        data = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16)
        self.events += [to_event(message) for message in self.decoder.feed(data)]
        return bool(data)

    async def wait(self, number: int, *kinds: str) -> Event:
        async with asyncio.timeout(60):
            while True:
                for event in self.events:
                    if event.id == number and event.ev in kinds:
                        return event
                assert await self.read(), f"the worker closed its end: {self.events[-3:]}"

    async def ready(self) -> dict[str, Any]:
        event = await self.wait(0, "ready", "failed")
        assert event.ev == "ready", event
        return event.data

    async def send(self, op: str, **args: Any) -> int:
        self.number += 1
        await asyncio.get_running_loop().sock_sendall(self.sock, encode(Request(self.number, op, args)))
        return self.number

    async def call(self, op: str, **args: Any) -> Event:
        return await self.wait(await self.send(op, **args), *TERMINAL)

    async def generate(self, **more: Any) -> tuple[list[int], Event]:
        number = await self.begin(**more)
        end = await self.wait(number, *TERMINAL)
        return self.tokens(number), end

    async def begin(self, max_tokens: int = 12, **more: Any) -> int:
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}
        return await self.send("generate", **{"model": "tiny", "tokens": PROMPT, "sampling": sampling} | more)

    def tokens(self, number: int) -> list[int]:
        return [token for e in self.events if e.id == number and e.ev == "text" for token in e.data["tokens"]]

    async def gone(self) -> int:
        async with asyncio.timeout(20):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def worker(model: Path, cache: Path, **config: Any) -> AsyncIterator[Worker]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    settings = {
        "model_dir": str(model), "cache_dir": str(cache / "kv"), "device_bytes": 64 * RECORD_BYTES, "host_bytes": 0,
        "nvme_bytes": 256 * (RECORD_BYTES + 4096), "nvme_min_free_bytes": 0, "threads": 2, "kv_format": "fp32",
        "context": 0,
    } | config  # fmt: skip
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tierd.daemon.engine.worker", "--fd", str(theirs.fileno()),
            pass_fds=(theirs.fileno(),), env={**os.environ, "TIERD_ENGINE_CONFIG": json.dumps(settings)},
        )  # fmt: skip
    try:
        yield Worker(process, ours)
    finally:
        ours.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def test_what_was_loaded_is_never_walked_by_the_collector_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A full collection stops the step thread for as long as it takes to walk what is there: most of it was loaded.
    engine = {"vocabulary": [[number] for number in range(1000)]}
    ready: list[Any] = []
    monkeypatch.setattr(assemble, "build", lambda *_, **__: engine)
    config = EngineConfig(str(tmp_path), str(tmp_path), 1, 0, 0, 0, 1, "fp32", 0)
    one = _Worker(config, 1, 0.0)
    one._loop = SimpleNamespace(call_soon_threadsafe=lambda call, made: ready.append((made, gc.get_freeze_count())))
    try:
        one._load()
        walked = {id(found) for found in gc.get_objects()}
    finally:
        gc.unfreeze()
    assert ready[0][0] is engine and ready[0][1] > 1000, "before the first request"
    assert not walked & {id(part) for part in engine["vocabulary"]}


async def test_a_life(tiny: Path, tmp_path: Path) -> None:
    async with worker(tiny, tmp_path) as one:
        ready = await one.ready()
        assert ready["model"] == "tiny" and ready["context"] == 128 and ready["start_ms"] > 0
        assert (tmp_path / "kv" / ready["namespace"]).is_dir()
        stages = [event.data["stage"] for event in one.events if event.ev == "progress"]
        assert list(dict.fromkeys(stages)) == ["kernels", "weights", "store"]
        tokens, end = await one.generate()
        assert end.ev == "done" and len(tokens) == 12 and end.data["usage"]["cached_tokens"] == 0
        again, end = await one.generate()
        assert again == tokens and end.data["usage"]["cached_tokens"] == 69
        resumed, _ = await one.generate(resume=tokens[:5])
        assert resumed == tokens[5:]
        assert (await one.call("tokenize", text="hi")).data == {"tokens": [104, 105]}
        status = (await one.call("status")).data
        assert status["state"] == "ready" and status["requests"] == 3 and status["tiers"]["device"]["total_pages"] == 64
        assert len((await one.call("pages")).data["map"]) == 64
        assert (await one.call("cache", action="verify")).data["findings"] == []
        refused = await one.call("generate", model="tiny", tokens=list(range(20, 160)))
        assert refused.ev == "refused" and "140 tokens; the context holds 128" in refused.data["message"]
        assert (await one.call("stop", timeout_s=2.0)).ev == "result"
        assert await one.gone() == 0


async def test_killed_and_back_with_its_pages(tiny: Path, tmp_path: Path) -> None:
    async with worker(tiny, tmp_path) as one:
        await one.ready()
        tokens, _ = await one.generate()
        assert (await one.call("flush", timeout_s=5.0)).data == {"left": 0}
        one.process.kill()
        assert await one.gone() == -signal.SIGKILL
    async with worker(tiny, tmp_path) as two:
        await two.ready()
        again, end = await two.generate()
        assert again == tokens
        assert end.data["timings"]["hit_nvme"] >= 64 and end.data["usage"]["cached_tokens"] >= 64


async def test_cancel_and_a_front_that_goes(tiny: Path, tmp_path: Path) -> None:
    async with worker(tiny, tmp_path, host_bytes=8 * RECORD_BYTES) as one:
        await one.ready()
        number = await one.begin(max_tokens=50)
        await one.send("cancel", target=number)
        assert (await one.wait(number, *TERMINAL)).ev == "aborted"
        await one.begin(max_tokens=50)
        os.kill(one.process.pid, signal.SIGINT)  # not its business
        one.sock.close()
        assert await one.gone() == 0


async def test_sigterm_flushes(tiny: Path, tmp_path: Path) -> None:
    async with worker(tiny, tmp_path) as one:
        await one.ready()
        await one.generate()
        one.process.terminate()
        assert await one.gone() == 0
    async with worker(tiny, tmp_path) as two:
        await two.ready()
        _, end = await two.generate()
        assert end.data["usage"]["cached_tokens"] == 69


async def test_a_second_owner_of_the_store_serves_without_it(tiny: Path, tmp_path: Path) -> None:
    async with worker(tiny, tmp_path) as one:
        await one.ready()
        async with worker(tiny, tmp_path) as two:
            await two.ready()
            assert "in use by process" in (await two.wait(0, "notice")).data["text"]
            assert (await two.generate())[1].ev == "done"


@pytest.mark.parametrize(
    ("config", "code", "exit_code"),
    [
        ({"device_bytes": RECORD_BYTES - 1}, "bad_config", 78),
        ({"context": 4096}, "bad_config", 78),
        ({"model_dir": "/nowhere/tiny"}, "invalid_model", 1),
    ],
    ids=["too small", "too long", "no model"],
)
async def test_what_cannot_start_says_why(
    tiny: Path, tmp_path: Path, config: dict[str, Any], code: str, exit_code: int
) -> None:
    async with worker(tiny, tmp_path, **config) as one:
        failed = await one.wait(0, "failed")
        assert failed.data["code"] == code and failed.data["message"]
        assert await one.gone() == exit_code


async def test_started_wrongly() -> None:
    for environment in ({}, {"TIERD_ENGINE_CONFIG": "{}"}):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tierd.daemon.engine.worker", "--fd", "999", stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **environment},
        )  # fmt: skip
        _, stderr = await process.communicate()
        assert process.returncode == 2 and b"TIERD_ENGINE_CONFIG" in stderr


async def test_an_answer_that_is_held_to_a_form(tmp_path: Path) -> None:
    model = copy.deepcopy(reference("qwen2, tied"))
    model.config.eos_token_id = model.generation_config.eos_token_id = END
    async with worker(prepare(model, tmp_path / "ending"), tmp_path) as one:
        await one.ready()
        sampling = {"temperature": 1.0, "seed": 1, "max_tokens": 20}
        number = await one.begin(sampling=sampling, format={"kind": "regex", "source": "[a-c]{3}[0-9]"})
        end = await one.wait(number, *TERMINAL)
        text = "".join(e.data["text"] for e in one.events if e.id == number and e.ev == "text")
        assert end.ev == "done" and end.data["finish"] == "stop" and re.fullmatch("[a-c]{3}[0-9]", text)
        refused = await one.call("generate", model="tiny", prompt="x", format={"kind": "grammar", "source": "start: x"})
        assert refused.ev == "refused" and refused.data["param"] == "format"
        assert (await one.generate())[1].ev == "done"
