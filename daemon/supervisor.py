"""Which engines run: starts them, makes room for them, hears them die, ends them when nobody uses them.

Nothing here waits for an engine in place. Whoever wants one asks `poll`, which starts what is missing and answers None,
and asks again when `changed` wakes it. So a request that is cancelled while a model loads leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierd.daemon.broadcast import Broadcast
from tierd.daemon.child import WORKER, EngineProcess, EngineState
from tierd.daemon.errors import LOGS_HINT, Draining, EngineFailed, OutOfSpace, TierdError, TooBusy
from tierd.daemon.failures import Failures
from tierd.daemon.history import History
from tierd.daemon.units import counted

log = logging.getLogger("tierd.supervisor")

FLUSH_S = 10.0
# A model that is always in use would never make room for another one: after this long its new requests queue behind.
PATIENCE_S = 5.0
CROWDED_S = 10.0  # a model that had no room is tried again: memory that others than tierd used may be free by then
IDLE_WAKE_S = 3600.0
BRING_BACK_S = 600.0
START_SILENCE_S = 600.0  # compiling every kernel takes a minute or two, and tells each of them

_Beside = frozenset[tuple[str, EngineState, bool, int]]
Resize = Callable[[EngineProcess, Mapping[str, Any], float], Coroutine[Any, Any, dict[str, Any]]]


class NoRoom(Exception):
    """A model does not fit beside those that are loaded: one of them has to go first."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be loaded: its canonical name and its prepared directory."""

    name: str
    directory: Path


@dataclass(slots=True, eq=False)
class Waiter:
    """Someone who wants an engine."""

    model: Model
    since_s: float
    needs_room: bool = False


