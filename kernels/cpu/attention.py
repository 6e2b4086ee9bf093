"""Attention over pages, where they lie: causal, grouped queries, an optional sliding window.

A *part* is some neighbouring rows and the segments, see below, in which they read the same pages: rows of one
sequence, or of several that start with the same pages (see batch.py). Its queries on one kv head share every page that
is loaded. For each row the tokens follow each other in aligned *steps* of two pages, 32 tokens, of an online softmax:

    s[t] = q . k[t]              a sum over the head dimension in ascending order; q is scaled already
    m'   = max(m, max s[t])      c = exp(m - m')
    p[t] = exp(s[t] - m')        0 for a token that the row doesn't see
    l    = l * c + sum p[t]      o = o * c + sum over t ascending of p[t] * v[t]

After every *segment*, 256 tokens from a multiple of 256 on, the sums start anew, and those of the segments are put
together in ascending order, M being the larger of both maxima:

    l = l1 * exp(m1 - M) + l2 * exp(m2 - M)      o = o1 * exp(m1 - M) + o2 * exp(m2 - M)      result = o / l

A layer may have a *sink logit* s for each head, learned (gpt-oss): it counts like a token without a value, once, when
all else has been put together: result = o / (l + exp(s - m)).

A row may be *bounded* (`BOUND_BYTES` below): it sees a window of its own, and perhaps *sinks*, the first tokens of its
sequence, with a query of their own. Their sums are put together with the others at the end.

So threads can share one long sequence by segments, and sequences the segments that they have in common, and get the
bits of one thread that walks through all of them. A step or a segment in which a row sees nothing is none for it. What
a row computes depends on its query, its position and its pages alone: not on the part it is in. Tokens it doesn't see
are selected away before they are multiplied, so that stale memory, NaN included, has no influence.

In a page record a head's keys are [head_dim][token] and its values [token][head_dim] (see layout.py): then both sums
above are the microkernel of the matrix product, lanes being tokens in the first and dimensions in the second. Pages of
other formats than fp32 are widened first, or, packed ones with few queries, while they are multiplied (see
attention_packed.py): a packed page is attended as what its codes stand for. Of a page that has an *exact copy*, see
batch.py, that is read instead; both pages of a step have one, or none has.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tierd.kernels.cpu.attention_packed import PACKED_QUERIES
from tierd.kernels.cpu.attention_step import (
    SCORE_BYTES,
    STATE_BYTES,
    STEP_PAGES,
    STEP_TOKENS,
    attend_step,
    clear_sums,
    divide_sums,
    first_token,
    merge_sums,
)
from tierd.kernels.cpu.microkernel import PAIR_ROWS
from tierd.kernels.cpu.pages import FP32, INT8, exact_at, widen_exact, widen_keys, widen_values
from tierd.kernels.cpu.simd import load8, load_i32, load_i64, prefetch, store8, store_i32
from tierd.kernels.cpu.team import PHASE_BYTES, finish, take, wait_for

_PAGE_TOKENS = 16
_SEGMENT_PAGES = 16  # a multiple of STEP_PAGES
SEGMENT_TOKENS = _SEGMENT_PAGES * _PAGE_TOKENS
ATTENTION_PHASES = 2
PART_BYTES = np.int64(20)  # five int32, see `batch.Cut`
BOUND_BYTES = np.int64(20)  # five int32 of a row, see `kernels.rows.Placed`
_NONE = np.int64(0)


def max_block_queries(head_dim: int, group: int) -> int:
    """Queries of one part on one kv head, so that they, their sums and a step stay in a first-level cache (32 KB).

    At least `group`, the queries of one row.
    """
    return max(24 if head_dim <= 64 else 12, group)


@njit(nogil=True, cache=True)
def _segment_sums_bytes(head_dim):
    """Sums of one query over one segment, up to the next cache line."""
    return 4 * head_dim + 64


def sums_bytes(head_dim: int, heads: int, cut_rows: int, segments: int) -> int:
    """What attention needs beside the scratch: sums of each query of the cut rows over each segment."""
    return cut_rows * heads * segments * int(_segment_sums_bytes(head_dim))


def scratch_bytes(head_dim: int, group: int) -> int:
    """Scratch of one thread: the keys and values of a step, queries, two sets of sums, and scores between these."""
    queries = max_block_queries(head_dim, group)
    sums = 2 * queries * (head_dim + 2)
    return 4 * (2 * STEP_TOKENS * head_dim + queries * (head_dim + STEP_TOKENS) + sums + queries + 2)


@njit(nogil=True, cache=True)
def _total_offset(job):
    """Where in a thread's scratch the sums over all segments lie: behind everything else."""
    row_bytes = 4 * job.head_dim
    return 2 * STEP_TOKENS * row_bytes + job.block_queries * (2 * row_bytes + STATE_BYTES + SCORE_BYTES)


