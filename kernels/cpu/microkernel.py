"""The inner loops of every matrix product, emitted as LLVM: rows of x times panels of 16 outputs.

    y[m, n] = init + sum over k ascending of w[k, n] * x[m, k]        one fma a step, one accumulator an output

That order is the whole numeric contract: an output depends on its row of x and its column of w alone, not on how
many rows or panels a kernel takes at once. `w` is a weight panel (dequantized on the fly, or to a float32 tile
first), a page of keys (lanes are tokens, k the head dimension) or a page of values (lanes are dimensions, k tokens).

All strides are in bytes. Kernels are emitted rather than written, because the accumulators of 6 x 16 outputs are 12
values that must stay in registers, and the loop exists for each count of rows.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from tierd.kernels.cpu.simd import (
    F32,
    I64,
    V8,
    V8B,
    V8I,
    emit_fence,
    emit_fma,
    emit_load,
    emit_load_bf16,
    emit_prefetch,
    emit_splat,
    emit_store,
)
from tierd.kernels.packing import WeightFormat

_QUANTS_AHEAD_BYTES = 2048  # some 150 ns of work at 12 Gweights/s
_ZERO = ir.Constant(V8, [0.0] * 8)


def _int(value):
    return ir.Constant(I64, value)


def _offset(b, address, index, stride_bytes):
    return b.add(address, b.mul(index, _int(stride_bytes)))


def emit_loop(b, count, state, body):
    """Runs body(index, state) -> state `count` times; `state` is a list of LLVM values. Returns the last state.

    LLVM must not unroll it: the bodies are long enough, and a second copy of them runs no faster but takes LLVM
    seconds, or mixes the steps of several rounds until the sums fall out of the registers (10% of a prefill).
    """
    before = b.block
    head, inside, after = (b.append_basic_block(n) for n in ("head", "inside", "after"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    index.add_incoming(_int(0), before)
    phis = []
    for value in state:
        phi = b.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    b.cbranch(b.icmp_signed("<", index, count), inside, after)
    b.position_at_end(inside)
    updated = body(index, phis)
    index.add_incoming(b.add(index, _int(1)), b.block)
    for phi, value in zip(phis, updated, strict=True):
        phi.add_incoming(value, b.block)
    _forbid_unrolling(b.module, b.branch(head))
    b.position_at_end(after)
    return phis


def _forbid_unrolling(module, back_edge):
    """A loop's metadata names itself first, which llvmlite's own way of making a node can't say."""
    option = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    loop = ir.values.MDValue(module, [option], name=str(len(module.metadata)))
    loop.operands = (loop, option)
    back_edge.set_metadata("llvm.loop", loop)


# Panels: for each format, the scale registers of a group, and the two weight vectors of one column.


def _halves(b, address, lane_bytes, load):
    return [load(b, address), load(b, b.add(address, _int(8 * lane_bytes)))]


def _load_fp32(b, address):
    return emit_load(b, address, V8, 4)


def _load_int8(b, address):
    return b.sitofp(b.sext(emit_load(b, address, V8B, 1), V8I), V8)


class _Fp32:
    column_bytes = 64

    def scales(self, b, scales):
        """Registers that hold for all columns of a panel."""
        return []

    def column(self, b, quants, scales):
        """Both weight vectors of a column."""
        return _halves(b, quants, 4, _load_fp32)


class _Bf16(_Fp32):
    column_bytes = 32

    def column(self, b, quants, scales):
        return _halves(b, quants, 2, emit_load_bf16)


class _Int8(_Fp32):
    column_bytes = 16

    def scales(self, b, scales):
        return _halves(b, scales, 4, _load_fp32)

    def column(self, b, quants, scales):
        return [b.fmul(q, s) for q, s in zip(_halves(b, quants, 1, _load_int8), scales, strict=True)]


FORMAT_CODES = {format: code for code, format in enumerate(WeightFormat)}
_FORMATS = dict(enumerate((_Fp32(), _Bf16(), _Int8())))  # in the order of WeightFormat
DIRECT_SHAPES = ((1, 1), (2, 1), (1, 2), (1, 3), (1, 4))  # panels x rows
TILE_ROWS = 6  # 6 rows x 2 vectors of sums, 2 of weights, 1 of x: 15 of 16 registers
PAIR_ROWS = 3


class _Panels:
    """`count` neighbouring panels of a packed matrix: addresses of the first, bytes from one to the next."""

    def __init__(self, count, quants, panel_bytes, scales, scale_bytes):
        self.count = count
        self.quants, self.panel_bytes = quants, panel_bytes
        self.scales, self.scale_bytes = scales, scale_bytes

    def at(self, b, base, stride, panel, offset):
        """Address of byte `offset` of a section of one panel."""
        return b.add(b.add(base, b.mul(stride, _int(panel))), offset)

    def prefetch(self, b, panel, offset):
        """Prefetches quants further on: past the end of a panel comes the start of the one `count` later."""
        offset = b.add(offset, _int(_QUANTS_AHEAD_BYTES))
        stride = self.panel_bytes
        jump = b.select(b.icmp_signed(">=", offset, stride), b.mul(stride, _int(self.count - 1)), _int(0))
        emit_prefetch(b, self.at(b, self.quants, stride, panel, b.add(offset, jump)))


