"""What the daemon does for its users, whichever door they come through.

The doors (`server` for the unix socket, `api` for HTTP) turn bytes into these calls and the answers into bytes; they
decide nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from tierd.daemon import embedding, engine_row, kv_quota, limits
from tierd.daemon.admission import Admission, Place
from tierd.daemon.child import EngineProcess, EngineState
from tierd.daemon.choices import Choices, answers_of
from tierd.daemon.config import Settings
from tierd.daemon.errors import (
    BadRequest,
    Conflict,
    Draining,
    InternalError,
    NotFound,
    PermissionDenied,
    TierdError,
    TryLater,
    Unauthorized,
    to_wire,
)
from tierd.daemon.exclusive import Exclusive
from tierd.daemon.inbox import SlowReader
from tierd.daemon.keys import KeyRing
from tierd.daemon.metrics import Metrics
from tierd.daemon.models import catalog
from tierd.daemon.protocol import TERMINAL, Event, Submit
from tierd.daemon.resume import Live
from tierd.daemon.settled import default_mode, kv_root
from tierd.daemon.shelf import Shelf
from tierd.daemon.stream import LOAD_TIMEOUT_S, Stream
from tierd.daemon.supervisor import Model, Resize, Supervisor
from tierd.daemon.tenants import Tenants
from tierd.daemon.version import version

log = logging.getLogger("tierd.service")

STOP_TIMEOUT_S = 9.5  # after a signal
CALL_TIMEOUT_S = 60.0
CACHE_TIMEOUT_S = 4000.0  # verifying reads every page of the disk tier; the engine has a deadline of its own
Generation = Stream | Choices  # from its submission to its terminal event
_REFUSALS = (BadRequest, NotFound, Conflict, TryLater, Unauthorized, PermissionDenied)


class Service:
    """The use-cases. `resize` changes the memory of an engine; `card`: what is told of a card that is watched.

    Threading: for one event loop.
    """

    def __init__(
        self, settings: Settings, supervisor: Supervisor, metrics: Metrics, resize: Resize, exclusive: Exclusive,
        card: Callable[[], dict[str, Any]] = dict,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.shelf = Shelf(settings)
        self.exclusive = exclusive
        self.metrics = metrics
        self.tenants = Tenants(KeyRing(settings.keys_file))
        self.draining = False
        self.stop_asked = asyncio.Event()
        self.stop_timeout_s = STOP_TIMEOUT_S
        self.http_address = ""  # what HTTP really listens on
        self.history = supervisor.history
        self._supervisor = supervisor
        self._resize = resize
        self._card = card
        self._started_s = time.monotonic()
        self._admission = Admission(self.tenants, settings.max_streams + settings.max_queue, supervisor.changed.notify)
        self._places: dict[Generation, Place] = {}
        self._embeddings = embedding.Embeddings(supervisor, metrics)
        self._ids = itertools.count(1)

    # -- generations -----------------------------------------------------------------------------------------------

    def submit(self, submit: Submit | Sequence[Submit], tenant: str = "", holder: object = None) -> Generation:
        """Check a request, book its place; nothing runs until `run` is iterated. Raises TierdError when it is refused.

        Several submits are several prompts of one request, for one model. `tenant`: in whose name; two tenants never
        share a page. `holder`: see `Exclusive`. Whoever may not come to iterate `run` has to `release` it: `answering`
        does both.
        """
        self.exclusive.check(holder)
        submits = limits.with_mode([submit] if isinstance(submit, Submit) else submit, default_mode(self.settings))
        model = self._check(submits)
        place = self._admission.book(tenant, sum(map(answers_of, submits)))
        given = {"tenant": tenant, "quota_pages": place.allowance.pages}
        submits = [msgspec.structs.replace(one, **given) for one in submits]
        live_id = next(self._ids)
        stream: Generation
        if len(submits) == 1 and answers_of(submits[0]) == 1:
            stream = Stream(self._supervisor, model, Live(live_id, submits[0], time.monotonic()))
        else:
            stream = Choices(self._supervisor, model, live_id, submits)
        self._places[stream] = place
        return stream

    def release(self, stream: Generation) -> None:
        """Give back the place of a generation. One that has ended has none."""
        if place := self._places.pop(stream, None):
            place.release()

    @contextlib.asynccontextmanager
    async def answering(
        self, submit: Submit | Sequence[Submit], door: str, tenant: str = ""
    ) -> AsyncGenerator[AsyncGenerator[Event]]:
        """`submit` and `run`: the events, and the place given back whatever happens."""
        stream = self.submit(submit, tenant)
        try:
            async with contextlib.aclosing(self.run(stream, door)) as events:
                yield events
        finally:
            self.release(stream)  # a generator that was never begun does not do it

    def _check(self, submits: Sequence[Submit]) -> Model:
        """The model of requests. Raises TierdError for those that are refused whoever asks."""
        if self.draining:
            raise Draining()
        model, context_tokens = self.shelf.find(submits[0].model)
        for one in submits:
            limits.check_submit(one, context_tokens)
        return model

    async def run(self, stream: Generation, door: str) -> AsyncGenerator[Event, None]:
        """Events of an admitted request; the last one is its only terminal event. Raises SlowReader alone.

        Closing the iterator, or cancelling its task, cancels the generation.
        """
        live, outcome, usage = stream.live, "aborted", None
        timings: Mapping[str, float] = {}
        try:
            async with contextlib.aclosing(stream.events()) as events:
                async for event in events:
                    if event.ev in TERMINAL:
                        outcome, usage = event.ev, event.data.get("usage")
                        timings = event.data.get("timings", timings)
                    yield event
        except TierdError as exc:
            event = failure(live.id, exc, accepted=live.accepted is not None)
            outcome = event.ev
            yield event
        except SlowReader:
            raise
        except Exception:
            log.exception("request %d failed", live.id)
            outcome = "failed"
            yield Event(live.id, "failed", to_wire(InternalError()))
        finally:
            self.release(stream)
            ttft_s = None if live.first_text_s is None else live.first_text_s - live.started_s
            seen = {"door": door, "model": stream.model.name, "tokens": len(live.tokens), "deaths": live.deaths}
            log.info("request %d: %s", live.id, outcome, extra=seen)
            self.metrics.ended(door, outcome, usage or live.usage(), deaths=live.deaths, ttft_s=ttft_s, timings=timings)

    async def embed(
        self, ref: str, inputs: Sequence[embedding.Input], tenant: str, door: str, *, truncate: bool = False,
        priority: int = 0, holder: object = None,
    ) -> embedding.Vectors:  # fmt: skip
        """The vectors of some inputs, in order. Cancelling ends the work. Raises TierdError."""
        self.exclusive.check(holder)
        if self.draining:
            raise Draining()
        embedding.check(inputs)
        model, _ = self.shelf.find(ref)
        with self._admission.book(tenant) as place:
            return await self._embeddings.run(model, inputs, place, door, truncate, priority)

    @property
    def live(self) -> int:
        """Generations that run or wait, and requests for vectors."""
        return self._admission.live

    async def drain(self, timeout_s: float) -> int:
        """Take no new generations, and wait for those that run. Returns how many still do after the deadline."""
        self.draining = True
        deadline_s = time.monotonic() + timeout_s
        while self.live and (left_s := deadline_s - time.monotonic()) > 0:
            await self._supervisor.changed.wait(min(left_s, 0.25))
        return self.live

    def ask_stop(self, timeout_s: float) -> None:
        """Ask the daemon to end: within the time, for running answers and for flushing together."""
        self.stop_timeout_s = timeout_s
        self.stop_asked.set()

    # -- models and engines ----------------------------------------------------------------------------------------

    async def models(self) -> list[dict[str, Any]]:
        """Every prepared model, broken ones with their `problem`."""
        return await self.shelf.list(self._supervisor.engines)

    async def show(self, ref: str) -> dict[str, Any]:
        """One model with its shape. Raises ModelNotFound."""
        return await self.shelf.show(ref, self._supervisor.engines)

    def context_tokens(self, ref: str) -> int:
        """The context that is served of a model. Raises ModelNotFound."""
        return self.shelf.find(ref)[1]

    async def load(self, ref: str, tenant: str = "") -> dict[str, Any]:
        """Bring a model up, in a place of the tenant. Returns what its engine said when it was ready."""
        self.exclusive.check(None)
        if self.draining:
            raise Draining()
        model, _ = self.shelf.find(ref)
        with self._admission.book(tenant, drains=False):
            engine = await self._supervisor.acquire(model, LOAD_TIMEOUT_S)
        return {"model": model.name, "pid": engine.pid, **engine.info}

    def progress(self, op: str, ref: str) -> dict[str, Any]:
        """What is told to those who wait for `load` or `cache`; empty if there is nothing to tell."""
        return self._supervisor.progress_of(self.shelf.find(ref)[0].name) if op == "load" else self._supervisor.upkeep()

    async def unload(self, ref: str | None) -> dict[str, Any]:
        """Flush and end the engine of a model, or every engine. Raises TooBusy while one is in use."""
        if ref is None:
            names = list(self._supervisor.engines)
        else:
            names = [catalog.parse_ref(ref)]
            if names[0] not in self._supervisor.engines:
                self.shelf.find(ref)  # a mistyped name is told as such
        ending = {name: self._supervisor.engines.get(name) for name in names if self._supervisor.unload(name)}
        for name, engine in ending.items():
            while self._supervisor.engines.get(name) is engine:
                await self._supervisor.changed.wait(1.0)
        return {"unloaded": list(ending)}

    def keep_loaded(self, ref: str, seconds: float | None) -> None:
        """How long a loaded model stays when nobody uses it: 0 unloads it when it is idle, None is for ever."""
        self._supervisor.keep_loaded(self.shelf.find(ref)[0].name, seconds)

    async def tokenize(self, ref: str, args: Mapping[str, Any], tenant: str = "") -> dict[str, Any]:
        """Token ids of a text or of messages, in a place of the tenant."""
        if self.draining:
            raise Draining()
        with self._admission.book(tenant, drains=False):
            return await self._call(ref, "tokenize", args, CALL_TIMEOUT_S)

    async def count(self, submit: Submit, tenant: str = "") -> int:
        """Tokens of the prompt that a request would have. Raises what `submit` raises."""
        self._check([submit])
        given: dict[str, Any] = msgspec.to_builtins(submit)
        args: dict[str, Any] = {name: given[name] for name in ("messages", "tools", "thinking") if name in given}
        return len((await self.tokenize(submit.model, args, tenant))["tokens"])

    async def look(self, op: str, ref: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """`pages`, `top` or `page` of a model that is loaded; looking loads none. Raises NotFound."""
        return await self._loaded(ref).call(op, args, CALL_TIMEOUT_S)

    def cancel_request(self, ref: str, request: int) -> None:
        """End a generation by the number that `top` shows; its client gets `aborted`. Raises NotFound."""
        if not self._loaded(ref).cancel(request):
            raise NotFound(f"no request {request} runs or waits", param="request")

    async def cache(self, action: str, ref: str | None, *, repair: bool) -> dict[str, Any]:
        """`ls`, `verify`, `gc` or `clear` the page stores: of one model, or of all.

        Only an engine can read its store. Without a model the loaded ones are asked; the stores of the others are
        listed under `closed`, and `clear` removes them whole.
        """
        root = kv_root(self.settings)
        if action == "ls":
            found = await asyncio.to_thread(kv_quota.namespaces, root)
            name = catalog.parse_ref(ref) if ref else None
            return {"namespaces": [msgspec.to_builtins(n) for n in found if name in (None, n.model)]}
        args = {"action": action, "repair": repair}
        if ref:
            return {"engines": {catalog.parse_ref(ref): await self._call(ref, "cache", args, CACHE_TIMEOUT_S)}}
        engines = [e for e in self._supervisor.engines.values() if e.state is EngineState.READY]
        answers = {e.model: await e.call("cache", args, CACHE_TIMEOUT_S) for e in engines}
        closed = [n for n in await asyncio.to_thread(kv_quota.namespaces, root) if not n.open]
        if action == "clear":
            closed = [n for n in closed if await asyncio.to_thread(kv_quota.remove, root, n.name)]
        return {"engines": answers, "closed": [msgspec.to_builtins(n) for n in closed]}

    async def prefix(self, ref: str | None, args: Mapping[str, Any]) -> dict[str, Any]:
        """`ls`, `pin`, `unpin`, `drop`, `persist` or `evict` known prefixes: of a model, or of the last used.

        A model that is named is loaded if need be, but not merely to look. Raises NotFound when none is loaded.
        """
        if ref is not None and args.get("action") != "ls":
            return {"model": catalog.parse_ref(ref), **await self._call(ref, "prefix", args, CALL_TIMEOUT_S)}
        engine = self._loaded(ref)
        return {"model": engine.model, **await engine.call("prefix", args, CALL_TIMEOUT_S)}

    async def resize(self, ref: str | None, args: Mapping[str, Any]) -> dict[str, Any]:
        """Change the memory of an engine that runs: of a model, or of the last used. Raises NotFound when none does."""
        engine = self._loaded(ref)
        timeout_s = float(args.get("timeout_s", 0.0)) + CALL_TIMEOUT_S
        return {"model": engine.model, **await self._resize(engine, args, timeout_s)}

    # -- looking ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """draining, loading, ready or idle."""
        if self.draining:
            return "draining"
        states = {engine.state for engine in self._supervisor.engines.values()}
        if EngineState.STARTING in states:
            return "loading"
        return "ready" if EngineState.READY in states else "idle"

    async def ps(self) -> dict[str, Any]:
        """The engines. They are asked, but never waited for long."""
        await asyncio.gather(*(engine_row.refresh(engine) for engine in self._supervisor.engines.values()))
        return {"engines": list(map(self._row, self._supervisor.engines.values())), "exclusive": self.exclusive.told()}

    async def status(self) -> dict[str, Any]:
        """Everything about the daemon. Engines are asked, but never waited for long."""
        engines = list(self._supervisor.engines.values())
        await asyncio.gather(*(engine_row.refresh(engine) for engine in engines))
        rows = [{**engine.status, **self._row(engine)} for engine in engines]
        latest = max(engines, key=lambda engine: engine.last_use_s, default=None)
        running = sum(row["running"] for row in rows)
        return {
            "pid": os.getpid(),
            "state": self.state,
            "model": latest.model if latest else None,
            "version": version(),
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "socket": str(self.settings.socket),
            "http": self.http_address,
            "tiers": latest.status.get("tiers", {}) if latest else {},
            "engines": rows,
            "exclusive": self.exclusive.told(),
            "card": self._card(),
            "queue": {
                "live": self.live, "running": running, "waiting": max(0, self.live - running),
                "max": self.settings.max_queue,
            },
        }  # fmt: skip

    async def metrics_text(self) -> str:
        """The text of `/metrics`."""
        status = await self.status()
        return self.metrics.render(self.live, status["engines"], status["uptime_s"], status["card"])

    def _row(self, engine: EngineProcess) -> dict[str, Any]:
        return engine_row.row(engine, self._supervisor.idle_s(engine), self._supervisor.expires_in_s(engine))

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _call(self, ref: str, op: str, args: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        model, _ = self.shelf.find(ref)
        self.exclusive.check(None, model.name)
        engine = await self._supervisor.acquire(model, LOAD_TIMEOUT_S)
        return await engine.call(op, args, timeout_s)

    def _loaded(self, ref: str | None) -> EngineProcess:
        """The engine of a model, or the one used last. Raises NotFound, ModelNotFound."""
        engines = [engine for engine in self._supervisor.engines.values() if engine.state is EngineState.READY]
        if ref is not None:
            name = self.shelf.find(ref)[0].name
            engines = [engine for engine in engines if engine.model == name]
        if not engines:
            what = f"{catalog.parse_ref(ref)} is not loaded" if ref else "no model is loaded"
            raise NotFound(what, hint="`tierd load MODEL` loads one")
        return max(engines, key=lambda engine: engine.last_use_s)


def failure(event_id: int, exc: TierdError, *, accepted: bool) -> Event:
    """The terminal event for an error: `refused` when nothing was begun and the request is to blame, else `failed`."""
    return Event(event_id, "refused" if not accepted and isinstance(exc, _REFUSALS) else "failed", dict(to_wire(exc)))
