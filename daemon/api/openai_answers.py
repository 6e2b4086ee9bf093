"""The OpenAI dialect, outwards: events to answers of chat completions and completions, whole or in pieces. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from tierd.daemon.api import openai
from tierd.daemon.api.openai_types import (
    Alternative,
    Answered,
    Call,
    CalledFunction,
    CallPiece,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Completion,
    CompletionDetails,
    Delta,
    PromptDetails,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    Usage,
)
from tierd.daemon.api.voice import EVENT_STREAM
from tierd.daemon.errors import TierdError
from tierd.daemon.protocol import Event, ToolCall

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class Gathered:
    """One answer as far as it has come: what events said, put together."""

    def __init__(self) -> None:
        self.logprobs: list[Mapping[str, Any]] = []
        self.finish: str | None = None
        self.reasoning_tokens = 0
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, list[Mapping[str, Any]]] = {}

    def add(self, data: Mapping[str, Any]) -> None:
        """Take the data of a `text` event."""
        self._texts.append(data["text"])
        if thinking := data.get("thinking"):
            self._thoughts.append(thinking)
        self.reasoning_tokens += data.get("thinking_tokens", 0)
        for piece in data.get("calls", ()):
            self._calls.setdefault(piece["index"], []).append(piece)
        self.logprobs.extend(data.get("logprobs", ()))

    @property
    def text(self) -> str:
        """What is said."""
        return "".join(self._texts)

    @property
    def thinking(self) -> str:
        """What was thought before."""
        return "".join(self._thoughts)

    @property
    def calls(self) -> list[ToolCall]:
        """The tool calls in their order."""
        return [
            ToolCall(pieces[0]["id"], pieces[0]["name"], "".join(piece.get("arguments", "") for piece in pieces))
            for _, pieces in sorted(self._calls.items())
        ]


class Shape(NamedTuple):
    """What is the same in every piece of one answer, and what it was asked to hold."""

    chat: bool
    id: str
    created: int
    model: str
    choices: int = 1
    include_usage: bool = False
    logprobs: int | None = None
    echo: str = ""

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every body begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Whole:
    """The answer in one piece."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._answers = [Gathered() for _ in range(shape.choices)]

    def take(self, event: Event) -> ChatCompletion | Completion | None:
        """The answer, at its `done`."""
        match event.ev:
            case "text":
                self._answers[event.data.get("choice", 0)].add(event.data)
            case "choice":
                self._answers[event.data["choice"]].finish = event.data["finish"]
            case "done":
                for answer in self._answers:
                    answer.finish = answer.finish or event.data["finish"]
                return self._body(event.data)
        return None

    def _body(self, done: Mapping[str, Any]) -> ChatCompletion | Completion:
        shape = self._shape
        counts = usage(done.get("usage", {}), sum(answer.reasoning_tokens for answer in self._answers))
        tail = {"usage": counts, "timings": done.get("timings", {})}
        numbered = enumerate(self._answers)
        if shape.chat:
            chats = [_chat_choice(shape, index, answer) for index, answer in numbered]
            return ChatCompletion(**shape.head("chat.completion"), **tail, choices=chats)
        texts = [
            TextChoice(index, shape.echo + answer.text, _text_logprobs(shape, answer.logprobs), answer.finish)
            for index, answer in numbered
        ]
        return Completion(**shape.head("text_completion"), **tail, choices=texts)


def _chat_choice(shape: Shape, index: int, answer: Gathered) -> ChatChoice:
    calls = [Call(call.id, CalledFunction(call.name, call.arguments)) for call in answer.calls]
    message = Answered(
        "assistant",
        answer.text or (None if calls else ""),
        reasoning_content=answer.thinking or UNSET,
        tool_calls=calls or UNSET,
    )
    return ChatChoice(index, message, _chat_logprobs(shape, answer.logprobs), answer.finish)


