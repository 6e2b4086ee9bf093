"""What clients rely on in a streamed answer of each dialect: the order of its events, and one end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]


def events_of(text: str) -> list[tuple[str, Any]]:
    """The events of an event stream as (name, data); comments are left out, and what is no JSON stays text."""
    assert text.endswith("\n\n"), text[-200:]
    events = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert set(fields) <= {"event", "data"}, block
        data = fields["data"]
        events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


def anthropic(text: str, *, dies: bool = False) -> Answer:
    """`end`: its stop_reason, or `error`. `blocks`: their types in their order."""
    events = [(name, data) for name, data in events_of(text) if name != "ping"]
    assert all(name == data["type"] for name, data in events)
    assert events[0][0] == "message_start" and events[0][1]["message"]["usage"]["output_tokens"] >= 0
    ends = [name for name, _ in events if name in ("message_stop", "error")]
    assert len(ends) == 1 and events[-1][0] == ends[0]
    blocks: list[str] = []
    is_open, end = False, "error"
    for name, data in events[1:-1]:
        match name:
            case "content_block_start":
                assert not is_open and data["index"] == len(blocks)
                blocks.append(data["content_block"]["type"])
                is_open = True
            case "content_block_delta":
                assert is_open and data["index"] == len(blocks) - 1
                kinds = {"text": ["text_delta"], "tool_use": ["input_json_delta"],
                         "thinking": ["thinking_delta", "signature_delta"]}  # fmt: skip
                assert data["delta"]["type"] in kinds[blocks[-1]]
            case "content_block_stop":
                assert is_open and data["index"] == len(blocks) - 1
                is_open = False
            case _:
                assert name == "message_delta" and not is_open and end == "error"
                end = data["delta"]["stop_reason"]
                assert {"input_tokens", "output_tokens", "cache_read_input_tokens"} <= set(data["usage"])
    assert dies == (ends == ["error"]) == (end == "error")
    return {"end": end, "blocks": blocks}


_RESPONSE_ENDS = ("response.completed", "response.incomplete", "response.failed")


def responses(text: str, *, dies: bool = False) -> Answer:
    """`end`: completed, incomplete or failed. `items`: types of the output."""
    events = events_of(text)
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    names = [name for name, _ in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert [name for name in names if name in _RESPONSE_ENDS] == names[-1:]
    response = events[-1][1]["response"]
    assert response["id"] == events[0][1]["response"]["id"]
    items: list[str] = []
    opened: list[str] = []
    for name, data in events:
        match name.removeprefix("response."):
            case "output_item.added":
                assert not opened and data["output_index"] == len(items)
                items.append(data["item"]["type"])
                opened.append(data["item"]["id"])
            case "output_item.done":
                assert opened.pop() == data["item"]["id"] and not opened
            case "content_part.added" | "reasoning_summary_part.added":
                opened.append("part")
            case "content_part.done" | "reasoning_summary_part.done":
                assert opened.pop() == "part"
            case step if step.endswith((".delta", ".done")):
                assert opened and data["item_id"] == opened[0]
    assert dies == (names[-1] == "response.failed")
    if not dies:
        assert not opened and [item["type"] for item in response["output"]] == items
        assert {"input_tokens", "output_tokens", "total_tokens"} <= set(response["usage"])
    return {"end": names[-1].removeprefix("response."), "items": items}


def chat(text: str, *, dies: bool = False) -> Answer:
    """`end`: the finish_reason, or `error`. `usage`: whether it was told. `calls`: how many there were."""
    events = [data for _, data in events_of(text)]
    if dies:
        assert events[-1].keys() == {"error"} and {"message", "type", "code"} <= set(events[-1]["error"])
        assert "[DONE]" not in events and sum("error" in one for one in events) == 1
        return {"end": "error"}
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    chunks = events[:-1]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    has_usage = "usage" in chunks[-1] and chunks[-1]["usage"] is not None
    told = chunks[:-1] if has_usage else chunks
    assert all(len(chunk["choices"]) == 1 for chunk in told) and (not has_usage or chunks[-1]["choices"] == [])
    deltas = [chunk["choices"][0]["delta"] for chunk in told]
    assert deltas[0]["role"] == "assistant" and all(isinstance(delta["content"], str) for delta in deltas)
    reasons = [reason for chunk in told if (reason := chunk["choices"][0]["finish_reason"]) is not None]
    assert len(reasons) == 1 and told[-1]["choices"][0]["finish_reason"] == reasons[0]
    calls: dict[int, Answer] = {}
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
        if piece["index"] not in calls:
            assert piece["id"] and piece["type"] == "function" and piece["function"]["name"]
            calls[piece["index"]] = {"arguments": ""}
        calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    assert all(isinstance(json.loads(call["arguments"]), dict) for call in calls.values())
    return {"end": reasons[0], "usage": has_usage, "calls": len(calls)}


def ndjson(text: str, *, dies: bool = False) -> Answer:
    """`end`: the done_reason, or `error`. `calls`: how many there were."""
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    if dies:
        assert lines[-1].keys() == {"error"} and sum("error" in line for line in lines) == 1
        assert not any(line.get("done") for line in lines)
        return {"end": "error"}
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert all(line["model"] and line["created_at"] for line in lines)
    bodies = [line["message"] if "message" in line else {"content": line["response"]} for line in lines]
    assert all(isinstance(body["content"], str) for body in bodies)
    calls = [call for body in bodies for call in body.get("tool_calls", ())]
    assert all(call["function"]["name"] and isinstance(call["function"]["arguments"], dict) for call in calls)
    if lines[-1]["done_reason"] in ("stop", "length"):
        times = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
        assert all(isinstance(lines[-1][name], int) for name in (*times, "prompt_eval_count", "eval_count"))
    return {"end": lines[-1]["done_reason"], "calls": len(calls)}


RULES: dict[str, Callable[..., Answer]] = {
    "anthropic": anthropic, "responses": responses, "chat": chat, "ndjson": ndjson,
}  # fmt: skip
MEDIA = {
    "anthropic": "text/event-stream", "responses": "text/event-stream", "chat": "text/event-stream",
    "ndjson": "application/x-ndjson",
}  # fmt: skip
