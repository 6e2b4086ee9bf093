"""The small operations between products, one launch each: RMSNorm with its residual, q/k norm with RoPE, SwiGLU.

Each reads its input once and writes its output once. All arithmetic is fp32, and what leaves is rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierd.kernels.gpu.launch import FLOAT_DTYPES, Launch, Plan, check_contiguous, check_tensor, next_power_of_2

MAX_HIDDEN = 32768  # a row is one tile: 256 values a thread with 4 warps would spill, so wide rows get more warps
MAX_ROTATED_HEAD_DIM = 256


class Normed(NamedTuple):
    """`normed` [rows, hidden], and `residual` [rows, hidden]: the sum that was normalized."""

    normed: Tensor
    residual: Tensor


@triton.jit
def _add_norm_kernel(
    x, residual, weight, normed, total, x_row, residual_row, hidden, eps, offset,
    BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    value = tl.load(x + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * residual_row + column, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * hidden + column, rounded, mask=mask)
        value = rounded.to(tl.float32)  # the next layer adds to what was stored: normalize the same
    scale = tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset
    tl.store(normed + row * hidden + column, (value * scale * gain).to(normed.dtype.element_ty), mask=mask)


def plan_add_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
) -> Plan[Normed]:
    """`add_norm` without running it."""
    check_tensor("x", x, FLOAT_DTYPES, [None, None])
    rows, hidden = x.shape
    if not 0 < hidden <= MAX_HIDDEN:
        raise ValueError(f"x: rows must have 1 to {MAX_HIDDEN} values, got {hidden}")
    check_tensor("weight", weight, FLOAT_DTYPES, [hidden], x)
    check_contiguous("weight", weight)
    _check_dense_rows("x", x)
    if residual is not None:
        check_tensor("residual", residual, [x.dtype], [rows, hidden], x)
        _check_dense_rows("residual", residual)
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    normed = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(normed)
    args = {
        "x": x, "residual": residual, "weight": weight, "normed": normed, "total": total, "x_row": x.stride(0),
        "residual_row": 0 if residual is None else residual.stride(0), "hidden": hidden, "eps": float(eps),
        "offset": float(weight_offset), "BLOCK": next_power_of_2(hidden), "HAS_RESIDUAL": residual is not None,
    }  # fmt: skip
    launch = Launch(_add_norm_kernel, (rows,), args, 4 if hidden <= 2048 else 8 if hidden <= 8192 else 16, 1)
    result = Normed(normed, x if total is None else total)
    return Plan(result, (normed,) if total is None else (normed, total), (launch,))


def add_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
) -> Normed:
    """RMSNorm of x + residual. Twin: `reference.add_norm`. Source: Zhang and Sennrich 2019.

    x, residual    float [rows, hidden] of one type, values of a row neighbours, any row stride; residual None for none
    weight         float [hidden], contiguous; `weight_offset` is added to it (1 for Gemma)

    Returns normed and the sum, both of x's type; the sum is rounded first and normalized as rounded. Without a residual
    the sum is x itself. Raises ValueError for a wrong shape, type, stride or device.
    """
    return plan_add_norm(x, weight, eps, residual, weight_offset).run()


@triton.jit
def _rotate_kernel(
    qkv, q_weight, k_weight, cos, sin, positions, queries, keys, qkv_row, qkv_head, heads, kv_heads, eps,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    mask = d < HALF
    source = qkv + row * qkv_row + head * qkv_head + d
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF) + eps)
        if head < heads:
            low_gain = tl.load(q_weight + d, mask=mask, other=0.0).to(tl.float32)
            high_gain = tl.load(q_weight + HALF + d, mask=mask, other=0.0).to(tl.float32)
        else:
            low_gain = tl.load(k_weight + d, mask=mask, other=0.0).to(tl.float32)
            high_gain = tl.load(k_weight + HALF + d, mask=mask, other=0.0).to(tl.float32)
        low *= scale * low_gain
        high *= scale * high_gain
    angle = tl.load(positions + row).to(tl.int64) * HALF + d
    c = tl.load(cos + angle, mask=mask, other=0.0)
    s = tl.load(sin + angle, mask=mask, other=0.0)
    new_low = (low * c - high * s).to(queries.dtype.element_ty)
    new_high = (high * c + low * s).to(queries.dtype.element_ty)
    if head < heads:
        target = queries + (row * heads + head) * (2 * HALF) + d
    else:
        target = keys + (row * kv_heads + head - heads) * (2 * HALF) + d
    tl.store(target, new_low, mask=mask)
    tl.store(target + HALF, new_high, mask=mask)


class Rotated(NamedTuple):
    """`queries` [rows, heads, head_dim] and `keys` [rows, kv_heads, head_dim], contiguous, in the type of the input."""

    queries: Tensor
    keys: Tensor


def plan_rotate(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    norm_weights: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Plan[Rotated]:
    """`rotate` without running it."""
    check_tensor("qkv", qkv, FLOAT_DTYPES, [None, None, None])
    rows, found, head_dim = qkv.shape
    if heads <= 0 or kv_heads < 0 or found < heads + kv_heads:
        raise ValueError(f"qkv: {found} heads do not hold {heads} of queries and {kv_heads} of keys")
    if head_dim % 2 or not 0 < head_dim <= MAX_ROTATED_HEAD_DIM:
        raise ValueError(f"qkv: head_dim must be even and at most {MAX_ROTATED_HEAD_DIM}, got {head_dim}")
    _check_dense_rows("qkv", qkv)
    check_tensor("cos", cos, [torch.float32], [None, head_dim // 2], qkv)
    check_tensor("sin", sin, [torch.float32], cos.shape, qkv)
    check_tensor("positions", positions, [torch.int32], [rows], qkv)
    for name, tensor in (("cos", cos), ("sin", sin), ("positions", positions)):
        check_contiguous(name, tensor)
    for name, weight in zip(("q norm", "k norm"), norm_weights or (), strict=False):
        check_tensor(name, weight, FLOAT_DTYPES, [head_dim], qkv)
        check_contiguous(name, weight)
    queries = torch.empty((rows, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    keys = torch.empty((rows, kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight = norm_weights or (None, None)
    args = {
        "qkv": qkv, "q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin, "positions": positions,
        "queries": queries, "keys": keys, "qkv_row": qkv.stride(0), "qkv_head": qkv.stride(1), "heads": heads,
        "kv_heads": kv_heads, "eps": float(eps), "HALF": head_dim // 2, "BLOCK": next_power_of_2(head_dim // 2),
        "HAS_NORM": norm_weights is not None,
    }  # fmt: skip
    launch = Launch(_rotate_kernel, (rows, heads + kv_heads), args, 1, 1)
    return Plan(Rotated(queries, keys), (queries, keys), (launch,))


def rotate(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    norm_weights: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Rotated:
    """RoPE of queries and keys, after an RMSNorm of each head if there are weights. Twin: `reference.rotate`.

    qkv           float [rows, heads + kv_heads + any, head_dim], the fused product: queries, keys, values; values of a
                  head neighbours, other strides any
    cos, sin      fp32 [positions, head_dim / 2]; the halves of a head are the pairs (as in Llama, not GPT-J)
    kv_heads      0: keys are left out
    positions     int32 [rows], which the caller has checked against the tables
    norm_weights  float [head_dim] for queries and for keys (Qwen3), or None

    Raises ValueError for a wrong shape, type, stride or device. Source: Su et al. 2021.
    """
    return plan_rotate(qkv, heads, kv_heads, cos, sin, positions, norm_weights, eps).run()


@triton.jit
def _swiglu_kernel(gate_up, out, row_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + column, mask=mask, other=0.0).to(tl.float32)
    # exp of minus the magnitude does not overflow.
    fall = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0, 1.0, fall) / (1.0 + fall)
    tl.store(out + row * width + column, (gate * sigmoid * up).to(out.dtype.element_ty), mask=mask)


def plan_swiglu(gate_up: Tensor) -> Plan[Tensor]:
    """`swiglu` without running it."""
    check_tensor("gate_up", gate_up, FLOAT_DTYPES, [None, None])
    _check_dense_rows("gate_up", gate_up)
    rows, both = gate_up.shape
    if both % 2 or both == 0:
        raise ValueError(f"gate_up: needs two equal halves, got {both} columns")
    out = torch.empty((rows, both // 2), dtype=gate_up.dtype, device=gate_up.device)
    args = {"gate_up": gate_up, "out": out, "row_stride": gate_up.stride(0), "width": both // 2, "BLOCK": 1024}
    return Plan(out, (out,), (Launch(_swiglu_kernel, (-(-both // 2 // 1024), rows), args, 4, 1),))


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for float [rows, 2 * width], gates first; returns [rows, width]. Twin: `reference.swiglu`.

    Values of a row are neighbours, the row stride is any. Raises ValueError otherwise. Source: Shazeer 2020.
    """
    return plan_swiglu(gate_up).run()


def _check_dense_rows(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: values of a row must be neighbours, got strides {tensor.stride()}")
