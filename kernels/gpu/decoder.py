"""The decoder on the card: weights and passes of one model, as `CpuDecoder` on the CPU.

A pass takes decode and prefill rows mixed. Rows that are alone in their sequence decode: their attention is split along
the sequence, and a pass of such rows only runs as a CUDA graph. The others are chunks, and go through `extend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierd.kernels.gpu.angles import AngleTables
from tierd.kernels.gpu.attention import masses_of
from tierd.kernels.gpu.batch import Addresses, Arranged, arrange, check_addresses, checked_copies, ranges_of
from tierd.kernels.gpu.choice import Asking, Choices, Choose, Choosing, check_tables
from tierd.kernels.gpu.graphs import Capturer, Graphs, GraphStats
from tierd.kernels.gpu.inputs import Inputs, Sizes
from tierd.kernels.gpu.launch import on_host, wait_for
from tierd.kernels.gpu.layers import Ends, GpuLayer
from tierd.kernels.gpu.mixture import Bringing, CardExpertSource
from tierd.kernels.gpu.pages import base_of, copy_layout
from tierd.kernels.gpu.passes import Network, Passed
from tierd.kernels.gpu.sample import plan_sample
from tierd.kernels.gpu.warm import warm_up
from tierd.kernels.layout import PageLayout
from tierd.kernels.rows import Exact, Ints

if TYPE_CHECKING:
    from tierd.kernels.cpu.step import Angles, DecoderShape

Floats = NDArray[np.float32]


class Draws(NamedTuple):
    """How each row of logits is drawn from, see `kernels.gpu.sample`; vectors [logits]."""

    temperatures: Floats
    top_ks: Ints
    top_ps: Floats
    min_ps: Floats
    draws: Floats


@dataclass(slots=True)
class _Open:
    """A pass between `start` and `finish`."""

    arranged: Arranged
    inputs: Inputs
    page_offsets: Ints
    branch: Tensor  # what the last block adds to the residual
    residual: Tensor | None
    next_layer: int = 0


class GpuDecoder:
    """A decoder whose weights lie on a card. `max_rows` bounds the rows, and the logits, of a pass.

    Args:
        layers, ends: on one device. A layer that is None is handed in for each pass, which goes layer by layer then.
        layout: of the pages; activations have `dtype`, which for quantized matrices is fp16 or bf16.
        cos, sin: fp32 [context, head_dim / 2].
        capture: captures steps; None runs all of them eagerly.
        stream: that everything is launched on; None for the caller's current one.
        note: told what a user should know.
        embed_rows: the embedding's rows for tokens, fp32 [tokens, hidden], where it is not on the device.
        far: angles of positions beyond the tables, for rows with sinks; None: there are none.

    Threading: one pass at a time, all from one thread. Raises ValueError for shapes that don't fit.
    """

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[GpuLayer | None],
        ends: Ends,
        layout: PageLayout,
        cos: Floats,
        sin: Floats,
        max_rows: int,
        dtype: torch.dtype,
        *,
        capture: Capturer | None = None,
        stream: torch.cuda.Stream | None = None,
        note: Callable[[str], None] = lambda text: None,
        embed_rows: Callable[[Ints], Floats] | None = None,
        far: Angles | None = None,
    ) -> None:
        if (ends.embed is None) != (embed_rows is not None):
            raise ValueError("the embedding lies on the card, or its rows are given: one of them")
        if (layout.num_layers, layout.kv_heads, layout.head_dim) != (len(layers), shape.kv_heads, shape.head_dim):
            raise ValueError(f"the page layout {layout.describe()} is not that of the decoder")
        if cos.ndim != 2 or sin.shape != cos.shape or cos.shape[1] != shape.head_dim // 2 or not len(cos):
            raise ValueError(f"cos and sin must be [context, {shape.head_dim // 2}], got {cos.shape} and {sin.shape}")
        self.shape, self.layout, self.max_rows, self.context = shape, layout, max_rows, len(cos)
        self._layers, self._dtype = list(layers), dtype
        self.device = ends.final_norm.device
        self._base = base_of(layout, self.device)
        self.copy_layout = copy_layout(layout, dtype)
        self._angles = AngleTables(cos, sin, max_rows, far, self.device)
        self._network = Network(shape, ends, layout, self._angles, dtype)
        self._embed_rows, self._capture, self._note = embed_rows, capture, note
        self._graphs: Graphs[Passed] = Graphs(self._inputs, capture, note)
        self._stream = stream
        self._open: _Open | None = None
        self._last: tuple[Arranged, Passed] | None = None

    @property
    def streams(self) -> bool:
        """Whether some layer is handed in, or some expert brought."""
        return any(layer is None or not layer.is_whole for layer in self._layers)

    @property
    def has_far(self) -> bool:
        """Whether rows may stand beyond the tables."""
        return self._angles.has_far

    @property
    def graph_stats(self) -> GraphStats:
        """How decode steps have run."""
        return self._graphs.stats

    def forward(
        self, memories: Sequence[Any], tokens: Ints, positions: Ints, row_seq: Ints, pages: Addresses,
        page_offsets: Ints, logit_rows: Ints, bounds: Ints | None = None, between: Callable[[], None] | None = None,
        observed: Ints | None = None, exact: Exact | None = None, choices: Choices | None = None,
    ) -> Floats:  # fmt: skip
        """One pass over the rows: writes their keys and values into the pages, returns logits [len(logit_rows), vocab].

        As `CpuDecoder.forward`, with these differences: rows of a sequence follow each other in position, records start
        at multiples of 64 bytes, and `memories` are arrays or ranges (`address`, `nbytes`) that the card can read and
        write. Returns when the card is done. `choices` says which rows read what they choose, layer by layer; they are
        not asked between layers. Raises ValueError, before any memory is touched, for what doesn't fit.
        """
        self._require_all()
        if between is not None:
            self.start(tokens, positions, row_seq, page_offsets, logit_rows, None, bounds, observed, exact)
            for layer in range(len(self._layers)):
                between()
                self.layer(layer, memories, pages)
            return self.finish()
        ranges = ranges_of(memories)
        arranged = self._arranged(tokens, positions, row_seq, page_offsets, logit_rows, bounds, observed, exact)
        check_addresses(pages, page_offsets, ranges, self.layout, range(len(self._layers)))
        if choices is not None:
            check_tables(choices, ranges, self.layout)
        self._open = None
        with torch.cuda.stream(self._stream):
            return on_host(self._pass(arranged, pages, choices))

    def draw(
        self, memories: Sequence[Any], tokens: Ints, positions: Ints, row_seq: Ints, pages: Addresses,
        page_offsets: Ints, logit_rows: Ints, draws: Draws,
    ) -> Ints:  # fmt: skip
        """As `forward`, and draws on the card: a token for each row of logits, -1 where they are not finite."""
        self._require_all()
        arranged = self._arranged(tokens, positions, row_seq, page_offsets, logit_rows, None, None, None)
        check_addresses(pages, page_offsets, ranges_of(memories), self.layout, range(len(self._layers)))
        self._open = None
        with torch.cuda.stream(self._stream):
            logits = self._pass(arranged, pages)
            how = (torch.from_numpy(np.ascontiguousarray(values)).to(self.device) for values in draws)
            drawn: Ints = plan_sample(logits, *how).run().cpu().numpy()
            return drawn

    def start(
        self, tokens: Ints, positions: Ints, row_seq: Ints, page_offsets: Ints, logit_rows: Ints, rows: None = None,
        bounds: Ints | None = None, observed: Ints | None = None, exact: Exact | None = None,
    ) -> None:  # fmt: skip
        """Opens a pass that is computed layer by layer. Arguments and errors as for `forward`."""
        if rows is not None:
            raise ValueError("the card finds the rows of the embedding itself: none are handed in")
        arranged = self._arranged(tokens, positions, row_seq, page_offsets, logit_rows, bounds, observed, exact)
        with torch.cuda.stream(self._stream):
            inputs = self._inputs(Sizes.of(arranged))
            self._load(inputs, arranged, np.zeros(int(page_offsets[-1]), np.int64))
            self._open = _Open(arranged, inputs, page_offsets.copy(), self._network.embed(inputs), None)
            wait_for(self.device)

    def layer(
        self, index: int, memories: Sequence[Any], pages: Addresses, placed: GpuLayer | None = None,
        experts: CardExpertSource | None = None, choose: Choose | None = None,
    ) -> None:  # fmt: skip
        """Computes layer `index` of the open pass, whose slices of the pages lie there; `placed` where the decoder has
        no such layer. Returns when it is computed: the memory may then be filled with what the next layer needs.
        `choose` as there, but queries stay on the card, not scaled, by row. Raises ValueError as `CpuDecoder.layer`.
        """
        opened = self._opened()
        if index != opened.next_layer or index >= len(self._layers):
            raise ValueError(f"layer {index} of {len(self._layers)} after {opened.next_layer} layers")
        check_addresses(pages, opened.page_offsets, ranges_of(memories), self.layout, range(index, index + 1))
        layer = self._layers[index] if placed is None else placed
        if layer is None:
            raise ValueError(f"layer {index} is not on the card, and none was handed in")

        opened.next_layer += 1
        asking = None
        if choose is not None:
            asking = Asking(choose, opened.arranged, opened.inputs, opened.page_offsets, self.layout)
        with torch.cuda.stream(self._stream):
            opened.inputs.load_pages(opened.arranged, pages)
            opened.branch, opened.residual = self._network.layer(
                index, layer, opened.branch, opened.residual, opened.inputs, asking,
                None if experts is None else Bringing(experts, self._following(index)),
            )
            wait_for(self.device)

    def finish(self, head: Iterable[Any] | None = None) -> Floats:
        """Closes the open pass: logits [len(logit_rows), vocab]. Raises ValueError before its last layer is done."""
        opened = self._opened()
        if head is not None:
            raise ValueError("the head lies on the card: none is handed in")
        if opened.next_layer != len(self._layers):
            raise ValueError(f"the open pass has {opened.next_layer} of {len(self._layers)} layers")
        self._open = None
        with torch.cuda.stream(self._stream):
            passed = self._network.head(opened.branch, opened.residual, opened.inputs)
            self._last = (opened.arranged, passed)
            return on_host(passed.logits)

    def hidden(self, rows: Ints) -> Floats:
        """Final hidden states [len(rows), hidden] of rows of the last pass, which is complete: what the head takes."""
        if self._last is None:
            raise ValueError("no pass is complete")
        arranged, (_, branch, residual, _) = self._last
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(arranged.tokens):
            raise ValueError(f"the last pass has {len(arranged.tokens)} rows")
        with torch.cuda.stream(self._stream):
            at = torch.from_numpy(arranged.new_rows[rows].astype(np.int64)).to(self.device)
            return on_host(self._network.normed(branch, residual, at).float())

    def masses(self) -> NDArray[np.float64]:
        """As `CpuDecoder.masses`: of the observed rows of the last pass. Raises ValueError where none was observed."""
        if self._last is None or not len(self._last[0].observed.rows):
            raise ValueError("no row of the last pass was observed")
        arranged, passed = self._last
        with torch.cuda.stream(self._stream):
            return masses_of(passed.masses, arranged.observed, self.shape.heads // self.shape.kv_heads)

    def warm_up(
        self, progress: Callable[[int, int], None], place: Callable[[int], GpuLayer | None] = lambda index: None,
        copies: bool = False, experts: Callable[[], CardExpertSource | None] = lambda: None,
    ) -> None:  # fmt: skip
        """Compiles what passes launch, on a page of its own, see `warm.py`. `place` gives the layers that the decoder
        does not have, `experts` who brings those of a layer; `copies`: pages will have exact ones."""
        warm_up(self, progress, place, copies, experts)

    def set_layer(self, index: int, layer: GpuLayer | None) -> None:
        """Between passes: a layer lies there from now on; None: it is handed in. What was captured is forgotten."""
        self._layers[index] = layer
        self._graphs = Graphs(self._inputs, self._capture, self._note)

    def close(self) -> None:
        """Lets go of everything on the card. Passes raise ValueError afterwards. Idempotent."""
        self._layers = []
        self._graphs = Graphs(self._inputs, None, lambda text: None)
        self._open = self._last = None

    # -- one pass ---------------------------------------------------------------------------------------------------

    def _arranged(
        self, tokens: Ints, positions: Ints, row_seq: Ints, page_offsets: Ints, logit_rows: Ints,
        bounds: Ints | None, observed: Ints | None, exact: Exact | None,
    ) -> Arranged:  # fmt: skip
        if not self._layers:
            raise ValueError("the decoder is closed")
        return arrange(
            tokens, positions, row_seq, page_offsets, logit_rows, self.layout.page_tokens, self.shape.vocab,
            self.context, self.max_rows, bounds, self.has_far, observed,
            checked_copies(exact, page_offsets, bounds, self.copy_layout),
        )  # fmt: skip

    def _require_all(self) -> None:
        missing = [index for index, layer in enumerate(self._layers) if layer is None or not layer.is_whole]
        if missing:
            raise ValueError(f"layers {missing}, or experts of them, are streamed: compute the pass layer by layer")

    def _inputs(self, sizes: Sizes) -> Inputs:
        width = self.shape.hidden if self._embed_rows is not None else 0
        return Inputs(sizes, self._base, self.layout.kv_heads, width, self._dtype, self.copy_layout)

    def _load(self, inputs: Inputs, arranged: Arranged, pages: Addresses) -> None:
        inputs.load(arranged, pages)
        self._angles.load(arranged.far)
        if self._embed_rows is not None:
            inputs.load_rows(torch.from_numpy(self._embed_rows(arranged.tokens)))

    def _pass(self, arranged: Arranged, pages: Addresses, choices: Choices | None = None) -> Tensor:
        """Logits, on the card: [logits, vocab] in the order of the caller's."""
        bucket = None
        if choices is None and arranged.decode_rows == len(arranged.tokens):
            is_observed = arranged.observed.max_pages > 0
            sizes = (arranged.decode_rows, arranged.max_decode_pages, arranged.sinks.max_pages)
            bucket = Graphs.bucket(*sizes, is_observed, bool(len(arranged.copies)))
        if bucket is None:
            inputs = self._inputs(Sizes.of(arranged))
            self._load(inputs, arranged, pages)
            passed = self._compute(inputs, None if choices is None else Choosing(choices, arranged, inputs))
            self._last = (arranged, passed)
            return passed.logits
        inputs = self._graphs.inputs(bucket)
        every = arranged.with_logits(np.arange(arranged.decode_rows, dtype=np.int32))
        self._load(inputs, every, pages)
        passed = self._graphs.run(bucket, self._compute)
        self._last = (arranged, passed)
        rows = arranged.logit_rows
        if np.array_equal(rows, every.logit_rows):
            return passed.logits[: len(rows)]
        return passed.logits[torch.from_numpy(rows.astype(np.int64)).to(self.device)]

    def _compute(self, inputs: Inputs, choosing: Choosing | None = None) -> Passed:
        branch, residual = self._network.embed(inputs), None
        for index, layer in enumerate(self._layers):
            assert layer is not None
            branch, residual = self._network.layer(index, layer, branch, residual, inputs, choosing)
            if choosing is not None:
                choosing.learn(index)
        return self._network.head(branch, residual, inputs)

    def _following(self, index: int) -> GpuLayer | None:
        """The layer behind one, if it is on the card."""
        return self._layers[index + 1] if index + 1 < len(self._layers) else None

    def _opened(self) -> _Open:
        if self._open is None:
            raise ValueError("no pass is open: start one first")
        return self._open
