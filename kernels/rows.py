"""The rows of one pass, and what must be true of them on every backend; plain numpy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.kernels.layout import PAGE_TOKENS

Ints = NDArray[np.int32]


class Batch(NamedTuple):
    """Index arrays of one pass, see `CpuDecoder.forward` and `GpuDecoder.forward`."""

    tokens: Ints  # [rows]
    positions: Ints  # [rows]
    row_seq: Ints  # [rows]
    page_offsets: Ints  # [sequences + 1]
    logit_rows: Ints  # [logits]


def check_batch(batch: Batch, vocab: int, context: int, max_rows: int, page_tokens: int = PAGE_TOKENS) -> None:
    """Raises ValueError for a batch whose kernels would read or write outside of what they are given.

    It speaks of `page_offsets[-1]` pages; whether these are there is for whoever knows their addresses.
    """
    for name, array in batch._asdict().items():
        check_vector(name, array, np.int32)
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
    if (positions // page_tokens >= pages).any():
        row = int(np.argmax(positions // page_tokens >= pages))
        raise ValueError(f"row {row} is at position {positions[row]}, its sequence has {pages[row]} pages")
    same = row_seq[1:] == row_seq[:-1]
    if (same & (positions[1:] <= positions[:-1])).any():
        raise ValueError("the rows of a sequence must ascend in position")
    if rows - int(same.sum()) != len(np.unique(row_seq)):
        raise ValueError("the rows of a sequence must be adjacent")


def check_vector(name: str, array: NDArray[np.integer], dtype: type[np.integer]) -> None:
    """Raises ValueError unless it is a contiguous vector of that type."""
    if array.ndim != 1 or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be a contiguous {np.dtype(dtype)} vector, got {array.dtype} {array.shape}")


def _check_range(name: str, values: Ints, bound: int) -> None:
    """Raises ValueError unless all values lie in 0..bound-1. (As unsigned numbers the negative ones are large.)"""
    if len(values) and int(values.view(np.uint32).max()) >= bound:
        raise ValueError(f"{name} must lie in 0..{bound - 1}, got {values.min()}..{values.max()}")