@njit(nogil=True, cache=True)
def _prefetch_pages(job, layer_index, kv_head, plane, to_values, table, copies, page, last_page):
    """Asks for the keys and values of one head in the pages of a step, or their copies. They lie in pieces of a few KB,
    megabytes apart, which the hardware doesn't foresee."""
    for p in range(page, min(page + STEP_PAGES, last_page + 1)):
        copy = load_i64(copies + 8 * p) if copies != 0 else _NONE
        if copy != 0:
            keys, values = exact_at(job, layer_index, kv_head, copy)
            for i in range(0, 2 * _PAGE_TOKENS * job.head_dim, 64):
                prefetch(keys + i)
                prefetch(values + i)
            continue
        at = load_i64(table + 8 * p) + plane
        for i in range(0, job.key_head_bytes, 64):
            prefetch(at + i)
        for i in range(0, job.value_head_bytes, 64):
            prefetch(at + to_values + i)


@njit(nogil=True, cache=True)
def _lows_offset(job):
    """Where in a thread's scratch the first tokens that rows see lie: behind the sums over all segments."""
    return _total_offset(job) + job.block_queries * (4 * job.head_dim + STATE_BYTES)


@njit(nogil=True, cache=True)
def _window_of(job, window, row):
    """The window of a row in a layer with this one, 0 for all."""
    bound = load_i32(job.bounds + BOUND_BYTES * row) if job.bounds != 0 else _NONE
    if bound == 0 or window == 0:
        return max(bound, window)
    return min(bound, window)


@njit(nogil=True, cache=True)
def _attend_pages(
    job, layer_index, kv_head, table, page, last_page, position_at, low_at, rows, group, in_prefill, total,
    total_state, scratch,
):  # fmt: skip
    """Adds what the queries (in the scratch) of some rows see of pages `page` (a multiple of STEP_PAGES) to `last_page`
    of one table to their sums, o at `total`, m and l at `total_state`. `in_prefill`: rows before have brought these
    pages to a cache."""
    head_dim, row_bytes = job.head_dim, 4 * job.head_dim
    page_elements = _PAGE_TOKENS * head_dim
    queries = scratch + 2 * STEP_TOKENS * row_bytes
    out = queries + job.block_queries * row_bytes
    state = out + job.block_queries * row_bytes
    scores = state + job.block_queries * STATE_BYTES
    plane = layer_index * job.layer_bytes + kv_head * job.key_head_bytes
    to_values = job.plane_bytes + kv_head * (job.value_head_bytes - job.key_head_bytes)
    clear_sums(out, state, rows * group, row_bytes)
    # Few queries are over before their pages have come: then the products themselves prefetch, line by line.
    interleaved = job.key_format == FP32 and rows * group <= PAIR_ROWS
    # More queries read a step's pages several times. Those of a prefill find them in a cache, where the parts before
    # have brought them; those of a segment wait for memory, and do so least while they copy what they need.
    in_place = job.key_format == FP32 and (interleaved or in_prefill)
    packed = scratch if job.key_format >= INT8 and rows * group <= PACKED_QUERIES else _NONE
    copies = table - job.pages + job.exact if job.exact != 0 else _NONE
    while page <= last_page:
        at0 = load_i64(table + 8 * page) + plane
        at1 = load_i64(table + 8 * (page + 1)) + plane if page < last_page else _NONE
        ahead0, ahead1 = _NONE, _NONE
        if not interleaved:
            _prefetch_pages(
                job, layer_index, kv_head, plane, to_values, table, copies, page + STEP_PAGES, last_page
            )  # fmt: skip
        elif page + STEP_PAGES <= last_page:
            ahead0 = load_i64(table + 8 * (page + 2)) + plane - at0
            if page + STEP_PAGES < last_page:
                ahead1 = load_i64(table + 8 * (page + 3)) + plane - at1
        keys0, keys1, values0, values1 = at0, at1, at0 + to_values, at1 + to_values
        copy0 = load_i64(copies + 8 * page) if copies != 0 else _NONE
        unpacked = packed if copy0 == 0 else _NONE
        if copy0 != 0:  # then the second one has an exact copy as well
            from_keys, from_values = exact_at(job, layer_index, kv_head, copy0)
            keys0, values0 = scratch, scratch + 4 * page_elements
            widen_exact(job, from_keys, keys0)
            widen_exact(job, from_values, values0)
            if at1 != 0:
                from_keys, from_values = exact_at(job, layer_index, kv_head, load_i64(copies + 8 * (page + 1)))
                keys1, values1 = scratch + 8 * page_elements, scratch + 12 * page_elements
                widen_exact(job, from_keys, keys1)
                widen_exact(job, from_values, values1)
        elif not in_place and unpacked == 0:
            keys0, values0 = scratch, scratch + 4 * page_elements
            widen_keys(job, at0, keys0)
            widen_values(job, at0 + to_values, values0)
            if at1 != 0:
                keys1, values1 = scratch + 8 * page_elements, scratch + 12 * page_elements
                widen_keys(job, at1, keys1)
                widen_values(job, at1 + to_values, values1)
        attend_step(
            job, (keys0, keys1), (values0, values1), unpacked, (ahead0, ahead1), page * _PAGE_TOKENS, position_at,
            low_at, rows, group, queries, scores, state, out,
        )  # fmt: skip
        page += STEP_PAGES
        if page % _SEGMENT_PAGES == 0 or page > last_page:
            for q in range(rows * group):
                merge_sums(total + q * row_bytes, total_state + 8 * q, out + q * row_bytes, state + 8 * q, row_bytes)
            clear_sums(out, state, rows * group, row_bytes)


