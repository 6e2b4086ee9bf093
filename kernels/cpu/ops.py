"""The small operations between the matrix products, row by row: norms, RoPE and the write into pages, SwiGLU."""

from __future__ import annotations

import numpy as np
from numba import njit

from tierd.kernels.cpu.attention import BOUND_BYTES
from tierd.kernels.cpu.matmul import gather_row
from tierd.kernels.cpu.pages import exact_at, turn, write_exact, write_token
from tierd.kernels.cpu.simd import (
    add,
    div,
    exp8,
    fma,
    load8,
    load_i32,
    load_i64,
    maximum,
    minimum,
    mul,
    splat,
    store8,
    store_f32,
    sub,
    sum8,
)
from tierd.kernels.cpu.team import finish, take, wait_for

_PAGE_TOKENS = 16
_NO_PAGE = np.int64(0)
_ACTIVATION_COLS = 512  # columns of one item of `activate`


@njit(nogil=True, cache=True)
def norm_row(x, weight, length, padded, eps, out):
    """out = x / sqrt(mean of squares + eps) * weight over `length` values. Both arrays hold `padded` (a multiple of
    8) values, those beyond `length` being zero in x. May work in place."""
    squares = splat(np.float32(0))
    for i in range(0, padded, 8):
        v = load8(x + 4 * i)
        squares = fma(v, v, squares)
    scale = splat(np.float32(1) / np.sqrt(sum8(squares) / np.float32(length) + eps))
    for i in range(0, padded, 8):
        store8(out + 4 * i, mul(mul(load8(x + 4 * i), scale), load8(weight + 4 * i)))


@njit(nogil=True, cache=True)
def embed(job, phase):
    """One phase: the rows of the residual stream become the embeddings of their tokens."""
    row = take(phase, 1)
    while row < job.rows:
        target = job.residual + row * job.residual_stride
        gather_row(job.embed, load_i32(job.tokens + 4 * row), target)
        for d in range(job.hidden, job.hidden_padded):  # a row of an earlier pass may have been no number
            store_f32(target + 4 * d, np.float32(0))
        finish(phase, 1)
        row = take(phase, 1)
    wait_for(phase, job.rows)


@njit(nogil=True, cache=True)
def norm(job, weight, out, phase):
    """One phase: out = RMSNorm(residual), all rows; `out` has the residual's stride."""
    row = take(phase, 1)
    while row < job.rows:
        at = row * job.residual_stride
        norm_row(job.residual + at, weight, job.hidden, job.hidden_padded, job.norm_eps, out + at)
        finish(phase, 1)
        row = take(phase, 1)
    wait_for(phase, job.rows)


@njit(nogil=True, cache=True)
def norm_logit_rows(job, phase):
    """One phase: the rows whose logits are wanted, normed, to the first rows of `normed`."""
    item = take(phase, 1)
    while item < job.num_logits:
        source = job.residual + load_i32(job.logit_rows + 4 * item) * job.residual_stride
        target = job.normed + item * job.residual_stride
        norm_row(source, job.final_norm, job.hidden, job.hidden_padded, job.norm_eps, target)
        finish(phase, 1)
        item = take(phase, 1)
    wait_for(phase, job.num_logits)


@njit(nogil=True, cache=True)
def _rotate(x, cos, sin, head_dim, scale):
    """RoPE on one head in place (the halves of a head are the pairs), and a factor."""
    half = 2 * head_dim  # bytes
    for d in range(0, half, 32):
        c, s = load8(cos + d), load8(sin + d)
        low, high = load8(x + d), load8(x + half + d)
        store8(x + d, mul(sub(mul(low, c), mul(high, s)), splat(scale)))
        store8(x + half + d, mul(add(mul(high, c), mul(low, s)), splat(scale)))


@njit(nogil=True, cache=True)
def _share_page(job, row, other):
    """Whether two rows are of one sequence and go to one page of it."""
    pages = load_i32(job.positions + 4 * row) // _PAGE_TOKENS, load_i32(job.positions + 4 * other) // _PAGE_TOKENS
    return load_i32(job.row_seq + 4 * row) == load_i32(job.row_seq + 4 * other) and pages[0] == pages[1]


@njit(nogil=True, cache=True)
def _stop_row(job, row):
    """One thread writes the rows from `row` to this one: those of a packed page, whose first token says how the others
    are packed. None, if `row` itself belongs to a row before."""
    stop = row + 1
    if job.rotation > 1:
        if row > 0 and _share_page(job, row - 1, row):
            return row
        while stop < job.rows and _share_page(job, row, stop):
            stop += 1
    return stop


@njit(nogil=True, cache=True)
def _add_sink_query(job, row, head, at):
    """Keeps another copy of a bounded row's query, rotated to where its sinks are seen from."""
    bound = job.bounds + BOUND_BYTES * row
    if load_i32(bound + 4) == 0:
        return
    target = job.sink_queries + row * job.attended_stride + head * 4 * job.head_dim
    for d in range(0, 4 * job.head_dim, 32):
        store8(target + d, load8(at + d))
    angle = load_i32(bound + 8) * job.rope_stride
    _rotate(target, job.cos + angle, job.sin + angle, job.head_dim, job.query_scale)
    if job.rotation > 1:
        turn(target, job.head_dim, job.rotation)


