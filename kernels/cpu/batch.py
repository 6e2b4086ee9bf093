"""The rows of one forward pass: what they and their pages must satisfy, and how rows are cut into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.kernels.layout import PAGE_TOKENS, PageLayout

Ints = NDArray[np.int32]
Addresses = NDArray[np.int64]
Memory = NDArray[np.uint8]


class Batch(NamedTuple):
    """Index arrays of one pass, see `CpuDecoder.forward`."""

    tokens: Ints  # [rows]
    positions: Ints  # [rows]
    row_seq: Ints  # [rows]
    page_offsets: Ints  # [sequences + 1]
    logit_rows: Ints  # [logits]


def check_batch(batch: Batch, vocab: int, context: int, max_rows: int) -> None:
    """Raises ValueError for a batch whose kernels would read or write outside of what they are given.

    It speaks of `page_offsets[-1]` pages; whether these are there is for `check_pages`.
    """
    for name, array in batch._asdict().items():
        _check_vector(name, array, np.int32)
    tokens, positions, row_seq, page_offsets, logit_rows = batch
    rows, sequences = len(tokens), len(page_offsets) - 1
    if not 1 <= rows <= max_rows:
        raise ValueError(f"a pass takes 1 to {max_rows} rows, got {rows}")
    if len(positions) != rows or len(row_seq) != rows:
        raise ValueError(f"{rows} tokens, but {len(positions)} positions and {len(row_seq)} sequence numbers")
    if len(logit_rows) > max_rows:
        raise ValueError(f"a pass gives at most {max_rows} rows of logits, got {len(logit_rows)}")
    _check_range("tokens", tokens, vocab)
    _check_range("positions", positions, context)
    _check_range("row_seq", row_seq, sequences)
    _check_range("logit_rows", logit_rows, rows)
    if page_offsets[0] < 0 or (page_offsets[1:] < page_offsets[:-1]).any():
        raise ValueError("page_offsets must ascend from 0 or more")
    pages = (page_offsets[1:] - page_offsets[:-1])[row_seq]
    if (positions // PAGE_TOKENS >= pages).any():
        row = int(np.argmax(positions // PAGE_TOKENS >= pages))
        raise ValueError(f"row {row} is at position {positions[row]}, its sequence has {pages[row]} pages")
    same = row_seq[1:] == row_seq[:-1]
    if (same & (positions[1:] <= positions[:-1])).any():
        raise ValueError("the rows of a sequence must ascend in position")
    if rows - int(same.sum()) != len(np.unique(row_seq)):
        raise ValueError("the rows of a sequence must be adjacent")


def check_pages(
    pages: Addresses, page_offsets: Ints, memories: Sequence[Memory], layout: PageLayout, layers: range
) -> None:
    """Raises ValueError unless the slices of `layers` (adjacent ones) of every page lie within one of the memories.

    `pages` holds the addresses at which the records start, or would start if only a slice of each is there. An element
    must lie on a multiple of its size.
    """
    _check_vector("pages", pages, np.int64)
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


def row_blocks(batch: Batch, max_block_rows: int) -> Ints:
    """Cuts the rows into blocks [blocks, 2] of (first row, rows), each within one sequence."""
    row_seq = batch.row_seq
    starts = [0, *(np.flatnonzero(row_seq[1:] != row_seq[:-1]) + 1).tolist(), len(row_seq)]
    blocks = [
        (first, min(max_block_rows, stop - first))
        for start, stop in zip(starts[:-1], starts[1:], strict=True)
        for first in range(start, stop, max_block_rows)
    ]
    return np.array(blocks, np.int32)


def _check_vector(name: str, array: NDArray[np.integer], dtype: type[np.integer]) -> None:
    if array.ndim != 1 or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be a contiguous {np.dtype(dtype)} vector, got {array.dtype} {array.shape}")


def _check_range(name: str, values: Ints, bound: int) -> None:
    """Raises ValueError unless all values lie in 0..bound-1. (As unsigned numbers the negative ones are large.)"""
    if len(values) and int(values.view(np.uint32).max()) >= bound:
        raise ValueError(f"{name} must lie in 0..{bound - 1}, got {values.min()}..{values.max()}")
