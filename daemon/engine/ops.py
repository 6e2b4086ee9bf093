"""The operations an engine answers. They run on the io thread and hand the work to the tokenizer's or the step thread.

Every operation ends with one terminal event. Of a generation it comes from here until the step loop has taken the
request, and from there afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from tierd.daemon.engine import tend
from tierd.daemon.engine.assemble import Engine
from tierd.daemon.engine.embed import Embedder
from tierd.daemon.errors import BadRequest, Draining, Loading, TierdError, TooBusy, Unsupported, to_wire
from tierd.daemon.protocol import TERMINAL, Event, Message, Request, Submit, Tool, Usage, to_submit

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CALLS = 64  # simple operations in progress
CLEAR_TIMEOUT_S = 60.0
FINAL_FLUSH_S = 0.5  # of a stop, whatever its timeout says: what is dirty is a few groups of pages


class Ops:
    """Threading: event loop only, apart from `ended`."""

    def __init__(
        self, send: Callable[[Event], None], stop: Callable[[], None], tokenizer: ThreadPoolExecutor, max_requests: int,
        embed_places: int = 1,
    ) -> None:  # fmt: skip
        """`send` queues an event for the front; `stop` ends the process in order; `close` ends `tokenizer`.

        `embed_places`: prompts whose vectors are wanted that run at once.
        """
        self._send = send
        self._stop = stop
        self._max_requests = max_requests
        self._loop = asyncio.get_running_loop()
        self._engine: Engine | None = None
        self._draining = False
        self._live: set[int] = set()  # generations without a terminal event
        self._preparing: dict[int, asyncio.Task[None]] = {}  # of `_live`, those the step loop has not got yet
        # One request each is on the thread of grammars and on the tokenizer's; the others wait here and not in the
        # executors, whose queues keep what was cancelled until it is its turn.
        self._compiling, self._tokenizing = asyncio.Lock(), asyncio.Lock()
        self._embedder = Embedder(embed_places)
        self._long: dict[int, asyncio.Task[None]] = {}  # operations that can be cancelled
        self._tasks: set[asyncio.Task[None]] = set()
        self._started_s = time.monotonic()
        self._quiet = asyncio.Event()  # set whenever no generation is live
        self._quiet.set()
        self._tokenizer = tokenizer

    def attach(self, engine: Engine) -> None:
        """The engine is up."""
        self._engine = engine

    def close(self) -> None:
        """End the tokenizer's thread, and every task."""
        for task in self._tasks:
            task.cancel()
        self._tokenizer.shutdown(wait=True, cancel_futures=True)

    def ended(self, events: list[Event]) -> None:
        """Note what is over. Step thread."""
        self._embedder.ended(events)
        over = [event.id for event in events if event.ev in TERMINAL and event.id > 0]
        if over:
            self._loop.call_soon_threadsafe(self._answered, over)

    def _answered(self, ids: list[int]) -> None:
        if self._engine is not None:
            # Written now: an engine that is killed has lost no turn.
            with contextlib.suppress(RuntimeError):  # the thread has ended: closing the engine writes them
                self._tokenizer.submit(self._engine.intake.turns.flush)
        self._forget(ids)

    def _forget(self, ids: list[int]) -> None:
        self._live.difference_update(ids)
        if not self._live:
            self._quiet.set()

    def handle(self, request: Request) -> None:
        """Begin one operation; its answer comes later."""
        match request.op:
            case "generate":
                self._generate(request, time.monotonic())
            case "cancel":
                self._cancel(request)
            case "status":
                self._send(Event(request.id, "result", self._status()))
            case "embed" | "tokenize" | "flush" | "cache" | "pages" | "top" | "page" | "prefix" | "resize" | "stop":
                if len(self._tasks) - len(self._preparing) >= MAX_CALLS:
                    self._refuse(request.id, TooBusy(f"{MAX_CALLS} operations are in progress"))
                else:
                    task = self._begin(request.id, self._answer(request))
                    if request.op == "embed" or request.args.get("action") in ("verify", "gc"):
                        self._long[request.id] = task
                        task.add_done_callback(lambda _: self._long.pop(request.id, None))
            case _:
                self._refuse(request.id, Unsupported(f"the engine has no operation {request.op[:64]!r}"))

    def _begin(self, request_id: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"op {request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _refuse(self, request_id: int, exc: TierdError) -> None:
        self._send(Event(request_id, "refused", dict(to_wire(exc))))

    def _up(self) -> Engine:
        if self._engine is None:
            raise Loading("the model is loading", hint="try again in a moment")
        return self._engine

    # -- generations -----------------------------------------------------------------------------------------------

    def _generate(self, request: Request, arrived_s: float) -> None:
        """Take a generation in. It is known when this returns: a cancel may be the very next frame."""
        try:
            if request.id in self._live:
                log.error("generation %d is running already", request.id)
                return  # a second terminal event for one id would be worse
            if self._draining:
                raise Draining("the engine is stopping")
            if len(self._live) >= self._max_requests:
                raise TooBusy(f"{self._max_requests} requests wait already", hint="try again in a moment")
            engine, submit = self._up(), to_submit(request.args)
        except TierdError as exc:
            self._refuse(request.id, exc)
            return
        self._live.add(request.id)
        self._quiet.clear()
        task = self._begin(request.id, self._hand_on(engine, request.id, submit, arrived_s))
        self._preparing[request.id] = task

    async def _hand_on(self, engine: Engine, request_id: int, submit: Submit, arrived_s: float) -> None:
        event = await self._prepare(engine, request_id, submit, arrived_s)
        del self._preparing[request_id]  # of one that was cancelled `_abort` has told the end
        if event is not None:
            self._forget([request_id])
            self._send(event)

    async def _prepare(self, engine: Engine, request_id: int, submit: Submit, arrived_s: float) -> Event | None:
        """Hand the request to the step loop, or return its terminal event."""
        intake = engine.intake
        try:
            if intake.needs_compiling(submit):
                await self._in_turn(self._compiling, intake.guides.compiler, lambda: intake.compile(submit))
            made = await self._in_turn(
                self._tokenizing, self._tokenizer, lambda: intake.request(request_id, submit, arrived_s)
            )
            engine.loop.submit(made)
        except TierdError as exc:
            return Event(request_id, "refused", dict(to_wire(exc)))
        except Exception as exc:
            log.exception("request %d could not be prepared", request_id)
            return Event(request_id, "failed", dict(to_wire(exc)))
        return None

    async def _in_turn(self, gate: asyncio.Lock, thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """The result of `work`, which runs on a thread for one thing at a time.

        Who is cancelled before gives up the place; what runs already is waited for by the next one.
        """
        await gate.acquire()
        running = self._loop.run_in_executor(thread, work)

        def over(done: asyncio.Future[T]) -> None:
            gate.release()
            _ = done.cancelled() or done.exception()  # seen, even if nobody waits for it any more

        running.add_done_callback(over)
        await asyncio.wait((running,))
        return running.result()

    def _abort(self, request_id: int) -> None:
        """End a request that is being prepared: at once, whatever still runs for it."""
        task = self._preparing.pop(request_id)
        self._tasks.discard(task)  # it counts for nothing any more
        task.cancel()
        self._forget([request_id])
        self._send(Event(request_id, "aborted", {"usage": Usage()}))

    def _cancel(self, request: Request) -> None:
        target = request.args.get("target")
        if target in self._preparing:
            self._abort(target)
        elif target in self._live and self._engine is not None:
            self._engine.loop.cancel(target)
        elif isinstance(target, int) and (task := self._long.get(target)) is not None:
            task.cancel()
            self._send(Event(target, "aborted", {}))
        self._send(Event(request.id, "result", {}))

    # -- simple operations -----------------------------------------------------------------------------------------

    async def _answer(self, request: Request) -> None:
        """Run a simple operation; its result or its error is the terminal event."""
        try:
            match request.op:
                case "embed":
                    data = await self._embed(request.args)
                case "tokenize":
                    data = await self._tokenize(request.args)
                case "flush":
                    data = {"left": await asyncio.wrap_future(self._up().loop.flush(_timeout_s(request.args)))}
                case "cache":
                    data = await self._cache(request)
                case "prefix":
                    data = await tend.prefix(self._up(), self._tokenizer, request.args)
                case "resize":
                    data = await tend.resize(self._up(), request.args)
                case "pages":
                    pager = self._up().pager
                    data = {"map": await asyncio.wrap_future(self._up().loop.call(pager.page_map))}
                case "top":
                    data = await self._up().top.answer(self._up(), self._tokenizer, request.args)
                case "page":
                    data = await self._up().top.detail(self._up(), self._tokenizer, request.args)
                case _:
                    data = await self._drain(_timeout_s(request.args))
        except TierdError as exc:
            self._refuse(request.id, exc)
            return
        except Exception as exc:
            log.exception("operation %s failed", request.op)
            self._send(Event(request.id, "failed", dict(to_wire(exc))))
            return
        self._send(Event(request.id, "result", data))
        if request.op == "stop":
            self._stop()

    async def _embed(self, args: Mapping[str, Any]) -> dict[str, Any]:
        if self._draining:
            raise Draining("the engine is stopping")
        engine = self._up()
        return await self._embedder.embed(engine.intake, engine.loop, self._tokenizer, args)

    async def _tokenize(self, args: Mapping[str, Any]) -> dict[str, Any]:
        engine = self._up()
        try:
            messages = msgspec.convert(args.get("messages"), tuple[Message, ...] | None)
            tools = msgspec.convert(args.get("tools", ()), tuple[Tool, ...])
            text = msgspec.convert(args.get("text"), str | None)
            thinking = msgspec.convert(args.get("thinking"), bool | None)
        except msgspec.ValidationError as exc:
            raise BadRequest(f"tokenize: {exc}") from None
        tokens = await self._loop.run_in_executor(
            self._tokenizer,
            lambda: engine.intake.tokens_of(messages=messages, prompt=text, tools=tools, thinking=thinking),
        )
        return {"tokens": tokens}

    async def _cache(self, request: Request) -> dict[str, Any]:
        engine = self._up()
        match request.args.get("action"):
            case "verify":
                repair = bool(request.args.get("repair", False))
                return await tend.verify(
                    engine, repair, lambda data: self._send(Event(request.id, "progress", data))
                )
            case "gc":
                return await tend.gc(engine)
            case "clear":
                clear = engine.loop.call(lambda: (engine.pager.clear(), engine.prefixes.clear()))
                removed, pins = await asyncio.wrap_future(clear)
                await self._loop.run_in_executor(self._tokenizer, engine.intake.turns.clear)
                # The rows of cleared pages go now, not some time.
                await asyncio.wrap_future(engine.loop.flush(CLEAR_TIMEOUT_S))
                return {"removed_pages": removed, "removed_pins": pins}
            case other:
                raise Unsupported(f"no cache action {str(other)[:64]!r}", hint="verify, gc or clear", param="action")

    async def _drain(self, timeout_s: float) -> dict[str, Any]:
        """Let running generations end, make pages durable; what runs still at the deadline is aborted by the stop."""
        self._draining = True
        if self._engine is None:
            return {}
        self._engine.board.state = "draining"
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        for request_id in list(self._preparing):
            self._abort(request_id)
        for request_id in self._live:
            self._engine.loop.cancel(request_id)
        left_s = max(deadline_s - time.monotonic(), FINAL_FLUSH_S)
        return {"left": await asyncio.wrap_future(self._engine.loop.flush(left_s))}

    def _status(self) -> dict[str, Any]:
        if self._engine is None:
            return {"state": "loading", "uptime_s": round(time.monotonic() - self._started_s, 3)}
        return self._engine.board.told()


def _timeout_s(args: Mapping[str, Any]) -> float:
    """The `timeout_s` of an operation. Raises BadRequest when it is no number of seconds."""
    value = args.get("timeout_s", 10.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 3600:
        raise BadRequest("timeout_s must be a number of seconds from 0 to 3600", param="timeout_s")
    return float(value)
