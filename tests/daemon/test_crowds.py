"""Many clients at once, clients that leave, clients that do not read: nobody else notices, and nothing is left over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import socket
import statistics
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from typing import Any
from urllib.parse import urlsplit

import hostile
import msgspec
import pytest
from fake_engine import whole_text
from front_harness import Daemon, Wire, set_options, text

from tierd.daemon.protocol import Request, Sampling, Submit, encode

GROWTH_BYTES = 32 << 20
SLOW: dict[str, Any] = {"stream": True, "prompt": "!big=20000 slow", "max_tokens": 4000}
# It fits into buffers: complete, and never read.
SHORT: dict[str, Any] = {"stream": True, "prompt": "short", "max_tokens": 5}


@pytest.fixture(autouse=True)
def many_files():
    """This process holds one end of each connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def until(ask: Callable[[], Awaitable[bool]], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await ask():  # noqa: ASYNC110  (another process has no event)
            await asyncio.sleep(0.05)


class Crowd:
    """A daemon, a connection that asks it how it is, and what it held before the crowd came."""

    def __init__(self, daemon: Daemon, wire: Wire, port: int) -> None:
        self.daemon, self.wire, self.port = daemon, wire, port
        self.pid = daemon.process.pid
        self.files, self.rss = files_of(self.pid), rss_bytes(self.pid)

    @classmethod
    @contextlib.asynccontextmanager
    async def at(cls, daemon: Daemon):
        wire = await Wire.connect(daemon.socket)
        port = urlsplit((await wire.call("status"))["http"]).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(hostile.head("GET", "/health"))
        assert b" 200 " in await reader.read()  # from now on nothing is opened any more that stays open
        writer.close()
        await wire.call("load", model="alpha")
        crowd = cls(daemon, wire, port)
        yield crowd
        await crowd.until_alone()
        await wire.close()

    async def is_alone(self) -> bool:
        """Whether the daemon is as it was: no request, no descriptor more."""
        status = await self.wire.call("status")
        engine = status["engines"][0]
        return status["queue"]["live"] == 0 and engine["running"] == 0 and files_of(self.pid) <= self.files

    async def until_alone(self) -> None:
        try:
            await until(self.is_alone)
        except TimeoutError:
            status = await self.wire.call("status")
            raise AssertionError(f"{files_of(self.pid)} files of {self.files}: {status}") from None

    async def http(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def steady(self, tokens: int, name: str) -> float:
        """Tokens a second of one well-behaved client."""
        wire = await Wire.connect(self.daemon.socket)
        started_s = time.monotonic()
        wire.generate(1, f"steady {name}", max_tokens=tokens)
        events = await wire.until_end(1)
        assert events[-1].ev == "done" and text(events) == whole_text(f"steady {name}", tokens)
        await wire.close()
        return tokens / (time.monotonic() - started_s)


async def hold(crowd: Crowd, count: int) -> None:
    """That many unix and HTTP connections at once, each used while all are open."""
    wires = [await Wire.connect(crowd.daemon.socket) for _ in range(count)]
    pairs = [await crowd.http() for _ in range(count)]
    for wire in wires:
        wire.send(1, "hello")
    for _, writer in pairs:
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    async with asyncio.timeout(60):
        for wire in wires:
            assert (await wire.next()).data["pid"] == crowd.pid
        for reader, _ in pairs:
            assert b" 200 " in await reader.readline()
    assert files_of(crowd.pid) >= crowd.files + 2 * count
    for wire in wires:
        await wire.close()
    for _, writer in pairs:
        writer.transport.abort()


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a machine does that goes down."""
    writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def leave_at_random(crowd: Crowd, rng: random.Random) -> None:
    """One client of either door that goes at any moment: while it asks, while it waits, while it reads."""
    body = {"model": "alpha", "prompt": f"{rng.random()}", "max_tokens": 40, "stream": rng.random() < 0.7}
    with contextlib.suppress(ConnectionError, TimeoutError):
        if rng.random() < 0.5:
            wire = await Wire.connect(crowd.daemon.socket)
            writer, reader = wire.writer, wire.reader
            wire.generate(1, body["prompt"], max_tokens=40)
        else:
            reader, writer = await crowd.http()
            data = hostile.post("/v1/completions", body)
            writer.write(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.3 else data)
        async with asyncio.timeout(rng.choice([0.0, 0.001, 0.01, 0.05, 0.2])):
            while await reader.read(rng.choice([1, 100, 65536])):
                pass
    if rng.random() < 0.5:
        reset(writer)
    else:
        writer.close()


async def disconnects(crowd: Crowd, count: int, at_once: int, seed: int) -> None:
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with gate:
            await leave_at_random(crowd, random.Random(f"{seed} {number}"))

    await asyncio.gather(*(one(number) for number in range(count)))
    await crowd.until_alone()


class SlowReaders:
    """Clients of both doors that read nothing, or a byte a second, of a long answer or a short one; or half-asked."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._socks: list[socket.socket] = []
        self._dripping: list[socket.socket] = []
        self._drip: asyncio.Task[None] | None = None

    async def come(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        for number in range(count):
            asked = SLOW if number % 4 < 2 else SHORT
            if number % 2:
                sock, address = socket.socket(), ("127.0.0.1", self._crowd.port)
                data = hostile.post("/v1/completions", {"model": "alpha", **asked})
            else:
                sock, address = socket.socket(socket.AF_UNIX), str(self._crowd.daemon.socket)
                sampling = Sampling(max_tokens=asked["max_tokens"])
                submit = Submit("alpha", prompt=asked["prompt"], sampling=sampling)
                data = encode(Request(1, "generate", msgspec.to_builtins(submit)))
            self._socks.append(sock)
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            await loop.sock_sendall(sock, data[: len(data) // 2] if number % 5 == 4 else data)
        self._dripping = self._socks[::5]
        self._drip = asyncio.create_task(self._drip_on())

    async def _drip_on(self) -> None:
        while True:
            for sock in self._dripping:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    sock.recv(1)
            await asyncio.sleep(1.0)

    async def go(self) -> None:
        if self._drip is not None:
            self._drip.cancel()
            await asyncio.wait([self._drip])
        for sock in self._socks:
            sock.close()
        self._socks.clear()


def test_50_connections_of_each_kind_and_80_disconnects(daemon, fake_models):
    set_options(fake_models / "alpha", token_s=0.002)
    one = daemon(log="ERROR")
    one.wait()

    async def across():
        async with Crowd.at(one) as crowd:
            await hold(crowd, 50)
            await disconnects(crowd, 80, at_once=40, seed=3)

    asyncio.run(across())


@pytest.mark.long
def test_1000_connections_of_each_kind_at_once(daemon):
    one = daemon(log="ERROR")
    one.wait()

    async def across():
        async with Crowd.at(one) as crowd:
            await hold(crowd, 1000)
            await crowd.until_alone()
            grown = rss_bytes(crowd.pid) - crowd.rss
            await hold(crowd, 1000)
            await crowd.until_alone()
            assert rss_bytes(crowd.pid) - crowd.rss < grown + GROWTH_BYTES / 4  # the second time costs nothing more

    asyncio.run(across())


@pytest.mark.long
def test_2000_disconnects_at_random_moments_leak_nothing(daemon, fake_models):
    set_options(fake_models / "alpha", token_s=0.002)
    one = daemon(log="ERROR")
    one.wait()

    async def across():
        async with Crowd.at(one) as crowd:
            await disconnects(crowd, 300, at_once=100, seed=5)  # what it takes once
            before = rss_bytes(crowd.pid)
            await disconnects(crowd, 2000, at_once=100, seed=6)
            assert rss_bytes(crowd.pid) - before < GROWTH_BYTES
            assert await crowd.steady(20, "after") > 0

    asyncio.run(across())


@pytest.mark.long
def test_200_slow_readers_cost_others_nothing(daemon, fake_models):
    # What they cost is measured when the buffers are full: then each is cut, and its generation ends.
    set_options(fake_models / "alpha", token_s=0.005)
    one = daemon(max_streams=512, log="CRITICAL")
    one.wait()

    async def across():
        async with Crowd.at(one) as crowd:
            alone, among = [], []
            for number in range(5):
                alone.append(await crowd.steady(100, f"a{number}"))
                slow = SlowReaders(crowd)
                await slow.come(200)
                await until(lambda: cut(crowd), 60.0)
                among.append(await crowd.steady(100, f"b{number}"))
                await slow.go()
                await crowd.until_alone()
            print(f"tokens/s beside them / alone: {statistics.median(among) / statistics.median(alone):.3f}")
            assert statistics.median(among) > 0.97 * statistics.median(alone), (alone, among)
            assert rss_bytes(crowd.pid) - crowd.rss < 200 * (256 << 10)

    asyncio.run(across())


async def cut(crowd: Crowd) -> bool:
    """Whether the engine works for nobody any more, though the sockets are open here."""
    return (await crowd.wire.call("status"))["engines"][0]["running"] == 0


async def test_the_engine_stops_at_once_for_a_reader_that_stands_still(front, fake_models):
    set_options(fake_models / "alpha", token_s=0.001)
    wire = await front.connect()
    wire.writer.transport.pause_reading()
    wire.generate(1, SLOW["prompt"], max_tokens=4000)
    asker = await front.connect()

    async def is_cancelled() -> bool:
        status = (await asker.call("status"))["engines"]
        return bool(status) and status[0].get("cancelled") == 1

    await until(is_cancelled)
    wire.writer.transport.abort()
