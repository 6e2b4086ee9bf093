"""A socket that answers like a daemon, with what a test wants it to say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from tests.tui.scenes import OPS, busy
from tierd.daemon.protocol import Event, FrameDecoder, Request, encode, to_request
from tierd.tui.record import Frame

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class FakeDaemon:
    """Serves `answers` by operation; `asked` holds what came. `stop` drops every connection."""

    def __init__(self, path: Path, frame: Frame | None = None, ops: tuple[str, ...] = OPS) -> None:
        self.path = path
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.errors: dict[str, str] = {}  # codes, by operation
        seen = frame or busy(3)
        self.answers: dict[str, Answer] = {
            "hello": lambda args: {"version": "0.1.0", "protocol": 1, "ops": list(ops)},
            "status": lambda args: dict(msgspec.to_builtins(seen.daemon)),
            # bytes stay bytes: this is what goes into the frame
            "top": lambda args: dict(msgspec.to_builtins(seen.top, builtin_types=(bytes,))) if seen.top else {},
        }
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.close()
        await self._server.wait_closed()
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        decoder = FrameDecoder()
        try:
            while data := await reader.read(1 << 16):
                for message in decoder.feed(data):
                    writer.write(encode(self._answer(to_request(message))))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    def _answer(self, request: Request) -> Event:
        self.asked.append((request.op, request.args))
        answer = self.answers.get(request.op)
        if answer is None:
            code = self.errors.get(request.op, "unsupported")
            return Event(request.id, "refused", {"code": code, "message": f"no {request.op}"})
        return Event(request.id, "result", answer(request.args))


@contextlib.asynccontextmanager
async def serving(path: Path, frame: Frame | None = None, ops: tuple[str, ...] = OPS) -> AsyncIterator[FakeDaemon]:
    daemon = FakeDaemon(path, frame, ops)
    await daemon.start()
    try:
        yield daemon
    finally:
        with contextlib.suppress(OSError):
            await daemon.stop()
