"""Twin of the sampling kernel, in float64, by sorting."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kept_mass(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:  # [vocab]
    """exp((logit - largest) / temperature) of each token that top-k, top-p and min-p keep, else 0."""
    mass = ((logits.double() - logits.double().max()) / temperature).exp()
    order = logits.double().sort(descending=True, stable=True).indices  # the lower id first among equals
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        before = mass[order].cumsum(0) - mass[order]
        keep = before < top_p * mass[order].sum()
        keep[0] = True
        order = order[keep]
    kept = torch.zeros_like(mass)
    kept[order] = torch.where(mass[order] >= min_p, mass[order], 0.0)
    return kept


def sample(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, draws: Tensor
) -> Tensor:  # [rows]
    """A token for each row of logits [rows, vocab], or -1 where the largest is not finite or one is NaN."""
    tokens = []
    for row, x in enumerate(logits.double()):
        if x.isnan().any() or math.isinf(x.max()):
            tokens.append(-1)
        elif temperatures[row] <= 0 or top_ks[row] == 1:
            tokens.append(int(x.argmax()))
        else:
            kept = kept_mass(x, float(temperatures[row]), int(top_ks[row]), float(top_ps[row]), float(min_ps[row]))
            cumulative = kept.cumsum(0)
            tokens.append(int((cumulative > float(draws[row]) * cumulative[-1]).nonzero()[0]))
    return torch.tensor(tokens, dtype=torch.int32, device=logits.device)
