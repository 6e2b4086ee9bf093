"""A streamed answer over HTTP, with a dialect that says each event by its name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from front_harness import until

from tierd.daemon.api import sse, voice
from tierd.daemon.errors import EngineFailed, TierdError, TooBusy
from tierd.daemon.inbox import SlowReader
from tierd.daemon.protocol import Event

ACCEPTED, TEXT, DONE = (Event(1, name, {"text": "x"}) for name in ("accepted", "text", "done"))
FAILED = Event(1, "failed", {"code": "engine_failed", "message": "it died"})


class Plain:
    content_type = voice.EVENT_STREAM

    def say(self, event: Event) -> bytes:
        return b"" if event.ev == "accepted" else event.ev.encode() + b"\n"

    def ping(self) -> bytes:
        return b"ping\n"

    def fail(self, error: TierdError) -> bytes:
        return f"error {error.message}\n".encode()


class Last:
    def take(self, event: Event) -> object:
        return {"is": event.ev} if event.ev == "done" else None


class Server:
    """Sends the events of `script`: events, errors to raise, and seconds to wait."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session
        self.script: list[object] = []
        self.handle_next: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        self.closed = 0

    async def events(self):
        try:
            for step in self.script:
                if isinstance(step, Event):
                    yield step
                elif isinstance(step, Exception):
                    raise step
                else:
                    await asyncio.sleep(step)
        finally:
            self.closed += 1

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.handle_next is not None:
            self.closed += 1
            return await self.handle_next(request)
        events = self.events()
        try:
            voice = Plain if "whole" not in request.query else None
            return await sse.answer(request, contextlib.aclosing(events), voice, Last, {"x-extra": "1"})
        except TierdError as exc:
            return web.Response(status=exc.status, text=exc.message)
        finally:
            await events.aclose()

    async def ask(self, *script: object) -> tuple[int, list[str]]:
        self.script = list(script)
        async with self.session.get(self.url) as response:
            return response.status, (await response.text()).splitlines()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with aiohttp.ClientSession() as session:
        server = Server("", session)
        app = web.Application()
        app.router.add_get("/", server.handle)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        yield server
        await runner.cleanup()
    assert server.closed


async def test_events_up_to_the_end(server):
    assert await server.ask(ACCEPTED, TEXT, TEXT, DONE, TEXT) == (200, ["ping", "text", "text", "done"])


async def test_a_refusal_is_a_status(server):
    assert await server.ask(Event(1, "refused", {"code": "bad_request", "message": "no"})) == (400, ["no"])
    assert await server.ask(TooBusy("full")) == (503, ["full"])


async def test_a_failure_after_the_headers_is_the_last_line(server):
    assert await server.ask(ACCEPTED, TEXT, FAILED) == (200, ["ping", "text", "error it died"])
    assert await server.ask(ACCEPTED, EngineFailed("gone")) == (200, ["ping", "error gone"])
    assert (await server.ask(ACCEPTED, Event(1, "aborted")))[1][-1] == "error the generation was stopped"


async def test_pings_while_nothing_comes(server, monkeypatch):
    assert sse.PING_S <= 15.0  # proxies and clients give up at 30 and later
    monkeypatch.setattr(sse, "PING_S", 0.02)
    monkeypatch.setattr(sse, "HEADERS_AFTER_S", 0.02)
    status, lines = await server.ask(0.2, ACCEPTED, Event(1, "progress"), DONE)
    assert status == 200 and lines.count("ping") >= 4 and lines[-1] == "done"
    status, lines = await server.ask(0.1, TooBusy("full"))
    assert status == 200 and set(lines[:-1]) == {"ping"} and lines[-1] == "error full"


async def test_a_slow_reader_loses_its_connection(server):
    with pytest.raises(aiohttp.ClientError):
        await server.ask(ACCEPTED, TEXT, SlowReader())


async def test_an_answer_in_one_piece(server):
    async def whole(*script: object) -> tuple[int, str]:
        server.script = list(script)
        async with server.session.get(server.url + "?whole=1") as response:
            assert response.headers.get("x-extra") == "1" or response.status != 200
            return response.status, await response.text()

    assert await whole(ACCEPTED, TEXT, DONE) == (200, '{"is":"done"}')
    assert await whole(ACCEPTED, FAILED) == (500, "it died")
    assert await whole(TooBusy("full")) == (503, "full")
    assert await whole(ACCEPTED) == (499, "the generation was stopped")
    with pytest.raises(aiohttp.ClientError):
        await whole(ACCEPTED, SlowReader())


async def test_what_a_request_holds_is_free_before_its_client_has_read_the_end(server, monkeypatch):
    closed_at_the_end = []

    async def never_taken(response: web.StreamResponse, data: bytes = b"") -> None:
        closed_at_the_end.append(server.closed)
        await asyncio.Event().wait()

    monkeypatch.setattr(web.StreamResponse, "write_eof", never_taken)
    monkeypatch.setattr(sse, "WRITE_TIMEOUT_S", 0.05)
    with pytest.raises(aiohttp.ClientError):  # it is cut, and nobody waits for it for ever
        await server.ask(ACCEPTED, TEXT, DONE)
    assert closed_at_the_end[0] == 1


async def test_headers_that_nobody_takes_end_the_answer_too(server, monkeypatch):
    async def never_taken(response: web.StreamResponse, request: web.Request) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(web.StreamResponse, "prepare", never_taken)
    monkeypatch.setattr(sse, "WRITE_TIMEOUT_S", 0.05)
    with pytest.raises(aiohttp.ClientError):
        await server.ask(ACCEPTED, DONE)


async def test_headers(server):
    server.script = [DONE]
    async with server.session.get(server.url) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache" and response.headers["x-extra"] == "1"


async def test_a_client_that_goes_closes_the_events(server):
    server.script = [ACCEPTED, 30]
    async with server.session.get(server.url) as response:
        await response.content.readline()
    await until(lambda: server.closed)


async def test_nothing_is_made_of_a_request_that_is_refused(server):
    @contextlib.asynccontextmanager
    async def refusing():
        raise TooBusy("full")
        yield

    async def handle(request: web.Request) -> web.StreamResponse:
        def never():
            raise AssertionError

        with pytest.raises(TooBusy):
            await sse.answer(request, refusing(), never, never)
        return web.Response(text="refused")

    server.handle_next = handle
    server.script = []
    async with server.session.get(server.url) as response:
        assert await response.text() == "refused"
