"""Whether the step loops of the engines go on, and telling systemd that the front does.

An engine answers `status` from another thread than the one that computes, so an answer proves nothing; that its
snapshot is newer than the last one does. None is made within a step, which may take a minute, so the answer says how
many rows are computed and how long so many may take. An engine whose step thread has published nothing for too long
while it has work is killed: the front starts another, and the streams go on. systemd is told after each such round,
never by a timer of its own: a front that can't finish a round does not live, and is restarted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tierd.daemon.child import EngineProcess, EngineState
from tierd.daemon.errors import TierdError
from tierd.daemon.notify import notify, watchdog_s
from tierd.daemon.supervisor import Supervisor
from tierd.daemon.units import counted

log = logging.getLogger("tierd.heart")

BEAT_S = 5.0
ANSWER_S = 2.0  # for an engine to tell its status
# Longer between two looks at an engine, and the front itself did not run: the daemon was stopped, or the machine was,
# and the engine with it.
PAUSE_S = 2 * (BEAT_S + ANSWER_S)
HANG_S = 30.0  # a step loop that has shown it is faster and says nothing for so long hangs
# While the loop says that it has no request: what the front waits for may still be text on its way to tokens.
UNKNOWN_HANG_S = 300.0
# Of each row, on top of that, before a first step has shown how long they take. A model of a hundred billion weights on
# a few processors, streamed from a disk, is faster.
UNKNOWN_ROW_S = 2.0
# Nor is a loop given up in less than so many times what a step of this many rows takes, by the steps before it.
STEPS_OF_PATIENCE = 10.0


class Pulse:
    """What is known of one engine's step loop. Times are of a monotonic clock."""

    def __init__(self, now_s: float) -> None:
        self._seen: object = None
        self._changed_s = self._felt_s = now_s
        self._has_work = False
        self._rows = 0.0  # of the step that is computed
        self._expected_s = 0.0  # it takes at most; 0: no step is known
        self._steps = 0

    def feel(self, status: Mapping[str, Any], busy: int, now_s: float) -> None:
        """Take in a snapshot; `busy`: streams and calls that the front waits for. Without any there may be none.

        After a pause in which nobody felt it begins a whole new period.
        """
        paused = now_s - self._felt_s > PAUSE_S
        self._felt_s = now_s
        step = status.get("step") or {}
        self._rows, self._expected_s = float(step.get("rows", 0.0)), float(step.get("expected_s", 0.0))
        self._steps = int(status.get("steps", 0))
        self._has_work = bool(status.get("running") or status.get("waiting") or step)
        seen = (status.get("uptime_s"), status.get("steps"))
        if seen != self._seen or not busy or paused:
            self._seen, self._changed_s = seen, now_s

    def hangs(self, now_s: float) -> bool:
        """Whether it has stood still for longer than its steps take."""
        return now_s - self._changed_s > self._patience_s()

    def _patience_s(self) -> float:
        unknown = not self._steps or (self._rows and not self._expected_s)
        if unknown or not self._has_work:
            return UNKNOWN_HANG_S + UNKNOWN_ROW_S * self._rows
        return max(HANG_S, STEPS_OF_PATIENCE * self._expected_s)


class Heart:
    """Threading: for one event loop."""

    def __init__(self, supervisor: Supervisor, tell: Callable[[str], object] = notify) -> None:
        self._supervisor = supervisor
        self._tell = tell
        self._pulses: dict[EngineProcess, Pulse] = {}

    async def run(self) -> None:
        """Beat as long as the daemon lives, at least twice in the time that systemd gives."""
        watched_s = watchdog_s()
        pause_s = min(BEAT_S, watched_s / 3) if watched_s else BEAT_S
        while True:
            await self.beat()
            await asyncio.sleep(pause_s)

    async def beat(self) -> None:
        """One round: look at every engine, end those that hang, tell systemd."""
        engines = [engine for engine in self._supervisor.engines.values() if engine.state is EngineState.READY]
        self._pulses = {engine: self._pulses.get(engine) or Pulse(time.monotonic()) for engine in engines}
        await asyncio.gather(*(self._look(engine) for engine in engines))
        self._tell(f"WATCHDOG=1\nSTATUS={_summary(engines)}")

    async def _look(self, engine: EngineProcess) -> None:
        pulse = self._pulses[engine]
        busy = engine.busy
        try:
            status = engine.status = await engine.call("status", {}, ANSWER_S)
        except TierdError:
            status = {**engine.status}  # no news
        now_s = time.monotonic()
        pulse.feel(status, min(busy, engine.busy), now_s)
        if pulse.hangs(now_s) and engine.state is EngineState.READY:
            log.error("the engine of %s stands still; it is killed, its streams go on with another", engine.model)
            engine.kill()


def _summary(engines: Iterable[EngineProcess]) -> str:
    parts = [f"{engine.model}: {counted(engine.streams, 'stream')}" for engine in engines]
    return ", ".join(parts) if parts else "ready, no model is loaded"