@njit(nogil=True, cache=True)
def _attend(job, layer_index, window, part, first_head, group, total, scratch):
    """A part's rows, query heads first_head.. of one kv head, over what they see of its segments; `total` becomes their
    sums."""
    first_row, rows = load_i32(part), load_i32(part + 4)
    first_page, stop_page = load_i32(part + 8) * _SEGMENT_PAGES, load_i32(part + 12) * _SEGMENT_PAGES
    row_bytes = 4 * job.head_dim
    kv_head = first_head // (job.heads // job.kv_heads)
    queries = scratch + 2 * STEP_TOKENS * row_bytes
    position_at, low_at = job.positions + 4 * first_row, scratch + _lows_offset(job)
    total_state = total + job.block_queries * row_bytes
    clear_sums(total, total_state, rows * group, row_bytes)
    last_page = min(load_i32(position_at + 4 * (rows - 1)) // _PAGE_TOKENS, stop_page - 1)
    lowest = (last_page + 1) * _PAGE_TOKENS
    for r in range(rows):
        low = first_token(load_i32(position_at + 4 * r), _window_of(job, window, first_row + r))
        store_i32(low_at + 4 * r, low)
        lowest = min(lowest, low)
    page = max(first_page, lowest // STEP_TOKENS * STEP_PAGES)
    if page > last_page:
        return
    table = job.pages + 8 * load_i32(job.page_offsets + 4 * load_i32(job.row_seq + 4 * first_row))
    plane = layer_index * job.layer_bytes + kv_head * job.key_head_bytes
    to_values = job.plane_bytes + kv_head * (job.value_head_bytes - job.key_head_bytes)
    copies = table - job.pages + job.exact if job.exact != 0 else _NONE
    _prefetch_pages(job, layer_index, kv_head, plane, to_values, table, copies, page, last_page)
    for q in range(rows * group):
        source = job.qkv + (first_row + q // group) * job.qkv_stride + (first_head + q % group) * row_bytes
        for d in range(0, row_bytes, 32):
            store8(queries + q * row_bytes + d, load8(source + d))
    _attend_pages(
        job, layer_index, kv_head, table, page, last_page, position_at, low_at, rows, group,
        load_i32(part + 16) < 0, total, total_state, scratch,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _add_sinks(job, layer_index, window, row, first_head, count, total, total_state, scratch):
    """Adds what `count` heads of one kv head see of the row's sinks, if it has any, to their sums over all else."""
    if job.bounds == 0:
        return
    bound = job.bounds + BOUND_BYTES * row
    # Counted from where the row really stands, the layer's own window may begin behind them.
    sinks, low = load_i32(bound + 4), first_token(load_i32(bound + 12), window)
    if low >= sinks:
        return
    row_bytes = 4 * job.head_dim
    queries = scratch + 2 * STEP_TOKENS * row_bytes
    low_at = scratch + _lows_offset(job)
    position_at = low_at + 4 * job.block_queries
    store_i32(low_at, low)
    store_i32(position_at, sinks - 1)
    source = job.sink_queries + row * job.attended_stride + first_head * row_bytes
    for d in range(0, count * row_bytes, 32):
        store8(queries + d, load8(source + d))
    table = job.pages + 8 * load_i32(job.sink_offsets + 4 * load_i32(job.row_seq + 4 * row))
    page, last_page = low // STEP_TOKENS * STEP_PAGES, (sinks - 1) // _PAGE_TOKENS
    _attend_pages(
        job, layer_index, first_head // (job.heads // job.kv_heads), table, page, last_page, position_at, low_at,
        np.int64(1), count, True, total, total_state, scratch,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _sums_at(job, slot, head, segment):
    """Where the sums of a cut row and query head over one segment lie: o [head_dim], then m and l."""
    return job.sums + ((slot * job.heads + head) * job.segments + segment) * _segment_sums_bytes(job.head_dim)


@njit(nogil=True, cache=True)
def _logit_of(sink_logits, head):
    """Where the sink logit of a query head lies, 0 for none."""
    return sink_logits + 4 * head if sink_logits != 0 else _NONE


@njit(nogil=True, cache=True)
def _attend_parts(job, layer_index, window, sink_logits, phase, scratch):
    """Items are a part and some of its heads: results of rows that are whole in it, sums of the others."""
    group, row_bytes = job.heads // job.kv_heads, 4 * job.head_dim
    total = scratch + _total_offset(job)
    total_state = total + job.block_queries * row_bytes
    items = job.num_parts * job.head_parts
    item = take(phase, 1)
    while item < items:  # neighbours take neighbouring heads of the same pages
        part, share = job.parts + PART_BYTES * (item // job.head_parts), item % job.head_parts
        first_row, rows, segment, slot = load_i32(part), load_i32(part + 4), load_i32(part + 8), load_i32(part + 16)
        head, stop = job.heads * share // job.head_parts, job.heads * (share + 1) // job.head_parts
        while head < stop:
            next_head = min(stop, (head // group + 1) * group)
            count = next_head - head
            _attend(job, layer_index, window, part, head, count, total, scratch)
            for row in range(rows if slot < 0 else 0):
                q = row * count
                _add_sinks(
                    job, layer_index, window, first_row + row, head, count, total + q * row_bytes, total_state + 8 * q,
                    scratch,
                )  # fmt: skip
            for q in range(rows * count):
                row, query_head = q // count, head + q % count
                if slot < 0:
                    target = job.attended + (first_row + row) * job.attended_stride + query_head * row_bytes
                    logit = _logit_of(sink_logits, query_head)
                    divide_sums(total + q * row_bytes, total_state + 8 * q, logit, target, row_bytes)
                else:
                    sums = _sums_at(job, slot + row, query_head, segment)
                    clear_sums(sums, sums + row_bytes, 1, row_bytes)
                    merge_sums(sums, sums + row_bytes, total + q * row_bytes, total_state + 8 * q, row_bytes)
            head = next_head
        finish(phase, 1)
        item = take(phase, 1)
    wait_for(phase, items)


@njit(nogil=True, cache=True)
def _merge_segments(job, layer_index, window, sink_logits, phase, scratch):
    """Items are a cut row and a query head: the sums over its segments, and its sinks, are put together."""
    row_bytes = 4 * job.head_dim
    total = scratch + _total_offset(job)
    total_state = total + row_bytes
    items = job.num_cut_rows * job.heads
    item = take(phase, 1)
    while item < items:
        slot, head = item // job.heads, item % job.heads
        row = load_i32(job.cut_rows + 4 * slot)
        clear_sums(total, total_state, 1, row_bytes)
        for segment in range(load_i32(job.positions + 4 * row) // SEGMENT_TOKENS + 1):
            sums = _sums_at(job, slot, head, segment)
            merge_sums(total, total_state, sums, sums + row_bytes, row_bytes)
        _add_sinks(job, layer_index, window, row, head, np.int64(1), total, total_state, scratch)
        target = job.attended + row * job.attended_stride + head * row_bytes
        divide_sums(total, total_state, _logit_of(sink_logits, head), target, row_bytes)
        finish(phase, 1)
        item = take(phase, 1)
    wait_for(phase, items)


@njit(nogil=True, cache=True)
def attention(job, layer_index, window, sink_logits, phase, scratch):
    """All rows of the batch, all heads: `ATTENTION_PHASES` phases, the second of which is empty without cut rows.

    `sink_logits`: where the layer's are, float32 [heads]; 0 for none.
    """
    _attend_parts(job, layer_index, window, sink_logits, phase, scratch)
    _merge_segments(job, layer_index, window, sink_logits, phase + PHASE_BYTES, scratch)
