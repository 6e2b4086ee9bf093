"""Chat templates: messages to the tokens a model was trained on.

The template is a program from a model directory, so it runs in jinja2's immutable sandbox, with what `transformers`
offers it (`trim_blocks`, `lstrip_blocks`, loop controls, `raise_exception`, `tojson`, `strftime_now`,
`{% generation %}`) and limits on its output and its time.

A message must not be able to end its own turn by spelling `<|im_end|>`. Special tokens inside of messages, tools, calls
and results are replaced by markers while the template runs and become ordinary characters afterwards; those the
template itself writes are parsed. Servers that render to one string and parse all of it cannot tell the two apart.

A turn whose sampled tokens are known is a marker too: what the template writes around it is tokenized, the turn itself
is put in as it was sampled. See `turns`.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tierd.daemon.engine.tokens import Vocabulary
from tierd.daemon.engine.tool_formats import Style, detect
from tierd.daemon.engine.tool_messages import replaced, tool_dicts, turn_dicts
from tierd.daemon.engine.turns import TAIL_CHARS, Turn
from tierd.daemon.errors import BadRequest, ModelInvalid, Unsupported
from tierd.daemon.protocol import Message, Tool

MAX_RENDERED_CHARS = 16 << 20  # as much as the largest frame can carry in; a template that doubles it is broken
MAX_RENDER_S = 2.0  # of a processor: thousands of messages take some milliseconds
MAX_TEMPLATE_BYTES = 1 << 20
_MAX_FRAME_CHARS = 64  # that a template writes between the beginning of a turn and its content


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as tokens. `tail`: its last characters. `thinking`: it ends inside of reasoning."""

    tokens: list[int]
    tail: str
    thinking: bool


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training. Here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class _TooLong(Exception):
    """The template has had its time, or makes something that no conversation needs."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also bounds the time: every turn of a loop, one that a filter leaves out too, and every call looks at the clock.

    What a single operation may take is bounded for products and powers alone, and memory is not.
    """

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols],
            optimized=False,  # constants are computed within the time of a rendering, not with the loading of a model
        )  # fmt: skip
        self._end_s = math.inf

    def bounded(self, source: str) -> jinja2.Template:
        """The template with the looks in it. Raises jinja2.TemplateError, RecursionError."""
        tree = self.parse(source)
        look = nodes.Call(nodes.EnvironmentAttribute("look"), [], [], None, None)
        for loop in list(tree.find_all(nodes.For)):
            loop.body.insert(0, nodes.ExprStmt(look, lineno=loop.lineno))
            loop.test = nodes.And(look, loop.test) if loop.test is not None else None
        return self.from_string(tree)

    def begin(self) -> None:
        """The time of a rendering begins."""
        self._end_s = time.thread_time() + MAX_RENDER_S

    def look(self) -> bool:
        """True, while there is time. Raises _TooLong."""
        if time.thread_time() > self._end_s:
            raise _TooLong
        return True

    def call(self, context: Context, called: Any, /, *args: Any, **named: Any) -> Any:
        """Of functions, macros, blocks."""
        self.look()
        return super().call(context, called, *args, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Products and powers, of which a single one could take all time."""
        numbers = [one for one in (left, right) if isinstance(one, int | float)]
        if any(abs(one) > (1024 if operator == "**" else 2**64) for one in numbers):
            raise _TooLong
        if len(numbers) == 1:  # of a text or a list
            (many,) = (one for one in (left, right) if one is not numbers[0])
            if len(many) * numbers[0] > MAX_RENDERED_CHARS:
                raise _TooLong
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A compiled chat template. Threading: one thread at a time, that of `Vocabulary.encode`."""

    def __init__(self, source: str, vocabulary: Vocabulary, special: dict[str, str]) -> None:
        """`special`: `bos_token`, `eos_token` as text, for templates that write them.

        Raises ModelInvalid when the template is not valid Jinja.
        """
        self._vocabulary = vocabulary
        self._special = special
        written = sorted(vocabulary.special, key=len, reverse=True)  # the longest first: it may hold a shorter one
        self._control = re.compile("|".join(map(re.escape, written)) if written else r"(?!)")
        environment = self._sandbox = _Sandbox()
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.bounded(source)
        except (jinja2.TemplateError, RecursionError) as exc:
            raise ModelInvalid(f"this model's chat template is broken: {exc}", hint="pull the model again") from exc
        self.dialect = detect(source, vocabulary.special, vocabulary.added)
        self._shows_tools = "tools" in source and self._tries_tools()
        self._begins_thinking: dict[bool | None, bool | None] = {}  # of the three things that can be asked for

    @classmethod
    def load(cls, path: Path, vocabulary: Vocabulary, special: dict[str, str]) -> ChatTemplate | None:
        """The template of a model directory, None when the model has none."""
        if not path.exists():
            return None
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ModelInvalid(f"{path.name} is larger than {MAX_TEMPLATE_BYTES} bytes")
        return cls(path.read_text(encoding="utf-8"), vocabulary, special)

    @property
    def knows_tools(self) -> bool:
        """Whether the model is told of tools and its calls can be read."""
        return self._shows_tools and self.dialect.style is not Style.NONE

    def begins_thinking(self, thinking: bool | None) -> bool | None:
        """True when prompts end inside of reasoning, None when they do not and the model may begin one."""
        if thinking not in self._begins_thinking:
            self._begins_thinking[thinking] = self._tries_thinking(thinking)
        return self._begins_thinking[thinking]

    def _tries_thinking(self, thinking: bool | None) -> bool | None:
        try:
            rendered = self.render([Message("user", "x")], thinking=thinking)
        except BadRequest:
            return None
        return self.dialect.opens_thinking(rendered) or None

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), thinking: bool | None = None
    ) -> str:
        """The conversation as text, ending where the assistant is to go on. Raises BadRequest."""
        return self._render(turn_dicts(messages, self.dialect.style), tool_dicts(tools), thinking)

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        thinking: bool | None = None,
        turns: Mapping[int, Turn] | None = None,
    ) -> Prompt:
        """The conversation as tokens. `turns`: by place in `messages`, answers whose tokens are known.

        Raises BadRequest when the template refuses the messages, Unsupported for tools that it does not show.
        """
        if not messages:
            raise BadRequest("messages is empty", param="messages")
        if tools and not self.knows_tools:
            raise Unsupported(
                "this model does not know how to call tools", hint="leave tools out, or choose another model",
                param="tools",
            )  # fmt: skip
        known = dict(turns or {})
        while known:
            try:
                prompt, lost = self._encode(messages, tools, thinking, known)
            except BadRequest:
                break  # perhaps of what stands in for a turn: the messages themselves decide
            if not lost:
                return prompt
            known = {place: turn for place, turn in known.items() if place not in lost}
        return self._encode(messages, tools, thinking, {})[0]

    def _encode(
        self, messages: Sequence[Message], tools: Sequence[Tool], thinking: bool | None, turns: Mapping[int, Turn]
    ) -> tuple[Prompt, set[int]]:
        """The prompt, and the places of turns that the template did not show whole: it is void if there are any."""
        nonce = secrets.token_hex(8)  # nobody can write a marker without knowing it
        marked: list[str | int] = []  # what a marker stands for: a special token's text, or a turn's place

        def mark(what: str | int) -> str:
            marked.append(what)
            return f"\ue000{nonce}.{len(marked) - 1}\ue001"

        dicts = turn_dicts(messages, self.dialect.style)
        shown = [
            self._stand_in(place, turns[place], mark) if place in turns
            else replaced(turn, lambda text: self._control.sub(lambda found: mark(found[0]), text))
            for place, turn in enumerate(dicts)
        ]  # fmt: skip
        functions = replaced(tool_dicts(tools), lambda text: self._control.sub(lambda found: mark(found[0]), text))
        rendered = self._render(shown, functions, thinking)
        if thinking is False and self.dialect.opens_thinking(rendered):
            # A template that always begins the reasoning: it is ended at once, as such models have learned it.
            rendered = rendered.rstrip() + self.dialect.no_thought
        parts = re.split(rf"(?:\ue000|\\ue000){nonce}\.(\d+)(?:\ue001|\\ue001)", rendered)
        marks = [marked[int(number)] for number in parts[1::2]]
        if lost := {place for place in turns if not _whole(marks, place, turns[place])}:
            return Prompt([], "", False), lost
        tokens: list[int] = []
        before, inside = parts[0], False
        for what, text in zip(marks, parts[2::2], strict=True):
            if isinstance(what, int):
                if not inside:
                    before = _joint(before, turns[what].tail)
                inside = turns[what].thought and not inside
                if inside:
                    continue  # the marker of the reasoning; that of the content follows
            if before:
                tokens += self._vocabulary.encode(before)
            tokens += self._vocabulary.encode_as_text(what) if isinstance(what, str) else turns[what].tokens
            before = text
        if before:
            tokens += self._vocabulary.encode(before)
        return Prompt(tokens, before[-TAIL_CHARS:], self.dialect.opens_thinking(before)), set()

    def _stand_in(self, place: int, turn: Turn, mark: Callable[[str | int], str]) -> dict[str, Any]:
        """A turn of the assistant with markers for what was sampled: the template writes what goes around it."""
        shown: dict[str, Any] = {"role": "assistant"}
        if turn.thought:
            shown["reasoning_content"] = shown["thinking"] = mark(place)
        return shown | {"content": mark(place)}

    def _render(self, turns: list[dict[str, Any]], tools: list[dict[str, Any]], thinking: bool | None) -> str:
        parts: list[str] = []
        length = 0
        # Qwen and SmolLM3 know the first name, DeepSeek and Granite the second.
        options = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        self._sandbox.begin()
        try:
            for part in self._template.generate(
                messages=turns, tools=tools or None, documents=None, add_generation_prompt=True, **options,
                **self._special,
            ):  # fmt: skip
                length += len(part)
                if length > MAX_RENDERED_CHARS:
                    raise BadRequest(f"the chat template makes more than {MAX_RENDERED_CHARS} characters of this")
                parts.append(part)
        except BadRequest:
            raise
        except _TooLong:
            raise BadRequest("this model's chat template takes too long for these messages", param="messages") from None
        except Exception as exc:
            # A template can fail in any way Python can. Its own complaint is meant for the user; other texts may quote
            # the conversation.
            reason = str(exc) if type(exc) is jinja2.TemplateError else type(exc).__name__
            raise BadRequest(f"this model's chat template refuses these messages: {reason}", param="messages") from exc
        return "".join(parts)

    def _tries_tools(self) -> bool:
        """Whether the name of a tool gets into the prompt."""
        name = f"probe_{secrets.token_hex(8)}"
        tools = [Tool(name, "x", {"type": "object", "properties": {}})]
        for messages in ([Message("user", "x")], [Message("system", "x"), Message("user", "x")]):
            with contextlib.suppress(BadRequest):
                return name in self.render(messages, tools)
        return False


def _whole(marks: list[str | int], place: int, turn: Turn) -> bool:
    """Whether the markers of a turn came out of the template once, and next to each other."""
    found = [number for number, mark in enumerate(marks) if mark == place and isinstance(mark, int)]
    return len(found) == 1 + turn.thought and found[-1] - found[0] == int(turn.thought)


def _joint(before: str, tail: str) -> str:
    """What the template wrote up to a turn, made to end as the prompt did that the turn was sampled after.

    Then it had no turn to show: it may have left out a space, or begun a reasoning that it no longer shows.
    """
    place = before.rfind(tail)
    if place >= 0 and len(before) - place - len(tail) <= _MAX_FRAME_CHARS:
        return before[: place + len(tail)]
    length = next((length for length in range(len(tail), 0, -1) if before.endswith(tail[:length])), len(tail))
    return before + tail[length:]


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's escaping of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
