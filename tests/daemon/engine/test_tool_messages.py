from __future__ import annotations

import pytest

from tierd.daemon.engine.tool_formats import Style
from tierd.daemon.engine.tool_messages import replaced, tool_dicts, turn_dicts
from tierd.daemon.errors import BadRequest
from tierd.daemon.protocol import Message, Tool, ToolCall


def test_tools_are_functions_with_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert tool_dicts([Tool("f", "does f", schema), Tool("g")]) == [
        {"type": "function", "function": {"name": "f", "description": "does f", "parameters": schema}},
        {
            "type": "function",
            "function": {"name": "g", "description": "", "parameters": {"type": "object", "properties": {}}},
        },
    ]


def test_a_call_and_its_result() -> None:
    messages = [
        Message("assistant", "", thinking="hm", tool_calls=(ToolCall("1", "f", '{"a": [1]}'), ToolCall("2", "g", ""))),
        Message("tool", "7", tool_call_id="1"),
        Message("tool", "8", tool_call_id="?", name="h"),
    ]
    assert turn_dicts(messages, Style.TAGGED) == [
        {
            "role": "assistant", "content": "", "thinking": "hm", "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "7", "name": "f", "tool_call_id": "1"},
        {"role": "tool", "content": "8", "name": "h", "tool_call_id": "?"},
    ]  # fmt: skip


def test_ids_that_mistral_takes() -> None:
    calls = (ToolCall("call_0123456789", "f", "{}"), ToolCall("abcDEF123", "f", "{}"))
    first, second = turn_dicts([Message("assistant", "", tool_calls=calls)], Style.MISTRAL)[0]["tool_calls"]
    result = turn_dicts([Message("tool", "x", tool_call_id="call_0123456789")], Style.MISTRAL)[0]
    assert len(first["id"]) == 9 and first["id"] == result["tool_call_id"] and second["id"] == "abcDEF123"


@pytest.mark.parametrize("arguments", ["[1]", "{", "3"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    call = Message("assistant", "", tool_calls=(ToolCall("1", "f", arguments),))
    with pytest.raises(BadRequest, match="no JSON object") as caught:
        turn_dicts([Message("user", "x"), call], Style.NONE)
    assert caught.value.param == "messages[1].tool_calls"


def test_every_text_is_replaced() -> None:
    value = {"a": ["a", {"b": "a", 1: None}], "c": 2}
    assert replaced(value, lambda text: text.replace("a", "x")) == {"x": ["x", {"b": "x", 1: None}], "c": 2}
