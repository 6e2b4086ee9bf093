"""The rows of a pass as the card's kernels want them: those that decode first, then the chunks; all checked.

Plain numpy: nothing here needs a card. Sequences with one row are *decode* rows, whose attention is split along the
sequence; those with more are chunks, for `extend`. Rows with a bound (`kernels.rows.Bound`) count their tokens from
where the pages begin that they are given; sinks are pages of their own, which rows share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.kernels.layout import PAGE_TOKENS, PageLayout
from tierd.kernels.rows import Batch, Exact, Ints, Placed, check_exact, check_observed, place

Addresses = NDArray[np.int64]
_NOBODY, _NOWHERE = np.empty(0, np.int32), np.empty(0, np.int64)
ALIGN_BYTES = 64  # of a record's address: what the kernels' vector loads are told


@dataclass(frozen=True, slots=True)
class Range:
    """Memory in which pages may lie."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Sinks:
    """The sinks that the rows of a pass see, in their new order; all empty where nobody sees any."""

    offsets: Ints  # [R] where the pages of each row's begin
    lengths: Ints  # [R] tokens, 0 for a row that sees none
    seen_from: Ints  # [R] the position that a row's query is turned back to for them, 0 for a row that sees none
    places: NDArray[np.int64]  # of the caller's pages, those of a sequence once

    @property
    def max_pages(self) -> int:
        """Of one row."""
        return -(-int(self.lengths.max(initial=0)) // PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Observed:
    """O rows of a pass of which it is to be known how much they look at each page. Every row has its pages for itself,
    end to end: what is found lies there."""

    rows: Ints  # [O] in the new order
    offsets: Ints  # [O + 1]
    lengths: Ints  # [O] tokens that it sees
    places: NDArray[np.int64]  # of the caller's pages, [observed pages]

    @property
    def max_pages(self) -> int:
        """Of one row."""
        return int(np.diff(self.offsets).max(initial=0))


@dataclass(frozen=True, slots=True)
class Arranged:
    """One pass. R rows in a new order, D of them decode, C chunks, S spans, L logits.

    Pages of decode rows and of chunks lie end to end in their own arrays, as `places` says for those of the caller.
    """

    tokens: Ints  # [R]
    positions: Ints  # [R] in the text
    angles: Ints  # [R] of the tables: which row has a row's angles; those of `far` lie behind the others
    windows: Ints  # [R] that it has beside its layer's, 0 for none
    decode_offsets: Ints  # [D + 1]
    decode_lengths: Ints  # [D] tokens it is given, its own included
    chunk_offsets: Ints  # [C + 1]
    chunk_lengths: Ints  # [C] tokens that it is given before the chunk
    chunk_rows: Ints  # [C + 1] first row of each, counted from row D
    decode_places: NDArray[np.int64]  # of the caller's pages, [decode pages]
    chunk_places: NDArray[np.int64]  # [chunk pages]
    span_places: NDArray[np.int64]  # [S]
    spans: Ints  # [S, 3] first row, first token in its page, tokens
    logit_rows: Ints  # [L] in the new order
    new_rows: Ints  # [R] where each row of the caller's went
    sinks: Sinks
    far: Ints  # positions beyond the tables
    observed: Observed
    copies: Addresses  # exact ones of the caller's pages, 0 for one that has none; empty where all have none

    def with_logits(self, rows: Ints) -> Arranged:
        """The same pass with logits of other rows."""
        return replace(self, logit_rows=rows)

    @property
    def decode_rows(self) -> int:
        """D."""
        return len(self.decode_lengths)

    @property
    def max_decode_pages(self) -> int:
        """Of one decode row."""
        return int(np.diff(self.decode_offsets).max(initial=0))

    @property
    def max_chunk_pages(self) -> int:
        """Of one chunk."""
        return int(np.diff(self.chunk_offsets).max(initial=0))

    @property
    def max_chunk_rows(self) -> int:
        """Of one chunk."""
        return int(np.diff(self.chunk_rows).max(initial=0))


def arrange(
    tokens: Ints, positions: Ints, row_seq: Ints, page_offsets: Ints, logit_rows: Ints, page_tokens: int,
    vocab: int, context: int, max_rows: int, bounds: Ints | None = None, has_far: bool = False,
    observed: Ints | None = None, copies: Addresses | None = None,
) -> Arranged:  # fmt: skip
    """Arranges a pass, see `GpuDecoder.forward`. Raises ValueError for rows that don't fit one another or the model."""
    placed = place(
        Batch(tokens, positions, row_seq, page_offsets, logit_rows), bounds, vocab, context, max_rows, has_far
    )
    first = np.flatnonzero(np.concatenate([[True], row_seq[1:] != row_seq[:-1]]))
    counts = np.diff(first, append=len(tokens))
    steps = np.arange(len(tokens)) - np.repeat(first, counts)
    if (positions != np.repeat(positions[first], counts) + steps).any():
        raise ValueError("the rows of a sequence must follow each other in position")
    alone = counts == 1
    turn = np.concatenate([np.flatnonzero(alone), np.flatnonzero(~alone)])  # groups in their new order
    decode_count = int(alone.sum())
    counts, first, sequence = counts[turn], first[turn], row_seq[first[turn]]
    starts = np.concatenate([[0], np.cumsum(counts)])  # new first row of each group
    order = np.repeat(first - starts[:-1], counts) + np.arange(len(tokens))
    new_row = np.empty(len(tokens), np.int32)
    new_row[order] = np.arange(len(tokens), dtype=np.int32)
    begin, tables = placed.batch.positions[first], placed.batch.page_offsets[sequence]
    held = np.where(counts == 1, begin // page_tokens + 1, -(-begin // page_tokens))  # pages that are read
    decode, chunks = slice(0, decode_count), slice(decode_count, None)
    spans, span_places = _spans(starts[:-1], begin, counts, tables, page_tokens)
    return Arranged(
        tokens=tokens[order],
        positions=positions[order],
        angles=_angles(placed, context)[order],
        windows=np.zeros(len(order), np.int32) if placed.records is None else placed.records[order, 0],
        decode_offsets=_ends(held[decode]),
        decode_lengths=(begin[decode] + 1).astype(np.int32),
        chunk_offsets=_ends(held[chunks]),
        chunk_lengths=begin[chunks].astype(np.int32),
        chunk_rows=_ends(counts[chunks]),
        decode_places=_places(tables[decode], held[decode]),
        chunk_places=_places(tables[chunks], held[chunks]),
        span_places=span_places,
        spans=spans,
        logit_rows=new_row[logit_rows],
        new_rows=new_row,
        sinks=_sinks(placed, order),
        far=_NOBODY if placed.far is None else placed.far,
        observed=_observed(_NOBODY if observed is None else observed, placed, new_row),
        copies=_NOWHERE if copies is None or not copies.any() else copies.copy(),
    )


def check_addresses(
    pages: Addresses, page_offsets: Ints, memories: Sequence[Range], layout: PageLayout, layers: range
) -> None:
    """Raises ValueError unless the slices of `layers` of every page lie, aligned, within one of the memories."""
    if pages.dtype != np.int64 or pages.ndim != 1 or page_offsets[-1] > len(pages):
        raise ValueError(f"page_offsets speak of {page_offsets[-1]} pages, got {pages.dtype} {pages.shape}")
    slices = pages.view(np.uint64) + np.uint64(layers.start * layout.layer_bytes)
    size = len(layers) * layout.layer_bytes
    inside = np.zeros(len(slices), np.bool_)
    for memory in memories:
        if memory.nbytes >= size:
            inside |= slices - np.uint64(memory.address) <= np.uint64(memory.nbytes - size)
    inside &= slices % np.uint64(ALIGN_BYTES) == 0
    if not inside.all():
        page = int(np.argmin(inside))
        raise ValueError(
            f"page {page}: {size} bytes at address {slices[page]} do not lie, aligned to {ALIGN_BYTES}, within one of "
            "the memories that the card reads"
        )


def checked_copies(
    exact: Exact | None, page_offsets: Ints, bounds: Ints | None, layout: PageLayout | None
) -> Addresses | None:
    """The addresses of the exact copies of a pass, records of `layout`. Raises ValueError for those that don't fit."""
    if exact is None:
        return None
    if layout is None:
        raise ValueError("pages that are exact have no exact copies")
    check_exact(exact, page_offsets, bounds)
    there = exact.pages[exact.pages != 0]
    check_addresses(there, np.zeros(1, np.int32), ranges_of([exact.memory]), layout, range(layout.num_layers))
    return exact.pages


def range_of(memory: Any) -> Range:
    """The range of a row of an arena's memory: an array, or the name of memory on the card (`address`, `nbytes`)."""
    if isinstance(memory, np.ndarray):
        if not memory.flags.c_contiguous:
            raise ValueError(f"memories must be contiguous, got strides {memory.strides}")
        return Range(int(memory.ctypes.data), memory.nbytes)
    return Range(memory.address, memory.nbytes)


def ranges_of(memories: Sequence[Any]) -> list[Range]:
    """Of several, see `range_of`."""
    return [range_of(memory) for memory in memories]


def _angles(placed: Placed, context: int) -> Ints:
    """The row of the tables of each row, those beyond them counted on."""
    if placed.records is None:
        return placed.batch.positions
    angles = placed.records[:, 4]
    return np.where(angles < 0, context - 1 - angles, angles)


def _sinks(placed: Placed, order: NDArray[Any]) -> Sinks:
    if placed.records is None or placed.sink_offsets is None or not placed.records[:, 1].any():
        return Sinks(_NOBODY, _NOBODY, _NOBODY, np.empty(0, np.int64))
    sequence, lengths = placed.batch.row_seq[order], placed.records[order, 1]
    held = np.zeros(len(placed.sink_offsets), np.int64)
    np.maximum.at(held, sequence, -(-lengths // PAGE_TOKENS))
    starts = (np.cumsum(held) - held).astype(np.int32)
    # Of rows without sinks it is computed, too: their angles must be there, whatever their window is.
    seen_from = np.where(lengths > 0, placed.records[order, 2], 0)
    return Sinks(starts[sequence], lengths, seen_from, _places(placed.sink_offsets, held))


def _observed(rows: Ints, placed: Placed, new_row: Ints) -> Observed:
    check_observed(rows, placed)
    lengths = placed.batch.positions[rows] + 1
    held = -(-lengths // PAGE_TOKENS)
    places = _places(placed.batch.page_offsets[placed.batch.row_seq[rows]], held)
    return Observed(new_row[rows], _ends(held), lengths, places)


def _spans(
    rows: NDArray[Any], begin: NDArray[Any], counts: NDArray[Any], tables: NDArray[Any], page_tokens: int
) -> tuple[Ints, NDArray[np.int64]]:
    """Neighbouring rows of one page: [S, 3], and the place of its page among the caller's."""
    first_page, last_page = begin // page_tokens, (begin + counts - 1) // page_tokens
    pages_each = last_page - first_page + 1
    group = np.repeat(np.arange(len(begin)), pages_each)
    page = np.arange(len(group)) - np.repeat(np.cumsum(pages_each) - pages_each, pages_each) + first_page[group]
    low = np.maximum(page * page_tokens, begin[group])
    high = np.minimum((page + 1) * page_tokens, begin[group] + counts[group])
    spans = np.stack([rows[group] + low - begin[group], low - page * page_tokens, high - low], 1).astype(np.int32)
    return spans, tables[group].astype(np.int64) + page


def _places(tables: NDArray[Any], held: NDArray[Any]) -> NDArray[np.int64]:
    """Where the first `held` pages of each table lie, end to end."""
    return np.repeat(tables - (np.cumsum(held) - held), held) + np.arange(int(held.sum()), dtype=np.int64)


def _ends(counts: NDArray[Any]) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
