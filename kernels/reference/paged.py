"""Twins of the kernels that read and write pages, in float64: slow, direct, one sequence at a time.

They find a page as the kernels do, by the address of its record, within `memories`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tierd.kernels.layout import PageLayout
from tierd.kernels.reference.packed import FP8_MAX, PAGE_DTYPES, read_packed, write_packed


def page_planes(memories: Sequence[Tensor], address: int, layout: PageLayout, layer: int) -> tuple[Tensor, Tensor]:
    """A page's keys and values in one layer, both [kv_heads, token, head_dim].

    Views, or of a packed page what its codes stand for, in float64. Raises ValueError for an address that does not lie
    in `memories` (contiguous tensors) with a whole record.
    """
    record = _bytes_at(memories, address, layout.payload_bytes)
    if layout.packed:
        return read_packed(_layer(record, layout, layer), layout)
    planes = record.view(PAGE_DTYPES[layout.format]).view(layout.num_layers, 2, layout.kv_heads, -1)[layer]
    keys = planes[0].view(layout.kv_heads, layout.head_dim, layout.page_tokens)
    return keys.transpose(1, 2), planes[1].view(layout.kv_heads, layout.page_tokens, layout.head_dim)


def attend(
    queries: Tensor,  # [rows, heads, head_dim]
    keys: Tensor,  # [tokens, kv_heads, head_dim]
    values: Tensor,  # the same
    visible: Tensor,  # bool [rows, tokens]
    scale: float,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,  # [heads]
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention: out [rows, heads, head_dim], lse [rows, heads], weights [rows, heads, tokens], all float64.

    With a soft cap c scores become c * tanh(score / c). A sink is one more score of each head whose value is zero. A
    row that sees nothing gets zeros and an lse of minus infinity, or that of its sink.
    """
    rows, heads, _ = queries.shape
    group = heads // max(keys.shape[1], 1)
    k, v = (plane.double().repeat_interleave(group, 1) for plane in (keys, values))
    # What no row sees may be anything, NaN included.
    k, v = (torch.where(visible.any(0)[:, None, None], plane, 0.0) for plane in (k, v))
    scores = torch.einsum("rhd,thd->rht", queries.double(), k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible[:, None, :], -math.inf)
    extra = queries.new_full((heads,), -math.inf, dtype=torch.float64) if sinks is None else sinks.double()
    extra = extra[None, :, None].expand(rows, heads, 1)
    lse = torch.cat((scores, extra), -1).logsumexp(-1)
    weights = torch.where(visible[:, None, :], (scores - lse[:, :, None]).exp(), 0.0)
    return torch.einsum("rht,thd->rhd", weights, v), lse, weights


