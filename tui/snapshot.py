"""One moment of a daemon, frozen: what every panel draws from. Made from wire answers by an `Assembler`."""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

import msgspec

from tierd.daemon.errors import ProtocolError
from tierd.tui.glyphs import TIER_NAMES
from tierd.tui.wire import (
    DaemonReport,
    EngineReport,
    EventRow,
    LinkReport,
    PageMap,
    PlanRow,
    PrefixRow,
    SequenceRow,
    TopAnswer,
    WeightRow,
    prefix_rows,
)

HISTORY = 240  # samples of a sparkline: one minute at 4 Hz
WAIT_SHARE = 0.01  # of a frame: below that, waiting for a link is not worth a mark
MAX_EVENTS = 2000
MAX_SLOTS = 1 << 24


class Phase(StrEnum):
    """How the screen stands to the daemon."""

    CONNECTING = "connecting"
    LIVE = "live"
    DISCONNECTED = "disconnected"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class Standing:
    """The connection. `since_s` is a time of the feed's clock; in a replay `place` of `places` frames is shown."""

    phase: Phase = Phase.CONNECTING
    since_s: float = 0.0
    reason: str = ""
    hint: str = ""
    place: int = 0
    places: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class ArenaMap:
    """Every page of a tier. `used`: u32 seconds, `owners` and `prefixes`: u16 indices plus 1; empty if not reported."""

    tier: str
    version: int
    cells: bytes
    used: array[int]
    owners: array[int]
    prefixes: array[int]
    base: int = -1  # the version that `changed` is relative to; -1: it may differ from any other in any slot
    changed: Sequence[int] = ()  # slots that are not as they were in `base`

    def __repr__(self) -> str:
        return f"<ArenaMap {self.tier}, version {self.version}: {len(self.cells)} pages>"

    @property
    def slots(self) -> int:
        """Pages the tier has room for."""
        return len(self.cells)


@dataclass(frozen=True, slots=True)
class LinkView:
    """A link with what this screen has seen of it. Rates are differences of the totals of two frames."""

    name: str
    report: LinkReport
    now_bytes_per_s: float | None  # None: there was no earlier frame
    history: tuple[float, ...] = ()  # oldest first
    waits: tuple[bool, ...] = ()  # whether steps waited for it in that time; empty: not reported
    wait_share: float | None = None  # of the time since the last frame, in which they did


@dataclass(frozen=True, slots=True, repr=False)
class Snapshot:
    """All that the panels show. None in a field of the second half: this daemon does not report it."""

    at_s: float = 0.0  # clock of the feed
    number: int = 0
    standing: Standing = Standing()
    daemon: DaemonReport = DaemonReport()
    ops: frozenset[str] = frozenset()
    engine: EngineReport | None = None
    links: tuple[LinkView, ...] = ()
    high_water: tuple[tuple[str, int], ...] = ()  # most pages that were not free, as far as this screen has seen
    maps: tuple[ArenaMap, ...] = ()
    events: tuple[EventRow, ...] = ()
    events_reported: bool = False  # else they are what changed in the counters between two frames
    clock_s: float | None = None
    page_tokens: int | None = None
    page_format: str = ""
    sequences: tuple[SequenceRow, ...] | None = None
    prefixes: tuple[PrefixRow, ...] | None = None
    prefixes_version: int = 0
    prefixes_total: int | None = None
    prefixes_pending: bool = False  # they are being gathered: that there are no rows says nothing
    weights: tuple[WeightRow, ...] | None = None
    plan: tuple[PlanRow, ...] | None = None
    plan_note: str = ""

    def __repr__(self) -> str:
        return f"<Snapshot {self.number}: {self.standing.phase}, {len(self.maps)} maps>"

    def map_of(self, tier: str) -> ArenaMap | None:
        """The page map of a tier, None when it is not reported."""
        return next((found for found in self.maps if found.tier == tier), None)


