"""Attention over pages, where they lie: causal, grouped queries, an optional sliding window.

A *block* is some neighbouring rows of one sequence; its queries on one kv head share every page that is loaded.
For each row the tokens follow each other in aligned *steps* of two pages, 32 tokens, of an online softmax:

    s[t] = q . k[t]              a sum over the head dimension in ascending order; q is scaled already
    m'   = max(m, max s[t])      c = exp(m - m')
    p[t] = exp(s[t] - m')        0 for a token that the row doesn't see
    l    = l * c + sum p[t]      o = o * c + sum over t ascending of p[t] * v[t]

After every *segment*, 256 tokens from a multiple of 256 on, the sums start anew, and those of the segments are put
together in ascending order, M being the larger of both maxima:

    l = l1 * exp(m1 - M) + l2 * exp(m2 - M)      o = o1 * exp(m1 - M) + o2 * exp(m2 - M)      result = o / l

So threads can share one long sequence by segments and get the bits of one thread that walks through all of them.
A step or a segment in which a row sees nothing is none for it. What a row computes depends on its query, its position
and its pages alone: not on the block it is in. Tokens it doesn't see are selected away before they are multiplied, so
that stale memory, NaN included, has no influence.

In a page record a head's keys are [head_dim][token] and its values [token][head_dim] (see layout.py): then both sums
above are the microkernel of the matrix product, lanes being tokens in the first and dimensions in the second.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tierd.kernels.cpu.attention_step import (
    PAGE_FORMAT_CODES,
    SCORE_BYTES,
    STATE_BYTES,
    STEP_PAGES,
    STEP_TOKENS,
    attend_step,
    clear_sums,
    divide_sums,
    first_token,
    merge_sums,
    widen,
)
from tierd.kernels.cpu.microkernel import PAIR_ROWS
from tierd.kernels.cpu.simd import load8, load_i32, load_i64, prefetch, store8
from tierd.kernels.cpu.team import PHASE_BYTES, finish, take, wait_for

_FP32 = PAGE_FORMAT_CODES["fp32"]
_PAGE_TOKENS = 16
_SEGMENT_PAGES = 16  # a multiple of STEP_PAGES
SEGMENT_TOKENS = _SEGMENT_PAGES * _PAGE_TOKENS
ATTENTION_PHASES = 2
_NONE, _ALL_PAGES = np.int64(0), np.int64(2**40)


def max_block_queries(head_dim: int, group: int) -> int:
    """Queries of one block on one kv head, so that they, their sums and a step stay in a first-level cache (32 KB).

    At least `group`, the queries of one row.
    """
    return max(24 if head_dim <= 64 else 12, group)


def sums_bytes(head_dim: int, group: int) -> int:
    """Sums of one block: o [queries][head_dim], then m and l of each query."""
    return 4 * max_block_queries(head_dim, group) * (head_dim + 2)


def scratch_bytes(head_dim: int, group: int) -> int:
    """Scratch of one thread: the keys and values of a step, queries, two sets of sums, and scores between these."""
    queries = max_block_queries(head_dim, group)
    return 4 * (2 * STEP_TOKENS * head_dim + queries * (head_dim + STEP_TOKENS)) + 2 * sums_bytes(head_dim, group)


@njit(nogil=True, cache=True)
def _total_offset(job):
    """Where in a thread's scratch the sums over all segments lie: behind everything else."""
    row_bytes = 4 * job.head_dim
    return 2 * STEP_TOKENS * row_bytes + job.block_queries * (2 * row_bytes + STATE_BYTES + SCORE_BYTES)


@njit(nogil=True, cache=True)
def _prefetch_pages(job, plane, table, page, last_page):
    """Asks for the keys and values of one head in the pages of a step. They lie in pieces of a few KB, megabytes apart,
    which the hardware doesn't foresee."""
    bytes = job.head_bytes
    for p in range(page, min(page + STEP_PAGES, last_page + 1)):
        at = load_i64(table + 8 * p) + plane
        for i in range(0, bytes, 64):
            prefetch(at + i)
            prefetch(at + job.plane_bytes + i)


