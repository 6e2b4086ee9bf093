"""Twins of the kernels that choose and repack pages, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tierd.kernels.layout import PageLayout
from tierd.kernels.reference.paged import page_planes, write


def quant(
    sources: Sequence[int], source_memories: Sequence[Tensor], source_layout: PageLayout, targets: Sequence[int],
    target_memories: Sequence[Tensor], target_layout: PageLayout, lengths: Sequence[int],
) -> None:  # fmt: skip
    """Writes the first tokens of pages in another format, as new tokens are written."""
    for source, target, length in zip(sources, targets, lengths, strict=True):
        for layer in range(source_layout.num_layers):
            planes = page_planes(source_memories, source, source_layout, layer)
            keys, values = (plane.double().transpose(0, 1)[:length] for plane in planes)
            write(keys, values, target_memories, target_layout, layer, [(target, 0, 0, length)])


def bounds(
    addresses: Sequence[int], memories: Sequence[Tensor], layout: PageLayout, layer: int, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Least and largest keys of each page, [pages, kv_heads, head_dim]."""
    keys = [
        page_planes(memories, address, layout, layer)[0][:, :length].double()
        for address, length in zip(addresses, lengths, strict=True)
    ]
    return torch.stack([k.amin(1) for k in keys]), torch.stack([k.amax(1) for k in keys])


def select(
    queries: Tensor, low: Tensor, high: Tensor, offsets: Sequence[int], k: int, scale: float
) -> list[list[int]]:
    """The pages that each query may weigh most, by the mean over heads of the softmax of the bounds."""
    found = []
    group = queries.shape[1] // low.shape[1]
    for row, x in enumerate(queries.double()):
        pages = slice(offsets[row], offsets[row + 1])
        least, most = (b[pages].double().repeat_interleave(group, 1) for b in (low, high))
        worth = (torch.maximum(x * least, x * most).sum(-1) * scale).softmax(0).mean(1)
        found.append(sorted(worth.topk(min(k, len(worth))).indices.tolist()))
    return found
