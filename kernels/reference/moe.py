"""The twin of mixtures of experts: every row on its own, one expert after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Expert = Callable[[torch.Tensor], torch.Tensor]


def route(
    logits: torch.Tensor,  # [rows, experts]
    used: int,
    renormalized: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row, the most probable first, and their shares. [rows, used] both"""
    probabilities = logits.softmax(-1)
    # Sorting is stable: of equal ones the first.
    chosen = probabilities.argsort(dim=-1, descending=True, stable=True)[:, :used]
    shares = probabilities.gather(-1, chosen)
    return chosen, shares / shares.sum(-1, keepdim=True) if renormalized else shares


def group(chosen: torch.Tensor, experts: int) -> list[list[int]]:
    """The pairs of each expert, ascending: row * used + rank. chosen [rows, used]"""
    flat = chosen.flatten().tolist()
    return [[pair for pair, found in enumerate(flat) if found == expert] for expert in range(experts)]


def mixture(
    x: torch.Tensor,  # [rows, hidden]
    logits: torch.Tensor,  # [rows, experts]
    used: int,
    renormalized: bool,
    experts: Sequence[Expert],
) -> torch.Tensor:  # [rows, hidden]
    """What the experts of each row make of it, times their shares."""
    out = torch.zeros_like(x)
    for row, (chosen, shares) in enumerate(zip(*route(logits, used, renormalized), strict=True)):
        for expert, share in zip(chosen.tolist(), shares, strict=True):
            out[row] += share * experts[expert](x[row : row + 1])[0]
    return out
