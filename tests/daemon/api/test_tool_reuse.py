"""Long conversations with tools in each dialect, each as its clients keep them: what was said is never computed again.

A client sends back what it saw: trimmed text, JSON written by itself, ids of its own. A restart of the daemon in the
middle changes nothing.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from front_harness import make_settings, running

from tests.daemon.engine.test_exact_turns import TEMPLATE
from tests.daemon.templates import with_template
from tierd.daemon.api import web
from tierd.daemon.child import WORKER
from tierd.daemon.config import Settings
from tierd.daemon.models.importer import import_model

# The default tests have a short one without a dialect: `engine/test_exact_turns`.
pytestmark = [pytest.mark.long, pytest.mark.model, pytest.mark.timeout(900)]

MODEL = "tooled"
SYSTEM = "help people who travel. Ask the tools about weather and time, then answer in one short sentence. " * 3
CITY = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = (("weather", "tells the weather of a city"), ("time", "tells the time in a city"))
CITIES = ("Rome", "Oslo", "Lima", "Kyiv", "Accra", "Hanoi")
TURNS = 10
MIN_REUSE = 0.99
TOKENS = 40
QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"

Body = dict[str, Any]
Post = Callable[[str, Body], Awaitable[Body]]
Found = Callable[[], Awaitable[int]]


class Counts(NamedTuple):
    """Of one answer: tokens of the prompt, those of them that were not computed, tokens of the answer."""

    prompt: int
    cached: int
    answer: int


class Chat:
    """A conversation as messages, the system prompt among them; tools as functions."""

    system: str
    tools = [
        {"type": "function", "function": {"name": name, "description": what, "parameters": CITY}}
        for name, what in TOOLS
    ]  # fmt: skip

    def __init__(self) -> None:
        self.history: list[Body] = [{"role": "system", "content": self.system}]

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})


class OpenAI(Chat):
    """As the openai package and those who use it: calls in the message, arguments as text."""

    path = "/v1/chat/completions"
    system = f"You {SYSTEM}"  # another one in each dialect: their conversations share nothing

    def body(self, seed: int, *, must_call: bool) -> Body:
        return {"messages": self.history, "tools": self.tools, "tool_choice": "required" if must_call else "auto",
                "max_tokens": TOKENS, "temperature": 1.0, "seed": seed, "parallel_tool_calls": False}  # fmt: skip

    def take(self, answer: Body) -> tuple[Counts, int]:
        """Counts, and how many calls there were; they are answered at once."""
        usage, message = answer["usage"], answer["choices"][0]["message"]
        calls = message.get("tool_calls", [])
        mine: list[Body] = []
        for number, call in enumerate(calls):
            arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
            function = {"name": call["function"]["name"], "arguments": arguments}
            mine.append({"id": f"mine{len(self.history)}{number}", "type": "function", "function": function})
        said = {"role": "assistant", "content": (message["content"] or "").strip() or None}
        self.history.append(said | ({"tool_calls": mine} if mine else {}))
        self.history += [{"role": "tool", "tool_call_id": one["id"], "content": "mild"} for one in mine]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Counts(usage["prompt_tokens"], cached, usage["completion_tokens"]), len(calls)


class Responses:
    """As Codex: nothing is stored, and every item of the output is sent back."""

    path = "/v1/responses"
    system = f"We {SYSTEM}"

    def __init__(self) -> None:
        self.history: list[Body] = []

    def ask(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        self.history.append({"type": "message", "role": "user", "content": content})

    def body(self, seed: int, *, must_call: bool) -> Body:
        tools = [{"type": "function", "name": name, "description": what, "parameters": CITY} for name, what in TOOLS]
        return {"instructions": self.system, "input": self.history, "tools": tools, "store": False, "seed": seed,
                "tool_choice": "required" if must_call else "auto", "max_output_tokens": TOKENS, "temperature": 1.0,
                "parallel_tool_calls": False}  # fmt: skip

    def take(self, answer: Body) -> tuple[Counts, int]:
        usage, calls = answer["usage"], 0
        for item in answer["output"]:
            self.history.append({name: value for name, value in item.items() if name not in ("id", "status")})
            if item["type"] == "function_call":
                calls += 1
                self.history.append({"type": "function_call_output", "call_id": item["call_id"], "output": "mild"})
        cached = usage["input_tokens_details"]["cached_tokens"]
        return Counts(usage["input_tokens"], cached, usage["output_tokens"]), calls


class Anthropic:
    """As Claude Code: blocks, a breakpoint at the end, and an attribution that is another one in every request."""

    path = "/v1/messages"
    system = f"They {SYSTEM}"

    def __init__(self) -> None:
        self.history: list[Body] = []

    def ask(self, text: str) -> None:
        self._user({"type": "text", "text": text})

    def body(self, seed: int, *, must_call: bool) -> Body:
        tools = [{"name": name, "description": what, "input_schema": CITY} for name, what in TOOLS]
        attribution = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={seed:05x};"}
        marked_system = {"type": "text", "text": self.system, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        *before, last = self.history
        marked = {**last["content"][-1], "cache_control": {"type": "ephemeral"}}
        turns = [*before, {**last, "content": [*last["content"][:-1], marked]}]
        return {"system": [attribution, marked_system], "messages": turns, "tools": tools, "max_tokens": TOKENS,
                "tool_choice": {"type": "any" if must_call else "auto"}, "temperature": 1.0}  # fmt: skip

    def take(self, answer: Body) -> tuple[Counts, int]:
        usage = answer["usage"]
        # Text without anything in it is what the API refuses: clients drop it.
        said = [one for one in answer["content"] if one["type"] != "text" or one["text"].strip()]
        self.history.append({"role": "assistant", "content": said or [{"type": "text", "text": ""}]})
        calls = [one for one in said if one["type"] == "tool_use"]
        for one in calls:
            self._user({"type": "tool_result", "tool_use_id": one["id"], "content": "mild"})
        kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        prompt = sum(usage[kind] for kind in kinds)
        return Counts(prompt, usage["cache_read_input_tokens"], usage["output_tokens"]), len(calls)

    def _user(self, block: Body) -> None:
        if self.history and self.history[-1]["role"] == "user":
            self.history[-1]["content"].append(block)
        else:
            self.history.append({"role": "user", "content": [block]})


class Ollama(Chat):
    """As Ollama's own clients: arguments as objects, calls without ids. Nothing here can demand a call."""

    path = "/api/chat"
    system = f"I {SYSTEM}"

    def body(self, seed: int, *, must_call: bool) -> Body:
        options = {"num_predict": TOKENS, "temperature": 1.0, "seed": seed}
        return {"messages": self.history, "tools": self.tools, "stream": False, "options": options}

    def take(self, answer: Body) -> tuple[Counts, int]:
        message = answer["message"]
        calls = [{"function": {key: one["function"][key] for key in ("name", "arguments")}}
                 for one in message.get("tool_calls", ())]  # fmt: skip
        self.history.append({"role": "assistant", "content": message["content"].strip(), "tool_calls": calls})
        for one in calls:
            self.history.append({"role": "tool", "tool_name": one["function"]["name"], "content": "mild"})
        counts = Counts(answer["prompt_eval_count"], answer["tierd"]["cached_tokens"], answer["eval_count"])
        return counts, len(calls)


