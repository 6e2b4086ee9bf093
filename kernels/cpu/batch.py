"""The rows of one forward pass: where their pages must lie, and how attention over them is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tierd.kernels.cpu.attention import SEGMENT_TOKENS
from tierd.kernels.cpu.attention_step import STEP_TOKENS
from tierd.kernels.cpu.simd import load_i32, load_i64
from tierd.kernels.layout import PAGE_TOKENS, PageLayout
from tierd.kernels.rows import COPY_FORMAT, Batch, Exact, Ints, check_exact, check_vector

Addresses = NDArray[np.int64]
Memory = NDArray[np.uint8]
_SEGMENT_PAGES = SEGMENT_TOKENS // PAGE_TOKENS
_STEP_PAGES = STEP_TOKENS // PAGE_TOKENS


def check_pages(
    pages: Addresses, page_offsets: Ints, memories: Sequence[Memory], layout: PageLayout, layers: range
) -> None:
    """Raises ValueError unless the slices of `layers` (adjacent ones) of every page lie within one of the memories.

    `pages` holds the addresses at which the records start, or would start if only a slice of each is there. An element
    must lie on a multiple of its size.
    """
    check_vector("pages", pages, np.int64)
    if page_offsets[-1] > len(pages):
        raise ValueError(f"page_offsets speak of {page_offsets[-1]} pages, got {len(pages)}")
    for memory in memories:
        if memory.dtype != np.uint8 or not memory.flags.c_contiguous or not memory.flags.writeable:
            raise ValueError(f"memories must be writable contiguous uint8 arrays, got {memory.dtype} {memory.shape}")
    # As unsigned numbers negative addresses are large, and sums wrap as they do in the kernels.
    slices = pages.view(np.uint64) + np.uint64(layers.start * layout.layer_bytes)
    slice_bytes = len(layers) * layout.layer_bytes
    if (slices % np.uint64(layout.element_bytes)).any():
        raise ValueError(f"pages must be aligned to {layout.element_bytes} bytes, an element")
    inside = np.zeros(len(slices), np.bool_)
    for memory in memories:
        if memory.nbytes >= slice_bytes:
            inside |= slices - np.uint64(memory.ctypes.data) <= np.uint64(memory.nbytes - slice_bytes)
    if not inside.all():
        page = int(np.argmin(inside))
        raise ValueError(
            f"page {page}: {slice_bytes} bytes at address {slices[page]} do not lie within one of the memories"
        )


class Cut(NamedTuple):
    """Who computes what of the attention of one pass.

    Each of `parts` [parts, 5] is (first row, rows, first segment, stop segment, slot of the first row): neighbouring
    rows that read the same pages in all of those segments. With slot -1 they are all that these rows see. Otherwise it
    is one segment, and the sums of its rows are to be put together with those of their other segments: these rows are
    numbered, `cut_rows[slot]` being the row. The rows of a part are of one
    sequence, or see all of its segments (as far as a window lets them).
    """

    parts: Ints
    cut_rows: Ints


def check_copies(exact: Exact, batch: Batch, bounds: Ints | None, layout: PageLayout) -> None:
    """Raises ValueError for copies that the kernels must not touch, and as `check_exact`."""
    check_exact(exact, batch.page_offsets, bounds)
    record = replace(layout, format=COPY_FORMAT)
    there = exact.pages[exact.pages != 0]
    check_pages(there, np.array([0]), [exact.memory], record, range(layout.num_layers))


def cut_attention(
    batch: Batch, pages: Addresses, max_rows: int, few_blocks: int, exact: Addresses | None = None
) -> Cut:
    """Cuts the rows into parts of at most `max_rows` rows.

    First into blocks of neighbouring rows of one sequence. Blocks that are neighbours and whose pages lie at the same
    addresses over whole segments, from the first one on, are one part in these; and with less than `few_blocks` blocks
    their segments are parts, to be shared among the threads.
    """
    _, positions, row_seq, page_offsets, _ = batch
    addresses = [array.ctypes.data for array in (positions, row_seq, page_offsets, pages)]
    copies = addresses[-1] if exact is None else exact.ctypes.data  # then only pages are compared
    return Cut(*_cut(len(positions), *addresses, copies, max_rows, few_blocks))


@njit(nogil=True, cache=True)
def _common_segments(positions, row_seq, page_offsets, pages, copies, row, other):
    """Segments from the first on that rows `row` and `other` see whole and read at the same addresses."""
    stop = (min(load_i32(positions + 4 * row), load_i32(positions + 4 * other)) + 1) // SEGMENT_TOKENS
    ours = 8 * load_i32(page_offsets + 4 * load_i32(row_seq + 4 * row))
    theirs = 8 * load_i32(page_offsets + 4 * load_i32(row_seq + 4 * other))
    for page in range(stop * _SEGMENT_PAGES):
        mine, other_one = ours + 8 * page, theirs + 8 * page
        if load_i64(pages + mine) != load_i64(pages + other_one):
            return page // _SEGMENT_PAGES
        if load_i64(copies + mine) != load_i64(copies + other_one):
            return page // _SEGMENT_PAGES
    return stop


@njit(nogil=True, cache=True)
def _cut(rows, positions, row_seq, page_offsets, pages, copies, max_rows, few_blocks):
    """`cut_attention` on the addresses of its arrays: loops that are short, but thousands of steps in a large batch."""
    first = np.empty(rows + 1, np.int64)  # row of each block
    blocks = 0
    for row in range(rows):
        other = row == 0 or load_i32(row_seq + 4 * row) != load_i32(row_seq + 4 * (row - 1))
        if other or row - first[blocks - 1] == max_rows:
            first[blocks] = row
            blocks += 1
    first[blocks] = rows

    common = np.zeros(blocks + 1, np.int64)  # segments that block b - 1 and block b can have computed together
    for b in range(1, blocks):
        if first[b + 1] - first[b - 1] <= max_rows:  # never so for blocks of one sequence: the first of them is full
            common[b] = _common_segments(positions, row_seq, page_offsets, pages, copies, first[b - 1], first[b])

    segments = np.empty(blocks, np.int64)
    slots = np.full(blocks, -1, np.int64)
    cut_rows = np.empty(rows, np.int32)
    parts, num_slots = 0, 0
    for b in range(blocks):
        segments[b] = load_i32(positions + 4 * (first[b + 1] - 1)) // SEGMENT_TOKENS + 1
        if common[b] > 0 or common[b + 1] > 0 or (blocks < few_blocks and segments[b] > 1):
            slots[b] = num_slots
            for row in range(first[b], first[b + 1]):
                cut_rows[num_slots] = row
                num_slots += 1
            parts += segments[b]
        else:
            parts += 1

    result = np.empty((parts, 5), np.int32)
    parts = 0
    for b in range(blocks - 1, -1, -1):  # long parts go first, so that no thread is left alone with one
        if slots[b] < 0:
            result[parts] = first[b], first[b + 1] - first[b], 0, segments[b], -1
            parts += 1
    for segment in range(segments.max()):
        b = 0
        while b < blocks:
            stop = b + 1
            if slots[b] >= 0 and segment < segments[b]:
                while stop < blocks and segment < common[stop] and first[stop + 1] - first[b] <= max_rows:
                    stop += 1
                result[parts] = first[b], first[stop] - first[b], segment, segment + 1, slots[b]
                parts += 1
            b = stop
    return result[:parts], cut_rows[:num_slots]
