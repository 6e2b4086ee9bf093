"""Frames: every cut gives the same messages, and nothing but ProtocolError comes out of bad bytes."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from tierd.daemon.errors import BadRequest, ProtocolError, Unsupported
from tierd.daemon.protocol import (
    MAX_DEPTH,
    VERSION,
    Event,
    FrameDecoder,
    Message,
    Request,
    Sampling,
    Submit,
    check_structure,
    encode,
    to_event,
    to_request,
    to_submit,
)

SUBMIT = Submit(
    model="m",
    messages=(Message("user", "grüße 🦜"),),
    sampling=Sampling(temperature=0.5, logit_bias={5: -1.0, 70000: 2.5}, stop=("a", "b")),
)
MESSAGES: list[Request | Event] = [
    Request(1, "generate", msgspec.msgpack.decode(msgspec.msgpack.encode(SUBMIT))),  # lists, as they come back
    Event(1, "text", {"text": "hé", "tokens": [1, 300, 70000]}),
    Request(2, "status"),
    Event(2, "result", {"a": None, "b": True, "c": -5, "d": 1.5, "e": b"\x00" * 300, "f": "x" * 70000, "g": 1 << 40}),
    Event(3, "result", {"many": list(range(70000)), "neg": [-1, -40, -200, -70000, -(1 << 40)]}),
]
STREAM = b"".join(encode(message) for message in MESSAGES)


def frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def wrapped(value: bytes) -> bytes:
    """A sound envelope whose `args` is these msgpack bytes."""
    return frame(b"\x84\xa1v\x01\xa2id\x01\xa2op\xa1x\xa4args" + value)


def decode_all(data: bytes) -> list[dict[str, Any]]:
    return FrameDecoder().feed(data)


def test_round_trip() -> None:
    back = [to_request(m) if "op" in m else to_event(m) for m in decode_all(STREAM)]
    assert back == MESSAGES
    assert isinstance(back[0], Request)
    assert to_submit(back[0].args) == SUBMIT


def test_the_version_is_on_the_wire() -> None:
    assert decode_all(encode(Request(1, "ps")))[0]["v"] == VERSION


def test_every_cut_gives_the_same_messages() -> None:
    small = b"".join(encode(message) for message in MESSAGES[:3])
    expected = decode_all(small)
    for cut in range(len(small) + 1):
        decoder = FrameDecoder()
        assert decoder.feed(small[:cut]) + decoder.feed(small[cut:]) == expected
        assert decoder.buffered_bytes == 0
    decoder = FrameDecoder()
    assert [m for byte in small for m in decoder.feed(bytes([byte]))] == expected


def test_random_pieces_of_a_long_stream() -> None:
    expected = decode_all(STREAM)
    rng = random.Random(1)
    for _ in range(20):
        decoder, got, at = FrameDecoder(), [], 0
        while at < len(STREAM):
            step = rng.choice([1, 3, 100, 5000, 65536])
            got += decoder.feed(STREAM[at : at + step])
            at += step
        assert got == expected


def test_a_cut_stream_is_seen() -> None:
    decoder = FrameDecoder()
    decoder.feed(STREAM[:-1])
    assert decoder.buffered_bytes > 0


BAD: list[tuple[str, bytes, str]] = [
    ("too long", struct.pack(">I", (16 << 20) + 1), "the limit is"),
    ("huge length", b"\xff\xff\xff\xff", "the limit is"),
    ("empty", frame(b""), "ends inside"),
    ("not a map", frame(b"\x93\x01\x02\x03"), "not a map"),
    ("a string", frame(b"\xa1x"), "not a map"),
    ("no version", frame(b"\x81\xa2id\x01"), "protocol version none"),
    ("other version", frame(b"\x81\xa1v\x02"), "protocol version 2"),
    ("version true", frame(b"\x81\xa1v\xc3"), "protocol version none"),
    ("trailing", frame(b"\x81\xa1v\x01\x00"), "1 bytes after"),
    ("utf-8", wrapped(b"\xa2\xff\xff"), "UTF-8"),
    ("utf-8 key", frame(b"\x81\xa1\xff\x01"), "UTF-8"),
    ("ext", wrapped(b"\xd4\x05\x00"), "ext types"),
    ("timestamp", wrapped(b"\xd6\xff\x00\x00\x00\x00"), "ext types"),
    ("ext8", wrapped(b"\xc7\x01\x05\x00"), "ext types"),
    ("reserved", wrapped(b"\xc1"), "0xc1"),
    ("deep list", wrapped(b"\x91" * MAX_DEPTH + b"\x00"), "levels deep"),
    ("deep map", wrapped(b"\x81\xa1a" * MAX_DEPTH + b"\x00"), "levels deep"),
    ("very deep", wrapped(b"\x91" * 100_000 + b"\x00"), "levels deep"),
    ("many values", wrapped(b"\xdd\x00\x20\x00\x00" + b"\x90" * (1 << 21)), "values in one frame"),
    ("count without values", wrapped(b"\xdd\xff\xff\xff\xff"), "values in one frame"),
    ("map count", wrapped(b"\xdf\x7f\xff\xff\xff"), "values in one frame"),
    ("cut list", wrapped(b"\x92\x01"), "ends inside"),
    ("cut text", wrapped(b"\xdb\x00\x00\x00\x09abc"), "ends inside"),
    ("cut length", wrapped(b"\xda\x01"), "ends inside"),
    ("cut number", wrapped(b"\xcb\x00\x00"), "ends inside"),
    ("list key", frame(b"\x81\x91\x01\x01"), "map key"),
    ("nil key", frame(b"\x81\xc0\x01"), "map key"),
    ("float key", frame(b"\x81\xca\x00\x00\x00\x00\x01"), "map key"),
]


@pytest.mark.parametrize(("data", "reason"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_frames_name_the_reason(data: bytes, reason: str) -> None:
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError, match=reason):
        decoder.feed(data)
    with pytest.raises(ProtocolError, match=reason):
        decoder.feed(encode(Request(1, "ps")))
    assert decoder.buffered_bytes == 0


@pytest.mark.parametrize(("data", "reason"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_messages_before_a_fault_are_not_lost_with_it(data: bytes, reason: str) -> None:
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError):
        decoder.feed(encode(Request(7, "ps")) + data)
    assert [message["id"] for message in decoder.salvaged] == [7]


def test_a_long_frame_is_refused_before_its_bytes_come() -> None:
    decoder = FrameDecoder(max_frame_bytes=100)
    with pytest.raises(ProtocolError, match="frame of 101 bytes, the limit is 100"):
        decoder.feed(struct.pack(">I", 101))
    assert FrameDecoder(max_frame_bytes=100).feed(struct.pack(">I", 100)) == []


def test_the_depth_limit_is_exact() -> None:
    check_structure(b"\x91" * MAX_DEPTH + b"\x00")
    with pytest.raises(ProtocolError):
        check_structure(b"\x91" * (MAX_DEPTH + 1) + b"\x00")


def test_encode_refuses_what_nobody_would_accept() -> None:
    with pytest.raises(ProtocolError, match="a frame holds 64"):
        encode(Event(1, "text", {"text": "x" * 100}), max_frame_bytes=64)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A frame with its bytes changed, removed, doubled or replaced, its length kept right or not."""
    body = bytearray(data[4:])
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body)) if body else 0
        match rng.randrange(5):
            case 0 if body:
                body[at] = rng.randrange(256)
            case 1 if body:
                del body[at : at + rng.randint(1, 4)]
            case 2:
                body[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 6)))
            case 3 if body:
                body[at:at] = body[at : at + rng.randint(1, 20)]
            case _:
                body[at:at] = rng.choice([b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 70, b"\xd6\xff0000", b"\x80"])
    return data[: rng.randint(0, 4)] + bytes(body) if rng.random() < 0.1 else frame(bytes(body))


