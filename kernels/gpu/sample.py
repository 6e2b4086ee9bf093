"""From logits to tokens: temperature, top-k, top-p, min-p and the draw, one launch, one program a row.

Nothing is sorted. The tokens that top-k and top-p keep are those above some logit, and the first few by id of those
equal to it. That logit is sought among the bits of a float, which an order-preserving map turns into an integer, at 16
places at a time: 8 passes over a row, which stays in the second-level cache.

The meaning is that of the CPU's sampler: with mass m = exp((logit - largest) / temperature), top-k keeps the k largest
(lower ids first among equals); of their mass, top-p keeps the shortest run, largest first, that reaches p, and always
one token; min-p then drops what has less than min_p of the largest one's mass. The draw inverts the cumulative mass of
what is left in the order of ids, at a number in [0, 1) that the caller makes from seed and position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierd.kernels.gpu.launch import FLOAT_DTYPES, Launch, Plan, check_contiguous, check_tensor, next_power_of_2

NO_TOKEN = -1  # of a row whose largest logit is not a finite number, or that holds NaN
_BLOCK = 4096


@triton.jit
def _key(x):
    """int32 in the order of the floats; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _block(row_at, first, vocab, BLOCK: tl.constexpr):
    """(ids, which of them exist, logits) of one block of a row."""
    ids = first + tl.arange(0, BLOCK)
    exists = ids < vocab
    return ids, exists, tl.load(row_at + ids, mask=exists, other=-float("inf")).to(tl.float32)


