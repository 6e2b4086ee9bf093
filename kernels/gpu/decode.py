"""Decode attention: one query a sequence over its pages, split along the sequence.

Each program takes 512 tokens of one sequence for up to 16 query heads of one kv head, so keys and values are read once
for the whole group, and leaves `(out, lse)` of its split; `merge` adds the splits up. The splits are cut at fixed
places whatever the batch is, and each is summed up in one order: a sequence's bits do not depend on its company.

A tile is one or two pages. Within a record a head's keys are [head_dim][token] and its values [token][head_dim] (see
`kernels/layout.py`), both in one piece of some KB, so all reads are whole 32-byte sectors. Reads are masked by whole
pages alone: a mask by token would break the 16-byte loads. Tokens that a query does not see are selected away after
the load, values included, so that stale memory, NaN included, has no influence.

Sources of the method: FlashAttention-2 (online softmax; Dao 2023), Flash-Decoding (splits merged by log-sum-exp),
PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierd.kernels.gpu.launch import Call, Launch, Plan, check_tensor, next_power_of_2
from tierd.kernels.gpu.merge import Merged, plan_merge
from tierd.kernels.gpu.pages import PAGE_DTYPES, PageTable, copy_places, load_either, places, query_dtypes, turning
from tierd.kernels.gpu.softmax import LN_2, accumulate, add_up, finished, finite_or_zero, scores_of
from tierd.kernels.layout import PAGE_TOKENS

SPLIT_TOKENS = 512
_BLOCK_HEADS = 16  # the smallest tile of the tensor cores


class Decoded(NamedTuple):
    """`out` [batch, heads, head_dim], `lse` fp32 [batch, heads], and on request `mass` fp32 [all pages, kv_heads]."""

    out: Tensor
    lse: Tensor
    mass: Tensor | None


@triton.jit
def visible_span(length, at, window, windows, row, HAS_WINDOWS: tl.constexpr):
    """The tokens [low, high) that the query of a row at position `at` sees of `length`; a window of 0 is none."""
    low = tl.where(window > 0, tl.maximum(at - window + 1, 0), 0)
    if HAS_WINDOWS:
        own = tl.load(windows + row)
        low = tl.maximum(low, tl.where(own > 0, at - own + 1, 0))
    return low, tl.minimum(length, at + 1)


@triton.jit
def _decode_kernel(
    queries, pages, offsets, lengths, positions, windows, base, outs, lses, page_lses,
    q_row, q_head, q_dim, outs_split, outs_row, outs_head, lses_split, lses_row,
    heads, group, head_blocks, window, layer_offset, value_offset, key_stride, value_stride, scale, soft_cap,
    copies, copy_base, copy_layer, copy_values, COPY_BYTES: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, SPLIT: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr, GROUP: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_WINDOWS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_MASS: tl.constexpr,
    HAS_OUT: tl.constexpr,
):  # fmt: skip
    split, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    kv_head, block = tl.program_id(1) // head_blocks, tl.program_id(1) % head_blocks
    length = tl.load(lengths + row)
    at = tl.load(positions + row) if HAS_POSITIONS else length - 1
    low, high = visible_span(length, at, window, windows, row, HAS_WINDOWS)
    in_group = block * BLOCK_H + tl.arange(0, BLOCK_H)
    head = kv_head * group + in_group
    is_head = in_group < group
    d = tl.arange(0, BLOCK_D)
    in_dim = d < HEAD_DIM
    first_page = tl.load(offsets + row).to(tl.int64)
    num_pages = (length + 15) // 16
    x = tl.load(
        queries + row * q_row + (head * q_head)[:, None] + (d * q_dim)[None, :],
        mask=is_head[:, None] & in_dim[None, :],
        other=0.0,
    )
    key_plane = base + layer_offset + kv_head.to(tl.int64) * key_stride
    value_plane = base + layer_offset + value_offset + kv_head.to(tl.int64) * value_stride
    largest = tl.full((BLOCK_H,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    sums = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    begin = tl.maximum(split * SPLIT, low // BLOCK_N * BLOCK_N)
    end = tl.minimum(split * SPLIT + SPLIT, high)
    for start in range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        page = token // 16
        present = (page < num_pages) & (page * 16 + 16 > low)
        keys, values = load_either(
            x, pages, copies, first_page, base, copy_base, key_plane, value_plane, kv_head, copy_layer, copy_values,
            start, token, present, d, HEAD_DIM, ELEMENT_BYTES, GROUP, KEY_BITS, VALUE_BITS, COPY_BYTES,
        )  # fmt: skip
        seen = (token >= low) & (token < high)
        scores = scores_of(x, keys, seen[None, :], scale, soft_cap, HAS_CAP)
        if HAS_MASS:
            by_page = tl.reshape(scores, (BLOCK_H, BLOCK_N // 16, 16))
            peak = finite_or_zero(tl.max(by_page, 2))
            sum_of_page = tl.sum(tl.exp2(by_page - peak[:, :, None]), 2)
            page_lse = (peak + tl.log2(tl.where(sum_of_page == 0.0, 1.0, sum_of_page))) * LN_2
            page_lse = tl.where(sum_of_page == 0.0, -float("inf"), page_lse)
            of_tile = start // 16 + tl.arange(0, BLOCK_N // 16)
            tl.store(
                page_lses + (first_page + of_tile)[None, :] * heads + head[:, None],
                page_lse,
                mask=is_head[:, None] & (of_tile < num_pages)[None, :],
            )
        if HAS_OUT:
            values = tl.where(seen[:, None], values, 0.0).to(values.dtype)
            largest, total, sums = accumulate(scores, values, largest, total, sums)
        else:  # then the compiler leaves out the loads of values
            largest, total = add_up(scores, largest, total)
    out, lse = finished(largest, total, sums)
    tl.store(lses + split * lses_split + row * lses_row + head, lse, mask=is_head)
    if HAS_OUT:
        if begin < end:
            tl.store(
                outs + split * outs_split + row * outs_row + (head * outs_head)[:, None] + d[None, :],
                out,
                mask=is_head[:, None] & in_dim[None, :],
            )


@triton.jit
def _mass_kernel(
    page_lses, lses, offsets, lengths, positions, windows, mass, heads, group, kv_heads, window,
    BLOCK_P: tl.constexpr, BLOCK_G: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_WINDOWS: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + row)
    at = tl.load(positions + row) if HAS_POSITIONS else length - 1
    low, high = visible_span(length, at, window, windows, row, HAS_WINDOWS)
    first_page, stop_page = tl.load(offsets + row).to(tl.int64), tl.load(offsets + row + 1)
    page = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    in_group = tl.arange(0, BLOCK_G)
    head = kv_head * group + in_group
    # The decode kernel went through these pages and no others: what is left of the scratch was never written.
    visited = (page * 16 < high) & (page * 16 + 16 > low)
    is_head = in_group < group
    lse = tl.load(lses + row * heads + head, mask=is_head, other=0.0)
    x = tl.load(
        page_lses + (first_page + page)[:, None] * heads + head[None, :],
        mask=visited[:, None] & is_head[None, :],
        other=-float("inf"),
    )
    share = tl.sum(tl.exp(x - tl.where(lse == -float("inf"), 0.0, lse)[None, :]), 1) / group
    tl.store(mass + (first_page + page) * kv_heads + kv_head, share, mask=first_page + page < stop_page)


def num_splits(max_pages: int) -> int:
    """Parts that the attention of a row over so many pages is made of at most."""
    return -(-max_pages * PAGE_TOKENS // SPLIT_TOKENS)


def split_launches(
    queries: Tensor,
    table: PageTable,
    layer: int,
    parts: tuple[Tensor | None, Tensor],
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    window: int = 0,
    windows: Tensor | None = None,
    positions: Tensor | None = None,
    page_lses: Tensor | None = None,
) -> tuple[Call | Launch, ...]:
    """The launches that leave a row's attention in parts, to be merged.

    parts      contiguous fp32 out [num_splits, batch, heads, head_dim] and lse [num_splits, batch, heads]. Without out
               no values are read
    table      the pages of two rows may be the same ones: of the offsets only the first of each row counts
    page_lses  fp32 [all pages, heads], that of each page is left there

    Otherwise as `decode`.
    """
    layout = table.layout
    heads = check_queries(queries, table, layer, soft_cap, window)
    batch, group = len(queries), heads // layout.kv_heads
    if batch != table.batch:
        raise ValueError(f"queries: {batch} rows for {table.batch} sequences")
    for name, vector in (("positions", positions), ("windows", windows)):
        if vector is not None:
            check_tensor(name, vector, [torch.int32], [batch], queries)
    splits = num_splits(table.max_pages)
    outs, lses = parts
    check_tensor("parts", lses, [torch.float32], [splits, batch, heads], queries)
    if outs is not None:
        check_tensor("parts", outs, [torch.float32], [splits, batch, heads, layout.head_dim], queries)
    # Tiles of some 16 KB, keys and values: with three stages two or three programs fit an SM of 100 KB.
    # Codes become numbers in registers: of two pages at once they would take all there are.
    wide = layout.format in PAGE_DTYPES and next_power_of_2(layout.head_dim) * layout.element_bytes <= 512
    head_blocks = -(-group // _BLOCK_HEADS)
    turned, turn = turning(queries, layout)
    args = {
        **_seen_by(table, window, windows, positions), "heads": heads, "group": group, "queries": turned,
        "pages": table.pages, "base": table.base, "outs": outs, "lses": lses, "page_lses": page_lses,
        "q_row": turned.stride(0), "q_head": turned.stride(1), "q_dim": turned.stride(2),
        "outs_split": batch * heads * layout.head_dim, "outs_row": heads * layout.head_dim,
        "outs_head": layout.head_dim, "lses_split": batch * heads, "lses_row": heads, "head_blocks": head_blocks,
        **places(layout, layer), **copy_places(table.copies, layer),
        "scale": 1 / math.sqrt(layout.head_dim) if scale is None else scale, "soft_cap": soft_cap,
        "HEAD_DIM": layout.head_dim, "BLOCK_D": next_power_of_2(layout.head_dim), "BLOCK_N": 32 if wide else 16,
        "BLOCK_H": _BLOCK_HEADS, "SPLIT": SPLIT_TOKENS, "HAS_CAP": soft_cap > 0, "HAS_MASS": page_lses is not None,
        "HAS_OUT": outs is not None,
    }  # fmt: skip
    return *turn, Launch(_decode_kernel, (splits, layout.kv_heads * head_blocks, batch), args, 4, 3)


def _seen_by(
    table: PageTable, window: int, windows: Tensor | None, positions: Tensor | None
) -> dict[str, Any]:
    """What both kernels are told of which tokens a row sees."""
    return {
        "offsets": table.offsets, "lengths": table.lengths,
        "positions": None if positions is None else positions.contiguous(),
        "windows": None if windows is None else windows.contiguous(), "window": window,
        "HAS_POSITIONS": positions is not None, "HAS_WINDOWS": windows is not None,
    }  # fmt: skip


def plan_decode(
    queries: Tensor,
    table: PageTable,
    layer: int,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    window: int = 0,
    windows: Tensor | None = None,
    sinks: Tensor | None = None,
    positions: Tensor | None = None,
    want_mass: bool = False,
) -> Plan[Decoded]:
    """`decode` without running it."""
    layout = table.layout
    heads = check_queries(queries, table, layer, soft_cap, window)
    shape = (num_splits(table.max_pages), len(queries), heads)
    outs = torch.empty((*shape, layout.head_dim), dtype=torch.float32, device=queries.device)
    lses = torch.empty(shape, dtype=torch.float32, device=queries.device)
    page_lses = None
    if want_mass:
        page_lses = torch.empty((len(table.pages), heads), dtype=torch.float32, device=queries.device)
    launches = split_launches(
        queries, table, layer, Merged(outs, lses), scale=scale, soft_cap=soft_cap, window=window, windows=windows,
        positions=positions, page_lses=page_lses,
    )  # fmt: skip
    merged = plan_merge(outs, lses, sinks, queries.dtype)
    launches, buffers = (*launches, *merged.launches), (outs, lses, *merged.buffers)
    if page_lses is None:
        return Plan(Decoded(*merged.result, None), buffers, launches)
    mass, launch = _plan_mass(table, page_lses, merged.result.lse, _seen_by(table, window, windows, positions))
    return Plan(Decoded(*merged.result, mass), (*buffers, page_lses, mass), (*launches, launch))


def plan_masses(queries: Tensor, table: PageTable, layer: int, sinks: Tensor | None = None) -> Plan[Tensor]:
    """`masses` without running it."""
    heads = check_queries(queries, table, layer, 0.0, 0)
    if sinks is not None:
        check_tensor("sinks", sinks, [torch.float32], [heads], queries)
    shapes = ((num_splits(table.max_pages), len(queries), heads), (len(table.pages), heads), (len(queries), heads))
    lses, page_lses, lse = (torch.empty(shape, dtype=torch.float32, device=queries.device) for shape in shapes)
    launches = split_launches(queries, table, layer, (None, lses), page_lses=page_lses)
    together = Call(lambda: torch.logsumexp(lses, 0, out=lse))
    if sinks is not None:
        together = Call(lambda: torch.logaddexp(torch.logsumexp(lses, 0), sinks, out=lse))
    mass, launch = _plan_mass(table, page_lses, lse, _seen_by(table, 0, None, None))
    return Plan(mass, (lses, page_lses, lse, mass), (*launches, together, launch))


def _plan_mass(table: PageTable, page_lses: Tensor, lse: Tensor, seen_by: dict[str, Any]) -> tuple[Tensor, Launch]:
    """Where the masses come to lie, and the launch that makes them of what pages and rows have."""
    kv_heads, heads = table.layout.kv_heads, page_lses.shape[1]
    mass = torch.empty((len(table.pages), kv_heads), dtype=torch.float32, device=lse.device)
    args = {
        **seen_by, "heads": heads, "group": heads // kv_heads, "page_lses": page_lses, "lses": lse, "mass": mass,
        "kv_heads": kv_heads, "BLOCK_P": 64, "BLOCK_G": next_power_of_2(heads // kv_heads),
    }  # fmt: skip
    return mass, Launch(_mass_kernel, (-(-table.max_pages // 64), len(lse), kv_heads), args)


def check_queries(queries: Tensor, table: PageTable, layer: int, soft_cap: float, window: int) -> int:
    """The checks that decode and extend share; returns the number of query heads."""
    layout = table.layout
    check_tensor("queries", queries, query_dtypes(layout), [None, None, layout.head_dim], table.base)
    heads = queries.shape[1]
    if heads == 0 or heads % layout.kv_heads:
        raise ValueError(f"queries: {heads} heads are not a multiple of {layout.kv_heads} kv heads")
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} of {layout.num_layers}")
    if not (soft_cap >= 0 and math.isfinite(soft_cap)):
        raise ValueError(f"soft_cap must be positive, or 0 for none, got {soft_cap}")
    if window < 0:
        raise ValueError(f"window must be positive, or 0 for none, got {window}")
    return heads


def decode(
    queries: Tensor,
    table: PageTable,
    layer: int,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    window: int = 0,
    windows: Tensor | None = None,
    sinks: Tensor | None = None,
    positions: Tensor | None = None,
    want_mass: bool = False,
) -> Decoded:
    """Attention of one query a sequence. Twin: `reference.decode`.

    queries    [batch, heads, head_dim] in the pages' element type (any float type for fp8 and packed pages), any
               strides, not scaled; query head h reads kv head h // (heads / kv_heads)
    table      the pages; a sequence without any gets zeros and an lse of minus infinity
    scale      of the scores, 1 / sqrt(head_dim) by default; soft_cap c makes them c * tanh(score / c)
    window     sees so many tokens, its own included, or all for 0; pages that are wholly out of it are not read
    windows    int32 [batch]: beside `window`, one of each sequence's own, or 0
    sinks      float [heads], a logit each with a value of zero: pass them to one of all merges of a sequence
    positions  int32 [batch], of the query, counted from the first token in the table; by default that of the last
               token. For a run that ends before the query: then a window is cut at the right place
    want_mass  also the share of the softmax that falls on each page, mean over the heads of a group, in the table's
               order; 0 for pages out of the window

    Raises ValueError for wrong shapes, types, devices or options.
    """
    return plan_decode(
        queries, table, layer, scale=scale, soft_cap=soft_cap, window=window, windows=windows, sinks=sinks,
        positions=positions, want_mass=want_mass,
    ).run()  # fmt: skip


def masses(queries: Tensor, table: PageTable, layer: int, sinks: Tensor | None = None) -> Tensor:
    """The `mass` of `decode`, without a window, and nothing else: no values are read. Twin: `reference.decode`.

    sinks  fp32 [heads] or None, as there

    Raises ValueError for wrong shapes, types or devices.
    """
    return plan_masses(queries, table, layer, sinks).run()
