"""What a pass leaves in its scratch, for those who want more of it than logits: final hidden states, queries."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def final_hidden(
    residual: int, stride_bytes: int, norm: Floats, hidden: int, eps: float, rows: NDArray[np.int32]
) -> Floats:
    """RMSNorm of some rows of the residual stream, as the pass norms them before the head.

    Args:
        residual: address of its first row; the rows are float32, `stride_bytes` apart.
        norm: weights of the final norm, [hidden] or padded behind.
        hidden: values of a row.
        eps: that of the norm.
        rows: which, each of them a row of the pass.

    Returns:
        [len(rows), hidden], a copy.
    """
    stream = rows_at(residual, stride_bytes, int(rows.max(initial=-1)) + 1)
    x = stream[rows, :hidden]
    scale = 1 / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + np.float32(eps))
    states: Floats = x * scale.astype(np.float32) * norm[:hidden]
    return states


def queries(job: Any) -> Floats:
    """The queries [rows, heads, head_dim] of the layer that was computed last, normed, rotated and scaled: a view."""
    rows, heads, head_dim = int(job["rows"]), int(job["heads"]), int(job["head_dim"])
    found = rows_at(int(job["qkv"]), int(job["qkv_stride"]), rows)[:, : heads * head_dim]
    return found.reshape(rows, heads, head_dim)


def rows_at(address: int, stride_bytes: int, rows: int) -> Floats:
    """Rows of float32 [rows, stride], where they lie."""
    floats = stride_bytes // 4
    return np.ctypeslib.as_array((ctypes.c_float * (rows * floats)).from_address(address)).reshape(rows, floats)
