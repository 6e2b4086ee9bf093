"""How a dialect says a streamed answer: what `sse` sends, and what every dialect that streams has one of.

Knows no HTTP library, so that what makes answers can be used where no server runs.
"""

from __future__ import annotations

from typing import Protocol

from tierd.daemon.errors import TierdError
from tierd.daemon.protocol import Event

EVENT_STREAM = "text/event-stream"


class Voice(Protocol):
    """How a dialect says the events of one answer. Each method gives bytes for the wire, empty for nothing."""

    content_type: str

    def say(self, event: Event) -> bytes:
        """For `accepted`, `text`, `choice` and `done`; the bytes of `done` end the stream."""

    def ping(self) -> bytes:
        """Something that clients skip. Never empty."""

    def fail(self, error: TierdError) -> bytes:
        """The error that ends a stream whose status was sent already."""