Chat = OpenAI | Responses | Anthropic | Ollama
DIALECTS: tuple[type[Chat], ...] = (OpenAI, Responses, Anthropic, Ollama)


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[tuple[Post, Found]]:
    """A daemon with the real engine, whose pages are on the disk when it ends: how to ask it, and how to look.

    The second tells of how many tokens pages were found so far. Where that is sooner, some of them are computed again
    while the others are read from the disk: what an answer tells as cached is less then.
    """
    async with running(settings, command=WORKER) as front, aiohttp.ClientSession() as session:
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setblocking(False)
        runner, address = await web.start(front.service, sock), f"http://127.0.0.1:{sock.getsockname()[1]}"

        async def post(path: str, body: Body) -> Body:
            async with session.post(address + path, json={"model": MODEL, **body}) as response:
                answer: Body = await response.json()
                assert response.status == 200, answer
                return answer

        async def found() -> int:
            pager = (await front.engine(MODEL).call("status", {}, 30.0))["pager"]
            return sum(pager[f"hit_{tier}_tokens"] for tier in ("device", "host", "nvme"))

        await front.service.load(MODEL)
        yield post, found
        await front.service.unload(None)
        await runner.cleanup()


async def turn(post: Post, chat: Chat, place: int) -> tuple[Counts, int]:
    """One answer: to a question, or to the results of the calls before."""
    is_asked = place % 2 == 0
    if is_asked:
        chat.ask(f"And how is it in {CITIES[place // 2 % len(CITIES)]}? Thank you \u2014 merci.")
    return chat.take(await post(chat.path, chat.body(place, must_call=is_asked)))


