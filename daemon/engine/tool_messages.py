"""Messages and tools as chat templates take them: the dictionaries of transformers' conventions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from tierd.daemon.engine.answer import parse
from tierd.daemon.engine.tool_formats import MISTRAL_ID_CHARS, Style
from tierd.daemon.errors import BadRequest
from tierd.daemon.protocol import Message, Tool, ToolCall

_MISTRAL_ID = re.compile(rf"[a-zA-Z0-9]{{{MISTRAL_ID_CHARS}}}")


def tool_dicts(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as functions with a JSON schema."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def turn_dicts(messages: Sequence[Message], style: Style) -> list[dict[str, Any]]:
    """Turns of a conversation. A result learns its function's name from the call that it answers.

    Raises BadRequest for a call whose arguments are no JSON object.
    """
    names: dict[str, str] = {}
    turns = []
    for place, message in enumerate(messages):
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            # Templates disagree on the name: Qwen and DeepSeek read the first, gpt-oss the second.
            turn["reasoning_content"] = turn["thinking"] = message.thinking
        if message.tool_calls:
            turn["tool_calls"] = [_call(call, style, place) for call in message.tool_calls]
            names.update((call.id, call.name) for call in message.tool_calls)
        if message.role == "tool":
            turn["name"] = message.name or names.get(message.tool_call_id, "")
            turn["tool_call_id"] = _id(message.tool_call_id, style)
        turns.append(turn)
    return turns


def replaced(value: Any, change: Callable[[str], str]) -> Any:
    """A structure of dictionaries and lists with every text in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key) if isinstance(key, str) else key: replaced(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(item, change) for item in value]
    return value


def _call(call: ToolCall, style: Style, place: int) -> dict[str, Any]:
    arguments = parse(call.arguments) if call.arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise BadRequest(
            f"messages[{place}].tool_calls: the arguments of {call.name[:64]!r} are no JSON object",
            param=f"messages[{place}].tool_calls",
        )
    function = {"name": call.name, "arguments": arguments}
    return {"id": _id(call.id, style), "type": "function", "function": function}


def _id(given: str, style: Style) -> str:
    """An id that the template takes: Mistral's insist on nine characters, whoever made it."""
    if style is not Style.MISTRAL or _MISTRAL_ID.fullmatch(given):
        return given
    return hashlib.blake2b(given.encode(), digest_size=8).hexdigest()[:MISTRAL_ID_CHARS]
