"""/v1/responses, outwards: events to the pieces of a stream, and to the response that they add up to. Pure.

The pieces are made first and the response from the same items, so that the two cannot differ. The order is OpenAI's:
created, in_progress; for each item output_item.added, its parts and deltas, output_item.done; then one of completed,
incomplete, failed. Codex takes a stream without that last one for broken.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from tierd.daemon.api.openai_answers import PING, token_logprob, usage
from tierd.daemon.api.openai_types import Usage
from tierd.daemon.api.responses import ENCRYPTED, Call, seal
from tierd.daemon.api.responses_types import (
    FunctionCall,
    IncompleteDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    Reasoning,
    Response,
    ResponseError,
    ResponseUsage,
    Thought,
)
from tierd.daemon.api.voice import EVENT_STREAM
from tierd.daemon.errors import TierdError, sentence
from tierd.daemon.protocol import Event, Message, ToolCall

Piece = dict[str, Any]
_STATUS = {"length": "incomplete"}  # of how it ended; all others are completed


class Teller:
    """One response. Give it `accepted`, `text` and `done` in their order, or `fail` at any moment."""

    def __init__(self, call: Call, response_id: str, now_s: Callable[[], float]) -> None:
        given = call.given
        self._call = call
        self._now_s = now_s
        self._sequence = 0
        self._item: _Open | None = None
        self._reasoning_tokens = 0
        self._started = False
        self.response = Response(
            id=response_id, created_at=int(now_s()), status="in_progress", model=given.model, output=[],
            instructions=given.instructions, max_output_tokens=given.max_output_tokens,
            previous_response_id=given.previous_response_id,
            parallel_tool_calls=given.parallel_tool_calls is not False, temperature=given.temperature,
            top_p=given.top_p, tools=[tool for tool in given.tools or () if tool.type not in call.left_out],
            tool_choice="auto" if given.tool_choice is None else given.tool_choice, text=given.text,
            reasoning=given.reasoning, store=given.store is not False, metadata=given.metadata or {},
        )  # fmt: skip

    def pieces(self, event: Event) -> Iterator[Piece]:
        """What a stream says for an event."""
        match event.ev:
            case "accepted":
                yield from self._start()
            case "text":
                yield from self._text(event.data)
            case "done":
                yield from self._close("completed")
                yield self._end(event.data)

    def fail(self, error: TierdError) -> Iterator[Piece]:
        """The end of a stream that has an error in it."""
        yield from self._start()
        yield from self._close("incomplete")
        self.response.status = "failed"
        self.response.error = ResponseError(error.code, sentence(error))
        yield self._piece("response.failed", response=self.response)

    def answer(self) -> tuple[Message, ...]:
        """What the model said, as the message that a client would send back."""
        messages = [item for item in self.response.output if isinstance(item, OutputMessage)]
        text = "".join(part.text for item in messages for part in item.content)
        thoughts = [item for item in self.response.output if isinstance(item, Reasoning)]
        thinking = "".join(part.text for item in thoughts for part in (item.content or item.summary))
        calls = tuple(
            ToolCall(item.call_id, self._name_here(item), item.arguments)
            for item in self.response.output
            if isinstance(item, FunctionCall)
        )
        return (Message("assistant", text, thinking=thinking, tool_calls=calls),) if text or thinking or calls else ()

    def _start(self) -> Iterator[Piece]:
        if not self._started:
            self._started = True
            yield self._piece("response.created", response=self.response)
            yield self._piece("response.in_progress", response=self.response)

    def _text(self, data: Mapping[str, Any]) -> Iterator[Piece]:
        self._reasoning_tokens += data.get("thinking_tokens", 0)
        if thinking := data.get("thinking"):
            yield from self._add("reasoning", self._new_reasoning, thinking)
        if data["text"]:
            logprobs = [msgspec.to_builtins(token_logprob(entry)) for entry in data.get("logprobs", ())]
            yield from self._add("message", self._new_message, data["text"], logprobs)
        for piece in data.get("calls", ()):
            make = functools.partial(self._new_call, piece)
            yield from self._add(f"call {piece['index']}", make, piece.get("arguments", ""))

    def _add(
        self, kind: str, make: Callable[[], _Open], delta: str, logprobs: Sequence[Any] = ()
    ) -> Iterator[Piece]:
        """A delta to the open item, which is closed for another kind before."""
        if self._item is None or self._item.kind != kind:
            yield from self._close("completed")
            self._item = make()
            self._item.kind = kind
            yield self._piece("response.output_item.added", **self._at(), item=self._item.whole("", "in_progress", ()))
            for name, fields in self._item.opened():
                yield self._piece(name, **self._where(), **fields)
        if delta:
            self._item.deltas.append(delta)
            self._item.logprobs.extend(logprobs)
            extra = {"logprobs": list(logprobs)} if kind == "message" else {}
            yield self._piece(self._item.delta_name, **self._where(), delta=delta, **extra)

    def _close(self, status: str) -> Iterator[Piece]:
        item = self._item
        if item is None:
            return
        text = "".join(item.deltas)
        for name, fields in item.closed(text):
            yield self._piece(name, **self._where(), **fields)
        whole = item.whole(text, status, item.logprobs)
        yield self._piece("response.output_item.done", **self._at(), item=whole)
        self.response.output = [*self.response.output, whole]
        self._item = None

    def _end(self, done: Mapping[str, Any]) -> Piece:
        response = self.response
        response.status = _STATUS.get(done["finish"], "completed")
        if response.status == "incomplete":
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        else:
            response.completed_at = int(self._now_s())
        response.usage = _usage(usage(done.get("usage", {}), self._reasoning_tokens))
        response.timings = done.get("timings", {})
        return self._piece(f"response.{response.status}", response=response)

    def _at(self) -> Piece:
        return {"output_index": len(self.response.output)}

    def _where(self) -> Piece:
        assert self._item is not None
        return {"item_id": self._item.id, **self._at(), **self._item.part}

    def _piece(self, kind: str, **fields: Any) -> Piece:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self.response.id.partition('_')[2]}_{len(self.response.output)}"

    def _new_message(self) -> _Open:
        return _OpenMessage(self._id("msg"))

    def _new_reasoning(self) -> _Open:
        given = self._call.given
        wish = given.reasoning
        as_summary = wish is not None and (wish.summary or wish.generate_summary) is not None
        return _OpenReasoning(self._id("rs"), as_summary=as_summary, sealed=ENCRYPTED in (given.include or []))

    def _new_call(self, piece: Mapping[str, Any]) -> _Open:
        namespace, name = self._call.namespaces.get(piece["name"], (None, piece["name"]))
        return _OpenCall(self._id("fc"), piece["id"], name, namespace)

    def _name_here(self, item: FunctionCall) -> str:
        for here, there in self._call.namespaces.items():
            if there == (item.namespace, item.name):
                return here
        return item.name


class _Open(abc.ABC):
    """An item that is being told."""

    delta_name = ""
    part: Piece = {}  # where in the item a delta belongs

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.kind = ""
        self.deltas: list[str] = []
        self.logprobs: list[Any] = []

    def opened(self) -> Iterator[tuple[str, Piece]]:
        """What is said after output_item.added."""
        yield from ()

    def closed(self, text: str) -> Iterator[tuple[str, Piece]]:
        """What is said before output_item.done."""
        yield from ()

    @abc.abstractmethod
    def whole(self, text: str, status: str, logprobs: Any) -> OutputItem:
        """The item as it is now; empty when it was just added."""


class _OpenMessage(_Open):
    delta_name = "response.output_text.delta"
    part: Piece = {"content_index": 0}

    def opened(self) -> Iterator[tuple[str, Piece]]:
        yield "response.content_part.added", {"part": OutputText("")}

    def closed(self, text: str) -> Iterator[tuple[str, Piece]]:
        yield "response.output_text.done", {"text": text, "logprobs": self.logprobs}
        yield "response.content_part.done", {"part": OutputText(text, logprobs=self.logprobs)}

    def whole(self, text: str, status: str, logprobs: Any) -> OutputItem:
        content = [OutputText(text, logprobs=list(logprobs))] if status != "in_progress" else []
        return OutputMessage(self.id, status, content)


class _OpenReasoning(_Open):
    def __init__(self, item_id: str, *, as_summary: bool, sealed: bool) -> None:
        super().__init__(item_id)
        self._as_summary = as_summary
        self._sealed = sealed
        kind = "reasoning_summary_text" if as_summary else "reasoning_text"
        self._done_name, self.delta_name = f"response.{kind}.done", f"response.{kind}.delta"
        self.part = {"summary_index" if as_summary else "content_index": 0}

    def opened(self) -> Iterator[tuple[str, Piece]]:
        if self._as_summary:
            yield "response.reasoning_summary_part.added", {"part": Thought("", "summary_text")}

    def closed(self, text: str) -> Iterator[tuple[str, Piece]]:
        yield self._done_name, {"text": text}
        if self._as_summary:
            yield "response.reasoning_summary_part.done", {"part": Thought(text, "summary_text")}

    def whole(self, text: str, status: str, logprobs: Any) -> OutputItem:
        summary = [Thought(text, "summary_text")] if self._as_summary and text else []
        content = [Thought(text, "reasoning_text")] if not self._as_summary and text else []
        return Reasoning(self.id, status, summary, content, seal(text) if self._sealed and text else None)


class _OpenCall(_Open):
    delta_name = "response.function_call_arguments.delta"

    def __init__(self, item_id: str, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__(item_id)
        self._call_id, self._name, self._namespace = call_id, name, namespace

    def closed(self, text: str) -> Iterator[tuple[str, Piece]]:
        yield "response.function_call_arguments.done", {"name": self._name, "arguments": text}

    def whole(self, text: str, status: str, logprobs: Any) -> OutputItem:
        return FunctionCall(self.id, self._call_id, self._name, text, status, self._namespace or UNSET)


class Whole:
    """The response in one piece: what the pieces add up to."""

    def __init__(self, teller: Teller, ended: Callable[[], None]) -> None:
        self._teller = teller
        self._ended = ended

    def take(self, event: Event) -> Response | None:
        """The response, at its `done`. Whatever keeps it hears of its end before the client does."""
        for _ in self._teller.pieces(event):
            pass
        if event.ev != "done":
            return None
        self._ended()
        return self._teller.response


class Voice:
    """The pieces as server-sent events; their type is the name of the event, too."""

    content_type = EVENT_STREAM

    def __init__(self, teller: Teller, ended: Callable[[], None]) -> None:
        self._teller = teller
        self._ended = ended

    def say(self, event: Event) -> bytes:
        """See `voice.Voice`. Whatever keeps the response hears of its end before the client does."""
        pieces = list(self._teller.pieces(event))
        if event.ev == "done":
            self._ended()
        return b"".join(map(_sse, pieces))

    def ping(self) -> bytes:
        """A comment."""
        return PING

    def fail(self, error: TierdError) -> bytes:
        """`response.failed`."""
        return b"".join(map(_sse, self._teller.fail(error)))


def _sse(piece: Piece) -> bytes:
    kind: str = piece["type"]
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(piece) + b"\n\n"


def _usage(counts: Usage) -> ResponseUsage:
    return ResponseUsage(
        counts.prompt_tokens, counts.completion_tokens, counts.total_tokens, counts.prompt_tokens_details,
        counts.completion_tokens_details, counts.kv_mode,
    )  # fmt: skip
