"""Rows of activations as integers of 16 bits, for the products of integer.py.

32 columns form a group: x = scale * q with scale = max |x| / 32767 and q rounded to nearest, ties to even. A row is

    int16 [groups][32]       columns 8c, 8c + 4, 8c + 1, 8c + 5, 8c + 2, 8c + 6, 8c + 3, 8c + 7 of each eight
    float32 [groups][4]      scale; scale * sum of q over the group, its first half, its second half

A group's integers depend on its values alone, so a row has the same ones in every batch.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from tierd.kernels.cpu.integer import X_QUANT_BYTES, X_SCALE_BYTES
from tierd.kernels.cpu.simd import (
    F32,
    I64,
    V8,
    V8I,
    V8S,
    emit_call,
    emit_fold,
    emit_ints,
    emit_load,
    emit_shuffle,
    emit_splat,
    emit_store,
)
from tierd.kernels.cpu.team import finish, take, wait_for
from tierd.kernels.packing import GROUP_COLS

_LARGEST = 32767.0
_NEGLIGIBLE = float.fromhex("0x1p-100")  # a group below that is zeros: 32767 / max |x| must not become infinite


def quantized_row_bytes(cols: int) -> int:
    """Bytes of a row of `cols` columns, in whole groups."""
    return -(-cols // GROUP_COLS) * (X_QUANT_BYTES + X_SCALE_BYTES)


def _larger(b, x, y):
    return b.select(b.icmp_signed(">", x, y), x, y)


@intrinsic
def _quantize_group(typingctx, x, quants, scales):
    def codegen(ctx, b, sig, args):
        x, quants, scales = args
        values = [emit_load(b, b.add(x, ir.Constant(I64, 32 * i)), V8, 4) for i in range(4)]
        # As integers the magnitudes are in order, with infinity above them and NaN above that: these end up in the
        # scale, and spoil what is computed with it, as they should.
        bits = [b.and_(b.bitcast(v, V8I), emit_ints(0x7FFFFFFF)) for v in values]
        largest = _larger(b, _larger(b, bits[0], bits[1]), _larger(b, bits[2], bits[3]))
        largest = b.bitcast(emit_fold(b, largest, _larger), F32)
        scale = b.fdiv(largest, ir.Constant(F32, _LARGEST))
        inverse = b.fdiv(ir.Constant(F32, _LARGEST), largest)
        counts = b.fcmp_ordered(">", largest, ir.Constant(F32, _NEGLIGIBLE))
        inverse = emit_splat(b, b.select(counts, inverse, ir.Constant(F32, 0.0)))
        low, high = (ir.Constant(V8, [limit] * 8) for limit in (-_LARGEST, _LARGEST))
        sums = []
        for i, v in enumerate(values):
            v = b.fmul(v, inverse)
            v = b.select(b.fcmp_ordered(">", v, low), v, low)
            v = b.select(b.fcmp_ordered("<", v, high), v, high)
            q = b.fptosi(emit_call(b, "llvm.nearbyint.v8f32", V8, [v]), V8I)
            sums.append(q)
            narrow = b.trunc(q, V8S)
            pairs = emit_shuffle(b, narrow, narrow, (0, 4, 1, 5, 2, 6, 3, 7))
            emit_store(b, b.add(quants, ir.Constant(I64, 16 * i)), pairs, 2)
        halves = [emit_fold(b, b.add(*sums[i : i + 2]), lambda b, x, y: b.add(x, y)) for i in (0, 2)]
        stored = [scale] + [b.fmul(scale, b.sitofp(n, F32)) for n in (b.add(*halves), *halves)]
        for i, value in enumerate(stored):
            emit_store(b, b.add(scales, ir.Constant(I64, 4 * i)), value, 4)
        return ctx.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), codegen


@njit(nogil=True, cache=True)
def quantize_row(x, cols, first, stop, out):
    """Columns first..stop (whole groups) of a row of `cols` float32 at `x` become those of the row at `out`."""
    for g in range(first // GROUP_COLS, stop // GROUP_COLS):
        at = out + g * X_QUANT_BYTES
        _quantize_group(x + 4 * GROUP_COLS * g, at, out + 2 * cols + g * X_SCALE_BYTES)


@njit(nogil=True, cache=True)
def quantize(x, x_stride, cols, out, out_stride, rows, phase):
    """One phase: `rows` rows of x."""
    row = take(phase, 1)
    while row < rows:
        quantize_row(x + row * x_stride, cols, 0, cols, out + row * out_stride)
        finish(phase, 1)
        row = take(phase, 1)
    wait_for(phase, rows)
