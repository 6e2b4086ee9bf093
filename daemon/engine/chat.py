"""Chat templates: messages to the tokens a model was trained on.

The template is a program from a model directory, so it runs in jinja2's immutable sandbox, with what `transformers`
offers it (`trim_blocks`, `lstrip_blocks`, loop controls, `raise_exception`, `tojson`, `strftime_now`,
`{% generation %}`) and a limit on its output.

A message must not be able to end its own turn by spelling `<|im_end|>`. Special tokens inside a message are
replaced by markers while the template runs and become ordinary characters afterwards; those the template itself writes
are parsed. Servers that render to one string and parse all of it cannot tell the two apart.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tierd.daemon.engine.tokens import Vocabulary
from tierd.daemon.errors import BadRequest, ModelInvalid
from tierd.daemon.protocol import Message

MAX_RENDERED_CHARS = 16 << 20  # as much as the largest frame can carry in; a template that doubles it is broken
MAX_TEMPLATE_BYTES = 1 << 20


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training. Here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


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
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as exc:
            raise ModelInvalid(f"this model's chat template is broken: {exc}", hint="pull the model again") from exc

    @classmethod
    def load(cls, path: Path, vocabulary: Vocabulary, special: dict[str, str]) -> ChatTemplate | None:
        """The template of a model directory, None when the model has none."""
        if not path.exists():
            return None
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ModelInvalid(f"{path.name} is larger than {MAX_TEMPLATE_BYTES} bytes")
        return cls(path.read_text(encoding="utf-8"), vocabulary, special)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, ending where the assistant is to go on. Raises BadRequest."""
        return self._render([{"role": message.role, "content": message.content} for message in messages])

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The conversation as tokens. Raises BadRequest when the template refuses the messages."""
        if not messages:
            raise BadRequest("messages is empty", param="messages")
        nonce = secrets.token_hex(8)  # nobody can write a marker without knowing it
        smuggled: list[str] = []

        def mark(match: re.Match[str]) -> str:
            smuggled.append(match[0])
            return f"\ue000{nonce}.{len(smuggled) - 1}\ue001"

        turns = [
            {"role": self._control.sub(mark, message.role), "content": self._control.sub(mark, message.content)}
            for message in messages
        ]
        rendered = self._render(turns)
        if not smuggled:
            return self._vocabulary.encode(rendered)
        pieces = re.split(f"\ue000{nonce}\\.(\\d+)\ue001", rendered)
        tokens: list[int] = []
        for place, piece in enumerate(pieces):
            if place % 2:
                tokens += self._vocabulary.encode_as_text(smuggled[int(piece)])
            elif piece:
                tokens += self._vocabulary.encode(piece)
        return tokens

    def _render(self, turns: list[dict[str, str]]) -> str:
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(
                messages=turns, tools=None, documents=None, add_generation_prompt=True, **self._special
            ):
                length += len(part)
                if length > MAX_RENDERED_CHARS:
                    raise BadRequest(f"the chat template makes more than {MAX_RENDERED_CHARS} characters of this")
                parts.append(part)
        except BadRequest:
            raise
        except Exception as exc:
            # A template can fail in any way Python can. Its own complaint is meant for the user; other texts may quote
            # the conversation.
            reason = str(exc) if type(exc) is jinja2.TemplateError else type(exc).__name__
            raise BadRequest(f"this model's chat template refuses these messages: {reason}", param="messages") from exc
        return "".join(parts)


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
