"""Vectors of eight floats for Numba: a type, and intrinsics that load, compute and store them.

Memory is named by address (an int64), not by array and index: an address carries no wraparound check, and the one
compiled signature serves every model. Whoever takes an address of an array keeps that array alive.

Nothing here is compiled with fast-math flags: each function is one fixed sequence of IEEE operations, so that the
same inputs give the same bits wherever they appear in a batch.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32, HALF = ir.FloatType(), ir.HalfType()
V8, V8I, V8H, V8S, V8B = (ir.VectorType(t, 8) for t in (F32, I32, HALF, I16, I8))


class F32x8(types.Type):  # type: ignore[misc]  # numba has no types of its own
    """Eight float32 lanes: LLVM's <8 x float>."""

    def __init__(self) -> None:
        super().__init__(name="F32x8")


f32x8 = F32x8()


@register_model(F32x8)
class _F32x8Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, V8)


# Emitters: LLVM instructions for a builder, shared with the micro-kernels.


def emit_pointer(b, address, pointee):
    return b.inttoptr(address, pointee.as_pointer())


def emit_load(b, address, type, align):
    value = b.load(emit_pointer(b, address, type))
    value.align = align
    return value


def emit_store(b, address, value, align):
    b.store(value, emit_pointer(b, address, value.type)).align = align


def emit_shuffle(b, x, y, lanes):
    """The given lanes of two vectors, those of `y` counted on from those of `x`."""
    lanes = list(lanes)
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def emit_splat(b, scalar, lanes=8):
    """A scalar in every lane."""
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    return emit_shuffle(b, b.insert_element(undefined, scalar, ir.Constant(I32, 0)), undefined, [0] * lanes)


def emit_ints(value):
    return ir.Constant(V8I, [value] * 8)


def emit_call(b, name, type, args):
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(type, [a.type for a in args]), name)
    return b.call(function, args)


def emit_fma(b, x, y, z):
    return emit_call(b, "llvm.fma.v8f32", V8, [x, y, z])


def emit_prefetch(b, address, locality=3):
    """Asks for the cache line at `address`, which need not be a valid one; locality 3 is the nearest cache, 2 the
    second."""
    byte = I8.as_pointer()
    type = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    read, keep, data = ir.Constant(I32, 0), ir.Constant(I32, locality), ir.Constant(I32, 1)
    prefetch = cgutils.get_or_insert_function(b.module, type, "llvm.prefetch.p0")
    b.call(prefetch, [emit_pointer(b, address, I8), read, keep, data])


def emit_fence(b):
    """Keeps LLVM's scheduler from moving instructions across; no instruction itself."""
    b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


def emit_load_fp16(b, address):
    return b.fpext(emit_load(b, address, V8H, 2), V8)


def emit_load_bf16(b, address):
    wide = b.zext(emit_load(b, address, V8S, 2), V8I)
    return b.bitcast(b.shl(wide, emit_ints(16)), V8)


def _emit_round_bf16(b, v):
    """Round to nearest, ties to even; a NaN stays a NaN (its quiet bit is set, whatever its payload)."""
    bits = b.bitcast(v, V8I)
    odd = b.and_(b.lshr(bits, emit_ints(16)), emit_ints(1))
    rounded = b.lshr(b.add(b.add(bits, emit_ints(0x7FFF)), odd), emit_ints(16))
    quiet = b.or_(b.lshr(bits, emit_ints(16)), emit_ints(0x40))
    return b.trunc(b.select(b.fcmp_unordered("uno", v, v), quiet, rounded), V8S)


# Memory.


@intrinsic
def load8(typingctx, address):
    """Eight float32 at `address`."""
    return f32x8(types.int64), lambda ctx, b, sig, args: emit_load(b, args[0], V8, 4)


@intrinsic
def load8_fp16(typingctx, address):
    """Eight float16 at `address`, widened."""
    return f32x8(types.int64), lambda ctx, b, sig, args: emit_load_fp16(b, args[0])


