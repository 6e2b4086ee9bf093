"""Runs batches: the decoder and the memory its pages lie in, and the pages and weights that are streamed past it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from tierd.daemon.engine.batch import Addresses, Batch, Ints
from tierd.daemon.engine.heavy import Masses
from tierd.daemon.engine.model.weights_status import WEIGHTS_TIMEOUT_S
from tierd.daemon.engine.selection import CardChoosing, Choosing, Selection, Wanted
from tierd.daemon.errors import Unsupported
from tierd.kernels.layout import PageLayout
from tierd.kernels.rows import Exact
from tierd.tiers.page import PageKey

if TYPE_CHECKING:
    from tierd.daemon.engine.model.held import HeldWeights
    from tierd.kernels.cpu.mixture import ExpertSource
    from tierd.kernels.cpu.step import Choose
    from tierd.kernels.cpu.weights import Part, PlacedLayer, Rows
    from tierd.tiers.picking import Picker
    from tierd.tiers.staging import Flow, Staging

Logits = npt.NDArray[np.float32]
Hidden = npt.NDArray[np.float32]
Memory = Any  # what pages lie in, as the decoder takes it: an array, or a range of addresses on a card

# Reading one layer of all streamed pages. A disk that needs longer has stopped.
SECTION_TIMEOUT_S = 30.0


class GaveWay(Exception):
    """A pass was dropped between two layers, for somebody who waits: it counts for nothing."""


class Decoder(Protocol):
    """What the runner needs of `kernels.cpu.step.CpuDecoder`."""

    def forward(
        self,
        memories: Sequence[Memory],
        tokens: Ints,
        positions: Ints,
        row_seq: Ints,
        pages: Addresses,
        page_offsets: Ints,
        logit_rows: Ints,
        *,
        between: Callable[[], None] | None = None,
    ) -> Logits: ...

    def start(self, tokens: Ints, positions: Ints, row_seq: Ints, page_offsets: Ints, logit_rows: Ints) -> None: ...

    def layer(self, index: int, memories: Sequence[Memory], pages: Addresses) -> None: ...

    def finish(self) -> Logits: ...

    def hidden(self, rows: Ints) -> Hidden: ...


class StreamedDecoder(Decoder, Protocol):
    """One that takes weights as they come, and whose rows may see less than all (`kernels.rows.Bound`)."""

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
    ) -> Logits: ...

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
    ) -> None: ...

    def layer(
        self,
        index: int,
        memories: Sequence[Memory],
        pages: Addresses,
        placed: PlacedLayer | None = None,
        experts: ExpertSource | None = None,
        choose: Choose | None = None,
    ) -> None: ...

    def finish(self, head: Iterable[Part] | None = None) -> Logits: ...

    def masses(self) -> Masses: ...


class ChoosingDecoder(Protocol):
    """One that chooses by itself where all pages lie in memory that it reads: see `kernels.gpu.decoder.GpuDecoder`."""

    def forward(
        self,
        memories: Sequence[Memory],
        tokens: Ints,
        positions: Ints,
        row_seq: Ints,
        pages: Addresses,
        page_offsets: Ints,
        logit_rows: Ints,
        bounds: Ints | None,
        between: None,
        observed: Ints | None,
        exact: Exact | None,
        choices: CardChoosing,
    ) -> Logits: ...


@dataclass(slots=True)
class _Pages:
    """The pages of one step, all of them in memory."""

    memories: tuple[Memory, ...]
    pages: Addresses

    def at(self, layer: int, layout: PageLayout, deadline_s: float) -> Addresses:
        """Where the records start, or would start, of which this layer's slices are there."""
        return self.pages


@dataclass(slots=True)
class _StreamedPages(_Pages):
    """The pages of one step, some of them streamed: those at `places` are pages `numbers` of the flow."""

    flow: Flow
    numbers: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]

    def at(self, layer: int, layout: PageLayout, deadline_s: float) -> Addresses:
        """Waits for the slices. Raises StagingLost."""
        slices = self.flow.section(layer, deadline_s)
        self.pages[self.places] = slices[self.numbers] - layer * layout.layer_bytes
        return self.pages