def _gather(
    memories: Sequence[Tensor], addresses: Sequence[int], layout: PageLayout, layer: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence's pages, both float64 [tokens, kv_heads, head_dim]."""
    empty = like.new_zeros((0, layout.kv_heads, layout.head_dim), dtype=torch.float64)
    planes = [page_planes(memories, address, layout, layer) for address in addresses]
    keys = torch.cat([empty, *(k.transpose(0, 1).double() for k, _ in planes)])
    values = torch.cat([empty, *(v.transpose(0, 1).double() for _, v in planes)])
    return keys, values


def decode(
    queries: Tensor,  # [batch, heads, head_dim]
    memories: Sequence[Tensor],
    layout: PageLayout,
    layer: int,
    pages: Sequence[Sequence[int]],  # addresses of each sequence's records
    lengths: Sequence[int],
    positions: Sequence[int] | None = None,
    scale: float = 1.0,
    soft_cap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One query a sequence over its pages: out, lse, and mass [all pages, kv_heads], the share of the softmax that
    falls on each page, mean over the heads of a group. `positions` as in the kernel: counted from the first token."""
    outs, lses, masses = [], [], []
    for row, (addresses, length) in enumerate(zip(pages, lengths, strict=True)):
        keys, values = _gather(memories, addresses, layout, layer, queries)
        at = length - 1 if positions is None else positions[row]
        token = torch.arange(len(keys), device=queries.device)
        visible = (token < length) & (token <= at) & ((token > at - window) if window else True)
        out, lse, weights = attend(queries[row : row + 1], keys, values, visible[None], scale, soft_cap, sinks)
        outs.append(out)
        lses.append(lse)
        by_page = weights[0].reshape(weights.shape[1], len(addresses), layout.page_tokens).sum(-1)
        group = weights.shape[1] // layout.kv_heads
        masses.append(by_page.T.reshape(len(addresses), layout.kv_heads, group).mean(-1))
    return torch.cat(outs), torch.cat(lses), torch.cat(masses)


def extend(
    queries: Tensor,  # [rows, heads, head_dim], the rows of each sequence together
    new_keys: Tensor,  # [rows, kv_heads, head_dim]
    new_values: Tensor,  # the same
    row_offsets: Sequence[int],  # [batch + 1]
    memories: Sequence[Tensor],
    layout: PageLayout,
    layer: int,
    pages: Sequence[Sequence[int]],
    lengths: Sequence[int],  # cached tokens of each sequence
    scale: float = 1.0,
    soft_cap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """New rows over the cached tokens of their sequence and, causally, the new ones: out and lse."""
    outs, lses = [], []
    for sequence, (addresses, length) in enumerate(zip(pages, lengths, strict=True)):
        rows = slice(row_offsets[sequence], row_offsets[sequence + 1])
        keys, values = _gather(memories, addresses, layout, layer, queries)
        keys, values = (
            torch.cat((old[:length], new[rows].double()))
            for old, new in ((keys, new_keys), (values, new_values))
        )
        token = torch.arange(len(keys), device=queries.device)
        at = length + torch.arange(rows.stop - rows.start, device=queries.device)[:, None]
        visible = (token <= at) & ((token > at - window) if window else True)
        out, lse, _ = attend(queries[rows], keys, values, visible, scale, soft_cap, sinks)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def merge(
    outs: Tensor,  # [parts, rows, heads, head_dim]
    lses: Tensor,  # [parts, rows, heads]; minus infinity: the part is empty and its `outs` may be anything
    sinks: Tensor | None = None,  # [heads]
) -> tuple[Tensor, Tensor]:
    """Attention over the union of the parts' tokens, float64."""
    all_lses = lses.double()
    if sinks is not None:
        all_lses = torch.cat((all_lses, sinks.double().expand(1, *lses.shape[1:])))
    empty = torch.full_like(lses[:1], -math.inf, dtype=torch.float64)
    lse = torch.cat((all_lses, empty)).logsumexp(0)
    present = lses != -math.inf
    weights = torch.where(present, (lses.double() - lse).exp(), 0.0)
    return (weights[..., None] * torch.where(present[..., None], outs.double(), 0.0)).sum(0), lse


def write(
    keys: Tensor,  # [rows, kv_heads, head_dim]
    values: Tensor,  # the same
    memories: Sequence[Tensor],
    layout: PageLayout,
    layer: int,
    spans: Sequence[tuple[int, int, int, int]],  # (address, first row, first token in the page, tokens)
) -> None:
    """Puts rows into pages: of a packed page, its first token before the others."""
    for address, row, token, count in sorted(spans, key=lambda span: span[2]):
        new_keys, new_values = (rows[row : row + count].transpose(0, 1) for rows in (keys, values))
        put_tokens(_bytes_at(memories, address, layout.payload_bytes), layout, layer, new_keys, new_values, token)


def put_tokens(
    record: Tensor, layout: PageLayout, layer: int, keys: Tensor, values: Tensor | None, first: int
) -> None:
    """Writes keys, and values if there are any, [kv_heads, tokens, head_dim] as tokens `first`.. of a record (uint8).

    The first token of a packed page comes with the others, or before them.
    """
    if layout.packed:
        write_packed(_layer(record, layout, layer), layout, keys, values, first)
        return
    planes = page_planes([record], record.data_ptr(), layout, layer)
    for plane, new in zip(planes, (keys, values), strict=True):
        if new is None:
            continue
        if layout.format == "fp8":
            new = new.clamp(-FP8_MAX, FP8_MAX)
        plane[:, first : first + new.shape[1]] = new.to(plane.dtype)


def _layer(record: Tensor, layout: PageLayout, layer: int) -> Tensor:
    return record[layer * layout.layer_bytes : (layer + 1) * layout.layer_bytes]


def _bytes_at(memories: Sequence[Tensor], address: int, size_bytes: int) -> Tensor:
    for memory in memories:
        start = address - memory.data_ptr()
        if 0 <= start <= memory.nbytes - size_bytes:
            return memory.view(-1).view(torch.uint8)[start : start + size_bytes]
    raise ValueError(f"no {size_bytes} bytes at address {address:#x}")


def gather(memories: Sequence[Tensor], addresses: Sequence[int], records: Tensor, size_bytes: int) -> None:
    """Copies the bytes at each address into the rows of `records`, uint8 [n, record bytes]."""
    for record, address in zip(records, addresses, strict=True):
        record[:size_bytes] = _bytes_at(memories, address, size_bytes)


def scatter(memories: Sequence[Tensor], addresses: Sequence[int], records: Tensor, size_bytes: int) -> None:
    """Copies the rows of `records` to the addresses."""
    for record, address in zip(records, addresses, strict=True):
        _bytes_at(memories, address, size_bytes)[:] = record[:size_bytes]


def shift(
    memories: Sequence[Tensor], addresses: Sequence[int], layout: PageLayout, layer: int, cos: Tensor, sin: Tensor
) -> None:
    """Turns each page's keys by its angles; cos and sin [pages, head_dim / 2]."""
    for index, address in enumerate(addresses):
        keys, _ = page_planes(memories, address, layout, layer)
        low, high = keys.double().chunk(2, -1)
        c, s = cos[index].double(), sin[index].double()
        shifted = torch.cat((low * c - high * s, high * c + low * s), -1)
        put_tokens(_bytes_at(memories, address, layout.payload_bytes), layout, layer, shifted, None, 0)
