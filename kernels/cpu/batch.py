"""The rows of one forward pass: what they must satisfy, and how they are cut into blocks for attention."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.kernels.layout import PAGE_TOKENS

Ints = NDArray[np.int32]


class Batch(NamedTuple):
    """Index arrays of one pass, see `CpuDecoder.forward`."""

    tokens: Ints  # [rows]
    positions: Ints  # [rows]
    row_seq: Ints  # [rows]
    page_table: Ints  # [pages of all sequences]
    page_offsets: Ints  # [sequences + 1]
    logit_rows: Ints  # [logits]


def check_batch(batch: Batch, slots: int, vocab: int, context: int, max_rows: int) -> None:
    """Raises ValueError for a batch whose kernels would read or write outside of what they are given."""
    for name, array in batch._asdict().items():
        if array.ndim != 1 or array.dtype != np.int32 or not array.flags.c_contiguous:
            raise ValueError(f"{name} must be a contiguous int32 vector, got {array.dtype} {array.shape}")
    tokens, positions, row_seq, page_table, page_offsets, logit_rows = batch
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
    _check_range("page_table", page_table, slots)
    _check_range("logit_rows", logit_rows, rows)
    if page_offsets[0] < 0 or page_offsets[-1] > len(page_table) or (page_offsets[1:] < page_offsets[:-1]).any():
        raise ValueError(f"page_offsets must ascend within 0..{len(page_table)}")
    pages = (page_offsets[1:] - page_offsets[:-1])[row_seq]
    if (positions // PAGE_TOKENS >= pages).any():
        row = int(np.argmax(positions // PAGE_TOKENS >= pages))
        raise ValueError(f"row {row} is at position {positions[row]}, its sequence has {pages[row]} pages")
    same = row_seq[1:] == row_seq[:-1]
    if (same & (positions[1:] <= positions[:-1])).any():
        raise ValueError("the rows of a sequence must ascend in position")
    if rows - int(same.sum()) != len(np.unique(row_seq)):
        raise ValueError("the rows of a sequence must be adjacent")


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


def _check_range(name: str, values: Ints, bound: int) -> None:
    """Raises ValueError unless all values lie in 0..bound-1. (As unsigned numbers the negative ones are large.)"""
    if len(values) and int(values.view(np.uint32).max()) >= bound:
        raise ValueError(f"{name} must lie in 0..{bound - 1}, got {values.min()}..{values.max()}")
