"""The unix socket: who may speak, what is refused, and who is cut."""

from __future__ import annotations

import asyncio
import os
import stat

import msgspec
import pytest
from fake_engine import whole_text
from front_harness import Wire, set_options, text, until

from tierd.daemon import server as server_module
from tierd.daemon.errors import AlreadyRunning
from tierd.daemon.protocol import MAX_FRAME_BYTES, FrameDecoder, Submit, to_event
from tierd.daemon.server import Server

OPS_WITHOUT_MODEL = ["hello", "models", "status", "ps"]


async def answer_to(front, raw: bytes):
    """All events that raw bytes get until the connection ends."""
    wire = await front.connect()
    wire.writer.write(raw)
    events = []
    try:
        while True:
            events.append(await wire.next())
    except (EOFError, ConnectionError):
        return events
    finally:
        await wire.close()


async def test_modes_of_directory_and_socket(front):
    assert stat.S_IMODE(front.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(front.path.stat().st_mode) == 0o600


@pytest.mark.parametrize("op", OPS_WITHOUT_MODEL)
async def test_lists_answer_at_once_while_a_model_loads(front, op):
    set_options(front.settings.models_dir / "alpha", start_s=60.0)
    wire = await front.connect()
    wire.generate(1, "x", max_tokens=2)
    await wire.next()
    data = await wire.call(op)
    assert front.service.state == "loading"  # it was not waited for
    if op == "status":
        assert data["state"] == "loading" and data["engines"][0]["state"] == "starting"
    if op == "models":
        assert [model["name"] for model in data["models"]] == ["alpha", "beta"]
    await wire.close()


async def test_status_ps_show_load_unload(front):
    wire = await front.connect()
    assert (await wire.call("status"))["state"] == "idle"
    loaded = await wire.call("load", model="alpha")
    assert loaded["model"] == "alpha" and loaded["context"] == 4096
    (row,) = (await wire.call("ps"))["engines"]
    assert row["state"] == "ready" and row["rss_bytes"] > 1 << 20 and 890 < row["expires_in_s"] <= 900
    status = await wire.call("status")
    assert status["model"] == "alpha" and status["tiers"]["device"]["used_pages"] == 3
    assert (await wire.call("show", model="alpha"))["context"] == 4096
    assert await wire.call("unload", model="alpha") == {"unloaded": ["alpha"]}
    assert await wire.call("unload", model="alpha") == {"unloaded": []}
    assert (front.settings.models_dir / "alpha" / "flushed").exists()
    assert (await wire.call("unload", all=True)) == {"unloaded": []}
    await wire.close()


async def test_calls_that_reach_the_engine(front):
    wire = await front.connect()
    assert (await wire.call("tokenize", model="alpha", text="abc"))["tokens"]
    assert (await wire.call("cache", action="verify", model="alpha"))["engines"]["alpha"]["problems"] == []
    assert "alpha" in (await wire.call("cache", action="clear", yes=True))["engines"]
    (store,) = (await wire.call("cache", action="ls"))["namespaces"]
    assert store["model"] == "alpha" and store["open"]
    await wire.close()


@pytest.mark.parametrize(
    ("op", "args", "code", "word"),
    [
        ("nonsense", {}, "unsupported_parameter", "nonsense"),
        ("statu", {}, "unsupported_parameter", "status"),
        ("show", {"model": "gamma"}, "model_not_found", "gamma"),
        ("show", {"model": "../alpha"}, "bad_request", "model"),
        ("show", {}, "bad_request", "model"),
        ("show", {"model": "alpha", "x": 1}, "bad_request", "x"),
        ("load", {"model": "gamma"}, "model_not_found", "gamma"),
        ("cache", {"action": "clear"}, "bad_request", "confirmed"),
        ("cache", {"action": "burn"}, "bad_request", "verify"),
        ("cache", {"action": "gc", "repair": True}, "bad_request", "repair"),
        ("tokenize", {"model": "alpha"}, "bad_request", "text"),
        ("unload", {}, "bad_request", "model"),
        ("drain", {"timeout_s": -1}, "bad_request", "timeout_s"),
        ("pages", {"model": "alpha"}, "not_found", "alpha is not loaded"),
        ("top", {"model": "alpha"}, "not_found", "alpha is not loaded"),
        ("page", {"model": "alpha", "tier": "device", "slot": 1}, "not_found", "alpha is not loaded"),
        ("prefix", {"model": "alpha", "action": "ls"}, "not_found", "alpha is not loaded"),
        ("cancel_request", {"model": "alpha", "request": 1}, "not_found", "alpha is not loaded"),
        ("generate", {"model": "gamma", "prompt": "x"}, "model_not_found", "gamma"),
        ("generate", {"model": "alpha", "prompt": ""}, "bad_request", "empty"),
        ("generate", {"model": "alpha", "messages": []}, "bad_request", "empty"),
        ("generate", {"model": "alpha", "prompt": "x", "tenant": "root"}, "unsupported_parameter", "tenant"),
        ("generate", {"model": "alpha", "prompt": "x", "resume": [1]}, "unsupported_parameter", "resume"),
        ("generate", {"model": "alpha", "prompt": "x", "sampling": {"max_tokens": 0}}, "bad_request", "max_tokens"),
        ("generate", {"model": "alpha", "prompt": "x", "sampling": {"max_tokens": 1 << 40}}, "bad_request", "4096"),
        ("generate", {"model": "alpha", "prompt": "x", "samplin": {}}, "unsupported_parameter", "sampling"),
    ],
)
async def test_errors_name_what_is_wrong(front, op, args, code, word):
    wire = await front.connect()
    wire.send(7, op, **args)
    (event,) = await wire.until_end(7)
    assert event.ev == "refused" and event.data["code"] == code
    assert word in f"{event.data}"
    assert (await wire.call("hello"))["protocol"] == 1
    await wire.close()


def frame(data) -> bytes:
    payload = data if isinstance(data, bytes) else msgspec.msgpack.encode(data)
    return len(payload).to_bytes(4, "big") + payload


@pytest.mark.parametrize(
    "raw",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\xff" * 4,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        frame(b"\xc1"),
        frame(b"\x80\x80"),
        frame([1, 2]),
        frame({"v": 2, "id": 1, "op": "hello"}),
        frame(b"\x91" * 100_000 + b"\x90"),
        frame(b"\x81\xa1a\xc7\x01\x05x"),
    ],
)
async def test_malformed_frames_end_the_connection_and_nothing_else(front, raw):
    bystander = await front.connect()
    events = await answer_to(front, raw)
    assert [(event.id, event.ev, event.data["code"]) for event in events] == [(0, "refused", "protocol_error")]
    assert (await bystander.call("status"))["state"] == "idle"
    await bystander.close()