@dataclass(slots=True)
class Assembler:
    """Turns answers into snapshots: applies what changed, keeps rates and events. Threading: one owner."""

    model: str = ""  # the engine to show; empty: the one used last
    snapshot: Snapshot = Snapshot()
    engine_events: int = -1  # number of the last event that the engine told
    daemon_events: int = -1  # and of that of the daemon
    _history: dict[str, deque[float]] = field(default_factory=dict)
    _waits: dict[str, deque[bool]] = field(default_factory=dict)
    _last_change: Change | None = None  # what the last line of the log tells
    _events: deque[EventRow] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))

    def stand(self, standing: Standing) -> Snapshot:
        """The last data under a new standing."""
        self.snapshot = replace(self.snapshot, standing=standing)
        return self.snapshot

    def note(self, kind: str, text: str, at_s: float | None) -> None:
        """An event that this screen saw by itself."""
        self._add_event(kind, text, at_s)
        self.snapshot = replace(self.snapshot, events=tuple(self._events))

    def take(
        self, at_s: float, wall_s: float | None, daemon: DaemonReport, top: TopAnswer | None,
        log: Sequence[EventRow] | None = None,
    ) -> Snapshot:  # fmt: skip
        """The next snapshot. Raises ProtocolError for answers that contradict themselves.

        `log`: what happened to the daemon since the last one; None: it does not tell.
        """
        last = self.snapshot
        engine = _at_one_moment(_engine(daemon, self.model), top)
        other = engine is None or last.engine is None or engine.pid != last.engine.pid
        if other:
            self._history.clear()
            self._waits.clear()
            self.engine_events = -1
        if daemon.pid != last.daemon.pid:
            self.daemon_events = -1
        answer = top or TopAnswer()
        maps = tuple(_merged(part, None if other else last.map_of(part.tier)) for part in answer.maps)
        if answer.events is not None or log is not None:
            self._log(answer.events or (), log or ())
        else:
            before = None if other else last.engine
            for change in _changes(before, engine):
                if change.kind == "notice" or change.times > 0:
                    self._add_change(change, wall_s)
        prefixes, version = _prefixes(answer, last, other)
        self.snapshot = Snapshot(
            at_s=at_s,
            number=last.number + 1,
            standing=last.standing,
            daemon=daemon,
            ops=last.ops,
            engine=engine,
            links=self._links(at_s, engine, None if other else last),
            high_water=_high_water(engine, () if other else last.high_water),
            maps=maps,
            events=tuple(self._events),
            events_reported=answer.events is not None or log is not None,
            clock_s=answer.clock_s,
            page_tokens=answer.page_tokens,
            page_format=answer.page_format,
            sequences=answer.sequences,
            prefixes=prefixes,
            prefixes_version=version,
            prefixes_total=answer.prefixes.total if answer.prefixes else None,
            prefixes_pending=answer.prefixes is not None and answer.prefixes.pending,
            weights=answer.weights,
            plan=answer.plan,
            plan_note=answer.plan_note,
        )
        return self.snapshot

    def _log(self, of_engine: Sequence[EventRow], of_daemon: Sequence[EventRow]) -> None:
        """Adds what was not known, in the order of time."""
        told = [row for row in of_engine if row.number > self.engine_events]
        news = [row for row in of_daemon if row.number > self.daemon_events]
        self.engine_events = told[-1].number if told else self.engine_events
        self.daemon_events = news[-1].number if news else self.daemon_events
        number = self._events[-1].number + 1 if self._events else 0
        ordered = sorted([*told, *news], key=lambda row: row.at_s or 0.0)
        self._events.extend(msgspec.structs.replace(row, number=number + at) for at, row in enumerate(ordered))
        self._last_change = None if ordered else self._last_change

    def _add_event(self, kind: str, text: str, at_s: float | None) -> None:
        number = self._events[-1].number + 1 if self._events else 0
        self._events.append(EventRow(number, kind, text, at_s))
        self._last_change = None

    def _add_change(self, change: Change, at_s: float | None) -> None:
        """A line for a change, or a higher number in the last line when the same went on happening."""
        last = self._last_change
        if last is not None and last[:2] == change[:2] and change.times:
            change = change._replace(times=last.times + change.times)
            self._events.pop()
        pages = f"{change.times} page{'s' * (change.times != 1)}"
        self._add_event(change.kind, change.text.format(pages if change.text.startswith("{}") else change.times), at_s)
        self._last_change = change

    def _links(self, at_s: float, engine: EngineReport | None, last: Snapshot | None) -> tuple[LinkView, ...]:
        if engine is None:
            return ()
        views = []
        earlier = {view.name: view.report for view in last.links} if last else {}
        elapsed_s = at_s - last.at_s if last else 0.0
        for name, report in engine.links.items():
            before = earlier.get(name)
            now = wait_share = None
            if before is not None and elapsed_s > 0:
                now = max(report.total_bytes - before.total_bytes, 0) / elapsed_s
                self._history.setdefault(name, deque(maxlen=HISTORY)).append(now)
                if report.compute_wait_s is not None:
                    wait_share = max(report.compute_wait_s - (before.compute_wait_s or 0.0), 0.0) / elapsed_s
                    self._waits.setdefault(name, deque(maxlen=HISTORY)).append(wait_share >= WAIT_SHARE)
            history, waits = self._history.get(name, ()), self._waits.get(name, ())
            views.append(LinkView(name, report, now, tuple(history), tuple(waits), wait_share))
        return tuple(views)


def _engine(daemon: DaemonReport, model: str) -> EngineReport | None:
    wanted = model or daemon.model
    found = [engine for engine in daemon.engines if engine.model == wanted]
    return found[0] if found else None


