from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from tierd.daemon.engine import link
from tierd.daemon.engine.link import Link
from tierd.daemon.errors import EngineFailed, ProtocolError
from tierd.daemon.protocol import Event, FrameDecoder, Request, encode


async def pair() -> tuple[Link, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    return Link(reader, writer), theirs


async def read(theirs: socket.socket, count: int) -> list[dict]:
    decoder, messages = FrameDecoder(), []
    while len(messages) < count:
        messages += decoder.feed(await asyncio.get_running_loop().sock_recv(theirs, 1 << 16))
    return messages


async def test_requests_and_events() -> None:
    one, theirs = await pair()
    frames = encode(Request(1, "status")) + encode(Request(2, "cancel", {"target": 9}))
    await asyncio.get_running_loop().sock_sendall(theirs, frames)
    requests = one.requests()
    assert [await anext(requests), await anext(requests)] == [Request(1, "status"), Request(2, "cancel", {"target": 9})]
    one.send(Event(1, "result", {"a": 1}), Event(2, "result"))
    assert [message["id"] for message in await read(theirs, 2)] == [1, 2]
    theirs.close()
    assert [left async for left in requests] == []
    await one.close(1.0)


async def test_a_request_that_makes_no_sense_is_answered() -> None:
    one, theirs = await pair()
    raw = encode(Request(5, "status")).replace(b"\xa2op\xa6status", b"\xa2op\x07")
    raw = (len(raw) - 4).to_bytes(4, "big") + raw[4:]
    await asyncio.get_running_loop().sock_sendall(theirs, raw)
    answer = await anext(one.requests())
    assert isinstance(answer, Event) and answer.id == 5 and answer.ev == "refused"
    await one.close(1.0)
    theirs.close()


async def test_bytes_that_are_no_frames_end_it() -> None:
    one, theirs = await pair()
    await asyncio.get_running_loop().sock_sendall(theirs, b"\xff" * 16)
    with pytest.raises(ProtocolError):
        await anext(one.requests())
    await one.close(1.0)
    theirs.close()


async def test_a_slow_front_makes_the_step_thread_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HIGH_BYTES", 1000)
    one, theirs = await pair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sent: list[int] = []

    def step() -> None:
        for number in range(1, 101):
            one.send_waiting([Event(number, "text", {"text": "x" * 20000})])
            sent.append(number)

    thread = threading.Thread(target=step)
    thread.start()
    await asyncio.sleep(0.3)
    assert len(sent) < 100  # 2 MB fit into no buffer here
    assert [message["id"] for message in await read(theirs, 100)] == list(range(1, 101))
    await asyncio.to_thread(thread.join, 5)
    assert len(sent) == 100
    await one.close(1.0)
    theirs.close()


async def test_a_front_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HIGH_BYTES", 1000)
    monkeypatch.setattr(link, "STALLED_S", 0.2)
    one, theirs = await pair()

    def step() -> None:
        for number in range(1, 1001):
            one.send_waiting([Event(number, "text", {"text": "x" * 20000})])

    with pytest.raises(EngineFailed, match="does not read"):
        await asyncio.to_thread(step)
    await one.close(0.1)
    theirs.close()


async def test_closing_writes_what_was_queued() -> None:
    one, theirs = await pair()
    thread = threading.Thread(target=one.send_waiting, args=([Event(3, "failed", {"code": "x"})],))
    thread.start()
    thread.join()
    reading = asyncio.create_task(read(theirs, 1))
    await one.close(1.0)
    assert (await reading)[0]["id"] == 3
    one.send(Event(4, "text"))  # nobody is there: dropped
    theirs.close()
