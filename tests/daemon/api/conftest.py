"""The HTTP door of a front with fake engines."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from front_harness import Front, make_settings, running
from sdk_daemon import Served, served

from tierd.daemon.api import web


class Http:
    """A client of it."""

    def __init__(self, front: Front | None, port: int, session: aiohttp.ClientSession) -> None:
        self.front, self.port, self.session = front, port, session
        self.url = f"http://127.0.0.1:{port}"

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any], Any]:
        """Status, JSON body and headers."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        data = io.BytesIO(raw) if len(raw) > 1 << 20 else raw  # aiohttp warns of large bytes
        given = {key.replace("_", "-"): value for key, value in headers.items()}
        headers = {"Content-Type": "application/json"} | given
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, json.loads(await response.read()), response.headers

    async def get(self, path: str, **headers: str) -> tuple[int, Any, Any]:
        headers = {key.replace("_", "-"): value for key, value in headers.items()}
        async with self.session.get(self.url + path, headers=headers) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(raw) if is_json else raw.decode(), response.headers

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, parsed; comments as they are."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            return parse_sse((await response.read()).decode())

    async def raw(self, data: bytes) -> bytes:
        """Everything that bytes on a new connection get until it ends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            async with asyncio.timeout(10):
                return await reader.read()
        finally:
            writer.close()


def parse_sse(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    events: list[Any] = []
    for block in text[:-2].split("\n\n"):
        assert "\n" not in block
        if block.startswith(":"):
            events.append(block)
        else:
            payload = block.removeprefix("data: ")
            assert payload != block
            events.append(payload if payload == "[DONE]" else json.loads(payload))
    return events


async def serve_http(front: Front) -> Any:
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    return await web.start(front.service, sock), sock.getsockname()[1]


@pytest.fixture
async def http(fake_models: Path, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Http]:
    async with running(make_settings(tmp_path, **getattr(request, "param", {}))) as front:
        runner, port = await serve_http(front)
        front.app = runner.app
        async with aiohttp.ClientSession() as session:
            yield Http(front, port, session)
        await runner.cleanup()


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served(tmp_path_factory.mktemp("daemon"))


@pytest.fixture
async def shared(shared_daemon: Served) -> AsyncIterator[Http]:
    """A client of one daemon for all tests of a module that need nothing of their own: it has no `front`."""
    async with aiohttp.ClientSession() as session:
        yield Http(None, int(shared_daemon.url.rpartition(":")[2]), session)
