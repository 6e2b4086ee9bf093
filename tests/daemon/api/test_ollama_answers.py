"""Events as Ollama's lines."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from tierd.daemon.api.ollama_answers import Steps, Teller, Voice, Whole, stamp
from tierd.daemon.errors import EngineFailed
from tierd.daemon.protocol import Event

DONE = {
    "finish": "stop", "stop": None, "usage": {"prompt_tokens": 100, "completion_tokens": 8, "cached_tokens": 64},
    "timings": {"ttft_ms": 25.5, "load_ms": 10.0, "decode_tokens_per_s": 80.0, "hit_device": 64},
}  # fmt: skip


def said(**data):
    return Event(1, "text", {"text": "", "tokens": [1], **data})


def every(*events, **done):
    return [Event(1, "accepted", {}), *events, Event(1, "done", DONE | done)]


def lines(*events, chat=True, **done):
    teller = Teller("alpha:latest", chat=chat)
    return [line for event in every(*events, **done) for line in teller.lines(event)]


def whole(*events, chat=True, **done):
    body = Whole(Teller("alpha:latest", chat=chat))
    *before, answer = [body.take(event) for event in every(*events, **done)]
    assert not any(before)
    return answer


CALLS = (
    said(calls=[{"index": 0, "id": "c0", "name": "weather", "arguments": ""}]),
    said(calls=[{"index": 0, "arguments": '{"city": '}, {"index": 0, "arguments": '"Ulm"}'}]),
    said(calls=[{"index": 1, "id": "c1", "name": "time", "arguments": ""}]),
)


def test_a_chat_line_by_line():
    told = lines(said(thinking="hm"), said(text="a"), said(text="b"))
    assert [line["message"]["content"] for line in told] == ["", "a", "b", ""]
    assert told[0]["message"]["thinking"] == "hm" and "thinking" not in told[1]["message"]
    assert [line["done"] for line in told] == [False, False, False, True]
    assert all(line["model"] == "alpha:latest" and line["message"]["role"] == "assistant" for line in told)
    assert all(datetime.fromisoformat(line["created_at"]).tzinfo is not None for line in told)


def test_a_prompt_line_by_line():
    told = lines(said(thinking="hm"), said(text="a"), chat=False, prompt=[7, 8])
    assert [line["response"] for line in told] == ["", "a", ""] and told[0]["thinking"] == "hm"
    assert told[-1]["context"] == [7, 8, 1, 1] and all("message" not in line for line in told)


def test_the_last_line_counts_in_nanoseconds():
    last = lines(said(text="a"))[-1]
    assert last["done_reason"] == "stop" and last["prompt_eval_count"] == 100 and last["eval_count"] == 8
    assert last["prompt_eval_duration"] == 25_500_000 and last["load_duration"] == 10_000_000
    assert last["eval_duration"] == 100_000_000
    assert last["total_duration"] == 135_500_000
    assert last["tierd"]["cached_tokens"] == 64 and last["tierd"]["hit_device"] == 64


@pytest.mark.parametrize(("finish", "reason"), [("stop", "stop"), ("length", "length"), ("tool_calls", "stop")])
def test_why_it_ended(finish, reason):
    assert lines(finish=finish)[-1]["done_reason"] == reason


def test_a_call_is_told_when_it_is_whole():
    told = lines(said(text="I look"), *CALLS, finish="tool_calls")
    calls = [line["message"]["tool_calls"] for line in told if "tool_calls" in line["message"]]
    assert calls == [
        [{"id": "c0", "function": {"index": 0, "name": "weather", "arguments": {"city": "Ulm"}}}],
        [{"id": "c1", "function": {"index": 1, "name": "time", "arguments": {}}}],
    ]
    assert told[-1]["done"] and "tool_calls" not in told[-1]["message"]


def test_a_call_that_was_cut_is_text():
    told = lines(said(calls=[{"index": 0, "id": "c", "name": "w", "arguments": '{"ci'}]), finish="length")
    assert [line["message"]["content"] for line in told] == ['{"ci', ""]


def test_a_whole_answer_is_what_its_lines_make():
    body = whole(said(thinking="h"), said(thinking="m"), said(text="I "), said(text="look"), *CALLS)
    message = body["message"]
    assert message["content"] == "I look" and message["thinking"] == "hm" and len(message["tool_calls"]) == 2
    assert body["done"] and body["eval_count"] == 8 and message["role"] == "assistant"
    assert whole(said(text="a"), said(text="b"), chat=False)["response"] == "ab"


def test_logprobs():
    one = {"token": 5, "text": "é", "bytes": "é".encode(), "logprob": -0.5}
    told = lines(said(text="é", logprobs=[{**one, "top": [one]}]), said(text="x"))
    entry = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    assert told[0]["logprobs"] == [{**entry, "top_logprobs": [entry]}] and "logprobs" not in told[1]
    assert len(whole(said(text="é", logprobs=[{**one, "top": []}] * 2))["logprobs"]) == 2


def test_lines_of_the_wire():
    voice = Voice(Teller("alpha", chat=True))
    raw = voice.ping() + voice.say(said(text="a")) + voice.fail(EngineFailed("it died", hint="see"))
    ping, text, error = map(json.loads, raw.decode().splitlines())
    assert ping["message"]["content"] == "" and not ping["done"] and text["message"]["content"] == "a"
    assert error == {"error": "it died; see"}


def test_times_have_an_offset():
    assert stamp(datetime(2026, 11, 30, 1, 2, 3, tzinfo=UTC)) == "2026-11-30T01:02:03Z"


def test_steps_are_told_by_their_lines_and_the_newest_again():
    steps = Steps({"status": "pulling manifest"})
    assert steps.say(Event(0, "accepted")) == b"" and steps.ping() == b'{"status":"pulling manifest"}\n'
    step = Event(0, "text", {"line": {"status": "unpacking"}})
    assert steps.say(step) == steps.ping() == b'{"status":"unpacking"}\n' and steps.take(step) is None
    assert steps.take(Event(0, "done", {"line": {"status": "success"}})) == {"status": "success"}
    assert json.loads(steps.fail(EngineFailed("it died"))) == {"error": "it died"}
