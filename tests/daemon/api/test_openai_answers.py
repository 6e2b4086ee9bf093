"""Events to the bodies of chat completions and completions, without any I/O."""

from __future__ import annotations

import json

import msgspec
import pytest
from openai_events import CALLS, DONE, entry, said

from tierd.daemon.api.openai_answers import Shape, Teller, Voice, Whole, usage
from tierd.daemon.errors import EngineFailed
from tierd.daemon.protocol import Event


def shape(*, chat=True, **more):
    return Shape(chat, "id-1", 7, "m", **more)


def whole(given, *events):
    collecting = Whole(given)
    answers = [collecting.take(event) for event in events]
    assert answers[:-1] == [None] * (len(events) - 1)
    return msgspec.to_builtins(answers[-1])


def pieces(given, *events):
    teller = Teller(given)
    return [msgspec.to_builtins(piece) for event in events for piece in teller.pieces(event)]


def test_a_whole_answer_with_thinking_and_calls():
    answer = whole(shape(), Event(1, "accepted"), said("so", 1, 2, 3, thinking="hm", thinking_tokens=2), *CALLS, DONE)
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": "so", "refusal": None, "reasoning_content": "hm",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "wait", "arguments": "{}"}},
        ],
    }  # fmt: skip
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3, "cache_write_tokens": 2}
    assert answer["usage"]["total_tokens"] == 9 and answer["timings"] == {"ttft_ms": 2.0}
    assert answer["object"] == "chat.completion" and choice["finish_reason"] == "stop"


def test_a_memory_mode_is_named_where_one_was_used():
    done = Event(DONE.id, "done", {**DONE.data, "usage": {**DONE.data["usage"], "kv_mode": "window=64"}})
    assert whole(shape(), done)["usage"]["kv_mode"] == "window=64"
    assert "kv_mode" not in whole(shape(), DONE)["usage"]


def test_content_is_null_beside_calls_alone_and_empty_without_anything():
    assert whole(shape(), *CALLS, DONE)["choices"][0]["message"]["content"] is None
    message = whole(shape(), DONE)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "", "refusal": None}


def test_a_stream_says_the_same_as_the_whole_in_pieces():
    told = pieces(shape(), Event(1, "accepted"), said("", 1, thinking="hm"), said("so", 3), *CALLS, DONE)
    deltas = [piece["choices"][0]["delta"] for piece in told]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(isinstance(delta["content"], str) for delta in deltas)
    assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == ["hm"]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0] == {"index": 0, "id": "a", "type": "function", "function": {"name": "look", "arguments": ""}}
    assert calls[1] == {"index": 0, "function": {"arguments": '{"x"'}}
    assert [call["index"] for call in calls] == [0, 0, 0, 1] and calls[3]["id"] == "b"
    assert [piece["choices"][0]["finish_reason"] for piece in told] == [None] * (len(told) - 1) + ["stop"]
    assert all("usage" not in piece for piece in told) and told[-1]["timings"] == {"ttft_ms": 2.0}


def test_tokens_that_say_nothing_yet_make_no_piece():
    assert pieces(shape(), said("", 1)) == [] and len(pieces(shape(logprobs=0), said("", 1))) == 0
    assert len(pieces(shape(logprobs=0), said("", 1, logprobs=[entry("", -1.0)]))) == 1


def test_the_usage_piece_comes_last_and_alone():
    text = said("y", 1, 2, thinking="x", thinking_tokens=1)
    told = pieces(shape(include_usage=True), Event(1, "accepted"), text, DONE)
    assert told[-1]["choices"] == [] and told[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert "timings" in told[-1] and "timings" not in told[-2] and sum("usage" in piece for piece in told) == 1


@pytest.mark.parametrize("chat", [True, False])
def test_several_choices(chat):
    events = [Event(1, "accepted"), said("a", 1, choice=1), said("b", 2, choice=0),
              Event(1, "choice", {"choice": 1, "finish": "length"}),
              Event(1, "choice", {"choice": 0, "finish": "stop"}), DONE]  # fmt: skip
    answer = whole(shape(chat=chat, choices=2), *events)
    texts = [choice["message"]["content"] if chat else choice["text"] for choice in answer["choices"]]
    assert texts == ["b", "a"] and [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
    told = pieces(shape(chat=chat, choices=2), *events)
    ended = {choice["index"]: choice["finish_reason"] for piece in told for choice in piece["choices"]}
    assert ended == {0: "stop", 1: "length"} and len(told) == (6 if chat else 4)


def test_logprobs_of_a_chat():
    told = said("Ö", 1, logprobs=[entry("Ö", -0.5, ("Ö", -0.5), ("x", -2.0))])
    expected = {"content": [{
        "token": "Ö", "logprob": -0.5, "bytes": [195, 150],
        "top_logprobs": [{"token": "Ö", "logprob": -0.5, "bytes": [195, 150]},
                         {"token": "x", "logprob": -2.0, "bytes": [120]}],
    }], "refusal": None}  # fmt: skip
    given = shape(logprobs=2)
    assert whole(given, told, DONE)["choices"][0]["logprobs"] == expected
    assert pieces(given, told)[0]["choices"][0]["logprobs"] == expected
    assert whole(shape(), told, DONE)["choices"][0]["logprobs"] is None


def test_logprobs_of_a_completion_are_columns_with_offsets():
    events = [said("ab", 1, logprobs=[entry("ab", -0.5, ("ab", -0.5))]), said("c", 2, logprobs=[entry("c", -1.0)])]
    given = shape(chat=False, logprobs=1)
    assert whole(given, *events, DONE)["choices"][0]["logprobs"] == {
        "tokens": ["ab", "c"], "token_logprobs": [-0.5, -1.0], "top_logprobs": [{"ab": -0.5}, {}], "text_offset": [0, 2]
    }  # fmt: skip
    told = pieces(given, *events)
    assert [piece["choices"][0]["logprobs"]["text_offset"] for piece in told] == [[0], [2]]
    assert whole(shape(chat=False, logprobs=0), *events, DONE)["choices"][0]["logprobs"]["top_logprobs"] is None


def test_echo_stands_before_every_answer():
    given = shape(chat=False, choices=2, echo="once ")
    events = [Event(1, "accepted"), said("a", 1, choice=0), said("b", 1, choice=1), DONE]
    assert [choice["text"] for choice in whole(given, *events)["choices"]] == ["once a", "once b"]
    told = pieces(given, *events)
    assert [piece["choices"][0]["text"] for piece in told[:2]] == ["once ", "once "]


def test_a_voice_ends_with_done_or_with_the_error():
    voice = Voice(Teller(shape()))
    assert voice.say(Event(1, "accepted")).startswith(b'data: {"id":"id-1"')
    assert voice.say(DONE).endswith(b"\n\ndata: [DONE]\n\n")
    failed = voice.fail(EngineFailed("it died"))
    assert b"[DONE]" not in failed and json.loads(failed[6:])["error"]["code"] == "engine_failed"
    assert voice.ping() == b": ping\n\n"


def test_usage_of_nothing():
    assert usage({}).total_tokens == 0 and usage({"cached_tokens": 9}).prompt_tokens_details.cache_write_tokens == 0