def _at_one_moment(engine: EngineReport | None, top: TopAnswer | None) -> EngineReport | None:
    """The engine with the figures that were taken together with the maps: those of `status` are of another moment."""
    figures = top.engine if top is not None else None
    if engine is None or figures is None:
        return engine
    told = {"pid": engine.pid, "rss_bytes": engine.rss_bytes, "notices": engine.notices}
    return msgspec.structs.replace(figures, model=engine.model, state=engine.state, **told)


def _prefixes(answer: TopAnswer, last: Snapshot, other: bool) -> tuple[tuple[PrefixRow, ...] | None, int]:
    table = answer.prefixes
    if table is None:
        return None, 0
    if table.rows is not None:
        return prefix_rows(table.rows), table.version
    if other or last.prefixes is None or last.prefixes_version != table.version:
        raise ProtocolError("the prefix table came without its rows")
    return last.prefixes, table.version


def _high_water(engine: EngineReport | None, last: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    seen = dict(last)
    for name, tier in (engine.tiers if engine else {}).items():
        reported = tier.high_water_pages if tier.high_water_pages is not None else tier.total_pages - tier.free_pages
        seen[name] = max(seen.get(name, 0), reported)
    return tuple(seen.items())


def _column(code: str, raw: bytes) -> array[int]:
    column = array(code)
    column.frombytes(raw)
    if sys.byteorder == "big":
        column.byteswap()
    return column


_COLUMNS = (("cells", 1), ("used", 4), ("owners", 2), ("prefixes", 2))


def _merged(part: PageMap, last: ArenaMap | None) -> ArenaMap:
    """A whole map, or a map with its changed slots replaced. Raises ProtocolError when the columns do not fit."""
    whole = part.base < 0
    rows = part.slots if whole else len(part.changed) // 4
    if not 0 <= part.slots <= MAX_SLOTS:
        raise ProtocolError(f"a page map of {part.slots} slots")
    for name, width in _COLUMNS:
        held = len(getattr(part, name))
        if held != rows * width and (held or name == "cells"):
            raise ProtocolError(f"{name} of the {part.tier} map: {held} bytes for {rows} pages")
    used, owners = _column("I", part.used), _column("H", part.owners)
    prefixes = _column("H", part.prefixes)
    if whole:
        return ArenaMap(part.tier, part.version, bytes(part.cells), used, owners, prefixes)
    if last is None or last.version != part.base or last.slots != part.slots:
        raise ProtocolError(f"the {part.tier} map is relative to one that this screen does not have")
    if not part.changed:
        return replace(last, version=part.version, base=part.base, changed=())
    changed = _column("I", part.changed)
    if max(changed) >= part.slots:
        raise ProtocolError(f"the {part.tier} map changes a slot beyond its {part.slots}")
    cells = bytearray(last.cells)
    for slot, cell in zip(changed, part.cells, strict=True):
        cells[slot] = cell
    return ArenaMap(
        part.tier, part.version, bytes(cells), _patched(last.used, changed, used),
        _patched(last.owners, changed, owners), _patched(last.prefixes, changed, prefixes), part.base, changed,
    )  # fmt: skip


def _patched(old: array[int], changed: array[int], new: array[int]) -> array[int]:
    if not new or not old:
        return old
    patched = old[:]
    for slot, value in zip(changed, new, strict=True):
        patched[slot] = value
    return patched


class Change(NamedTuple):
    """Something that a counter tells: how often it happened. `{}` in the text stands for that."""

    kind: str
    text: str
    times: int


def _changes(before: EngineReport | None, after: EngineReport | None) -> Iterator[Change]:
    """What happened between two reports, as far as counters tell."""
    if after is None:
        return
    known = before.notices if before is not None else ()
    for text in [text for text in after.notices if text not in known]:  # some go when they are true no more
        yield Change("notice", text.replace("{", "{{").replace("}", "}}"), 0)
    if before is None:
        return
    for name, tier in after.tiers.items():
        if old := before.tiers.get(name):
            yield Change("evict", f"{{}} left {TIER_NAMES.get(name, 'a tier')}", tier.evictions - old.evictions)
    if before.pager and after.pager:
        for kind, text, counter in _COUNTED:
            yield Change(kind, text, getattr(after.pager, counter) - getattr(before.pager, counter))
        for reason, count in after.pager.misses.items():
            told = reason.replace("{", "(").replace("}", ")")
            yield Change("damage", f"{{}} found, but not there: {told}", count - before.pager.misses.get(reason, 0))
    yield Change("preempt", "made room for others: {} requests", (after.preemptions or 0) - (before.preemptions or 0))
    yield Change("failure", "requests failed: {}", (after.failures or 0) - (before.failures or 0))


_COUNTED = (
    ("restore", "{} came from disk", "loaded_pages"),
    ("demote", "{} copied to RAM", "demotions"),
    ("spill", "{} of live requests left device", "spills"),
    ("persist", "{} made durable", "written_pages"),
    ("disk", "{} could not be written", "failed_writes"),
)
