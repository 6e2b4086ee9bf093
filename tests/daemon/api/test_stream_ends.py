"""However a stream ends, it ends once: engines that die, clients that go, refusals, in every dialect that streams."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from front_harness import set_options, until

from tierd.daemon import failures


class Dialect(NamedTuple):
    """How to ask, and how many ends a whole stream has."""

    path: str
    fields: dict[str, Any]
    ends: Callable[[str], int]
    asked_by: str = "messages"


def anthropic_ends(text: str) -> int:
    return text.count("event: message_stop\n") + text.count("event: error\n")


def ollama_ends(text: str) -> int:
    lines = [json.loads(line) for line in text.splitlines()]
    return sum(bool(line.get("done")) + ("error" in line) for line in lines)


def openai_ends(text: str) -> int:
    pieces = text.split("\n\n")
    return pieces.count("data: [DONE]") + sum(piece.startswith('data: {"error"') for piece in pieces)


def responses_ends(text: str) -> int:
    ends = ("completed", "incomplete", "failed")
    return sum(text.count(f"event: response.{end}\n") for end in ends) + text.count('data: {"error"')


DIALECTS = {
    "anthropic": Dialect("/v1/messages", {"max_tokens": 12}, anthropic_ends),
    "ollama": Dialect("/api/chat", {"options": {"num_predict": 12}}, ollama_ends),
    "openai": Dialect("/v1/chat/completions", {"max_tokens": 12}, openai_ends),
    "several": Dialect("/v1/chat/completions", {"max_tokens": 12, "n": 3}, openai_ends),
    "ranked": Dialect("/v1/completions", {"max_tokens": 12, "n": 2, "best_of": 3}, openai_ends, "prompt"),
    "responses": Dialect("/v1/responses", {"max_output_tokens": 12}, responses_ends, "input"),
}
FATES = (
    "", "!crash=0", "!crash=5", "!crash=11", "!refuse", "!think=3 !calls=2", "!stop", "!garbage", "leave", "leave late",
)  # fmt: skip


async def live_through(http, dialect: Dialect, fate: str, number: int) -> None:
    """One stream: it is left, refused, or read to its one end."""
    said = f"{fate} {number}"
    given = [{"role": "user", "content": said}] if dialect.asked_by == "messages" else said
    body = {"model": "alpha", "stream": True, dialect.asked_by: given}
    async with http.session.post(http.url + dialect.path, json=body | dialect.fields) as response:
        if fate.startswith("leave"):
            if fate == "leave late":
                await response.content.readany()
            return
        text = await response.text()
    if response.status == 200:
        assert fate != "!refuse" and dialect.ends(text) == 1, text
    elif response.status == 400:
        assert fate == "!refuse"
    else:
        assert "died 3 times while" in text  # deaths of its neighbours count for it too


async def run(http, dialect: Dialect, count: int) -> None:
    set_options(http.front.settings.models_dir / "alpha", token_s=0.002)
    draw = random.Random(count)
    fates = [draw.choice(FATES) for _ in range(count - len(FATES))] + list(FATES)
    for start in range(0, count, 5):
        await asyncio.gather(
            *(live_through(http, dialect, fate, start + n) for n, fate in enumerate(fates[start : start + 5]))
        )
    await until(lambda: http.front.service.live == 0)


@pytest.mark.long
@pytest.mark.parametrize("name", DIALECTS)
async def test_one_end_fifty_times(http, name, monkeypatch):
    monkeypatch.setattr(failures, "CRASH_LIMIT", 1000)
    await run(http, DIALECTS[name], 50)
