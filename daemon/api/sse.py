"""An answer over HTTP, whatever the dialect. A streamed one: late headers, pings, a deadline for each write, one end.

Shared by every dialect. A dialect gives a `Voice`: what it says for each event, as bytes; and a `Whole`, that puts an
answer together. It knows neither pings nor sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from aiohttp import web

from tierd.daemon.api.answers import json_response
from tierd.daemon.api.voice import Voice
from tierd.daemon.errors import Aborted, TierdError
from tierd.daemon.inbox import SlowReader
from tierd.daemon.protocol import TERMINAL, Event, error_of

WRITE_TIMEOUT_S = 60.0  # for the client to take what was written
HEADERS_AFTER_S = 10.0  # a refusal is a status until then; afterwards a stream with an error in it
PING_S = 15.0
_STOPPED = "the generation was stopped"


class Whole(Protocol):
    """How a dialect says an answer in one piece."""

    def take(self, event: Event) -> Any | None:
        """The next event; at `done` the body of the answer."""


async def answer(
    request: web.Request,
    events: AbstractAsyncContextManager[AsyncGenerator[Event, None]],
    voice: Callable[[], Voice] | None,
    whole: Callable[[], Whole],
    headers: Mapping[str, str] | None = None,
) -> web.StreamResponse:
    """Answer with the events that `events` opens: told by `voice` as they come, without one by `whole` at their end.

    Both are made when the events are there: a request is checked then, and before that numbers in it may be absurd.
    Raises the error of a request that ends before anything is out, ConnectionResetError for a client that is cut.
    """
    with _cutting(request):
        async with events as opened:
            if voice is not None:
                return await _Sender(request, voice(), headers or {}).send(opened)
            told = whole()
            async for event in opened:
                if error := error_of(event):
                    raise error
                if (body := told.take(event)) is not None:
                    return json_response(body, headers=headers)
    raise Aborted(_STOPPED)


@contextlib.contextmanager
def _cutting(request: web.Request) -> Iterator[None]:
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
        """Write them up to the terminal one. Raises the error of a request that ends before the headers are out.

        They are closed when the last one is there: what a request holds is free before its client has read all of it.
        Raises SlowReader when the client does not read, OSError when it is gone.
        """
        pending: asyncio.Task[Event] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(events))
                if not (await asyncio.wait([pending], timeout=max(0.0, self._deadline_s - time.monotonic())))[0]:
                    await self._write(self._voice.ping())
                    continue
                done, pending = pending, None
                said = _said(done)
                if isinstance(said, TierdError) or said.ev in TERMINAL:
                    await events.aclose()
                if await self._send_event(said):
                    await _taken(self._response.write_eof())  # at once: clients read on to the end of the body
                    return self._response
        finally:
            if pending is not None:
                # The generator must not be closed while it runs.
                pending.cancel()
                await asyncio.wait([pending])

    async def _send_event(self, event: Event | TierdError) -> bool:
        """Whether it was the last one."""
        if isinstance(event, TierdError):
            return await self._send_error(event)
        match event.ev:
            case "accepted":
                # The headers go out now, so that the client sees that its request is worked on.
                await self._write(self._voice.say(event) or self._voice.ping())
            case "text" | "choice" | "done":
                await self._write(self._voice.say(event))
                return event.ev == "done"
            case "refused" | "failed" | "aborted":
                return await self._send_error(error_of(event) or Aborted(_STOPPED))
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
            await _taken(self._response.prepare(self._request))
        await _taken(self._response.write(data))
        self._deadline_s = time.monotonic() + PING_S


def _said(done: asyncio.Task[Event]) -> Event | TierdError:
    try:
        return done.result()
    except TierdError as exc:
        return exc


async def _taken(written: Awaitable[Any]) -> None:
    """Wait until the client has taken it. Raises SlowReader when it does not in time."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await written
    except TimeoutError:
        raise SlowReader from None
