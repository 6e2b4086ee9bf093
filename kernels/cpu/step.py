"""The decoder on the CPU: weights, scratch and threads of one model, and its forward pass over pages.

The pass takes decode and prefill rows mixed, and pages wherever they lie: it is given their addresses. A row's logits,
keys and values are the same bits whatever else is in the batch, wherever its pages are, however a prompt is cut into
chunks, and on any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tierd.kernels.cpu.attention import SEGMENT_TOKENS, sums_bytes
from tierd.kernels.cpu.batch import Addresses, Memory, check_copies, check_pages, cut_attention
from tierd.kernels.cpu.forward import JOB, QUERIES, WHOLE_LAYER, num_stages, work
from tierd.kernels.cpu.hidden import final_hidden, queries
from tierd.kernels.cpu.masses import Observed
from tierd.kernels.cpu.mixture import ExpertSource, run_mixture
from tierd.kernels.cpu.pages import page_values
from tierd.kernels.cpu.scratch import Scratch
from tierd.kernels.cpu.team import Team
from tierd.kernels.cpu.warm import warm_up
from tierd.kernels.cpu.weights import DecoderShape as DecoderShape
from tierd.kernels.cpu.weights import LayerWeights as LayerWeights
from tierd.kernels.cpu.weights import (
    Part,
    PlacedLayer,
    Rows,
    WeightTable,
    check_rows,
    describe_checked,
    padded,
    padded_vector,
)
from tierd.kernels.layout import PAGE_TOKENS, PageLayout
from tierd.kernels.packing import PANEL_ROWS, PackedMatrix
from tierd.kernels.rows import Batch, Exact, Ints, Placed, place

Floats = NDArray[np.float32]
Choose = Callable[[Floats], tuple[Sequence[Memory], Addresses]]  # queries to memories and pages
Angles = Callable[[Ints], tuple[Floats, Floats]]  # positions to cos and sin [positions, head_dim / 2]


class CpuDecoder:
    """A decoder whose weights, scratch and threads are ready. `max_rows` bounds the rows, and the logits, of a pass.

    `far` gives cos and sin of other positions, for rows beyond the tables (see `kernels.rows.Bound`).

    `head` may be the matrix of `embed`. A layer, embedding or head that is None is streamed: passes are then computed
    layer by layer, and it is handed in where it is needed. `cos` and `sin` [context, head_dim / 2] are the RoPE tables,
    pairs being dimensions i and i + head_dim / 2. Raises ValueError for weights or tables that do not fit the shape.

    Threading: one pass at a time. `close` (or leaving the `with` block) stops the threads; a decoder that is garbage
    collected closes itself.
    """

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[LayerWeights | None],
        embed: PackedMatrix | None,
        final_norm: Floats,
        head: PackedMatrix | None,
        layout: PageLayout,
        cos: Floats,
        sin: Floats,
        max_rows: int,
        threads: int,
        far: Angles | None = None,
    ) -> None:
        _check_layout(shape, layout)
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        if cos.ndim != 2 or sin.shape != cos.shape or cos.shape[1] != shape.head_dim // 2 or not len(cos):
            raise ValueError(f"cos and sin must be [context, {shape.head_dim // 2}], got {cos.shape} and {sin.shape}")
        self.shape, self.layout, self.max_rows, self.context = shape, layout, max_rows, len(cos)
        self._placed: Placed | None = None  # the rows of the last pass, alive until the next one
        self._observed: Observed | None = None  # and those of them that are observed
        self._next_layer: int | None = None  # of the pass that is open
        self._exact: Addresses | None = None  # copies of its pages
        self._sums: Memory = np.empty(0, np.uint8)  # of attention; grows with what passes need
        self._sink_queries: Memory = np.empty(0, np.uint8)  # there once a pass has sinks
        self._far, self._far_angles = far, (np.empty(0, np.float32), np.empty(0, np.float32))
        self._kept: list[object] = []  # what the records hold addresses of
        self._jobs = np.zeros(1, JOB)
        self._job: Any = self._jobs[0]
        self.weights = WeightTable(shape, layers)
        self._set_shape(threads)
        self.set_ends(embed, head)
        self._final_norm = padded_vector("final_norm", final_norm, shape.hidden)
        self._job["final_norm"] = self._keep(self._final_norm)
        for name, table in (("cos", cos), ("sin", sin)):
            self._job[name] = self._keep(np.ascontiguousarray(table, np.float32))
        self._job["rope_stride"] = 4 * cos.shape[1]
        self._scratch = Scratch(shape, self._job, max_rows, threads)
        self._team = Team(threads, work, (self._jobs, self.weights.records, self.weights.experts.records))

    def forward(
        self,
        memories: Sequence[Memory],
        tokens: Ints,
        positions: Ints,
        row_seq: Ints,
        pages: Addresses,
        page_offsets: Ints,
        logit_rows: Ints,
        bounds: Ints | None = None,
        between: Callable[[], None] | None = None,
        observed: Ints | None = None,
        exact: Exact | None = None,
    ) -> Floats:
        """One pass over the rows: writes their keys and values into the pages, returns logits [len(logit_rows), vocab].

        Row t is token `tokens[t]` at `positions[t]` of sequence `row_seq[t]`, whose pages are
        `pages[page_offsets[s]:page_offsets[s + 1]]`: int64 addresses of records, each of them whole within one of the
        `memories` (writable uint8 arrays of any shape). It sees the tokens 0..positions[t] of its sequence, within the
        layer's window, or with `bounds` [sequences, 4] what `kernels.rows.Bound` says. The rows of a sequence are
        adjacent and ascending. The other index arrays are int32. `between` is called before each layer; what it
        raises ends the pass. Of the rows `observed`, none of them with a window or sinks, `masses` tells afterwards.
        `exact` copies are for sequences without a bound. Raises ValueError, before any memory is touched, for what
        doesn't fit. Drops a pass by layers that is not finished.
        """
        placed = self._place(Batch(tokens, positions, row_seq, page_offsets, logit_rows), bounds, exact)
        check_pages(pages, page_offsets, memories, self.layout, range(self.shape.num_layers))
        self.weights.require_all()
        self._require("embedding", self._embed)
        self._require("head", self._head)
        self._describe(placed, observed)
        self._describe_pages(placed.batch, pages)
        logits = self._new_logits(len(logit_rows))
        stages = range(num_stages(self.shape.num_layers))
        if between is None:
            self._launch(stages)
            return logits[:, : self.shape.vocab]
        for layer in range(1, len(stages) - 1):  # the embedding goes with the first one, the head with the last
            between()
            self._launch(stages[layer - (layer == 1) : layer + 1 + (layer == len(stages) - 2)])
        return logits[:, : self.shape.vocab]

    def start(
        self,
        tokens: Ints,
        positions: Ints,
        row_seq: Ints,
        page_offsets: Ints,
        logit_rows: Ints,
        rows: Rows | None = None,
        bounds: Ints | None = None,
        observed: Ints | None = None,
        exact: Exact | None = None,
    ) -> None:
        """Opens a pass that is computed layer by layer: embeds the rows. Arguments and errors as for `forward`.

        `rows` holds their embeddings where the decoder has none itself.

        The pass goes on with `layer` for every layer in turn and ends with `finish`: the bits of `forward`. Any earlier
        pass that is not finished is dropped.
        """
        batch = Batch(tokens, positions, row_seq, page_offsets, logit_rows)
        placed = self._place(batch, bounds, exact)
        # What was checked must not change until `finish`.
        placed = placed._replace(batch=Batch(*(array.copy() for array in placed.batch)))
        if exact is not None:
            placed = placed._replace(exact=exact._replace(pages=exact.pages.copy()))
        if rows is None:
            self._require("embedding", self._embed)
        else:
            check_rows(rows, len(batch.tokens))
        self._describe(placed, observed)
        if rows is not None:
            self._job["tokens"], self._job["embed"] = rows.tokens.ctypes.data, rows.matrix[0]
        self._next_layer = 0
        self._launch(range(1))

    def layer(
        self,
        index: int,
        memories: Sequence[Memory],
        pages: Addresses,
        placed: PlacedLayer | None = None,
        experts: ExpertSource | None = None,
        choose: Choose | None = None,
    ) -> None:
        """Computes layer `index` of the open pass; `placed` is where its weights lie, if it has no place of its own,
        and `experts` brings its experts if not all of them have one.

        With `choose` keys and values are written to `pages`; then it is given the queries [rows, heads, head_dim] of
        the layer, normed, rotated and scaled, and says which pages are read, and the memories that they lie in. Those
        that were written are to be among them, at their places.

        The layer's slice of page i lies at `pages[i] + index * layout.layer_bytes`, within one of the memories: pages
        may lie elsewhere in every layer, and the rest of a record need not be there. Raises ValueError, before any
        memory is touched, without an open pass, for any layer but the next one and for pages that don't fit.
        """
        batch, next_layer = self._opened()
        if index != next_layer or index >= self.shape.num_layers:
            raise ValueError(f"layer {index} of {self.shape.num_layers} after {next_layer} layers")
        check_pages(pages, batch.page_offsets, memories, self.layout, range(index, index + 1))
        if placed is not None and placed.index == index:
            self.weights.put(placed)
        elif placed is not None or not self.weights.is_resident(index):
            raise ValueError(f"layer {index} is streamed: say where it lies")
        self._next_layer = next_layer + 1
        launch = partial(self._launch, range(1 + index, 2 + index))
        try:
            if choose is not None:  # who chooses has no exact copies, whoever else has: its places among them stay 0
                self._job["steps"], self._job["pages"] = QUERIES, pages.ctypes.data
                launch()
                memories, pages = choose(queries(self._job))
                check_pages(pages, batch.page_offsets, memories, self.layout, range(index, index + 1))
                self._job["steps"] = WHOLE_LAYER & ~QUERIES
            self._describe_pages(batch, pages)
            if self.weights.experts.has_all(index):
                launch()
            else:
                run_mixture(self.shape, self._job, self._scratch, self.weights, index, experts, launch)
        finally:
            self._job["steps"] = WHOLE_LAYER

    def finish(self, head: Iterable[Part] | None = None) -> Floats:
        """Closes the open pass: logits [len(logit_rows), vocab]. Raises ValueError before its last layer is done.

        `head` gives the parts of the head in order where the decoder has none itself. Each is asked for when the one
        before it has been computed. A pass without logits asks for none.
        """
        (batch, next_layer), num_layers = self._opened(), self.shape.num_layers
        if next_layer != num_layers:
            raise ValueError(f"the open pass has {next_layer} of {num_layers} layers")
        logits = self._new_logits(len(batch.logit_rows))
        stages = range(num_layers + 1, num_layers + 2)
        if head is None:
            self._require("head", self._head)
            self._launch(stages)
        elif len(logits):
            self._launch_parts(head, stages)
        self._next_layer = None
        return logits[:, : self.shape.vocab]

    def hidden(self, rows: Ints) -> Floats:
        """Final hidden states [len(rows), hidden] of rows of the last pass, which is complete: what the head takes."""
        job, shape = self._job, self.shape
        if len(rows) and not 0 <= rows.min() <= rows.max() < job["rows"]:
            raise ValueError(f"the last pass has {job['rows']} rows")
        stride = int(job["residual_stride"])
        return final_hidden(int(job["residual"]), stride, self._final_norm, shape.hidden, shape.norm_eps, rows)

    def masses(self) -> NDArray[np.float64]:
        """How much of its attention each observed row of the last pass, which is complete, gives to the pages of its
        sequence: [observed, pages or more], sums over heads and the layers without a window. Each of these gives 1 in
        all. Raises ValueError where none was observed."""
        if self._observed is None:
            raise ValueError("no row of the last pass was observed")
        return self._observed.masses()

    def set_ends(self, embed: PackedMatrix | None, head: PackedMatrix | None) -> None:
        """Takes other places of the embedding and the head, between passes. Raises ValueError for a wrong shape."""
        shape = self.shape
        for name, matrix in (("embed", embed), ("head", head)):
            if matrix is not None:
                describe_checked(name, matrix, shape.vocab, shape.hidden, self._job[name])
        self._embed, self._head = embed, head

    def close(self) -> None:
        """Stops the threads. Afterwards every pass raises ValueError; closing again does nothing."""
        self._team.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def warm_up(progress: Callable[[int, int], None]) -> None:
        """Compiles the kernels, or loads them from Numba's cache; `progress(done, total)` counts stages."""
        warm_up(CpuDecoder, progress)

    def _place(self, batch: Batch, bounds: Ints | None, exact: Exact | None) -> Placed:
        if not self._team.close.alive:
            raise ValueError("the decoder is closed")
        placed = place(batch, bounds, self.shape.vocab, self.context, self.max_rows, self._far is not None)
        if exact is not None:
            check_copies(exact, batch, bounds, self.layout)
        return placed._replace(exact=exact)

    def _opened(self) -> tuple[Batch, int]:
        """The rows of the open pass, and its next layer."""
        if not self._team.close.alive:
            raise ValueError("the decoder is closed")
        if self._placed is None or self._next_layer is None:
            raise ValueError("no pass is open: start one first")
        return self._placed.batch, self._next_layer

    @staticmethod
    def _require(name: str, matrix: PackedMatrix | None) -> None:
        if matrix is None:
            raise ValueError(f"the {name} is streamed: compute the pass layer by layer, and hand it in")

    def _launch_parts(self, head: Iterable[Part], stages: range) -> None:
        """Each part gives some columns of the logits."""
        job, first, done = self._job, int(self._job["logits"]), 0
        for part in head:
            if part.first_panel != done:
                raise ValueError(f"panel {part.first_panel} of the head after {done} panels")
            done += int(part.matrix[0]["panels"])
            if done * PANEL_ROWS > padded(self.shape.vocab):
                raise ValueError(f"{done} panels are more than the head has")
            job["head"], job["logits"] = part.matrix[0], first + 4 * PANEL_ROWS * part.first_panel
            self._launch(stages)
        if done * PANEL_ROWS != padded(self.shape.vocab):
            raise ValueError(f"the parts of the head end at panel {done}")

    def _describe(self, placed: Placed, observed: Ints | None) -> None:
        """Names the rows in the job. No pass by layers is open afterwards."""
        job, batch, shape = self._job, placed.batch, self.shape
        self._observed, job["num_observed"] = None, 0
        if observed is not None:
            self._observed = Observed.make(observed, placed, shape.heads, shape.kv_heads)
            self._observed.place(job)
        self._placed, self._next_layer = placed, None
        self._exact = None if placed.exact is None else placed.exact.pages
        job["exact"] = 0 if self._exact is None else self._exact.ctypes.data
        for name in Batch._fields:
            job[name] = getattr(batch, name).ctypes.data
        job["rows"], job["num_logits"] = len(batch.tokens), len(batch.logit_rows)
        job["bounds"] = 0
        if placed.records is None or placed.sink_offsets is None or placed.far is None:
            return
        job["bounds"], job["sink_offsets"] = placed.records.ctypes.data, placed.sink_offsets.ctypes.data
        if placed.records[:, 1].any() and not len(self._sink_queries):
            self._sink_queries = np.empty(self.max_rows * int(job["attended_stride"]) + 64, np.uint8)
        job["sink_queries"] = -(-self._sink_queries.ctypes.data // 64) * 64
        if len(placed.far) and self._far is not None:
            cos, sin = (np.ascontiguousarray(table, np.float32) for table in self._far(placed.far))
            self._far_angles = cos, sin
            job["far_cos"], job["far_sin"] = cos.ctypes.data, sin.ctypes.data

    def _describe_pages(self, batch: Batch, pages: Addresses) -> None:
        """Names the pages of the next launch in the job, and the parts of attention over them. The caller keeps the
        pages alive."""
        shape, job, threads = self.shape, self._job, int(self._job["threads"])
        job["pages"] = pages.ctypes.data
        max_rows = int(job["block_queries"]) * shape.kv_heads // shape.heads
        few_blocks = -(-4 * threads // shape.kv_heads)  # then there are 4 items for each thread
        self._cut = parts, cut_rows = cut_attention(batch, pages, max_rows, few_blocks, self._exact)
        job["parts"], job["num_parts"] = parts.ctypes.data, len(parts)
        job["cut_rows"], job["num_cut_rows"] = cut_rows.ctypes.data, len(cut_rows)
        # A few short blocks: threads share the heads evenly, even where two of them read the same kv head.
        by_heads = not len(cut_rows) and len(parts) < few_blocks
        job["head_parts"] = min(shape.heads, threads) if by_heads else shape.kv_heads
        job["segments"] = segments = int(batch.positions.max()) // SEGMENT_TOKENS + 1
        needed_bytes = sums_bytes(shape.head_dim, shape.heads, len(cut_rows), segments) + 64
        if needed_bytes > len(self._sums):
            self._sums = np.empty(needed_bytes, np.uint8)
        job["sums"] = -(-self._sums.ctypes.data // 64) * 64

    def _new_logits(self, count: int) -> Floats:
        """Room for `count` rows of logits, padded to whole panels; the job names it."""
        logits = np.empty((count, padded(self.shape.vocab)), np.float32)
        self._job["logits"], self._job["logits_stride"] = logits.ctypes.data, logits.strides[0]
        return logits

    def _launch(self, stages: range) -> None:
        self._job["first_stage"], self._job["stop_stage"] = stages.start, stages.stop
        self._scratch.phases[:] = 0
        work(self._jobs, self.weights.records, self.weights.experts.records, self._team.address, 0)

    def _keep(self, array: NDArray[Any]) -> int:
        """Keeps the array alive as long as the decoder; its address."""
        self._kept.append(array)
        return array.ctypes.data

    def _set_shape(self, threads: int) -> None:
        shape, job = self.shape, self._job
        for name in ("num_layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "norm_eps"):
            job[name] = getattr(shape, name)
        job["hidden_padded"] = padded(shape.hidden)
        for name, value in page_values(self.layout).items():
            job[name] = value
        job["query_scale"] = 1 / math.sqrt(shape.head_dim)
        job["threads"] = threads


def _check_layout(shape: DecoderShape, layout: PageLayout) -> None:
    if layout.page_tokens != PAGE_TOKENS:
        raise ValueError(f"the CPU kernels take pages of {PAGE_TOKENS} tokens, got {layout.page_tokens}")
    found = (layout.num_layers, layout.kv_heads, layout.head_dim)
    if found != (shape.num_layers, shape.kv_heads, shape.head_dim):
        raise ValueError(f"the page layout {layout.describe()} is not that of the decoder")
