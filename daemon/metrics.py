"""Counters of the daemon, and their text for Prometheus.

Rendered by hand: the format is a dozen lines, and prometheus_client would cost the front 6 MB and 70 ms at start. Every
label has few values: doors, outcomes, tiers, links, models that are prepared here; never a tenant, a key or a prompt.
What engines count begins anew with each engine, as Prometheus expects of a counter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TIME_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_BUCKETS = (0.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
TIERS = ("device", "host", "nvme")

Samples = list[tuple[Mapping[str, str], float]]


class Histogram:
    """How often a value lay below each bound. Values that are not finite are not counted."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        if value - value == 0.0:
            self.counts[sum(value > bound for bound in self.bounds)] += 1
            self.total += value


class Metrics:
    """What has happened since the start. Threading: for one event loop."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # (door, outcome)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.engine_deaths: Counter[str] = Counter()
        self.resumed_streams = 0
        self.hit_tokens = dict.fromkeys(TIERS, 0)
        self._ttft = Histogram(TIME_BUCKETS_S)
        self._queue = Histogram(TIME_BUCKETS_S)
        self._hits = {tier: Histogram(TOKEN_BUCKETS) for tier in TIERS}
        self._restore = Histogram(TIME_BUCKETS_S)

    def ended(
        self,
        door: str,
        outcome: str,
        usage: Mapping[str, int],
        *,
        deaths: int,
        ttft_s: float | None,
        timings: Mapping[str, float] | None = None,
    ) -> None:
        """A request had its terminal event.

        `ttft_s`: from its arrival to its first text, load included. `timings`: those of its `done`, if it had one.
        """
        self.requests[door, outcome] += 1
        self.prompt_tokens += usage.get("prompt_tokens", 0)
        self.cached_tokens += usage.get("cached_tokens", 0)
        self.completion_tokens += usage.get("completion_tokens", 0)
        self.resumed_streams += deaths > 0
        if ttft_s is not None:
            self._ttft.add(ttft_s)
        if timings:
            self._take(timings)

    def _take(self, timings: Mapping[str, float]) -> None:
        self._queue.add(timings.get("queue_ms", 0.0) / 1e3)
        for tier in TIERS:
            tokens = int(timings.get(f"hit_{tier}", 0))
            self.hit_tokens[tier] += tokens
            self._hits[tier].add(tokens)
        if restore_ms := timings.get("restore_ms", 0.0):  # pages in memory are read where they lie
            self._restore.add(restore_ms / 1e3)

    def render(
        self, live: int, engines: Iterable[Mapping[str, Any]], uptime_s: float, card: Mapping[str, Any] | None = None
    ) -> str:
        """The text of `/metrics`. `engines`, `card`: as in the answer to `status`."""
        text = _Text()
        text.family("tierd_uptime_seconds", "gauge", "Time since the daemon started.", [({}, uptime_s)])
        text.family("tierd_live_requests", "gauge", "Generations that run or wait.", [({}, live)])
        text.family(
            "tierd_requests_total", "counter", "Generations by how they ended.",
            [({"door": door, "outcome": outcome}, count) for (door, outcome), count in sorted(self.requests.items())],
        )  # fmt: skip
        for name, value, what in (
            ("prompt", self.prompt_tokens, "Tokens of prompts."),
            ("cached", self.cached_tokens, "Tokens of prompts that were not computed."),
            ("completion", self.completion_tokens, "Tokens that were generated."),
        ):
            text.family(f"tierd_{name}_tokens_total", "counter", what, [({}, value)])
        text.family(
            "tierd_hit_tokens_total", "counter", "Tokens of prompts found, by tier, of answers that ended.",
            [({"tier": tier}, count) for tier, count in self.hit_tokens.items()],
        )  # fmt: skip
        text.family(
            "tierd_engine_deaths_total", "counter", "Engines that ended unasked.",
            [({"model": model}, count) for model, count in sorted(self.engine_deaths.items())],
        )  # fmt: skip
        what = "Generations that outlived an engine."
        text.family("tierd_resumed_requests_total", "counter", what, [({}, self.resumed_streams)])
        self._render_histograms(text)
        _render_engines(text, list(engines))
        if card:
            _render_card(text, card)
        return text.done()

    def _render_histograms(self, text: _Text) -> None:
        text.histogram(
            "tierd_time_to_first_token_seconds", "From a request's arrival to its first text, loading included.",
            [({}, self._ttft)],
        )  # fmt: skip
        what = "From a request's arrival in the engine to its admission."
        text.histogram("tierd_queue_seconds", what, [({}, self._queue)])
        text.histogram(
            "tierd_request_hit_tokens", "Tokens of a request's prompt that were found in a tier.",
            [({"tier": tier}, histogram) for tier, histogram in self._hits.items()],
        )  # fmt: skip
        what = "From a request's admission until the pages that only the disk had could be read."
        text.histogram("tierd_restore_seconds", what, [({}, self._restore)])


# Family -> kind, what it is, where it stands in an engine's status.
_OF_ENGINES = {
    "tierd_engine_steps_total": ("counter", "Steps computed.", "steps"),
    "tierd_engine_dropped_steps_total": ("counter", "Steps dropped for somebody new.", "dropped_steps"),
    "tierd_engine_running": ("gauge", "Requests that hold pages.", "running"),
    "tierd_engine_waiting": ("gauge", "Requests that wait.", "waiting"),
    "tierd_engine_preemptions_total": ("counter", "Requests that had to give their pages back.", "preemptions"),
    "tierd_prefill_tokens_per_second": ("gauge", "Tokens of prompts computed, lately.", "prefill_tokens_per_s"),
    "tierd_decode_tokens_per_second": ("gauge", "Tokens generated, lately.", "decode_tokens_per_s"),
    "tierd_store_written_bytes_total": ("counter", "Bytes of pages written to the disk.", "writes.written_bytes"),
    "tierd_store_skipped_pages_total": ("counter", "Pages not worth a write.", "writes.skipped_pages"),
    "tierd_store_refused_pages_total": ("counter", "Pages dropped for the day's budget.", "writes.refused_pages"),
    "tierd_store_today_bytes": ("gauge", "Bytes written today by all engines.", "writes.today_bytes"),
    "tierd_store_daily_bytes": ("gauge", "Bytes that may be written in a day; 0: no bound.", "writes.daily_bytes"),
    "tierd_store_lost_pages_total": ("counter", "Pages that failed a check or a read: misses.", "store.lost_pages"),
    "tierd_streamed_bytes_total": ("counter", "Bytes that steps read from the disk.", "streaming.read_bytes"),
    "tierd_streaming_wait_seconds_total": ("counter", "Time that steps stood still for them.", "streaming.waited_s"),
    "tierd_streaming_ring_bytes": ("gauge", "Memory that streaming holds.", "streaming.ring_bytes"),
    "tierd_streaming_lost_steps_total": ("counter", "Steps void for a failed read.", "streaming.lost_steps"),
    "tierd_weights_memory_bytes": ("gauge", "Memory that weights take, what they pass through too.",
                                   "weights.memory_bytes"),
    "tierd_weights_disk_bytes": ("gauge", "Bytes of weights that only the disk has.", "weights.nvme_bytes"),
    "tierd_weights_read_bytes_total": ("counter", "Bytes of weights that passes read.", "weights.read_bytes"),
    "tierd_weights_wait_seconds_total": ("counter", "Time that passes stood still for weights.", "weights.waited_s"),
    "tierd_weights_uses_total": ("counter", "Streamed pieces that passes needed.", "weights.uses"),
    "tierd_weights_hits_total": ("counter", "Of those, the ones that had come by then.", "weights.hits"),
    "tierd_weights_retries_total": ("counter", "Reads of weights that were tried again.", "weights.retries"),
    "tierd_weights_lost_total": ("counter", "Reads of weights that failed for good.", "weights.lost"),
    "tierd_weights_bytes_per_second": ("gauge", "Rate of the last passes.", "weights.bytes_per_s"),
    "tierd_drafted_tokens_total": ("counter", "Tokens computed on a guess.", "speculation.drafted_tokens"),
    "tierd_accepted_tokens_total": ("counter", "Of those, the ones drawn.", "speculation.right_drafts"),
    "tierd_draft_model_drafted_tokens_total": (
        "counter", "Tokens computed on a guess of the draft model.", "speculation.draft.drafted_tokens",
    ),
    "tierd_draft_model_accepted_tokens_total": (
        "counter", "Of those, the ones drawn.", "speculation.draft.right_drafts",
    ),
    "tierd_draft_model_spent_seconds_total": (
        "counter", "Time in which the draft model guessed.", "speculation.draft.spent_s",
    ),
    "tierd_draft_model_memory_bytes": ("gauge", "Memory of the draft model.", "speculation.draft.memory_bytes"),
}  # fmt: skip
_OF_LINKS = {
    "tierd_link_bytes_total": ("counter", "Bytes moved between two tiers.", "total_bytes"),
    "tierd_link_active_seconds_total": ("counter", "Time in which a transfer ran.", "active_s"),
    "tierd_link_waited_seconds_total": ("counter", "Time that transfers stood in the queue.", "waited_s"),
    "tierd_link_errors_total": ("counter", "Transfers that failed.", "errors"),
    "tierd_link_queued": ("gauge", "Transfers that wait or run.", "queued"),
}
_OF_CARD = {
    "tierd_card_free_bytes": ("gauge", "Memory of the card that nobody uses.", "free_bytes"),
    "tierd_card_others_bytes": ("gauge", "Memory of the card that other programs hold.", "others_bytes"),
    "tierd_card_yielded_bytes": ("gauge", "Memory that pages have given to them.", "yielded_bytes"),
    "tierd_card_yields_total": ("counter", "How often an engine's pages gave memory.", "yields"),
    "tierd_card_returns_total": ("counter", "How often they took some back.", "returns"),
}


def _render_engines(text: _Text, engines: Sequence[Mapping[str, Any]]) -> None:
    text.family(
        "tierd_engine_up", "gauge", "1 if the engine of a model is ready.",
        [({"model": engine["model"]}, int(engine.get("state") == "ready")) for engine in engines],
    )  # fmt: skip
    pages: Samples = []
    for engine in engines:
        for tier, gauges in sorted(_map(engine.get("tiers")).items()):
            for name, value in sorted(_map(gauges).items()):
                pages += _sample({"model": engine["model"], "tier": tier, "state": name}, value)
    text.family("tierd_tier", "gauge", "Pages and bytes of each tier by their state.", pages)
    for family, (kind, what, place) in _OF_ENGINES.items():
        samples: Samples = []
        for engine in engines:
            samples += _sample({"model": engine["model"]}, _at(engine, place))
        text.family(family, kind, what, samples)
    for family, (kind, what, name) in _OF_LINKS.items():
        samples = []
        for engine in engines:
            for link, stats in sorted(_map(engine.get("links")).items()):
                samples += _sample({"model": engine["model"], "link": link}, _map(stats).get(name))
        text.family(family, kind, what, samples)


def _render_card(text: _Text, card: Mapping[str, Any]) -> None:
    watched = int(card.get("state") != "off")
    text.family("tierd_card_watched", "gauge", "1 while other programs' use of the card is watched.", [({}, watched)])
    for family, (kind, what, name) in _OF_CARD.items():
        text.family(family, kind, what, _sample({}, card.get(name)))


def _at(status: Mapping[str, Any], place: str) -> object:
    found: object = status
    for name in place.split("."):
        found = _map(found).get(name)
    return found


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sample(labels: Mapping[str, str], value: object) -> Samples:
    """One sample, if the engine tells a number."""
    return [(labels, value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


class _Text:
    """Lines in the exposition format."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, what: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> None:
        self._head(name, kind, what)
        for labels, value in samples:
            self._sample(name, labels, value)

    def histogram(self, name: str, what: str, samples: Iterable[tuple[Mapping[str, str], Histogram]]) -> None:
        self._head(name, "histogram", what)
        for labels, histogram in samples:
            count = 0
            for bound, below in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
                count += below
                le = "+Inf" if bound == float("inf") else f"{bound:g}"
                self._sample(f"{name}_bucket", {**labels, "le": le}, count)
            self._sample(f"{name}_sum", labels, histogram.total)
            self._sample(f"{name}_count", labels, count)

    def done(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _head(self, name: str, kind: str, what: str) -> None:
        self._lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]

    def _sample(self, name: str, labels: Mapping[str, str], value: float) -> None:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        self._lines.append(f"{name}{{{inside}}} {value}" if inside else f"{name} {value}")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
