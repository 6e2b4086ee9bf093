"""Mutated bodies of the OpenAI endpoints: an answer or a refusal that names something, at once, in steady memory."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from typing import Any

import pytest
from mutants import mutated, torn

from tests.counts import counted
from tierd.daemon import limits
from tierd.daemon.api import body_limits, openai, responses
from tierd.daemon.errors import TierdError

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x", "y"]}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {
    "model": "alpha", "stream": True, "stream_options": {"include_usage": True}, "n": 2, "best_of": 2, "seed": 5,
    "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "stop": ["x"], "logit_bias": {"5": -1.0},
    "logprobs": True, "top_logprobs": 3, "max_completion_tokens": 9, "parallel_tool_calls": False,
    "reasoning_effort": "low", "tools": [{"type": "function", "function": FUNCTION}], "cache_salt": "s",
    "tool_choice": {"type": "function", "function": {"name": "f"}}, "user": "u", "prompt_cache_retention": "24h",
    "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}},
    "chat_template_kwargs": {"enable_thinking": True},
    "messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c", "content": "seen"},
    ],
}  # fmt: skip
TEXT = {
    "model": "alpha", "prompt": ["once", "upon"], "n": 2, "best_of": 3, "logprobs": 2, "suffix": "", "max_tokens": 4,
    "guided_regex": "[a-z]+", "stop": "x", "frequency_penalty": 0.5, "presence_penalty": -0.5,
}  # fmt: skip
RESPONSE = {
    "model": "alpha", "instructions": "s", "max_output_tokens": 9, "temperature": 0.5, "store": True, "stream": True,
    "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low", "summary": "auto"}, "top_logprobs": 2,
    "text": {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA}}, "metadata": {"a": "b"},
    "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"},
              {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]}],
    "tool_choice": "auto", "parallel_tool_calls": True,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "g", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "seen"},
    ],
}  # fmt: skip
TARGETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (lambda body: openai.parse_chat(body).submits, CHAT),
    "/v1/completions": (lambda body: openai.parse_completion(body).submits, TEXT),
    "/v1/responses": (lambda body: (responses.parse(body).following(()),), RESPONSE),
}
GROWTH_BYTES = 32 << 20


def bodies(path, rounds):
    """As many mutants of the sound body, the sound one first."""
    sound = TARGETS[path][1]
    yield json.dumps(sound).encode()
    draw = random.Random(path)
    for number in range(rounds - 1):
        value = sound
        for _ in range(draw.randrange(1, 4)):
            value = mutated(value, draw)
        body = json.dumps(value).encode()
        yield torn(body, draw) if number % 4 == 0 else body


def check(path, rounds):
    parse = TARGETS[path][0]
    refused = 0
    for number, body in enumerate(bodies(path, rounds)):
        started_s = time.thread_time()
        try:
            body_limits.check(body)
            for submit in parse(body):
                limits.check_submit(submit, 4096)
        except TierdError as exc:
            assert number, exc  # the sound one is accepted
            refused += 1
            assert exc.message and len(exc.message) < 1000 and " at 0x" not in exc.message
        assert time.thread_time() - started_s < 1.0
    assert 0.2 < refused / rounds < 1.0  # both happen


def rss_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("path", TARGETS)
def test_mutants_are_accepted_or_refused(path):
    check(path, 300)


@pytest.mark.long
@pytest.mark.parametrize("path", TARGETS)
def test_many_mutants_in_steady_memory(path):
    check(path, 1000)
    before = rss_bytes()
    check(path, counted(33_334, 4_000))
    assert rss_bytes() - before < GROWTH_BYTES


@pytest.mark.long
async def test_mutants_over_http_get_an_answer_and_break_nothing(http):
    async def ask(path, body):
        started_s = time.monotonic()
        headers = {"Content-Type": "application/json"}
        async with http.session.post(http.url + path, data=body, headers=headers) as response:
            text = await response.text()
            assert response.status in (200, 400, 404), (response.status, text, body)
            assert "Traceback" not in text and " at 0x" not in text
            if response.headers["Content-Type"].startswith("text/event-stream") and path != "/v1/responses":
                assert text.count("data: [DONE]") + text.count('data: {"error"') == 1
        return time.monotonic() - started_s

    slow = 0
    for path in TARGETS:
        every = list(bodies(path, counted(700, 250)))
        for start in range(0, len(every), 20):
            took = await asyncio.gather(*(ask(path, body) for body in every[start : start + 20]))
            slow += sum(one > 1.0 for one in took)
    assert slow < 5  # a busy machine stands still now and then
    assert http.front.service.live == 0 and not http.front.metrics.engine_deaths
