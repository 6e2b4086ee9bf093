"""The machine given to one batch: everybody else gets a clear answer until it is given back.

A batch that streams weights shares each reading of them among its sequences, so it gains from every other load being
away: `reserve` lets what runs end, unloads every model, and starts the one of the batch with as many sequences at once
as the planner says. Whoever asks meanwhile is told so, and how long it will take. It belongs to a connection: when that
ends, for whatever reason, the machine is given back: the models that were loaded come back, pinned ones first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tierd.daemon.errors import BadRequest, Conflict, OutOfSpace, Reserved, TooBusy
from tierd.daemon.plan.block import Block, Extent
from tierd.daemon.supervisor import Model, Supervisor, late
from tierd.daemon.units import counted, human_seconds

log = logging.getLogger("tierd.exclusive")

DRAIN_S = 1800.0  # for the answers that run when it is asked for
LOAD_S = 600.0
_LOOK_S = 1.0

Plan = Callable[[Model, Extent, int | None], Block | None]
Give = Callable[[str, Block | None], None]  # the model's next engine gets this block; None: as usual


@dataclass(slots=True)
class _Held:
    """Who has the machine, and how far the batch is."""

    holder: object
    model: Model
    since_s: float
    total: int
    stage: str = "waiting"
    done: int = 0
    left_s: float | None = None
    block: Block | None = None
    unloaded: set[str] = field(default_factory=set)  # models that had to go for it, and come back

    def told(self) -> dict[str, Any]:
        """What `ps` and `status` say of it."""
        block = self.block
        return {
            "model": self.model.name,
            "stage": self.stage,
            "for_s": round(time.monotonic() - self.since_s, 3),
            "done": self.done,
            "total": self.total,
            "left_s": self.left_s,
            "streams": block.streams if block is not None else None,
            "rows": block.rows if block is not None else None,
            "planned_tokens_per_s": round(block.tokens_per_s, 2) if block is not None else None,
            "why": list(block.why) if block is not None else [],
            "unloaded": sorted(self.unloaded),
        }


class Exclusive:
    """At most one batch has the machine. Threading: for one event loop; `plan` is called in a thread."""

    def __init__(self, supervisor: Supervisor, plan: Plan, give: Give) -> None:
        self._supervisor = supervisor
        self._plan = plan
        self._give = give
        self._held: _Held | None = None

    def check(self, holder: object, using: str = "") -> None:
        """Raises Reserved for everybody but who has the machine; nothing happens when nobody has.

        `using`: the model whose engine is only asked for something small: that of the batch has time for it.
        """
        held = self._held
        # Before there is a block it would be the usual engine that comes up.
        if held is not None and held.block is not None and using == held.model.name:
            return
        if held is not None and held.holder is not holder:
            left = f", about {human_seconds(held.left_s)} left" if held.left_s is not None else ""
            raise Reserved(
                f"a batch has the machine for itself: {held.done} of {counted(held.total, 'request')} done{left}",
                hint="ask again later; `tierd ps` shows how far it is, ending its `tierd batch` gives the machine back",
            )

    def told(self) -> dict[str, Any] | None:
        """What `ps` and `status` say of it; None when nobody has the machine."""
        return self._held.told() if self._held is not None else None

    @property
    def stage(self) -> str:
        """What a reservation waits for, in words."""
        return self._held.stage if self._held is not None else "waiting"

    async def reserve(
        self, holder: object, model: Model, extent: Extent, streams: int | None, live: Callable[[], int]
    ) -> dict[str, Any]:
        """Give the machine to `holder`, and bring up the engine of its batch. Returns `told()`.

        `live`: requests that run or wait. Raises Conflict when another batch has it, or `holder` gives it back
        meanwhile, TooBusy when what runs does not end in time, OutOfSpace when not one sequence fits, and why the
        engine does not come up. Nothing is held then.
        """
        if extent.requests < 1:
            raise BadRequest("a batch has requests", param="requests")
        if self._held is not None:
            raise Conflict("another batch has the machine for itself", hint="`tierd ps` shows how far it is")
        held = self._held = _Held(holder, model, time.monotonic(), extent.requests)
        try:
            await self._drain(held, live)
            held.stage = "planning"
            held.block = block = await asyncio.to_thread(self._plan, model, extent, streams)
            self._check_held(held)
            if block is None:
                raise OutOfSpace(
                    f"not one sequence of about {extent.prompt_tokens + extent.answer_tokens} tokens fits beside what "
                    f"{model.name} needs",
                    hint=f"`tierd plan {model.name}` shows what does; give it more with --device-mem or --weights-mem",
                )
            self._give(model.name, block)
            await self._load(held)
            held.stage = "running"
            for line in block.why:
                log.info("batch alone with %s: %s", model.name, line)
            self._supervisor.history.tell("batch", f"a batch has the machine for itself: {block.why[0]}")
            return held.told()
        except BaseException:
            if self._held is held:
                self.release(holder)
            raise

    def progress(self, holder: object, done: int, left_s: float | None) -> None:
        """How far the batch of `holder` is. Raises Conflict when it does not have the machine."""
        if self._held is None or self._held.holder is not holder:
            raise Conflict("this connection has not got the machine for itself")
        self._held.done, self._held.left_s = done, left_s

    def release(self, holder: object) -> None:
        """Give the machine back, if `holder` has it: its engine ends when nothing runs on it any more.

        Models that were unloaded for it are loaded again then, pinned ones first.
        """
        held = self._held
        if held is None or held.holder is not holder:
            return
        self._held = None
        self._give(held.model.name, None)
        name = held.model.name
        if held.block is not None and name in self._supervisor.engines:
            self._supervisor.retire(name)
        if held.stage == "running":
            self._supervisor.history.tell("batch", "the machine is given back")
        pinned_first = sorted(held.unloaded, key=lambda name: (not self._supervisor.is_pinned(name), name))
        self._supervisor.bring_back(pinned_first)
        self._supervisor.changed.notify()

    async def _drain(self, held: _Held, live: Callable[[], int]) -> None:
        """Wait for what runs, then unload every model."""
        deadline_s = time.monotonic() + DRAIN_S
        while what := (asked := self._asked(live)) or self._left():
            if time.monotonic() >= deadline_s:
                raise TooBusy(
                    f"{what} did not end within {human_seconds(DRAIN_S)}",
                    hint="run the batch without --exclusive, or try again later",
                )
            held.stage = f"waiting for {what}"
            if not asked:
                for name, engine in self._supervisor.engines.items():
                    if not engine.busy and self._supervisor.unload(name):
                        held.unloaded.add(name)
            await self._wait(held, _LOOK_S)

    def _asked(self, live: Callable[[], int]) -> str:
        """What was asked for and has to end before engines do, in words; empty when nothing is left."""
        if count := live():
            return counted(count, "request")
        return "the loading of a model" if self._supervisor.is_wanted else ""

    def _left(self) -> str:
        """The engines that have to end, in words; empty when there are none."""
        engines = self._supervisor.engines
        if busy := sorted(name for name, engine in engines.items() if engine.busy):
            return f"what runs on {' and '.join(busy)}"
        return f"the engine of {' and '.join(sorted(engines))}" if engines else ""

    async def _load(self, held: _Held) -> None:
        """Wait until the engine is ready."""
        held.stage = f"loading {held.model.name}"
        deadline_s = time.monotonic() + LOAD_S
        with self._supervisor.waiting(held.model) as waiter:
            while self._supervisor.poll(waiter) is None:
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    raise late(held.model.name, LOAD_S)
                await self._wait(held, left_s)

    async def _wait(self, held: _Held, timeout_s: float) -> None:
        await self._supervisor.changed.wait(timeout_s)
        self._check_held(held)

    def _check_held(self, held: _Held) -> None:
        """Raises Conflict when the machine was given back, or given to the next batch, while this one waited."""
        if self._held is not held:
            raise Conflict("the machine was given back before the batch had it")