@njit(nogil=True, cache=True)
def _angles(job, row):
    """Where the cos and the sin of a row lie."""
    angle = load_i32(job.bounds + BOUND_BYTES * row + 16) if job.bounds != 0 else load_i32(job.positions + 4 * row)
    if angle < 0:  # beyond the tables
        return job.far_cos + (-1 - angle) * job.rope_stride, job.far_sin + (-1 - angle) * job.rope_stride
    return job.cos + angle * job.rope_stride, job.sin + angle * job.rope_stride


@njit(nogil=True, cache=True)
def _rotate_and_write(job, layer_index, q_norm, k_norm, row):
    head_bytes = 4 * job.head_dim
    position = load_i32(job.positions + 4 * row)
    cos, sin = _angles(job, row)
    queries = job.qkv + row * job.qkv_stride
    keys = queries + job.heads * head_bytes
    values = keys + job.kv_heads * head_bytes
    for head in range(job.heads):
        at = queries + head * head_bytes
        if q_norm != 0:
            norm_row(at, q_norm, job.head_dim, job.head_dim, job.norm_eps, at)
        if job.bounds != 0:
            _add_sink_query(job, row, head, at)
        _rotate(at, cos, sin, job.head_dim, job.query_scale)
        if job.rotation > 1:
            turn(at, job.head_dim, job.rotation)
    table = job.pages + 8 * load_i32(job.page_offsets + 4 * load_i32(job.row_seq + 4 * row))
    page = load_i64(table + 8 * (position // _PAGE_TOKENS)) + layer_index * job.layer_bytes
    copy = load_i64(table - job.pages + job.exact + 8 * (position // _PAGE_TOKENS)) if job.exact != 0 else _NO_PAGE
    for head in range(job.kv_heads):
        at = keys + head * head_bytes
        if k_norm != 0:
            norm_row(at, k_norm, job.head_dim, job.head_dim, job.norm_eps, at)
        _rotate(at, cos, sin, job.head_dim, np.float32(1))
        if job.rotation > 1:
            turn(at, job.head_dim, job.rotation)
        if copy != 0:
            exact_keys, exact_values = exact_at(job, layer_index, head, copy)
            write_exact(job, at, values + head * head_bytes, exact_keys, exact_values, position % _PAGE_TOKENS)
        page_keys = page + head * job.key_head_bytes
        page_values = page + job.plane_bytes + head * job.value_head_bytes
        write_token(job, at, values + head * head_bytes, page_keys, page_values, position % _PAGE_TOKENS)


@njit(nogil=True, cache=True)
def rotate_and_write(job, layer_index, q_norm, k_norm, phase):
    """One phase: queries normed (optional), rotated and scaled in place; keys and values written into their pages."""
    row = take(phase, 1)
    while row < job.rows:
        for written in range(row, _stop_row(job, row)):
            _rotate_and_write(job, layer_index, q_norm, k_norm, written)
        finish(phase, 1)
        row = take(phase, 1)
    wait_for(phase, job.rows)


@njit(nogil=True, cache=True)
def activate_columns(gate, width, first, stop, limit, slope, out):
    """Columns first..stop of silu(gate) * up; `gate` is `width` columns, and up those behind it.

    With a limit L (gpt-oss): g / (1 + e^(-slope g)) * (u + 1), g being the gate, at most L, and u up, within -L..L.
    """
    up = gate + 4 * width
    # The last vector may run over the end of the row, into the room its stride leaves.
    if limit > 0:
        for i in range(first, stop, 8):
            # What is no number stays so: it comes second.
            g = minimum(splat(limit), load8(gate + 4 * i))
            u = maximum(splat(-limit), minimum(splat(limit), load8(up + 4 * i)))
            decayed = exp8(mul(splat(-slope), g))
            g = div(g, add(splat(np.float32(1)), decayed))
            store8(out + 4 * i, fma(g, u, g))
        return
    for i in range(first, stop, 8):
        g = load8(gate + 4 * i)
        decayed = exp8(sub(splat(np.float32(0)), g))
        store8(out + 4 * i, mul(div(g, add(splat(np.float32(1)), decayed)), load8(up + 4 * i)))


@njit(nogil=True, cache=True)
def activate(job, phase):
    """One phase: activated = silu(gate) * up, silu(x) = x / (1 + e^-x)."""
    chunks = (job.intermediate + _ACTIVATION_COLS - 1) // _ACTIVATION_COLS
    total = job.rows * chunks
    item = take(phase, 1)
    while item < total:
        row, first = item // chunks, item % chunks * _ACTIVATION_COLS
        gate, out = job.gate_up + row * job.gate_up_stride, job.activated + row * job.activated_stride
        stop = min(first + _ACTIVATION_COLS, job.intermediate)
        activate_columns(gate, job.intermediate, first, stop, np.float32(0), np.float32(0), out)
        finish(phase, 1)
        item = take(phase, 1)
    wait_for(phase, total)
