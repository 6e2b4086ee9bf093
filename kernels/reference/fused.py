"""Twins of the fused operations between products, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def add_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:  # [rows, hidden] both
    """RMSNorm of x + residual, and that sum, which is rounded to x's type, as it is stored, before it is normalized."""
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    value = total.double()
    scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return value * scale * (weight.double() + weight_offset), total.double()


def rotate(
    qkv: Tensor,  # [rows, heads + kv_heads + any, head_dim]
    heads: int,
    kv_heads: int,
    cos: Tensor,  # [positions, head_dim / 2]
    sin: Tensor,
    positions: Tensor,  # [rows]
    norm_weights: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normalized head by head if there are weights, then rotated; the halves of a head are pairs."""
    c, s = (table.double()[positions.long()][:, None] for table in (cos, sin))
    turned = []
    for index, part in enumerate((qkv[:, :heads], qkv[:, heads : heads + kv_heads])):
        value = part.double()
        if norm_weights is not None:
            value = add_norm(value, norm_weights[index], eps)[0]
        low, high = value.chunk(2, -1)
        turned.append(torch.cat((low * c - high * s, high * c + low * s), -1))
    return turned[0], turned[1]


def swiglu(gate_up: Tensor) -> Tensor:  # [rows, width]
    """silu of the first half of the columns, times the second."""
    gate, up = gate_up.double().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
