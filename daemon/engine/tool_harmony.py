"""The parser of gpt-oss' answers: messages with a header that names a channel and, for calls, a recipient. Pure."""

from __future__ import annotations

import re

from tierd.daemon.engine.answer import CONTROL, Piece, Thought, call_named, overlap, plain


class Harmony:
    """`analysis` is reasoning, a message to somebody is a call, everything else is for the reader.

    The prompt ends inside of the first header.
    """

    _MESSAGE = CONTROL + "<|message|>"
    _ENDS = tuple(CONTROL + name for name in ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"))
    _END = re.compile("|".join(map(re.escape, _ENDS)))
    _RECIPIENT = re.compile(r"\bto=([\w.\-]+)")
    _CHANNEL = re.compile(CONTROL + r"<\|channel\|>\s*(\w+)")

    def __init__(self) -> None:
        self._buffer = ""
        self._channel: str | None = None  # None in a header
        self._recipient = ""

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while (found := self._header() if self._channel is None else self._body()) is not None:
            pieces += found
        return pieces

    def finish(self) -> list[Piece]:
        left, self._buffer = self._buffer, ""
        if self._channel is not None:
            return self._piece(left)
        return [] if CONTROL in left else plain(left)  # a header says nothing to the reader

    def _header(self) -> list[Piece] | None:
        text = self._buffer
        if text.lstrip()[:1] not in ("", CONTROL, "t", "a"):  # of a marker, of `to=`, of `assistant`
            self._channel, self._recipient = "final", ""  # a model that forgot its form
            return []
        place = text.find(self._MESSAGE)
        if place < 0:
            return None
        channel, recipient = self._CHANNEL.search(text, 0, place), self._RECIPIENT.search(text, 0, place)
        self._channel = channel[1] if channel else "final"
        self._recipient = recipient[1].removeprefix("functions.") if recipient else ""
        self._buffer = text[place + len(self._MESSAGE) :]
        return []

    def _body(self) -> list[Piece] | None:
        found = self._END.search(self._buffer)
        if found is None:
            if self._recipient:
                return None  # a call is told whole
            held = max(overlap(self._buffer, marker) for marker in self._ENDS)
            certain = self._buffer[: len(self._buffer) - held]
            self._buffer = self._buffer[len(certain) :]
            return self._piece(certain) or None
        body = self._buffer[: found.start()]
        self._buffer = self._buffer[found.start() if found[0].endswith("<|channel|>") else found.end() :]
        pieces = self._piece(body)
        self._channel = None
        return pieces

    def _piece(self, body: str) -> list[Piece]:
        if self._recipient:
            calls = call_named(self._recipient, body or "{}")
            return list(calls) if calls is not None else plain(body)
        if self._channel == "analysis":
            return [Thought(body.replace(CONTROL, ""))] if body else []
        return plain(body)
