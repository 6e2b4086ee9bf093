"""A front with fake engines: in this process for most tests, as a process where signals and memory matter."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from tierd.daemon.config import Settings
from tierd.daemon.door import Door
from tierd.daemon.exclusive import Exclusive, Plan
from tierd.daemon.machine import Machine
from tierd.daemon.metrics import Metrics
from tierd.daemon.models import catalog
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.prepare import Preparer
from tierd.daemon.protocol import TERMINAL, Event, FrameDecoder, Request, Sampling, Submit, encode, to_event
from tierd.daemon.server import Server
from tierd.daemon.service import Service
from tierd.daemon.supervisor import Supervisor

HERE = Path(__file__).resolve().parent
FAKE_ENGINE = (sys.executable, "-S", str(HERE / "fake_engine.py"), str(Path(msgspec.__file__).parents[1]))
CONTEXT = 4096
SPEC = ModelSpec("llama", 1, 8, 16, 1, 1, 8, 32000, CONTEXT, 1e-5, True)


def make_model(models_dir: Path, name: str, weights_bytes: int = 0, **options: Any) -> Path:
    """A prepared model that only the fake engine can run; it says to have so many bytes of weights."""
    directory = models_dir / name
    directory.mkdir(parents=True, exist_ok=True)
    records = (catalog.RecordEntry("layer.0", 0, weights_bytes, "0", ()),) if weights_bytes else ()
    manifest = catalog.Manifest(
        version=catalog.MANIFEST_VERSION, name=name, source="test", source_digest="0", weights="auto", spec=SPEC,
        format="fp32", context=CONTEXT, digest="0" * 32, bytes=weights_bytes, created_s=0.0, records=records,
        tokenizer_digest="0", template_digest=None, eos_ids=(2,), bos_id=None, add_bos=False,
        sampling=catalog.Sampling(),
    )  # fmt: skip
    (directory / catalog.WEIGHTS).touch()
    os.truncate(directory / catalog.WEIGHTS, weights_bytes)  # a hole
    (directory / catalog.TOKENIZER).write_text("{}")
    (directory / catalog.MANIFEST).write_bytes(msgspec.json.encode(manifest))
    set_options(directory, **options)
    return directory


def set_options(directory: Path, **options: Any) -> None:
    (directory / "fake.json").write_text(json.dumps(options))


class Wire:
    """A client of the unix socket that hides nothing."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.decoder = FrameDecoder()
        self.events: list[Event] = []

    @classmethod
    async def connect(cls, path: Path) -> Wire:
        return cls(*await asyncio.open_unix_connection(str(path)))

    def send(self, request_id: int, op: str, **args: Any) -> None:
        self.writer.write(encode(Request(request_id, op, args)))

    def generate(self, request_id: int, prompt: str, model: str = "alpha", **sampling: Any) -> None:
        submit = Submit(model=model, prompt=prompt, sampling=Sampling(**sampling))
        self.send(request_id, "generate", **msgspec.to_builtins(submit))

    async def next(self) -> Event:
        """The next event; EOFError at the end of the connection."""
        while not self.events:
            async with asyncio.timeout(20):
                data = await self.reader.read(65536)
            if not data:
                raise EOFError
            self.events = [to_event(message) for message in self.decoder.feed(data)]
        return self.events.pop(0)

    async def until_end(self, request_id: int) -> list[Event]:
        """The events of one request without progress; those of others are dropped."""
        events: list[Event] = []
        while not events or events[-1].ev not in TERMINAL:
            event = await self.next()
            if event.id == request_id and event.ev != "progress":
                events.append(event)
        return events

    async def call(self, op: str, **args: Any) -> dict[str, Any]:
        self.send(999, op, **args)
        (event,) = await self.until_end(999)
        assert event.ev == "result", event
        return event.data

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


def text(events: list[Event]) -> str:
    return "".join(event.data["text"] for event in events if event.ev == "text")


