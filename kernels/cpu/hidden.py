"""The final hidden states of a pass: what the head is multiplied with, for those who want no logits."""

from __future__ import annotations

import ctypes

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
    floats = stride_bytes // 4
    count = (int(rows.max(initial=-1)) + 1) * floats
    stream = np.ctypeslib.as_array((ctypes.c_float * count).from_address(residual)).reshape(-1, floats)
    x = stream[rows, :hidden]
    scale = 1 / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + np.float32(eps))
    states: Floats = x * scale.astype(np.float32) * norm[:hidden]
    return states
