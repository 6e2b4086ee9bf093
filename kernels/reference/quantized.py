"""Twins of the products with quantized weights in the layout of the card, in float64, one group at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def gpu_weights(quants: Tensor, scales: Tensor, rows: int, cols: int) -> Tensor:  # [rows, cols]
    """The exact weights of a matrix in the layout that `kernels/gpu/packing.py` describes, float64.

    It has 4 bits if a panel has two words of scales for each pair of groups (scales [panels, pairs, 2, 32]), else 8.
    """
    panels, pairs = scales.shape[:2]
    weights = torch.zeros((panels * 32, pairs * 64), dtype=torch.float64, device=quants.device)
    low, high = (
        ((scales >> shift) & 0xFFFF).to(torch.int16).view(torch.float16).double() for shift in (0, 16)
    )
    for panel in range(panels):
        block = weights[panel * 32 : panel * 32 + 32].T
        for pair in range(pairs):
            q = quants[panel, pair].double()
            first, second = block[pair * 64 : pair * 64 + 32], block[pair * 64 + 32 : pair * 64 + 64]
            if scales.dim() == 4:
                first[:] = q % 16 * low[panel, pair, 0] + high[panel, pair, 0]
                second[:] = q // 16 * low[panel, pair, 1] + high[panel, pair, 1]
            else:
                first[:] = (q[:32] - 128) * low[panel, pair]
                second[:] = (q[32:] - 128) * high[panel, pair]
    return weights[:rows, :cols]


def quantized_matmul(
    x: Tensor, quants: Tensor, scales: Tensor, rows: int, bias: Tensor | None = None
) -> Tensor:  # [x rows, rows]
    """x [x rows, cols] times the transposed matrix, plus a bias, float64."""
    product = x.double() @ gpu_weights(quants, scales, rows, x.shape[1]).T
    return product if bias is None else product + bias.double()
