"""The paths of HTTP: OpenAI's, and those that tell how the daemon is."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from aiohttp import web

from tierd.daemon import metrics
from tierd.daemon.api import openai
from tierd.daemon.api.answers import json_response
from tierd.daemon.api.openai import Call, Shape
from tierd.daemon.errors import Aborted, BadRequest, TimedOut
from tierd.daemon.inbox import SlowReader
from tierd.daemon.protocol import Event, error_of
from tierd.daemon.service import Service
from tierd.daemon.version import version

BODY_TIMEOUT_S = 30.0
WRITE_TIMEOUT_S = 60.0
HEADERS_AFTER_S = 10.0  # a refusal is a status until then; afterwards a stream with an error in it
PING_S = 15.0
_PING = b": ping\n\n"
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Routes:
    """The handlers. Threading: for one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add(self, router: web.UrlDispatcher) -> None:
        """Register every path."""
        router.add_get("/", self.root)
        router.add_get("/health", self.health)
        router.add_get("/metrics", self.metrics)
        router.add_get("/v1/models", self.models)
        router.add_get("/v1/models/{model:.+}", self.model)
        router.add_post("/v1/chat/completions", self.chat)
        router.add_post("/v1/completions", self.completions)

    async def root(self, request: web.Request) -> web.Response:
        """Who is here."""
        return web.Response(text="tierd is running\n")

    async def health(self, request: web.Request) -> web.Response:
        """200 while requests are taken, also when a model loads; 503 when the daemon is stopping."""
        state = self._service.state
        status = 503 if state == "draining" else 200
        health = {"status": "ok" if status == 200 else state, "state": state, "version": version()}
        return json_response(health, status=status)

    async def metrics(self, request: web.Request) -> web.Response:
        """For Prometheus."""
        text = await self._service.metrics_text()
        return web.Response(body=text.encode(), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def models(self, request: web.Request) -> web.Response:
        """Every model that can be used, loaded or not."""
        return json_response(openai.models(await self._service.models()))

    async def model(self, request: web.Request) -> web.Response:
        """One of them."""
        return json_response(openai.model(await self._service.show(request.match_info["model"])))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        return await self._generate(request, openai.parse_chat, chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions"""
        return await self._generate(request, openai.parse_completion, chat=False)

    async def _generate(
        self, request: web.Request, parse: Callable[[bytes], Call], *, chat: bool
    ) -> web.StreamResponse:
        call = parse(await _body(request))
        stream = self._service.submit(call.submit)
        prefix = "chatcmpl" if chat else "cmpl"
        shape = Shape(chat, f"{prefix}-{secrets.token_hex(12)}", int(time.time()), call.submit.model)
        async with contextlib.aclosing(self._service.run(stream, "http")) as events:
            try:
                if call.stream:
                    return await _Sse(request, shape, include_usage=call.include_usage).send(events)
                return json_response(await _collect(events, shape))
            except SlowReader:
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("the client does not read") from None


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise TimedOut(f"the body did not come within {BODY_TIMEOUT_S:.0f} s") from None
    except web.RequestPayloadError:
        raise BadRequest("the body is broken") from None


async def _collect(events: AsyncGenerator[Event, None], shape: Shape) -> dict[str, Any]:
    """The whole answer. Raises what ended it otherwise."""
    texts: list[str] = []
    async for event in events:
        if event.ev == "text":
            texts.append(event.data["text"])
        elif event.ev == "done":
            return shape.whole("".join(texts), event.data)
        elif error := error_of(event):
            raise error
    raise Aborted("the generation was stopped")


class _Sse:
    """One answer as server-sent events."""

    def __init__(self, request: web.Request, shape: Shape, *, include_usage: bool) -> None:
        self._request = request
        self._shape = shape
        self._include_usage = include_usage
        self._response = web.StreamResponse(headers=_SSE_HEADERS)
        self._response.content_type = "text/event-stream"
        self._response.charset = "utf-8"
        self._deadline_s = time.monotonic() + HEADERS_AFTER_S

    async def send(self, events: AsyncGenerator[Event, None]) -> web.StreamResponse:
        """Write the events. Raises the error of a request that ends before the headers are out, SlowReader."""
        pending: asyncio.Task[Event] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(events))
                if not (await asyncio.wait([pending], timeout=max(0.0, self._deadline_s - time.monotonic())))[0]:
                    await self._write(_PING)
                    continue
                event, pending = pending.result(), None
                if await self._send_event(event):
                    await self._response.write_eof()
                    return self._response
        finally:
            if pending is not None:
                # The generator must not be closed while it runs.
                pending.cancel()
                await asyncio.wait([pending])

    async def _send_event(self, event: Event) -> bool:
        """Whether it was the last one."""
        match event.ev:
            case "accepted":
                first = self._shape.first()
                await self._write(_data(first) if first else _PING)
            case "text":
                await self._write(_data(self._shape.text(event.data["text"])))
            case "done":
                pieces = self._shape.last(event.data, include_usage=self._include_usage)
                await self._write(b"".join(map(_data, pieces)) + b"data: [DONE]\n\n")
                return True
            case "refused" | "failed" | "aborted":
                error = error_of(event) or Aborted("the generation was stopped")
                if not self._response.prepared:
                    raise error
                await self._write(_data(openai.error(error)))
                return True
            case "progress" if self._deadline_s <= time.monotonic():
                await self._write(_PING)
        return False

    async def _write(self, data: bytes) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._response.write(data)
        except TimeoutError:
            raise SlowReader from None
        self._deadline_s = time.monotonic() + PING_S


def _data(piece: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(piece) + b"\n\n"
