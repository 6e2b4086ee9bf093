"""One step of attention: 32 tokens, two pages, for the queries of a block; and the sums that steps leave behind.

The formulas are in attention.py. Keys and values go through the microkernel of the matrix product.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tierd.kernels.cpu.attention_packed import add_packed_values, packed_scores
from tierd.kernels.cpu.microkernel import tile_pair_product, tile_product
from tierd.kernels.cpu.simd import (
    add,
    div,
    exp8,
    keep_lanes,
    load8,
    load_f32,
    load_i32,
    max8,
    maximum,
    mul,
    splat,
    store8,
    store_f32,
    sub,
    sum8,
)

_PAGE_TOKENS = 16
STEP_PAGES = 2
STEP_TOKENS = STEP_PAGES * _PAGE_TOKENS
_MINUS_INFINITY = np.float32(-np.inf)
# Typed: for a plain int Numba compiles a function once more for that very value.
SCORE_BYTES = np.int64(4 * STEP_TOKENS)  # of one query
STATE_BYTES = np.int64(8)  # m and l of one query
_TILE_BYTES = np.int64(4 * _PAGE_TOKENS)  # of one row of a tile of keys
_NONE, _WHOLE = np.int64(0), np.int64(STEP_TOKENS)
_START, _GO_ON = np.int64(0), np.int64(1)  # what `accumulate` says


@njit(nogil=True, cache=True)
def _softmax_step(scores, low, high, state, out, head_dim):
    """One step for one query, which sees its tokens low..high: scores become weights, `state` (m, l) and `out` are
    brought to the new maximum."""
    s0, s1, s2, s3 = load8(scores), load8(scores + 32), load8(scores + 64), load8(scores + 96)
    partial = low > 0 or high < STEP_TOKENS
    if partial:
        s0 = keep_lanes(s0, low, high, _MINUS_INFINITY)
        s1 = keep_lanes(s1, low - 8, high - 8, _MINUS_INFINITY)
        s2 = keep_lanes(s2, low - 16, high - 16, _MINUS_INFINITY)
        s3 = keep_lanes(s3, low - 24, high - 24, _MINUS_INFINITY)
    before = load_f32(state)
    largest = max(before, max8(maximum(maximum(s0, s1), maximum(s2, s3))))
    shift = splat(largest)
    p0, p1, p2, p3 = exp8(sub(s0, shift)), exp8(sub(s1, shift)), exp8(sub(s2, shift)), exp8(sub(s3, shift))
    if partial:
        p0 = keep_lanes(p0, low, high, np.float32(0))
        p1 = keep_lanes(p1, low - 8, high - 8, np.float32(0))
        p2 = keep_lanes(p2, low - 16, high - 16, np.float32(0))
        p3 = keep_lanes(p3, low - 24, high - 24, np.float32(0))
    store8(scores, p0)
    store8(scores + 32, p1)
    store8(scores + 64, p2)
    store8(scores + 96, p3)
    weight = load_f32(state + 4)
    if largest > before:  # else the factor is exactly 1
        factor = exp8(splat(before - largest))
        weight = weight * max8(factor)
        for d in range(0, head_dim, 8):
            store8(out + 4 * d, mul(load8(out + 4 * d), factor))
        store_f32(state, largest)
    store_f32(state + 4, weight + sum8(add(add(p0, p1), add(p2, p3))))


@njit(nogil=True, cache=True)
def _add_page(job, values, unpacked, scores, queries, low, high, out, ahead):
    """out[q] += sum over tokens low..high of one page of p[q, t] * v[t]."""
    head_dim = job.head_dim
    if unpacked != 0:
        add_packed_values(job, values, scores, SCORE_BYTES, queries, low, high, out, unpacked)
        return
    x, row_bytes = scores + 4 * low, 4 * head_dim
    d = 0
    while d + 32 <= head_dim:
        tile = values + low * row_bytes + 4 * d
        tile_pair_product(
            tile, tile + 64, row_bytes, x, SCORE_BYTES, out + 4 * d, out + 4 * d + 64, row_bytes, high - low, queries,
            _GO_ON, ahead, ahead,
        )  # fmt: skip
        d += 32
    if d < head_dim:
        tile = values + low * row_bytes + 4 * d
        tile_product(tile, row_bytes, x, SCORE_BYTES, out + 4 * d, row_bytes, high - low, queries, _GO_ON)


@njit(nogil=True, cache=True)
def _add_values(job, values, unpacked, scores, queries, low, high, out, ahead):
    """out[q] += sum over tokens low..high of the step of p[q, t] * v[t]. The second page is not read below token 17."""
    if queries > 0 and low < _PAGE_TOKENS:
        stop = min(high, np.int64(_PAGE_TOKENS))
        _add_page(job, values[0], unpacked, scores, queries, low, stop, out, ahead[0])
    if queries > 0 and high > _PAGE_TOKENS:
        x, first = scores + 4 * _PAGE_TOKENS, max(low - _PAGE_TOKENS, _NONE)
        _add_page(job, values[1], unpacked, x, queries, first, high - _PAGE_TOKENS, out, ahead[1])


@njit(nogil=True, cache=True)
def first_token(position, window):
    """The first token that a row at `position` sees."""
    return max(0, position - window + 1) if window > 0 else 0


@njit(nogil=True, cache=True)
def attend_step(
    job, keys, values, unpacked, ahead, start, position_at, low_at, rows, group, queries, scores, state, out
):  # fmt: skip
    """One step, from token `start` on, for all rows of a part; those that see none of it are left out.

    Row r sees the tokens from int32 r at `low_at` to int32 r at `position_at`. `keys` and `values` are pairs of pages;
    the second is 0 where the sequence ends with the first. `ahead` says how far from these two the pages of the next
    step lie, if they are to be prefetched. Pages are float32, or, if `unpacked` is not 0, packed as they lie in a
    record, with at most `PACKED_QUERIES` queries; `unpacked` is scratch for them then.
    """
    head_dim = job.head_dim
    row_bytes = 4 * head_dim
    first, stop = 0, rows
    while first < stop and load_i32(position_at + 4 * first) < start:
        first += 1
    while first < stop and load_i32(low_at + 4 * (stop - 1)) >= start + STEP_TOKENS:
        stop -= 1
    q, count = first * group, (stop - first) * group
    if count <= 0:
        return
    x, s = queries + q * row_bytes, scores + q * SCORE_BYTES
    if unpacked != 0:
        packed_scores(job, keys[0], x, row_bytes, count, s, SCORE_BYTES, unpacked)
        if keys[1] != 0:
            packed_scores(job, keys[1], x, row_bytes, count, s + _TILE_BYTES, SCORE_BYTES, unpacked)
    elif keys[1] != 0:
        tile_pair_product(
            keys[0], keys[1], _TILE_BYTES, x, row_bytes, s, s + _TILE_BYTES, SCORE_BYTES, head_dim, count, _START,
            ahead[0], ahead[1],
        )  # fmt: skip
    else:
        tile_product(keys[0], _TILE_BYTES, x, row_bytes, s, SCORE_BYTES, head_dim, count, _START)
    whole = q  # queries from here on see the whole step and wait for their values
    for r in range(first, stop):
        low = max(0, load_i32(low_at + 4 * r) - start)
        high = min(STEP_TOKENS, load_i32(position_at + 4 * r) + 1 - start)
        seen = low < high  # else its window starts later; rows of several sequences don't ascend
        if seen:
            for q in range(r * group, (r + 1) * group):
                _softmax_step(scores + q * SCORE_BYTES, low, high, state + 8 * q, out + q * row_bytes, head_dim)
        if low > 0 or high < STEP_TOKENS:
            q = r * group
            _add_values(
                job, values, unpacked, scores + whole * SCORE_BYTES, q - whole, _NONE, _WHOLE,
                out + whole * row_bytes, ahead,
            )  # fmt: skip
            if seen:
                x, o = scores + q * SCORE_BYTES, out + q * row_bytes
                _add_values(job, values, unpacked, x, group, low, high, o, ahead)
            whole = q + group
    _add_values(
        job, values, unpacked, scores + whole * SCORE_BYTES, stop * group - whole, _NONE, _WHOLE,
        out + whole * row_bytes, ahead,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def clear_sums(sums, state, queries, row_bytes):
    """No token yet: o = 0, m = -infinity, l = 0."""
    for q in range(queries):
        for d in range(0, row_bytes, 32):
            store8(sums + q * row_bytes + d, splat(np.float32(0)))
        store_f32(state + 8 * q, _MINUS_INFINITY)
        store_f32(state + 8 * q + 4, np.float32(0))


@njit(nogil=True, cache=True)
def merge_sums(total, total_state, out, state, row_bytes):
    """Adds the sums of one query over a segment to those over the segments before it."""
    held, added = load_f32(total_state + 4), load_f32(state + 4)
    if added == 0:  # the row sees nothing of this segment
        return
    if held == 0:
        for d in range(0, row_bytes, 32):
            store8(total + d, load8(out + d))
        store_f32(total_state, load_f32(state))
        store_f32(total_state + 4, added)
        return
    before, here = load_f32(total_state), load_f32(state)
    largest = max(before, here)
    old, new = exp8(splat(before - largest)), exp8(splat(here - largest))
    for d in range(0, row_bytes, 32):
        store8(total + d, add(mul(load8(total + d), old), mul(load8(out + d), new)))
    store_f32(total_state, largest)
    store_f32(total_state + 4, held * max8(old) + added * max8(new))


@njit(nogil=True, cache=True)
def divide_sums(total, total_state, sink_logit, target, row_bytes):
    """The result of one query, from its sums over all that it sees. `sink_logit`, if it isn't 0: where a logit lies
    that counts beside those of the tokens, and stands for no value."""
    held = load_f32(total_state + 4)
    if sink_logit != 0:
        held += max8(exp8(splat(load_f32(sink_logit) - load_f32(total_state))))
    weight = splat(held)
    for d in range(0, row_bytes, 32):
        store8(target + d, div(load8(total + d), weight))
