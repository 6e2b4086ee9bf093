"""The inner loops of products with weights in groups, emitted as LLVM: integers times integers, 16 bits each.

A row of x is rounded, group of 32 columns by group, to 15 bits and a sign (see quantize.py). For every group, in
ascending order, and for every part of it that has scales of its own (one, or two of 16 columns):

    y[m, n] += float(sum over k of q[n, k] * x[m, k]) * (scale[n] * x_scale[m])
    y[m, n] += minimum[n] * x_sum[m]                                               one fma each

The sum of integers is exact whatever its order (it stays below 2 ** 31), so an output depends on its row of x and its
column of w alone, as in microkernel.py. Eight columns and eight rows are 32 bytes of int4: four shifts and masks make
them pairs of 16 bits, which `vpmaddwd` multiplies and adds up two by two. That pairs column 8c + i with 8c + 4 + i:
pair i of *chunk* c.

Products of one row take the weights as they are packed. More rows share a *tile*, in which a group of 16 outputs is

    int16 [16 pairs][16 outputs][2], float32 scales [parts][16], float32 minimums [parts][16] (absent in int8-g32)
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from tierd.kernels.cpu.microkernel import FORMAT_CODES, emit_loop, emit_sums, emit_switch
from tierd.kernels.cpu.simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    V8,
    V8B,
    V8I,
    emit_fma,
    emit_load,
    emit_load_fp16,
    emit_prefetch,
    emit_shuffle,
    emit_splat,
    emit_store,
)
from tierd.kernels.packing import GROUP_COLS, WeightFormat

_V16S, _V16I, _V16B = (ir.VectorType(t, 16) for t in (I16, I32, I8))
_NO_SUM, _ZERO = ir.Constant(V8I, [0] * 8), ir.Constant(V8, [0.0] * 8)
_PAIRS = 4  # of a chunk of 8 columns
_TILE_QUANT_BYTES = 2 * 16 * GROUP_COLS  # of a group
_QUANTS_AHEAD_BYTES, _SCALES_AHEAD_BYTES = 2048, 256
X_QUANT_BYTES, X_SCALE_BYTES = 2 * GROUP_COLS, 16  # of one group of a row of x
TILE_ROWS = 4  # 8 sums, 2 vectors of weights, 1 of x and a product; 6 rows are no faster and compile for longer


def _int(value):
    return ir.Constant(I64, value)


def _shorts(value):
    return ir.Constant(_V16S, [value] * 16)


def _at(b, base, *terms):
    """base + the sum of index * bytes."""
    for index, stride_bytes in terms:
        base = b.add(base, b.mul(index, _int(stride_bytes)))
    return base


def _halves(b, at, half_bytes, load):
    """Eight outputs, and the eight after them."""
    return [load(b, at), load(b, b.add(at, _int(half_bytes)))]


def _load_bytes(b, address):
    return emit_load(b, address, V8B, 1)


def _load_shorts(b, address):
    return emit_load(b, address, _V16S, 4)


def _load_floats(b, address):
    return emit_load(b, address, V8, 4)


def _emit_madd(b, x, y):
    """Eight sums of two products of int16. LLVM makes one instruction of this where there is one."""
    products = b.mul(b.sext(x, _V16I), b.sext(y, _V16I))
    return b.add(*(emit_shuffle(b, products, products, range(i, 16, 2)) for i in range(2)))


class _Int4G32:
    """How a group of a format is read. Its `parts` have scales of their own."""

    parts, has_minimums, group_bytes, group_scale_bytes = 1, True, 256, 32
    chunks, chunk_bytes = 4, 64

    def pairs(self, b, group, chunk):
        """The pairs of a chunk of the group at that address, each as two vectors of 8 outputs."""
        at = _at(b, group, (chunk, self.chunk_bytes))
        words = _halves(b, at, 32, _load_shorts)
        for i in range(_PAIRS):
            shifted = [b.lshr(w, _shorts(4 * i)) for w in words] if i else words
            yield [b.and_(w, _shorts(15)) for w in shifted] if i < 3 else shifted

    def scales(self, b, base, group, part):
        """Scales, or minimums, of a part of group number `group`, as two vectors."""
        return _halves(b, _at(b, base, (group, 32)), 16, emit_load_fp16)

    def minimums(self, b, base, group, part):
        return self.scales(b, base, group, part)


class _Int8G32(_Int4G32):
    has_minimums, group_bytes, chunk_bytes = False, 512, 128

    def pairs(self, b, group, chunk):
        at = _at(b, group, (chunk, self.chunk_bytes))
        columns = [emit_load(b, _at(b, at, (_int(i), 16)), _V16B, 1) for i in range(8)]
        for i in range(_PAIRS):
            pair = columns[i], columns[i + 4]
            lanes = [[lane + other for lane in range(h, h + 8) for other in (0, 16)] for h in (0, 8)]
            yield [b.sext(emit_shuffle(b, *pair, lane), _V16S) for lane in lanes]


class _Int5G32(_Int4G32):
    group_bytes = 320

    def pairs(self, b, group, chunk):
        fifths = _halves(b, b.add(group, _int(4 * self.chunk_bytes)), 32, _load_shorts)
        amount = emit_splat(b, b.trunc(b.mul(chunk, _int(_PAIRS)), I16), 16)
        fifths = [b.lshr(f, amount) for f in fifths]  # bit i is that of pair i
        for i, pair in enumerate(super().pairs(b, group, chunk)):
            bits = [b.and_(b.shl(f, _shorts(4 - i)), _shorts(16)) for f in fifths]
            yield [b.or_(low, bit) for low, bit in zip(pair, bits, strict=True)]


class _Blocks:
    """Scales and minimums of a K format: steps of a block of eight groups, and counts of them."""

    parts: int

    def _products(self, b, base, group, part, convert):
        block = _at(b, base, (b.lshr(group, _int(3)), 32 + 128 * self.parts))
        counts = _at(b, block, (_int(32), 1), (b.and_(group, _int(7)), 16 * self.parts), (_int(part), 16))
        steps = _halves(b, block, 16, emit_load_fp16)
        return [b.fmul(convert(c), s) for c, s in zip(_halves(b, counts, 8, _load_bytes), steps, strict=True)]

    def scales(self, b, base, group, part):
        return self._products(b, base, group, part, lambda c: b.sitofp(b.sext(c, V8I), V8))

    def minimums(self, b, base, group, part):
        return self._products(b, base, group, part, lambda c: b.sitofp(b.zext(c, V8I), V8))


class _Int4K(_Blocks, _Int4G32):
    group_scale_bytes = 20


class _Int5K(_Blocks, _Int5G32):
    group_scale_bytes = 20


class _Int8K(_Blocks, _Int8G32):
    parts, has_minimums, group_scale_bytes = 2, True, 36


class _Tile:
    """A group of a tile: 16 chunks of one pair."""

    chunks, chunk_bytes = 16, 64

    def __init__(self, parts, has_minimums):
        self.parts, self.has_minimums = parts, has_minimums
        self.group_bytes = _TILE_QUANT_BYTES + 64 * parts * (1 + has_minimums)

    def pairs(self, b, group, chunk):
        yield _halves(b, _at(b, group, (chunk, self.chunk_bytes)), 32, _load_shorts)

    def scales(self, b, base, group, part):
        return _halves(b, _at(b, base, (group, self.group_bytes), (_int(part), 64)), 32, _load_floats)

    def minimums(self, b, base, group, part):
        return self.scales(b, base, group, part)


_FORMATS = {
    FORMAT_CODES[WeightFormat.INT8_G32]: _Int8G32(),
    FORMAT_CODES[WeightFormat.INT4_G32]: _Int4G32(),
    FORMAT_CODES[WeightFormat.INT5_G32]: _Int5G32(),
    FORMAT_CODES[WeightFormat.INT4_K]: _Int4K(),
    FORMAT_CODES[WeightFormat.INT5_K]: _Int5K(),
    FORMAT_CODES[WeightFormat.INT8_K]: _Int8K(),
}
_INT8_G32, _INT8_K = FORMAT_CODES[WeightFormat.INT8_G32], FORMAT_CODES[WeightFormat.INT8_K]
_INT4_G32, _INT5_G32 = FORMAT_CODES[WeightFormat.INT4_G32], FORMAT_CODES[WeightFormat.INT5_G32]
_INT5_K = FORMAT_CODES[WeightFormat.INT5_K]
_TILES = (_Tile(1, False), _Tile(1, True), _Tile(2, True))
MAX_TILE_GROUP_BYTES = max(tile.group_bytes for tile in _TILES)


def _tile_of(format):
    """Index of the tile that groups of this format become."""
    return 2 if format.parts == 2 else int(format.has_minimums)


@njit(nogil=True, cache=True)
def unit_bytes(format):
    """Columns that must not be cut, and their bytes of quants and of scales in a panel."""
    if format == _INT8_G32:
        return np.int64(32), np.int64(512), np.int64(32)
    if format == _INT4_G32:
        return np.int64(32), np.int64(256), np.int64(32)
    if format == _INT5_G32:
        return np.int64(32), np.int64(320), np.int64(32)
    if format == _INT8_K:
        return np.int64(256), np.int64(4096), np.int64(288)
    return np.int64(256), np.int64(2560 if format == _INT5_K else 2048), np.int64(160)


def _emit_part(b, format, part, quants, x_quants, rows):
    """Sums of integers over one part of a group: [row][half]. `x_quants` holds the rows' addresses."""
    chunks = format.chunks // format.parts
    x_bytes = X_QUANT_BYTES // format.chunks

    def chunk(c, sums):
        c = b.add(c, _int(part * chunks))
        updated = list(sums)
        for i, weights in enumerate(format.pairs(b, quants, c)):
            for row in range(rows):
                word = emit_load(b, _at(b, x_quants[row], (c, x_bytes), (_int(4 * i), 1)), I32, 4)
                x = b.bitcast(emit_splat(b, word), _V16S)
                for half in range(2):
                    at = 2 * row + half
                    updated[at] = b.add(updated[at], _emit_madd(b, weights[half], x))
        return updated

    return emit_loop(b, _int(chunks), [_NO_SUM] * (2 * rows), chunk)


