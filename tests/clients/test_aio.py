"""The asyncio client over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from fake_front import USAGE, FakeFront

from tierd.clients import AsyncClient
from tierd.clients.aio import INBOX_EVENTS, _Inbox, _joined
from tierd.clients.common import EMBED_INPUTS
from tierd.daemon.errors import (
    BadRequest,
    ContextLengthExceeded,
    DaemonUnreachable,
    EngineFailed,
    ModelNotFound,
    ProtocolError,
    TimedOut,
)
from tierd.daemon.protocol import Event, Sampling, Submit


@pytest.fixture
def front(tmp_path: Path) -> Iterator[FakeFront]:
    with FakeFront(tmp_path / "s") as front:
        yield front


@pytest.fixture
async def client(front: FakeFront) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(front.path) as client:
        yield client
    assert client.statistics()[:2] == (0, 0), "no request state is left"


def ask(prompt: str) -> Submit:
    return Submit(model="m", prompt=prompt)


async def collect(client: AsyncClient, prompt: str) -> list[Event]:
    return [event async for event in client.generate(ask(prompt))]


async def test_call(client: AsyncClient, front: FakeFront) -> None:
    front.answers["load"] = {"model": "m"}
    seen: list[Event] = []
    assert await client.call("load", model="m", on_progress=seen.append) == {"model": "m"}
    assert [event.data["done"] for event in seen] == [0, 5, 10]


async def test_vectors_of_many_inputs_come_in_parts(client: AsyncClient, front: FakeFront) -> None:
    front.answers["embed"] = {"vectors": [array("f", [0.0, 1.0]).tobytes()] * EMBED_INPUTS, "usage": {}}
    found = await client.embed("m", ["a"] * EMBED_INPUTS + [[1, 2]] * EMBED_INPUTS, dimensions=2)
    assert len(found) == 2 * EMBED_INPUTS and found[0].tolist() == [0.0, 1.0]
    asked = [request.args for request in front.requests if request.op == "embed"]
    assert [len(args["inputs"]) for args in asked] == [EMBED_INPUTS] * 2
    assert asked[1]["inputs"][0] == [1, 2] and asked[0]["dimensions"] == 2


async def test_what_no_frame_can_hold_is_a_bad_request(client: AsyncClient, front: FakeFront) -> None:
    with pytest.raises(BadRequest, match="sampling.seed is a number beyond 64 bits"):
        await anext(client.generate(Submit(model="m", prompt="p", sampling=Sampling(seed=1 << 64))))
    with pytest.raises(BadRequest, match="model is not valid text"):
        await client.call("show", model="\udcff")
    assert await client.call("ps") == {"engines": []}


async def test_call_raises_the_error_of_the_daemon(client: AsyncClient, front: FakeFront) -> None:
    front.answers["show"] = ModelNotFound("no such model")
    with pytest.raises(ModelNotFound):
        await client.call("show", model="m")
    assert await client.call("ps") == {"engines": []}


async def test_generate(client: AsyncClient) -> None:
    events = await collect(client, "echo one two")
    assert [event.ev for event in events] == ["accepted", "text", "text", "done"]
    assert events[-1].data["usage"] == USAGE


async def test_unknown_events_pass(client: AsyncClient) -> None:
    assert [event.ev for event in await collect(client, "noise")] == ["accepted", "weather", "done"]


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("refuse", ContextLengthExceeded),
        ("fail", EngineFailed),
        ("drop", DaemonUnreachable),
        ("garbage", ProtocolError),
    ],
)
async def test_generate_raises_typed_errors(client: AsyncClient, prompt: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        await collect(client, prompt)


async def test_many_at_once_on_one_connection(client: AsyncClient, front: FakeFront) -> None:
    prompts = [f"echo {' '.join([str(number)] * 20)}" for number in range(40)]
    collected, engines = await asyncio.gather(
        asyncio.gather(*(collect(client, prompt) for prompt in prompts)), client.call("ps")
    )
    assert engines == {"engines": []}
    for number, events in enumerate(collected):
        text = "".join(event.data["text"] for event in events if event.ev == "text")
        assert text == f"{number} " * 20
        assert [event.ev for event in events].count("done") == 1
    assert front.connections == 1


async def test_calls_go_on_while_a_stream_is_open(client: AsyncClient) -> None:
    async with contextlib.aclosing(client.generate(ask("slow"))) as events:
        assert (await anext(events)).ev == "accepted"
        assert await client.call("ps") == {"engines": []}


async def test_a_slow_reader_stays_bounded_and_blocks_nobody(client: AsyncClient) -> None:
    count = 20 * INBOX_EVENTS
    async with contextlib.aclosing(client.generate(ask(f"flood {count}"))) as events:
        first = await anext(events)
        while client.statistics().merged_events < 10 * INBOX_EVENTS:
            assert await client.call("ps") == {"engines": []}
        assert client.statistics().waiting_events <= INBOX_EVENTS + 1
        rest = [event async for event in events]
    assert first.ev == "accepted"
    assert "".join(event.data["text"] for event in rest[:-1]) == "".join(f"{number} " for number in range(count))
    assert sum((event.data["tokens"] for event in rest[:-1]), []) == list(range(count))
    assert rest[-1].ev == "done"


async def test_aclose_cancels(client: AsyncClient, front: FakeFront) -> None:
    async with contextlib.aclosing(client.generate(ask("slow"))) as events:
        async for event in events:
            if event.ev == "text":
                break
    assert await asyncio.to_thread(front.wait_for_cancel) == [1]
    assert await client.call("ps") == {"engines": []}


async def test_cancelling_the_reading_task_cancels(client: AsyncClient, front: FakeFront) -> None:
    task = asyncio.create_task(collect(client, "slow"))
    await asyncio.to_thread(front.wait_for_submit)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(front.wait_for_cancel) == [1]


async def test_silence_has_a_deadline(client: AsyncClient, front: FakeFront) -> None:
    with pytest.raises(TimedOut):
        async for _ in client.generate(ask("silent"), wait_s=0.05):
            pass
    assert await asyncio.to_thread(front.wait_for_cancel) == [1]


async def test_a_lost_connection_is_told_to_all_and_to_later_ones(front: FakeFront) -> None:
    async with AsyncClient(front.path) as client:
        waiting = [asyncio.create_task(collect(client, "silent")) for _ in range(3)]
        await asyncio.sleep(0.05)
        with pytest.raises(DaemonUnreachable):
            await collect(client, "drop")
        for task in waiting:
            with pytest.raises(DaemonUnreachable):
                await task
        with pytest.raises(DaemonUnreachable):
            await client.call("ps")
        await client.connect()
        assert await client.call("ps") == {"engines": []}


async def test_closing_the_client_ends_its_requests(front: FakeFront) -> None:
    client = await AsyncClient(front.path).connect()
    task = asyncio.create_task(collect(client, "slow"))
    await asyncio.to_thread(front.wait_for_submit)
    await client.aclose()
    await client.aclose()
    with pytest.raises(DaemonUnreachable):
        await task


async def test_a_cancel_while_it_closes_leaves_no_socket_open(front: FakeFront) -> None:
    client = await AsyncClient(front.path).connect()
    assert await client.call("ps") == {"engines": []}  # the other side knows the connection, and closes it in the end
    writer = client._writer
    assert writer is not None
    closing = asyncio.create_task(client.aclose())
    await asyncio.sleep(0)  # it waits for the reader now
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert writer.is_closing()
    await client.aclose()


async def test_no_socket_and_stale_socket(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable, match="no daemon runs"):
        await AsyncClient(tmp_path / "none").connect()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "stale"))
    with pytest.raises(DaemonUnreachable, match="left over"):
        await AsyncClient(tmp_path / "stale").connect()
    with pytest.raises(DaemonUnreachable):
        await AsyncClient(tmp_path / ("x" * 200)).connect()


async def test_a_message_that_is_too_large(client: AsyncClient) -> None:
    with pytest.raises(ProtocolError):
        await collect(client, "x" * (17 << 20))
    assert await client.call("ps") == {"engines": []}


async def test_prefixes_and_sizes(client: AsyncClient, front: FakeFront) -> None:
    front.answers["prefix"] = {"model": "m", "prefixes": [{"id": "ab"}], "total": 1, "pages": 4}
    front.answers["resize"] = {"model": "m", "device_bytes": 5}
    assert await client.prefixes(limit=7) == [{"id": "ab"}]
    assert front.requests[-1].args == {"action": "ls", "model": None, "limit": 7}
    for verb, call in (("pin", client.pin), ("unpin", client.unpin), ("drop", client.drop)):
        assert await call("abcd", model="m") == 4
        assert front.requests[-1].args == {"action": verb, "model": "m", "id": "abcd"}
    assert await client.resize(device_bytes=5, timeout_s=2.0) == {"model": "m", "device_bytes": 5}
    assert front.requests[-1].args == {"model": None, "timeout_s": 2.0, "device_bytes": 5, "host_bytes": None}


def _bridge(front: FakeFront) -> tuple[str, ...]:
    return (sys.executable, "-m", "tierd.daemon.cli", "--socket", str(front.path), "proxy")


async def test_a_command_can_stand_for_the_socket(front: FakeFront) -> None:
    async with AsyncClient("ssh somewhere", _bridge(front)) as client:
        events = await collect(client, "one two three")
        assert events[-1].ev == "done"


async def test_a_bridge_that_fails_says_why() -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('ssh: no such host')")
    async with AsyncClient("ssh nowhere", command) as client:
        with pytest.raises(DaemonUnreachable, match="no such host"):
            await client.call("ps")


async def test_a_bridge_may_say_more_than_its_pipe_holds(front: FakeFront, tmp_path: Path) -> None:
    # As `ssh -v` does: a pipe that nobody reads holds 64 KiB and then stops its writer.
    script = tmp_path / "bridge.py"
    script.write_text(
        "import os, sys\n"
        "for _ in range(64): sys.stderr.write('debug1: ' + 'x' * 8000 + chr(10))\n"
        "sys.stderr.flush()\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    async with AsyncClient("ssh somewhere", (sys.executable, str(script), *_bridge(front))) as client:
        assert (await collect(client, "one two three"))[-1].ev == "done"


async def test_a_bridge_that_does_not_exist_says_so() -> None:
    with pytest.raises(DaemonUnreachable, match="cannot run /no/such/thing"):
        await AsyncClient("ssh nowhere", ("/no/such/thing",)).connect()


async def test_a_slow_reader_never_gets_two_answers_mixed() -> None:
    first = Event(1, "text", {"text": "a", "tokens": [1], "choice": 0})
    assert _joined(first, Event(1, "text", {"text": "b", "tokens": [2], "choice": 1})) is None
    joined = _joined(first, Event(1, "text", {"text": "b", "tokens": [2], "choice": 0, "thinking": "hm"}))
    assert joined == Event(1, "text", {"text": "ab", "tokens": [1, 2], "choice": 0, "thinking": "hm"})


@pytest.mark.parametrize("answers", [1, 8])
async def test_what_waits_for_a_reader_that_stands_still_is_bounded(answers: int) -> None:
    inbox = _Inbox()
    for number in range(20_000):
        inbox.put(Event(1, "text", {"text": "x", "tokens": [number], "choice": number % answers}))
    assert inbox.waiting <= INBOX_EVENTS + answers
    tokens: dict[object, list[int]] = {}
    for _ in range(inbox.waiting):
        event = await inbox.get()
        assert len(event.data["text"]) == len(event.data["tokens"])
        tokens.setdefault(event.data["choice"], []).extend(event.data["tokens"])
    assert tokens == {answer: list(range(answer, 20_000, answers)) for answer in range(answers)}