async def test_whole_frames_before_a_broken_one_are_answered(front):
    hello = frame({"v": 1, "id": 1, "op": "hello"})
    events = await answer_to(front, hello + b"\xff" * 8)
    assert events[-1].data["code"] == "protocol_error"


@pytest.mark.parametrize(
    "bad",
    [{"id": 1}, {"id": "x", "op": "hello"}, {"id": -1, "op": "hello"}, {"id": 1, "op": 5},
     {"id": 1, "op": "hello", "args": []}, {"id": 1, "op": "hello", "extra": 1}],
)  # fmt: skip
async def test_a_wrong_envelope_is_refused_and_the_connection_goes_on(front, bad):
    wire = await front.connect()
    wire.writer.write(frame({"v": 1, **bad}))
    event = await wire.next()
    assert event.ev == "refused" and event.data["code"] in ("bad_request", "unsupported_parameter")
    assert (await wire.call("hello"))["pid"] == os.getpid()
    await wire.close()


async def test_an_id_in_use_is_refused_without_touching_its_owner(front):
    set_options(front.settings.models_dir / "alpha", token_s=0.01)
    wire = await front.connect()
    wire.generate(1, "one", max_tokens=30, temperature=0)
    wire.generate(1, "two", max_tokens=30, temperature=0)
    events = []
    while not events or events[-1].ev != "done":
        events.append(await wire.next())
    refused = [event for event in events if event.ev == "refused"]
    assert [event.id for event in refused] == [0] and "in use" in refused[0].data["message"]
    assert text(events) == whole_text("one", 30)
    await wire.close()