def _emit_product(b, format, rows, quants, scales, minimums, x, x_scales, x_stride, groups, start, ahead):
    """`rows` rows of x through `groups` groups, added to `start` [row][half]. With `ahead`, what lies further on is
    prefetched: behind a panel that is the next one."""

    def group(g, sums):
        quants_at = _at(b, quants, (g, format.group_bytes))
        if ahead:
            for i in range(0, format.group_bytes, 64):
                emit_prefetch(b, _at(b, quants_at, (_int(_QUANTS_AHEAD_BYTES + i), 1)))
            for base in [scales, minimums][: 1 + format.has_minimums]:
                emit_prefetch(b, _at(b, base, (g, format.group_scale_bytes), (_int(_SCALES_AHEAD_BYTES), 1)))
        strides = [b.mul(_int(row), x_stride) for row in range(rows)]
        x_quants = [b.add(_at(b, x, (g, X_QUANT_BYTES)), stride) for stride in strides]
        x_at = [b.add(_at(b, x_scales, (g, X_SCALE_BYTES)), stride) for stride in strides]
        updated = list(sums)
        for part in range(format.parts):
            integers = _emit_part(b, format, part, quants_at, x_quants, rows)
            scale = format.scales(b, scales, g, part)
            minimum = format.minimums(b, minimums, g, part) if format.has_minimums else None
            for row in range(rows):
                x_scale = emit_splat(b, emit_load(b, x_at[row], F32, 4))
                sum_at = 4 if format.parts == 1 else 8 + 4 * part
                x_sum = emit_splat(b, emit_load(b, _at(b, x_at[row], (_int(sum_at), 1)), F32, 4))
                for half in range(2):
                    at = 2 * row + half
                    value = emit_fma(b, b.sitofp(integers[at], V8), b.fmul(scale[half], x_scale), updated[at])
                    updated[at] = value if minimum is None else emit_fma(b, minimum[half], x_sum, value)
        return updated

    return emit_loop(b, groups, start, group)