class Front:
    """The daemon without signals and HTTP, in this event loop."""

    def __init__(
        self, settings: Settings, max_loaded: int = 1, command: tuple[str, ...] = FAKE_ENGINE,
        machine: Machine | Callable[[], Machine] | None = None, plan_block: Plan | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.metrics = Metrics()
        if machine is None:
            prepare = Preparer(settings)
        else:
            prepare = Preparer(settings, lambda cache_dir: machine() if callable(machine) else machine)
        self.prepare = prepare
        self.supervisor = Supervisor(
            prepare, on_ready=prepare.note, on_end=prepare.give_back, keep_alive_s=settings.keep_alive_s,
            max_loaded=max_loaded, command=command, pinned=settings.pinned_models,
            on_death=lambda name: self.metrics.engine_deaths.update([name]),
        )  # fmt: skip
        exclusive = Exclusive(self.supervisor, plan_block or prepare.plan_block, prepare.give_block)
        self.service = Service(settings, self.supervisor, self.metrics, prepare.resize, exclusive)
        self.server = Server(self.service)
        self.path = settings.socket
        self.wires: list[Wire] = []
        self.app: Any = None  # of HTTP, where a test has it

    async def connect(self) -> Wire:
        self.wires.append(await Wire.connect(self.path))
        return self.wires[-1]

    def engine(self, name: str = "alpha") -> Any:
        return self.supervisor.engines[name]


def make_settings(tmp_path: Path, **changes: Any) -> Settings:
    given = {"models_dir": tmp_path / "models", "cache_dir": tmp_path / "cache", "socket": tmp_path / "run" / "t.sock",
             "listen": "127.0.0.1:0", "nvme_mem": 1 << 30, "default_model": "alpha",
             "keys_file": tmp_path / "keys.json", "batches_dir": tmp_path / "batches"}  # fmt: skip
    return Settings(**(given | changes))


@contextlib.asynccontextmanager
async def running(
    settings: Settings, max_loaded: int = 1, command: tuple[str, ...] = FAKE_ENGINE,
    machine: Machine | Callable[[], Machine] | None = None, plan_block: Plan | None = None,
) -> AsyncIterator[Front]:  # fmt: skip
    """`machine`: what the front takes this one for. `plan_block`: says what an exclusive batch gets."""
    front = Front(settings, max_loaded, command, machine, plan_block)
    door = Door(settings.socket)
    keep_alive = asyncio.create_task(front.supervisor.keep_alive())
    try:
        await front.server.start(door.socket)
        yield front
        assert front.service.live == 0 or front.server.connections, "a request outlived its connection"
    finally:
        for wire in front.wires:
            wire.writer.transport.abort()  # also what a failed test left open
        keep_alive.cancel()
        await front.server.close()
        await front.supervisor.close(0.5, 2.0)
        door.close()
        assert front.service.live == 0
        assert not front.supervisor.engines


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait for something that has no event."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        await asyncio.sleep(0.005)


class Daemon:
    """`tierd serve` with fake engines, as a process."""

    def __init__(self, tmp_path: Path, **changes: Any) -> None:
        known = {name: value for name, value in changes.items() if name not in ("times", "log", "card")}
        settings = make_settings(tmp_path, **known)
        self.socket = settings.socket
        self.started_s = time.monotonic()
        given = {name: str(value) if isinstance(value, Path) else value for name, value in changes.items()}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "run_front.py"), str(tmp_path), json.dumps(given)], stderr=subprocess.PIPE
        )

    def wait(self, timeout_s: float = 15.0) -> float:
        """Seconds from the start until the socket answers a frame."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and self.process.poll() is None:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(5)
                sock.connect(str(self.socket))
                sock.sendall(encode(Request(1, "hello")))
                if sock.recv(4096):
                    return time.monotonic() - self.started_s
            time.sleep(0.01)
        raise AssertionError(f"no answer: {self.process.poll()}")

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> str:
        """Its standard error, after its end."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.communicate(timeout=20)[1].decode()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
