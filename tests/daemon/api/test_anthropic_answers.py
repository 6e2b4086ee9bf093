"""Events as Anthropic messages."""

from __future__ import annotations

import json

import pytest

from tierd.daemon.api.anthropic import Call
from tierd.daemon.api.anthropic_answers import SIGNATURE, Teller, Voice, Whole, error_body, status_of, usage
from tierd.daemon.errors import (
    BadRequest,
    ContextLengthExceeded,
    EngineFailed,
    ModelNotFound,
    TimedOut,
    TooBusy,
    Unauthorized,
)
from tierd.daemon.generation import Keep, Submit
from tierd.daemon.protocol import Event

ACCEPTED = Event(1, "accepted", {"prompt_tokens": 100, "cached_tokens": 64})
DONE = {"finish": "stop", "stop": None, "usage": {"prompt_tokens": 100, "completion_tokens": 7, "cached_tokens": 64}}


def said(**data):
    return Event(1, "text", {"text": "", "tokens": [1], **data})


def teller_of(max_tokens=50, hide=False, keep=()):
    return Teller(Call(Submit("alpha", keep=keep), True, max_tokens, hide, False), "msg_1")


def every(*events, **done):
    return [ACCEPTED, *events, Event(1, "done", DONE | done)]


def pieces(*events, max_tokens=50, hide=False, keep=(), **done):
    teller = teller_of(max_tokens, hide, keep)
    return [piece for event in every(*events, **done) for piece in teller.pieces(event)]


def whole(*events, max_tokens=50, hide=False, keep=(), **done):
    message = Whole(teller_of(max_tokens, hide, keep))
    *before, answer = [message.take(event) for event in every(*events, **done)]
    assert not any(before)
    return answer


def kinds(told):
    return [piece["type"].removeprefix("content_block_") for piece in told]


EVERYTHING = (
    said(thinking="let me "), said(thinking="see"), said(text="I "), said(text="look"),
    said(calls=[{"index": 0, "id": "t0", "name": "weather", "arguments": ""}]),
    said(calls=[{"index": 0, "arguments": '{"city": '}, {"index": 0, "arguments": '"Ulm"}'}]),
    said(calls=[{"index": 1, "id": "t1", "name": "time", "arguments": "{}"}]),
)  # fmt: skip


