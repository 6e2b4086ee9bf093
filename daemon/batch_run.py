"""One request of a batch, from its line to its answer: asked again while that can help, behind everybody else.

The command line runs a batch through the daemon's socket, `/v1/batches` inside of the daemon: both hand in how an
answer, or a vector, is come by.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from tierd.clients.common import frame_of
from tierd.daemon.api import body_limits, embeddings, openai
from tierd.daemon.api.openai_answers import Shape, Whole
from tierd.daemon.batch import CHAT_URL, EMBEDDING_URL, ID_PREFIX, Answer, Fault, Item, Response
from tierd.daemon.embedding import Input, Vectors, check
from tierd.daemon.errors import (
    Aborted,
    BadRequest,
    DaemonUnreachable,
    Draining,
    EngineFailed,
    ProtocolError,
    Reserved,
    TierdError,
    TryLater,
    sentence,
)
from tierd.daemon.limits import MAX_PRIORITY
from tierd.daemon.protocol import Event, Submit, generate_request

BUSY_S = 3600.0  # the daemon may have its queue full for that long
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 15.0  # before a request is sent again
ENGINE_TRIES = 3  # an engine that dies takes every request with it, whoever's fault it was

Generate = Callable[[Submit], AsyncGenerator[Event, None]]  # events up to `done` or `aborted`; errors are raised
Embed = Callable[[str, Sequence[Input]], Awaitable[Vectors]]


class Asking:
    """Answers the requests of a batch. Threading: for one event loop."""

    def __init__(
        self,
        generate: Generate,
        embed: Embed,
        *,
        model: str | None = None,
        on_tokens: Callable[[int], None] = lambda count: None,
        busy_s: float | None = None,
    ) -> None:
        """`model` replaces the one that a body names; `on_tokens` hears of generated ones.

        `busy_s`: how long a request may be refused as one too many; an hour if not given.
        """
        self._generate = generate
        self._embed = embed
        self._model = model
        self._on_tokens = on_tokens
        self._busy_s = BUSY_S if busy_s is None else busy_s

    async def answer(self, item: Item) -> Answer:
        """The line of a request, of one that fails too.

        Raises Aborted when somebody ended it, and what ends the batch: the daemon is gone, or busy for too long.
        """
        try:
            ask = self._parsed(item)
        except TierdError as exc:
            return failed(item, exc)
        pause_s, engine_deaths, deadline_s = FIRST_PAUSE_S, 0, time.monotonic() + self._busy_s
        while True:
            try:
                body = await ask()
            except (DaemonUnreachable, Draining, ProtocolError, Aborted):
                raise
            except Reserved:
                deadline_s = time.monotonic() + self._busy_s  # another batch has the machine, for as long as it takes
            except TryLater:
                if time.monotonic() > deadline_s:
                    raise
            except EngineFailed as exc:
                engine_deaths += 1
                if engine_deaths == ENGINE_TRIES:
                    return failed(item, exc)
            except TierdError as exc:
                return failed(item, exc)
            else:
                return Answer(item.id, item.custom_id, Response(200, _request_id(item), body))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _parsed(self, item: Item) -> Callable[[], Awaitable[Any]]:
        """The request, ready to be sent. Raises BadRequest or Unsupported that names the field."""
        body_limits.check(item.body)
        body = item.body
        if self._model is not None:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            body = msgspec.json.encode({**fields, "model": self._model})
        if item.url == EMBEDDING_URL:
            wanted = embeddings.parse(body)
            check(wanted.inputs)
            return lambda: self._vectors(wanted)
        call = openai.parse_chat(body) if item.url == CHAT_URL else openai.parse_completion(body)
        if call.stream:
            raise BadRequest("a batch has no streams", param="stream")
        call = call._replace(submits=tuple(_behind(submit) for submit in call.submits))
        for submit in call.submits:
            frame_of(generate_request(0, submit))  # what no frame can hold is the fault of this request alone
        return lambda: self._whole(item, call)

    async def _vectors(self, call: embeddings.Call) -> embeddings.EmbeddingList:
        return embeddings.answer(call, await self._embed(call.ref, call.inputs))

    async def _whole(self, item: Item, call: openai.Call) -> Any:
        """The body of an answer. Several prompts run one after the other, and so are their choices counted."""
        first = call.submits[0]
        answer_id = f"{'chatcmpl' if item.url == CHAT_URL else 'cmpl'}-{secrets.token_hex(12)}"
        shape = Shape(
            item.url == CHAT_URL, answer_id, int(time.time()), first.model, choices=first.n * len(call.submits),
            logprobs=first.logprobs, echo=call.echo,
        )  # fmt: skip
        whole, usage, last = Whole(shape), dict[str, Any](), Event(0, "done")
        for number, submit in enumerate(call.submits):
            async with contextlib.aclosing(self._generate(submit)) as events:
                async for event in events:
                    if event.ev == "aborted":
                        raise Aborted("the generation was stopped")
                    self._take(whole, event, number * first.n)
                    last = event
            if submit.n == submit.best_of == 1:  # of several answers the end of each was told
                whole.take(Event(last.id, "choice", {"choice": number, "finish": last.data["finish"]}))
            for name, count in last.data.get("usage", {}).items():
                usage[name] = usage.get(name, 0) + count if isinstance(count, int) else count
        return whole.take(Event(last.id, "done", {**last.data, "usage": usage}))

    def _take(self, whole: Whole, event: Event, base: int) -> None:
        """Give an event of one prompt to the answer, the number of its choice moved up by `base`."""
        match event.ev:
            case "text":
                self._on_tokens(len(event.data["tokens"]))
                whole.take(Event(event.id, "text", {**event.data, "choice": base + event.data.get("choice", 0)}))
            case "choice":
                whole.take(Event(event.id, "choice", {**event.data, "choice": base + event.data["choice"]}))
            case _:
                pass  # `accepted`, `progress`, and what a newer daemon may say; `done` is told once for all prompts


def failed(item: Item, exc: TierdError) -> Answer:
    """The line of a request that has no answer."""
    response = Response(exc.status, _request_id(item), openai.error(exc))
    return Answer(item.id, item.custom_id, response, Fault(exc.code, sentence(exc)))


def _behind(submit: Submit) -> Submit:
    return msgspec.structs.replace(submit, priority=MAX_PRIORITY)


def _request_id(item: Item) -> str:
    return "req_" + item.id.removeprefix(ID_PREFIX)