@intrinsic
def _direct(typingctx, format, quants, scales, minimums, x, x_scales, groups, y):
    def codegen(ctx, b, sig, args):
        format, quants, scales, minimums, x, x_scales, groups, y = args

        def emit(f):
            sums = _emit_product(
                b, f, 1, quants, scales, minimums, x, x_scales, _int(0), groups, [_ZERO] * 2, True
            )
            for half in range(2):
                emit_store(b, b.add(y, _int(32 * half)), sums[half], 4)

        emit_switch(b, format, {code: lambda f=f: emit(f) for code, f in _FORMATS.items()})
        return ctx.get_dummy_value()

    return types.none(*[types.int64] * 8), codegen


@njit(nogil=True, cache=True)
def direct_integer(format, quants, scales, minimums, x, x_scales, groups, y):
    """y[16] of one panel and one row of x. Prefetches on: what lies behind a panel is the next one."""
    _direct(format, quants, scales, minimums, x, x_scales, groups, y)


@intrinsic
def _expand(typingctx, format, quants, scales, minimums, groups, tile):
    def codegen(ctx, b, sig, args):
        format, quants, scales, minimums, groups, tile = args

        def emit(source):
            target = _TILES[_tile_of(source)]

            def group(g, state):
                at = _at(b, tile, (g, target.group_bytes))
                place = _at(b, quants, (g, source.group_bytes))

                def chunk(c, state):
                    for i, weights in enumerate(source.pairs(b, place, c)):
                        for half in range(2):
                            to = _at(b, at, (c, 64 * _PAIRS), (_int(64 * i + 32 * half), 1))
                            emit_store(b, to, weights[half], 4)
                    return state

                emit_loop(b, _int(source.chunks), [], chunk)
                values = [source.scales(b, scales, g, part) for part in range(source.parts)]
                if source.has_minimums:
                    values += [source.minimums(b, minimums, g, part) for part in range(source.parts)]
                for i, halves in enumerate(values):
                    for half in range(2):
                        to = _at(b, at, (_int(_TILE_QUANT_BYTES + 64 * i + 32 * half), 1))
                        emit_store(b, to, halves[half], 4)
                return state

            emit_loop(b, groups, [], group)

        emit_switch(b, format, {code: lambda f=f: emit(f) for code, f in _FORMATS.items()})
        return ctx.get_dummy_value()

    return types.none(*[types.int64] * 6), codegen


