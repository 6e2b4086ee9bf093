"""The Ollama dialect, outwards: events to its lines of JSON. Pure, but for the clock of `created_at`.

Ollama's own fields come first; what tierd measured beside them stands under `tierd`, which clients skip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from tierd.daemon.errors import TierdError, sentence
from tierd.daemon.protocol import Event

NDJSON = "application/x-ndjson"
_NS_PER_MS = 1_000_000

Line = dict[str, Any]


class Teller:
    """One answer, told in lines. Give it the events in their order."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self._model = model
        self._chat = chat
        self._said: list[int] = []  # tokens of the answer so far
        self._calls: dict[int, Line] = {}  # a call is told when it is whole: its arguments are an object here

    def lines(self, event: Event) -> Iterator[Line]:
        """What a stream says for an event."""
        match event.ev:
            case "text":
                self._said.extend(event.data["tokens"])
                yield from self._text(event.data)
            case "done":
                yield from self._finished_calls()
                yield self._last(event.data)

    def line(self, *, text: str = "", thinking: str = "", calls: list[Line] | None = None) -> Line:
        """A line before the last one."""
        body: Line = {"role": "assistant", "content": text} if self._chat else {"response": text}
        if thinking:
            body["thinking"] = thinking
        if calls:
            body["tool_calls"] = calls
        return {**self._head(), **({"message": body} if self._chat else body), "done": False}

    def loaded(self, reason: str) -> Line:
        """The answer to a request that asks nothing: `load` or `unload`."""
        return {**self.line(), "done": True, "done_reason": reason}

    def _text(self, data: Mapping[str, Any]) -> Iterator[Line]:
        for call in data.get("calls") or ():
            if call["index"] not in self._calls:
                yield from self._finished_calls()
                self._calls[call["index"]] = {"id": call.get("id"), "name": call.get("name"), "arguments": ""}
            self._calls[call["index"]]["arguments"] += call.get("arguments") or ""
        text, thinking = data.get("text") or "", data.get("thinking") or ""
        if text or thinking or data.get("logprobs"):
            line = self.line(text=text, thinking=thinking)
            if logprobs := data.get("logprobs"):
                line["logprobs"] = [_logprob(entry) for entry in logprobs]
            yield line

    def _finished_calls(self) -> Iterator[Line]:
        for index, call in self._calls.items():
            try:
                arguments = msgspec.json.decode(call["arguments"] or "{}")
            except (msgspec.DecodeError, RecursionError):
                yield self.line(text=call["arguments"])  # cut by the end of the answer: no call, but nothing is lost
                continue
            function = {"index": index, "name": call["name"], "arguments": arguments}
            yield self.line(calls=[{"id": call["id"], "function": function}])
        self._calls.clear()

    def _last(self, done: Mapping[str, Any]) -> Line:
        usage, timings = done.get("usage", {}), done.get("timings", {})
        finish = "length" if done["finish"] == "length" else "stop"
        line = {**self.line(), "done": True, "done_reason": finish, **_durations(usage, timings)}
        line["tierd"] = {"cached_tokens": usage.get("cached_tokens", 0), "stop": done.get("stop"), **timings}
        if "kv_mode" in usage:
            line["tierd"]["kv_mode"] = usage["kv_mode"]
        if "prompt" in done:
            line["context"] = [*done["prompt"], *self._said]
        return line

    def _head(self) -> Line:
        return {"model": self._model, "created_at": stamp(datetime.now(UTC))}


def _durations(usage: Mapping[str, int], timings: Mapping[str, float]) -> Line:
    """Counts, and times in nanoseconds. `prompt_eval_count` is the whole prompt, as clients measure contexts by it."""
    load, prompt = timings.get("load_ms", 0.0), timings.get("ttft_ms", 0.0)
    tokens, speed = usage.get("completion_tokens", 0), timings.get("decode_tokens_per_s", 0.0)
    evaluation = tokens / speed * 1e3 if speed else 0.0
    return {
        "total_duration": round((load + prompt + evaluation) * _NS_PER_MS),
        "load_duration": round(load * _NS_PER_MS),
        "prompt_eval_count": usage.get("prompt_tokens", 0),
        "prompt_eval_duration": round(prompt * _NS_PER_MS),
        "eval_count": tokens,
        "eval_duration": round(evaluation * _NS_PER_MS),
    }


def _logprob(entry: Mapping[str, Any]) -> Line:
    return {**_token(entry), "top_logprobs": [_token(one) for one in entry.get("top", ())]}


def _token(entry: Mapping[str, Any]) -> Line:
    raw = entry.get("bytes") or b""
    return {"token": entry["text"], "logprob": entry["logprob"], "bytes": list(raw)}


class Whole:
    """An answer in one piece, put together from its lines."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._body: Line = teller.line()

    def take(self, event: Event) -> Line | None:
        """The answer, at its `done`."""
        for line in self._teller.lines(event):
            self._add(line)
        return self._body if event.ev == "done" else None

    def _add(self, line: Line) -> None:
        old, new = self._body.get("message", self._body), line.get("message", line)
        for name in ("content", "response", "thinking", "tool_calls"):
            if name in new:
                old[name] = old[name] + new[name] if name in old else new[name]
        if "logprobs" in line:
            self._body["logprobs"] = [*self._body.get("logprobs", ()), *line["logprobs"]]
        skip = ("message", "response", "thinking", "tool_calls", "logprobs")
        self._body |= {name: value for name, value in line.items() if name not in skip}


class Steps:
    """Work that is told by lines of its own, `line` in the data of its events: as they come, or the last one alone."""

    content_type = NDJSON

    def __init__(self, first: Line) -> None:
        self._newest = first

    def take(self, event: Event) -> Line | None:
        """See `sse.Whole`."""
        return event.data["line"] if event.ev == "done" else None

    def say(self, event: Event) -> bytes:
        """See `voice.Voice`."""
        if "line" not in event.data:
            return b""
        self._newest = event.data["line"]
        return encode(self._newest)

    def ping(self) -> bytes:
        """See `voice.Voice`. The newest line once more: how far it is, and that it goes on."""
        return encode(self._newest)

    def fail(self, error: TierdError) -> bytes:
        """See `voice.Voice`."""
        return encode({"error": sentence(error)})


class Voice:
    """A `Teller` as lines."""

    content_type = NDJSON

    def __init__(self, teller: Teller) -> None:
        self._teller = teller

    def say(self, event: Event) -> bytes:
        """See `voice.Voice`."""
        return b"".join(map(encode, self._teller.lines(event)))

    def ping(self) -> bytes:
        """See `voice.Voice`. A line without text: this dialect has no comments."""
        return encode(self._teller.line())

    def fail(self, error: TierdError) -> bytes:
        """See `voice.Voice`."""
        return encode({"error": sentence(error)})


def encode(line: Line) -> bytes:
    """A line of a stream."""
    return msgspec.json.encode(line) + b"\n"


def stamp(moment: datetime) -> str:
    """A time as Ollama writes it: ISO 8601 with an offset."""
    return moment.isoformat().replace("+00:00", "Z")
