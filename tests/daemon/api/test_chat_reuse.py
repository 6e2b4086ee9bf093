"""Conversations with the real engine in each dialect: what was said is never computed again."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from front_harness import make_settings, running

from tierd.daemon.api import web
from tierd.daemon.child import WORKER

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
SYSTEM = "You help a gardener. Answer in one short sentence, in plain words, and never tell where you know it from."
QUESTIONS = (
    "When do tomatoes go out?", "And beans?", "How deep?", "What if it freezes?", "Do they like shade?",
    "Who eats the leaves?", "What helps?", "How often is water needed?", "When is harvest?", "Thank you. And roses?",
)  # fmt: skip
TOKENS = 16
MIN_REUSE = 0.99


class Turn(NamedTuple):
    """What an answer told of itself."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Dialect(NamedTuple):
    """How to ask in a dialect: the path, the body of a question, and how to read the answer."""

    path: str
    body: Callable[[list[dict[str, Any]]], dict[str, Any]]
    read: Callable[[dict[str, Any]], Any]


def _openai(turns: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": SYSTEM}, *turns], "max_tokens": TOKENS}


def _openai_turn(answer: dict[str, Any]) -> Turn:
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    text = answer["choices"][0]["message"]["content"]
    return Turn(text, usage["prompt_tokens"], cached, usage["completion_tokens"])


def _anthropic(turns: list[dict[str, Any]]) -> dict[str, Any]:
    # The attribution is another one each time, as Claude Code has it.
    attribution = f"x-anthropic-billing-header: cc_version=2.1.36; cch={len(turns):05x};"
    system = [{"type": "text", "text": attribution}, {"type": "text", "text": SYSTEM}]
    return {"messages": turns, "system": system, "max_tokens": TOKENS}


def _anthropic_turn(answer: dict[str, Any]) -> Turn:
    usage = answer["usage"]
    kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    text = "".join(block["text"] for block in answer["content"])
    return Turn(text, sum(usage[k] for k in kinds), usage["cache_read_input_tokens"], usage["output_tokens"])


def _ollama(turns: list[dict[str, Any]]) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, *turns]
    return {"messages": messages, "stream": False, "options": {"num_predict": TOKENS, "temperature": 0}}


def _ollama_turn(answer: dict[str, Any]) -> Turn:
    cached = answer["tierd"]["cached_tokens"]
    return Turn(answer["message"]["content"], answer["prompt_eval_count"], cached, answer["eval_count"])


DIALECTS = {
    "openai": Dialect("/v1/chat/completions", _openai, _openai_turn),
    "anthropic": Dialect("/v1/messages", _anthropic, _anthropic_turn),
    "ollama": Dialect("/api/chat", _ollama, _ollama_turn),
}

Ask = Callable[[Dialect, list[dict[str, Any]]], Awaitable[Any]]


@pytest.fixture
async def ask(models_dir: Path, tmp_path: Path) -> AsyncIterator[Ask]:
    settings = make_settings(tmp_path, models_dir=models_dir, device_mem=256 << 20, host_mem=0, nvme_mem=512 << 20)
    async with running(settings, command=WORKER) as front, aiohttp.ClientSession() as session:
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setblocking(False)
        runner, address = await web.start(front.service, sock), f"http://127.0.0.1:{sock.getsockname()[1]}"

        async def ask(dialect: Dialect, turns: list[dict[str, Any]]) -> Any:
            body = {"model": MODEL, "temperature": 0} | dialect.body(turns)
            if dialect.path.startswith("/api"):
                del body["temperature"]
            async with session.post(address + dialect.path, json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return dialect.read(answer)

        yield ask
        await runner.cleanup()


async def converse(ask: Ask, dialect: Dialect, count: int) -> list[Turn]:
    turns: list[dict[str, Any]] = []
    told = []
    for question in QUESTIONS[:count]:
        turns.append({"role": "user", "content": question})
        told.append(await ask(dialect, turns))
        turns.append({"role": "assistant", "content": told[-1].text})
    return told


def reuse(told: list[Turn]) -> float:
    """The part of what was there before each turn, prompt and answer, that was not computed again."""
    known = sum(turn.prompt_tokens + turn.completion_tokens for turn in told[:-1])
    return sum(turn.cached_tokens for turn in told[1:]) / known


@pytest.mark.long
@pytest.mark.parametrize("name", DIALECTS)
async def test_a_chat_of_ten_turns_reuses_its_history(ask, name):
    told = await converse(ask, DIALECTS[name], len(QUESTIONS))
    assert reuse(told) >= MIN_REUSE


async def test_requests_that_differ_in_their_attribution_share_every_page(ask):
    question = [{"role": "user", "content": QUESTIONS[0] + " Tell it with all you know about soil and weather."}]
    dialect = DIALECTS["anthropic"]
    other = dialect._replace(body=lambda turns: dialect.body([*turns, *turns]) | {"messages": turns})
    first = await ask(dialect, question)
    again = await ask(other, question)
    assert first.cached_tokens == 0 and again.prompt_tokens == first.prompt_tokens
    assert again.cached_tokens == first.prompt_tokens - 1
    # What a breakpoint covers and was not there is what was written; the three kinds add up to the prompt.
    marked = dialect._replace(body=_marked, read=lambda answer: answer["usage"])
    cold, warm = await ask(marked, question), await ask(marked, question)
    counted = marked._replace(path="/v1/messages/count_tokens", read=lambda answer: answer["input_tokens"])
    for usage in (cold, warm):
        kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert sum(usage[kind] for kind in kinds) == await ask(counted, question)
    assert cold["cache_creation"]["ephemeral_1h_input_tokens"] > 20 and warm["cache_creation_input_tokens"] == 0
    assert warm["cache_read_input_tokens"] > cold["cache_creation_input_tokens"]


def _marked(turns: list[dict[str, Any]]) -> dict[str, Any]:
    mark = {"type": "ephemeral", "ttl": "1h"}
    system = [{"type": "text", "text": "Answer in rhymes. " + SYSTEM, "cache_control": mark}]
    return {"messages": turns, "system": system, "max_tokens": 2}
