"""Events of one stream, between the task that reads the engine and the task that writes to the client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from tierd.daemon.errors import TierdError
from tierd.daemon.protocol import TERMINAL, Event

# With the 64 KiB high-water mark of a transport and one frame on its way, a reader that stands still costs < 256 KiB.
MAX_PENDING_BYTES = 128 << 10
_EVENT_BYTES = 64  # what an event costs beside its text
_TOKEN_BYTES = 8
_LOGPROB_BYTES = 24  # of one token or alternative


class SlowReader(Exception):
    """The client does not read what it asked for: its connection is to be cut."""


class EngineLost(Exception):
    """The engine ended before it said a terminal event."""


class Inbox:
    """A bounded queue that never makes the writer wait: one slow client must not hold up the others of an engine.

    Text of one kind that waits is joined when it is taken. Progress that waits is replaced by newer progress.

    Threading: for one event loop.
    """

    def __init__(self, max_bytes: int = MAX_PENDING_BYTES) -> None:
        self._pending: deque[Event] = deque()
        self._pending_bytes = 0
        self._max_bytes = max_bytes
        self._wake = asyncio.Event()
        self._closed: Exception | None = None

    def put(self, event: Event) -> bool:
        """Add an event. After an overflow, a loss or a terminal event it is dropped. False for the one too many."""
        if self._closed is not None:
            return True
        if event.ev == "progress" and self._pending and self._pending[-1].ev == "progress":
            self._pending_bytes -= _size_bytes(self._pending.pop())
        self._pending.append(event)
        self._pending_bytes += _size_bytes(event)
        if event.ev in TERMINAL:
            self._closed = EngineLost("after the terminal event")
        elif self._pending_bytes > self._max_bytes:
            self._pending.clear()
            self._closed = SlowReader()
        self._wake.set()
        return not isinstance(self._closed, SlowReader)

    def lose(self) -> None:
        """The engine is gone. What it said before is still delivered."""
        self._closed = self._closed or EngineLost()
        self._wake.set()

    def fail(self, error: TierdError) -> None:
        """End the stream with an error of the daemon, after what already waits."""
        self._closed = self._closed or error
        self._wake.set()

    async def get(self, timeout_s: float) -> Event:
        """The next event; consecutive texts come as one.

        Raises TimeoutError when none comes in time, EngineLost, SlowReader, or the error given to `fail`.
        """
        while not self._pending:
            if self._closed is not None:
                raise self._closed
            self._wake.clear()
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        run = [self._take()]
        while self._pending and are_joinable(run[-1], self._pending[0]):
            run.append(self._take())
        return run[0] if len(run) == 1 else joined(run)

    def _take(self) -> Event:
        event = self._pending.popleft()
        self._pending_bytes -= _size_bytes(event)
        return event


def are_joinable(first: Event, second: Event) -> bool:
    """Whether two events can be said as one without a change of order: texts of one answer and of one kind."""
    if first.ev != "text" or second.ev != "text" or first.data.get("choice") != second.data.get("choice"):
        return False
    kind = _kind(first)
    return len(kind) < 2 and kind == _kind(second)


def joined(run: Sequence[Event]) -> Event:
    """Events each of which is joinable with the next, as one."""
    data: dict[str, Any] = {"text": "".join(event.data["text"] for event in run)}
    data["tokens"] = [token for event in run for token in event.data["tokens"]]
    if thinking := "".join(event.data.get("thinking", "") for event in run):
        data["thinking"] = thinking
        data["thinking_tokens"] = sum(event.data.get("thinking_tokens", 0) for event in run)
    for name in ("calls", "logprobs"):
        if entries := [entry for event in run for entry in event.data.get(name, ())]:
            data[name] = entries
    if (choice := run[0].data.get("choice")) is not None:
        data["choice"] = choice
    return Event(run[0].id, "text", data)


def _kind(event: Event) -> set[str]:
    return {name for name in ("text", "thinking", "calls") if event.data.get(name)}


def _size_bytes(event: Event) -> int:
    if event.ev != "text":
        return _EVENT_BYTES
    data = event.data
    size_bytes = _EVENT_BYTES + len(data["text"]) + len(data.get("thinking", "")) + _TOKEN_BYTES * len(data["tokens"])
    size_bytes += sum(_EVENT_BYTES + len(piece.get("arguments", "")) for piece in data.get("calls", ()))
    return size_bytes + sum(_LOGPROB_BYTES * (1 + len(entry.get("top", ()))) for entry in data.get("logprobs", ()))
