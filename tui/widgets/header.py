"""The header: what runs, how it does, how fast; and in a bar that nobody can miss, that the daemon is gone."""

from __future__ import annotations

from collections.abc import Callable

from tierd.tui.format import amount, clip, duration, plain, rate, size
from tierd.tui.snapshot import Phase, Snapshot
from tierd.tui.view import Line, View, most, spread, width_of
from tierd.tui.widgets.panel import Panel

SILENT_S = 3.0  # a daemon that has not answered for so long, the connection standing: what is shown is old


def paint(
    snapshot: Snapshot, view: View, width: int, *, now_s: float, paused: bool, readonly: bool,
    silent_s: float = SILENT_S,
) -> list[Line]:  # fmt: skip
    """Two lines. `now_s` is a time of the feed's clock; data that are older than `silent_s` are said to be old."""
    age_s = now_s - snapshot.at_s
    marks: list[Line] = []
    if paused:
        marks.append([("PAUSED", "warn")])
    elif age_s >= silent_s:
        marks.append([(f"no answer for {duration(age_s)}", "warn")])
    if readonly:
        marks.append([("readonly", "dim")])
    return [_first(snapshot, view, width), _second(snapshot, view, width, now_s, marks)]


def _first(snapshot: Snapshot, view: View, width: int) -> Line:
    daemon, engine = snapshot.daemon, snapshot.engine
    right: list[Line] = []
    if engine is not None:
        right = [
            [("in ", "dim"), (rate(engine.prefill_tokens_per_s), "strong"), (" tok/s", "dim")],
            [("out ", "dim"), (rate(engine.decode_tokens_per_s), "strong"), (" tok/s", "dim")],
        ]
    if daemon.version:
        queue = daemon.queue
        role = "warn" if queue.waiting else "strong"
        right.append([("run ", "dim"), (amount(queue.running), "strong")])
        right.append([("wait ", "dim"), (amount(queue.waiting), role)])
    state = engine.state if engine else daemon.state
    left: list[Line] = [[("tierd", "key")]]
    if model := engine.model if engine else daemon.model:
        left.append([(clip(plain(model), max(width // 3, 12)), "strong")])
    elif daemon.version:
        left.append([("no model loaded", "dim")])
    if state:
        left.append([(f"{view.glyphs.alert} ", _health(state)), (plain(state), _health(state))])
    if daemon.uptime_s is not None:
        left.append([("up ", "dim"), (duration(daemon.uptime_s), "text")])
    if engine is not None and engine.rss_bytes:
        left.append([(size(engine.rss_bytes), "text")])
    fixed = most(left[:3], width)
    figures = most(right, width - width_of(fixed) - 2)
    return spread(most(left, width - width_of(figures) - 2), figures, width)


def _health(state: str) -> str:
    match state:
        case "ready":
            return "good"
        case "failed" | "dead":
            return "bad"
        case "idle":
            return "dim"
        case _:
            return "warn"


def _second(snapshot: Snapshot, view: View, width: int, now_s: float, marks: list[Line]) -> Line:
    standing = snapshot.standing
    match standing.phase:
        case Phase.CONNECTING:
            return [(" connecting to the daemon", "warn")]
        case Phase.DISCONNECTED:
            told = f" DISCONNECTED {duration(now_s - standing.since_s)}: {plain(standing.reason)}"
            if standing.hint:
                told += f" ({plain(standing.hint)})"
            return [(clip(told, width, view.text("…")).ljust(width), "alert")]
        case Phase.REPLAY:
            left: Line = [("REPLAY ", "key"), (f"frame {standing.place + 1} of {standing.places}", "strong")]
            return spread(left, [("space play, [ ] step", "dim")] if width >= 60 else [], width)
        case Phase.LIVE:
            return _live(snapshot, width, marks)


def _live(snapshot: Snapshot, width: int, marks: list[Line]) -> Line:
    daemon, engine = snapshot.daemon, snapshot.engine
    facts: list[Line] = []
    if engine is not None:
        if engine.failures:
            facts.append([(f"{amount(engine.failures)} failed", "bad")])
        if engine.fetching:
            facts.append([(f"{amount(engine.fetching)} fetching", "warn")])
        if engine.step_ms is not None:
            facts.append([("step ", "dim"), (f"{engine.step_ms:.1f} ms", "text")])
        if engine.tokens_in is not None and engine.cached_tokens is not None:
            facts.append([("prompts ", "dim"), (amount(engine.tokens_in), "text"), (" tok, cached ", "dim"),
                          (amount(engine.cached_tokens), "text")])  # fmt: skip
        if engine.preemptions:
            facts.append([(f"{amount(engine.preemptions)} preempted", "warn")])
        if engine.context is not None:
            facts.append([("context ", "dim"), (amount(engine.context), "text")])
    if daemon.http:
        facts.append([(plain(daemon.http), "dim")])
    if daemon.version:
        facts.append([(f"v{plain(daemon.version)}", "dim")])
    right = most(marks, width)
    return spread(most(facts, width - width_of(right) - 2 * bool(right)), right, width)


class Header(Panel, can_focus=False):
    """The header of the screen."""

    NAME = ""
    HELP = "Model, state, tokens per second computed (in) and written (out), requests that run and wait."

    def __init__(self, view: View, clock: Callable[[], float], *, readonly: bool, silent_s: float) -> None:
        super().__init__(view, id="header")
        self._clock = clock
        self._silent_s = silent_s
        self._readonly = readonly
        self.paused = False

    def paint(self, width: int, height: int) -> list[Line]:
        """Both lines."""
        return paint(
            self.snapshot, self.view, width, now_s=self._clock(), paused=self.paused, readonly=self._readonly,
            silent_s=self._silent_s,
        )  # fmt: skip
