"""Attention over pages, where they lie: causal, grouped queries, an optional sliding window.

A *block* is some neighbouring rows of one sequence; its queries on one kv head share every page that is loaded.
For each row the tokens follow each other in aligned *steps* of two pages, 32 tokens, of an online softmax:

    s[t] = q . k[t]              a sum over the head dimension in ascending order; q is scaled already
    m'   = max(m, max s[t])      c = exp(m - m')
    p[t] = exp(s[t] - m')        0 for a token that the row doesn't see
    l    = l * c + sum p[t]      o = o * c + sum over t ascending of p[t] * v[t]

A step in which a row sees nothing is none for it. What a row computes depends on its query, its position and its
pages alone: not on the block it is in. Tokens it doesn't see are selected away before they are multiplied, so that
stale memory, NaN included, has no influence.

In a page record a head's keys are [head_dim][token] and its values [token][head_dim] (see layout.py): then both sums
above are the microkernel of the matrix product, lanes being tokens in the first and dimensions in the second.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tierd.kernels.cpu.microkernel import tile_pair_product, tile_product
from tierd.kernels.cpu.simd import (
    add,
    div,
    exp8,
    keep_lanes,
    load8,
    load8_bf16,
    load8_fp16,
    load_f32,
    load_i32,
    max8,
    maximum,
    mul,
    prefetch,
    splat,
    store8,
    store_f32,
    sub,
    sum8,
)
from tierd.kernels.cpu.team import finish, take, wait_for

PAGE_FORMAT_CODES = {"fp32": 0, "fp16": 1, "bf16": 2}
_FP32, _FP16 = PAGE_FORMAT_CODES["fp32"], PAGE_FORMAT_CODES["fp16"]
_PAGE_TOKENS = 16
_MINUS_INFINITY = np.float32(-np.inf)
_STEP_PAGES = 2
_STEP_TOKENS = _STEP_PAGES * _PAGE_TOKENS
# Typed: for a plain int Numba compiles a function once more for that very value.
_SCORE_BYTES = np.int64(4 * _STEP_TOKENS)  # of one query
_TILE_BYTES = np.int64(4 * _PAGE_TOKENS)  # of one row of a tile of keys
_NONE, _WHOLE = np.int64(0), np.int64(_STEP_TOKENS)
_START, _GO_ON = np.int64(0), np.int64(1)  # what `accumulate` says


def max_block_queries(head_dim: int, group: int) -> int:
    """Queries of one block on one kv head, so that they, their sums and a step stay in a first-level cache (32 KB).

    At least `group`, the queries of one row.
    """
    return max(24 if head_dim <= 64 else 12, group)


def scratch_bytes(head_dim: int, group: int) -> int:
    """Scratch of one thread: the keys and values of a step, queries, sums, scores, and two floats a query."""
    queries = max_block_queries(head_dim, group)
    return 4 * (2 * _STEP_TOKENS * head_dim + queries * (2 * head_dim + _STEP_TOKENS + 2))


@njit(nogil=True, cache=True)
def _widen(format, source, count, target):
    """Reads `count` (a multiple of 8) elements of a page as float32. Returns where they are: fp32 stays in place."""
    if format == _FP32:
        return source
    if format == _FP16:
        for i in range(0, count, 8):
            store8(target + 4 * i, load8_fp16(source + 2 * i))
    else:
        for i in range(0, count, 8):
            store8(target + 4 * i, load8_bf16(source + 2 * i))
    return target


@njit(nogil=True, cache=True)
def _softmax_step(scores, low, high, state, out, head_dim):
    """One step for one query, which sees its tokens low..high: scores become weights, `state` (m, l) and `out` are
    brought to the new maximum."""
    s0, s1, s2, s3 = load8(scores), load8(scores + 32), load8(scores + 64), load8(scores + 96)
    partial = low > 0 or high < _STEP_TOKENS
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
def _add_page(values, head_dim, scores, queries, low, high, out):
    """out[q] += sum over tokens low..high of one page of p[q, t] * v[t]."""
    x, row_bytes = scores + 4 * low, 4 * head_dim
    d = 0
    while d + 32 <= head_dim:
        tile = values + low * row_bytes + 4 * d
        tile_pair_product(
            tile, tile + 64, row_bytes, x, _SCORE_BYTES, out + 4 * d, out + 4 * d + 64, row_bytes, high - low, queries,
            _GO_ON,
        )  # fmt: skip
        d += 32
    if d < head_dim:
        tile = values + low * row_bytes + 4 * d
        tile_product(tile, row_bytes, x, _SCORE_BYTES, out + 4 * d, row_bytes, high - low, queries, _GO_ON)


@njit(nogil=True, cache=True)
def _add_values(values0, values1, head_dim, scores, queries, low, high, out):
    """out[q] += sum over tokens low..high of the step of p[q, t] * v[t]. `values1` is not read below token 17."""
    if queries > 0 and low < _PAGE_TOKENS:
        _add_page(values0, head_dim, scores, queries, low, min(high, np.int64(_PAGE_TOKENS)), out)
    if queries > 0 and high > _PAGE_TOKENS:
        x = scores + 4 * _PAGE_TOKENS
        _add_page(values1, head_dim, x, queries, max(low - _PAGE_TOKENS, _NONE), high - _PAGE_TOKENS, out)


@njit(nogil=True, cache=True)
def _first_token(position, window):
    """The first token that a row at `position` sees."""
    return max(0, position - window + 1) if window > 0 else 0


@njit(nogil=True, cache=True)
def _step(head_dim, keys, values, start, position_at, rows, group, window, queries, scores, state, out):
    """One step, from token `start` on, for all rows of a block; rows that see none of it, at either end, are left out.

    `keys` and `values` are pairs of pages; the second is 0 where the sequence ends with the first.
    """
    row_bytes = 4 * head_dim
    first, stop = 0, rows
    while first < stop and load_i32(position_at + 4 * first) < start:
        first += 1
    while first < stop and _first_token(load_i32(position_at + 4 * (stop - 1)), window) >= start + _STEP_TOKENS:
        stop -= 1
    q, count = first * group, (stop - first) * group
    x, s = queries + q * row_bytes, scores + q * _SCORE_BYTES
    if keys[1] != 0:
        tile_pair_product(
            keys[0], keys[1], _TILE_BYTES, x, row_bytes, s, s + _TILE_BYTES, _SCORE_BYTES, head_dim, count, _START
        )
    else:
        tile_product(keys[0], _TILE_BYTES, x, row_bytes, s, _SCORE_BYTES, head_dim, count, _START)
    whole = q  # queries from here on see the whole step and wait for their values
    for r in range(first, stop):
        position = load_i32(position_at + 4 * r)
        low = max(0, _first_token(position, window) - start)
        high = min(_STEP_TOKENS, position + 1 - start)
        for q in range(r * group, (r + 1) * group):
            _softmax_step(scores + q * _SCORE_BYTES, low, high, state + 8 * q, out + q * row_bytes, head_dim)
        if low > 0 or high < _STEP_TOKENS:
            q = r * group
            _add_values(
                values[0], values[1], head_dim, scores + whole * _SCORE_BYTES, q - whole, _NONE, _WHOLE,
                out + whole * row_bytes,
            )  # fmt: skip
            _add_values(
                values[0], values[1], head_dim, scores + q * _SCORE_BYTES, group, low, high, out + q * row_bytes
            )
            whole = q + group
    _add_values(
        values[0], values[1], head_dim, scores + whole * _SCORE_BYTES, stop * group - whole, _NONE, _WHOLE,
        out + whole * row_bytes,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _prefetch_pages(job, plane, table, page, last_page):
    """Asks for the keys and values of one head in the pages of a step. They lie in pieces of a few KB, megabytes apart,
    which the hardware doesn't foresee."""
    bytes = job.head_bytes
    for p in range(page, min(page + _STEP_PAGES, last_page + 1)):
        at = plane + load_i32(table + 4 * p) * job.record_bytes
        for i in range(0, bytes, 64):
            prefetch(at + i)
            prefetch(at + job.plane_bytes + i)


