"""Extend attention: chunks of new rows over the cached pages of their sequences, and causally over one another.

Each program takes some rows of one sequence with all query heads of one kv head, packed into one tile of the tensor
cores: row r and head h of a group of G are line r * G + h. Keys and values are then read once for the group, and a
chunk of few rows still fills the tile. The new tokens' keys and values come as tensors, so that it does not matter
when, where and in which format they are written to pages.

Sources of the method: FlashAttention-2 (Dao 2023), PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierd.kernels.gpu.decode import check_queries
from tierd.kernels.gpu.launch import FLOAT_DTYPES, Launch, Plan, check_contiguous, check_tensor, next_power_of_2
from tierd.kernels.gpu.merge import Merged
from tierd.kernels.gpu.pages import PAGE_DTYPES, PageTable, copy_places, load_either, places, turning
from tierd.kernels.gpu.softmax import LOG2_E, accumulate, finished, scores_of

MAX_GROUP = 64


@triton.jit
def _sight(length, rows, tile, row, is_line, window, own, HAS_WINDOWS: tl.constexpr):
    """The first position that some row of a tile sees, and how many back from itself its lines see; `own` [M] windows
    count beside that of all. Without any a row sees everything before it."""
    reach = tl.where(window > 0, window, length + rows)
    low = length + tile - reach + 1
    if HAS_WINDOWS:
        own = tl.minimum(tl.where(own > 0, own, length + rows), reach)
        low = tl.min(tl.where(is_line, length + row - own + 1, length + rows), 0)
        reach = own[:, None]
    return tl.maximum(low, 0), reach


@triton.jit
def _extend_kernel(
    queries, new_keys, new_values, row_offsets, pages, offsets, lengths, windows, base, sinks, out, lse,
    q_row, q_head, q_dim, k_row, k_head, k_dim, v_row, v_head, v_dim, out_row, out_head, lse_row,
    window, layer_offset, value_offset, key_stride, value_stride, scale, soft_cap,
    copies, copy_base, copy_layer, copy_values, COPY_BYTES: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr, GROUP: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_WINDOWS: tl.constexpr,
):  # fmt: skip
    TILE_ROWS: tl.constexpr = BLOCK_M // HEADS
    sequence, kv_head = tl.program_id(2), tl.program_id(1)
    first_row = tl.load(row_offsets + sequence).to(tl.int64)
    rows = (tl.load(row_offsets + sequence + 1) - first_row).to(tl.int32)
    tile = tl.program_id(0) * TILE_ROWS
    if tile < rows:
        length = tl.load(lengths + sequence)
        line = tl.arange(0, BLOCK_M)
        row = tile + line // HEADS
        head = kv_head * HEADS + line % HEADS
        is_line = (line // HEADS < TILE_ROWS) & (row < rows)
        d = tl.arange(0, BLOCK_D)
        in_dim = d < HEAD_DIM
        x = tl.load(
            queries + ((first_row + row) * q_row + head * q_head)[:, None] + (d * q_dim)[None, :],
            mask=is_line[:, None] & in_dim[None, :],
            other=0.0,
        )
        largest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        if HAS_SINKS:
            largest = tl.load(sinks + head, mask=is_line, other=0.0).to(tl.float32) * LOG2_E
            total = total + 1.0
        sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        own = tl.load(windows + first_row + row, mask=is_line, other=0) if HAS_WINDOWS else 0
        low, reach = _sight(length, rows, tile, row, is_line, window, own, HAS_WINDOWS)

        key_plane = base + layer_offset + kv_head.to(tl.int64) * key_stride
        value_plane = base + layer_offset + value_offset + kv_head.to(tl.int64) * value_stride
        first_page = tl.load(offsets + sequence).to(tl.int64)
        for start in range(low // BLOCK_N * BLOCK_N, length, BLOCK_N):
            token = start + tl.arange(0, BLOCK_N)
            page = token // 16
            present = (page * 16 < length) & (page * 16 + 16 > low)
            keys, values = load_either(
                x, pages, copies, first_page, base, copy_base, key_plane, value_plane, kv_head, copy_layer, copy_values,
                start, token, present, d, HEAD_DIM, ELEMENT_BYTES, GROUP, KEY_BITS, VALUE_BITS, COPY_BYTES,
            )  # fmt: skip
            held = (token >= low) & (token < length)
            values = tl.where(held[:, None], values, 0.0).to(values.dtype)
            seen = held[None, :] & (length + row[:, None] - token[None, :] < reach)
            scores = scores_of(x, keys, seen, scale, soft_cap, HAS_CAP)
            largest, total, sums = accumulate(scores, values, largest, total, sums)

        stop = tl.minimum(tile + TILE_ROWS, rows)
        for start in range(tl.maximum(low - length, 0) // BLOCK_N * BLOCK_N, stop, BLOCK_N):
            token = start + tl.arange(0, BLOCK_N)
            is_new = (token < stop) & (token >= low - length)
            keys = tl.load(
                new_keys + ((first_row + token) * k_row + kv_head * k_head)[None, :] + (d * k_dim)[:, None],
                mask=in_dim[:, None] & is_new[None, :],
                other=0.0,
            )
            values = tl.load(
                new_values + ((first_row + token) * v_row + kv_head * v_head)[:, None] + (d * v_dim)[None, :],
                mask=is_new[:, None] & in_dim[None, :],
                other=0.0,
            )
            distance = row[:, None] - token[None, :]
            seen = is_new[None, :] & (distance >= 0) & (distance < reach)
            scores = scores_of(x, keys, seen, scale, soft_cap, HAS_CAP)
            largest, total, sums = accumulate(scores, values, largest, total, sums)

        result, log_sum = finished(largest, total, sums)
        target = out + ((first_row + row) * out_row + head * out_head)[:, None] + d[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=is_line[:, None] & in_dim[None, :])
        tl.store(lse + (first_row + row) * lse_row + head, log_sum, mask=is_line)


def plan_extend(
    queries: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    row_offsets: Tensor,
    max_rows: int,
    table: PageTable,
    layer: int,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    window: int = 0,
    windows: Tensor | None = None,
    sinks: Tensor | None = None,
    into: Merged | None = None,
) -> Plan[Merged]:
    """`extend` without running it. `into`: contiguous tensors for the result, which may be fp32: to be merged."""
    layout = table.layout
    heads = check_queries(queries, table, layer, soft_cap, window)
    group = heads // layout.kv_heads
    if group > MAX_GROUP:
        raise ValueError(f"queries: at most {MAX_GROUP} query heads for each kv head, got {group}")
    dtype = queries.dtype
    for name, tensor in (("new_keys", new_keys), ("new_values", new_values)):
        check_tensor(name, tensor, [dtype], [len(queries), layout.kv_heads, layout.head_dim], queries)
    check_tensor("row_offsets", row_offsets, [torch.int32], [table.batch + 1], queries)
    check_contiguous("row_offsets", row_offsets)
    if windows is not None:
        check_tensor("windows", windows, [torch.int32], [len(queries)], queries)
        check_contiguous("windows", windows)
    if sinks is not None:
        check_tensor("sinks", sinks, FLOAT_DTYPES, [heads], queries)
    if max_rows < 0:
        raise ValueError(f"max_rows must not be negative, got {max_rows}")
    shape = (len(queries), heads, layout.head_dim)
    if into is None:
        lse = torch.empty(shape[:2], dtype=torch.float32, device=queries.device)
        into = Merged(torch.empty(shape, dtype=dtype, device=queries.device), lse)
    out, lse = into
    check_tensor("out", out, [dtype, torch.float32], shape, queries)
    check_tensor("lse", lse, [torch.float32], shape[:2], queries)
    row_bytes = next_power_of_2(layout.head_dim) * dtype.itemsize
    turned, turn_queries = turning(queries, layout)
    turned_keys, turn_keys = turning(new_keys, layout)
    # With 64 tokens registers spill; so they do with 128 lines where codes become numbers in registers.
    block_m, block_n = (128, 32) if row_bytes <= 256 and layout.format in PAGE_DTYPES else (64, 32)
    args = {
        "queries": turned, "new_keys": turned_keys, "new_values": new_values, "row_offsets": row_offsets,
        "pages": table.pages, "offsets": table.offsets, "lengths": table.lengths, "windows": windows,
        "base": table.base,
        "sinks": None if sinks is None else sinks.contiguous(), "out": out, "lse": lse,
        "q_row": turned.stride(0), "q_head": turned.stride(1), "q_dim": turned.stride(2),
        "k_row": turned_keys.stride(0), "k_head": turned_keys.stride(1), "k_dim": turned_keys.stride(2),
        "v_row": new_values.stride(0), "v_head": new_values.stride(1), "v_dim": new_values.stride(2),
        "out_row": out.stride(0), "out_head": out.stride(1), "lse_row": lse.stride(0), "window": window,
        **places(layout, layer), **copy_places(table.copies, layer),
        "scale": 1 / math.sqrt(layout.head_dim) if scale is None else scale, "soft_cap": soft_cap, "HEADS": group,
        "HEAD_DIM": layout.head_dim, "BLOCK_D": next_power_of_2(layout.head_dim), "BLOCK_M": block_m,
        "BLOCK_N": block_n, "HAS_CAP": soft_cap > 0,
        "HAS_SINKS": sinks is not None, "HAS_WINDOWS": windows is not None,
    }  # fmt: skip
    grid = (-(-max_rows // (block_m // group)), layout.kv_heads, table.batch)
    return Plan(Merged(out, lse), (out, lse), (*turn_queries, *turn_keys, Launch(_extend_kernel, grid, args, 8, 2)))


def extend(
    queries: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    row_offsets: Tensor,
    max_rows: int,
    table: PageTable,
    layer: int,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    window: int = 0,
    windows: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Merged:
    """Attention of new rows. Twin: `reference.extend`.

    queries      [rows, heads, head_dim] in the pages' element type (any float type for fp8 and packed pages), any
                 strides, not scaled; the rows of a sequence follow each other, the first one at the position after its
                 cached tokens
    new_keys     [rows, kv_heads, head_dim], same type, any strides; `new_values` too
    row_offsets  int32 [batch + 1]: where the rows of each sequence begin; rows before the first or after the last
                 offset are not written
    max_rows     no sequence has more rows: the size of the grid
    table        the cached pages of each sequence, its lengths being cached tokens; none is fine
    windows      int32 [rows]: beside `window`, one of each row's own, or 0
    scale, soft_cap, window, sinks  as in `decode`

    Returns out [rows, heads, head_dim] in the queries' type and lse fp32 [rows, heads]. Raises ValueError for wrong
    shapes, types, devices or options, and for more than 64 query heads for each kv head.
    """
    return plan_extend(
        queries, new_keys, new_values, row_offsets, max_rows, table, layer, scale=scale, soft_cap=soft_cap,
        window=window, windows=windows, sinks=sinks,
    ).run()  # fmt: skip
