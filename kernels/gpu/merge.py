"""Merging attention over parts of a sequence: `(out, lse)` of each part to that of the whole.

    lse = log(sum over parts of exp(lse[p]) + exp(sink))      out = sum over parts of exp(lse[p] - lse) * out[p]

It is exact, so pages may be read by several kernels, in several places, in any split. Learned sinks (gpt-oss: one more
logit of each head, with a value of zero) belong to the whole sequence and so come in here, once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierd.kernels.gpu.launch import FLOAT_DTYPES, Launch, Plan, check_tensor, next_power_of_2

MAX_HEAD_DIM = 256
_BLOCK_PARTS = 16  # with 256 dimensions and 4 warps: 32 values a thread


class Merged(NamedTuple):
    """Attention of each query and head: `out` [rows, heads, head_dim], `lse` fp32 [rows, heads] (natural log)."""

    out: Tensor
    lse: Tensor


@triton.jit
def _merge_kernel(
    outs, lses, sinks, out, lse,
    outs_part, outs_row, outs_head, outs_dim, lses_part, lses_row, lses_head,
    out_row, out_head, out_dim, lse_row, lse_head,
    parts, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_DIM
    largest = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks + head).to(tl.float32)
        total = total + 1.0
    sums = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, parts, BLOCK_P):
        part = (first + tl.arange(0, BLOCK_P)).to(tl.int64)
        x = tl.load(
            lses + part * lses_part + row * lses_row + head * lses_head, mask=part < parts, other=-float("inf")
        )
        values = tl.load(
            outs + (part * outs_part + row * outs_row + head * outs_head)[:, None] + (d * outs_dim)[None, :],
            mask=(x != -float("inf"))[:, None] & in_head[None, :],  # an empty part's values were never written
            other=0.0,
        ).to(tl.float32)
        before = largest
        largest = tl.maximum(before, tl.max(x, 0))
        shift = tl.where(largest == -float("inf"), 0.0, largest)
        factor = tl.exp(before - shift)
        weight = tl.exp(x - shift)
        total = total * factor + tl.sum(weight, 0)
        sums = sums * factor + tl.sum(weight[:, None] * values, 0)
    divisor = tl.where(total == 0.0, 1.0, total)
    shift = tl.where(total == 0.0, -float("inf"), largest)
    tl.store(lse + row * lse_row + head * lse_head, shift + tl.log(divisor))
    target = out + row * out_row + head * out_head + d * out_dim
    tl.store(target, (sums / divisor).to(out.dtype.element_ty), mask=in_head)


def plan_merge(
    outs: Tensor, lses: Tensor, sinks: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Plan[Merged]:
    """`merge` without running it."""
    check_tensor("outs", outs, FLOAT_DTYPES, [None] * 4)
    parts, rows, heads, head_dim = outs.shape
    if not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"outs: head_dim must be 1 to {MAX_HEAD_DIM}, got {head_dim}")
    check_tensor("lses", lses, [torch.float32], [parts, rows, heads], outs)
    if sinks is not None:
        check_tensor("sinks", sinks, FLOAT_DTYPES, [heads], outs)
    dtype = outs.dtype if out_dtype is None else out_dtype
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"out_dtype: must be a float type, got {dtype}")
    out = torch.empty((rows, heads, head_dim), dtype=dtype, device=outs.device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=outs.device)
    strides = {
        f"{name}_{axis}": stride
        for name, tensor, axes in (
            ("outs", outs, ("part", "row", "head", "dim")), ("lses", lses, ("part", "row", "head")),
            ("out", out, ("row", "head", "dim")), ("lse", lse, ("row", "head")),
        )
        for axis, stride in zip(axes, tensor.stride(), strict=True)
    }  # fmt: skip
    args = {
        "outs": outs, "lses": lses, "sinks": None if sinks is None else sinks.contiguous(), "out": out, "lse": lse,
        **strides, "parts": parts, "HEAD_DIM": head_dim, "BLOCK_D": next_power_of_2(head_dim), "BLOCK_P": _BLOCK_PARTS,
        "HAS_SINKS": sinks is not None,
    }  # fmt: skip
    return Plan(Merged(out, lse), (out, lse), (Launch(_merge_kernel, (rows, heads), args),))


def merge(
    outs: Tensor, lses: Tensor, sinks: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Merged:
    """Merges parts. Twin: `reference.merge`.

    outs   float [parts, rows, heads, head_dim], any strides; not read where `lses` is minus infinity
    lses   fp32 [parts, rows, heads], any strides, natural log; minus infinity: the part saw no token
    sinks  float [heads] or None

    Returns out [rows, heads, head_dim] of `out_dtype` (that of `outs` by default) and lse fp32 [rows, heads]. Where no
    part saw a token, out is zero and lse minus infinity, or the sink. Raises ValueError for a wrong shape or type.
    """
    return plan_merge(outs, lses, sinks, out_dtype).run()
