"""What a model says, told apart: text for the reader, reasoning, calls of tools. The parsers' common parts; pure.

A parser gets the text of an answer in pieces, cut anywhere, and returns what is certain. What it has said of a text is
the same however the text was cut. What looked like a call and is none comes out as text: nothing is ever lost.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Protocol

# Before the text of a special token, so that characters that merely spell one mean nothing. A noncharacter: it stands
# in no text, and `clean` keeps it out of what a model spells.
CONTROL = "\ufdd0"


@dataclass(frozen=True, slots=True)
class Text:
    """For the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call of a tool. `arguments`: JSON text of an object."""

    name: str
    arguments: str


Piece = Text | Thought | Call


class Parser(Protocol):
    """One answer's parser. Threading: one owner."""

    def push(self, text: str) -> list[Piece]:
        """What is certain now that `text` is known."""

    def finish(self) -> list[Piece]:
        """The rest, when no more text comes."""


@dataclass(slots=True)
class Said:
    """What was said since somebody was last told. `calls`: as events have them."""

    text: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    thinking_tokens: int = field(default=0, compare=False)  # of the tokens that said it, those of `thinking`

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls)

    def add(self, more: Said) -> None:
        """Append what was said after it."""
        self.text += more.text
        self.thinking += more.thinking
        self.calls += more.calls
        self.thinking_tokens += more.thinking_tokens

    def data(self) -> dict[str, Any]:
        """The fields of a `text` event."""
        data: dict[str, Any] = {"text": self.text}
        if self.thinking:
            data["thinking"] = self.thinking
            data["thinking_tokens"] = self.thinking_tokens
        if self.calls:
            data["calls"] = self.calls
        return data


def clean(text: str) -> str:
    """Text that a model spelled, without the mark of special tokens."""
    return text.replace(CONTROL, "\ufffd")


def plain(text: str) -> list[Piece]:
    """Text for the reader, with special tokens as they are written; nothing for no text."""
    text = text.replace(CONTROL, "")
    return [Text(text)] if text else []


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, shorter than `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class JsonSpan:
    """Finds the end of one JSON object or array in a text that grows. It checks brackets and strings, nothing else."""

    _OUTSIDE = re.compile(r'["{}\[\]]|[^\s\w:,.+\-]')  # what ends nothing and begins nothing cannot stand there
    _INSIDE = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._place = 0
        self._depth = 0
        self._in_string = False
        self._end: int | None = None
        self.broken = False

    def end(self, text: str) -> int | None:
        """Where the value that begins at 0 ends; None when it does not end in `text`, which only ever grows."""
        while not self.broken and self._end is None:
            found = (self._INSIDE if self._in_string else self._OUTSIDE).search(text, self._place)
            if found is None:
                self._place = max(self._place, len(text))  # it may point behind an escape that is not there yet
                return None
            self._place = found.end()
            match found[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\" if self._in_string:
                    self._place += 1
                case "{" | "[":
                    self._depth += 1
                case "}" | "]":
                    self._depth -= 1
                    if self._depth <= 0:
                        self._end = self._place
                case _:
                    self.broken = True
        return self._end


def calls_in(text: str) -> list[Call] | None:
    """The calls that a JSON object or an array of objects spells; None when it spells anything else.

    `{"name": ..., "arguments": {...}}`, or `parameters` in their place, or that inside of `function`.
    """
    value = parse(text)
    items = value if isinstance(value, list) else [value]
    calls = [_call(item) for item in items]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def call_named(name: str, arguments: str) -> list[Call] | None:
    """The call of a tool whose name is known; None when its arguments are no JSON object."""
    value = parse(arguments)
    text = dumped(value) if isinstance(value, dict) else None
    return None if text is None else [Call(name, text)]


def _call(item: Any) -> Call | None:
    if isinstance(item, dict) and isinstance(item.get("function"), dict):
        item = item["function"]
    if not isinstance(item, dict):
        return None
    name, given = item.get("name"), item.get("arguments", item.get("parameters", {}))
    if isinstance(given, str):
        given = parse(given) if given.strip() else {}
    arguments = dumped(given) if isinstance(given, dict) else None
    return Call(name, arguments) if isinstance(name, str) and name and arguments is not None else None


def parse(text: str) -> Any:
    """The value of a JSON text, None when it has none. Line ends inside of strings pass: models write them."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def dumped(value: Any) -> str | None:
    """A parsed value as JSON text, None when it holds numbers that JSON cannot write or is nested too deep."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair: legal as an escape only
        return json.dumps(value)
    except (ValueError, RecursionError):
        return None
    return text


def _refuse(constant: str) -> None:
    raise ValueError(constant)
