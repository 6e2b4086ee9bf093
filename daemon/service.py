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
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from tierd.daemon import kv_quota, limits
from tierd.daemon.child import EngineProcess, EngineState
from tierd.daemon.choices import Choices, answers_of
from tierd.daemon.config import Settings, kv_root
from tierd.daemon.errors import (
    BadRequest,
    Conflict,
    Draining,
    InternalError,
    NotFound,
    PermissionDenied,
    TierdError,
    TooBusy,
    TryLater,
    Unauthorized,
    to_wire,
)
from tierd.daemon.inbox import SlowReader
from tierd.daemon.keys import KeyRing
from tierd.daemon.metrics import Metrics
from tierd.daemon.models import catalog
from tierd.daemon.protocol import TERMINAL, Event, Submit
from tierd.daemon.resume import Live
from tierd.daemon.stream import LOAD_TIMEOUT_S, Stream
from tierd.daemon.supervisor import Model, Supervisor
from tierd.daemon.tenants import Allowance, Tenants
from tierd.daemon.version import version

log = logging.getLogger("tierd.service")

STOP_TIMEOUT_S = 9.5  # after a signal
STATUS_TIMEOUT_S = 0.25  # `status` answers at once, with the last figures when an engine is slow
CALL_TIMEOUT_S = 60.0
CACHE_TIMEOUT_S = 600.0  # verifying reads every page of the disk tier
Generation = Stream | Choices  # from its submission to its terminal event
_REFUSALS = (BadRequest, NotFound, Conflict, TryLater, Unauthorized, PermissionDenied)


