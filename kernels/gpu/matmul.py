"""Products with quantized weights, w4a16 and w8a16 with groups of 32: one kernel for few rows and for many.

A program makes a tile of outputs. Step by step it takes a pair of groups (64 columns, see `packing.py`), turns the
weights into the activations' type and multiplies on the tensor cores, accumulating in fp32. The weights are computed
in fp32 as defined and rounded once, to fp16 or bf16. Integers become floats by setting the exponent of 2^23 around them
and subtracting it, since the hardware converts only 16 integers a clock and SM.

With few rows the weights are all the traffic, and one program for each panel would leave most of a card idle. So the
columns are split, by a rule that knows the matrix and not the rows, and the parts are added in order by a second
launch: a row's bits depend neither on chance (no atomics) nor on its company in a tile of 16, 32 or 64 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierd.kernels.gpu.launch import FLOAT_DTYPES, HALF_DTYPES, Launch, Plan, check_tensor
from tierd.kernels.gpu.packing import GPU_PANEL_ROWS, GpuMatrix
from tierd.kernels.packing import WeightFormat

MAX_DECODE_ROWS = 64
_TARGET_PROGRAMS = 512  # some for each of the 82 to 170 multiprocessors of a 24 GB card
_MIN_SPLIT_PAIRS = 4


@triton.jit
def _low_half(words):
    return (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high_half(words):
    return ((words >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _as_float(integers, BIAS: tl.constexpr):
    """Integers 0..255 minus BIAS, in fp32, exactly."""
    return (integers.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + BIAS)


@triton.jit
def panel_places(quants, scales, n, k, pairs, BITS: tl.constexpr):
    """Where the codes [32, outputs] of the first group of columns and the scales [outputs] of outputs `n` lie."""
    # Offsets of a tile's outputs within a panel's stream, in bytes and in words.
    PAIR_BYTES: tl.constexpr = 32 * 8 * BITS
    PAIR_WORDS: tl.constexpr = 64 if BITS == 4 else 32
    panel = (n // 32).to(tl.int64) * pairs
    return quants + (panel * PAIR_BYTES + n % 32)[None, :] + (k * 32)[:, None], scales + panel * PAIR_WORDS + n % 32


@triton.jit
def add_pairs(
    sums, x_at, x_col, is_row, k, quant_at, scale_at, in_panels, cols, first_pair, stop_pair,
    BITS: tl.constexpr, UNROLL: tl.constexpr, HAS_TAIL: tl.constexpr,
):  # fmt: skip
    """Adds the products of these pairs of groups to `sums`. `x_at` [rows, 32] points to the first group's columns."""
    PAIR_BYTES: tl.constexpr = 32 * 8 * BITS
    PAIR_WORDS: tl.constexpr = 64 if BITS == 4 else 32
    for first in range(first_pair, stop_pair, UNROLL):
        for step in tl.static_range(UNROLL):
            pair = first + step
            x_mask = is_row[:, None]
            x0 = tl.load(x_at + pair * 64 * x_col, mask=x_mask, other=0.0)
            if HAS_TAIL:  # the last pair has one group
                x_mask = x_mask & (k + pair * 64 + 32 < cols)[None, :]
            x1 = tl.load(x_at + (pair * 64 + 32) * x_col, mask=x_mask, other=0.0)
            q0 = tl.load(quant_at + pair * PAIR_BYTES, mask=in_panels[None, :], other=0)
            words0 = tl.load(scale_at + pair * PAIR_WORDS, mask=in_panels, other=0)
            if BITS == 4:
                words1 = tl.load(scale_at + pair * PAIR_WORDS + 32, mask=in_panels, other=0)
                w0 = _as_float(q0 & 15, 0.0) * _low_half(words0)[None, :] + _high_half(words0)[None, :]
                w1 = _as_float(q0 >> 4, 0.0) * _low_half(words1)[None, :] + _high_half(words1)[None, :]
            else:
                q1 = tl.load(quant_at + pair * PAIR_BYTES + 1024, mask=in_panels[None, :], other=0)
                w0 = _as_float(q0, 128.0) * _low_half(words0)[None, :]
                w1 = _as_float(q1, 128.0) * _high_half(words0)[None, :]
            sums = tl.dot(x0, w0.to(x0.dtype), sums)
            sums = tl.dot(x1, w1.to(x1.dtype), sums)
    return sums


