"""What `tierd plan` says of a running engine, for the load it has, beside what is measured of that load.

The plan is made by the same functions and from the same file of rates as `tierd plan MODEL`. What has not been measured
is None, and without a plan the answer says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tierd.daemon.engine.request import Request
from tierd.daemon.engine.scheduler import Phase
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.machine import Sizes, probe_machine
from tierd.daemon.models.catalog import Manifest
from tierd.daemon.models.placement import DoesNotFit
from tierd.daemon.plan import planner, rates, scenario
from tierd.daemon.plan.planner import Outcome
from tierd.daemon.plan.subject import prepared_subject
from tierd.daemon.units import counted

MIN_TOKENS = 8  # of an answer, before its rate says anything
MIN_ROWS = 32  # of a prompt that were computed, before their rate does
MAX_PLANS = 64  # kept: a plan takes some milliseconds
_STEP = 1.25  # loads whose tokens differ by less share a plan


class Row(NamedTuple):
    """A figure that was planned, and the same as it was measured."""

    name: str
    unit: str
    planned: float
    measured: float | None


class _Planned(NamedTuple):
    """A plan, and the bytes of weights that it holds in memory."""

    outcome: Outcome
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class Seen:
    """The last load that told something. Tokens are those of one sequence, 0 before there was one."""

    streams: int = 0
    context_tokens: int = 0
    decode_tokens_per_s: float = 0.0  # of all streams together
    prompt_tokens: int = 0
    ttft_s: float | None = None  # None: pages of the prompt were known
    prefill_tokens_per_s: float | None = None  # None: too little of it was computed


class Foresight:
    """Plans for an engine. Threading: `watch` on the step thread, `rows` on any one at a time.

    Args:
        config: of the engine.
        manifest: of its model.
        threads: of the kernels.
        context: that is served, in tokens.
    """

    def __init__(self, config: EngineConfig, manifest: Manifest, threads: int, context: int) -> None:
        self.seen = Seen()
        self._config = config
        self._threads = threads
        self._context = context
        self._subject = prepared_subject(Path(config.model_dir), manifest)._replace(context=context)
        self._plans: dict[tuple[int, int, Sizes], _Planned | None] = {}
        self._measured: rates.Measured | None = None

    def watch(self, requests: Iterable[Request]) -> Seen:
        """Notes what the requests that run now tell."""
        seen, every = self.seen, list(requests)
        decoding = [request for request in every if request.phase is Phase.DECODE and request.beams is None]
        told = [request for request in decoding if request.generated - request.resumed >= MIN_TOKENS]
        streams, context, rate = seen.streams, seen.context_tokens, seen.decode_tokens_per_s
        if told:
            streams = len(decoding)
            context = sum(len(request.tokens) for request in decoding) // streams
            rate = streams * sum(request.timings().decode_tokens_per_s for request in told) / len(told)
        prompt, ttft_s, prefill = seen.prompt_tokens, seen.ttft_s, seen.prefill_tokens_per_s
        begun = [request for request in every if request.times.first_token_s and not request.resumed]
        if begun:
            newest = max(begun, key=lambda request: request.times.first_token_s)
            timings = newest.timings()
            prompt = newest.prompt_tokens
            ttft_s = None if newest.cached_tokens else timings.ttft_ms / 1000.0
            prefill = timings.prefill_tokens_per_s if timings.recomputed >= MIN_ROWS else None
        self.seen = Seen(streams, context, rate, prompt, ttft_s, prefill)
        return self.seen

    def rows(self, seen: Seen, sizes: Sizes, held_bytes: int) -> tuple[list[Row], str]:
        """Figures, and what they rest on, or why there are none.

        Reads the file of rates at its first call, and may solve a linear program: not for the step thread.

        Args:
            sizes: of the tiers, and of the memory for weights, as they are now.
            held_bytes: of weights in memory.
        """
        context = _rounded(seen.context_tokens or min(self._context, 1024))
        prompt = _rounded(seen.prompt_tokens or context)
        decode = self._plan(max(seen.streams, 1), context, sizes)
        first = self._plan(1, prompt, sizes)
        if decode is None or first is None:
            return [], "there is no plan: the model does not fit what `tierd plan` may take of this machine"
        running = decode.outcome.streams
        streams = counted(running, "stream")
        rate = seen.decode_tokens_per_s if seen.streams == running else None
        ttft_s = first.outcome.ttft_s
        found = [
            Row(f"decode, {streams} at {context} tokens", "tok/s", decode.outcome.decode_tokens_per_s, rate),
            Row(f"prompt of {prompt} tokens", "tok/s", prompt / ttft_s, seen.prefill_tokens_per_s),
            Row(f"first token after {prompt}", "s", ttft_s, seen.ttft_s),
            Row("weights in memory", "bytes", decode.weights_bytes, held_bytes),
        ]
        measured = self._rates()
        if measured.assumed:
            return found, "planned from assumed rates: `tierd doctor --measure` measures this machine"
        return found, f"planned from rates measured on {self._on_what(measured)}"

    def _on_what(self, measured: rates.Measured) -> str:
        return measured.compute_for(self._subject.digest, self._subject.formats[0][0])[1]

    def _rates(self) -> rates.Measured:
        if self._measured is None:
            self._measured = rates.of_this_machine(Path(self._config.cache_dir).parent, self._threads)
        return self._measured

    def _plan(self, streams: int, tokens: int, sizes: Sizes) -> _Planned | None:
        key = (streams, tokens, sizes)
        if key not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = self._make(streams, tokens, sizes)
        return self._plans[key]

    def _make(self, streams: int, tokens: int, sizes: Sizes) -> _Planned | None:
        config = self._config
        limits = scenario.Limits(
            config.kv_format, config.max_batch_rows, max(config.max_streams, streams), self._threads, self._context,
            config.store_format, (config.kv_exact_first, config.kv_exact_last),
        )  # fmt: skip
        load = scenario.Load(max(tokens - 1, 1), 1, streams)
        computer = probe_machine(Path(config.cache_dir).parent)
        computer = computer._replace(available_ram=computer.total_ram)  # what it lacks, this engine has
        try:
            task = scenario.cpu_task(self._subject, load, sizes, computer, self._rates(), limits)
        except DoesNotFit:
            return None
        outcome = planner.plan(task)
        if outcome is None:
            return None
        placed = task.placed
        held = sizes.weights_bytes if placed is None else placed.memory_bytes
        return _Planned(outcome, held)


def _rounded(tokens: int) -> int:
    """The tokens to the nearest of a geometric row, so that a growing sequence is not planned anew in each step."""
    near = 16.0
    while near * _STEP**0.5 < tokens:
        near *= _STEP
    return round(near)