@njit(nogil=True, cache=True)
def _attend(job, layer_index, window, first_row, rows, first_head, group, scratch):
    """Rows first_row.. of one sequence, query heads first_head.. of one kv head, over all pages they see."""
    head_dim = job.head_dim
    row_bytes = 4 * head_dim
    kv_head = first_head // (job.heads // job.kv_heads)
    page_elements = _PAGE_TOKENS * head_dim
    queries = scratch + 2 * _STEP_TOKENS * row_bytes
    out = queries + job.block_queries * row_bytes
    scores = out + job.block_queries * row_bytes
    state = scores + job.block_queries * _SCORE_BYTES
    for q in range(rows * group):
        source = job.qkv + (first_row + q // group) * job.qkv_stride + (first_head + q % group) * row_bytes
        for d in range(0, row_bytes, 32):
            store8(queries + q * row_bytes + d, load8(source + d))
            store8(out + q * row_bytes + d, splat(np.float32(0)))
        store_f32(state + 8 * q, _MINUS_INFINITY)
        store_f32(state + 8 * q + 4, np.float32(0))
    position_at = job.positions + 4 * first_row
    table = job.page_table + 4 * load_i32(job.page_offsets + 4 * load_i32(job.row_seq + 4 * first_row))
    last_page = load_i32(position_at + 4 * (rows - 1)) // _PAGE_TOKENS
    page = _first_token(load_i32(position_at), window) // _STEP_TOKENS * _STEP_PAGES
    plane = job.arena + layer_index * job.layer_bytes + kv_head * job.head_bytes
    while page <= last_page:
        _prefetch_pages(job, plane, table, page + _STEP_PAGES, last_page)
        at = plane + load_i32(table + 4 * page) * job.record_bytes
        keys0 = _widen(job.page_format, at, page_elements, scratch)
        values0 = _widen(job.page_format, at + job.plane_bytes, page_elements, scratch + 4 * page_elements)
        keys1, values1 = _NONE, _NONE
        if page < last_page:
            at = plane + load_i32(table + 4 * (page + 1)) * job.record_bytes
            keys1 = _widen(job.page_format, at, page_elements, scratch + 8 * page_elements)
            values1 = _widen(job.page_format, at + job.plane_bytes, page_elements, scratch + 12 * page_elements)
        _step(
            head_dim, (keys0, keys1), (values0, values1), page * _PAGE_TOKENS, position_at, rows, group, window,
            queries, scores, state, out,
        )  # fmt: skip
        page += _STEP_PAGES
    for q in range(rows * group):
        target = job.attended + (first_row + q // group) * job.attended_stride + (first_head + q % group) * row_bytes
        total = splat(load_f32(state + 8 * q + 4))
        for d in range(0, row_bytes, 32):
            store8(target + d, div(load8(out + q * row_bytes + d), total))


@njit(nogil=True, cache=True)
def attention(job, layer_index, window, phase, scratch):
    """One phase: all rows of the batch, all heads. Items are a block and some of its heads.

    With few blocks the heads are cut into as many parts as there are threads, else into the kv heads.
    """
    parts = job.kv_heads
    if job.num_blocks * job.kv_heads < 4 * job.threads:
        parts = min(job.heads, job.threads)
    group = job.heads // job.kv_heads
    total = job.num_blocks * parts
    item = take(phase, 1)
    while item < total:
        # The last blocks see the most pages: they go first, so that no thread is left alone with a long one.
        block = job.blocks + 8 * (job.num_blocks - 1 - item // parts)
        first_row = load_i32(block)
        rows = load_i32(block + 4)
        head, stop = job.heads * (item % parts) // parts, job.heads * (item % parts + 1) // parts
        while head < stop:
            next_head = min(stop, (head // group + 1) * group)
            _attend(job, layer_index, window, first_row, rows, head, next_head - head, scratch)
            head = next_head
        finish(phase, 1)
        item = take(phase, 1)
    wait_for(phase, total)
