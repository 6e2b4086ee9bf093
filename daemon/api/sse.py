"""A streamed answer over HTTP, whatever the dialect: late headers, pings, a deadline for each write, one end.

Shared by every dialect that streams. A dialect gives a `Voice`: what it says for each event, as bytes. It knows neither
pings nor sockets; what is here knows no JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Protocol

from aiohttp import web

from tierd.daemon.errors import Aborted, TierdError
from tierd.daemon.inbox import SlowReader
from tierd.daemon.protocol import Event, error_of

WRITE_TIMEOUT_S = 60.0  # for the client to take what was written
HEADERS_AFTER_S = 10.0  # a refusal is a status until then; afterwards a stream with an error in it
PING_S = 15.0
EVENT_STREAM = "text/event-stream"


class Voice(Protocol):
    """How a dialect says the events of one answer. Each method gives bytes for the wire, empty for nothing."""

    content_type: str

    def say(self, event: Event) -> bytes:
        """For `accepted`, `text`, `choice` and `done`; the bytes of `done` end the stream."""

    def ping(self) -> bytes:
        """Something that clients skip. Never empty."""

    def fail(self, error: TierdError) -> bytes:
        """The error that ends a stream whose status was sent already."""


async def send(
    request: web.Request, events: AsyncGenerator[Event, None], voice: Voice, headers: Mapping[str, str] | None = None
) -> web.StreamResponse:
    """Write the events up to the terminal one. Raises the error of a request that ends before the headers are out.

    Raises SlowReader when the client does not read, OSError when it is gone: see `cutting`.
    """
    return await _Sender(request, voice, headers or {}).send(events)


@contextlib.contextmanager
def cutting(request: web.Request) -> Iterator[None]:
    """Around all that takes events: a client that does not read loses its connection, and is told nothing more."""
    try:
        yield
    except SlowReader:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read") from None


class _Sender:
    """One answer on its way out."""

    def __init__(self, request: web.Request, voice: Voice, headers: Mapping[str, str]) -> None:
        self._request = request
        self._voice = voice
        self._response = web.StreamResponse(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        )
        self._response.content_type = voice.content_type
        self._response.charset = "utf-8"
        self._deadline_s = time.monotonic() + HEADERS_AFTER_S

    async def send(self, events: AsyncGenerator[Event, None]) -> web.StreamResponse:
        """See the function of this name."""
        pending: asyncio.Task[Event] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(events))
                if not (await asyncio.wait([pending], timeout=max(0.0, self._deadline_s - time.monotonic())))[0]:
                    await self._write(self._voice.ping())
                    continue
                done, pending = pending, None
                if await self._send_event(done):
                    await self._response.write_eof()  # at once: clients read on to the end of the body
                    return self._response
        finally:
            if pending is not None:
                # The generator must not be closed while it runs.
                pending.cancel()
                await asyncio.wait([pending])

    async def _send_event(self, done: asyncio.Task[Event]) -> bool:
        """Whether it was the last one."""
        try:
            event = done.result()
        except TierdError as exc:
            return await self._send_error(exc)
        match event.ev:
            case "accepted":
                # The headers go out now, so that the client sees that its request is worked on.
                await self._write(self._voice.say(event) or self._voice.ping())
            case "text" | "choice" | "done":
                await self._write(self._voice.say(event))
                return event.ev == "done"
            case "refused" | "failed" | "aborted":
                return await self._send_error(error_of(event) or Aborted("the generation was stopped"))
            case _ if self._deadline_s <= time.monotonic():
                await self._write(self._voice.ping())
        return False

    async def _send_error(self, error: TierdError) -> bool:
        if not self._response.prepared:
            raise error
        await self._write(self._voice.fail(error))
        return True

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        if not self._response.prepared:
            await self._response.prepare(self._request)
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._response.write(data)
        except TimeoutError:
            raise SlowReader from None
        self._deadline_s = time.monotonic() + PING_S
