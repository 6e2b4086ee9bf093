"""Attention of a few queries to a packed page: its codes are unpacked in registers, on their way into the products.

The bits are those of widening the page first (pages.py) and multiplying then (microkernel.py): the same operations in
the same order, without the way through memory. More queries widen a page once and read it several times.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tierd.kernels.cpu.codes import load8_high4, load8_int8, load8_low4
from tierd.kernels.cpu.pages import INT8
from tierd.kernels.cpu.simd import add, fma, load8, load8_fp16, load_f32, mul, splat, store8

PACKED_QUERIES = 3
_PAGE_TOKENS = 16


def packed_scratch_bytes(head_dim: int) -> int:
    """What a page's anchor, or its scales and minima (16 channels to a group at least), take as float32."""
    return 8 * head_dim


@njit(nogil=True, cache=True)
def _widen_halves(source, count, target):
    for i in range(0, count, 8):
        store8(target + 4 * i, load8_fp16(source + 2 * i))


@njit(nogil=True, cache=True)
def packed_scores(job, at, x, x_stride, queries, scores, score_stride, scratch):
    """scores[q, t] = x[q] . k[t] for the tokens of a page and 1 to `PACKED_QUERIES` queries; a missing one repeats the
    first."""
    x1, y1 = (x + x_stride, scores + score_stride) if queries > 1 else (x, scores)
    x2, y2 = (x + 2 * x_stride, scores + 2 * score_stride) if queries > 2 else (x, scores)
    _widen_halves(at + job.key_anchor, job.head_dim, scratch)
    zero = splat(np.float32(0))
    a0, b0, a1, b1, a2, b2 = zero, zero, zero, zero, zero, zero
    for first in range(0, job.head_dim, job.group):
        scales = at + job.key_scales + 2 * _PAGE_TOKENS * (first // job.group)
        s0, s1 = load8_fp16(scales), load8_fp16(scales + 16)
        if job.key_format == INT8:
            for d in range(first, first + job.group):
                anchor, codes = splat(load_f32(scratch + 4 * d)), at + d * _PAGE_TOKENS
                k0, k1 = fma(load8_int8(codes), s0, anchor), fma(load8_int8(codes + 8), s1, anchor)
                q0, q1, q2 = splat(load_f32(x + 4 * d)), splat(load_f32(x1 + 4 * d)), splat(load_f32(x2 + 4 * d))
                a0, b0 = fma(k0, q0, a0), fma(k1, q0, b0)
                a1, b1 = fma(k0, q1, a1), fma(k1, q1, b1)
                a2, b2 = fma(k0, q2, a2), fma(k1, q2, b2)
        else:
            minima = at + job.key_minima + 2 * _PAGE_TOKENS * (first // job.group)
            m0, m1 = load8_fp16(minima), load8_fp16(minima + 16)
            for d in range(first, first + job.group):
                anchor, codes = splat(load_f32(scratch + 4 * d)), at + d * 8
                k0 = add(fma(load8_low4(codes), s0, m0), anchor)
                k1 = add(fma(load8_high4(codes), s1, m1), anchor)
                q0, q1, q2 = splat(load_f32(x + 4 * d)), splat(load_f32(x1 + 4 * d)), splat(load_f32(x2 + 4 * d))
                a0, b0 = fma(k0, q0, a0), fma(k1, q0, b0)
                a1, b1 = fma(k0, q1, a1), fma(k1, q1, b1)
                a2, b2 = fma(k0, q2, a2), fma(k1, q2, b2)
    store8(y2, a2)
    store8(y2 + 32, b2)
    store8(y1, a1)
    store8(y1 + 32, b1)
    store8(scores, a0)
    store8(scores + 32, b0)


@njit(nogil=True, cache=True)
def add_packed_values(job, at, weights, weight_stride, queries, low, high, out, scratch):
    """out[q] += sum over tokens low..high of a page of weights[q, t] * v[t], queries as in `packed_scores`."""
    head_dim, row_bytes = job.head_dim, 4 * job.head_dim
    w1, y1 = (weights + weight_stride, out + row_bytes) if queries > 1 else (weights, out)
    w2, y2 = (weights + 2 * weight_stride, out + 2 * row_bytes) if queries > 2 else (weights, out)
    halves = _PAGE_TOKENS * (head_dim // job.group)
    minima = scratch + 4 * halves
    _widen_halves(at + job.value_scales, halves, scratch)
    if job.value_format != INT8:
        _widen_halves(at + job.value_minima, halves, minima)
    for d in range(0, head_dim, 16):
        group = 4 * _PAGE_TOKENS * (d // job.group)
        here = 4 * d
        a0, b0 = load8(out + here), load8(out + here + 32)
        a1, b1 = load8(y1 + here), load8(y1 + here + 32)
        a2, b2 = load8(y2 + here), load8(y2 + here + 32)
        if job.value_format == INT8:
            for t in range(low, high):
                s, codes = splat(load_f32(scratch + group + 4 * t)), at + t * head_dim + d
                v0, v1 = mul(load8_int8(codes), s), mul(load8_int8(codes + 8), s)
                p0, p1 = splat(load_f32(weights + 4 * t)), splat(load_f32(w1 + 4 * t))
                p2 = splat(load_f32(w2 + 4 * t))
                a0, b0 = fma(v0, p0, a0), fma(v1, p0, b0)
                a1, b1 = fma(v0, p1, a1), fma(v1, p1, b1)
                a2, b2 = fma(v0, p2, a2), fma(v1, p2, b2)
        else:
            for t in range(low, high):
                s, m = splat(load_f32(scratch + group + 4 * t)), splat(load_f32(minima + group + 4 * t))
                codes = at + (t * head_dim + d) // 2
                v0, v1 = fma(load8_low4(codes), s, m), fma(load8_high4(codes), s, m)
                p0, p1 = splat(load_f32(weights + 4 * t)), splat(load_f32(w1 + 4 * t))
                p2 = splat(load_f32(w2 + 4 * t))
                a0, b0 = fma(v0, p0, a0), fma(v1, p0, b0)
                a1, b1 = fma(v0, p1, a1), fma(v1, p1, b1)
                a2, b2 = fma(v0, p2, a2), fma(v1, p2, b2)
        store8(y2 + here, a2)
        store8(y2 + here + 32, b2)
        store8(y1 + here, a1)
        store8(y1 + here + 32, b1)
        store8(out + here, a0)
        store8(out + here + 32, b0)