class Teller:
    """The answer in pieces. Give it `accepted`, `text`, `choice` and `done` in their order."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._offsets = [0] * shape.choices
        self._ended: set[int] = set()
        self._reasoning_tokens = 0

    def pieces(self, event: Event) -> Iterator[ChatChunk | Completion]:
        """What a stream says for an event."""
        shape = self._shape
        match event.ev:
            case "accepted":
                for index in range(shape.choices):
                    if shape.chat:
                        yield self._chunk(ChunkChoice(index, Delta(role="assistant")))
                    elif shape.echo:
                        yield self._text_chunk(TextChoice(index, shape.echo))
            case "text":
                yield from self._text(event.data.get("choice", 0), event.data)
            case "choice":
                self._ended.add(event.data["choice"])
                yield self._end(event.data["choice"], event.data["finish"])
            case "done":
                yield from self._last(event.data)

    def _text(self, index: int, data: Mapping[str, Any]) -> Iterator[ChatChunk | Completion]:
        shape, entries = self._shape, data.get("logprobs", ())
        thinking, calls = data.get("thinking"), data.get("calls")
        self._reasoning_tokens += data.get("thinking_tokens", 0)
        if not (data["text"] or thinking or calls or (shape.logprobs is not None and entries)):
            return  # half a character: tokens without text
        if shape.chat:
            delta = Delta(
                data["text"],
                reasoning_content=thinking or UNSET,
                tool_calls=[_call_piece(piece) for piece in calls] if calls else UNSET,
            )
            yield self._chunk(ChunkChoice(index, delta, _chat_logprobs(shape, entries)))
        else:
            logprobs = _text_logprobs(shape, entries, self._offsets[index])
            self._offsets[index] += len(data["text"])
            yield self._text_chunk(TextChoice(index, data["text"], logprobs))

    def _last(self, done: Mapping[str, Any]) -> Iterator[ChatChunk | Completion]:
        """The end of what has not ended, the counts if they were asked for; the times in the last of them."""
        ends = [self._end(i, done["finish"]) for i in range(self._shape.choices) if i not in self._ended]
        timings = done.get("timings", {})
        if ends and not self._shape.include_usage:
            ends[-1].timings = timings
        yield from ends
        if self._shape.include_usage:
            counts = usage(done.get("usage", {}), self._reasoning_tokens)
            if self._shape.chat:
                head = self._shape.head("chat.completion.chunk")
                yield ChatChunk(**head, choices=[], usage=counts, timings=timings)
            else:
                yield Completion(**self._shape.head("text_completion"), choices=[], usage=counts, timings=timings)

    def _end(self, index: int, finish: str) -> ChatChunk | Completion:
        if self._shape.chat:
            return self._chunk(ChunkChoice(index, Delta(), finish_reason=finish))
        return self._text_chunk(TextChoice(index, "", finish_reason=finish))

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        return ChatChunk(**self._shape.head("chat.completion.chunk"), choices=[choice])

    def _text_chunk(self, choice: TextChoice) -> Completion:
        return Completion(**self._shape.head("text_completion"), choices=[choice])


class Voice:
    """The pieces as server-sent events."""

    content_type = EVENT_STREAM

    def __init__(self, teller: Teller) -> None:
        self._teller = teller

    def say(self, event: Event) -> bytes:
        """See `voice.Voice`."""
        pieces = b"".join(sse_data(piece) for piece in self._teller.pieces(event))
        return pieces + DONE if event.ev == "done" else pieces

    def ping(self) -> bytes:
        """A comment."""
        return PING

    def fail(self, error: TierdError) -> bytes:
        """An `error` object, and no [DONE]: SDKs raise it."""
        return sse_data(openai.error(error))


def sse_data(piece: Any) -> bytes:
    """One event without a name."""
    return b"data: " + msgspec.json.encode(piece) + b"\n\n"


def usage(counts: Mapping[str, Any], reasoning_tokens: int = 0) -> Usage:
    """Token counts under OpenAI's names."""
    prompt, completion = counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0)
    cached = counts.get("cached_tokens", 0)
    details = PromptDetails(cached, max(0, prompt - cached)), CompletionDetails(reasoning_tokens)
    return Usage(prompt, completion, prompt + completion, *details, counts.get("kv_mode", msgspec.UNSET))


def _call_piece(piece: Mapping[str, Any]) -> CallPiece:
    if "id" not in piece:
        return CallPiece(piece["index"], CalledFunction(arguments=piece.get("arguments", "")))
    function = CalledFunction(piece["name"], piece.get("arguments", ""))
    return CallPiece(piece["index"], function, id=piece["id"], type="function")


def token_logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    """A token and its alternatives in the shape of a chat."""
    top = [Alternative(other["text"], other["logprob"], list(other["bytes"])) for other in entry["top"]]
    return TokenLogprob(entry["text"], entry["logprob"], list(entry["bytes"]), top)


def _chat_logprobs(shape: Shape, entries: Any) -> ChatLogprobs | None:
    if shape.logprobs is None or not entries:
        return None
    return ChatLogprobs([token_logprob(entry) for entry in entries])


def _text_logprobs(shape: Shape, entries: Any, offset: int = 0) -> TextLogprobs | None:
    """`text_offset` counts characters from the beginning of the text that is given, the prompt included if it is."""
    if shape.logprobs is None or not entries:
        return None
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["text"])
    top: list[dict[str, float] | None]
    top = [{other["text"]: other["logprob"] for other in entry["top"]} for entry in entries]
    return TextLogprobs(
        [entry["text"] for entry in entries],
        [entry["logprob"] for entry in entries],
        top if shape.logprobs else None,
        offsets,
    )