class Service:
    """The use-cases. Threading: for one event loop."""

    def __init__(self, settings: Settings, supervisor: Supervisor, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.tenants = Tenants(KeyRing(settings.keys_file))
        self.draining = False
        self.stop_asked = asyncio.Event()
        self.stop_timeout_s = STOP_TIMEOUT_S
        self.http_address = ""  # what HTTP really listens on
        self._supervisor = supervisor
        self._started_s = time.monotonic()
        self._live: dict[int, Generation] = {}
        self._ids = itertools.count(1)
        self._manifests: dict[str, tuple[tuple[int, int], int]] = {}

    # -- generations -----------------------------------------------------------------------------------------------

    def submit(self, submit: Submit | Sequence[Submit], tenant: str = "") -> Generation:
        """Check a request; nothing runs until `run` is iterated. Raises TierdError when it is refused.

        Several submits are several prompts of one request, for one model. `tenant`: in whose name; two tenants never
        share a page.
        """
        if self.draining:
            raise Draining()
        submits = [submit] if isinstance(submit, Submit) else list(submit)
        model, context_tokens = self._find(submits[0].model)
        for one in submits:
            limits.check_submit(one, context_tokens)
        allowance = self._admit(sum(map(answers_of, submits)), tenant)
        submits = [msgspec.structs.replace(one, tenant=tenant, quota_pages=allowance.pages) for one in submits]
        live_id = next(self._ids)
        if len(submits) == 1 and answers_of(submits[0]) == 1:
            return Stream(self._supervisor, model, Live(live_id, submits[0], time.monotonic()))
        return Choices(self._supervisor, model, live_id, submits)

    def _admit(self, width: int, tenant: str) -> Allowance:
        """Room for that many engine streams more. Raises TooBusy, QuotaExceeded, BadRequest for what never fits."""
        bound = self.settings.max_streams + self.settings.max_queue
        most = min(bound, limits.MAX_ANSWERS)
        if width > most:
            raise BadRequest(f"{width} answers are asked for at once, at most {most} are possible", param="n")
        if sum(stream.width for stream in self._live.values()) + width > bound:
            raise TooBusy(f"{bound} requests run or wait already", hint="try again in a moment, or raise max_queue")
        live = sum(stream.width for stream in self._live.values() if stream.live.submit.tenant == tenant)
        return self.tenants.admit(tenant, live + width - 1)

    async def run(self, stream: Generation, door: str) -> AsyncGenerator[Event, None]:
        """Events of an admitted request; the last one is its only terminal event. Raises SlowReader alone.

        Closing the iterator, or cancelling its task, cancels the generation.
        """
        live, outcome, usage = stream.live, "aborted", None
        timings: Mapping[str, float] = {}
        self._live[live.id] = stream
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
            del self._live[live.id]
            ttft_s = None if live.first_text_s is None else live.first_text_s - live.started_s
            self._supervisor.changed.notify()  # `drain` counts them
            seen = {"door": door, "model": stream.model.name, "tokens": len(live.tokens), "deaths": live.deaths}
            log.info("request %d: %s", live.id, outcome, extra=seen)
            usage = usage or live.usage()
            self.metrics.ended(door, outcome, usage, deaths=live.deaths, ttft_s=ttft_s, timings=timings)

    @property
    def live(self) -> int:
        """Generations that run or wait."""
        return len(self._live)

    async def drain(self, timeout_s: float) -> int:
        """Take no new generations, and wait for those that run. Returns how many still do after the deadline."""
        self.draining = True
        deadline_s = time.monotonic() + timeout_s
        while self._live and (left_s := deadline_s - time.monotonic()) > 0:
            await self._supervisor.changed.wait(min(left_s, 0.25))
        return len(self._live)

    def ask_stop(self, timeout_s: float) -> None:
        """Ask the daemon to end: within the time, for running answers and for flushing together."""
        self.stop_timeout_s = timeout_s
        self.stop_asked.set()

    # -- models and engines ----------------------------------------------------------------------------------------

    async def models(self) -> list[dict[str, Any]]:
        """Every prepared model, broken ones with their `problem`."""
        listed = await asyncio.to_thread(catalog.list_models, self.settings.models_dir)
        return [
            {"name": item.name, "loaded": item.name in self._supervisor.engines, "problem": item.problem}
            | (catalog.summary(item.manifest) if item.manifest else {})
            for item in listed
        ]

    async def show(self, ref: str) -> dict[str, Any]:
        """One model with its shape. Raises ModelNotFound."""
        directory, manifest = await asyncio.to_thread(catalog.find, self.settings.models_dir, ref)
        return {
            "name": directory.name,
            "path": str(directory),
            "loaded": directory.name in self._supervisor.engines,
            "spec": msgspec.to_builtins(manifest.spec),
            "sampling": msgspec.to_builtins(manifest.sampling),
            **catalog.summary(manifest),
        }

    def context_tokens(self, ref: str) -> int:
        """The context that is served of a model. Raises ModelNotFound."""
        return self._find(ref)[1]

    async def load(self, ref: str) -> dict[str, Any]:
        """Bring a model up. Returns what its engine said when it was ready."""
        model, _ = self._find(ref)
        engine = await self._supervisor.acquire(model, LOAD_TIMEOUT_S)
        return {"model": model.name, "pid": engine.pid, **engine.info}

    def loading_progress(self, ref: str) -> dict[str, Any]:
        """What is told to those who wait for `load`."""
        return self._supervisor.progress_of(self._find(ref)[0].name)

    async def unload(self, ref: str | None) -> dict[str, Any]:
        """Flush and end the engine of a model, or every engine. Raises TooBusy while one is in use."""
        if ref is None:
            names = list(self._supervisor.engines)
        else:
            names = [catalog.parse_ref(ref)]
            if names[0] not in self._supervisor.engines:
                self._find(ref)  # a mistyped name is told as such
        ending = {name: self._supervisor.engines.get(name) for name in names if self._supervisor.unload(name)}
        for name, engine in ending.items():
            while self._supervisor.engines.get(name) is engine:
                await self._supervisor.changed.wait(1.0)
        return {"unloaded": list(ending)}

    def keep_loaded(self, ref: str, seconds: float | None) -> None:
        """How long a loaded model stays when nobody uses it: 0 unloads it when it is idle, None is for ever."""
        self._supervisor.keep_loaded(self._find(ref)[0].name, seconds)

    async def tokenize(self, ref: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """Token ids of a text or of messages."""
        return await self._call(ref, "tokenize", args, CALL_TIMEOUT_S)

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
        """`ls`, `pin`, `unpin` or `drop` known prefixes: of a model, or of the last used.

        A model that is named is loaded if need be, but not merely to look. Raises NotFound when none is loaded.
        """
        if ref is not None and args.get("action") != "ls":
            return {"model": catalog.parse_ref(ref), **await self._call(ref, "prefix", args, CALL_TIMEOUT_S)}
        engine = self._loaded(ref)
        return {"model": engine.model, **await engine.call("prefix", args, CALL_TIMEOUT_S)}

    async def resize(self, ref: str | None, args: Mapping[str, Any]) -> dict[str, Any]:
        """Change the memory of an engine that runs: of a model, or of the last used. Raises NotFound when none does.

        The sizes last until the engine ends; the next one starts with those of the settings.
        """
        engine = self._loaded(ref)
        timeout_s = float(args.get("timeout_s", 0.0)) + CALL_TIMEOUT_S
        return {"model": engine.model, **await engine.call("resize", args, timeout_s)}

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
        await asyncio.gather(*(_refresh(engine) for engine in self._supervisor.engines.values()))
        return {"engines": [self._row(engine) for engine in self._supervisor.engines.values()]}

    async def status(self) -> dict[str, Any]:
        """Everything about the daemon. Engines are asked, but never waited for long."""
        engines = list(self._supervisor.engines.values())
        await asyncio.gather(*(_refresh(engine) for engine in engines))
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
            "queue": {
                "live": self.live,
                "running": running,
                "waiting": max(0, self.live - running),
                "max": self.settings.max_queue,
            },
        }

    async def metrics_text(self) -> str:
        """The text of `/metrics`."""
        status = await self.status()
        return self.metrics.render(self.live, status["engines"], status["uptime_s"])

    def _row(self, engine: EngineProcess) -> dict[str, Any]:
        expires_in_s = self._supervisor.expires_in_s(engine)
        return {
            "model": engine.model,
            "pid": engine.pid,
            "state": str(engine.state),
            "progress": engine.progress,
            "rss_bytes": _rss_bytes(engine.pid),
            "idle_s": round(self._supervisor.idle_s(engine), 3),
            "expires_in_s": None if expires_in_s is None else round(expires_in_s, 3),
            "running": engine.status.get("running", engine.streams) if engine.streams else 0,
            "waiting": engine.status.get("waiting", 0) if engine.streams else 0,
            "notices": list(engine.notices),
            "writes": engine.status.get("writes", {}),
            "weights": engine.status.get("weights", {}),
        }

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _call(self, ref: str, op: str, args: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        model, _ = self._find(ref)
        engine = await self._supervisor.acquire(model, LOAD_TIMEOUT_S)
        return await engine.call(op, args, timeout_s)

    def _loaded(self, ref: str | None) -> EngineProcess:
        """The engine of a model, or the one used last. Raises NotFound, ModelNotFound."""
        engines = [engine for engine in self._supervisor.engines.values() if engine.state is EngineState.READY]
        if ref is not None:
            name = self._find(ref)[0].name
            engines = [engine for engine in engines if engine.model == name]
        if not engines:
            what = f"{catalog.parse_ref(ref)} is not loaded" if ref else "no model is loaded"
            raise NotFound(what, hint="`tierd load MODEL` loads one")
        return max(engines, key=lambda engine: engine.last_use_s)

    def _find(self, ref: str) -> tuple[Model, int]:
        """A model, and the context in tokens that its engine serves. Reads a manifest again when its file changed."""
        ref = ref or self.settings.default_model
        name = catalog.parse_ref(ref)
        directory = self.settings.models_dir / name
        try:
            info = os.stat(directory / catalog.MANIFEST)
            stamp = (info.st_mtime_ns, info.st_ino)
        except OSError:
            stamp = (0, 0)
        known = self._manifests.get(name)
        if known is None or known[0] != stamp or stamp == (0, 0):
            found, manifest = catalog.find(self.settings.models_dir, ref)
            known = self._manifests[found.name] = (stamp, manifest.context)
        return Model(name, directory), self.settings.ctx or known[1]


def failure(event_id: int, exc: TierdError, *, accepted: bool) -> Event:
    """The terminal event for an error: `refused` when nothing was begun and the request is to blame, else `failed`."""
    return Event(event_id, "refused" if not accepted and isinstance(exc, _REFUSALS) else "failed", dict(to_wire(exc)))


async def _refresh(engine: EngineProcess) -> None:
    if engine.state is not EngineState.READY:
        return
    with contextlib.suppress(TierdError):
        engine.status = await engine.call("status", {}, STATUS_TIMEOUT_S)


def _rss_bytes(pid: int | None) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