def fuzz(count: int) -> None:
    rng = random.Random(count)
    progress = Event(9, "progress", {"stage": "x", "done": 1, "total": 9})
    seeds = [encode(message) for message in (*MESSAGES[:3], progress)]
    refused = 0
    for _ in range(count):
        data = mutate(rng.choice(seeds), rng)
        decoder = FrameDecoder()
        try:
            messages = decoder.feed(data)
        except ProtocolError:
            refused += 1
            continue
        for message in messages:
            try:
                request = to_request(message) if "op" in message else to_event(message)
                if isinstance(request, Request):
                    to_submit(request.args)
            except BadRequest:
                refused += 1
    assert count // 2 < refused < count, "most mutants are refused, and some get through: the fuzz reaches both"


def test_fuzz() -> None:
    fuzz(20_000)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fuzz_long() -> None:
    fuzz(500_000)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"v": 1, "id": "a", "op": "ps"}, "id"),
        ({"v": 1, "id": -1, "op": "ps"}, "id"),
        ({"v": 1, "id": 1 << 63, "op": "ps"}, "id"),
        ({"v": 1, "id": 1}, "op"),
        ({"v": 1, "id": 1, "op": 5}, "op"),
        ({"v": 1, "id": 1, "op": "ps", "args": []}, "args"),
        ({"v": 1, "id": 1, "op": "ps", "extra": 1}, None),
    ],
)
def test_bad_requests(message: dict[str, Any], param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        to_request(message)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("args", "error", "param"),
    [
        ({"model": "m", "foo": 1}, Unsupported, "foo"),
        ({"model": "m", "sampling": {"topk": 1}}, Unsupported, "sampling.topk"),
        ({"model": "m", "messages": [{"role": "user", "content": "x", "nick": "y"}]}, Unsupported, "messages[0].nick"),
        ({"model": 1}, BadRequest, "model"),
        ({}, BadRequest, "model"),
        ({"model": "m", "sampling": {"top_k": "4"}}, BadRequest, "sampling.top_k"),
        ({"model": "m", "sampling": {"top_k": 4.5}}, BadRequest, "sampling.top_k"),
        ({"model": "m", "sampling": {"ignore_eos": 1}}, BadRequest, "sampling.ignore_eos"),
        ({"model": "m", "sampling": {"logit_bias": {"1": 2}}}, BadRequest, "sampling.logit_bias"),
        ({"model": "m", "messages": [{"role": "user"}]}, BadRequest, "messages[0].content"),
        ({"model": "m", "tokens": [1, "2"]}, BadRequest, "tokens[1]"),
        ({"model": "m", "sampling": []}, BadRequest, "sampling"),
    ],
)
def test_bad_submits_name_the_field(args: dict[str, Any], error: type[BadRequest], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        to_submit(args)
    assert type(caught.value) is error
    assert caught.value.param == param
    assert param in caught.value.message


def test_a_mistyped_option_gets_a_suggestion() -> None:
    with pytest.raises(Unsupported) as caught:
        to_submit({"model": "m", "sampling": {"temprature": 1}})
    assert caught.value.hint == "did you mean 'temperature'?"


@pytest.mark.parametrize("field", [{"tenant": "other"}, {"resume": [1, 2]}])
def test_clients_cannot_set_what_the_front_sets(field: dict[str, Any]) -> None:
    args = {"model": "m", **field}
    assert to_submit(args)
    with pytest.raises(Unsupported, match="set by the daemon"):
        to_submit(args, from_client=True)


def test_the_protocol_and_the_clients_need_no_heavy_package() -> None:
    heavy = ["torch", "numpy", "transformers", "aiohttp", "numba", "structlog", "pydantic"]
    code = (
        "import sys, tierd.clients, tierd.clients.aio, tierd.clients.blocking, tierd.daemon.protocol;"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
