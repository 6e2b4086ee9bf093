"""How much of its attention a row gives to each page: for rows that are to be observed, beside what they compute.

The mass of a page in a row is the share of the softmax that falls on it, in one layer and head:

    mass[page] = sum over its tokens t that the row sees of exp(q . k[t]) / sum over all t of exp(q . k[t])

A learned sink logit counts among all. Found are sums over the layers that have no window of their own, in ascending
order, and the heads of a group. What a row finds depends on its query, its position and its pages alone. A phase of its
own after attention, which computes the scores once more: rows that nobody observes are not slowed down by it.

Source of the idea: H2O (Zhang et al. 2023, arXiv 2306.14048). Twin: `kernels.reference.decode`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tierd.kernels.cpu.attention_step import STEP_TOKENS
from tierd.kernels.cpu.microkernel import tile_product
from tierd.kernels.cpu.pages import FP32, widen_keys
from tierd.kernels.cpu.simd import (
    add,
    exp8,
    fma,
    keep_lanes,
    load8,
    load_f32,
    load_i32,
    load_i64,
    max8,
    maximum,
    mul,
    splat,
    store8,
    store_f32,
    sub,
    sum8,
)
from tierd.kernels.cpu.team import finish, take, wait_for
from tierd.kernels.layout import PAGE_TOKENS
from tierd.kernels.rows import Ints, Placed, check_observed

MASSES_PHASES = 1
_LANES = 8
_MINUS_INFINITY = np.float32(-np.inf)
_TILE_BYTES = np.int64(4 * PAGE_TOKENS)  # scores of a query with a page
_START = np.int64(0)  # as in attention_step.py


class Observed(NamedTuple):
    """The observed rows of a pass, and room for what is found; `place` names it in the job."""

    rows: Ints  # which of the pass
    found: NDArray[np.float32]  # [observed, kv_heads, pages up to a multiple of 8]
    parts: NDArray[np.float32]  # [observed, heads, greatest and sum, pages]: of one layer

    @staticmethod
    def make(rows: Ints, placed: Placed, heads: int, kv_heads: int) -> Observed:
        """Raises ValueError as `check_observed`."""
        check_observed(rows, placed)
        positions = placed.batch.positions
        pages = int(positions[rows].max(initial=0)) // PAGE_TOKENS + 1
        pages = -(-pages // _LANES) * _LANES
        # Behind the pages of a row there is nothing: a sum of 0 below every score.
        parts = np.zeros((len(rows), heads, 2, pages), np.float32)
        parts[:, :, 0] = -np.inf
        return Observed(rows.copy(), np.zeros((len(rows), kv_heads, pages), np.float32), parts)

    def place(self, job: Any) -> None:
        """The job holds addresses: whoever launches it keeps this alive."""
        job["num_observed"], job["mass_pages"] = len(self.rows), self.found.shape[2]
        job["observed"], job["masses"] = self.rows.ctypes.data, self.found.ctypes.data
        job["mass_parts"] = self.parts.ctypes.data

    def masses(self) -> NDArray[np.float64]:
        """[observed, pages], sums over layers and heads; 0 for pages that a row does not see."""
        total = self.found[:, 0].astype(np.float64)
        for head in range(1, self.found.shape[1]):  # one by one: `sum` may take another order for another shape
            total += self.found[:, head]
        return total


@njit(nogil=True, cache=True)
def _weigh_page(job, keys, queries, group, high, scores, parts, stride):
    """The greatest score of each query with the first `high` keys of a page, and the sum of all relative to it."""
    tile_product(keys, _TILE_BYTES, queries, 4 * job.head_dim, scores, _TILE_BYTES, job.head_dim, group, _START)
    for q in range(group):
        s0, s1 = load8(scores + q * _TILE_BYTES), load8(scores + q * _TILE_BYTES + 32)
        if high < PAGE_TOKENS:
            s0, s1 = keep_lanes(s0, 0, high, _MINUS_INFINITY), keep_lanes(s1, -8, high - 8, _MINUS_INFINITY)
        largest = max8(maximum(s0, s1))
        p0, p1 = exp8(sub(s0, splat(largest))), exp8(sub(s1, splat(largest)))
        if high < PAGE_TOKENS:
            p0, p1 = keep_lanes(p0, 0, high, np.float32(0)), keep_lanes(p1, -8, high - 8, np.float32(0))
        store_f32(parts + 2 * q * stride, largest)
        store_f32(parts + (2 * q + 1) * stride, sum8(add(p0, p1)))


@njit(nogil=True, cache=True)
def _share(parts, sums, stride, logit_at, masses):
    """Adds the masses of one query. `logit_at`: where a sink logit lies, 0 for none."""
    greatest = splat(_MINUS_INFINITY)
    for at in range(0, stride, 32):
        greatest = maximum(greatest, load8(parts + at))
    largest = max8(greatest)
    if logit_at != 0:
        largest = max(largest, load_f32(logit_at))
    shift, total = splat(largest), splat(np.float32(0))
    for at in range(0, stride, 32):
        weight = mul(load8(sums + at), exp8(sub(load8(parts + at), shift)))
        store8(sums + at, weight)
        total = add(total, weight)
    held = sum8(total)
    if logit_at != 0:
        held += max8(exp8(splat(load_f32(logit_at) - largest)))
    factor = splat(np.float32(1) / held)
    for at in range(0, stride, 32):
        store8(masses + at, fma(load8(sums + at), factor, load8(masses + at)))


@njit(nogil=True, cache=True)
def _observe(job, layer_index, sink_logits, place, kv_head, scratch):
    """One observed row and kv head."""
    group, row_bytes, stride = job.heads // job.kv_heads, 4 * job.head_dim, 4 * job.mass_pages
    row = load_i32(job.observed + 4 * place)
    position = load_i32(job.positions + 4 * row)
    table = job.pages + 8 * load_i32(job.page_offsets + 4 * load_i32(job.row_seq + 4 * row))
    plane = layer_index * job.layer_bytes + kv_head * job.key_head_bytes
    queries = job.qkv + row * job.qkv_stride + kv_head * group * row_bytes
    scores = scratch + 2 * STEP_TOKENS * row_bytes  # behind the room for a widened page
    parts = job.mass_parts + (place * job.heads + kv_head * group) * 2 * stride
    for page in range(position // PAGE_TOKENS + 1):
        keys = load_i64(table + 8 * page) + plane
        if job.key_format != FP32:
            widen_keys(job, keys, scratch)
            keys = scratch
        high = min(position + 1 - page * PAGE_TOKENS, PAGE_TOKENS)
        _weigh_page(job, keys, queries, group, high, scores, parts + 4 * page, stride)
    masses = job.masses + (place * job.kv_heads + kv_head) * stride
    for q in range(group):
        logit_at = sink_logits + 4 * (kv_head * group + q) if sink_logits != 0 else 0
        _share(parts + 2 * q * stride, parts + (2 * q + 1) * stride, stride, logit_at, masses)


@njit(nogil=True, cache=True)
def masses(job, layer_index, sink_logits, phase, scratch):
    """`MASSES_PHASES` phases: adds what a layer without a window says of the observed rows. Its queries and keys are
    there."""
    items = job.num_observed * job.kv_heads
    item = take(phase, 1)
    while item < items:
        _observe(job, layer_index, sink_logits, item // job.kv_heads, item % job.kv_heads, scratch)
        finish(phase, 1)
        item = take(phase, 1)
    wait_for(phase, items)
