"""Mutated bodies of every dialect: an answer or a refusal that names something, and nothing else."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from mutants import mutated, torn

from tierd.daemon import limits
from tierd.daemon.api import ollama, openai
from tierd.daemon.api.anthropic import parse_count, parse_messages
from tierd.daemon.errors import TierdError
from tierd.daemon.generation import Submit

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x", "y"]}}, "required": ["a"]}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
ANTHROPIC = {
    "model": "alpha", "max_tokens": 5, "stream": True, "temperature": 0.5, "top_p": 0.9, "top_k": 4,
    "stop_sequences": ["x"],
    "system": [{"type": "text", "text": "x-anthropic-a: 1\ns", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"},
                                          {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "x"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r", "is_error": True}]},
    ],
}  # fmt: skip
OLLAMA = {
    "model": "alpha:latest", "stream": False, "format": SCHEMA, "keep_alive": "5m", "think": True, "logprobs": True,
    "top_logprobs": 2, "tools": [FUNCTION],
    "options": {"num_ctx": 64, "num_predict": 5, "temperature": 0.5, "seed": 7, "stop": ["x"], "mirostat": 0},
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "x"}}}]},
        {"role": "tool", "content": "r", "tool_name": "f"},
    ],
}  # fmt: skip
GENERATE = {
    "model": "alpha", "prompt": "p", "suffix": "", "system": "s", "context": [1, 2], "raw": False, "template": "",
}  # fmt: skip
OPENAI = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}], "tools": [FUNCTION], "n": 2, "stop": ["x"]}


def anthropic(body: bytes) -> Submit | None:
    return parse_messages(body, strip_attribution=True).submit


def count(body: bytes) -> Submit | None:
    return parse_count(body, strip_attribution=True)


TARGETS: dict[str, tuple[Callable[[bytes], Any], dict[str, Any]]] = {
    "anthropic": (anthropic, ANTHROPIC),
    "count": (count, ANTHROPIC),
    "chat": (lambda body: ollama.parse_chat(body).submit, OLLAMA),
    "generate": (lambda body: ollama.parse_generate(body).submit, GENERATE),
    "openai": (lambda body: openai.parse_chat(body).submits[0], OPENAI),
}


def check(name: str, rounds: int) -> None:
    parse, sound = TARGETS[name]
    parse(json.dumps(sound).encode())
    draw, refused = random.Random(name), 0
    for number in range(rounds):
        value = sound
        for _ in range(draw.randrange(1, 4)):
            value = mutated(value, draw)
        body = json.dumps(value).encode()
        if number % 4 == 0:
            body = torn(body, draw)
        started_s = time.perf_counter()
        try:
            submit = parse(body)
            if submit is not None:
                limits.check_submit(submit, 4096)
        except TierdError as exc:
            refused += 1
            assert exc.message and len(exc.message) < 1000 and " at 0x" not in exc.message
        assert time.perf_counter() - started_s < 1.0
    assert 0.2 < refused / rounds < 1.0  # both happen


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_bodies(name: str) -> None:
    check(name, 200)


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_many_mutated_bodies(name: str) -> None:
    check(name, 6_000)