@njit(nogil=True, cache=True)
def expand(format, quants, scales, minimums, groups, tile):
    """Writes `groups` groups of one panel as a tile; the addresses are those of the first group."""
    _expand(format, quants, scales, minimums, groups, tile)


@intrinsic
def _tile_rows(typingctx, key, tile, x, x_scales, x_stride, y, y_stride, groups, accumulate):
    def codegen(ctx, b, sig, args):
        key, tile, x, x_scales, x_stride, y, y_stride, groups, accumulate = args

        def emit(f, rows):
            outs = [
                b.add(b.add(y, b.mul(_int(row), y_stride)), _int(32 * half)) for row in range(rows) for half in range(2)
            ]
            start = emit_sums(b, outs, accumulate)
            scales = b.add(tile, _int(_TILE_QUANT_BYTES))
            minimums = b.add(scales, _int(64 * f.parts))
            sums = _emit_product(b, f, rows, tile, scales, minimums, x, x_scales, x_stride, groups, start, False)
            for at, value in zip(outs, sums, strict=True):
                emit_store(b, at, value, 4)

        cases = {
            code * 8 + rows: lambda f=f, rows=rows: emit(f, rows)
            for code, f in enumerate(_TILES)
            for rows in range(1, TILE_ROWS + 1)
        }
        emit_switch(b, key, cases)
        return ctx.get_dummy_value()

    return types.none(*[types.int64] * 9), codegen


@njit(nogil=True, cache=True)
def integer_tile_product(format, tile, x, x_scales, x_stride, y, y_stride, groups, rows, accumulate):
    """Takes `rows` rows of x through one tile of 16 outputs, in near-equal blocks of at most 4.

    With `accumulate` = 1 the sums go on from what y holds, with 0 from zero.
    """
    kind = 0 if format == _INT8_G32 else 2 if format == _INT8_K else 1
    blocks = (rows + TILE_ROWS - 1) // TILE_ROWS
    first = 0
    for i in range(blocks):
        stop = rows * (i + 1) // blocks
        _tile_rows(
            kind * 8 + stop - first, tile, x + first * x_stride, x_scales + first * x_stride, x_stride,
            y + first * y_stride, y_stride, groups, accumulate,
        )  # fmt: skip
        first = stop
