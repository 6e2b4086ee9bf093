"""Where snapshots come from: a daemon, or a recording. The only module of the screen that talks to the daemon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tierd.clients.aio import AsyncClient
from tierd.daemon.errors import DaemonUnreachable, ModelNotFound, ProtocolError, TierdError, Unsupported
from tierd.daemon.protocol import Event, Submit
from tierd.tui.record import Recorder, Recording, frame_of
from tierd.tui.snapshot import HISTORY, Assembler, Phase, Snapshot, Standing
from tierd.tui.wire import (
    DaemonReport,
    EngineReport,
    EventLog,
    EventRow,
    PageDetail,
    PageMap,
    PrefixList,
    PrefixTable,
    TopAnswer,
    convert,
    rows_of,
)

ANSWER_S = 10.0  # a step of a long prompt may keep the engine busy for as long
LISTED = 500  # prefixes that are asked for where there is no `top`
LIST_EVERY_S = 5.0  # the engine walks over all pages for that list
RETRY_S = (0.25, 0.5, 1.0, 2.0)  # waits between attempts to reach a daemon that is gone; the last one stays

Show = Callable[[Snapshot], object]


class Feed(Protocol):
    """A source of snapshots, and the way back for actions."""

    async def run(self, show: Show) -> None:
        """Hand over snapshots until cancelled."""

    async def call(self, op: str, **args: Any) -> dict[str, Any]:
        """An operation of the daemon. Raises TierdError."""

    def generate(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """The events of one generation. Raises TierdError."""

    async def aclose(self) -> None:
        """Let go of sockets and files."""


class LiveFeed:
    """Asks a daemon for a frame every `interval_s`; one request at a time, so a slow daemon is asked less often.

    A daemon that goes away is a state, not an error: the last data stay, and it is tried again. Threading: one event
    loop; `run` is one task.

    Args:
        path: the unix socket.
        interval_s: time between frames.
        model: the engine to look at; empty: the one used last.
        clock: seconds that never go back.
        wall: Unix time, for events.
        recorder: where frames are kept as well.
        command: a bridge to the socket of another machine, see `AsyncClient`.
    """

    def __init__(
        self,
        path: Path,
        *,
        interval_s: float,
        clock: Callable[[], float],
        wall: Callable[[], float],
        model: str = "",
        recorder: Recorder | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self.path = path
        self.interval_s = interval_s
        self._clock = clock
        self._wall = wall
        self._recorder = recorder
        self._assembler = Assembler(model=model)
        self._client = AsyncClient(path, command)
        self._listed_s = float("-inf")
        self._listed: PrefixTable | None = None  # from `prefix ls`, of a daemon that has no `top`

    def choose(self, model: str) -> None:
        """Look at this engine from the next frame on; empty: the one used last."""
        self._assembler.model = model

    async def run(self, show: Show) -> None:
        """Hand over snapshots until cancelled; reconnects for ever. Raises ModelNotFound for a name that is none."""
        failures = 0
        self._assembler.stand(Standing(Phase.CONNECTING, self._clock()))
        while True:
            try:
                await self.connect()
                while True:
                    began_s = self._clock()
                    show(await self.frame())
                    failures = 0
                    await asyncio.sleep(max(self.interval_s - (self._clock() - began_s), 0.01))
            except ModelNotFound:
                raise  # a mistyped name does not come to be right by waiting
            except TierdError as exc:
                await self._client.aclose()
                show(self._lost(exc))
            await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
            failures += 1

    def _lost(self, exc: TierdError) -> Snapshot:
        """The last data, of a daemon that is gone. The reason may change from try to try, the beginning does not."""
        standing = self._assembler.snapshot.standing
        if standing.phase is not Phase.DISCONNECTED:
            standing = Standing(Phase.DISCONNECTED, self._clock())
            self._assembler.note("top", f"disconnected: {exc.message}", self._wall())
        return self._assembler.stand(replace(standing, reason=exc.message, hint=exc.hint or ""))

    async def connect(self) -> None:
        """Open the connection. Raises DaemonUnreachable or PermissionDenied."""
        await self._client.connect()

    async def frame(self) -> Snapshot:
        """Ask for one frame on the open connection. Raises TierdError."""
        if self._assembler.snapshot.standing.phase is not Phase.LIVE:
            hello = await self._client.call("hello", wait_s=ANSWER_S)
            ops = frozenset(str(op) for op in hello.get("ops", ()))
            if "status" not in ops:
                raise ProtocolError("this daemon has no operation 'status'", hint="update it")
            self._assembler.snapshot = replace(self._assembler.snapshot, ops=ops)
            if self._assembler.model and "show" in ops:
                shown = await self._client.call("show", model=self._assembler.model, wait_s=ANSWER_S)
                self._assembler.model = str(shown["name"])
        daemon = convert(await self._client.call("status", wait_s=ANSWER_S), DaemonReport)
        try:
            log = await self._log(daemon)
            top = await self._top(daemon, fresh=self._assembler.snapshot.standing.phase is not Phase.LIVE)
            snapshot = self._assembler.take(self._clock(), self._wall(), daemon, top, log)
        except ProtocolError:
            # What we hold and what the engine thinks we hold differ: once more, from the beginning.
            top = await self._top(daemon, fresh=True)
            snapshot = self._assembler.take(self._clock(), self._wall(), daemon, top, log)
        if snapshot.standing.phase is not Phase.LIVE:
            if snapshot.standing.phase is Phase.DISCONNECTED:
                self._assembler.note("top", "connected again", self._wall())
            snapshot = self._assembler.stand(Standing(Phase.LIVE, self._clock()))
        if self._recorder is not None:
            self._recorder.write(frame_of(snapshot, top, self._wall(), log))
        return snapshot

    async def _log(self, daemon: DaemonReport) -> tuple[EventRow, ...] | None:
        """What happened to the daemon since the last frame; None when it does not tell."""
        held = self._assembler.snapshot
        if "events" not in held.ops:
            return None
        after = max(self._assembler.daemon_events, 0) if daemon.pid == held.daemon.pid else 0
        return convert(await self._client.call("events", wait_s=ANSWER_S, after=after), EventLog).events

    async def _top(self, daemon: DaemonReport, *, fresh: bool) -> TopAnswer | None:
        """What lies where in the engine that is shown; None while there is none that could say so."""
        held = self._assembler.snapshot
        engine = _ready(daemon, self._assembler.model or daemon.model or "")
        if engine is None:
            return None
        fresh = fresh or held.engine is None or held.engine.pid != engine.pid
        try:
            return await self._of_engine(engine, fresh=fresh)
        except (DaemonUnreachable, ProtocolError):
            raise
        except TierdError:
            return None  # since `status` was answered it ended, or is too busy: the daemon is there all the same

    async def _of_engine(self, engine: EngineReport, *, fresh: bool) -> TopAnswer | None:
        held = self._assembler.snapshot
        if "top" in held.ops:
            args: dict[str, Any] = {"model": engine.model}
            if not fresh:
                args["maps"] = {part.tier: part.version for part in held.maps}
                if held.prefixes is not None:
                    args["prefixes"] = held.prefixes_version
                args["events_after"] = max(self._assembler.engine_events, 0)
            return convert(await self._client.call("top", wait_s=ANSWER_S, **args), TopAnswer)
        return await self._without_top(engine, fresh=fresh)

    async def _without_top(self, engine: EngineReport, *, fresh: bool) -> TopAnswer | None:
        """What a daemon tells that has no `top`: the map of the device, and now and then the newest prefixes."""
        ops, now_s = self._assembler.snapshot.ops, self._clock()
        maps: tuple[PageMap, ...] = ()
        if "pages" in ops:
            cells = (await self._client.call("pages", wait_s=ANSWER_S, model=engine.model)).get("map")
            if isinstance(cells, bytes):
                maps = (PageMap("device", slots=len(cells), cells=cells),)
        if "prefix" in ops and (fresh or now_s - self._listed_s >= LIST_EVERY_S):
            answer = await self._client.call("prefix", action="ls", model=engine.model, limit=LISTED, wait_s=ANSWER_S)
            tier = engine.tiers.get("device")
            listed = convert(answer, PrefixList)
            rows = msgspec.msgpack.encode(rows_of(listed, tier.page_bytes if tier else 0, now_s))
            self._listed_s, self._listed = now_s, PrefixTable(int(now_s * 1000), rows, listed.total)
        return TopAnswer(model=engine.model, clock_s=now_s, maps=maps, prefixes=self._listed)

    async def call(self, op: str, **args: Any) -> dict[str, Any]:
        """An operation on the connection of the feed. Raises TierdError; Unsupported before anything is sent."""
        if self._assembler.snapshot.standing.phase is not Phase.LIVE:
            raise DaemonUnreachable("the daemon is not connected")
        if op not in self._assembler.snapshot.ops:
            raise Unsupported(f"this daemon has no operation {op!r}", hint="update the daemon")
        answer = await self._client.call(op, **args)
        self._listed_s = float("-inf")  # what was asked for shall be seen
        return answer

    async def generate(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """The events of one generation, on the connection of the feed. Raises TierdError."""
        async with contextlib.aclosing(self._client.generate(submit)) as events:
            async for event in events:
                yield event

    async def aclose(self) -> None:
        """Close the connection and the recording."""
        await self._client.aclose()
        if self._recorder is not None:
            self._recorder.close()


def _ready(daemon: DaemonReport, model: str) -> EngineReport | None:
    return next((e for e in daemon.engines if e.model == model and e.state == "ready"), None)


async def page_with_key(feed: Feed, model: str, key: bytes) -> PageDetail:
    """The same of a page by its key, wherever it lies now. Raises TierdError."""
    return convert(await feed.call("page", model=model, key=key.hex()), PageDetail)


async def page_detail(feed: Feed, model: str, tier: str, slot: int) -> PageDetail:
    """Everything about one page. Raises TierdError, Unsupported when the daemon does not tell."""
    return convert(await feed.call("page", model=model, tier=tier, slot=slot), PageDetail)


class ReplayFeed:
    """Plays a recording at the pace it was made, in a time of its own: ages and rates are those of the recording.

    Args:
        recording: what to play; closed by `aclose`.
        playing: False: stand on the first frame until `seek` or `toggle`.
    """

    def __init__(self, recording: Recording, *, playing: bool = True) -> None:
        self.recording = recording
        self.playing = playing
        self.place = 0
        self._shown = -1
        self._assembler = Assembler()
        self._moved = asyncio.Event()

    def seek(self, place: int) -> None:
        """Go to a frame; beyond the ends: to the first or the last."""
        self.place = min(max(place, 0), len(self.recording) - 1)
        self._moved.set()

    def toggle(self) -> None:
        """Play on, or stand still. At the end it starts over."""
        self.playing = not self.playing
        if self.playing and self.place == len(self.recording) - 1:
            self.place = 0
        self._moved.set()

    async def run(self, show: Show) -> None:
        """Hand over frames until cancelled. Raises BadRequest for a frame that cannot be read."""
        while True:
            self._moved.clear()
            show(self.snapshot())
            last = self.place == len(self.recording) - 1
            if last:
                self.playing = False
            wait_s = None
            if self.playing:
                at_s, next_s = (self.recording.frame(self.place + step).at_s for step in (0, 1))
                wait_s = max(next_s - at_s, 0.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._moved.wait()
                continue
            self.place += 1

    def snapshot(self) -> Snapshot:
        """The snapshot of the frame at `place`, with what came before it in its sparklines."""
        if self.place == self._shown + 1:
            self._take(self.place)
        elif self.place != self._shown:
            self._assembler = Assembler()
            for place in range(max(0, self.place - HISTORY), self.place + 1):
                self._take(place)
        return self._assembler.stand(
            Standing(Phase.REPLAY, self._assembler.snapshot.at_s, place=self.place, places=len(self.recording))
        )

    def _take(self, place: int) -> None:
        frame = self.recording.frame(place)
        self._assembler.snapshot = replace(self._assembler.snapshot, ops=frozenset(frame.ops))
        self._assembler.take(frame.at_s, frame.wall_s, frame.daemon, frame.top, frame.log)
        self._shown = place

    async def call(self, op: str, **args: Any) -> dict[str, Any]:
        """A recording cannot be acted on: raises Unsupported."""
        raise Unsupported("a recording cannot be changed", hint="attach to a daemon without --replay")

    async def generate(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """A recording does not answer: raises Unsupported."""
        raise Unsupported("a recording cannot answer", hint="attach to a daemon without --replay")
        yield  # what makes this a generator

    async def aclose(self) -> None:
        """Close the file."""
        self.recording.close()
