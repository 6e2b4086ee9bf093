"""Parsers of answers, one class for each way in which models write reasoning and calls of tools. Pure.

Those of gpt-oss are in `tool_harmony`.

    Reasoning   <think> ... </think>, then what another parser reads
    Tagged      <tool_call>{...}</tool_call> (Hermes, Qwen); [TOOL_CALLS][{...}], [TOOL_CALLS]name[ARGS]{...} (Mistral)
    Untagged    an answer that is a call as JSON where tags were asked for, then what another parser reads
    Bare        an answer that is a call as JSON, or follows <|python_tag|> (Llama 3)

See `answer` for what they have in common. White space around calls and reasoning belongs to the form and is dropped.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection

from tierd.daemon.engine.answer import (
    CONTROL,
    Call,
    JsonSpan,
    Parser,
    Piece,
    Thought,
    call_named,
    calls_in,
    dumped,
    overlap,
    plain,
)


class Verbatim:
    """Reads nothing into a text."""

    def push(self, text: str) -> list[Piece]:
        return plain(text)

    def finish(self) -> list[Piece]:
        return []


class Reasoning:
    """Reasoning between two markers at the beginning of an answer; `rest` reads what follows.

    `begun`: the prompt has written the opening marker already.
    """

    def __init__(self, opening: str, closing: str, rest: Parser, *, begun: bool = False) -> None:
        self._opening, self._closing, self._rest = opening, closing, rest
        self._buffer = ""
        self._read: Callable[[], list[Piece]] = self._thinking if begun else self._before
        self._fresh = True  # nothing but white space since the last marker

    @property
    def thinking(self) -> bool:
        """Whether reasoning goes on."""
        return self._read == self._thinking

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        return self._read()

    def finish(self) -> list[Piece]:
        left, self._buffer = self._buffer, ""
        if self.thinking:
            left = left.strip() if self._fresh else left.rstrip()
            return [Thought(left.replace(CONTROL, ""))] if left else []
        return (self._rest.push(left) if left else []) + self._rest.finish()

    def _before(self) -> list[Piece]:
        text = self._buffer.lstrip()
        if text.startswith(self._opening):
            self._buffer, self._read = text[len(self._opening) :], self._thinking
            return self._read()
        if self._opening.startswith(text):
            return []
        self._read, self._fresh = self._after, False
        return self._read()

    def _thinking(self) -> list[Piece]:
        text = self._buffer
        end = text.find(self._closing)
        if end >= 0:
            self._buffer, self._read = text[end + len(self._closing) :], self._after
            thought = text[:end].rstrip()
        else:
            held = len(text) - overlap(text, self._closing)
            thought = text[:held].rstrip()  # white space before the end is none of it
            self._buffer = text[len(thought) :]
        if self._fresh:
            thought = thought.lstrip()
            self._fresh = not thought
        pieces: list[Piece] = [Thought(thought.replace(CONTROL, ""))] if thought else []
        if end >= 0:
            self._fresh = True
            pieces += self._read()
        return pieces

    def _after(self) -> list[Piece]:
        text, self._buffer = self._buffer, ""
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return self._rest.push(text) if text else []


class Tagged:
    """Calls between `opening` and `closing`; where `closing` is empty, the end of the JSON is the end.

    `arguments`: the marker between a name and its arguments, for models that write `name[ARGS]{...}` too.
    """

    _NAME = re.compile(r"[\w.\-]*")

    def __init__(self, opening: str, closing: str, arguments: str = "") -> None:
        self._opening, self._closing, self._arguments = opening, closing, arguments
        self._buffer = ""
        self._gap = ""  # white space before the call that is being read
        self._space = ""  # and after its opening marker
        self._span: JsonSpan | None = None  # of a call that is being read
        self._called = False

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        return self._calls(ended=False) + self._certain()

    def finish(self) -> list[Piece]:
        pieces = self._calls(ended=True)
        left, self._buffer = self._buffer, ""
        return pieces + ([] if self._called and not left.strip() else plain(left))

    def _calls(self, *, ended: bool) -> list[Piece]:
        """Everything up to a call that is not whole, or to text that no call follows."""
        pieces: list[Piece] = []
        while (found := self._text() if self._span is None else self._call(self._span, ended=ended)) is not None:
            pieces += found
        return pieces

    def _text(self) -> list[Piece] | None:
        """Up to the next call; None when none begins."""
        place = self._buffer.find(self._opening)
        if place < 0:
            return None
        before = self._buffer[:place].rstrip()
        self._gap = self._buffer[len(before) : place]
        self._buffer = self._buffer[place + len(self._opening) :]
        self._span, self._space = JsonSpan(), ""
        return plain(before)

    def _certain(self) -> list[Piece]:
        """Text that no call can follow at once."""
        if self._span is not None:
            return []
        text = self._buffer
        certain = text[: len(text) - overlap(text, self._opening)].rstrip()
        self._buffer = text[len(certain) :]
        return plain(certain)

    def _call(self, span: JsonSpan, *, ended: bool) -> list[Piece] | None:
        """The call at the beginning of the buffer; None while it is not whole."""
        text = self._buffer.lstrip()
        self._space += self._buffer[: len(self._buffer) - len(text)]
        self._buffer, name, start = text, "", 0
        if self._arguments and text[:1] not in ("{", "[", ""):
            named = self._name(text)
            if named is None:
                return self._broken() if ended else None
            name, start = named
            start += len(text[start:]) - len(text[start:].lstrip())
        if text[start : start + 1] not in ("{", "[", ""):
            return self._broken()
        end = span.end(text[start:])
        if end is None:
            return self._broken() if ended or span.broken else None
        end += start
        rest = text[end:].lstrip()
        if not ended and rest != self._closing and self._closing.startswith(rest):
            return None
        calls = call_named(name, text[start:end]) if name else calls_in(text[start:end])
        if calls is None:
            return self._broken()
        self._buffer = rest.removeprefix(self._closing) if self._closing else text[end:]
        self._span, self._called = None, True
        return list(calls)

    def _name(self, text: str) -> tuple[str, int] | None:
        """A name and where its arguments begin; an empty name when there is none, None while it is not whole."""
        found = self._NAME.match(text)
        assert found is not None
        if found.end() == len(text):
            return None
        if text[found.end()] != self._arguments[0]:
            return "", 0
        place = text.find(self._arguments, found.end())
        return (found[0], place + len(self._arguments)) if place >= 0 else None

    def _broken(self) -> list[Piece]:
        """What began as a call is text; what stands in it is read on."""
        self._span, self._called = None, False
        self._buffer = self._space + self._buffer
        return plain(self._gap + self._opening)


class Untagged:
    """Calls that a model wrote without the tags it was asked for: small ones forget them. `rest` reads everything else.

    Objects at the beginning of an answer count as calls when they name one of `tools`.
    """

    def __init__(self, tools: Collection[str], rest: Parser) -> None:
        self._tools, self._rest = tools, rest
        self._buffer = ""
        self._span: JsonSpan | None = JsonSpan()  # None when nothing more can be such a call
        self._called = False

    def push(self, text: str) -> list[Piece]:
        if self._span is None:
            return self._rest.push(text)
        self._buffer += text
        pieces: list[Piece] = []
        while self._span is not None:
            head = self._buffer.lstrip()
            end = self._span.end(head) if head[:1] == "{" else None
            if end is None and not self._span.broken and head[:1] in ("{", ""):
                return pieces
            calls = calls_in(head[:end]) if end is not None else None
            if calls is None or any(call.name not in self._tools for call in calls):
                return pieces + self._hand_on()
            pieces += calls
            self._buffer, self._span, self._called = head[end:], JsonSpan(), True
        return pieces

    def finish(self) -> list[Piece]:
        if self._called and not self._buffer.strip():
            self._buffer = ""
        return (self._hand_on() if self._span is not None else []) + self._rest.finish()

    def _hand_on(self) -> list[Piece]:
        text, self._buffer, self._span = self._buffer, "", None
        return self._rest.push(text) if text else []


class Bare:
    """An answer that is a call from its first character on: JSON objects, or what follows `marker`.

    An object counts as a call when it names one of `tools`.
    """

    _PYTHON = re.compile(r"\s*([\w.\-]+)\.call\((.*)\)\s*", re.DOTALL)

    def __init__(self, marker: str, tools: Collection[str]) -> None:
        self._marker, self._tools = marker, tools
        self._buffer = ""
        self._span: JsonSpan | None = None
        self._marked = False
        self._may_begin = True  # a bare object here would be a call
        self._called = False  # nothing but a separator since the last call

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while (found := self._next(ended=False)) is not None:
            pieces += found
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        while (found := self._next(ended=True)) is not None:
            pieces += found
        left, self._buffer = self._buffer, ""
        return pieces + ([] if self._called and not left.strip(" \t\r\n;") else plain(left))

    def _next(self, *, ended: bool) -> list[Piece] | None:
        """One step; None when more text is needed."""
        if self._span is not None:
            return self._call(self._span, ended=ended)
        head = self._buffer.lstrip(" \t\r\n;" if self._called else " \t\r\n")
        if head.startswith(self._marker):
            self._buffer, self._span, self._marked = head[len(self._marker) :].lstrip(), JsonSpan(), True
            return []
        if self._may_begin:
            if not head or self._marker.startswith(head):
                return None
            if head[0] == "{":
                self._buffer, self._span, self._marked = head, JsonSpan(), False
                return []
            self._may_begin = False
        place = self._buffer.find(self._marker)
        certain = self._buffer[: place if place >= 0 else len(self._buffer) - overlap(self._buffer, self._marker)]
        certain = certain.rstrip()
        if not certain:
            return None
        self._buffer, self._called = self._buffer[len(certain) :], False
        return plain(certain)

    def _call(self, span: JsonSpan, *, ended: bool) -> list[Piece] | None:
        if self._marked:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return self._text(0) if ended else None
            if self._buffer[0] != "{":
                return self._python() if ended else None
        end = span.end(self._buffer)
        if span.broken or (end is None and ended):
            return self._text(len(self._buffer) if ended else 0)
        if end is None:
            return None
        calls = calls_in(self._buffer[:end])
        if calls is None or not (self._marked or all(call.name in self._tools for call in calls)):
            return self._text(end)
        self._buffer, self._span, self._called, self._may_begin = self._buffer[end:], None, True, True
        return list(calls)

    def _text(self, end: int) -> list[Piece]:
        """It was no call: text, and no bare object is a call from here on."""
        found, self._buffer = self._buffer[:end], self._buffer[end:]
        self._span, self._may_begin, self._called = None, False, False
        return plain((self._marker if self._marked else "") + found)

    def _python(self) -> list[Piece]:
        """`name.call(key="value")`, Llama's way to call tools that it was trained on; at the end of an answer."""
        found = self._PYTHON.fullmatch(self._buffer)
        if found is not None and found[1] in self._tools:
            try:
                node = ast.parse(f"f({found[2]})", mode="eval").body
                assert isinstance(node, ast.Call)
                arguments = dumped({str(word.arg): ast.literal_eval(word.value) for word in node.keywords})
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                arguments = None
            if arguments is not None:
                self._buffer, self._span, self._called = "", None, True
                return [Call(found[1], arguments)]
        return self._text(len(self._buffer))
