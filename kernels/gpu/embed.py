"""Rows of an embedding with quantized weights: the tokens' rows of a matrix in the layout of `packing.py`.

A row lies in the lanes of a panel, one byte in 32, so it is read in whole sectors for one token: some hundred KB a
token, which a step does not feel, where a second copy of the matrix in another layout would cost half a gigabyte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierd.kernels.gpu.launch import FLOAT_DTYPES, Launch, Plan, check_contiguous, check_tensor
from tierd.kernels.gpu.matmul import _as_float, _high_half, _low_half
from tierd.kernels.gpu.packing import GpuMatrix
from tierd.kernels.packing import WeightFormat

_BLOCK_PAIRS = 4


@triton.jit
def _embed_kernel(
    tokens, quants, scales, out, out_row, cols, pairs, BITS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row).to(tl.int64)
    pair = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.arange(0, 32)
    is_pair = (pair < pairs)[:, None]
    panel_pair = token // 32 * pairs + pair
    PAIR_BYTES: tl.constexpr = 32 * 8 * BITS
    PAIR_WORDS: tl.constexpr = 64 if BITS == 4 else 32
    at = quants + (panel_pair * PAIR_BYTES + token % 32)[:, None] + (k * 32)[None, :]
    scale_at = scales + panel_pair * PAIR_WORDS + token % 32
    q0 = tl.load(at, mask=is_pair, other=0)
    words0 = tl.load(scale_at, mask=pair < pairs, other=0)
    if BITS == 4:
        words1 = tl.load(scale_at + 32, mask=pair < pairs, other=0)
        w0 = _as_float(q0 & 15, 0.0) * _low_half(words0)[:, None] + _high_half(words0)[:, None]
        w1 = _as_float(q0 >> 4, 0.0) * _low_half(words1)[:, None] + _high_half(words1)[:, None]
    else:
        q1 = tl.load(at + 1024, mask=is_pair, other=0)
        w0 = _as_float(q0, 128.0) * _low_half(words0)[:, None]
        w1 = _as_float(q1, 128.0) * _high_half(words0)[:, None]
    column = (pair * 64)[:, None] + k[None, :]
    target = out + row * out_row + column
    tl.store(target, w0.to(out.dtype.element_ty), mask=column < cols)
    tl.store(target + 32, w1.to(out.dtype.element_ty), mask=column + 32 < cols)


def plan_embed(tokens: Tensor, matrix: GpuMatrix, dtype: torch.dtype) -> Plan[Tensor]:
    """`embed` without running it."""
    check_tensor("tokens", tokens, [torch.int32], [None], matrix.quants)
    check_contiguous("tokens", tokens)
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype: must be a float type, got {dtype}")
    out = torch.empty((len(tokens), matrix.cols), dtype=dtype, device=tokens.device)
    args = {
        "tokens": tokens, "quants": matrix.quants, "scales": matrix.scales, "out": out, "out_row": out.stride(0),
        "cols": matrix.cols, "pairs": matrix.pairs, "BITS": 4 if matrix.format is WeightFormat.INT4_G32 else 8,
        "BLOCK_P": _BLOCK_PAIRS,
    }  # fmt: skip
    grid = (len(tokens), -(-matrix.pairs // _BLOCK_PAIRS))
    return Plan(out, (out,), (Launch(_embed_kernel, grid, args, 4, 1),))


def embed(tokens: Tensor, matrix: GpuMatrix, dtype: torch.dtype) -> Tensor:
    """Rows `tokens` int32 [rows] of a matrix, rounded once to `dtype`: [rows, matrix.cols].

    Twin: `reference.gpu_weights`, of which these are rows.

    Tokens lie within the matrix; whoever made them has checked it. Raises ValueError for a wrong type or device.
    """
    return plan_embed(tokens, matrix, dtype).run()
