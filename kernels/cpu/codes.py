"""Vectors from and to codes of 8 and 4 bits, for packed pages: what simd.py is for floats.

Codes of 4 bits: 16 of them are 8 bytes, byte i holds code i in its low and code i + 8 in its high half.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tierd.kernels.cpu.simd import (
    F32,
    HALF,
    I8,
    I32,
    I64,
    V8,
    V8B,
    V8I,
    emit_call,
    emit_fold,
    emit_ints,
    emit_load,
    emit_shuffle,
    emit_store,
    f32x8,
)

_ADDRESS = types.int64
_FP8_MAX = 448.0
_FP8_BIAS = 2.0**120  # between the exponents of e4m3 (bias 7) and of float32 (127)
_FP8_NAN = 480.0  # what the code of a NaN would stand for
_FP8_IN_FLOAT = -0x78100000  # sign, and exponent and mantissa of e4m3 at the end of those of a float32


def _floats(value):
    return ir.Constant(V8, [value] * 8)


def _emit_bytes(b, address):
    return b.zext(emit_load(b, address, V8B, 1), V8I)


@intrinsic
def load8_int8(typingctx, address):
    """Eight int8, as floats."""
    return f32x8(_ADDRESS), lambda ctx, b, sig, args: b.sitofp(b.sext(emit_load(b, args[0], V8B, 1), V8I), V8)


@intrinsic
def load8_low4(typingctx, address):
    """Codes 0..7 of 16 codes of 4 bits, as floats."""
    return f32x8(_ADDRESS), lambda ctx, b, sig, args: b.sitofp(
        b.and_(_emit_bytes(b, args[0]), emit_ints(15)), V8
    )


@intrinsic
def load8_high4(typingctx, address):
    """Codes 8..15 of 16 codes of 4 bits, as floats."""
    return f32x8(_ADDRESS), lambda ctx, b, sig, args: b.sitofp(
        b.lshr(_emit_bytes(b, args[0]), emit_ints(4)), V8
    )


@intrinsic
def load8_fp8(typingctx, address):
    """Eight e4m3, widened."""

    def codegen(ctx, b, sig, args):
        # The sign is extended, so that one shift puts it and the exponent where a float32 has them.
        bits = b.shl(b.sext(emit_load(b, args[0], V8B, 1), V8I), emit_ints(20))
        wide = b.fmul(b.bitcast(b.and_(bits, emit_ints(_FP8_IN_FLOAT)), V8), _floats(_FP8_BIAS))
        # Half of the time of a comparison of the codes: LLVM makes of that more than is written.
        is_nan = b.fcmp_ordered("==", b.fmul(wide, wide), _floats(_FP8_NAN * _FP8_NAN))
        return b.bitcast(b.or_(b.bitcast(wide, V8I), b.sext(is_nan, V8I)), V8)

    return f32x8(_ADDRESS), codegen


def _emit_round_fp8(b, v):
    """e4m3 of each lane: to nearest, ties to even, held within +-448; a NaN becomes the NaN of e4m3."""
    low, high = _floats(-_FP8_MAX), _floats(_FP8_MAX)
    held = b.select(b.fcmp_unordered(">", v, low), v, low)
    held = b.select(b.fcmp_unordered("<", held, high), held, high)
    sign = b.lshr(b.and_(b.bitcast(v, V8I), emit_ints(-0x80000000)), emit_ints(24))
    # As a float32 of 2 ** -120 times the size it has e4m3's exponent, subnormals included: what is above bit 20.
    small = b.bitcast(b.fmul(held, _floats(1 / _FP8_BIAS)), V8I)
    bits = b.and_(small, emit_ints(0x7FFFFFFF))
    odd = b.and_(b.lshr(bits, emit_ints(20)), emit_ints(1))
    code = b.lshr(b.add(b.add(bits, emit_ints(0x7FFFF)), odd), emit_ints(20))
    code = b.select(b.fcmp_unordered("uno", v, v), emit_ints(0x7F), code)
    return b.trunc(b.or_(code, sign), V8B)


@intrinsic
def store8_fp8(typingctx, address, v):
    """Writes eight e4m3."""

    def codegen(ctx, b, sig, args):
        emit_store(b, args[0], _emit_round_fp8(b, args[1]), 1)
        return ctx.get_dummy_value()

    return types.none(_ADDRESS, f32x8), codegen


def _emit_codes(b, v, low, high):
    """Each lane rounded to nearest, ties to even, and held within low..high, as int32."""
    rounded = emit_call(b, "llvm.nearbyint.v8f32", V8, [v])
    low, high = _floats(low), _floats(high)
    rounded = b.select(b.fcmp_ordered(">", rounded, low), rounded, low)
    rounded = b.select(b.fcmp_ordered("<", rounded, high), rounded, high)
    return b.fptosi(rounded, V8I)


@intrinsic
def store8_int8(typingctx, address, v):
    """Writes eight codes -127..127."""

    def codegen(ctx, b, sig, args):
        emit_store(b, args[0], b.trunc(_emit_codes(b, args[1], -127.0, 127.0), V8B), 1)
        return ctx.get_dummy_value()

    return types.none(_ADDRESS, f32x8), codegen


@intrinsic
def store16_int4(typingctx, address, low, high):
    """Writes 16 codes 0..15, in 8 bytes."""

    def codegen(ctx, b, sig, args):
        low, high = (_emit_codes(b, v, 0.0, 15.0) for v in args[1:])
        emit_store(b, args[0], b.trunc(b.or_(low, b.shl(high, emit_ints(4))), V8B), 1)
        return ctx.get_dummy_value()

    return types.none(_ADDRESS, f32x8, f32x8), codegen


def _column_store(emit):
    """Stores lane i of a vector to the byte at `address + i * stride_bytes`."""

    @intrinsic
    def store(typingctx, address, stride_bytes, v):
        def codegen(ctx, b, sig, args):
            narrow = emit(b, args[2])
            for i in range(8):
                at = b.add(args[0], b.mul(args[1], ir.Constant(I64, i)))
                emit_store(b, at, b.extract_element(narrow, ir.Constant(I32, i)), 1)
            return ctx.get_dummy_value()

        return types.none(_ADDRESS, types.int64, f32x8), codegen

    return store


scatter8_fp8 = _column_store(_emit_round_fp8)
scatter8_int8 = _column_store(lambda b, v: b.trunc(_emit_codes(b, v, -127.0, 127.0), V8B))


@intrinsic
def scatter8_int4(typingctx, address, stride_bytes, shift, v):
    """Writes code i, 0..15, of a vector into the half `shift` (0 or 4) of the byte at `address + i * stride_bytes`."""

    def codegen(ctx, b, sig, args):
        address, stride, shift, v = args
        shift = b.trunc(shift, I8)
        codes = b.trunc(_emit_codes(b, v, 0.0, 15.0), V8B)
        others = b.xor(b.shl(ir.Constant(I8, 15), shift), ir.Constant(I8, 0xFF))
        for i in range(8):
            at = b.add(address, b.mul(stride, ir.Constant(I64, i)))
            code = b.shl(b.extract_element(codes, ir.Constant(I32, i)), shift)
            emit_store(b, at, b.or_(b.and_(emit_load(b, at, I8, 1), others), code), 1)
        return ctx.get_dummy_value()

    return types.none(_ADDRESS, types.int64, types.int64, f32x8), codegen


@intrinsic
def store_fp16(typingctx, address, value):
    """Writes one float32 as float16, rounded to nearest even."""

    def codegen(ctx, b, sig, args):
        emit_store(b, args[0], b.fptrunc(args[1], HALF), 2)
        return ctx.get_dummy_value()

    return types.none(_ADDRESS, types.float32), codegen


def _emit_larger(b, x, y):
    return b.select(b.icmp_signed(">", x, y), x, y)


@intrinsic
def larger8(typingctx, x, y):
    """The larger magnitude of each lane: as integers they are in order, infinity above them and NaN above that."""

    def codegen(ctx, b, sig, args):
        x, y = (b.and_(b.bitcast(v, V8I), emit_ints(0x7FFFFFFF)) for v in args)
        return b.bitcast(_emit_larger(b, x, y), V8)

    return f32x8(f32x8, f32x8), codegen


@intrinsic
def largest8(typingctx, v):
    """The largest of eight magnitudes, in the order of `larger8`."""

    def codegen(ctx, b, sig, args):
        return b.bitcast(emit_fold(b, b.bitcast(args[0], V8I), _emit_larger), F32)

    return types.float32(f32x8), codegen


@intrinsic
def min8(typingctx, v):
    """The smallest lane."""

    def codegen(ctx, b, sig, args):
        return emit_fold(b, args[0], lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))

    return types.float32(f32x8), codegen


@intrinsic
def hadamard8(typingctx, v):
    """The lanes by a Walsh-Hadamard matrix of 8, not normalized."""

    def codegen(ctx, b, sig, args):
        v = args[0]
        for width in (1, 2, 4):
            signs = ir.Constant(V8, [-1.0 if i & width else 1.0 for i in range(8)])
            v = b.fadd(emit_shuffle(b, v, v, [i ^ width for i in range(8)]), b.fmul(v, signs))
        return v

    return f32x8(f32x8), codegen
