"""Hostile requests against a daemon of its own: each answered at once, none of them felt by anybody else."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from urllib.parse import urlsplit

import hostile
import pytest
from front_harness import Wire

from tierd.daemon.api import reading, web

WORK_S = 1.0  # of processor time of the front: what others feel, however busy the machine is
ANSWER_S = 20.0
LEAKS = re.compile(rb" at 0x[0-9a-f]|/home/|Traceback|/tmp/|\.py\b|File \"")
GROWTH_BYTES = 32 << 20


async def answer_to(port: int, data: bytes) -> bytes:
    """Everything that comes back until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(ANSWER_S):
            try:
                return await reader.read()
            except ConnectionError:
                return b""  # closed while we still wrote
    finally:
        writer.transport.abort()


async def http_port(wire: Wire) -> int:
    async with asyncio.timeout(60):
        while not (url := (await wire.call("status"))["http"]):  # noqa: ASYNC110  (another process has no event)
            await asyncio.sleep(0.02)
    return urlsplit(url).port


def rss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def work_s(pid: int) -> float:
    """Processor time that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def judge(case: hostile.Case, answer: bytes) -> None:
    """Raises for an answer that should not have been given."""
    shown = (case, answer[:600])
    assert hostile.MARK.encode() not in answer, shown
    assert not LEAKS.search(answer), shown
    if not answer:
        return  # cut off
    status = int(answer.split(None, 2)[1])
    assert status < 500 or status in (501, 503), shown
    if case.refused:
        assert status >= 400 or b'"error"' in answer, shown
    body = answer.partition(b"\r\n\r\n")[2]
    if status >= 400 and answer.startswith(b"HTTP/1.1") and body.startswith(b"{"):
        json.loads(body)


async def run_cases(daemon, count: int, seed: int) -> None:
    wire = await Wire.connect(daemon.socket)
    port = await http_port(wire)
    await wire.call("load", model="alpha")
    engine = (await wire.call("ps"))["engines"][0]["pid"]
    before = 0
    for number, case in enumerate(hostile.cases(count, seed)):
        worked_s = work_s(daemon.process.pid)
        try:
            answer = await answer_to(port, case.data)
        except TimeoutError:
            raise AssertionError(f"no end after {ANSWER_S:.0f} s: {case}") from None
        judge(case, answer)
        assert work_s(daemon.process.pid) - worked_s < WORK_S, case
        if number == min(200, count // 2):
            before = rss_bytes(daemon.process.pid)
    status = await wire.call("status")
    assert status["queue"]["live"] == 0 and [one["pid"] for one in status["engines"]] == [engine]
    assert rss_bytes(daemon.process.pid) - before < GROWTH_BYTES
    await wire.close()


def test_each_kind_is_answered_at_once(daemon):
    one = daemon(log="ERROR")
    one.wait()
    asyncio.run(run_cases(one, 80, seed=7))


@pytest.mark.long
def test_two_thousand_of_them(daemon):
    one = daemon(log="ERROR")
    one.wait()
    asyncio.run(run_cases(one, 2000, seed=11))


def test_every_kind_is_there():
    kinds = [case.kind for case in hostile.cases(160, seed=1)]
    assert len(set(kinds)) >= 20 and min(kinds.count(kind) for kind in set(kinds)) >= 2


@pytest.mark.parametrize("value", [b'"\\ud800"', b'"\xff"', b"01", b"nul", b"[1,]", b"1e9999", b'"\t"'])
async def test_fields_that_nobody_reads_are_checked_all_the_same(http, value):
    for path in (*hostile.CHATS, "/v1/completions", "/v1/responses", "/api/generate"):
        good = json.dumps({**hostile.chat(path), "prompt": "x", "input": "x"}).encode()
        for field in (b'{"zz":%b,', b'{"options":{"zz":%b},', b'{"user":%b,', b'{"tools":[%b],'):
            status, answer, _ = await http.post(path, field % value + good[1:])
            assert status < 500, (path, field, answer)


# -- slow ones -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dribble", [b"", b"G", b"GET / HTTP/1.1\r\nHost: localhost\r\nX", b"POST / HTTP/1.1\r\nHost: localhost\r\nX: y\r\n"]
)
async def test_headers_that_never_end(http, monkeypatch, dribble):
    monkeypatch.setattr(web, "KEEP_ALIVE_S", 0.3)
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    runner = await web.start(http.front.service, sock)
    reader, writer = await asyncio.open_connection(*sock.getsockname())
    writer.write(dribble)

    async def go_on() -> None:
        while True:
            await asyncio.sleep(0.05)
            writer.write(b"x")

    writing = asyncio.create_task(go_on() if dribble else asyncio.sleep(60))
    async with asyncio.timeout(10):
        answer = await reader.read()
    assert answer == b"" or b" 400 Bad Request\r\n" in answer  # to what can't become a request any more
    writing.cancel()
    await asyncio.wait([writing])
    writer.transport.abort()
    await runner.cleanup()


async def test_a_body_that_comes_by_drops(http, monkeypatch):
    monkeypatch.setattr(reading, "BODY_TIMEOUT_S", 0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    lines = ("Content-Type: application/json", "Content-Length: 1000000")
    writer.write(hostile.head("POST", "/v1/completions", *lines))

    async def go_on() -> None:
        while True:
            await asyncio.sleep(0.05)
            writer.write(b" ")

    writing = asyncio.create_task(go_on())
    async with asyncio.timeout(10):
        assert (await reader.readline()).split()[1] == b"504"
    writing.cancel()
    await asyncio.wait([writing])
    writer.transport.abort()