@intrinsic
def load8_bf16(typingctx, address):
    """Eight bfloat16 at `address`, widened."""
    return f32x8(types.int64), lambda ctx, b, sig, args: emit_load_bf16(b, args[0])


@intrinsic
def store8(typingctx, address, v):
    """Writes eight float32."""

    def codegen(ctx, b, sig, args):
        emit_store(b, args[0], args[1], 4)
        return ctx.get_dummy_value()

    return types.none(types.int64, f32x8), codegen


@intrinsic
def store8_fp16(typingctx, address, v):
    """Writes eight float16, rounded to nearest even."""

    def codegen(ctx, b, sig, args):
        emit_store(b, args[0], b.fptrunc(args[1], V8H), 2)
        return ctx.get_dummy_value()

    return types.none(types.int64, f32x8), codegen


@intrinsic
def store8_bf16(typingctx, address, v):
    """Writes eight bfloat16, rounded to nearest even."""

    def codegen(ctx, b, sig, args):
        emit_store(b, args[0], _emit_round_bf16(b, args[1]), 2)
        return ctx.get_dummy_value()

    return types.none(types.int64, f32x8), codegen


@intrinsic
def prefetch(typingctx, address):
    """Asks for the cache line at `address`, into the second-level cache."""

    def codegen(ctx, b, sig, args):
        emit_prefetch(b, args[0], 2)
        return ctx.get_dummy_value()

    return types.none(types.int64), codegen


def _scalar_load(numba_type, llvm_type, align):
    @intrinsic
    def load(typingctx, address):
        return numba_type(types.int64), lambda ctx, b, sig, args: emit_load(b, args[0], llvm_type, align)

    return load


load_f32 = _scalar_load(types.float32, F32, 4)
load_u32 = _scalar_load(types.uint32, I32, 4)
load_i8 = _scalar_load(types.int8, I8, 1)
load_i64 = _scalar_load(types.int64, I64, 8)


@intrinsic
def load_i32(typingctx, address):
    """The int32 at `address`, widened to an int64."""
    return types.int64(types.int64), lambda ctx, b, sig, args: b.sext(emit_load(b, args[0], I32, 4), I64)


@intrinsic
def load_fp16(typingctx, address):
    """The float16 at `address` as float32."""
    return types.float32(types.int64), lambda ctx, b, sig, args: b.fpext(emit_load(b, args[0], HALF, 2), F32)


@intrinsic
def load_bf16(typingctx, address):
    """The bfloat16 at `address` as float32."""

    def codegen(ctx, b, sig, args):
        return b.bitcast(b.shl(b.zext(emit_load(b, args[0], I16, 2), I32), ir.Constant(I32, 16)), F32)

    return types.float32(types.int64), codegen


@intrinsic
def store_f32(typingctx, address, value):
    """Writes one float32."""

    def codegen(ctx, b, sig, args):
        emit_store(b, args[0], args[1], 4)
        return ctx.get_dummy_value()

    return types.none(types.int64, types.float32), codegen


@intrinsic
def store_i32(typingctx, address, value):
    """Writes the low half of an int64."""

    def codegen(ctx, b, sig, args):
        emit_store(b, args[0], b.trunc(args[1], I32), 4)
        return ctx.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


def _lane_store(emit_narrow, align):
    """Stores lane i of a vector at `address + i * stride_bytes`, narrowed first."""

    @intrinsic
    def store(typingctx, address, stride_bytes, v):
        def codegen(ctx, b, sig, args):
            narrow = emit_narrow(b, args[2])
            for i in range(8):
                at = b.add(args[0], b.mul(args[1], ir.Constant(I64, i)))
                emit_store(b, at, b.extract_element(narrow, ir.Constant(I32, i)), align)
            return ctx.get_dummy_value()

        return types.none(types.int64, types.int64, f32x8), codegen

    return store


scatter8 = _lane_store(lambda b, v: v, 4)
scatter8_fp16 = _lane_store(lambda b, v: b.fptrunc(v, V8H), 2)
scatter8_bf16 = _lane_store(_emit_round_bf16, 2)


