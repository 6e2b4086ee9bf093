"""Which pages a query needs: bounds of the keys of each page, and the pages that may weigh most.

The bounds of a page are the least and the largest value of each channel among its keys. No key of the page scores more
than `sum over channels of max(q * low, q * high)`. A head's pages share one softmax of these bounds; a page is worth
the mean of its shares over all heads, and the K worthiest are read, in their order in the sequence.

Source of the bounds: Quest (Tang et al. 2024). The mean of shares, rather than a choice for each head, is what lets a
layer read whole pages.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierd.kernels.gpu.launch import FLOAT_DTYPES, Call, Launch, Plan, check_contiguous, check_tensor, next_power_of_2
from tierd.kernels.gpu.pages import check_layout, load_tile, places
from tierd.kernels.layout import PageLayout

NO_PAGE = -1


class Selected(NamedTuple):
    """`places` int64 [batch, k]: numbers of a sequence's pages, ascending, -1 where it has fewer; `worth` fp32 [batch,
    max_pages]: the bound on each page's share, 0 where there is none."""

    places: Tensor
    worth: Tensor


@triton.jit
def _bounds_kernel(
    addresses, lengths, base, low, high, kv_heads, layer_offset, value_offset, key_stride, value_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ELEMENT_BYTES: tl.constexpr, GROUP: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    page, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    token, d = tl.arange(0, 16), tl.arange(0, BLOCK_D)
    held = token < (tl.load(lengths + page) if HAS_LENGTHS else 16)
    key_plane = base + layer_offset + kv_head * key_stride
    value_plane = base + layer_offset + value_offset + kv_head * value_stride
    k, _ = load_tile(  # values that nobody uses are not loaded
        addresses + page, base, key_plane, value_plane, token, token >= 0, d, HEAD_DIM, ELEMENT_BYTES, GROUP,
        KEY_BITS, VALUE_BITS,
    )  # fmt: skip
    k = k.to(tl.float32)
    target = (page * kv_heads + kv_head) * HEAD_DIM + d
    tl.store(low + target, tl.min(tl.where(held[None, :], k, float("inf")), 1), mask=d < HEAD_DIM)
    tl.store(high + target, tl.max(tl.where(held[None, :], k, -float("inf")), 1), mask=d < HEAD_DIM)


def plan_bounds(
    addresses: Tensor, base: Tensor, layout: PageLayout, layer: int, lengths: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> Plan[tuple[Tensor, Tensor]]:  # fmt: skip
    """`bounds` without running it."""
    check_layout(layout, base)
    check_tensor("addresses", addresses, [torch.int64], [None], base)
    check_contiguous("addresses", addresses)
    if lengths is not None:
        check_tensor("lengths", lengths, [torch.int32], [len(addresses)], base)
        check_contiguous("lengths", lengths)
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} of {layout.num_layers}")
    shape = (len(addresses), layout.kv_heads, layout.head_dim)
    if out is None:
        out = torch.empty(shape, device=base.device), torch.empty(shape, device=base.device)
    for name, tensor in zip(("low", "high"), out, strict=True):
        check_tensor(name, tensor, [torch.float32], shape, base)
        check_contiguous(name, tensor)
    args = {
        "addresses": addresses, "lengths": lengths, "base": base, "low": out[0], "high": out[1],
        "kv_heads": layout.kv_heads, **places(layout, layer), "HEAD_DIM": layout.head_dim,
        "BLOCK_D": next_power_of_2(layout.head_dim), "HAS_LENGTHS": lengths is not None,
    }  # fmt: skip
    return Plan(out, out, (Launch(_bounds_kernel, (len(addresses), layout.kv_heads), args),))


def bounds(
    addresses: Tensor, base: Tensor, layout: PageLayout, layer: int, lengths: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Least and largest keys of pages in one layer, fp32 [pages, kv_heads, head_dim] both. Twin: `reference.bounds`.

    addresses  int64 [pages], of any format, checked by whoever made them; those of packed pages have the bounds of
               their keys as they are stored, turned: a query is to be turned as well (`pages.turning`)
    lengths    int32 [pages]: tokens that each page holds, 1 to 16; None: all of them 16
    out        where they are put; None: somewhere new

    Raises ValueError for wrong shapes, types, devices or a layer that is not there.
    """
    return plan_bounds(addresses, base, layout, layer, lengths, out).run()


@triton.jit
def _score_kernel(
    queries, low, high, offsets, scores, q_row, q_head, q_dim, heads, group, max_pages, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, stop = tl.load(offsets + row).to(tl.int64), tl.load(offsets + row + 1)
    page = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    in_dim = d < HEAD_DIM
    x = tl.load(queries + row * q_row + head * q_head + d * q_dim, mask=in_dim, other=0.0).to(tl.float32)
    present = first + page < stop
    at = (((first + page) * (heads // group) + head // group) * HEAD_DIM)[:, None] + d[None, :]
    mask = present[:, None] & in_dim[None, :]
    least, most = tl.load(low + at, mask=mask, other=0.0), tl.load(high + at, mask=mask, other=0.0)
    bound = tl.sum(tl.maximum(x[None, :] * least, x[None, :] * most), 1) * scale
    target = (row * heads + head) * max_pages + page
    tl.store(scores + target, tl.where(present, bound, -float("inf")), mask=page < max_pages)


def plan_select(
    queries: Tensor, low: Tensor, high: Tensor, offsets: Tensor, max_pages: int, k: int, scale: float | None = None
) -> Plan[Selected]:
    """`select` without running it."""
    check_tensor("low", low, [torch.float32], [None, None, None], queries)
    check_tensor("high", high, [torch.float32], low.shape, queries)
    check_tensor("queries", queries, FLOAT_DTYPES, [None, None, low.shape[2]])
    batch, heads, head_dim = queries.shape
    check_tensor("offsets", offsets, [torch.int32], [batch + 1], queries)
    for name, tensor in (("low", low), ("high", high), ("offsets", offsets)):
        check_contiguous(name, tensor)
    if heads == 0 or heads % low.shape[1]:
        raise ValueError(f"queries: {heads} heads are not a multiple of {low.shape[1]} kv heads")
    if not 0 < k <= max_pages:
        raise ValueError(f"k must be 1 to {max_pages} pages, got {k}")
    scores = torch.empty((batch, heads, max_pages), dtype=torch.float32, device=queries.device)
    worth = torch.empty((batch, max_pages), dtype=torch.float32, device=queries.device)
    chosen = torch.empty((batch, k), dtype=torch.int64, device=queries.device)
    args = {
        "queries": queries, "low": low, "high": high, "offsets": offsets, "scores": scores,
        "q_row": queries.stride(0), "q_head": queries.stride(1), "q_dim": queries.stride(2), "heads": heads,
        "group": heads // low.shape[1], "max_pages": max_pages,
        "scale": 1 / math.sqrt(head_dim) if scale is None else scale, "HEAD_DIM": head_dim,
        "BLOCK_D": next_power_of_2(head_dim), "BLOCK_P": 32,
    }  # fmt: skip

    def choose() -> None:
        # A sequence without pages has no finite score: its softmax is NaN, and counts as nothing.
        torch.mean(scores.softmax(2).nan_to_num_(0.0), 1, out=worth)
        there = torch.arange(max_pages, device=worth.device) < offsets.diff()[:, None]
        # Stable: of pages that are worth the same the first ones, as on the CPU, and the same ones each time.
        best = torch.where(there, worth, -1.0).sort(dim=1, descending=True, stable=True).indices[:, :k]
        last = torch.where(there.gather(1, best), best, max_pages).sort(1).values
        chosen.copy_(torch.where(last < max_pages, last, NO_PAGE))

    launch = Launch(_score_kernel, (-(-max_pages // 32), batch, heads), args)
    return Plan(Selected(chosen, worth), (scores, worth, chosen), (launch, Call(choose)))


def select(
    queries: Tensor, low: Tensor, high: Tensor, offsets: Tensor, max_pages: int, k: int, scale: float | None = None
) -> Selected:
    """The `k` pages of each sequence that its query may weigh most. Twin: `reference.select`.

    queries    float [batch, heads, head_dim], any strides, turned as the keys are, not scaled
    low, high  fp32 [all pages, kv_heads, head_dim], see `bounds`, sequence after sequence
    offsets    int32 [batch + 1]: where each sequence's pages begin; no sequence has more than `max_pages`

    Raises ValueError for wrong shapes, types, devices or k.
    """
    return plan_select(queries, low, high, offsets, max_pages, k, scale).run()