async def test_a_client_that_is_gone_stops_its_generation(front):
    set_options(front.settings.models_dir / "alpha", token_s=0.01)
    wire = await front.connect()
    wire.generate(1, "long", max_tokens=4000)
    while (await wire.next()).ev != "text":
        pass
    await wire.close()
    await until(lambda: front.service.live == 0, 1.0)
    assert front.engine().streams == 0
    watcher = await front.connect()
    assert (await watcher.call("status"))["engines"][0]["cancelled"] == 1
    await watcher.close()


async def test_a_client_that_leaves_while_the_model_loads(front):
    set_options(front.settings.models_dir / "alpha", start_s=0.5)
    wire = await front.connect()
    wire.generate(1, "early")
    await wire.next()
    await wire.close()
    await until(lambda: front.service.live == 0, 0.4)
    assert not front.supervisor._waiters


async def test_200_clients_at_once(front):
    wires = await asyncio.gather(*(front.connect() for _ in range(200)))
    for number, wire in enumerate(wires):
        wire.generate(1, f"client {number}", max_tokens=8, temperature=0)
    answers = await asyncio.gather(*(wire.until_end(1) for wire in wires))
    assert [text(events) for events in answers] == [whole_text(f"client {n}", 8) for n in range(200)]
    assert {events[-1].ev for events in answers} == {"done"}
    await asyncio.gather(*(wire.close() for wire in wires))
    await until(lambda: front.server.connections == 0, 2.0)


async def test_many_requests_on_one_connection(front):
    wire = await front.connect()
    for number in range(1, 101):
        wire.generate(number, f"r{number}", max_tokens=4, temperature=0)
    texts = dict.fromkeys(range(1, 101), "")
    ended = 0
    while ended < 100:
        event = await wire.next()
        if event.ev == "text":
            texts[event.id] += event.data["text"]
        ended += event.ev == "done"
    assert texts == {number: whole_text(f"r{number}", 4) for number in texts}
    await wire.close()


