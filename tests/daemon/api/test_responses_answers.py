"""Events to the pieces of a response, in the order that clients need."""

from __future__ import annotations

import json

import msgspec
import pytest
from openai_events import CALLS, DONE, entry, said

from tierd.daemon.api import responses
from tierd.daemon.api.responses_answers import Teller, Voice
from tierd.daemon.errors import EngineFailed
from tierd.daemon.protocol import Event, Message, ToolCall

ACCEPTED = Event(1, "accepted", {"prompt_tokens": 5, "cached_tokens": 3})


def teller(**fields):
    body = {"model": "m", "input": "hi", **fields}
    return Teller(responses.parse(json.dumps(body).encode()), "resp_1", lambda: 100.0)


def pieces(one, *events):
    return [msgspec.json.decode(msgspec.json.encode(piece)) for event in events for piece in one.pieces(event)]


def kinds(told):
    return [piece["type"].removeprefix("response.") for piece in told]


def test_the_order_of_a_text():
    told = pieces(teller(), ACCEPTED, said("a", 1), said("b", 2), DONE)
    assert kinds(told) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [piece["sequence_number"] for piece in told] == list(range(len(told)))
    assert told[0]["response"]["status"] == "in_progress" and told[0]["response"]["output"] == []
    item = told[2]["item"]
    assert item["status"] == "in_progress" and item["content"] == []
    assert all(p["item_id"] == item["id"] and p["output_index"] == 0 for p in told if "item_id" in p)
    assert told[4]["delta"] == "a" and told[4]["logprobs"] == [] and told[6]["text"] == "ab"
    assert told[8]["item"]["content"][0] == {"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}
    done = told[-1]["response"]
    assert done["status"] == "completed" and done["output"] == [told[8]["item"]] and done["completed_at"] == 100
    assert done["usage"] == {
        "input_tokens": 5, "output_tokens": 4, "total_tokens": 9, "output_tokens_details": {"reasoning_tokens": 0},
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 2},
    }  # fmt: skip


def test_thinking_text_and_calls_are_items_of_their_own():
    one = teller()
    thoughts = said("", 1, thinking="h", thinking_tokens=1), said("so", 2, 3, thinking="m", thinking_tokens=1)
    told = pieces(one, ACCEPTED, *thoughts, *CALLS, DONE)
    assert kinds(told)[2:] == [
        "output_item.added", "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    reasoning, message, look, wait = told[-1]["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}] and reasoning["summary"] == []
    assert reasoning["encrypted_content"] is None and message["role"] == "assistant"
    assert (look["call_id"], look["name"], look["arguments"]) == ("a", "look", '{"x": 1}')
    assert wait["arguments"] == "{}" and "namespace" not in wait
    assert len({item["id"] for item in (reasoning, message, look, wait)}) == 4
    assert told[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert one.answer() == (Message("assistant", "so", thinking="hm", tool_calls=(
        ToolCall("a", "look", '{"x": 1}'), ToolCall("b", "wait", "{}"))),)  # fmt: skip


def test_what_a_client_sends_back_is_the_turn_that_was():
    for include in ([], ["reasoning.encrypted_content"]):
        one = teller(include=include)
        pieces(one, ACCEPTED, said("", 1, thinking="hm"), said("so", 3), *CALLS, DONE)
        items = msgspec.to_builtins(one.response.output)
        if include:
            items[0]["content"] = []  # as Codex does
        body = {"model": "m", "input": items}
        assert responses.parse(json.dumps(body).encode()).submit.messages == one.answer()


def test_thinking_as_a_summary():
    told = pieces(teller(reasoning={"summary": "auto"}), ACCEPTED, said("", 1, thinking="hm"), DONE)
    assert kinds(told)[2:-1] == [
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
    ]  # fmt: skip
    assert told[4]["summary_index"] == 0 and told[-1]["response"]["output"][0]["content"] == []


def test_calls_of_a_namespace_go_back_to_it():
    tools = [{"type": "namespace", "name": "mcp__f__", "tools": [{"type": "function", "name": "open"}]}]
    one = teller(tools=tools)
    call = said(calls=[{"index": 0, "id": "a", "name": "mcp__f__open", "arguments": "{}"}])
    told = pieces(one, ACCEPTED, call, DONE)
    assert (told[2]["item"]["namespace"], told[2]["item"]["name"]) == ("mcp__f__", "open")
    assert one.answer()[0].tool_calls[0].name == "mcp__f__open"


def test_tools_that_were_left_out_are_not_in_force():
    told = pieces(teller(tools=[{"type": "web_search"}, {"type": "function", "name": "f"}]), ACCEPTED)
    assert [tool["type"] for tool in told[0]["response"]["tools"]] == ["function"]


@pytest.mark.parametrize(("finish", "status"), [("stop", "completed"), ("tool_calls", "completed"),
("length", "incomplete")])
def test_how_it_ends(finish, status):
    one = teller()
    told = pieces(one, ACCEPTED, said("a", 1), Event(1, "done", {"finish": finish}))
    assert told[-1]["type"] == f"response.{status}" and one.response.status == status
    assert (one.response.incomplete_details is not None) == (status == "incomplete")


def test_a_failure_closes_what_is_open_and_is_the_one_end():
    one = teller()
    pieces(one, ACCEPTED, said("a", 1))
    told = list(one.fail(EngineFailed("it died", hint="look")))
    assert kinds(told)[-2:] == ["output_item.done", "failed"] and one.response.status == "failed"
    assert one.response.error.message == "it died; look" and one.response.error.code == "engine_failed"
    before = list(teller().fail(EngineFailed("x")))
    assert kinds(before) == ["created", "in_progress", "failed"]


def test_logprobs():
    one = teller(include=["message.output_text.logprobs"], top_logprobs=1)
    told = pieces(one, ACCEPTED, said("a", 1, logprobs=[entry("a", -0.5, ("b", -1.0))]), DONE)
    (logprob,) = told[4]["logprobs"]
    assert logprob["token"] == "a" and logprob["top_logprobs"][0]["token"] == "b"
    assert one.response.output[0].content[0].logprobs == [logprob]


def test_a_voice_names_its_events_and_tells_the_end_before_it_is_read():
    ended = []
    voice = Voice(teller(), lambda: ended.append(True))
    lines = voice.say(ACCEPTED).decode().split("\n\n")
    assert lines[0].startswith("event: response.created\ndata: {") and not ended
    assert b"event: response.completed" in voice.say(DONE) and ended == [True]
    assert b"event: response.failed" in Voice(teller(), list).fail(EngineFailed("x"))
    assert voice.ping() == b": ping\n\n"
