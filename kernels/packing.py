"""Weight formats and the panel layout: how a matrix lies in memory, byte by byte.

A matrix `w[rows, cols]` (rows are outputs) is cut into *panels* of 16 rows; the last panel is filled up with rows of
zeros. SIMD lanes run across the 16 rows of a panel and the columns follow each other, so that a kernel adds up
every output in ascending column order with one accumulator, whatever the batch.

One contiguous block holds up to three sections, each starting at a multiple of 64 bytes (`sections` gives the
offsets). All numbers are little-endian. With P panels, C columns, G = C / 32 groups:

    format     quants                                             scales                 minimums
    fp32       float32 [P][C][16]                                 -                      -
    bf16       bfloat16 [P][C][16] (upper half of a float32)      -                      -
    int8       int8 [P][C][16]                                    float32 [P][16]        -
    int8-g32   int8 [P][C][16]                                    float16 [P][G][16]     -
    int4-g32   uint32 [P][C/8][16], bits 4i..4i+3 of word [c][r]  float16 [P][G][16]     float16 [P][G][16]
               hold row r, column 8c+i

The weight that a kernel computes with is, in float32: `q` for fp32 and bf16, `q * scale` for int8 and int8-g32,
`q * scale + minimum` for int4-g32. The product of a 4-bit or an 8-bit integer and a float16 is exact in float32, so it
makes no difference whether that sum is fused.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

PANEL_ROWS = 16
GROUP_COLS = 32
SECTION_ALIGN_BYTES = 64  # a cache line

_NIBBLES_PER_WORD = 8
_BLOCK_PANELS = 256  # panels packed at a time: bounds the temporaries of a 150,000-row embedding to some 10 MB


class WeightFormat(enum.StrEnum):
    """How the elements of a weight matrix are stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT8_G32 = "int8-g32"
    INT4_G32 = "int4-g32"


@dataclass(frozen=True, slots=True)
class Sections:
    """Where the sections of a packed matrix lie. Offsets and sizes in bytes; a section that is absent has 0 bytes."""

    quants_bytes: int
    scales_offset: int
    scales_bytes: int
    minimums_offset: int
    minimums_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in the panel layout. `data` is one contiguous block of `packed_bytes(format, rows, cols)` bytes.

    Raises ValueError if the block has another size or type than the shape asks for.
    """

    format: WeightFormat
    rows: int
    cols: int
    data: NDArray[np.uint8]

    def __post_init__(self) -> None:
        _check_block(self.format, self.data, self.rows, self.cols)


def panels(rows: int) -> int:
    """Panels that hold `rows` rows."""
    return -(-rows // PANEL_ROWS)


def sections(format: WeightFormat, rows: int, cols: int) -> Sections:
    """Offsets of the sections. Raises ValueError for an empty shape, or columns that do not fill whole groups."""
    if rows <= 0 or cols <= 0:
        raise ValueError(f"a matrix needs rows and columns, got {rows} x {cols}")
    elements = panels(rows) * PANEL_ROWS * cols
    match format:
        case WeightFormat.FP32:
            return _place(4 * elements, 0, 0)
        case WeightFormat.BF16:
            return _place(2 * elements, 0, 0)
        case WeightFormat.INT8:
            return _place(elements, 4 * panels(rows) * PANEL_ROWS, 0)
        case WeightFormat.INT8_G32:
            _check_groups(format, cols)
            return _place(elements, 2 * elements // GROUP_COLS, 0)
        case WeightFormat.INT4_G32:
            _check_groups(format, cols)
            return _place(elements // 2, 2 * elements // GROUP_COLS, 2 * elements // GROUP_COLS)
        case _:
            assert_never(format)


def packed_bytes(format: WeightFormat, rows: int, cols: int) -> int:
    """Bytes of a packed matrix, padding included."""
    return sections(format, rows, cols).total_bytes


def pack(format: WeightFormat, w: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantizes `w` [rows, cols] to nearest and packs it.

    int8 takes one scale a row, max|w| / 127. int8-g32 takes one float16 scale for 32 columns, and int4-g32 also
    a float16 minimum, so that the smallest and the largest value of the group are 0 and 15.
    Raises ValueError for values that are not finite, or beyond what the scales can hold.
    """
    if w.ndim != 2 or w.dtype != np.float32:
        raise ValueError(f"expected a float32 matrix, got {w.dtype} with shape {w.shape}")
    if not np.isfinite(w).all():
        raise ValueError("the weights hold values that are not finite")
    rows, cols = w.shape
    block = _Block(format, rows, cols)
    for first, stop in block.spans():
        part = w[first:stop]
        match format:
            case WeightFormat.FP32:
                block.put_quants(first, part)
            case WeightFormat.BF16:
                block.put_quants(first, _round_to_bf16(part))
            case WeightFormat.INT8:
                scale = np.abs(part).max(axis=1) / np.float32(127)
                block.put_quants(first, _divide_and_round(part, scale[:, None], -127, 127).astype(np.int8))
                block.put_row_scales(first, scale)
            case WeightFormat.INT8_G32:
                groups = part.reshape(len(part), -1, GROUP_COLS)
                scale = _to_fp16(np.abs(groups).max(axis=2) / np.float32(127))
                q = _divide_and_round(groups, scale[:, :, None].astype(np.float32), -127, 127)
                block.put_quants(first, q.reshape(part.shape).astype(np.int8))
                block.put_scales(first, scale)
            case WeightFormat.INT4_G32:
                groups = part.reshape(len(part), -1, GROUP_COLS)
                minimum = _to_fp16(groups.min(axis=2))
                spread = groups.max(axis=2) - minimum.astype(np.float32)
                scale = _to_fp16(np.maximum(spread, np.float32(0)) / np.float32(15))
                above = groups - minimum[:, :, None].astype(np.float32)
                q = _divide_and_round(above, scale[:, :, None].astype(np.float32), 0, 15)
                block.put_quants(first, q.reshape(part.shape).astype(np.uint8))
                block.put_scales(first, scale)
                block.put_minimums(first, minimum)
            case _:
                assert_never(format)
    return block.data


