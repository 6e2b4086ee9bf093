"""Products of a mixture: the rows of each expert times its matrices, which a table of addresses names.

A program takes a tile of rows that go through one expert (`routing.py`) and a panel of that expert's outputs, as
`matmul.py` does with the rows of a pass. Which expert, and where it lies, it reads when it runs. What is no tile, and
what goes through an expert that is not there, is left out: nothing is written for it.

Up to 64 rows of a pass are cut into tiles of 16, and the columns into parts by a rule that knows the matrices alone: a
row's bits do not depend on its company. More rows are cut into larger tiles. Parts are added up, in order, by whoever
reads them next.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierd.kernels.gpu.experts import ALIGN_BYTES, COLUMNS, DOWN, GATE_UP, Kind
from tierd.kernels.gpu.launch import FLOAT_DTYPES, Launch, check_contiguous, check_tensor
from tierd.kernels.gpu.matmul import MAX_DECODE_ROWS, add_pairs, column_splits, panel_places
from tierd.kernels.gpu.packing import GPU_PANEL_ROWS, PAIR_COLS
from tierd.kernels.gpu.routing import TILE_FIELDS, Grouped
from tierd.kernels.packing import WeightFormat

_BITS = {WeightFormat.INT4_G32: 4, WeightFormat.INT8_G32: 8, None: 16}
_LARGE_GROUP_ROWS = 96  # of an expert on average: from here on tiles of 128 rows are filled


class Shape(NamedTuple):
    """How a product is cut: `tile_rows` as in `routing.Tiling`."""

    tile_rows: int
    outputs: int
    warps: int
    stages: int

    @staticmethod
    def of(rows: int, used: int, experts: int, dtype: torch.dtype) -> Shape:
        """For a pass of so many rows."""
        if rows <= MAX_DECODE_ROWS or dtype == torch.float32:
            return Shape(16, GPU_PANEL_ROWS, 4, 4)
        return Shape(128 if rows * used >= _LARGE_GROUP_ROWS * experts else 64, 128, 8, 3)

    @property
    def is_for_few(self) -> bool:
        """Whether columns are cut, too."""
        return self.tile_rows == 16

    def parts(self, outputs: int, cols: int, used: int) -> int:
        """Parts that the columns of matrices are cut into, of which a row reads `used`."""
        panels, pairs = -(-outputs // GPU_PANEL_ROWS), -(-cols // PAIR_COLS)
        return column_splits(panels * used, pairs) if self.is_for_few else 1


@triton.jit
def _at(address, base, BYTES: tl.constexpr):
    """A pointer to where elements of `base`'s type lie, known to be aligned (see `pages.py`)."""
    away = address - base.to(tl.int64)
    if BYTES > 1:  # the compiler drops a division by one, and what was said of its result
        away = away // BYTES
    return base + tl.multiple_of(away, 16)


