"""Wide bodies: what is refused, or taken, is so before the event loop stands still."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tierd.daemon import limits
from tierd.daemon.api import anthropic, body_limits, embeddings, ollama, openai, responses
from tierd.daemon.errors import BadRequest, TierdError

USER = {"role": "user", "content": "x"}
MODEL: dict[str, Any] = {"model": "m"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


VALUES = body_limits.MAX_VALUES // 4  # what takes too long grows with their square, or far beyond the bound


def many(entry: Any) -> list[Any]:
    """As many as hold so many values."""
    text = json.dumps(entry)
    return [entry] * (VALUES // (1 + sum(map(text.count, ",[{"))))


def messages(body: bytes) -> Any:
    return anthropic.parse_messages(body, strip_attribution=True)


BLOCK = {"type": "text", "text": "x" * 200}
ODD = {f"k{number}": None for number in range(VALUES)}
ATTRIBUTION = anthropic.ATTRIBUTION + "\n"
CASES: dict[str, tuple[Callable[[bytes], Any], Callable[[], dict[str, Any]]]] = {
    "prompts": (openai.parse_completion, lambda: {"prompt": many("x")}),
    "prompts of tokens": (openai.parse_completion, lambda: {"prompt": many([1])}),
    "tokens": (openai.parse_completion, lambda: {"prompt": many(1)}),
    "chat": (openai.parse_chat, lambda: {"messages": many(USER)}),
    "parts": (openai.parse_chat, lambda: {"messages": [{"role": "user", "content": many(BLOCK)}]}),
    "tools": (openai.parse_chat, lambda: {"messages": [USER], "tools": many(TOOL)}),
    "calls": (openai.parse_chat, lambda: {"messages": [{"role": "assistant", "tool_calls": many(CALL)}]}),
    "stops": (openai.parse_chat, lambda: {"messages": [USER], "stop": many("x")}),
    "fields": (openai.parse_chat, lambda: {"messages": [USER], **ODD}),
    "Anthropic's turns": (messages, lambda: {"max_tokens": 5, "messages": many(USER)}),
    "Anthropic's turns, as many as may be": (
        messages, lambda: {"max_tokens": 5, "messages": [{"role": "user", "content": "x" * 400}] * limits.MAX_MESSAGES}
    ),
    "Anthropic's blocks": (messages, lambda: {"max_tokens": 5, "messages": [{"role": "user", "content": many(BLOCK)}]}),
    "Anthropic's blocks, as many as may be": (
        messages,
        lambda: {"max_tokens": 5, "messages": [{"role": "user", "content": [BLOCK] * limits.MAX_PARTS}] * 8},
    ),
    "Anthropic's tools": (
        messages, lambda: {"max_tokens": 5, "messages": [USER], "tools": many({"name": "f", "input_schema": {}})}
    ),
    "attribution": (messages, lambda: {"max_tokens": 5, "messages": [USER], "system": ATTRIBUTION * 200_000}),
    "items": (responses.parse, lambda: {"input": many(USER)}),
    "thoughts": (
        responses.parse,
        lambda: {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 500}]}] * 32_000},
    ),
    "tools of responses": (
        responses.parse, lambda: {"input": "x", "tools": many({"type": "function", "name": "f"})}
    ),
    "Ollama's turns": (ollama.parse_chat, lambda: {"messages": many(USER)}),
    "Ollama's tools": (ollama.parse_chat, lambda: {"messages": [USER], "tools": many(TOOL)}),
    "Ollama's calls": (
        ollama.parse_chat,
        lambda: {"messages": [{"role": "assistant", "tool_calls": many({"function": {"name": "f"}})}]},
    ),
    "Ollama's answers of tools, the last call first": (ollama.parse_chat, lambda: {"messages": [
        *({"role": "assistant", "tool_calls": [{"function": {"name": f"f{turn}_{n}"}} for n in range(100)]}
          for turn in range(160)),
        *({"role": "tool", "content": "x", "tool_name": f"f{159 - n // 100}_{99 - n % 100}"} for n in range(16_000)),
    ]}),
    "Ollama's options": (ollama.parse_chat, lambda: {"messages": [USER], "options": ODD}),
    "a context": (ollama.parse_generate, lambda: {"prompt": "x", "context": many(1)}),
    "inputs": (embeddings.parse, lambda: {"input": many("x")}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_wide_body_is_parsed_soon(name: str) -> None:
    parse, fields = CASES[name]
    body = json.dumps({**MODEL, **fields()}).encode()

    def seconds() -> float:
        started_s = time.process_time()
        try:
            body_limits.check(body)
            parse(body)
        except TierdError:
            pass
        return time.process_time() - started_s

    assert any(seconds() < 0.5 for _ in range(4))  # of processor time; machines that test do other things beside it


def refused(parse: Callable[[bytes], Any], **fields: Any) -> str | None:
    try:
        parse(json.dumps({**MODEL, **fields}).encode())
    except BadRequest as exc:
        return exc.param
    return None


def test_parts_of_a_message() -> None:
    part, most = {"type": "text", "text": "x"}, limits.MAX_PARTS
    for count, param in ((most, None), (most + 1, "messages[0].content")):
        given = [{"role": "user", "content": [part] * count}]
        assert refused(openai.parse_chat, messages=given) == param
        assert refused(messages, messages=given, max_tokens=5) == param
    assert refused(responses.parse, input=[{"role": "user", "content": [part] * (most + 1)}]) == "input[0].content"


def test_fields_and_options() -> None:
    odd = dict.fromkeys((f"k{number}" for number in range(limits.MAX_FIELDS - 2)), None)
    assert refused(openai.parse_chat, messages=[USER], **odd) is None
    assert refused(openai.parse_chat, messages=[USER], more=None, **odd) == "the body"
    assert refused(ollama.parse_chat, messages=[USER], options=odd) is None
    assert refused(ollama.parse_chat, messages=[USER], options={**odd, **dict.fromkeys("abc")}) == "options"


def test_calls_of_all_turns() -> None:
    calls = [{"function": {"name": "f"}}] * limits.MAX_CALLS
    turn, enough = {"role": "assistant", "tool_calls": calls}, limits.MAX_MESSAGES // limits.MAX_CALLS
    assert refused(ollama.parse_chat, messages=[turn] * enough) is None
    assert refused(ollama.parse_chat, messages=[turn] * (enough + 1)) == "messages"


def test_prompts_times_answers() -> None:
    most = limits.MAX_ANSWERS
    assert refused(openai.parse_completion, prompt=["x"] * most) is None
    assert refused(openai.parse_completion, prompt=["x"] * (most // 2), n=3) == "prompt"
    for n in (1, 0, -1, None):
        assert refused(openai.parse_completion, prompt=[[1]] * (most + 1), n=n) == "prompt"
    assert refused(openai.parse_completion, prompt=[1] * (most + 1)) is None  # one prompt of tokens