# Arithmetic.


@intrinsic
def splat(typingctx, x):
    """`x` in every lane."""
    return f32x8(types.float32), lambda ctx, b, sig, args: emit_splat(b, args[0])


@intrinsic
def fma(typingctx, x, y, z):
    """x * y + z, rounded once."""
    return f32x8(f32x8, f32x8, f32x8), lambda ctx, b, sig, args: emit_fma(b, *args)


def _binary(emit):
    @intrinsic
    def operation(typingctx, x, y):
        return f32x8(f32x8, f32x8), lambda ctx, b, sig, args: emit(b, args[0], args[1])

    return operation


add = _binary(lambda b, x, y: b.fadd(x, y))
sub = _binary(lambda b, x, y: b.fsub(x, y))
mul = _binary(lambda b, x, y: b.fmul(x, y))
div = _binary(lambda b, x, y: b.fdiv(x, y))
maximum = _binary(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))  # y where either is no number
minimum = _binary(lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))  # the same


def emit_fold(b, v, combine):
    """Combines the lanes as ((0.4).(2.6)).((1.5).(3.7)): the one reduction order of this backend."""
    for width in (4, 2, 1):
        v = combine(b, emit_shuffle(b, v, v, range(width)), emit_shuffle(b, v, v, range(width, 2 * width)))
    return b.extract_element(v, ir.Constant(I32, 0))


@intrinsic
def sum8(typingctx, v):
    """Sum of the lanes in one fixed order."""

    def codegen(ctx, b, sig, args):
        return emit_fold(b, args[0], lambda b, x, y: b.fadd(x, y))

    return types.float32(f32x8), codegen


@intrinsic
def max8(typingctx, v):
    """The largest lane."""

    def codegen(ctx, b, sig, args):
        return emit_fold(b, args[0], lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))

    return types.float32(f32x8), codegen


@intrinsic
def keep_lanes(typingctx, v, low, high, other):
    """Lane i of `v` where low <= i < high, `other` elsewhere. What was in the dropped lanes, NaN or not, is gone."""

    def codegen(ctx, b, sig, args):
        v, low, high, other = args
        lanes = ir.Constant(V8I, list(range(8)))
        low, high = (emit_splat(b, b.trunc(bound, I32)) for bound in (low, high))
        kept = b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))
        return b.select(kept, v, emit_splat(b, other))

    return f32x8(f32x8, types.int64, types.int64, types.float32), codegen


_LOG2_E = 1.44269504088896341
# ln 2 in two parts, so that x - n * ln 2 keeps its low bits (Cody and Waite); the polynomial is Cephes' expf.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_LOWEST, _EXP_HIGHEST = -87.0, 88.0


def _emit_exp(b, x):
    def constant(value):
        return ir.Constant(V8, [float(np.float32(value))] * 8)

    low, high = constant(_EXP_LOWEST), constant(_EXP_HIGHEST)
    x = b.select(b.fcmp_ordered("<", high, x), high, x)
    x = b.select(b.fcmp_ordered(">", low, x), low, x)
    n = emit_call(b, "llvm.nearbyint.v8f32", V8, [b.fmul(x, constant(_LOG2_E))])
    r = emit_fma(b, n, constant(-_LN2_LOW), emit_fma(b, n, constant(-_LN2_HIGH), x))
    p = constant(_EXP[0])
    for coefficient in _EXP[1:]:
        p = emit_fma(b, p, r, constant(coefficient))
    y = emit_fma(b, p, b.fmul(r, r), b.fadd(r, constant(1)))
    power = b.shl(b.add(b.fptosi(n, V8I), emit_ints(127)), emit_ints(23))  # the bits of 2 ** n
    return b.fmul(y, b.bitcast(power, V8))


@intrinsic
def exp8(typingctx, x):
    """e ** x within 2e-7 relative, the argument held within -87..88 (so never 0, never infinite). A NaN stays one."""
    return f32x8(f32x8), lambda ctx, b, sig, args: _emit_exp(b, args[0])
