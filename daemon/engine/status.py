"""What an engine tells of itself: frozen snapshots, made on the step thread, read from any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec

from tierd.daemon.engine.scheduler import Phase
from tierd.daemon.engine.streams import Streams
from tierd.tiers.pager import Pager
from tierd.tiers.stats import PagerStats, TierStats

RATE_WINDOW_S = 1.0  # rates are averages over at least this long
PUBLISH_EVERY_S = 0.1  # while there is work; a snapshot takes some 50 us


class EngineStatus(msgspec.Struct, frozen=True):
    """One moment of an engine. Rates are averages of the last window, 0 when there was no work in it."""

    state: str  # ready | draining | failed
    model: str
    context: int
    uptime_s: float
    running: int  # requests that hold pages
    waiting: int
    fetching: int  # of the running ones, those whose pages are on the way
    requests: int  # since the start, and so are the counters below
    steps: int
    dropped_steps: int  # void, for somebody new who was not to wait for them
    step_ms: float  # mean of the last window
    step: dict[str, float]  # that is computed at this moment: see `Pace.current`
    tokens_in: int  # prompt tokens of accepted requests
    tokens_out: int
    cached_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    preemptions: int
    failures: int
    tiers: dict[str, dict[str, int]]
    links: dict[str, Any]
    pager: dict[str, Any]
    writes: dict[str, Any]  # to the disk: since the start, and today against the budget
    store: dict[str, Any]  # figures of the disk tier since it was opened; empty without one
    streaming: dict[str, Any]  # pages that steps read from the store because no memory holds them
    speculation: dict[str, Any]  # drafted tokens, how many were right, and what a drafted row costs beside a step
    weights: dict[str, Any]  # where they lie, and what passes read of them; empty when nobody says
    exact: dict[str, int]  # copies of tokens beside packed pages, and rows computed again for them; empty without any


class Meter:
    """Turns growing totals into rates per second. Threading: one owner."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._since_s: float | None = None
        self._start: tuple[float, ...] = ()
        self._rates: tuple[float, ...] = ()

    def update(self, now_s: float, *totals: float) -> tuple[float, ...]:
        """Growth per second of each total over the last whole window."""
        if self._since_s is None:
            self._since_s, self._start, self._rates = now_s, totals, (0.0,) * len(totals)
        elapsed_s = now_s - self._since_s
        if elapsed_s >= self._window_s:
            self._rates = tuple((new - old) / elapsed_s for new, old in zip(totals, self._start, strict=True))
            self._since_s, self._start = now_s, totals
        return self._rates


class StatusBoard:
    """Holds the newest snapshot. Threading: `latest`, `state`, `told` from any thread, the rest on the step thread."""

    def __init__(
        self,
        model: str,
        context: int,
        streams: Streams,
        pager: Pager,
        clock: Callable[[], float],
        weights: Callable[[], object] = dict,
    ) -> None:
        """`weights` says where the weights lie, for `EngineStatus.weights`."""
        self.state = "ready"
        self._weights = weights
        self._model = model
        self._context = context
        self._streams = streams
        self._pager = pager
        self._clock = clock
        self._started_s = clock()
        self._meter = Meter(RATE_WINDOW_S)
        self._published_s = float("-inf")
        self._high: dict[str, int] = {}  # the most pages that were not free at once
        self.latest = self._snapshot(self._started_s)

    def publish(self, *, now: bool = False) -> None:
        """Make a new snapshot, unless one was just made and `now` does not ask for it."""
        now_s = self._clock()
        if now or now_s - self._published_s >= PUBLISH_EVERY_S or not len(self._streams):
            self._published_s = now_s
            self.latest = self._snapshot(now_s)

    def told(self) -> dict[str, Any]:
        """The newest snapshot as it is sent, with the step that is under way now. Any thread."""
        found: dict[str, Any] = msgspec.to_builtins(self.latest)
        return found | {"step": self._streams.totals.pace.current(self._clock())}

    def figures(self) -> dict[str, Any]:
        """The snapshot of this very moment, as it is sent. Step thread."""
        self.publish(now=True)
        found: dict[str, Any] = msgspec.to_builtins(self.latest)
        return found

    def _snapshot(self, now_s: float) -> EngineStatus:
        streams, totals = self._streams, self._streams.totals
        stats = self._pager.statistics()
        prefill, decode, steps, busy_s = self._meter.update(
            now_s, totals.prefill_rows, totals.generated_tokens, totals.steps, totals.step_s
        )
        return EngineStatus(
            state=self.state,
            model=self._model,
            context=self._context,
            uptime_s=round(now_s - self._started_s, 3),
            running=streams.count(Phase.FETCHING, Phase.PREFILL, Phase.DECODE),
            waiting=streams.count(Phase.WAITING),
            fetching=streams.count(Phase.FETCHING),
            requests=totals.requests,
            steps=totals.steps,
            dropped_steps=totals.dropped_steps,
            step_ms=round(1000.0 * busy_s / steps, 3) if steps else 0.0,
            step={},
            tokens_in=totals.prompt_tokens,
            tokens_out=totals.generated_tokens,
            cached_tokens=totals.cached_tokens,
            prefill_tokens_per_s=round(prefill, 1),
            decode_tokens_per_s=round(decode, 1),
            preemptions=totals.preemptions,
            failures=totals.failures,
            tiers=self._tiers(stats),
            links={name: msgspec.to_builtins(link) for name, link in stats.links.items()},
            pager=_counters(stats),
            writes=msgspec.to_builtins(stats.writes),
            streaming=streams.streaming,
            speculation=streams.speculation,
            weights=msgspec.to_builtins(self._weights()),
            exact={} if streams.ladders is None else streams.ladders.statistics(),
            store=msgspec.to_builtins(self._pager.store.statistics()) if self._pager.store is not None else {},
        )


    def _tiers(self, stats: PagerStats) -> dict[str, dict[str, int]]:
        """The tiers, with the most that was in use at any time and where eviction begins."""
        tiers = {}
        for name, tier in (("device", stats.device), ("host", stats.host), ("nvme", stats.nvme)):
            self._high[name] = max(self._high.get(name, 0), tier.total_pages - tier.free_pages)
            tiers[name] = _gauges(tier) | {"high_water_pages": self._high[name]}
        needed = self._pager.resizer.needed()[0]
        tiers["device"] |= {"needed_pages": needed, "needed_bytes": needed * stats.device.page_bytes}
        tiers["device"]["evict_at_pages"] = stats.device.total_pages - self._pager.evictor.reserve
        weights: dict[str, Any] = msgspec.to_builtins(self._weights())
        if "memory_bytes" in weights:
            tiers["device"]["weights_bytes"] = weights["memory_bytes"]
        return tiers


def _gauges(tier: TierStats) -> dict[str, int]:
    """Pages and bytes of a tier by state."""
    pages = asdict(tier)
    in_bytes = {
        name.replace("_pages", "_bytes"): count * tier.page_bytes
        for name, count in pages.items()
        if name.endswith("_pages")
    }
    return pages | in_bytes


_APART = frozenset({"device", "host", "nvme", "links", "writes"})


def _counters(stats: PagerStats) -> dict[str, Any]:
    """What the pager counts beside the tiers themselves."""
    whole: dict[str, Any] = msgspec.to_builtins(stats)
    return {name: value for name, value in whole.items() if name not in _APART}
