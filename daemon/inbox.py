"""Events of one stream, between the task that reads the engine and the task that writes to the client."""

from __future__ import annotations

import asyncio
from collections import deque

from tierd.daemon.errors import TierdError
from tierd.daemon.protocol import TERMINAL, Event

# With the 64 KiB high-water mark of a transport and one frame on its way, a reader that stands still costs < 256 KiB.
MAX_PENDING_BYTES = 128 << 10
_EVENT_BYTES = 64  # what an event costs beside its text
_TOKEN_BYTES = 8


class SlowReader(Exception):
    """The client does not read what it asked for: its connection is to be cut."""


class EngineLost(Exception):
    """The engine ended before it said a terminal event."""


class Inbox:
    """A bounded queue that never makes the writer wait: one slow client must not hold up the others of an engine.

    Text that waits is joined when it is taken. Progress that waits is replaced by newer progress.

    Threading: for one event loop.
    """

    def __init__(self, max_bytes: int = MAX_PENDING_BYTES) -> None:
        self._pending: deque[Event] = deque()
        self._pending_bytes = 0
        self._max_bytes = max_bytes
        self._wake = asyncio.Event()
        self._closed: Exception | None = None

    def put(self, event: Event) -> None:
        """Add an event. After an overflow, a loss or a terminal event it is dropped."""
        if self._closed is not None:
            return
        if event.ev == "progress" and self._pending and self._pending[-1].ev == "progress":
            self._pending.pop()
        self._pending.append(event)
        self._pending_bytes += _size_bytes(event)
        if event.ev in TERMINAL:
            self._closed = EngineLost("after the terminal event")
        elif self._pending_bytes > self._max_bytes:
            self._pending.clear()
            self._closed = SlowReader()
        self._wake.set()

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
        event = self._pending.popleft()
        self._pending_bytes -= _size_bytes(event)
        if event.ev != "text" or not self._pending or self._pending[0].ev != "text":
            return event
        texts, tokens = [event.data["text"]], list(event.data["tokens"])
        while self._pending and self._pending[0].ev == "text":
            event = self._pending.popleft()
            self._pending_bytes -= _size_bytes(event)
            texts.append(event.data["text"])
            tokens.extend(event.data["tokens"])
        return Event(event.id, "text", {"text": "".join(texts), "tokens": tokens})


def _size_bytes(event: Event) -> int:
    if event.ev != "text":
        return _EVENT_BYTES
    return _EVENT_BYTES + len(event.data["text"]) + _TOKEN_BYTES * len(event.data["tokens"])
