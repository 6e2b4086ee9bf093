"""The online softmax that the attention kernels share, in powers of two; functions of the device only.

State of a query over the tokens so far, scores s being scaled, capped and multiplied by log2(e):

    largest = max s        total = sum 2^(s - largest)        sums = sum 2^(s - largest) * value
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finite_or_zero(largest):
    """What to subtract from scores: nothing where no token was seen yet, since inf - inf is NaN."""
    return tl.where(largest == -float("inf"), 0.0, largest)


@triton.jit
def scores_of(queries, keys, seen, scale, soft_cap, HAS_CAP: tl.constexpr):
    """queries [M, D] times keys [D, N], in powers of two; minus infinity where `seen` [M or 1, N] says so.

    A soft cap c makes a score c * tanh(score / c), by one exponential that does not overflow.
    """
    scores = tl.dot(queries, keys, input_precision="ieee") * scale
    if HAS_CAP:
        fall = tl.exp2(tl.abs(scores) * (-2.0 / soft_cap * LOG2_E))
        tanh = (1.0 - fall) / (1.0 + fall)
        scores = soft_cap * tl.where(scores < 0, -tanh, tanh)
    return tl.where(seen, scores * LOG2_E, -float("inf"))


@triton.jit
def accumulate(scores, values, largest, total, sums):
    """The state [M], [M], [M, D] after the tokens of scores [M, N] and values [N, D]. A value of NaN is passed on."""
    before = largest
    largest = tl.maximum(before, tl.max(scores, 1))
    shift = finite_or_zero(largest)
    factor = tl.exp2(before - shift)
    weights = tl.exp2(scores - shift[:, None])
    total = total * factor + tl.sum(weights, 1)
    sums = tl.dot(weights.to(values.dtype), values, sums * factor[:, None], input_precision="ieee")
    return largest, total, sums


@triton.jit
def add_up(scores, largest, total):
    """The state without sums: of weights alone."""
    before = largest
    largest = tl.maximum(before, tl.max(scores, 1))
    shift = finite_or_zero(largest)
    return largest, total * tl.exp2(before - shift) + tl.sum(tl.exp2(scores - shift[:, None]), 1)


@triton.jit
def finished(largest, total, sums):
    """(out, lse): zeros and minus infinity where nothing was seen."""
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, -float("inf"), (largest + tl.log2(divisor)) * LN_2)
    return sums / divisor[:, None], lse
