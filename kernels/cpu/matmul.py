"""Matrix products of activations and packed weights: y[rows, outputs] = x[rows, cols] . w^T.

A matrix is named by a record (`MATRIX`) of addresses and strides. Formats with groups (`takes_integers`) take rows of x
that are quantized (integer.py, quantize.py), the others float32 (microkernel.py). A few rows go through the panels
directly: that is decoding, bound by memory. More rows share a tile of 256 columns (up to 16 KB: half of a first-level
cache), made once for up to 192 rows (192 x 256 values of x stay in the second level). Both add up in the same order, so
that they give the same bits.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tierd.kernels.cpu.integer import (
    MAX_TILE_GROUP_BYTES,
    X_QUANT_BYTES,
    X_SCALE_BYTES,
    direct_integer,
    expand,
    integer_tile_product,
    unit_bytes,
)
from tierd.kernels.cpu.microkernel import FORMAT_CODES, dequantize, direct, tile_product
from tierd.kernels.cpu.simd import (
    add,
    load8,
    load_bf16,
    load_f32,
    load_fp16,
    load_i8,
    load_u32,
    prefetch,
    store8,
    store_f32,
)
from tierd.kernels.cpu.team import finish, take, wait_for
from tierd.kernels.packing import BLOCK_COLS, GROUP_COLS, PANEL_ROWS, PackedMatrix, WeightFormat, panels, sections

_FP32, _BF16 = FORMAT_CODES[WeightFormat.FP32], FORMAT_CODES[WeightFormat.BF16]
_INT8, _INT8_G32 = FORMAT_CODES[WeightFormat.INT8], FORMAT_CODES[WeightFormat.INT8_G32]
_INT4_G32, _INT5_G32 = FORMAT_CODES[WeightFormat.INT4_G32], FORMAT_CODES[WeightFormat.INT5_G32]
_INT5_K = FORMAT_CODES[WeightFormat.INT5_K]
_INT8_K = FORMAT_CODES[WeightFormat.INT8_K]

MATRIX = np.dtype(
    [
        ("format", np.int64),
        ("panels", np.int64),
        ("cols", np.int64),
        ("quants", np.int64),
        ("panel_bytes", np.int64),  # from one panel's quants to the next
        ("scales", np.int64),
        ("minimums", np.int64),
        ("scale_panel_bytes", np.int64),  # the same for scales, and for minimums
        ("bias", np.int64),  # float32 [16 * panels], or 0
    ]
)

_FLOAT_TILE_COLS, _INTEGER_TILE_COLS = 256, 576
TILE_BYTES = max(_FLOAT_TILE_COLS * PANEL_ROWS * 4, _INTEGER_TILE_COLS // GROUP_COLS * MAX_TILE_GROUP_BYTES)
_BLOCK_ROWS = 192
_GROUP_PANELS = 4  # panels that go through a block of rows while it is in the second-level cache
_DIRECT_ROWS = 4
_ITEM_PANELS = 16  # the most panels taken at once when decoding: some 10 us
_PANEL_OUT_BYTES = np.int64(PANEL_ROWS * 4)  # typed: for a plain int Numba compiles a callee for that very value
NO_RESIDUAL = np.int64(0)


def describe_matrix(matrix: PackedMatrix, record: np.void) -> None:
    """Fills a MATRIX record without a bias. The record holds addresses: the matrix must outlive it."""
    at = sections(matrix.format, matrix.rows, matrix.cols)
    base, count = matrix.data.ctypes.data, panels(matrix.rows)
    record["format"] = FORMAT_CODES[matrix.format]
    record["panels"] = count
    record["cols"] = matrix.cols
    record["quants"] = base
    record["panel_bytes"] = at.quants_bytes // count
    record["scales"] = base + at.scales_offset
    record["minimums"] = base + at.minimums_offset
    record["scale_panel_bytes"] = at.scales_bytes // count


@njit(nogil=True, cache=True)
def takes_integers(m):
    """Whether products with this matrix take quantized rows of x."""
    return m.format >= _INT8_G32


@njit(nogil=True, cache=True)
def _decode_panels(m, x, x_stride, y, y_stride, rows, first, stop):
    """Panels first..stop for the few rows that `matmul` does not make tiles for."""
    if takes_integers(m):
        for p in range(first, stop):
            scale_at = p * m.scale_panel_bytes
            direct_integer(
                m.format, m.quants + p * m.panel_bytes, m.scales + scale_at, m.minimums + scale_at, x,
                x + 2 * m.cols, m.cols // GROUP_COLS, y + p * _PANEL_OUT_BYTES,
            )  # fmt: skip
        return
    p = first
    while p < stop:
        count = 2 if rows == 1 and p + 2 <= stop else 1
        direct(
            m.format, count, rows, m.quants + p * m.panel_bytes, m.panel_bytes, m.scales + p * m.scale_panel_bytes,
            m.scale_panel_bytes, x, x_stride, y + p * _PANEL_OUT_BYTES, y_stride, m.cols,
        )  # fmt: skip
        p += count


@njit(nogil=True, cache=True)
def _prefetch(at, bytes):
    """Asks for what lies there: the hardware follows no pieces of 2 KB."""
    for i in range(0, bytes, 64):
        prefetch(at + i)


@njit(nogil=True, cache=True)
def _prefetch_tile(m, panel, k, cols):
    """Asks for `cols` columns of a panel from column k on."""
    if not takes_integers(m):
        column_bytes = m.panel_bytes // m.cols
        _prefetch(m.quants + panel * m.panel_bytes + k * column_bytes, cols * column_bytes)
        return
    unit, quant_bytes, scale_bytes = unit_bytes(m.format)
    first, units = k // unit, cols // unit
    _prefetch(m.quants + panel * m.panel_bytes + first * quant_bytes, units * quant_bytes)
    offset = panel * m.scale_panel_bytes + first * scale_bytes
    _prefetch(m.scales + offset, units * scale_bytes)
    _prefetch(m.minimums + offset, units * scale_bytes)


@njit(nogil=True, cache=True)
def _tile_columns(m, x, x_stride, y, y_stride, rows, panel, k, cols, tile):
    """`cols` columns of one panel, from column k on, for a block of rows."""
    quants = m.quants + panel * m.panel_bytes
    scales = panel * m.scale_panel_bytes
    y_at, go_on = y + panel * _PANEL_OUT_BYTES, np.int64(k > 0)
    if takes_integers(m):
        unit, quant_bytes, scale_bytes = unit_bytes(m.format)
        first, groups = k // GROUP_COLS, cols // GROUP_COLS
        quants += k // unit * quant_bytes
        scales += k // unit * scale_bytes
        expand(m.format, quants, m.scales + scales, m.minimums + scales, groups, tile)
        integer_tile_product(
            m.format, tile, x + first * X_QUANT_BYTES, x + 2 * m.cols + first * X_SCALE_BYTES, x_stride, y_at, y_stride,
            groups, rows, go_on,
        )  # fmt: skip
        return
    dequantize(m.format, quants + k * (m.panel_bytes // m.cols), m.scales + scales, cols, tile)
    tile_product(tile, _PANEL_OUT_BYTES, x + 4 * k, x_stride, y_at, y_stride, cols, rows, go_on)


@njit(nogil=True, cache=True)
def _block_panels(m, x, x_stride, y, y_stride, rows, first, stop, tile):
    """Panels first..stop for a block of rows."""
    unit, most = np.int64(1), np.int64(_FLOAT_TILE_COLS)
    if takes_integers(m):
        unit, most = unit_bytes(m.format)[0], np.int64(_INTEGER_TILE_COLS)
    most = most // unit * unit
    tiles = (m.cols + most - 1) // most
    width = (m.cols + tiles * unit - 1) // (tiles * unit) * unit  # near-equal, of whole units
    k = 0
    while k < m.cols:
        cols = min(width, m.cols - k)
        for p in range(first, stop):
            if p + 1 < stop:
                _prefetch_tile(m, p + 1, k, cols)
            elif k + cols < m.cols:
                _prefetch_tile(m, first, k + cols, min(width, m.cols - k - cols))
            _tile_columns(m, x, x_stride, y, y_stride, rows, p, k, cols, tile)
        k += cols


@njit(nogil=True, cache=True)
def _add_panels(m, y, y_stride, residual, residual_stride, rows, first, stop):
    """Adds the bias to y, and y to the residual, for panels first..stop; either may be absent (0)."""
    if m.bias == 0 and residual == 0:
        return
    for r in range(rows):
        for i in range(2 * first, 2 * stop):
            at = y + r * y_stride + 32 * i
            v = load8(at)
            if m.bias != 0:
                v = add(v, load8(m.bias + 32 * i))
                store8(at, v)
            if residual != 0:
                target = residual + r * residual_stride + 32 * i
                store8(target, add(load8(target), v))


@njit(nogil=True, cache=True)
def product_panels(m, x, x_stride, y, y_stride, rows, first, stop, tile):
    """What one thread does of y = x . w^T + bias: panels first..stop for `rows` rows, as many as there are."""
    if rows <= (1 if takes_integers(m) else _DIRECT_ROWS):
        _decode_panels(m, x, x_stride, y, y_stride, rows, first, stop)
    else:
        for row in range(0, rows, _BLOCK_ROWS):
            count = min(np.int64(_BLOCK_ROWS), rows - row)
            _block_panels(m, x + row * x_stride, x_stride, y + row * y_stride, y_stride, count, first, stop, tile)
    _add_panels(m, y, y_stride, NO_RESIDUAL, NO_RESIDUAL, rows, first, stop)


@njit(nogil=True, cache=True)
def matmul(m, x, x_stride, y, y_stride, residual, residual_stride, rows, phase, threads, tile):
    """One phase: y = x . w^T + bias for `rows` rows, and residual += y unless that is NO_RESIDUAL.

    x holds float32, or quantized rows if `takes_integers(m)`. Rows of y and of the residual have room for 16 * panels
    floats. `tile` is TILE_BYTES of this thread's own.
    """
    if rows <= (1 if takes_integers(m) else _DIRECT_ROWS):
        total = m.panels
        # Pairs of panels go through the kernel together: an item of an odd number would leave one alone.
        count = max(2, min(_ITEM_PANELS, total // (8 * threads)) // 2 * 2)
        first = take(phase, count)
        while first < total and rows > 0:
            stop = min(first + count, total)
            _decode_panels(m, x, x_stride, y, y_stride, rows, first, stop)
            _add_panels(m, y, y_stride, residual, residual_stride, rows, first, stop)
            finish(phase, stop - first)
            first = take(phase, count)
        wait_for(phase, total if rows > 0 else 0)
        return
    blocks = (rows + _BLOCK_ROWS - 1) // _BLOCK_ROWS
    groups = (m.panels + _GROUP_PANELS - 1) // _GROUP_PANELS
    item = take(phase, 1)
    while item < blocks * groups:
        row, row_stop = rows * (item // groups) // blocks, rows * (item // groups + 1) // blocks
        first = item % groups * _GROUP_PANELS
        stop = min(first + _GROUP_PANELS, m.panels)
        x_at, y_at = x + row * x_stride, y + row * y_stride
        residual_at = residual + row * residual_stride if residual != 0 else NO_RESIDUAL
        _block_panels(m, x_at, x_stride, y_at, y_stride, row_stop - row, first, stop, tile)
        _add_panels(m, y_at, y_stride, residual_at, residual_stride, row_stop - row, first, stop)
        finish(phase, 1)
        item = take(phase, 1)
    wait_for(phase, blocks * groups)


@njit(nogil=True, cache=True)
def _block_value(section, k, lane, parts, signed):
    """Scale or minimum of column k and row `lane` of a panel of a K format."""
    block = section + k // BLOCK_COLS * (32 + 16 * parts)
    at = block + 32 + k % BLOCK_COLS // (BLOCK_COLS // parts) * 16 + lane
    count = np.float32(load_i8(at)) if signed else np.float32(np.uint8(load_i8(at)))
    return load_fp16(block + 2 * lane) * count


@njit(nogil=True, cache=True)
def gather_row(m, row, out):
    """Writes row `row` of the matrix as float32: an embedding."""
    panel, lane = row // PANEL_ROWS, row % PANEL_ROWS
    quants = m.quants + panel * m.panel_bytes
    scales = m.scales + panel * m.scale_panel_bytes
    minimums = m.minimums + panel * m.scale_panel_bytes
    five_bits = m.format == _INT5_G32 or m.format == _INT5_K
    words = np.int64(80 if five_bits else 64)  # of a group: 16 of each chunk, and of fifth bits
    for k in range(m.cols):
        element = k * PANEL_ROWS + lane
        group = (k // GROUP_COLS * PANEL_ROWS + lane) * 2
        if m.format == _FP32:
            value = load_f32(quants + 4 * element)
        elif m.format == _BF16:
            value = load_bf16(quants + 2 * element)
        elif m.format == _INT8:
            value = np.float32(load_i8(quants + element)) * load_f32(scales + 4 * lane)
        elif m.format == _INT8_G32:
            value = np.float32(load_i8(quants + element)) * load_fp16(scales + group)
        elif m.format == _INT8_K:
            scale, minimum = _block_value(scales, k, lane, 16, True), _block_value(minimums, k, lane, 16, False)
            value = np.float32(load_i8(quants + element)) * scale + minimum
        else:
            chunk, at = k % GROUP_COLS // 8, quants + (k // GROUP_COLS * words + lane) * 4
            q = (load_u32(at + 64 * chunk) >> np.uint32(4 * (k % 8))) & np.uint32(15)
            if five_bits:
                fifth = np.uint32(k % 8 // 4 * 16 + chunk * 4 + k % 4)
                q |= ((load_u32(at + 256) >> fifth) & np.uint32(1)) << np.uint32(4)
            if m.format == _INT4_G32 or m.format == _INT5_G32:
                value = np.float32(q) * load_fp16(scales + group) + load_fp16(minimums + group)
            else:
                scale, minimum = _block_value(scales, k, lane, 8, True), _block_value(minimums, k, lane, 8, False)
                value = np.float32(q) * scale + minimum
        store_f32(out + 4 * k, value)
