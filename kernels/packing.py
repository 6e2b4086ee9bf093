"""Weight formats and the panel layout: how a matrix lies in memory, byte by byte.

A matrix `w[rows, cols]` (rows are outputs) is cut into *panels* of 16 rows; the last panel is filled up with rows of
zeros. SIMD lanes run across the 16 rows of a panel and the columns follow each other, so that a kernel adds up
every output in ascending column order with one accumulator, whatever the batch.

One contiguous block holds up to three sections, each starting at a multiple of 64 bytes (`sections` gives the
offsets). All numbers are little-endian. With P panels, C columns, G = C / 32 groups, B = C / 256 blocks:

    format     quants                                             scales                 minimums
    fp32       float32 [P][C][16]                                 -                      -
    bf16       bfloat16 [P][C][16] (upper half of a float32)      -                      -
    int8       int8 [P][C][16]                                    float32 [P][16]        -
    int8-g32   int8 [P][C][16]                                    float16 [P][G][16]     -
    int4-g32   uint32 [P][C/8][16], bits 4i..4i+3 of word [c][r]  float16 [P][G][16]     float16 [P][G][16]
               hold row r, column 8c+i
    int5-g32   uint32 [P][G][5][16]: four words as in int4-g32    float16 [P][G][16]     float16 [P][G][16]
               and the fifth bits, that of column 8c+i (i < 4)
               in bit 4c+i, that of column 8c+4+i in 16+4c+i
    int4-k     as int4-g32                                        blocks [P][B][8]       blocks [P][B][8]
    int5-k     as int5-g32                                        blocks [P][B][8]       blocks [P][B][8]
    int8-k     int8 [P][C][16]                                    blocks [P][B][16]      blocks [P][B][16]

The last three hold what GGUF's K-quants hold. `blocks [P][B][n]` has for each block of 256 columns float16 [16], a
*step* for each row, and int8 (scales) or uint8 (minimums) [n][16], how many steps each n-th part of the block takes.

The weight that a kernel computes with is, in float32: `q` for fp32 and bf16, `q * scale` for int8 and int8-g32,
`q * scale + minimum` for the others, with scale and minimum the product of step and count in the last three. All these
products are exact in float32, so it makes no difference whether that sum is fused.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from tierd.kernels import bits
from tierd.kernels.bits import BLOCK_COLS as BLOCK_COLS
from tierd.kernels.bits import GROUP_COLS as GROUP_COLS
from tierd.kernels.bits import PANEL_ROWS as PANEL_ROWS

SECTION_ALIGN_BYTES = 64  # a cache line

_BLOCK_PANELS = 256  # panels packed at a time: bounds the temporaries of a 150,000-row embedding to some 10 MB


class WeightFormat(enum.StrEnum):
    """How the elements of a weight matrix are stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT8_G32 = "int8-g32"
    INT4_G32 = "int4-g32"
    INT5_G32 = "int5-g32"
    INT4_K = "int4-k"
    INT5_K = "int5-k"
    INT8_K = "int8-k"


ROUNDED_FORMATS = tuple(WeightFormat)[:6]  # what `pack` makes of any weights; the others hold K-quants as they are
_K_PARTS = {WeightFormat.INT4_K: 8, WeightFormat.INT5_K: 8, WeightFormat.INT8_K: 16}  # of a block of 256 columns
_BITS = dict(zip(WeightFormat, (32, 16, 8, 8, 4, 5, 4, 5, 8), strict=True))


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
    quants = elements * _BITS[format] // 8
    match format:
        case WeightFormat.FP32 | WeightFormat.BF16:
            return _place(quants, 0, 0)
        case WeightFormat.INT8:
            return _place(quants, 4 * panels(rows) * PANEL_ROWS, 0)
        case WeightFormat.INT8_G32 | WeightFormat.INT4_G32 | WeightFormat.INT5_G32:
            _check_groups(format, cols)
            scales = 2 * elements // GROUP_COLS
            return _place(quants, scales, 0 if format is WeightFormat.INT8_G32 else scales)
        case WeightFormat.INT4_K | WeightFormat.INT5_K | WeightFormat.INT8_K:
            _check_groups(format, cols)
            scales = elements // BLOCK_COLS * (2 + _K_PARTS[format])
            return _place(quants, scales, scales)
        case _:
            assert_never(format)


def packed_bytes(format: WeightFormat, rows: int, cols: int) -> int:
    """Bytes of a packed matrix, padding included."""
    return sections(format, rows, cols).total_bytes


