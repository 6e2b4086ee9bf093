"""The Anthropic dialect, outwards: events to messages, whole or streamed, and errors. Pure.

The pieces of a stream are made first, and a whole message is what a client would make of them: the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from tierd.daemon.api.anthropic import Call
from tierd.daemon.api.voice import EVENT_STREAM
from tierd.daemon.errors import BadRequest, ContextLengthExceeded, TierdError, TryLater, sentence
from tierd.daemon.generation import Keep
from tierd.daemon.protocol import Event

SIGNATURE = "tierd"  # clients send it back with the thinking; nothing here has to be verified
OVERLOADED = 529
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'

Piece = dict[str, Any]


class Teller:
    """One answer, told in pieces. Give it `accepted`, `text` and `done` in their order."""

    def __init__(self, call: Call, message_id: str) -> None:
        self._call = call
        self._id = message_id
        self._accepted: Mapping[str, Any] = {}
        self._block = -1  # index of the block that is open, or was last
        self._kind = ""  # what is open: text, thinking, or the number of a call; empty: nothing
        self._output_tokens = 0

    def pieces(self, event: Event) -> Iterator[Piece]:
        """What a stream says for an event."""
        match event.ev:
            case "accepted":
                self._accepted = event.data
                yield {"type": "message_start", "message": self._start()}
            case "text" if self._call.max_tokens:
                yield from self._text(event.data)
            case "done":
                yield from self._close()
                yield from self._end(event.data)

    def _start(self) -> Piece:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._call.submit.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(self._accepted, 0),
        }

    def _text(self, data: Mapping[str, Any]) -> Iterator[Piece]:
        if thinking := data.get("thinking"):
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            if not self._call.hide_thinking:
                yield self._delta({"type": "thinking_delta", "thinking": thinking})
        if text := data.get("text"):
            yield from self._open("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for call in data.get("calls") or ():
            block = {"type": "tool_use", "id": call.get("id"), "name": call.get("name"), "input": {}}
            yield from self._open(f"call {call['index']}", block)
            if arguments := call.get("arguments"):
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _open(self, kind: str, block: Piece) -> Iterator[Piece]:
        if kind != self._kind:
            yield from self._close()
            self._block, self._kind = self._block + 1, kind
            yield {"type": "content_block_start", "index": self._block, "content_block": block}

    def _close(self) -> Iterator[Piece]:
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._kind:
            yield {"type": "content_block_stop", "index": self._block}
        self._kind = ""

    def _delta(self, delta: Piece) -> Piece:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _end(self, done: Mapping[str, Any]) -> Iterator[Piece]:
        counts = done.get("usage", {})
        output_tokens = counts.get("completion_tokens", 0) if self._call.max_tokens else 0
        reason, sequence = self._reason(done, output_tokens)
        usage = self._usage({**self._accepted, **counts}, output_tokens)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield {"type": "message_delta", "delta": delta, "usage": usage, "timings": done.get("timings", {})}
        yield {"type": "message_stop"}

    def _reason(self, done: Mapping[str, Any], output_tokens: int) -> tuple[str, str | None]:
        if done["finish"] == "tool_calls":
            return "tool_use", None
        if done["finish"] == "length":
            used_up = output_tokens >= self._call.max_tokens
            return "max_tokens" if used_up else "model_context_window_exceeded", None
        sequence = done.get("stop")
        return ("stop_sequence", sequence) if sequence else ("end_turn", None)

    def _usage(self, counts: Mapping[str, Any], output_tokens: int) -> Piece:
        return usage(counts, self._call.submit.keep, output_tokens)


def usage(counts: Mapping[str, Any], keep: tuple[Keep, ...], output_tokens: int) -> Piece:
    """Token counts under Anthropic's names; the three kinds of input add up to the prompt.

    `counts`: prompt_tokens, cached_tokens and, where the engine knows it, keep_tokens: how much of the prompt each of
    `keep` covers. What it covers and was not read from the cache was written to it.
    """
    prompt, cached = counts.get("prompt_tokens", 0), counts.get("cached_tokens", 0)
    created = {300.0: 0, 3600.0: 0}
    reached = cached
    for wish, tokens in zip(keep, counts.get("keep_tokens") or (), strict=False):
        created[wish.ttl_s] += max(0, tokens - reached)
        reached = max(reached, tokens)
    return {
        "input_tokens": max(0, prompt - reached),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": sum(created.values()),
        "cache_creation": {"ephemeral_5m_input_tokens": created[300.0], "ephemeral_1h_input_tokens": created[3600.0]},
        "output_tokens": output_tokens,
        **({"kv_mode": counts["kv_mode"]} if "kv_mode" in counts else {}),  # not of Anthropic: see docs/modes
    }


class Whole:
    """A message put together from its pieces."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._message: Piece = {}
        self._arguments: list[str] = []

    def take(self, event: Event) -> Piece | None:
        """The message, at its `done`."""
        for piece in self._teller.pieces(event):
            self._add(piece)
        return self._message if event.ev == "done" else None

    def _add(self, piece: Piece) -> None:
        match piece["type"]:
            case "message_start":
                self._message = piece["message"]
            case "content_block_start":
                self._message["content"].append(dict(piece["content_block"]))
            case "content_block_delta":
                self._add_delta(self._message["content"][-1], piece["delta"])
            case "content_block_stop" if self._arguments:
                self._message["content"][-1]["input"] = _object("".join(self._arguments))
                self._arguments = []
            case "message_delta":
                self._message |= piece["delta"] | {"usage": piece["usage"], "timings": piece["timings"]}

    def _add_delta(self, block: Piece, delta: Piece) -> None:
        match delta["type"]:
            case "text_delta":
                block["text"] += delta["text"]
            case "thinking_delta":
                block["thinking"] += delta["thinking"]
            case "signature_delta":
                block["signature"] = delta["signature"]
            case "input_json_delta":
                self._arguments.append(delta["partial_json"])


