"""Matrices in the CPU's panels, as they came over the link, to what the card computes with.

Streamed layers cross the link as they lie in the file: quantized, and checked by its digests. The card lays them out
anew in its own memory, which is some forty times as fast as the link.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierd.kernels import card_bytes
from tierd.kernels.gpu.launch import FLOAT_DTYPES, Launch, Plan, check_contiguous, check_tensor
from tierd.kernels.gpu.packing import GPU_PANEL_ROWS, PAIR_COLS, GpuMatrix
from tierd.kernels.gpu.products import QUANTIZED, Matrix
from tierd.kernels.packing import WeightFormat, panels, sections

_BLOCK_COLS = 64
_NO_SCALES, _ROW_SCALES, _GROUP_SCALES, _BLOCK_SCALES = range(4)
# Of each format: bits of a code, what its scales are, and in how many parts they cut a block of 256 columns.
_KINDS = {
    WeightFormat.FP32: (32, _NO_SCALES, 0),
    WeightFormat.BF16: (16, _NO_SCALES, 0),
    WeightFormat.INT8: (8, _ROW_SCALES, 0),
    WeightFormat.INT8_G32: (8, _GROUP_SCALES, 0),
    WeightFormat.INT4_G32: (4, _GROUP_SCALES, 0),
    WeightFormat.INT5_G32: (5, _GROUP_SCALES, 0),
    WeightFormat.INT4_K: (4, _BLOCK_SCALES, 8),
    WeightFormat.INT5_K: (5, _BLOCK_SCALES, 8),
    WeightFormat.INT8_K: (8, _BLOCK_SCALES, 16),
}
_QUANT_TYPES = {32: torch.float32, 16: torch.int16, 8: torch.int8, 4: torch.int32, 5: torch.int32}


@triton.jit
def _repack_kernel(
    quants, scales, minimums, out_quants, out_scales, rows, cols, BITS: tl.constexpr,
):  # fmt: skip
    """A pair of groups of 32 rows, from panels of 16."""
    pair, panel = tl.program_id(0), tl.program_id(1).to(tl.int64)
    COLS: tl.constexpr = 64 if BITS == 8 else 32
    r, c = tl.arange(0, 32), tl.arange(0, COLS)
    row = panel * 32 + r
    there = row < rows
    source, lane = row // 16, r % 16
    col = pair * 64 + c
    is_first = there[None, :] & (col < cols)[:, None]
    if BITS == 8:
        at = (source * cols * 16 + lane)[None, :] + (col * 16)[:, None]
        out = tl.load(quants + at, mask=is_first, other=0).to(tl.int32) ^ 128
    else:
        line = (source * (cols // 8) * 16 + lane)[None, :] + (col // 8 * 16)[:, None]
        shift = (c % 8 * 4)[:, None]
        first = tl.load(quants + line, mask=is_first, other=0)
        is_second = there[None, :] & (col + 32 < cols)[:, None]
        second = tl.load(quants + line + 64, mask=is_second, other=0)  # four words on
        out = ((first >> shift) & 15) | (((second >> shift) & 15) << 4)
    block = panel * tl.num_programs(0) + pair
    tl.store(out_quants + block * (COLS * 32) + (c * 32)[:, None] + r[None, :], (out & 255).to(tl.uint8))
    groups = cols // 32
    at = source * groups * 16 + pair * 32 + lane
    has_second = there & ((r & 0) + pair * 2 + 1 < groups)  # r: the interpreter wants a vector
    low = tl.load(scales + at, mask=there, other=0).to(tl.int32) & 0xFFFF
    high = tl.load(scales + at + 16, mask=has_second, other=0).to(tl.int32) & 0xFFFF
    if BITS == 8:
        tl.store(out_scales + block * 32 + r, low | (high << 16))
    else:
        low_min = tl.load(minimums + at, mask=there, other=0).to(tl.int32) & 0xFFFF
        high_min = tl.load(minimums + at + 16, mask=has_second, other=0).to(tl.int32) & 0xFFFF
        tl.store(out_scales + block * 64 + r, low | (low_min << 16))
        tl.store(out_scales + block * 64 + 32 + r, high | (high_min << 16))


@triton.jit
def _scale_at(groups, counts, panel, c, r, cols, there, SCALES: tl.constexpr, PARTS: tl.constexpr):
    """Scales, or minimums, of columns `c` and rows `r` of a panel: fp32."""
    if SCALES == 2:
        at = (panel * (cols // 32) * 16 + r)[None, :] + (c // 32 * 16)[:, None]
        found = tl.load(groups + at, mask=there, other=0.0).to(tl.float32)
    else:
        block = (panel * (cols // 256) + c // 256) * (32 + 16 * PARTS)  # bytes
        step = tl.load(groups + (block // 2)[:, None] + r[None, :], mask=there, other=0.0).to(tl.float32)
        part = c % 256 // (256 // PARTS)
        count = tl.load(counts + (block + 32 + part * 16)[:, None] + r[None, :], mask=there, other=0).to(tl.float32)
        found = step * count
    return found


@triton.jit
def _dense_kernel(
    quants, scales, scale_counts, minimums, minimum_counts, out, rows, cols, BITS: tl.constexpr, SCALES: tl.constexpr,
    PARTS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    panel = tl.program_id(1).to(tl.int64)
    r, c = tl.arange(0, 16), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = (c < cols)[:, None] & (r < 16)[None, :]
    if BITS >= 8:
        q = tl.load(quants + (panel * cols * 16 + r)[None, :] + (c * 16)[:, None], mask=there, other=0)
        if BITS == 16:
            w = (q.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            w = q.to(tl.float32)
    else:
        if BITS == 4:
            line = (panel * (cols // 8) * 16 + r)[None, :] + (c // 8 * 16)[:, None]
            q = (tl.load(quants + line, mask=there, other=0) >> (c % 8 * 4)[:, None]) & 15
        else:
            group = (panel * (cols // 32) * 80 + r)[None, :] + (c // 32 * 80)[:, None]
            word = tl.load(quants + group + (c % 32 // 8 * 16)[:, None], mask=there, other=0)
            q = (word >> (c % 8 * 4)[:, None]) & 15
            place = c % 8 // 4 * 16 + c % 32 // 8 * 4 + c % 4
            q |= ((tl.load(quants + group + 64, mask=there, other=0) >> place[:, None]) & 1) << 4
        w = q.to(tl.float32)
    if SCALES == 1:
        w *= tl.load(scales + panel * 16 + r)[None, :]
    if SCALES >= 2:
        w *= _scale_at(scales, scale_counts, panel, c, r, cols, there, SCALES, PARTS)
    if HAS_MINIMUMS:
        w += _scale_at(minimums, minimum_counts, panel, c, r, cols, there, SCALES, PARTS)
    row = panel * 16 + r
    tl.store(out + (row * cols)[None, :] + c[:, None], w.to(out.dtype.element_ty), mask=there & (row < rows)[None, :])


def plan_expand(
    format: WeightFormat, rows: int, cols: int, source: Tensor, dest: Tensor, dtype: torch.dtype
) -> Plan[Matrix]:
    """`expand` without running it."""
    at = sections(format, rows, cols)
    check_tensor("source", source, [torch.uint8], [at.total_bytes])
    width = torch.empty(0, dtype=dtype).element_size()
    check_tensor("dest", dest, [torch.uint8], [card_bytes.matrix_bytes(format, rows, cols, width)], source)
    for name, tensor in (("source", source), ("dest", dest)):
        check_contiguous(name, tensor)
        if tensor.device.type != "meta" and tensor.data_ptr() % 64:
            raise ValueError(f"{name}: must begin at a multiple of 64 bytes")
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype: must be a float type, got {dtype}")
    bits, kind, parts = _KINDS[format]
    quants = source[: at.quants_bytes].view(_QUANT_TYPES[bits])
    scales = source[at.scales_offset : at.scales_offset + at.scales_bytes]
    minimums = source[at.minimums_offset : at.minimums_offset + at.minimums_bytes]
    if format in QUANTIZED and dtype != torch.float32:
        return _repacking(format, rows, cols, (quants, scales.view(torch.int16), minimums.view(torch.int16)), dest)
    out = dest[: rows * cols * width].view(dtype).view(rows, cols)
    halves = torch.float32 if kind == _ROW_SCALES else torch.float16
    args = {
        "quants": quants, "scales": scales.view(halves) if scales.numel() else None,
        "scale_counts": scales.view(torch.int8) if kind == _BLOCK_SCALES else None,
        "minimums": minimums.view(torch.float16) if minimums.numel() else None,
        "minimum_counts": minimums if kind == _BLOCK_SCALES else None,
        "out": out, "rows": rows, "cols": cols, "BITS": bits, "SCALES": kind, "PARTS": parts,
        "HAS_MINIMUMS": minimums.numel() > 0, "BLOCK": _BLOCK_COLS,
    }  # fmt: skip
    grid = (-(-cols // _BLOCK_COLS), panels(rows))
    return Plan(out, (out,), (Launch(_dense_kernel, grid, args, 4, 1),))


def _repacking(
    format: WeightFormat, rows: int, cols: int, parts: tuple[Tensor, Tensor, Tensor], dest: Tensor
) -> Plan[Matrix]:
    size = card_bytes.quants_bytes(format, rows, cols)
    first, is_int4 = card_bytes.aligned(size), format is WeightFormat.INT4_G32
    shape = [-(-rows // GPU_PANEL_ROWS), -(-cols // PAIR_COLS)]
    quants = dest[:size].view(*shape, -1, GPU_PANEL_ROWS)
    scales = dest[first : first + card_bytes.scales_bytes(format, rows, cols)].view(torch.int32)
    matrix = GpuMatrix(
        format, rows, cols, quants, scales.view(*shape, *([2] if is_int4 else []), GPU_PANEL_ROWS)
    )
    args = {
        "quants": parts[0] if is_int4 else parts[0].view(torch.uint8), "scales": parts[1],
        "minimums": parts[2] if is_int4 else None, "out_quants": quants, "out_scales": scales, "rows": rows,
        "cols": cols, "BITS": 4 if is_int4 else 8,
    }  # fmt: skip
    return Plan(matrix, (quants, scales), (Launch(_repack_kernel, (shape[1], shape[0]), args, 4, 1),))


def expand(format: WeightFormat, rows: int, cols: int, source: Tensor, dest: Tensor, dtype: torch.dtype) -> Matrix:
    """A packed matrix of the CPU's layout (`kernels/packing.py`) as `products.to_card` would make it, bit for bit.

    source  uint8 [packed bytes], where it came to lie
    dest    uint8 [`card_bytes.matrix_bytes`], where it goes; the result is views of it
    dtype   of the activations: int4-g32 and int8-g32 keep their codes for those of 16 bits, all else becomes dense

    Twin: `reference.weights`, for what becomes dense; for what keeps its codes `packing.from_panels`. Raises ValueError
    for a wrong size, type or alignment.
    """
    return plan_expand(format, rows, cols, source, dest, dtype).run()