@triton.jit
def _weight_from(row_at, vocab, pivot, largest, inverse, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The mass, or the number, of the tokens whose key is at least `pivot` (int64)."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab, BLOCK):
        _, exists, x = _block(row_at, first, vocab, BLOCK)
        weight = tl.exp((x - largest) * inverse) if BY_MASS else tl.full((BLOCK,), 1.0, tl.float32)
        total += tl.where(exists & (_key(x).to(tl.int64) >= pivot), weight, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _threshold(row_at, vocab, low, high, wanted, largest, inverse, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key in [low, high] from which on tokens weigh at least `wanted`; `low` if none does."""
    WAYS: tl.constexpr = 16
    PART: tl.constexpr = BLOCK // 4 if BLOCK > 64 else BLOCK
    while low < high:
        step = (high - low + WAYS - 1) // WAYS
        pivots = low + step * (1 + tl.arange(0, WAYS)).to(tl.int64)
        total = tl.zeros((WAYS, PART), tl.float32)
        for first in range(0, vocab, PART):
            _, exists, x = _block(row_at, first, vocab, PART)
            weight = tl.exp((x - largest) * inverse) if BY_MASS else tl.full((PART,), 1.0, tl.float32)
            weight = tl.where(exists, weight, 0.0)
            total += tl.where(_key(x).to(tl.int64)[None, :] >= pivots[:, None], weight[None, :], 0.0)
        enough = (tl.sum(total, 1) >= wanted) & (pivots <= high)
        passed = tl.sum(enough.to(tl.int64), 0)
        high = tl.minimum(high, low + step * (passed + 1) - 1)
        low = low + step * passed
    return low


@triton.jit
def _mass_of_key(key, largest, inverse):
    bits = key.to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.exp((bits.to(tl.float32, bitcast=True) - largest) * inverse)


@triton.jit
def _sample_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, draws, tokens, row_stride, vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_at = logits + row * row_stride
    largest = tl.full((), -float("inf"), tl.float32)
    best = tl.full((), 0, tl.int32)
    lowest = tl.full((), 0x7FFFFFFF, tl.int32)
    bad = tl.full((), 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        ids, exists, x = _block(row_at, first, vocab, BLOCK)
        bad = tl.maximum(bad, tl.max((x != x).to(tl.int32), 0))
        top = tl.max(x, 0)
        at = tl.min(tl.where(exists & (x == top), ids, 0x7FFFFFFF), 0)
        best = tl.where(top > largest, at, best)
        largest = tl.maximum(top, largest)
        lowest = tl.minimum(lowest, tl.min(tl.where(exists, _key(x), 0x7FFFFFFF), 0))
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    token = best
    if (bad != 0) | (tl.abs(largest) == float("inf")):
        token = tl.full((), -1, tl.int32)
    elif (temperature > 0.0) & (top_k != 1):
        inverse = 1.0 / temperature
        low, high = lowest.to(tl.int64), _key(largest).to(tl.int64)
        # Kept: keys above `low`, which weigh `above`, and the first `ties` tokens of those equal to it.
        ties = tl.full((), 2147483647.0, tl.float32)
        if (top_k > 0) & (top_k < vocab):
            low = _threshold(row_at, vocab, low, high, top_k.to(tl.float32), largest, inverse, False, BLOCK)
            ties = top_k - _weight_from(row_at, vocab, low + 1, largest, inverse, False, BLOCK)
        top_p = tl.load(top_ps + row)
        if top_p < 1.0:
            above = _weight_from(row_at, vocab, low + 1, largest, inverse, True, BLOCK)
            equal = _weight_from(row_at, vocab, low, largest, inverse, True, BLOCK) - above
            wanted = top_p * (above + tl.minimum(equal, ties * _mass_of_key(low, largest, inverse)))
            if above >= wanted:
                low = _threshold(row_at, vocab, low + 1, high, wanted, largest, inverse, True, BLOCK)
                above = _weight_from(row_at, vocab, low + 1, largest, inverse, True, BLOCK)
            mass = _mass_of_key(low, largest, inverse)
            needed = tl.ceil((wanted - above) / tl.where(mass > 0.0, mass, 1.0))
            ties = tl.minimum(ties, tl.maximum(needed, 1.0))
        token = _draw(row_at, vocab, low, ties, tl.load(min_ps + row), tl.load(draws + row), largest, inverse, BLOCK)
    tl.store(tokens + row, token)


@triton.jit
def _kept_mass(x, exists, low, ties, seen_ties, min_p, largest, inverse):
    """(mass of each token or 0 for one that is cut, ties so far)."""
    key = _key(x).to(tl.int64)
    equal = (exists & (key == low)).to(tl.int32)
    rank = seen_ties + tl.cumsum(equal, 0)
    kept = exists & ((key > low) | ((equal != 0) & (rank.to(tl.float32) <= ties)))
    mass = tl.exp((x - largest) * inverse)
    return tl.where(kept & (mass >= min_p), mass, 0.0), seen_ties + tl.sum(equal, 0)


@triton.jit
def _draw(row_at, vocab, low, ties, min_p, draw, largest, inverse, BLOCK: tl.constexpr):
    """The first id at which the cumulative mass of what is kept passes `draw` of the whole."""
    total = tl.zeros((), tl.float32)
    seen_ties = tl.zeros((), tl.int32)
    for first in range(0, vocab, BLOCK):
        _, exists, x = _block(row_at, first, vocab, BLOCK)
        mass, seen_ties = _kept_mass(x, exists, low, ties, seen_ties, min_p, largest, inverse)
        total += tl.sum(mass, 0)
    target = draw * total
    before = tl.zeros((), tl.float32)
    seen_ties = tl.zeros((), tl.int32)
    token = tl.full((), 0x7FFFFFFF, tl.int32)
    last = tl.full((), 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        ids, exists, x = _block(row_at, first, vocab, BLOCK)
        mass, seen_ties = _kept_mass(x, exists, low, ties, seen_ties, min_p, largest, inverse)
        passed = (before + tl.cumsum(mass, 0) > target) & (mass > 0.0)
        token = tl.minimum(token, tl.min(tl.where(passed, ids, 0x7FFFFFFF), 0))
        last = tl.maximum(last, tl.max(tl.where(mass > 0.0, ids, 0), 0))
        before += tl.sum(mass, 0)
    # Rounding can put the target on the whole.
    return tl.where(token == 0x7FFFFFFF, last, token)


def plan_sample(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, draws: Tensor
) -> Plan[Tensor]:
    """`sample` without running it."""
    check_tensor("logits", logits, FLOAT_DTYPES, [None, None])
    rows, vocab = logits.shape
    if vocab == 0 or vocab > 1 and logits.stride(1) != 1:
        raise ValueError(f"logits: a row must hold neighbours, got shape {list(logits.shape)}, {logits.stride()}")
    check_tensor("top_ks", top_ks, [torch.int32], [rows], logits)
    check_contiguous("top_ks", top_ks)
    floats = {"temperatures": temperatures, "top_ps": top_ps, "min_ps": min_ps, "draws": draws}
    for name, tensor in floats.items():
        check_tensor(name, tensor, [torch.float32], [rows], logits)
        check_contiguous(name, tensor)
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    args = {
        "logits": logits, **floats, "top_ks": top_ks, "tokens": tokens, "row_stride": logits.stride(0), "vocab": vocab,
        "BLOCK": min(_BLOCK, next_power_of_2(vocab)),
    }  # fmt: skip
    return Plan(tokens, (tokens,), (Launch(_sample_kernel, (rows,), args, 16, 1),))


def sample(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, draws: Tensor
) -> Tensor:
    """Draws a token for each row. Twin: `reference.sample`.

    logits        float [rows, vocab], values of a row neighbours, any row stride, penalties and bias already in
    temperatures  fp32 [rows]; 0 takes the largest logit, as does a top_k of 1
    top_ks        int32 [rows]; 0 keeps all
    top_ps        fp32 [rows], 1 keeps all; min_ps fp32 [rows], 0 keeps all
    draws         fp32 [rows] in [0, 1)

    Returns int32 [rows]; `NO_TOKEN` for a row that holds NaN or whose largest logit is infinite: that request fails and
    no other. Raises ValueError for a wrong shape, type, stride or device.
    """
    return plan_sample(logits, temperatures, top_ks, top_ps, min_ps, draws).run()
