"""Captured steps: one CUDA graph for each bucket of rows and pages, and plain launches where that can't be had.

A decode step is some three hundred launches of a few microseconds each, which Python can't issue as fast as a card runs
them. A graph replays them with one call. It fixes every address and every grid, so steps are rounded up to buckets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from tierd.kernels.gpu.inputs import Inputs, Sizes

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
MIN_PAGES = 32  # one split of decode; from here on buckets double
MAX_GRAPHS = 48


Result = TypeVar("Result")


class Bucket(NamedTuple):
    """What a captured step has room for."""

    rows: int
    pages: int  # of a row
    sink_pages: int = 0  # of a row, beside the others; 0: nobody sees sinks
    observed: bool = False  # whether some row is
    copies: bool = False  # whether some page has an exact one


class Capturer(Protocol):
    """Captures what a call launches; returns what replays it. Raises RuntimeError where that is not possible.

    The result lies where it lay when it was captured, until the next replay of any step.
    """

    def __call__(self, run: Callable[[], Result]) -> Callable[[], Result]: ...


class CudaCapturer:
    """Captures on a stream of its own: events that other threads record on the compute stream stay out of it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()  # steps run one after the other, so their memory can be the same

    def __call__(self, run: Callable[[], Result]) -> Callable[[], Result]:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = run()

        def replay() -> Result:
            graph.replay()
            return result

        return replay


@dataclass(slots=True)
class _Step(Generic[Result]):
    """A bucket."""

    inputs: Inputs
    replay: Callable[[], Result] | None = None
    broken: bool = False


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Steps since the start, by how they ran."""

    captured: int
    replayed: int
    eager: int  # decode steps in buckets, without a graph


class Graphs(Generic[Result]):
    """The buckets of a decoder.

    Args:
        make_inputs: the block of a bucket.
        capture: None: every step runs eagerly.
        note: told, once a bucket, that it could not be captured, and why.
    """

    def __init__(
        self, make_inputs: Callable[[Sizes], Inputs], capture: Capturer | None, note: Callable[[str], None],
        max_graphs: int = MAX_GRAPHS,
    ) -> None:  # fmt: skip
        self._make_inputs = make_inputs
        self._capture = capture
        self._note = note
        self._max_graphs = max_graphs
        self._steps: OrderedDict[Bucket, _Step[Result]] = OrderedDict()
        self._captured = self._replayed = self._eager = 0

    @property
    def stats(self) -> GraphStats:
        """Counts so far."""
        return GraphStats(self._captured, self._replayed, self._eager)

    @staticmethod
    def bucket(
        rows: int, pages: int, sink_pages: int = 0, observed: bool = False, copies: bool = False
    ) -> Bucket | None:
        """The bucket of a step of `rows` decode rows with at most `pages` pages, and `sink_pages` with sinks, some of
        them `observed`, some pages with exact `copies`; None for more rows than any has."""
        if rows > ROW_BUCKETS[-1]:
            return None
        room = next(bucket for bucket in ROW_BUCKETS if rows <= bucket)
        return Bucket(room, _doubled(pages), _doubled(sink_pages) if sink_pages else 0, observed, copies)

    def inputs(self, bucket: Bucket) -> Inputs:
        """The block to be loaded before `run`. The bucket used least recently goes when there are too many."""
        if bucket in self._steps:
            self._steps.move_to_end(bucket)
        else:
            while len(self._steps) >= self._max_graphs:
                self._steps.popitem(last=False)
            self._steps[bucket] = _Step(self._make_inputs(Sizes.of_decode(*bucket)))
        return self._steps[bucket].inputs

    def run(self, bucket: Bucket, compute: Callable[[Inputs], Result]) -> Result:
        """Runs the loaded step. Its first run is eager, which compiles what it needs; then it is captured."""
        step = self._steps[bucket]
        if step.replay is not None:
            self._replayed += 1
            return step.replay()
        result = compute(step.inputs)
        self._eager += 1
        if self._capture is not None and not step.broken:
            try:
                step.replay = self._capture(lambda: compute(step.inputs))
                self._captured += 1
            except RuntimeError as exc:  # torch's, for all that CUDA refuses
                step.broken = True
                what = f"{bucket.rows} rows and {bucket.pages} pages"
                self._note(f"decode steps of up to {what} run without a CUDA graph: {exc}")
        return result


def _doubled(pages: int) -> int:
    """The room for so many pages."""
    room = MIN_PAGES
    while room < pages:
        room *= 2
    return room