class Told(NamedTuple):
    """Of a conversation, turn by turn: the parts of what was known before that were found, and that were not computed.

    The last turn came after a restart of the daemon. `calls`: of tools, in the whole of it.
    """

    found: list[float]
    cached: list[float]
    calls: int


async def converse(settings: Settings, turns: int) -> dict[str, Told]:
    """A conversation in each dialect, of so many turns and one more after a restart."""
    chats = {kind.__name__: kind() for kind in DIALECTS}
    known = dict.fromkeys(chats, 0)
    told = {name: Told([], [], 0) for name in chats}
    for places in (range(turns), range(turns, turns + 1)):
        async with serving(settings) as (post, found):
            for name, chat in chats.items():
                for place in places:
                    before = await found()
                    counts, calls = await turn(post, chat, place)
                    if known[name]:
                        told[name].found.append((await found() - before) / known[name])
                        told[name].cached.append(counts.cached / known[name])
                    known[name] = counts.prompt + counts.answer
                    told[name] = told[name]._replace(calls=told[name].calls + calls)
    return told


def check(told: dict[str, Told], calls: int) -> None:
    for name, chat in told.items():
        *here, restarted = chat.cached
        assert min(*chat.found, *here) >= MIN_REUSE and restarted > 0.0, (name, chat)
        assert chat.calls >= calls or name == "Ollama", (name, chat)


def settings_for(models_dir: Path, tmp_path: Path, pages_mib: int) -> Settings:
    sizes = {"device_mem": pages_mib << 20, "host_mem": 0, "nvme_mem": 2 * pages_mib << 20}
    return make_settings(tmp_path, models_dir=models_dir, default_model=MODEL, **sizes)


async def test_a_chat_with_tools_reuses_its_history_in_every_dialect(model_dir, tmp_path):
    (tmp_path / "models").mkdir()
    with_template(model_dir, tmp_path / "models" / MODEL, TEMPLATE)  # its own knows no tools
    check(await converse(settings_for(tmp_path / "models", tmp_path, 512), TURNS), calls=TURNS // 2)


async def test_the_same_with_a_model_that_knows_tools(tmp_path):
    """Qwen2.5-Coder-0.5B, where somebody put its file."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    file = cache / "tierd-test-models" / QWEN
    if not file.exists():
        pytest.skip(f"{file} is not there: no package of the test environment brings it")
    import_model(file, tmp_path / "models", MODEL, None, lambda *_: None)
    told = await converse(settings_for(tmp_path / "models", tmp_path, 256), TURNS)
    check(told, calls=TURNS // 2)
    assert told["Ollama"].calls >= 1  # it calls when it is merely offered tools