class Runner:
    """Owns the decoder. Threading: step thread only.

    Args:
        memories: the arenas that pages lie in.
        staging: reads streamed pages; None where there is no store.
        weights: those that are not in memory come from it; None when the decoder has all of them.
        selections: makes what a sequence needs whose rows choose their pages; None where there is no such thing.
        picker: reads pages that were chosen and are in no memory; None where there is no store.
        copies: the memory that exact copies of pages lie in; None where there are none.
        overlap: False reads each layer when it is needed, and not ahead: slower, and the same bits.
        clock: that of the staging.
    """

    def __init__(
        self,
        decoder: Decoder,
        layout: PageLayout,
        memories: Sequence[Memory],
        staging: Staging | None = None,
        *,
        weights: HeldWeights | None = None,
        selections: Callable[[], Selection] | None = None,
        picker: Picker | None = None,
        copies: Memory | None = None,
        overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decoder = decoder
        self._layout = layout
        self._memories = tuple(memories)
        self._staging = staging
        self.weights = weights
        self._selections = selections
        self._picker = picker
        self._copies = copies
        self._overlap = overlap
        self._clock = clock

    def run(
        self, batch: Batch, streamed: Sequence[PageKey] = (), gives_way: Callable[[], bool] | None = None,
        wanted: Sequence[Wanted] = (),
    ) -> Logits:  # fmt: skip
        """Compute all rows, write their keys and values into their pages; logits `[L, vocab]`.

        `streamed` names the pages of the batch whose address is 0, in order. `gives_way` is asked before each layer
        of a pass for which everything is in memory: True drops it. `wanted`: sequences whose rows choose their pages,
        or will. Raises GaveWay when it was dropped, StagingLost or WeightsLost when some pages or weights could not be
        read: each time the step counts for nothing.
        """
        weights = self.weights
        between = partial(_check, gives_way) if gives_way is not None else None
        choosing = Choosing(batch, wanted, self._picker, self._layout.layer_bytes) if wanted else None
        own = cast("StreamedDecoder", self._decoder)
        if streamed or self.reads_weights:
            with contextlib.ExitStack() as stack:
                pages = self._open(stack, batch, streamed)
                if weights is None or not weights.streams:
                    return self._run_layers(batch, pages, choosing)
                return self._run_weights(batch, pages, weights, choosing)
        choices = choosing.on_card() if choosing is not None and between is None else None
        if choosing is not None and choices is None:
            return self._run_layers(batch, _Pages(self._memories, batch.pages), choosing, between)
        arguments = (
            self._memories,
            batch.tokens,
            batch.positions,
            batch.row_seq,
            batch.pages,
            batch.page_offsets,
            batch.logit_rows,
        )
        if choices is not None:
            copies = None if batch.exact is None or self._copies is None else Exact(batch.exact, self._copies)
            choosing_decoder = cast("ChoosingDecoder", own)
            return choosing_decoder.forward(
                *arguments, batch.bounds, None, batch.observed, copies, choices
            )
        if batch.exact is not None and self._copies is not None:
            copies = Exact(batch.exact, self._copies)
            return own.forward(*arguments, batch.bounds, between, batch.observed, copies)
        if batch.bounds is not None or batch.observed is not None:
            return own.forward(*arguments, batch.bounds, between, batch.observed)
        return self._decoder.forward(*arguments, between=between)

    def hidden(self, rows: Ints) -> Hidden:
        """Hidden states `[len(rows), hidden]` of rows of the batch that was run last, after the final norm."""
        return self._decoder.hidden(rows)

    def masses(self) -> Masses:
        """How much the observed rows of the batch that was run last, in its order, look at the pages they see."""
        return cast("StreamedDecoder", self._decoder).masses()

    def new_selection(self) -> Selection:
        """What a sequence needs whose rows choose their pages. Raises Unsupported where no rows can."""
        if self._selections is None:
            raise Unsupported("pages can't be chosen here", hint="leave kv_mode out", param="kv_mode")
        return self._selections()

    @property
    def reads_weights(self) -> bool:
        """Whether each step reads weights."""
        return self.weights is not None and self.weights.streams

    @property
    def picked_bytes(self) -> int:
        """What was read of the store for rows that had chosen it, since the start."""
        return self._picker.read_bytes if self._picker is not None else 0

    @property
    def streaming(self) -> dict[str, int | float]:
        """What was streamed since the start, and the memory that it takes now."""
        found = self._staging.statistics()._asdict() if self._staging is not None else {}
        if self._picker is not None and found:
            found |= {"read_bytes": found["read_bytes"] + self.picked_bytes, "picked_bytes": self.picked_bytes}
        return found

    def rest(self) -> None:
        """No step follows soon: gives the memory of streamed pages back."""
        if self._staging is not None:
            self._staging.release()
        if self._picker is not None:
            self._picker.release()

    def _open(self, stack: contextlib.ExitStack, batch: Batch, streamed: Sequence[PageKey]) -> _Pages:
        """The pages of a step as each layer finds them."""
        if not streamed:
            return _Pages(self._memories, batch.pages)
        if self._staging is None:
            raise AssertionError(f"{len(streamed)} pages are to be streamed without a store")
        # Sequences that share a prefix share its pages: each is read once.
        order = {key: number for number, key in enumerate(dict.fromkeys(streamed))}
        flow = stack.enter_context(self._staging.open(list(order), overlap=self._overlap))
        numbers = np.array([order[key] for key in streamed])
        places = np.flatnonzero(batch.pages == 0)
        return _StreamedPages((*self._memories, *flow.memories), batch.pages.copy(), flow, numbers, places)

    def _start(self, batch: Batch, rows: Rows | None = None) -> None:
        """Opens a pass by layers. A decoder is handed what it needs to know of: embeddings, bounds, who is observed."""
        arguments = (batch.tokens, batch.positions, batch.row_seq, batch.page_offsets, batch.logit_rows)
        own = cast("StreamedDecoder", self._decoder)
        if batch.exact is not None and self._copies is not None:
            own.start(*arguments, rows, batch.bounds, batch.observed, Exact(batch.exact, self._copies))
        elif rows is not None or batch.bounds is not None or batch.observed is not None:
            own.start(*arguments, rows, batch.bounds, batch.observed)
        else:
            self._decoder.start(*arguments)

    def _run_layers(
        self, batch: Batch, pages: _Pages, choosing: Choosing | None, between: Callable[[], None] | None = None
    ) -> Logits:
        """The step layer by layer: pages that are streamed for one are read while those before it are computed.

        `between` is called before each layer, and may raise.
        """
        decoder = self._decoder
        self._start(batch)
        for layer in range(self._layout.num_layers):
            if between is not None:
                between()
            where = pages.at(layer, self._layout, self._clock() + SECTION_TIMEOUT_S)
            if choosing is None:
                decoder.layer(layer, pages.memories, where)
            else:
                choose = self._chooser(choosing, layer, pages.memories, where)
                cast("StreamedDecoder", decoder).layer(layer, pages.memories, where, choose=choose)
                choosing.learn(layer, where)
        return decoder.finish()

    def _run_weights(
        self, batch: Batch, pages: _Pages, weights: HeldWeights, choosing: Choosing | None
    ) -> Logits:
        """The same where weights are streamed, too."""
        decoder = cast("StreamedDecoder", self._decoder)
        rows = weights.open(batch.tokens, bool(len(batch.logit_rows)), self._clock() + WEIGHTS_TIMEOUT_S)
        self._start(batch, rows)
        for layer in range(self._layout.num_layers):
            where = pages.at(layer, self._layout, self._clock() + SECTION_TIMEOUT_S)
            deadline_s = self._clock() + WEIGHTS_TIMEOUT_S
            placed = weights.layer(layer, deadline_s)
            experts = weights.experts(deadline_s)
            if choosing is None:
                decoder.layer(layer, pages.memories, where, placed, experts)
            else:
                choose = self._chooser(choosing, layer, pages.memories, where)
                decoder.layer(layer, pages.memories, where, placed, experts, choose)
                choosing.learn(layer, where)
        logits = decoder.finish(weights.head_parts(self._clock() + WEIGHTS_TIMEOUT_S))
        weights.end()
        return logits

    def _chooser(
        self, choosing: Choosing, layer: int, memories: Sequence[Memory], pages: Addresses
    ) -> Choose | None:
        """What the decoder asks in this layer; None where all rows know their pages."""
        if not choosing.chooses:
            return None
        deadline_s = self._clock() + SECTION_TIMEOUT_S
        return partial(choosing.choose, layer, deadline_s, memories, pages)


def _check(gives_way: Callable[[], bool]) -> None:
    """Raises GaveWay when a pass is to be dropped."""
    if gives_way():
        raise GaveWay
