"""Counters of the daemon, and their text for Prometheus.

Rendered by hand: the format is a dozen lines, and prometheus_client would cost the front 6 MB and 70 ms at start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """What has happened since the start. Threading: for one event loop."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # (door, outcome)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.engine_deaths: Counter[str] = Counter()
        self.resumed_streams = 0
        self._ttft_counts = [0] * (len(TTFT_BUCKETS_S) + 1)
        self._ttft_sum_s = 0.0

    def ended(self, door: str, outcome: str, usage: Mapping[str, int], *, deaths: int, ttft_s: float | None) -> None:
        """A request had its terminal event. `ttft_s`: from its arrival to its first text, load included."""
        self.requests[door, outcome] += 1
        self.prompt_tokens += usage.get("prompt_tokens", 0)
        self.cached_tokens += usage.get("cached_tokens", 0)
        self.completion_tokens += usage.get("completion_tokens", 0)
        self.resumed_streams += deaths > 0
        if ttft_s is not None:
            self._ttft_sum_s += ttft_s
            self._ttft_counts[sum(ttft_s > bound for bound in TTFT_BUCKETS_S)] += 1

    def render(self, live: int, engines: Iterable[Mapping[str, Any]], uptime_s: float) -> str:
        """The text of `/metrics`. `engines`: as in the answer to `status`."""
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
            "tierd_engine_deaths_total", "counter", "Engines that ended unasked.",
            [({"model": model}, count) for model, count in sorted(self.engine_deaths.items())],
        )  # fmt: skip
        what = "Generations that outlived an engine."
        text.family("tierd_resumed_requests_total", "counter", what, [({}, self.resumed_streams)])
        self._render_engines(text, list(engines))
        self._render_ttft(text)
        return text.done()

    @staticmethod
    def _render_engines(text: _Text, engines: list[Mapping[str, Any]]) -> None:
        text.family(
            "tierd_engine_up", "gauge", "1 if the engine of a model is ready.",
            [({"model": engine["model"]}, int(engine.get("state") == "ready")) for engine in engines],
        )  # fmt: skip
        pages = []
        for engine in engines:
            for tier, gauges in sorted((engine.get("tiers") or {}).items()):
                if not isinstance(gauges, Mapping):
                    continue
                for name, value in sorted(gauges.items()):
                    if isinstance(value, int | float) and not isinstance(value, bool):
                        pages.append(({"model": engine["model"], "tier": tier, "state": name}, value))
        text.family("tierd_tier", "gauge", "Pages and bytes of each tier by their state.", pages)

    def _render_ttft(self, text: _Text) -> None:
        name = "tierd_time_to_first_token_seconds"
        text.head(name, "histogram", "From a request's arrival to its first text, loading included.")
        total = 0
        for bound, count in zip((*TTFT_BUCKETS_S, float("inf")), self._ttft_counts, strict=True):
            total += count
            text.sample(f"{name}_bucket", {"le": "+Inf" if bound == float("inf") else f"{bound:g}"}, total)
        text.sample(f"{name}_sum", {}, self._ttft_sum_s)
        text.sample(f"{name}_count", {}, total)


class _Text:
    """Lines in the exposition format."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, what: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> None:
        self.head(name, kind, what)
        for labels, value in samples:
            self.sample(name, labels, value)

    def head(self, name: str, kind: str, what: str) -> None:
        self._lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]

    def sample(self, name: str, labels: Mapping[str, str], value: float) -> None:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        self._lines.append(f"{name}{{{inside}}} {value}" if inside else f"{name} {value}")

    def done(self) -> str:
        return "\n".join(self._lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