@njit(nogil=True, cache=True)
def _attend(job, layer_index, window, block, first_head, group, first_page, stop_page, total, scratch):
    """A block's rows, query heads first_head.. of one kv head, over those of the pages first_page..stop_page that they
    see; `total` becomes their sums. The first page is one at which a segment starts."""
    first_row, rows = load_i32(block), load_i32(block + 4)
    head_dim, row_bytes = job.head_dim, 4 * job.head_dim
    kv_head = first_head // (job.heads // job.kv_heads)
    page_elements = _PAGE_TOKENS * head_dim
    queries = scratch + 2 * STEP_TOKENS * row_bytes
    out = queries + job.block_queries * row_bytes
    state = out + job.block_queries * row_bytes
    scores = state + job.block_queries * STATE_BYTES
    total_state = total + job.block_queries * row_bytes
    position_at = job.positions + 4 * first_row
    clear_sums(total, total_state, rows * group, row_bytes)
    last_page = min(load_i32(position_at + 4 * (rows - 1)) // _PAGE_TOKENS, stop_page - 1)
    page = max(first_page, first_token(load_i32(position_at), window) // STEP_TOKENS * STEP_PAGES)
    if page > last_page:
        return
    table = job.pages + 8 * load_i32(job.page_offsets + 4 * load_i32(job.row_seq + 4 * first_row))
    plane = layer_index * job.layer_bytes + kv_head * job.head_bytes
    _prefetch_pages(job, plane, table, page, last_page)
    for q in range(rows * group):
        source = job.qkv + (first_row + q // group) * job.qkv_stride + (first_head + q % group) * row_bytes
        for d in range(0, row_bytes, 32):
            store8(queries + q * row_bytes + d, load8(source + d))
    clear_sums(out, state, rows * group, row_bytes)
    # Few queries are over before their pages have come: then the products themselves prefetch, line by line.
    interleaved = job.page_format == _FP32 and rows * group <= PAIR_ROWS
    while page <= last_page:
        at0 = load_i64(table + 8 * page) + plane
        at1 = load_i64(table + 8 * (page + 1)) + plane if page < last_page else _NONE
        ahead0, ahead1 = _NONE, _NONE
        if not interleaved:
            _prefetch_pages(job, plane, table, page + STEP_PAGES, last_page)
        elif page + STEP_PAGES <= last_page:
            ahead0 = load_i64(table + 8 * (page + 2)) + plane - at0
            if page + STEP_PAGES < last_page:
                ahead1 = load_i64(table + 8 * (page + 3)) + plane - at1
        keys0 = widen(job.page_format, at0, page_elements, scratch)
        values0 = widen(job.page_format, at0 + job.plane_bytes, page_elements, scratch + 4 * page_elements)
        keys1, values1 = _NONE, _NONE
        if at1 != 0:
            keys1 = widen(job.page_format, at1, page_elements, scratch + 8 * page_elements)
            values1 = widen(job.page_format, at1 + job.plane_bytes, page_elements, scratch + 12 * page_elements)
        attend_step(
            head_dim, (keys0, keys1), (values0, values1), (ahead0, ahead1), page * _PAGE_TOKENS, position_at, rows,
            group, window, queries, scores, state, out,
        )  # fmt: skip
        page += STEP_PAGES
        if page % _SEGMENT_PAGES == 0 or page > last_page:
            for q in range(rows * group):
                merge_sums(total + q * row_bytes, total_state + 8 * q, out + q * row_bytes, state + 8 * q, row_bytes)
            clear_sums(out, state, rows * group, row_bytes)


@njit(nogil=True, cache=True)
def _attend_whole(job, layer_index, window, phase, scratch):
    """Items are a block and some of its heads, over all pages.

    With few blocks the heads are cut into as many parts as there are threads, else into the kv heads.
    """
    row_bytes = 4 * job.head_dim
    total = scratch + _total_offset(job)
    total_state = total + job.block_queries * row_bytes
    parts = job.kv_heads
    if job.num_blocks * job.kv_heads < 4 * job.threads:
        parts = min(job.heads, job.threads)
    group = job.heads // job.kv_heads
    items = job.num_blocks * parts
    item = take(phase, 1)
    while item < items:
        # The last blocks see the most pages: they go first, so that no thread is left alone with a long one.
        block = job.blocks + 8 * (job.num_blocks - 1 - item // parts)
        first_row, rows = load_i32(block), load_i32(block + 4)
        head, stop = job.heads * (item % parts) // parts, job.heads * (item % parts + 1) // parts
        while head < stop:
            next_head = min(stop, (head // group + 1) * group)
            count = next_head - head
            _attend(job, layer_index, window, block, head, count, _NONE, _ALL_PAGES, total, scratch)
            for q in range(rows * count):
                row = job.attended + (first_row + q // count) * job.attended_stride
                target = row + (head + q % count) * row_bytes
                divide_sums(total + q * row_bytes, total_state + 8 * q, target, row_bytes)
            head = next_head
        finish(phase, 1)
        item = take(phase, 1)
    wait_for(phase, items)


@njit(nogil=True, cache=True)
def _attend_segments(job, layer_index, window, phase, scratch):
    """Items are a block, a kv head and a segment; then, in a second phase, a block and a query head: its segments are
    put together."""
    group, row_bytes = job.heads // job.kv_heads, 4 * job.head_dim
    sums_bytes = job.block_queries * (row_bytes + STATE_BYTES)
    parts = job.num_blocks * job.kv_heads
    items = parts * job.segments
    item = take(phase, 1)
    while item < items:  # neighbours take neighbouring kv heads of the same pages
        segment, part = item // parts, item % parts
        block, kv_head = job.blocks + 8 * (part // job.kv_heads), part % job.kv_heads
        first_page = segment * _SEGMENT_PAGES
        _attend(
            job, layer_index, window, block, kv_head * group, group, first_page, first_page + _SEGMENT_PAGES,
            job.sums + item * sums_bytes, scratch,
        )  # fmt: skip
        finish(phase, 1)
        item = take(phase, 1)
    wait_for(phase, items)
    phase += PHASE_BYTES
    total, total_state = scratch, scratch + row_bytes
    items = job.num_blocks * job.heads
    item = take(phase, 1)
    while item < items:
        index, head = item // job.heads, item % job.heads
        first_row, rows = load_i32(job.blocks + 8 * index), load_i32(job.blocks + 8 * index + 4)
        part = index * job.kv_heads + head // group
        for row in range(rows):
            q = row * group + head % group
            clear_sums(total, total_state, 1, row_bytes)
            for segment in range(job.segments):
                sums = job.sums + (segment * parts + part) * sums_bytes
                merge_sums(
                    total, total_state, sums + q * row_bytes, sums + job.block_queries * row_bytes + 8 * q, row_bytes
                )
            divide_sums(
                total, total_state, job.attended + (first_row + row) * job.attended_stride + head * row_bytes, row_bytes
            )
        finish(phase, 1)
        item = take(phase, 1)
    wait_for(phase, items)


@njit(nogil=True, cache=True)
def attention(job, layer_index, window, phase, scratch):
    """All rows of the batch, all heads: `ATTENTION_PHASES` phases, of which whole sequences take one."""
    if job.segments > 1:
        _attend_segments(job, layer_index, window, phase, scratch)
    else:
        _attend_whole(job, layer_index, window, phase, scratch)
