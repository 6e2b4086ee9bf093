"""Watches whether other programs want the card's memory, and has engines shrink and grow their device arenas for them.

The front does it: it knows all engines, their processes and what each was given. `yielding` decides, `card` reads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from tierd.daemon.card import CardError, CardThread, Reading
from tierd.daemon.child import EngineProcess, EngineState
from tierd.daemon.errors import TierdError, TryLater
from tierd.daemon.plan.auto import LEAST_ARENA_BYTES
from tierd.daemon.prepare import Preparer
from tierd.daemon.supervisor import Supervisor
from tierd.daemon.units import human_bytes
from tierd.daemon.yielding import Card, DeviceArena, Rule, decide

log = logging.getLogger("tierd.card")

POLL_S = 2.0
ANSWER_S = 2.0  # for an engine to tell what it has
UNLISTED = 5  # looks in a row at which the driver lists none of our processes
RETRY_S = 30.0  # until an engine that refused a size is asked again
NAMED = 3  # programs that are told by name


class CardWatch:
    """Threading: for one event loop.

    Args:
        reserve_bytes: of the card, that are to stay free for other programs.
        clock: seconds.
    """

    def __init__(
        self, card: CardThread, reserve_bytes: int, supervisor: Supervisor, prepare: Preparer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.off = ""  # why nobody looks any more
        self._card = card
        self._rule = Rule.of(reserve_bytes)
        self._supervisor = supervisor
        self._prepare = prepare
        self._clock = clock
        self._reading: Reading | None = None
        self._computes = False  # whether an engine does, on a card
        self._arenas: dict[str, DeviceArena] = {}
        self._calm_since_s: float | None = None
        self._unlisted = 0
        self._refused_s: dict[EngineProcess, float] = {}  # who could not do it, and when
        self._told_off: set[EngineProcess] = set()  # those that compute elsewhere, and whose users know
        self._yields = self._returns = 0

    def told(self) -> dict[str, Any]:
        """As `status` tells it. `state`: watching; idle (no engine computes on a card); unknown (engines do, but at the
        last look none of them answered, or the driver listed none); or off, with `reason`."""
        known = "watching" if self._reading is not None else "unknown" if self._computes else "idle"
        state = "off" if self.off else known
        told: dict[str, Any] = {
            "state": state, "reason": self.off, "reserve_bytes": self._rule.reserve_bytes,
            "configured_bytes": sum(arena.configured_bytes for arena in self._arenas.values()),
            "device_bytes": sum(arena.current_bytes for arena in self._arenas.values()),
            "yielded_bytes": self._yielded_bytes, "yields": self._yields, "returns": self._returns,
        }  # fmt: skip
        if (reading := self._reading) is not None:
            told |= {"free_bytes": reading.free_bytes, "others_bytes": reading.others_bytes}
            told["others"] = [other._asdict() for other in reading.others[:NAMED]]
        return told

    @property
    def _yielded_bytes(self) -> int:
        return sum(max(arena.configured_bytes - arena.current_bytes, 0) for arena in self._arenas.values())

    async def run(self) -> None:
        """Look until it has to be turned off. Never raises but when cancelled."""
        try:
            while True:
                await self.look()
                if self.off:
                    break
                await asyncio.sleep(POLL_S)
        except Exception:
            log.exception("the watch of the card died")
            self._turn_off("of a fault of its own; `tierd logs` shows the details")
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the card, without waiting for a driver that stands still. Idempotent."""
        self._card.close()

    async def look(self) -> None:
        """One look, and what follows from it."""
        engines = {engine.model: engine for engine in self._supervisor.engines.values() if self._is_on_card(engine)}
        seen = {name: engine.resizes for name, engine in engines.items()}
        self._arenas = arenas = await self._ask(engines)
        self._computes = bool(engines)
        if not arenas:
            self._reading, self._calm_since_s, self._unlisted = None, None, 0
            return
        # Those that start, end or do not answer hold memory too, and it is no other program's.
        pids = [engine.pid for engine in self._supervisor.engines.values() if engine.pid is not None]
        try:
            self._reading = reading = await self._card.read(pids)
        except CardError as exc:
            return self._turn_off(str(exc))
        if reading is None:
            return self._not_listed()
        self._unlisted = 0
        now_s = self._clock()
        card = Card(reading.free_bytes, reading.others_bytes)
        sizes, self._calm_since_s = decide(self._rule, card, arenas, self._calm_since_s, now_s)
        for name, size in sizes.items():
            engine = engines[name]
            # One that somebody resized meanwhile is not what this was decided for.
            if engine.state is EngineState.READY and engine.resizes == seen[name]:
                await self._change(engine, arenas[name], size, reading)

    def _is_on_card(self, engine: EngineProcess) -> bool:
        if engine.state is not EngineState.READY:
            return False
        if engine.info.get("on_card"):
            return True
        if engine not in self._told_off:
            self._told_off = {one for one in self._told_off if one.state is not EngineState.ENDED} | {engine}
            engine.notice(f"yield_device_mem does nothing for {engine.model}: it computes on the processors")
        return False

    async def _ask(self, engines: Mapping[str, EngineProcess]) -> dict[str, DeviceArena]:
        """What the engines have on the card. Those that do not answer, or have just refused, stay as they are."""
        now_s = self._clock()
        self._refused_s = {one: at_s for one, at_s in self._refused_s.items() if now_s - at_s < RETRY_S}
        found: dict[str, DeviceArena] = {}
        for name, engine in engines.items():
            try:
                engine.status = await engine.call("status", {}, ANSWER_S)
            except TierdError:
                continue
            device = engine.status.get("tiers", {}).get("device", {})
            configured, current = self._prepare.device_bytes(name), device.get("total_bytes")
            if configured is None or not isinstance(current, int):
                continue
            needed = current if engine in self._refused_s else max(device.get("needed_bytes", 0), LEAST_ARENA_BYTES)
            found[name] = DeviceArena(configured, current, needed)
        return found

    async def _change(self, engine: EngineProcess, arena: DeviceArena, size: int, reading: Reading) -> None:
        try:
            await self._prepare.yield_device(engine, size)
        except TryLater as exc:
            log.debug("%s is left as it is at this look: %s", engine.model, exc)
            return
        except TierdError as exc:
            self._refused_s[engine] = self._clock()
            log.info("%s keeps %d bytes of the card: %s", engine.model, arena.current_bytes, exc)
            return
        self._arenas[engine.model] = arena._replace(current_bytes=size)
        self._yields += size < arena.current_bytes
        self._returns += size > arena.current_bytes
        has = f"{engine.model} has {human_bytes(size)} of pages on the card"
        if size < arena.configured_bytes:
            has += f" instead of {human_bytes(arena.configured_bytes)}"
        why = f"other programs hold {human_bytes(reading.others_bytes)}{_names(reading)}"
        text = f"{has}: {why}, {human_bytes(reading.free_bytes)} were free"
        log.warning("%s", text)
        self._supervisor.history.tell("resize", text)

    def _not_listed(self) -> None:
        self._unlisted += 1
        if self._unlisted >= UNLISTED:
            self._turn_off("the driver lists none of our processes (in a container: it needs the host's process ids)")

    def _turn_off(self, why: str) -> None:
        self.off, self._reading = why, None
        given = self._yielded_bytes
        kept = f"; {human_bytes(given)} stay given until `tierd resize` takes them back" if given else ""
        text = f"yield_device_mem is off, nobody watches the card any more: {why}{kept}"
        log.error("%s", text)
        self._supervisor.history.tell("notice", text)


def _names(reading: Reading) -> str:
    """Programs that hold the most of the card, in brackets."""
    named = [
        f"{other.name}, pid {other.pid}" + (f": {human_bytes(other.used_bytes)}" if other.used_bytes else "")
        for other in reading.others[:NAMED]
    ]
    return f" ({'; '.join(named)})" if named else ""
