"""A chat with tools, the real model and a client that writes everything anew: what was computed is found again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engine.live import Live
from tests.daemon.templates import with_template
from tierd.daemon.protocol import Event, Message, Sampling, Submit, Tool, ToolCall

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

# As Qwen's: the default model's own template knows no tools.
TEMPLATE = """{% if tools %}<|im_start|>system
Call tools as <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
CITY = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = (Tool("weather", "of a city", CITY), Tool("time", "in a city", CITY))
MIN_REUSE = 0.99


class Chat:
    """A client that keeps what it saw, not what was sampled: trimmed text, its own JSON, its own ids."""

    def __init__(self) -> None:
        self.messages = [Message("system", "You help. " * 30), Message("user", "What is the weather in Rome?")]
        self.known_tokens = 0
        self.reuse: list[float] = []
        self.calls = 0

    def turn(self, live: Live, place: int) -> None:
        called = self.messages[-1].tool_calls
        if called:
            self.messages += [Message("tool", f"{place * 3} degrees", tool_call_id=call.id) for call in called]
        elif self.messages[-1].role == "assistant":
            self.messages.append(Message("user", f"And in city number {place}? Thank you \u2014 merci."))
        submit = Submit(
            "m",
            messages=tuple(self.messages),
            tools=TOOLS,
            tool_choice="required" if self.messages[-1].role == "user" else "auto",
            parallel_tool_calls=place % 4 == 0,
            sampling=Sampling(temperature=1.0, seed=place, max_tokens=60),
        )
        before = found_tokens(live)
        text, calls, end = answer(live, submit)
        usage = end.data["usage"]
        if self.known_tokens:
            self.reuse.append((found_tokens(live) - before) / self.known_tokens)
        self.known_tokens = usage.prompt_tokens + usage.completion_tokens
        self.calls += len(calls)
        again = tuple(
            ToolCall(f"mine{place}{number}", call["name"], json.dumps(json.loads(call["arguments"]), indent=1))
            for number, call in enumerate(calls)
        )
        self.messages.append(Message("assistant", text.strip(), tool_calls=again))


def found_tokens(live: Live) -> int:
    """Tokens whose pages were found. Where it is sooner, some of them are computed again instead of read."""
    found = live.engine.pager.statistics()
    return found.hit_device_tokens + found.hit_host_tokens + found.hit_nvme_tokens


def answer(live: Live, submit: Submit) -> tuple[str, list[dict[str, Any]], Event]:
    live._number += 1
    live.engine.loop.submit(live.engine.intake.request(live._number, submit, time.monotonic()))
    text, calls = "", []
    while True:
        event = live.events.get(timeout=120.0)
        if event.id == live._number and event.ev == "text":
            text += event.data["text"]
            calls += event.data.get("calls", [])
        elif event.id == live._number and event.ev in ("done", "failed"):
            assert event.ev == "done", event
            live.engine.intake.turns.flush()
            return text, calls, event


@pytest.fixture
def tooled(model_dir: Path, tmp_path: Path) -> Path:
    """The default model with a template that knows tools."""
    return with_template(model_dir, tmp_path / "model", TEMPLATE)


@pytest.mark.parametrize("turns", [3, pytest.param(10, marks=pytest.mark.long)])
def test_a_chat_with_tools_reuses_its_history_after_a_restart_too(tooled: Path, tmp_path: Path, turns: int) -> None:
    chat = Chat()
    with Live(tooled, tmp_path / "kv", device=200, nvme=400) as live:
        for place in range(turns):
            chat.turn(live, place)
        live.flush()
    with Live(tooled, tmp_path / "kv", device=200, nvme=400) as live:
        chat.turn(live, turns)
        assert min(chat.reuse) >= MIN_REUSE, chat.reuse
        assert chat.calls >= turns // 2
        live.engine.intake.turns.clear()  # without them the same chat loses its pages: they are what holds it
        chat.turn(live, turns + 1)
        assert chat.reuse[-1] < MIN_REUSE