def _object(arguments: str) -> Any:
    """Arguments as an object; a call that was cut by the end of the answer has none that can be read."""
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}


class Voice:
    """A `Teller` as server-sent events."""

    content_type = EVENT_STREAM

    def __init__(self, teller: Teller, request_id: str) -> None:
        self._teller = teller
        self._request_id = request_id

    def say(self, event: Event) -> bytes:
        """See `voice.Voice`."""
        return b"".join(map(_sse, self._teller.pieces(event)))

    def ping(self) -> bytes:
        """See `voice.Voice`."""
        return _PING

    def fail(self, error: TierdError) -> bytes:
        """See `voice.Voice`."""
        return _sse(error_body(error, self._request_id))


def _sse(piece: Piece) -> bytes:
    # Without the line `event:` the SDK drops a piece.
    return b"event: %b\ndata: %b\n\n" % (str(piece["type"]).encode(), msgspec.json.encode(piece))


def models(listed: list[dict[str, Any]]) -> Piece:
    """The answer of /v1/models to an Anthropic client; directories that cannot be used are left out. In one page."""
    data = [model(item) for item in listed if not item["problem"]]
    ids = [item["id"] for item in data] or [None]
    return {"data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


def model(item: Mapping[str, Any]) -> Piece:
    """One entry of it."""
    created = datetime.fromtimestamp(item["created_s"], UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return {
        "id": item["name"],
        "type": "model",
        "lifecycle": "active",
        "display_name": item["name"],
        "created_at": created,
        "max_input_tokens": item["context"],
    }


_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 504: "timeout_error", OVERLOADED: "overloaded_error",
}  # fmt: skip


def status_of(error: TierdError) -> int:
    """The HTTP status: what passes by itself is 529 here, which Anthropic's clients wait for."""
    return OVERLOADED if isinstance(error, TryLater) and error.status == 503 else error.status


def error_body(error: TierdError, request_id: str, *, status: int | None = None) -> Piece:
    """The error object, the same before a stream and in it."""
    status = status or status_of(error)
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    message = sentence(error)
    if isinstance(error, ContextLengthExceeded):
        # The words, at the beginning, by which clients know that they must shorten it; ours may have them already.
        message = "prompt is too long: " + message.removeprefix("the prompt is too long: ")
    told: Piece = {"type": kind, "message": message, "code": error.code}
    if isinstance(error, BadRequest) and error.param:
        told["param"] = error.param
    return {"type": "error", "error": told, "request_id": request_id}
