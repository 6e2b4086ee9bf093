"""Times a prepared model: its decoder, and the engine around it, which costs time of its own in every step."""

from __future__ import annotations

import contextlib
import queue
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tierd.daemon.engine import measure_decoder
from tierd.daemon.engine.assemble import Engine, Hooks, build
from tierd.daemon.engine.batch import Ints
from tierd.daemon.engine.measure import Request
from tierd.daemon.engine.model.load import load_weights
from tierd.daemon.engine.runner import Logits, Memory
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.errors import EngineFailed, ModelInvalid
from tierd.daemon.models.catalog import Manifest, load_manifest
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.plan.rates import Compute, Loop
from tierd.daemon.protocol import TERMINAL, Event, Sampling, Submit
from tierd.kernels.cpu.step import CpuDecoder
from tierd.kernels.layout import PageLayout

PROMPT_TOKENS = 32
ANSWER_TOKENS = 48
STREAMS = 8
WAIT_S = 120.0


def model_rig(
    directory: Path, threads: int, kv_format: str
) -> contextlib.AbstractContextManager[measure_decoder.Rig]:
    """A prepared model to run passes on. Raises ModelInvalid."""
    manifest = _manifest(directory)
    weights = load_weights(directory, manifest, lambda _done, _total: None)
    return measure_decoder.rig(weights, manifest.format, threads, kv_format)


def model_rates(directory: Path, request: Request) -> tuple[str, Compute]:
    """The digest of a prepared model, and the rates of its decoder. Raises ModelInvalid."""
    manifest = _manifest(directory)
    with model_rig(directory, request.threads, request.kv_format) as rig:
        found = measure_decoder.compute_rates(rig, request.rounds)
    alone, many = dict(found.attend_s), dict(found.attend_many_s)
    for format in ("fp32", "fp16", "k8v4"):
        if format not in alone:
            with model_rig(directory, request.threads, format) as rig:
                alone[format], many[format] = measure_decoder.attention_rates(rig, request.rounds)
    return manifest.digest, msgspec.structs.replace(found, attend_s=alone, attend_many_s=many)


def loop_costs(directory: Path, work: Path, request: Request) -> Loop:
    """What an engine's step takes beside the pass: of its own, and for each stream. Its pages lie in memory alone.

    That is the time from the end of a pass to the start of the next one, so it doesn't depend on how long passes are.
    """
    spec = _manifest(directory).spec
    page_bytes = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, request.kv_format).record_bytes
    pages = (STREAMS + 1) * ((PROMPT_TOKENS + ANSWER_TOKENS) // 16 + 2)
    config = EngineConfig(
        model_dir=str(directory), cache_dir=str(work / "kv"), device_bytes=pages * page_bytes, host_bytes=0,
        nvme_bytes=0, nvme_min_free_bytes=0, threads=request.threads, kv_format=request.kv_format, context=0,
    )  # fmt: skip
    events: queue.Queue[Event] = queue.Queue(maxsize=100_000)

    def emit(sent: list[Event]) -> None:
        for event in sent:
            events.put_nowait(event)

    hooks = Hooks(lambda _stage, _done, _total: None, emit, lambda _cause: None)
    passes: list[Pass] = []
    engine = build(
        config, hooks, threads=request.threads, max_requests=4 * STREAMS, make_decoder=_watched(passes)
    )
    engine.loop.start()
    try:
        _run(engine, events, 1, 0)
        requests, alone, together = [], [], []
        for number in range(request.rounds):
            passes.clear()
            submitted_s = _run(engine, events, 1, 2 * number + 1)
            requests.append(passes[0].start_s - submitted_s)
            alone += _gaps(passes, 1)
            passes.clear()
            _run(engine, events, STREAMS, 2 * number + 2)
            together += _gaps(passes, STREAMS)
    finally:
        engine.loop.stop()
        engine.loop.join(WAIT_S)
        engine.close()
    one_s, many_s = statistics.median(alone), statistics.median(together)
    stream_s = max((many_s - one_s) / (STREAMS - 1), 0.0)
    return Loop(max(one_s - stream_s, 0.0), stream_s, max(statistics.median(requests), 0.0))


class Pass(NamedTuple):
    """One pass of a decoder."""

    rows: int
    start_s: float
    end_s: float


def _watched(passes: list[Pass]) -> type[CpuDecoder]:
    """A decoder whose passes are added to the list."""

    class Watched(CpuDecoder):
        def forward(self, memories: Sequence[Memory], tokens: Ints, *rest: Any, **named: Any) -> Logits:
            start_s = time.monotonic()
            logits = super().forward(memories, tokens, *rest, **named)
            passes.append(Pass(len(tokens), start_s, time.monotonic()))
            return logits

    return Watched


def _gaps(passes: list[Pass], rows: int) -> list[float]:
    """Seconds between passes of so many rows that follow each other."""
    pairs = zip(passes, passes[1:], strict=False)
    found = [after.start_s - before.end_s for before, after in pairs if before.rows == after.rows == rows]
    if not found:
        raise EngineFailed(f"no two steps of {rows} streams followed each other while the engine was measured")
    return found


def _run(engine: Engine, events: queue.Queue[Event], streams: int, seed: int) -> float:
    """Answers to so many prompts at once, to the last token; when they were submitted."""
    submitted_s = time.monotonic()
    for number in range(streams):
        tokens = tuple(100 + (seed * 7919 + number * 104_729 + i * 31) % 8000 for i in range(PROMPT_TOKENS))
        sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=ANSWER_TOKENS)
        submit = Submit(model="m", tokens=tokens, sampling=sampling)
        engine.loop.submit(engine.intake.request(1000 * seed + number + 1, submit, time.monotonic()))
    left = streams
    deadline_s = time.monotonic() + WAIT_S
    while left:
        try:
            event = events.get(timeout=max(deadline_s - time.monotonic(), 0.01))
        except queue.Empty:
            raise EngineFailed(f"the engine said nothing for {WAIT_S:.0f} s while it was measured") from None
        if event.id and event.ev in TERMINAL:
            if event.ev != "done":
                raise EngineFailed(f"a measured request ended as {event.ev}")
            left -= 1
    return submitted_s


def _manifest(directory: Path) -> Manifest:
    try:
        return load_manifest(directory)
    except ModelFileError as exc:
        raise ModelInvalid(f"model {directory.name!r} is broken: {exc}") from exc
