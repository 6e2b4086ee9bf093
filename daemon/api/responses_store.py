"""Responses that are kept, so that a later one can go on from them: in memory, bounded, gone with the daemon."""

from __future__ import annotations

from typing import NamedTuple

from tierd.daemon.errors import NotFound
from tierd.daemon.protocol import Message

MAX_RESPONSES = 1024
MAX_STORE_BYTES = 64 << 20
_ENTRY_BYTES = 512  # what an entry costs beside its text


class Stored(NamedTuple):
    """One response. `messages`: what its request added to the conversation, and the answer; instructions are no part.

    `body`: the JSON that it was answered with.
    """

    tenant: str
    previous: str | None
    messages: tuple[Message, ...]
    body: bytes


class Store:
    """The least recently used goes when there are too many, or too much. Threading: for one event loop."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_STORE_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: dict[str, Stored] = {}  # the least recently used first
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """What is kept."""
        return self._bytes

    def put(self, response_id: str, stored: Stored) -> None:
        """Keep a response, unless it alone is too much."""
        size_bytes = _size_bytes(stored)
        if size_bytes > self._max_bytes:
            return
        self._kept[response_id] = stored
        self._bytes += size_bytes
        while len(self._kept) > self._max_responses or self._bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def get(self, response_id: str, tenant: str, param: str | None = None) -> Stored:
        """A response of this tenant. Raises NotFound."""
        stored = self._kept.pop(response_id, None)
        if stored is None or stored.tenant != tenant:
            if stored is not None:
                self._kept[response_id] = stored
            hint = "send the whole conversation as input: responses are kept in memory, and not for ever"
            raise NotFound("there is no stored response of this id", hint=hint, param=param)
        self._kept[response_id] = stored
        return stored

    def conversation(self, response_id: str, tenant: str) -> tuple[Message, ...]:
        """The messages up to and with a response. Raises NotFound, also when an earlier one is gone."""
        chain: list[Stored] = []
        following: str | None = response_id
        while following is not None:
            chain.append(self.get(following, tenant, "previous_response_id"))
            following = chain[-1].previous
        return tuple(message for stored in reversed(chain) for message in stored.messages)

    def delete(self, response_id: str, tenant: str) -> None:
        """Forget a response. Raises NotFound."""
        self.get(response_id, tenant)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self._bytes -= _size_bytes(self._kept.pop(response_id))


def _size_bytes(stored: Stored) -> int:
    return _ENTRY_BYTES + len(stored.body) + sum(_message_bytes(message) for message in stored.messages)


def _message_bytes(message: Message) -> int:
    calls = sum(_ENTRY_BYTES + _utf8_bytes(call.arguments) for call in message.tool_calls)
    return _ENTRY_BYTES + _utf8_bytes(message.content) + _utf8_bytes(message.thinking) + calls


def _utf8_bytes(text: str) -> int:
    # A lone surrogate, which JSON can spell, counts as the mark that would stand for it.
    return len(text) if text.isascii() else len(text.encode(errors="replace"))