def test_the_order_of_a_stream():
    told = pieces(*EVERYTHING, finish="tool_calls")
    assert kinds(told) == [
        "message_start", "start", "delta", "delta", "delta", "stop", "start", "delta", "delta", "stop",
        "start", "delta", "delta", "stop", "start", "delta", "stop", "message_delta", "message_stop",
    ]  # fmt: skip
    starts = [(p["index"], p["content_block"]["type"]) for p in told if p["type"] == "content_block_start"]
    assert starts == [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use")]
    assert [p["index"] for p in told if p["type"] == "content_block_stop"] == [0, 1, 2, 3]
    deltas = [p["delta"] for p in told if p["type"] == "content_block_delta"]
    assert deltas[2] == {"type": "signature_delta", "signature": SIGNATURE}
    assert [d["partial_json"] for d in deltas if d["type"] == "input_json_delta"] == ['{"city": ', '"Ulm"}', "{}"]


def test_a_whole_message_is_what_its_pieces_make():
    message = whole(*EVERYTHING, finish="tool_calls")
    assert message["content"] == [
        {"type": "thinking", "thinking": "let me see", "signature": SIGNATURE},
        {"type": "text", "text": "I look"},
        {"type": "tool_use", "id": "t0", "name": "weather", "input": {"city": "Ulm"}},
        {"type": "tool_use", "id": "t1", "name": "time", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use" and message["role"] == "assistant" and message["type"] == "message"


def test_usage_adds_up_to_the_prompt():
    counts = whole(said(text="x"))["usage"]
    assert counts["input_tokens"] == 36 and counts["cache_read_input_tokens"] == 64 and counts["output_tokens"] == 7
    start = pieces(said(text="x"))[0]["message"]
    assert start["usage"]["cache_read_input_tokens"] == 64 and start["usage"]["output_tokens"] == 0
    assert start["content"] == [] and start["stop_reason"] is None


@pytest.mark.parametrize(
    ("cached", "keep_tokens", "read", "hour", "minutes", "fresh"),
    [
        (0, [40, 90], 0, 40, 50, 10), (40, [40, 90], 40, 0, 50, 10), (60, [40, 90], 60, 0, 30, 10),
        (99, [40, 90], 99, 0, 0, 1), (0, [100, 100], 0, 100, 0, 0), (32, None, 32, 0, 0, 68),
    ],
)  # fmt: skip
def test_the_three_kinds_of_input(cached, keep_tokens, read, hour, minutes, fresh):
    counts = {"prompt_tokens": 100, "cached_tokens": cached}
    if keep_tokens is not None:
        counts["keep_tokens"] = keep_tokens
    found = usage(counts, (Keep(1, 3600.0), Keep(2, 300.0)), 0)
    assert found["cache_read_input_tokens"] == read and found["input_tokens"] == fresh
    created = {"ephemeral_1h_input_tokens": hour, "ephemeral_5m_input_tokens": minutes}
    assert found["cache_creation"] == created and found["cache_creation_input_tokens"] == hour + minutes


@pytest.mark.parametrize(
    ("done", "reason", "sequence"),
    [
        ({"finish": "stop", "stop": None}, "end_turn", None),
        ({"finish": "stop", "stop": "END"}, "stop_sequence", "END"),
        ({"finish": "length", "usage": {"completion_tokens": 50}}, "max_tokens", None),
        ({"finish": "length", "usage": {"completion_tokens": 49}}, "model_context_window_exceeded", None),
        ({"finish": "tool_calls"}, "tool_use", None),
    ],
)  # fmt: skip
def test_why_it_ended(done, reason, sequence):
    message = whole(said(text="x"), **done)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_thinking_that_is_cut_is_closed():
    assert kinds(pieces(said(thinking="a"), finish="length"))[-4:] == ["delta", "stop", "message_delta", "message_stop"]


def test_hidden_thinking_has_its_block_and_signature_only():
    message = whole(said(thinking="secret"), said(text="x"), hide=True)
    assert message["content"][0] == {"type": "thinking", "thinking": "", "signature": SIGNATURE}


def test_nothing_is_said_where_the_prompt_was_only_to_be_cached():
    message = whole(said(text="x"), max_tokens=0, finish="length")
    assert message["content"] == [] and message["usage"]["output_tokens"] == 0
    assert message["stop_reason"] == "max_tokens"


def test_an_answer_of_nothing_is_no_block():
    assert kinds(pieces()) == ["message_start", "message_delta", "message_stop"]


def test_a_call_that_was_cut_has_no_input():
    cut = said(calls=[{"index": 0, "id": "t0", "name": "weather", "arguments": '{"ci'}])
    assert whole(cut, finish="length")["content"][0]["input"] == {}


def test_every_piece_has_its_event_line():
    teller = Teller(Call(Submit("alpha"), True, 50, False, False), "msg_1")
    voice = Voice(teller, "req_1")
    raw = b"".join(map(voice.say, (ACCEPTED, said(text="a"), Event(1, "done", DONE)))) + voice.ping()
    blocks = raw.decode().removesuffix("\n\n").split("\n\n")
    for block in blocks:
        first, second = block.split("\n")
        assert first == f"event: {json.loads(second.removeprefix('data: '))['type']}"
    assert blocks[-1].startswith("event: ping")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("x"), 400, "invalid_request_error"), (Unauthorized("x"), 401, "authentication_error"),
        (ModelNotFound("x"), 404, "not_found_error"), (TooBusy("x"), 529, "overloaded_error"),
        (EngineFailed("x"), 500, "api_error"), (TimedOut("x"), 504, "timeout_error"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_types(error, status, kind):
    body = error_body(error, "req_1")
    assert status_of(error) == status and body["error"]["type"] == kind
    assert body["type"] == "error" and body["request_id"] == "req_1" and body["error"]["message"] == "x"


def test_a_body_that_is_too_large_has_a_type_of_its_own():
    assert error_body(BadRequest("x"), "r", status=413)["error"]["type"] == "request_too_large"


def test_too_long_a_prompt_is_told_in_the_words_that_clients_know():
    message = error_body(ContextLengthExceeded("9000 tokens, 8192 allowed", hint="cut it"), "r")["error"]["message"]
    assert message == "prompt is too long: 9000 tokens, 8192 allowed; cut it"
    ours = ContextLengthExceeded("the prompt is too long: 9 tokens; the context holds 8", hint="shorten it")
    message = error_body(ours, "r")["error"]["message"]
    assert message == "prompt is too long: 9 tokens; the context holds 8; shorten it", "said once"