def pack(format: WeightFormat, w: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantizes `w` [rows, cols] to nearest and packs it.

    int8 takes one scale a row, max|w| / 127. int8-g32 takes one float16 scale for 32 columns, and int4-g32 and
    int5-g32 also a float16 minimum, so that the smallest value of the group is 0 and the largest 15 or 31.
    Raises ValueError for values that are not finite, or beyond what the scales can hold, and for a format that is none
    of `ROUNDED_FORMATS`.
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
                block.put_quants(first, bits.round_to_bf16(part))
            case WeightFormat.INT8:
                scale = np.abs(part).max(axis=1) / np.float32(127)
                block.put_quants(first, bits.divide_and_round(part, scale[:, None], -127, 127).astype(np.int8))
                block.put_row_scales(first, scale)
            case WeightFormat.INT8_G32:
                groups = part.reshape(len(part), -1, GROUP_COLS)
                scale = bits.to_fp16(np.abs(groups).max(axis=2) / np.float32(127))
                q = bits.divide_and_round(groups, scale[:, :, None].astype(np.float32), -127, 127)
                block.put_quants(first, q.reshape(part.shape).astype(np.int8))
                block.put_scales(first, scale)
            case WeightFormat.INT4_G32 | WeightFormat.INT5_G32:
                top = (1 << _BITS[format]) - 1
                groups = part.reshape(len(part), -1, GROUP_COLS)
                minimum = bits.to_fp16(groups.min(axis=2))
                spread = groups.max(axis=2) - minimum.astype(np.float32)
                scale = bits.to_fp16(np.maximum(spread, np.float32(0)) / np.float32(top))
                above = groups - minimum[:, :, None].astype(np.float32)
                q = bits.divide_and_round(above, scale[:, :, None].astype(np.float32), 0, top)
                block.put_quants(first, q.reshape(part.shape).astype(np.uint8))
                block.put_scales(first, scale)
                block.put_minimums(first, minimum)
            case WeightFormat.INT4_K | WeightFormat.INT5_K | WeightFormat.INT8_K:
                raise ValueError(f"{format} holds K-quants only, see pack_k")
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


def pack_affine(
    format: WeightFormat, q: NDArray[np.uint8], scale: NDArray[np.float16], minimum: NDArray[np.float16]
) -> NDArray[np.uint8]:
    """Packs integers `q` [rows, cols] with scales and minimums [rows, cols / 32] as they are.

    int4-g32 is lossless for GGUF Q4_1, and for Q4_0 with a minimum of -8 * scale; int5-g32 also for Q5_1, and for Q5_0
    with one of -16 * scale. Raises ValueError for what does not fit.
    """
    rows, cols = _checked_integers(format, q)
    _check_group_values("scale", scale, rows, cols)
    _check_group_values("minimum", minimum, rows, cols)
    block = _Block(format, rows, cols)
    for first, stop in block.spans():
        block.put_quants(first, q[first:stop])
        block.put_scales(first, scale[first:stop])
        block.put_minimums(first, minimum[first:stop])
    return block.data


@dataclass(frozen=True, slots=True)
class KQuants:
    """Rows of a K-quantized matrix: weight = q * (scale_step * scale) + minimum_step * minimum."""

    q: NDArray[np.int8] | NDArray[np.uint8]  # [rows, cols]; int8 for int8-k
    scale_steps: NDArray[np.float16]  # [rows, cols / 256]
    scales: NDArray[np.int8]  # [rows, cols / 32], for int8-k [rows, cols / 16]
    minimum_steps: NDArray[np.float16]
    minimums: NDArray[np.uint8]


def pack_k(format: WeightFormat, parts: KQuants) -> NDArray[np.uint8]:
    """Packs K-quants as they are: lossless for GGUF Q4_K (int4-k), also with Q5_K (int5-k), with Q6_K (int8-k).
    Raises ValueError for integers, steps or shapes that don't fit the format.
    """
    rows, cols = _checked_integers(format, parts.q)
    block = _Block(format, rows, cols)
    blocks = cols // BLOCK_COLS
    for name, steps, counts, dtype in (
        ("scale", parts.scale_steps, parts.scales, np.int8),
        ("minimum", parts.minimum_steps, parts.minimums, np.uint8),
    ):
        if steps.dtype != np.float16 or steps.shape != (rows, blocks) or not np.isfinite(steps).all():
            raise ValueError(f"steps of the {name}s: expected finite float16 {(rows, blocks)}, got {steps.shape}")
        if counts.dtype != dtype or counts.shape != (rows, blocks * _K_PARTS[format]):
            raise ValueError(f"{name}s: got {counts.dtype} {counts.shape}")
    for first, stop in block.spans():
        part = slice(first, stop)
        block.put_quants(first, parts.q[part])
        block.put_steps(first, block.scales, parts.scale_steps[part], parts.scales[part])
        block.put_steps(first, block.minimums, parts.minimum_steps[part], parts.minimums[part])
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
                w = block.quants[p].astype(np.float32) * bits.per_column(block.scales[p])
            case WeightFormat.INT4_G32 | WeightFormat.INT5_G32:
                q = bits.from_words(block.quants[p], _BITS[format]).astype(np.float32)
                w = q * bits.per_column(block.scales[p]) + bits.per_column(block.minimums[p])
            case WeightFormat.INT4_K | WeightFormat.INT5_K | WeightFormat.INT8_K:
                scale, minimum = (bits.from_steps(array[p]) for array in (block.scales, block.minimums))
                quants = block.quants[p]
                q = (quants if _BITS[format] == 8 else bits.from_words(quants, _BITS[format])).astype(np.float32)
                w = q * scale + minimum
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
        self.minimums: NDArray[Any] = minimums
        match _BITS[format]:
            case 4:
                self.quants = quants.view("<u4").reshape(p, cols // bits.NIBBLES_PER_WORD, PANEL_ROWS)
            case 5:
                self.quants = quants.view("<u4").reshape(p, groups, 5, PANEL_ROWS)
            case width:
                self.quants = quants.view({8: "i1", 16: "<u2", 32: "<f4"}[width]).reshape(p, cols, PANEL_ROWS)
        if format in _K_PARTS:
            parts = _K_PARTS[format]
            self.scales = scales.view(bits.blocks_type(np.int8, parts)).reshape(p, -1)
            self.minimums = minimums.view(bits.blocks_type(np.uint8, parts)).reshape(p, -1)
        elif format is WeightFormat.INT8:
            self.scales = scales.view("<f4").reshape(p, PANEL_ROWS)
        else:
            self.scales = scales.view("<f2").reshape(p, -1, PANEL_ROWS)
            self.minimums = minimums.view("<f2").reshape(p, -1, PANEL_ROWS)

    def spans(self) -> list[tuple[int, int]]:
        """Row ranges of whole panels, small enough that the temporaries stay small."""
        step = _BLOCK_PANELS * PANEL_ROWS
        return [(first, min(first + step, self.rows)) for first in range(0, self.rows, step)]

    def put_quants(self, first: int, q: NDArray[Any]) -> None:
        panelled = bits.to_panels(q)
        if _BITS[self.format] < 8:
            panelled = bits.to_words(panelled, _BITS[self.format])
        self.quants[first // PANEL_ROWS :][: len(panelled)] = panelled

    def put_row_scales(self, first: int, scale: NDArray[Any]) -> None:
        panelled = bits.to_panels(scale[:, None])[:, 0]
        self.scales[first // PANEL_ROWS :][: len(panelled)] = panelled

    def put_scales(self, first: int, scale: NDArray[Any]) -> None:
        panelled = bits.to_panels(scale)
        self.scales[first // PANEL_ROWS :][: len(panelled)] = panelled

    def put_minimums(self, first: int, minimum: NDArray[Any]) -> None:
        panelled = bits.to_panels(minimum)
        self.minimums[first // PANEL_ROWS :][: len(panelled)] = panelled


    def put_steps(self, first: int, target: NDArray[Any], steps: NDArray[Any], counts: NDArray[Any]) -> None:
        there = target[first // PANEL_ROWS :]
        panelled = bits.to_panels(counts)
        there["step"][: len(panelled)] = bits.to_panels(steps)
        there["counts"][: len(panelled)] = panelled.reshape(len(panelled), there.shape[1], -1, PANEL_ROWS)


def _place(quants_bytes: int, scales_bytes: int, minimums_bytes: int) -> Sections:
    scales_offset = _aligned(quants_bytes)
    minimums_offset = _aligned(scales_offset + scales_bytes)
    total = _aligned(minimums_offset + minimums_bytes)
    return Sections(quants_bytes, scales_offset, scales_bytes, minimums_offset, minimums_bytes, total)


def _aligned(count: int) -> int:
    return -(-count // SECTION_ALIGN_BYTES) * SECTION_ALIGN_BYTES


def _check_groups(format: WeightFormat, cols: int) -> None:
    if cols % (unit := BLOCK_COLS if format in _K_PARTS else GROUP_COLS):
        raise ValueError(f"{format} needs columns in groups of {unit}, got {cols}")


def _check_block(format: WeightFormat, data: NDArray[np.uint8], rows: int, cols: int) -> None:
    expected = packed_bytes(format, rows, cols)
    if data.dtype != np.uint8 or data.shape != (expected,) or not data.flags.c_contiguous:
        raise ValueError(
            f"a {rows} x {cols} {format} matrix is one block of {expected} bytes, got {data.dtype} {data.shape}"
        )


def _checked_integers(format: WeightFormat, q: NDArray[Any]) -> tuple[int, int]:
    shape = _checked_shape(q, np.int8 if _BITS[format] == 8 else np.uint8)
    if _BITS[format] < 8 and q.max() >= 1 << _BITS[format]:
        raise ValueError(f"integers of {format} have {_BITS[format]} bits, got {q.max()}")
    return shape


def _checked_shape(q: NDArray[Any], dtype: type) -> tuple[int, int]:
    if q.ndim != 2 or q.dtype != dtype:
        raise ValueError(f"expected a matrix of {np.dtype(dtype)}, got {q.dtype} with shape {q.shape}")
    return q.shape[0], q.shape[1]


def _check_group_values(name: str, values: NDArray[np.float16], rows: int, cols: int) -> None:
    if values.dtype != np.float16 or values.shape != (rows, cols // GROUP_COLS):
        raise ValueError(f"{name}: expected float16 {(rows, cols // GROUP_COLS)}, got {values.dtype} {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"{name}: a value is not finite")