@triton.jit
def _add_dense(
    sums, x_at, is_row, dense, n, outputs, cols, first_pair, stop_pair, HAS_TAIL: tl.constexpr
):
    """Adds the products with a matrix of plain numbers. `x_at` [rows, 64] points to the first columns."""
    k = tl.arange(0, 64)
    w_at = dense + (n.to(tl.int64) * cols)[None, :] + k[:, None]
    for pair in range(first_pair, stop_pair):
        x_mask, w_mask = is_row[:, None], (n < outputs)[None, :]
        if HAS_TAIL:
            there = k + pair * 64 < cols
            x_mask, w_mask = x_mask & there[None, :], w_mask & there[:, None]
        x = tl.load(x_at + pair * 64, mask=x_mask, other=0.0)
        w = tl.load(w_at + pair * 64, mask=w_mask, other=0.0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    return sums


@triton.jit
def _grouped_kernel(
    x, tiles, slot_pairs, table, codes, words, floats, dense, out, x_row, out_part, out_row, used, outputs, cols, pairs,
    part_pairs,
    FIRST: tl.constexpr, FIELDS: tl.constexpr, TO_PAIRS: tl.constexpr, BITS: tl.constexpr, DENSE_BYTES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TAIL: tl.constexpr,
):  # fmt: skip
    tile, part = tiles + tl.program_id(1) * 3, tl.program_id(2)
    expert = tl.load(tile)
    if expert < 0:
        return
    line = table + expert * FIELDS + FIRST
    address = tl.load(line)
    if address == 0:
        return
    i = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = i < tl.load(tile + 2)
    slot = tl.load(tile + 1) + i
    if TO_PAIRS:
        source = slot
    else:
        source = tl.load(slot_pairs + slot, mask=is_row, other=0) // used
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first, stop = part * part_pairs, (part + 1) * part_pairs
    x_line = x + (source.to(tl.int64) * x_row)[:, None]
    if BITS == 16:
        x_at = x_line + tl.arange(0, 64)[None, :]
        sums = _add_dense(sums, x_at, is_row, _at(address, dense, DENSE_BYTES), n, outputs, cols, first, stop, HAS_TAIL)
    else:
        k = tl.arange(0, 32)
        scales = _at(tl.load(line + 1), words, 4)
        quant_at, scale_at = panel_places(_at(address, codes, 1), scales, n, k, pairs, BITS)
        sums = add_pairs(
            sums, x_line + k[None, :], 1, is_row, k, quant_at, scale_at, n < (outputs + 31) // 32 * 32, cols, first,
            stop, BITS, UNROLL, HAS_TAIL,
        )  # fmt: skip
    in_outputs = n < outputs
    if HAS_BIAS:
        if part == 0:
            sums += tl.load(_at(tl.load(line + 2), floats, 4) + n, mask=in_outputs, other=0.0)[None, :]
    if TO_PAIRS:
        target = tl.load(slot_pairs + slot, mask=is_row, other=0)
    else:
        target = slot
    at = out + part * out_part + (target.to(tl.int64) * out_row)[:, None] + n[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_row[:, None] & in_outputs[None, :])


def grouped_launch(
    x: Tensor, grouped: Grouped, table: Tensor, which: int, kind: Kind, shape: Shape, used: int, has_bias: bool,
    out: Tensor,
) -> Launch:  # fmt: skip
    """The launch of one of an expert's two products, for all tiles.

    x        of the type of activations: for GATE_UP [rows, hidden], for DOWN [slots, intermediate], contiguous
    grouped  the tiles are of `shape.tile_rows`
    table    int64 [experts, COLUMNS]: see `experts.py`; `which` is GATE_UP or DOWN, `kind` what is found there
    used     experts that a row goes through
    out      float [parts, slots, outputs] for GATE_UP, for DOWN [parts, pairs, outputs], contiguous; parts as `shape`
             says. The first part has the bias in it

    Raises ValueError for a wrong shape, type, stride or device.
    """
    if which not in (GATE_UP, DOWN):
        raise ValueError(f"an expert's products are {GATE_UP} and {DOWN}, got {which}")
    check_tensor("x", x, [kind.dtype], [None, kind.cols], table)
    pairs, parts = len(grouped.slot_pairs), shape.parts(kind.rows, kind.cols, used)
    check_tensor("table", table, [torch.int64], [None, COLUMNS])
    check_tensor("tiles", grouped.tiles, [torch.int32], [None, TILE_FIELDS], table)
    check_tensor("out", out, FLOAT_DTYPES, [parts, pairs, kind.rows], table)
    for name, tensor in (("x", x), ("table", table), ("tiles", grouped.tiles), ("out", out)):
        check_contiguous(name, tensor)
    num_pairs = -(-kind.cols // PAIR_COLS)
    part_pairs, unrolls = num_pairs // parts, shape.is_for_few and num_pairs // parts % 2 == 0
    if table.device.type != "meta" and table.data_ptr() % ALIGN_BYTES:
        raise ValueError(f"table: must begin at a multiple of {ALIGN_BYTES} bytes")
    args: dict[str, Any] = {
        "x": x, "tiles": grouped.tiles, "slot_pairs": grouped.slot_pairs, "table": table,
        # It stands for memory in general, too, see `pages.py`.
        "codes": table.view(torch.uint8), "words": table.view(torch.int32), "floats": table.view(torch.float32),
        "dense": table.view(kind.dtype),
        "out": out, "x_row": x.stride(0), "out_part": out.stride(0), "out_row": out.stride(1), "used": used,
        "outputs": kind.rows, "cols": kind.cols, "pairs": num_pairs, "part_pairs": part_pairs,
        "FIRST": which, "FIELDS": COLUMNS, "TO_PAIRS": which == DOWN, "BITS": _BITS[kind.format],
        "DENSE_BYTES": kind.dtype.itemsize, "BLOCK_M": shape.tile_rows, "BLOCK_N": shape.outputs,
        "UNROLL": 2 if unrolls else 1, "HAS_BIAS": has_bias, "HAS_TAIL": kind.cols % PAIR_COLS != 0,
    }  # fmt: skip
    grid = (-(-kind.rows // shape.outputs), len(grouped.tiles), parts)
    return Launch(_grouped_kernel, grid, args, shape.warps, shape.stages)