def pack_int8_g32(q: NDArray[np.int8], scale: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Packs integers `q` [rows, cols] and scales [rows, cols / 32] as they are: lossless for GGUF Q8_0 and Q5_0."""
    rows, cols = _checked_shape(q, np.int8)
    _check_group_values("scale", scale, rows, cols)
    block = _Block(WeightFormat.INT8_G32, rows, cols)
    for first, stop in block.spans():
        block.put_quants(first, q[first:stop])
        block.put_scales(first, scale[first:stop])
    return block.data


def pack_int4_g32(
    q: NDArray[np.uint8], scale: NDArray[np.float16], minimum: NDArray[np.float16]
) -> NDArray[np.uint8]:
    """Packs integers `q` [rows, cols] in 0..15 with scales and minimums [rows, cols / 32] as they are.

    Lossless for GGUF Q4_1, and for Q4_0 with a minimum of -8 * scale.
    """
    rows, cols = _checked_shape(q, np.uint8)
    if q.max() > 15:
        raise ValueError(f"4-bit integers lie in 0..15, got {q.max()}")
    _check_group_values("scale", scale, rows, cols)
    _check_group_values("minimum", minimum, rows, cols)
    block = _Block(WeightFormat.INT4_G32, rows, cols)
    for first, stop in block.spans():
        block.put_quants(first, q[first:stop])
        block.put_scales(first, scale[first:stop])
        block.put_minimums(first, minimum[first:stop])
    return block.data


def unpack(format: WeightFormat, data: NDArray[np.uint8], rows: int, cols: int) -> NDArray[np.float32]:
    """The weights [rows, cols] exactly as the kernels compute with them."""
    _check_block(format, data, rows, cols)
    block = _Block(format, rows, cols, data)
    out = np.empty((panels(rows) * PANEL_ROWS, cols), np.float32)
    for first, _ in block.spans():
        p = slice(first // PANEL_ROWS, first // PANEL_ROWS + _BLOCK_PANELS)
        match format:
            case WeightFormat.FP32:
                w = block.quants[p]
            case WeightFormat.BF16:
                w = (block.quants[p].astype(np.uint32) << np.uint32(16)).view(np.float32)
            case WeightFormat.INT8:
                w = block.quants[p].astype(np.float32) * block.scales[p, None, :]
            case WeightFormat.INT8_G32:
                w = block.quants[p].astype(np.float32) * _per_column(block.scales[p])
            case WeightFormat.INT4_G32:
                q = _from_nibbles(block.quants[p]).astype(np.float32)
                w = q * _per_column(block.scales[p]) + _per_column(block.minimums[p])
            case _:
                assert_never(format)
        out[first : first + _BLOCK_PANELS * PANEL_ROWS] = w.transpose(0, 2, 1).reshape(-1, cols)
    return out[:rows]


class _Block:
    """The sections of one packed matrix as arrays, and how rows get into them."""

    def __init__(self, format: WeightFormat, rows: int, cols: int, data: NDArray[np.uint8] | None = None) -> None:
        at = sections(format, rows, cols)
        self.format, self.rows = format, rows
        self.data = np.zeros(at.total_bytes, np.uint8) if data is None else data
        p, groups = panels(rows), cols // GROUP_COLS
        quants = self.data[: at.quants_bytes]
        scales = self.data[at.scales_offset : at.scales_offset + at.scales_bytes]
        minimums = self.data[at.minimums_offset : at.minimums_offset + at.minimums_bytes]
        self.quants: NDArray[Any]
        self.scales: NDArray[Any] = scales
        match format:
            case WeightFormat.FP32:
                self.quants = quants.view("<f4").reshape(p, cols, PANEL_ROWS)
            case WeightFormat.BF16:
                self.quants = quants.view("<u2").reshape(p, cols, PANEL_ROWS)
            case WeightFormat.INT8:
                self.quants = quants.view("i1").reshape(p, cols, PANEL_ROWS)
                self.scales = scales.view("<f4").reshape(p, PANEL_ROWS)
            case WeightFormat.INT8_G32:
                self.quants = quants.view("i1").reshape(p, cols, PANEL_ROWS)
                self.scales = scales.view("<f2").reshape(p, groups, PANEL_ROWS)
            case WeightFormat.INT4_G32:
                self.quants = quants.view("<u4").reshape(p, cols // _NIBBLES_PER_WORD, PANEL_ROWS)
                self.scales = scales.view("<f2").reshape(p, groups, PANEL_ROWS)
                self.minimums: NDArray[Any] = minimums.view("<f2").reshape(p, groups, PANEL_ROWS)
            case _:
                assert_never(format)

    def spans(self) -> list[tuple[int, int]]:
        """Row ranges of whole panels, small enough that the temporaries stay small."""
        step = _BLOCK_PANELS * PANEL_ROWS
        return [(first, min(first + step, self.rows)) for first in range(0, self.rows, step)]

    def put_quants(self, first: int, q: NDArray[Any]) -> None:
        panelled = _to_panels(q)
        if self.format is WeightFormat.INT4_G32:
            panelled = _to_nibbles(panelled)
        self.quants[first // PANEL_ROWS :][: len(panelled)] = panelled

    def put_row_scales(self, first: int, scale: NDArray[Any]) -> None:
        panelled = _to_panels(scale[:, None])[:, 0]
        self.scales[first // PANEL_ROWS :][: len(panelled)] = panelled

    def put_scales(self, first: int, scale: NDArray[Any]) -> None:
        panelled = _to_panels(scale)
        self.scales[first // PANEL_ROWS :][: len(panelled)] = panelled

    def put_minimums(self, first: int, minimum: NDArray[Any]) -> None:
        panelled = _to_panels(minimum)
        self.minimums[first // PANEL_ROWS :][: len(panelled)] = panelled


def _place(quants_bytes: int, scales_bytes: int, minimums_bytes: int) -> Sections:
    scales_offset = _aligned(quants_bytes)
    minimums_offset = _aligned(scales_offset + scales_bytes)
    total = _aligned(minimums_offset + minimums_bytes)
    return Sections(quants_bytes, scales_offset, scales_bytes, minimums_offset, minimums_bytes, total)


def _aligned(count: int) -> int:
    return -(-count // SECTION_ALIGN_BYTES) * SECTION_ALIGN_BYTES


def _check_groups(format: WeightFormat, cols: int) -> None:
    if cols % GROUP_COLS:
        raise ValueError(f"{format} needs columns in groups of {GROUP_COLS}, got {cols}")


def _check_block(format: WeightFormat, data: NDArray[np.uint8], rows: int, cols: int) -> None:
    expected = packed_bytes(format, rows, cols)
    if data.dtype != np.uint8 or data.shape != (expected,) or not data.flags.c_contiguous:
        raise ValueError(
            f"a {rows} x {cols} {format} matrix is one block of {expected} bytes, got {data.dtype} {data.shape}"
        )


def _checked_shape(q: NDArray[Any], dtype: type) -> tuple[int, int]:
    if q.ndim != 2 or q.dtype != dtype:
        raise ValueError(f"expected a matrix of {np.dtype(dtype)}, got {q.dtype} with shape {q.shape}")
    return q.shape[0], q.shape[1]


def _check_group_values(name: str, values: NDArray[np.float16], rows: int, cols: int) -> None:
    if values.dtype != np.float16 or values.shape != (rows, cols // GROUP_COLS):
        raise ValueError(f"{name}: expected float16 {(rows, cols // GROUP_COLS)}, got {values.dtype} {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"{name}: a value is not finite")


def _to_panels(values: NDArray[Any]) -> NDArray[Any]:
    """[rows, n] -> [panels, n, 16], the last panel filled up with zeros."""
    rows, n = values.shape
    padded = np.zeros((panels(rows) * PANEL_ROWS, n), values.dtype)
    padded[:rows] = values
    return padded.reshape(-1, PANEL_ROWS, n).transpose(0, 2, 1)


def _to_nibbles(q: NDArray[Any]) -> NDArray[np.uint32]:
    """[panels, cols, 16] of 0..15 -> [panels, cols / 8, 16] words."""
    eights = q.reshape(len(q), -1, _NIBBLES_PER_WORD, PANEL_ROWS)
    words = np.zeros((len(q), eights.shape[1], PANEL_ROWS), np.uint32)
    for i in range(_NIBBLES_PER_WORD):
        words |= eights[:, :, i].astype(np.uint32) << np.uint32(4 * i)
    return words


def _from_nibbles(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The inverse of `_to_nibbles`."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
    return ((words[:, :, None, :] >> shifts) & np.uint32(15)).reshape(len(words), -1, PANEL_ROWS)


def _per_column(values: NDArray[np.float16]) -> NDArray[np.float32]:
    """[panels, groups, 16] -> [panels, cols, 16]."""
    return np.repeat(values.astype(np.float32), GROUP_COLS, axis=1)


def _round_to_bf16(w: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even. A value that rounds beyond the largest bfloat16 raises ValueError."""
    bits = np.ascontiguousarray(w).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    if ((rounded & np.uint32(0x7F80)) == 0x7F80).any():
        raise ValueError("a weight is too large for bfloat16")
    return rounded.astype(np.uint16)


def _to_fp16(values: NDArray[np.float32]) -> NDArray[np.float16]:
    if np.abs(values).max() > np.finfo(np.float16).max:
        raise ValueError("a group of weights is too large for a float16 scale")
    return values.astype(np.float16)


def _divide_and_round(w: NDArray[np.float32], scale: NDArray[np.float32], low: int, high: int) -> NDArray[np.float32]:
    """Nearest integer of w / scale within low..high; 0 where the scale is 0."""
    quotient = np.zeros(w.shape, np.float32)
    np.divide(w, scale, out=quotient, where=scale != 0)
    return np.clip(np.rint(quotient, out=quotient), low, high)