async def test_too_many_requests_on_a_connection_and_in_the_queue(front, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_REQUESTS", 2)
    wire = await front.connect()
    for number in (1, 2, 3):
        wire.generate(number, "!hang")
    (event,) = await wire.until_end(3)
    assert event.ev == "refused" and event.data["code"] == "overloaded"
    await wire.close()


async def test_the_queue_has_a_bound(front):
    bound = front.settings.max_queue + front.settings.max_streams
    waiting = [front.service.submit(Submit("alpha", prompt="x")) for _ in range(bound)]
    wire = await front.connect()
    wire.generate(1, "one too many")
    (event,) = await wire.until_end(1)
    assert event.ev == "refused" and event.data["code"] == "overloaded"
    front.service.release(waiting.pop())
    wire.generate(2, "there is room again")
    assert (await wire.until_end(2))[-1].ev == "done"
    for stream in waiting:
        front.service.release(stream)
    await wire.close()


async def test_a_reader_that_stands_still_is_cut_and_others_do_not_notice(front, monkeypatch):
    monkeypatch.setattr(server_module, "WRITE_TIMEOUT_S", 0.3)
    slow, quick = await front.connect(), await front.connect()
    slow.writer.transport.pause_reading()
    slow.generate(1, "!big=4000", max_tokens=4000)
    quick.generate(1, "quick", max_tokens=200, temperature=0)
    assert text(await quick.until_end(1)) == whole_text("quick", 200)
    await until(lambda: front.server.connections == 1)
    assert front.service.live == 0 and front.engine().streams == 0
    slow.writer.transport.abort()
    await quick.close()


async def test_a_stranger_is_not_answered(front):
    front.server._allowed_uids = frozenset({12345})
    wire = await front.connect()
    wire.send(1, "hello")
    with pytest.raises((EOFError, ConnectionError)):
        await wire.next()
    await wire.close()


async def test_another_user_gets_a_tenant_of_its_own(front, monkeypatch):
    monkeypatch.setattr(server_module, "peer_uid", lambda sock: 4321)
    front.server._allowed_uids = frozenset({4321})
    seen = []
    monkeypatch.setattr(front.service, "submit", lambda submit, tenant, **_: seen.append(tenant) or 1 / 0)
    wire = await front.connect()
    wire.generate(1, "x")
    with pytest.raises((EOFError, ConnectionError)):
        await wire.next()
    assert seen == ["uid:4321"]
    await wire.close()


async def test_a_failing_operation_tells_no_internals(front, monkeypatch):
    async def boom():
        raise RuntimeError("secret at 0xdead")

    monkeypatch.setattr(front.service, "models", boom)
    wire = await front.connect()
    wire.send(1, "models")
    (event,) = await wire.until_end(1)
    assert event.ev == "failed" and event.data["code"] == "internal_error" and "secret" not in str(event.data)
    await wire.close()


async def test_long_operations_show_that_they_live(front, monkeypatch):
    monkeypatch.setattr(server_module, "PROGRESS_S", 0.05)
    set_options(front.settings.models_dir / "alpha", start_s=0.6)
    wire = await front.connect()
    wire.send(1, "load", model="alpha")
    stages = set()
    while (event := await wire.next()).ev != "result":
        stages.add((event.data["stage"], event.data["done"]))
    assert {("weights", 0), ("weights", 1), ("weights", 2)} <= stages
    await wire.close()


async def test_drain_refuses_new_work_and_waits_for_the_old(front):
    set_options(front.settings.models_dir / "alpha", token_s=0.01)
    wire = await front.connect()
    wire.generate(1, "old", max_tokens=30)
    while (await wire.next()).ev != "text":
        pass
    other = await front.connect()
    other.send(1, "drain", timeout_s=5)
    await until(lambda: front.service.draining)
    late = await front.connect()
    late.generate(1, "new")
    (event,) = await late.until_end(1)
    assert event.ev == "refused" and event.data["code"] == "draining"
    assert (await wire.until_end(1))[-1].ev == "done"
    assert (await other.until_end(1))[0].data == {"left": 0}
    for one in (wire, other, late):
        await one.close()


async def test_close_ends_connections_and_what_runs_on_them(front):
    set_options(front.settings.models_dir / "alpha", token_s=0.01)
    wire = await front.connect()
    wire.generate(1, "long", max_tokens=4000)
    while (await wire.next()).ev != "text":
        pass
    await front.server.close()
    assert front.service.live == 0
    wire.writer.transport.abort()


async def test_random_bytes_never_stop_the_daemon(front):
    import random

    rng = random.Random(7)
    good = frame({"v": 1, "id": 1, "op": "status", "args": {}})
    for _ in range(60):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        wire = await front.connect()
        wire.writer.write(bytes(raw))
        wire.writer.write_eof()
        try:
            async with asyncio.timeout(5):
                while data := await wire.reader.read(65536):
                    for message in FrameDecoder().feed(data):
                        to_event(message)
        except ConnectionError:
            pass
        await wire.close()
    wire = await Wire.connect(front.path)
    assert (await wire.call("status"))["state"] == "idle"
    await wire.close()


def test_server_accepts_only_its_user_and_root():
    assert Server.__init__.__defaults__ == (frozenset({os.getuid(), 0}),)


async def test_a_second_daemon_on_the_socket_is_refused(front):
    from tierd.daemon.door import Door

    with pytest.raises(AlreadyRunning, match=str(os.getpid())):
        Door(front.path)