class Supervisor:
    """The engines of this daemon.

    `prepare(model, engines)` gives the configuration of an engine as JSON; it may take a while, raise TierdError, or
    NoRoom when it has to wait for one of the others to end. `on_ready(engine)` is told of each engine that came up,
    `on_death(name)` of each that died unasked, `on_end(name, engines)` of each that ended.

    At most `max_loaded` engines run (0: as many as there is room for). Models in `pinned` are never unloaded unasked.

    Threading: for one event loop.
    """

    def __init__(
        self,
        prepare: Callable[[Model, Mapping[str, EngineProcess]], Coroutine[Any, Any, str]],
        *,
        keep_alive_s: float | None,
        max_loaded: int = 0,
        pinned: Collection[str] = (),
        command: tuple[str, ...] = WORKER,
        on_death: Callable[[str], None] = lambda name: None,
        on_ready: Callable[[EngineProcess], None] = lambda engine: None,
        on_end: Callable[[str, Mapping[str, EngineProcess]], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.changed = Broadcast()
        self.engines: dict[str, EngineProcess] = {}
        self.closing = False
        self.history = History()
        self._prepare = prepare
        self._keep_alive_s = keep_alive_s
        self._max_loaded = max_loaded
        self._pinned = frozenset(pinned)
        self._command = command
        self._on_death = on_death
        self._on_ready = on_ready
        self._on_end = on_end
        self._crowded: dict[str, tuple[_Beside, float]] = {}  # beside whom models did not fit, and until when it holds
        self._waiters: set[Waiter] = set()
        self._failures = Failures()
        self._launched: dict[str, Model] = {}  # every model that has had an engine
        self._tasks: set[asyncio.Task[None]] = set()

    # -- for those who want an engine ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def waiting(self, model: Model, since_s: float | None = None) -> Iterator[Waiter]:
        """A wish: it keeps the engine of its model from being unloaded, and gets room in order of `since_s`."""
        waiter = Waiter(model, time.monotonic() if since_s is None else since_s)
        self._waiters.add(waiter)
        try:
            yield waiter
        finally:
            self._waiters.discard(waiter)
            self.changed.notify()

    def poll(self, waiter: Waiter) -> EngineProcess | None:
        """The engine, if it is ready; else start what is missing and return None.

        The caller must use the engine before it awaits anything. Raises why the model does not come up, Draining.
        """
        if self.closing:
            raise Draining()
        now_s, name = time.monotonic(), waiter.model.name
        engine = self.engines.get(name)
        if engine is not None:
            if engine.retiring or engine.state is not EngineState.READY or self._must_yield(waiter, now_s):
                return None
            waiter.needs_room = False
            return engine
        self._failures.check(name, now_s)
        waiter.needs_room = True
        # For whoever came first, who may be held up by its client just now.
        first = self._first_in_line()
        if self._has_room(first.model.name):
            self._launch(first.model)
        elif not all(engine.model in self._pinned for engine in self.engines.values()):
            self._make_room(first)
        elif not self._has_room(name):
            raise OutOfSpace(
                f"{name} does not fit beside {', '.join(sorted(self.engines))}",
                hint="those are pinned: `tierd unload` one of them, or take it out of pinned_models",
            )
        return None

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for an engine."""
        return bool(self._waiters)

    def progress_of(self, name: str) -> dict[str, Any]:
        """What someone who waits for this model is told."""
        engine = self.engines.get(name)
        if engine is None:
            return {"stage": "room", "done": 0, "total": 0, "text": "waiting for another model to be unloaded"}
        if engine.retiring or engine.state is EngineState.STOPPING:
            return {"stage": "restart", "done": 0, "total": 0, "text": "waiting for the last engine to end"}
        return engine.progress or {"stage": "start", "done": 0, "total": 0, "text": "starting the engine"}

    def upkeep(self) -> dict[str, Any]:
        """How far an engine is that looks after its store; empty when none does."""
        return next((engine.upkeep for engine in self.engines.values() if engine.upkeep), {})

    async def acquire(self, model: Model, timeout_s: float) -> EngineProcess:
        """Wait until the engine of a model is ready. Raises TooBusy after the deadline."""
        deadline_s = time.monotonic() + timeout_s
        with self.waiting(model) as waiter:
            while (engine := self.poll(waiter)) is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise late(model.name, timeout_s)
                await self.changed.wait(left_s)
            return engine

    def unload(self, name: str) -> bool:
        """Begin to end an idle engine. False when there is none; raises TooBusy when it is in use."""
        if (engine := self.engines.get(name)) is None:
            return False
        if engine.busy:
            raise TooBusy(
                f"{name} is in use ({counted(engine.streams, 'stream')})",
                hint="try again when that has ended; Ctrl-C in a client ends its stream, `tierd stop` ends all",
            )
        self._stop(engine, FLUSH_S)
        return True

    def retire(self, name: str) -> None:
        """End an engine as soon as nothing uses it, pinned or not; whoever comes from now on waits for the next one."""
        if (engine := self.engines.get(name)) is not None:
            engine.retiring = True
            self.changed.notify()

    def is_pinned(self, name: str) -> bool:
        """Whether a model is never unloaded unasked."""
        return name in self._pinned

    def bring_back(self, names: Collection[str]) -> None:
        """Load models again that had engines, one after the other, when there is room. One that does not is logged."""
        if names and not self.closing:
            self._own(self._bring_back([self._launched[name] for name in names]), "bring back")

    async def _bring_back(self, models: Collection[Model]) -> None:
        for model in models:
            try:
                await self.acquire(model, BRING_BACK_S)
            except TierdError as exc:
                log.warning("%s is not loaded again: %s", model.name, exc)

    # -- their lives -----------------------------------------------------------------------------------------------

    async def keep_alive(self) -> None:
        """Unload engines that have been idle for long enough, kill those that hang; runs as long as the daemon."""
        while True:
            now_s = time.monotonic()
            left_s = [self._tend(engine, now_s) for engine in list(self.engines.values())]
            await self.changed.wait(min([IDLE_WAKE_S, *left_s]))

    def _tend(self, engine: EngineProcess, now_s: float) -> float:
        """End an engine whose time has come. Returns the seconds until it has to be looked at again."""
        if engine.state is EngineState.STARTING:
            left_s = engine.heard_s + START_SILENCE_S - now_s
            if left_s <= 0:
                log.error("the engine of %s has said nothing for %.0f s", engine.model, START_SILENCE_S)
                engine.kill()
            return left_s if left_s > 0 else IDLE_WAKE_S
        keep_alive_s = self._keep_alive_of(engine)
        if engine.retiring and engine.state is EngineState.READY and not engine.busy:
            self._stop(engine, FLUSH_S)
        if keep_alive_s is None or not self._is_idle(engine):
            return IDLE_WAKE_S  # the end of its use is a change
        left_s = engine.last_use_s + keep_alive_s - now_s
        if left_s <= 0:
            log.info("unloading %s: idle for %.0f s", engine.model, keep_alive_s)
            self._stop(engine, FLUSH_S)
        return left_s if left_s > 0 else IDLE_WAKE_S

    def expires_in_s(self, engine: EngineProcess) -> float | None:
        """Seconds until an engine is unloaded if nobody uses it; None for never."""
        keep_alive_s = self._keep_alive_of(engine)
        return None if keep_alive_s is None else max(0.0, keep_alive_s - self.idle_s(engine))

    def keep_loaded(self, name: str, seconds: float | None) -> None:
        """How long an engine stays when nobody uses it, until it ends or is told otherwise; None: for ever."""
        if (engine := self.engines.get(name)) is not None:
            engine.keep_alive = (seconds,)
            self.changed.notify()

    def _keep_alive_of(self, engine: EngineProcess) -> float | None:
        if engine.model in self._pinned:
            return None
        return self._keep_alive_s if engine.keep_alive is None else engine.keep_alive[0]

    @staticmethod
    def idle_s(engine: EngineProcess) -> float:
        """Seconds since an engine was last used."""
        return 0.0 if engine.busy else max(0.0, time.monotonic() - engine.last_use_s)

    async def close(self, flush_s: float, timeout_s: float) -> None:
        """End every engine after a flush, by force after the deadline."""
        self.closing = True
        self.changed.notify()
        for engine in list(self.engines.values()):
            self._stop(engine, flush_s)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for engine in self.engines.values():
            engine.kill()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _launch(self, model: Model) -> None:
        for waiter in self._waiters:
            if waiter.model.name == model.name:
                waiter.needs_room = False
        engine = EngineProcess(
            model.name, self.changed, self._command, self._came_up, lambda text: self.history.tell("notice", text)
        )
        self.engines[model.name], self._launched[model.name] = engine, model
        self._own(self._life(engine, model), f"engine of {model.name}")
        self.changed.notify()

    def _came_up(self, engine: EngineProcess) -> None:
        took_s = time.monotonic() - engine.started_s
        self.history.tell("load", f"{engine.model} is loaded after {took_s:.1f} s, pid {engine.pid}")
        self._on_ready(engine)

    async def _life(self, engine: EngineProcess, model: Model) -> None:
        crowded = False
        try:
            await engine.live(await self._prepare(model, self.engines))
        except NoRoom:
            crowded = True
        except TierdError as exc:
            engine.error = exc
        except Exception:
            log.exception("the engine of %s could not be prepared", model.name)
            engine.error = EngineFailed(f"the engine of {model.name} could not be started", hint=LOGS_HINT)
        finally:
            engine.state = EngineState.ENDED
            del self.engines[model.name]
            if crowded:
                log.info("%s does not fit beside the models that are loaded", model.name)
                self._crowded[model.name] = self._beside(model.name), time.monotonic() + CROWDED_S
                asyncio.get_running_loop().call_later(CROWDED_S, self.changed.notify)
            elif not engine.stop_asked and not self.closing:
                self._bury(engine)
            else:
                self.history.tell("unload", f"{model.name} was unloaded")
                if engine.was_ready:
                    self._failures.forgive(model.name)
            if self._on_end is not None and not self.closing and not crowded:
                self._own(self._on_end(model.name, self.engines), f"memory of {model.name}")
            self.changed.notify()

    def _bury(self, engine: EngineProcess) -> None:
        """An engine ended unasked: say so."""
        name, last_words = engine.model, engine.last_words()
        log.error("the engine of %s died: %s", name, last_words)
        self.history.tell("crash", f"the engine of {name} died: {last_words}")
        self._on_death(name)
        self._failures.died(
            name, time.monotonic(), last_words, said=engine.error, was_ready=engine.was_ready,
            was_of_use=engine.completed > 0,
        )  # fmt: skip

    # -- room ------------------------------------------------------------------------------------------------------

    def _has_room(self, name: str) -> bool:
        """Whether a model may be tried: the bound on engines allows it, and it was not found too large just now."""
        if self._max_loaded and len(self.engines) >= self._max_loaded:
            return False
        if name in self._crowded and any(one.state is EngineState.STARTING for one in self.engines.values()):
            return False  # newcomers that are all too large would else be tried again for each other's sake, for ever
        beside, until_s = self._crowded.get(name, (None, 0.0))
        return not self.engines or beside != self._beside(name) or time.monotonic() >= until_s

    def _beside(self, name: str) -> _Beside:
        """All that decides whether there is room and is known here: running answers need memory, a resize gives it."""
        others = (engine for engine in self.engines.values() if engine.model != name)
        return frozenset((engine.model, engine.state, engine.busy > 0, engine.resizes) for engine in others)

    def _make_room(self, waiter: Waiter) -> None:
        """End the idle engine that was used the longest ago. Not while another one ends, which makes room itself, or
        starts, beside which nobody is let in."""
        engines = self.engines.values()
        if any(engine.state is not EngineState.READY for engine in engines):
            return
        idle = [e for e in engines if e.model not in self._pinned and self._is_idle(e, before_s=waiter.since_s)]
        if idle:
            victim = min(idle, key=lambda engine: engine.last_use_s)
            log.info("unloading %s to make room for %s", victim.model, waiter.model.name)
            self._stop(victim, FLUSH_S)

    def _is_idle(self, engine: EngineProcess, before_s: float = float("inf")) -> bool:
        """Ready, not in use, and not wanted by somebody who came before."""
        if engine.state is not EngineState.READY or engine.busy:
            return False
        return not any(w.model.name == engine.model and w.since_s <= before_s for w in self._waiters)

    def _first_in_line(self) -> Waiter:
        """The oldest of those who need room; there is one when this is asked."""
        return min((w for w in self._waiters if w.needs_room), key=lambda w: w.since_s)

    def _must_yield(self, waiter: Waiter, now_s: float) -> bool:
        """Whether a request of a loaded model waits, because an older one has waited too long for room for another."""
        limit_s = min(waiter.since_s, now_s - PATIENCE_S)
        return any(w.needs_room and w.model.name != waiter.model.name and w.since_s < limit_s for w in self._waiters)

    def _stop(self, engine: EngineProcess, flush_s: float) -> None:
        if engine.stop_asked:
            return
        engine.stop_asked = True
        if engine.state is EngineState.STARTING:
            engine.kill()  # nothing to flush
            return
        engine.state = EngineState.STOPPING
        self._own(engine.stop(flush_s), f"stop {engine.model}")

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("task %r failed", task.get_name(), exc_info=exc)
            self.changed.notify()


def late(name: str, timeout_s: float) -> TooBusy:
    """The error of a request that has waited for its model for too long."""
    what = f"{name} could not be loaded within {timeout_s:.0f} s"
    return TooBusy(what, hint="it is loading, or other models are in use; try again later")