def _walk_columns(b, format, panels, count, state, body, prefetch):
    """Runs body(column, panel, [low, high] weights, state) -> state over `count` columns of all panels.

    Prefetching covers what the hardware doesn't follow, two streams of quants (7.9 against 12.8 Gweights/s).
    """
    scales = [
        format.scales(b, panels.at(b, panels.scales, panels.scale_bytes, p, _int(0))) for p in range(panels.count)
    ]

    def column(k, state):
        offset = b.mul(k, _int(format.column_bytes))
        for p in range(panels.count):
            if prefetch:
                panels.prefetch(b, p, offset)
            quants = panels.at(b, panels.quants, panels.panel_bytes, p, offset)
            state = body(k, p, format.column(b, quants, scales[p]), state)
        return state

    return emit_loop(b, count, state, column)


def _emit_product(b, x_rows, k, weights, sums):
    """sums[row, half] + weights[half] * x[row, k]."""
    out = []
    for row, (low, high) in zip(x_rows, zip(sums[::2], sums[1::2], strict=True), strict=True):
        x = emit_splat(b, emit_load(b, _offset(b, row, k, 4), F32, 4))
        out += [emit_fma(b, weights[0], x, low), emit_fma(b, weights[1], x, high)]
    return out


def emit_switch(b, selector, cases):
    """Runs the emitter whose key equals `selector`; none does nothing."""
    after = b.append_basic_block("after")
    switch = b.switch(selector, after)
    for key, emit in cases.items():
        block = b.append_basic_block("case")
        switch.add_case(_int(key), block)
        b.position_at_end(block)
        emit()
        b.branch(after)
    b.position_at_end(after)


def _emit_direct(b, format, num_panels, num_rows, args):
    quants, panel_bytes, scales, scale_bytes, x, x_stride, y, y_stride, cols = args
    panels = _Panels(num_panels, quants, panel_bytes, scales, scale_bytes)
    rows = [b.add(x, b.mul(_int(r), x_stride)) for r in range(num_rows)]
    width = 2 * num_rows  # sums of one panel

    def step(k, panel, weights, state):
        own = slice(panel * width, (panel + 1) * width)
        return [*state[: own.start], *_emit_product(b, rows, k, weights, state[own]), *state[own.stop :]]

    state = _walk_columns(b, format, panels, cols, [_ZERO] * (width * num_panels), step, True)
    for i, value in enumerate(state):
        panel, row, half = i // width, i % width // 2, i % 2
        emit_store(b, b.add(b.add(y, b.mul(_int(row), y_stride)), _int(64 * panel + 32 * half)), value, 4)


@intrinsic
def _direct(typingctx, key, quants, panel_bytes, scales, scale_bytes, x, x_stride, y, y_stride, cols):
    def codegen(ctx, b, sig, args):
        cases = {
            code * 64 + p * 8 + r: lambda f=format, p=p, r=r: _emit_direct(b, f, p, r, args[1:])
            for code, format in _FORMATS.items()
            for p, r in DIRECT_SHAPES
        }
        emit_switch(b, args[0], cases)
        return ctx.get_dummy_value()

    return types.none(*[types.int64] * 10), codegen


@njit(nogil=True, cache=True)
def direct(format, num_panels, num_rows, quants, panel_bytes, scales, scale_bytes, x, x_stride, y, y_stride, cols):
    """Takes `num_rows` rows of x through `num_panels` neighbouring panels (`DIRECT_SHAPES` lists the pairs there
    are), dequantizing in registers."""
    key = format * 64 + num_panels * 8 + num_rows
    _direct(key, quants, panel_bytes, scales, scale_bytes, x, x_stride, y, y_stride, cols)


@intrinsic
def _dequantize(typingctx, format, quants, scales, cols, tile):
    def codegen(ctx, b, sig, args):
        format, quants, scales, cols, tile = args

        def emit(panel_format):
            def store(k, panel, weights, state):
                for half in range(2):
                    emit_store(b, b.add(_offset(b, tile, k, 64), _int(32 * half)), weights[half], 4)
                return state

            panels = _Panels(1, quants, _int(0), scales, _int(0))
            _walk_columns(b, panel_format, panels, cols, [], store, False)

        emit_switch(b, format, {code: lambda f=f: emit(f) for code, f in _FORMATS.items()})
        return ctx.get_dummy_value()

    return types.none(*[types.int64] * 5), codegen


@njit(nogil=True, cache=True)
def dequantize(format, quants, scales, cols, tile):
    """Writes `cols` columns of one panel as a float32 tile [cols][16]; the addresses are those of the first column."""
    _dequantize(format, quants, scales, cols, tile)


