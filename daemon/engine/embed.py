"""Embeddings: a text in, one vector of unit length out. What is pooled while rows are computed, and who waits for it.

A prompt whose vector is wanted runs through the scheduler as any other and ends where an answer would begin. Pooling
the last token needs the state of one row, so what is known of the prompt is found and not computed. Pooling the mean
needs those of all rows, and pages hold none: such a prompt computes all of them, and its pages, which nobody could
reuse for the same purpose, are its own and are given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, assert_never

import msgspec
import numpy as np
import numpy.typing as npt

from tierd.daemon.errors import BadRequest, EngineFailed, from_wire
from tierd.daemon.protocol import TERMINAL, Event

if TYPE_CHECKING:
    from tierd.daemon.engine.intake import Intake
    from tierd.daemon.engine.request import Request
    from tierd.daemon.engine.step import StepLoop

MAX_CALL_INPUTS = 256  # of one operation; their vectors come in one frame
VECTOR_TYPE = "<f4"  # on the wire


class Pooling(enum.StrEnum):
    """Which final hidden states a vector is made of."""

    MEAN = "mean"  # of all tokens
    LAST = "last"  # of the last one


class Embedding:
    """The vector of one prompt in the making. Threading: step thread only."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sum: npt.NDArray[np.float64] | None = None
        self._taken = 0  # rows whose states are in the sum: the first ones

    @property
    def needs_every_row(self) -> bool:
        """Whether no row may be spared."""
        return self._pooling is Pooling.MEAN

    def wanted(self, start: int, count: int, is_end: bool) -> range:
        """Which of `count` rows at `start` have states that are wanted; rows are counted from `start`."""
        match self._pooling:
            case Pooling.MEAN:
                # A prompt that gave its pages back computes its first rows once more: they count once.
                return range(max(self._taken - start, 0), count)
            case Pooling.LAST:
                return range(count - 1, count) if is_end else range(0)
            case _:
                assert_never(self._pooling)

    def take(self, states: npt.NDArray[np.float32]) -> None:  # [wanted, hidden]
        """Add the states of rows that follow those taken before."""
        if len(states):
            added = states.sum(axis=0, dtype=np.float64)
            self._sum = added if self._sum is None else self._sum + added
            self._taken += len(states)

    def vector(self) -> bytes:
        """The vector, of unit length, as float32. Raises EngineFailed for a model that computed no numbers."""
        if self._sum is None:
            raise EngineFailed("no row of the prompt was computed")
        length = float(np.linalg.norm(self._sum))  # that of the mean is the same direction
        if not np.isfinite(length) or not length:
            raise EngineFailed("the model's hidden states are no numbers", hint="is the model broken?")
        return (self._sum / length).astype(VECTOR_TYPE).tobytes()


class EmbedArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of the operation. `tenant`, `quota_pages`, `priority`: as in `Submit`."""

    inputs: tuple[str | tuple[int, ...], ...]
    first: int = 0  # the number of the first of them, for messages
    truncate: bool = False  # inputs that are too long are cut at their end; else they are refused
    tenant: str = ""
    quota_pages: int = 0
    priority: int = 0


class _Places:
    """So many may be taken at once; whoever waits for one gets it in order of rank. Threading: event loop only."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[tuple[float, int], asyncio.Future[None]]] = []  # a heap; no two ranks are equal

    @contextlib.asynccontextmanager
    async def one(self, rank: tuple[float, int]) -> AsyncIterator[None]:
        """A place. The lower rank goes first."""
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (rank, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it was its turn
                    self._next()
                raise
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            _, turn = heapq.heappop(self._waiting)
            if not turn.done():  # nobody has stopped waiting for it
                turn.set_result(None)
                return
        self._free += 1


class Embedder:
    """The operation `embed`: several prompts, one result. Threading: event loop only, apart from `ended`.

    Only so many prompts of all operations together are in the step loop at once: places are left for answers. The
    others wait in the order in which the scheduler would take them.
    """

    def __init__(self, places: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._places = _Places(places)
        self._waiting: dict[int, asyncio.Future[Event]] = {}
        self._ids = itertools.count(-1, -1)  # never those of the front's requests

    async def embed(
        self, intake: Intake, steps: StepLoop, tokenizer: Executor, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`vectors` (bytes of float32, in order) and `usage`. Raises BadRequest before anything is computed.

        Cancelling the task ends what still runs.
        """
        try:
            args = msgspec.convert(given, EmbedArgs)
        except msgspec.ValidationError as exc:
            raise BadRequest(f"embed: {str(exc).replace('`', '')}") from None
        if not 1 <= len(args.inputs) <= MAX_CALL_INPUTS:
            raise BadRequest(f"embed takes 1 to {MAX_CALL_INPUTS} inputs at once, not {len(args.inputs)}")
        ids = [next(self._ids) for _ in args.inputs]
        requests = await self._loop.run_in_executor(tokenizer, _requests, intake, args, ids, time.monotonic())
        tasks = [asyncio.create_task(self._one(steps, request)) for request in requests]
        try:
            done = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        usages = [event.data["usage"] for event in done]
        usage = {
            "prompt_tokens": sum(one.prompt_tokens for one in usages),
            "cached_tokens": sum(one.cached_tokens for one in usages),
        }
        return {"vectors": [event.data["embedding"] for event in done], "usage": usage}

    async def _one(self, steps: StepLoop, request: Request) -> Event:
        async with self._places.one(request.rank):
            future = self._waiting[request.id] = self._loop.create_future()
            try:
                steps.submit(request)
                event: Event = await future  # the step loop tells every end, its own too
            except asyncio.CancelledError:
                steps.cancel(request.id)
                raise
            finally:
                del self._waiting[request.id]
        if event.ev != "done":
            raise from_wire(event.data) if event.ev == "failed" else EngineFailed("the engine stopped")
        return event

    def ended(self, events: Sequence[Event]) -> None:
        """Take the events that are about prompts of ours: those with negative ids. Step thread."""
        if ours := [event for event in events if event.id < 0 and event.ev in TERMINAL]:
            self._loop.call_soon_threadsafe(self._tell, ours)

    def _tell(self, events: Sequence[Event]) -> None:
        for event in events:
            future = self._waiting.get(event.id)
            if future is not None and not future.done():
                future.set_result(event)


def _requests(intake: Intake, args: EmbedArgs, ids: Sequence[int], now_s: float) -> list[Request]:
    """The tokenizer's part: raises BadRequest that names the input."""
    found = []
    for place, (request_id, given) in enumerate(zip(ids, args.inputs, strict=True)):
        try:
            found.append(intake.embedding(request_id, given, args, now_s))
        except BadRequest as exc:
            where = f"input[{args.first + place}]"
            raise type(exc)(f"{where}: {exc.message}", hint=exc.hint, param="input") from None
    return found