@triton.jit
def _matmul_kernel(
    x, quants, scales, bias, out, x_row, x_col, out_split, out_row, rows, outputs, cols, pairs, split_pairs,
    BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 32)
    is_row = m < rows
    in_panels = n < (outputs + 31) // 32 * 32
    quant_at, scale_at = panel_places(quants, scales, n, k, pairs, BITS)
    x_at = x + (m.to(tl.int64) * x_row)[:, None] + (k * x_col)[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    sums = add_pairs(
        sums, x_at, x_col, is_row, k, quant_at, scale_at, in_panels, cols, split * split_pairs,
        (split + 1) * split_pairs, BITS, UNROLL, HAS_TAIL,
    )  # fmt: skip
    in_outputs = n < outputs
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    target = out + split * out_split + (m.to(tl.int64) * out_row)[:, None] + n[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_row[:, None] & in_outputs[None, :])


@triton.jit
def _add_parts_kernel(parts, bias, out, out_row, splits, rows, outputs, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = n < outputs
    sums = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        sums += tl.load(parts + (split * rows + row) * outputs + n, mask=mask, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + n, sums.to(out.dtype.element_ty), mask=mask)


def column_splits(panels: int, pairs: int) -> int:
    """Parts that the columns are cut into for few rows: a divisor of the pairs, so that all parts are equal. `panels`:
    those that are computed at once."""
    most = min(max(_TARGET_PROGRAMS // panels, 1), max(pairs // _MIN_SPLIT_PAIRS, 1))
    return max(splits for splits in range(1, most + 1) if pairs % splits == 0)


def plan_matmul(
    x: Tensor, matrix: GpuMatrix, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Plan[Tensor]:
    """`matmul` without running it."""
    check_tensor("x", x, HALF_DTYPES, [None, matrix.cols], matrix.quants)
    if bias is not None:
        check_tensor("bias", bias, FLOAT_DTYPES, [matrix.rows], matrix.quants)
    dtype = x.dtype if out_dtype is None else out_dtype
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"out_dtype: must be a float type, got {dtype}")
    rows = len(x)
    few = rows <= MAX_DECODE_ROWS
    splits = column_splits(matrix.panels, matrix.pairs) if few else 1
    out = torch.empty((rows, matrix.rows), dtype=dtype, device=x.device)
    parts = torch.empty((splits, rows, matrix.rows), dtype=torch.float32, device=x.device) if splits > 1 else None
    if few:
        block_m, block_n, warps, stages = next(m for m in (16, 32, 64) if rows <= m), GPU_PANEL_ROWS, 4, 4
    else:
        block_m, block_n, warps, stages = 128, 128, 8, 3
    dense_bias = None if bias is None else bias.contiguous()
    own_bias = dense_bias if parts is None else None
    split_pairs = matrix.pairs // splits
    target = out if parts is None else parts
    args = {
        "x": x, "quants": matrix.quants, "scales": matrix.scales, "bias": own_bias, "out": target,
        "x_row": x.stride(0), "x_col": x.stride(1), "out_split": 0 if parts is None else parts.stride(0),
        "out_row": target.stride(-2), "rows": rows, "outputs": matrix.rows, "cols": matrix.cols, "pairs": matrix.pairs,
        "split_pairs": split_pairs, "BITS": 4 if matrix.format is WeightFormat.INT4_G32 else 8, "BLOCK_M": block_m,
        "BLOCK_N": block_n, "UNROLL": 2 if block_m == 16 and split_pairs % 2 == 0 else 1,  # else registers spill
        "HAS_BIAS": own_bias is not None, "HAS_TAIL": matrix.cols % 64 != 0,
    }  # fmt: skip
    grid = (-(-matrix.rows // block_n), -(-rows // block_m), splits)
    product = Launch(_matmul_kernel, grid, args, warps, stages)
    if parts is None:
        return Plan(out, (out,), (product,))
    sum_args = {
        "parts": parts, "bias": dense_bias, "out": out, "out_row": out.stride(0), "splits": splits, "rows": rows,
        "outputs": matrix.rows, "BLOCK": 512, "HAS_BIAS": dense_bias is not None,
    }  # fmt: skip
    addition = Launch(_add_parts_kernel, (-(-matrix.rows // 512), rows), sum_args)
    return Plan(out, (parts, out), (product, addition))


def matmul(x: Tensor, matrix: GpuMatrix, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x times the transposed matrix, plus a bias. Twin: `reference.quantized_matmul`.

    x     fp16 or bf16 [rows, cols], any strides
    bias  float [matrix.rows] or None

    Returns [rows, matrix.rows] of `out_dtype` (that of x by default), contiguous. Raises ValueError for a wrong shape,
    type or device.
    """
    return plan_matmul(x, matrix, bias, out_dtype).run()
