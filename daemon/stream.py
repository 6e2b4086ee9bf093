"""A generation from its submission to its terminal event, over as many engines as it takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import NamedTuple

from tierd.daemon.child import EngineProcess
from tierd.daemon.errors import LOGS_HINT, EngineFailed, TierdError, TimedOut
from tierd.daemon.inbox import EngineLost, Inbox
from tierd.daemon.protocol import TERMINAL, Event
from tierd.daemon.resume import Live
from tierd.daemon.supervisor import Model, Supervisor, late

LOAD_TIMEOUT_S = 600.0  # for a model to come up, and for other models to make room
SILENCE_S = 30.0  # an engine that says nothing for so long is asked whether it lives
PROBE_S = 10.0
CANCEL_TIMEOUT_S = 10.0  # an engine that does not end a cancelled stream in time is not waited for
MAX_BARREN_DEATHS = 3  # engines that died under a request without a token in between: the request may be the cause


class _Running(NamedTuple):
    """A stream on one engine."""

    engine: EngineProcess
    id: int
    inbox: Inbox


class Stream:
    """The generation that `live` describes. Iterate `events` once; `cancel` ends it from another task.

    Threading: for one event loop.
    """

    width = 1  # engine streams

    def __init__(self, supervisor: Supervisor, model: Model, live: Live) -> None:
        self.live = live
        self.model = model
        self.cancelled = False
        self._supervisor = supervisor
        self._running: _Running | None = None

    def cancel(self) -> None:
        """Ask for the end; the terminal event comes through `events`."""
        self.cancelled = True
        if self._running is not None:
            self._running.engine.cancel(self._running.id)
        else:
            self._supervisor.changed.notify()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Events up to the terminal one. Raises TierdError when the daemon itself has to end it, SlowReader.

        Closing the iterator early cancels the generation in the engine at once.
        """
        while True:
            async with contextlib.aclosing(self._until_submitted()) as steps:
                async for step in steps:
                    yield step
                    if step.ev in TERMINAL:
                        return
            if (running := self._running) is None:
                continue  # the engine ended between being ready and being asked
            try:
                async with contextlib.aclosing(self._relay(running)) as steps:
                    async for step in steps:
                        yield step
                return
            except EngineLost:
                self.live.lost()
                if self.live.submit.beam_width and self.live.tokens:
                    # They are told at the end and at once; a second search would tell them again.
                    raise EngineFailed("the engine died while it told the beams", hint=LOGS_HINT) from None
                if self.live.barren_deaths >= MAX_BARREN_DEATHS:
                    raise EngineFailed(
                        f"the engine died {MAX_BARREN_DEATHS} times while it worked on this request: "
                        f"{running.engine.last_words()}",
                        hint=LOGS_HINT,
                    ) from None

    async def _until_submitted(self) -> AsyncGenerator[Event, None]:
        """Progress until an engine has the request; `aborted` when it is cancelled before."""
        supervisor = self._supervisor
        deadline_s = time.monotonic() + LOAD_TIMEOUT_S
        shown = None
        # A stream that lost its engine has the rank of its arrival, not of the loss.
        with supervisor.waiting(self.model, self.live.started_s) as waiter:
            while True:
                if self.cancelled:
                    yield self._aborted()
                    return
                if (engine := supervisor.poll(waiter)) is not None:
                    break
                progress = supervisor.progress_of(self.model.name)
                if progress != shown:
                    shown = progress
                    yield Event(self.live.id, "progress", progress)
                    continue  # the consumer may have taken its time: look again before waiting
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise late(self.model.name, LOAD_TIMEOUT_S)
                await supervisor.changed.wait(left_s)
            with contextlib.suppress(EngineFailed):
                stream_id, inbox = await engine.generate(self.live.send(time.monotonic()))
                self._running = _Running(engine, stream_id, inbox)
                if self.cancelled:  # while the frame was written
                    engine.cancel(stream_id)

    async def _relay(self, running: _Running) -> AsyncGenerator[Event, None]:
        """Events of one engine up to the terminal one; raises EngineLost when the engine ends before."""
        ended = False
        try:
            while not ended:
                try:
                    event = await running.inbox.get(CANCEL_TIMEOUT_S if self.cancelled else SILENCE_S)
                except TimeoutError:
                    if self.cancelled:
                        yield self._aborted()
                        return
                    await _probe(running.engine)
                    continue
                ended = event.ev in TERMINAL
                if (shown := self.live.take(event, time.monotonic())) is not None:
                    yield shown
        finally:
            self._running = None
            running.engine.forget(running.id)
            if not ended:
                running.engine.cancel(running.id)

    def _aborted(self) -> Event:
        return Event(self.live.id, "aborted", {"usage": self.live.usage()})


async def _probe(engine: EngineProcess) -> None:
    """Ask a silent engine for its status; kill it when it does not answer, so that its streams resume on another."""
    try:
        await engine.call("status", {}, PROBE_S)
    except TimedOut:
        engine.kill()
    except TierdError:
        return  # it answers, or its end is already known