def emit_sums(b, outs, accumulate):
    """What lies at `outs`, or zeros unless `accumulate`."""
    before = b.block
    resume, start = b.append_basic_block("resume"), b.append_basic_block("start")
    b.cbranch(b.icmp_signed("!=", accumulate, _int(0)), resume, start)
    b.position_at_end(resume)
    held = [_load_fp32(b, at) for at in outs]
    b.branch(start)
    b.position_at_end(start)
    sums = []
    for value in held:
        phi = b.phi(V8)
        phi.add_incoming(_ZERO, before)
        phi.add_incoming(value, resume)
        sums.append(phi)
    return sums


def _emit_tile(b, num_rows, tiles, tile_stride, x, x_stride, ys, y_stride, cols, accumulate, ahead=()):
    """`num_rows` rows of x through one or two tiles; `ys` names the sums of each. With `ahead`, what lies so many bytes
    from each vector of a tile is prefetched."""
    rows = [b.add(x, b.mul(_int(r), x_stride)) for r in range(num_rows)]
    outs = [
        b.add(b.add(y, b.mul(_int(r), y_stride)), _int(32 * half))
        for y in ys for r in range(num_rows) for half in range(2)
    ]  # fmt: skip
    def step(k, state):
        updated = []
        for i, tile in enumerate(tiles):
            at = b.add(tile, b.mul(k, tile_stride))
            if ahead:
                emit_prefetch(b, b.add(at, ahead[i]), 2)
            weights = _halves(b, at, 4, _load_fp32)
            updated += _emit_product(b, rows, k, weights, state[2 * num_rows * i : 2 * num_rows * (i + 1)])
            if len(tiles) > 1:
                emit_fence(b)  # else 12 sums, 4 weights and 3 values of x want 19 of 16 registers
        return updated

    for at, value in zip(outs, emit_loop(b, cols, emit_sums(b, outs, accumulate), step), strict=True):
        emit_store(b, at, value, 4)


@intrinsic
def _tile_rows(typingctx, num_rows, tile, tile_stride, x, x_stride, y, y_stride, cols, accumulate):
    def codegen(ctx, b, sig, args):
        num_rows, tile, tile_stride, x, x_stride, y, *rest = args
        cases = {
            r: lambda r=r: _emit_tile(b, r, [tile], tile_stride, x, x_stride, [y], *rest)
            for r in range(1, TILE_ROWS + 1)
        }
        emit_switch(b, num_rows, cases)
        return ctx.get_dummy_value()

    return types.none(*[types.int64] * 9), codegen


@intrinsic
def _pair_rows(
    typingctx, num_rows, tile0, tile1, tile_stride, x, x_stride, y0, y1, y_stride, cols, accumulate, ahead0, ahead1
):  # fmt: skip
    def codegen(ctx, b, sig, args):
        num_rows, tile0, tile1, tile_stride, x, x_stride, y0, y1, y_stride, cols, accumulate, *ahead = args
        cases = {
            r: lambda r=r: _emit_tile(
                b, r, [tile0, tile1], tile_stride, x, x_stride, [y0, y1], y_stride, cols, accumulate, ahead
            )
            for r in range(1, PAIR_ROWS + 1)
        }
        emit_switch(b, num_rows, cases)
        return ctx.get_dummy_value()

    return types.none(*[types.int64] * 13), codegen


@njit(nogil=True, cache=True)
def tile_product(tile, tile_stride, x, x_stride, y, y_stride, cols, rows, accumulate):
    """Takes `rows` rows of x through one float32 tile of 16 outputs, in near-equal blocks of at most 6.

    With `accumulate` = 1 the sums go on from what y holds, with 0 from zero.
    """
    blocks = (rows + TILE_ROWS - 1) // TILE_ROWS
    first = 0
    for i in range(blocks):
        stop = rows * (i + 1) // blocks
        _tile_rows(
            stop - first, tile, tile_stride, x + first * x_stride, x_stride, y + first * y_stride, y_stride, cols,
            accumulate,
        )  # fmt: skip
        first = stop


@njit(nogil=True, cache=True)
def tile_pair_product(
    tile0, tile1, tile_stride, x, x_stride, y0, y1, y_stride, cols, rows, accumulate, ahead0, ahead1
):  # fmt: skip
    """Two tiles with sums y0 and y1. Up to 3 rows take them at once: 4 sums or less would wait for each other.

    These few rows wait for memory: on the way they prefetch two more tiles, which lie `ahead0` and `ahead1` bytes from
    these (0 for none).
    """
    if rows <= PAIR_ROWS:
        _pair_rows(rows, tile0, tile1, tile_stride, x, x_stride, y0, y1, y_stride, cols, accumulate, ahead0, ahead1)
    else:
        tile_product(tile0, tile_stride, x, x_stride, y0, y_stride, cols, rows, accumulate)
        tile_product(tile1, tile_stride, x, x_stride, y1, y_stride, cols, rows, accumulate)
