"""Mixtures of experts: which experts a row goes through, the rows grouped by expert, and the sum of what comes back.

A router gives each row a number for every expert; softmax makes probabilities of them, and the row goes through the
`experts_used` most probable ones (of equal ones the first). Rows that go through the same expert are a *group*, and
each of them has a *slot* there, so that an expert's weights are read once for all its rows:

    groups        int32 [layers][experts][3]: expert, first slot, rows; only those that have rows, ascending
    num_groups    int32 [layers]: how many these are
    slot_pairs    int32 [slots]: row * experts_used + j, if it is the row's j-th expert
    chosen        int32 [rows * experts_used]: the expert of each pair
    pair_slots    int32 [rows * experts_used]: the slot of each pair
    shares        float32 [rows * experts_used]: what its result is multiplied with

Groups are kept for each layer, because a thread may come late to a phase that is over: it must find there as many items
as the others have, and not those of the layer that they are at. Everything else is read for items that were taken.

What a row gets is the sum over its experts in descending order of probability, each computed from that row alone: the
same bits in every batch, in whatever order the groups are computed, all at once or a few at a time.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tierd.kernels.cpu.matmul import product_panels, takes_integers
from tierd.kernels.cpu.ops import activate_columns
from tierd.kernels.cpu.quantize import quantize_row
from tierd.kernels.cpu.simd import (
    add,
    exp8,
    fma,
    load8,
    load_f32,
    load_i32,
    mul,
    splat,
    store8,
    store_f32,
    store_i32,
    sub,
)
from tierd.kernels.cpu.team import PHASE_BYTES, finish, take, wait_for

GROUP_BYTES = np.int64(12)
_ACTIVATION_COLS = 512  # columns of one item of the activation, whole groups of a quantized row
_ITEM_PANELS = 4  # of a product, as in matmul: with many rows, and with one
_DECODE_ITEM_PANELS = 16
GROUPING_PHASES = 2
GROUPS_PHASES = 4


@njit(nogil=True, cache=True)
def _route_row(job, row, chosen, shares):
    """The experts of a row and their shares. Its logits become probabilities, but for a factor, and -1 where chosen."""
    at, used = job.router_logits + row * job.router_stride, job.experts_used
    largest = load_f32(at)
    for e in range(1, job.experts):
        largest = max(largest, load_f32(at + 4 * e))
    for e in range(0, job.experts, 8):
        store8(at + 4 * e, exp8(sub(load8(at + 4 * e), splat(largest))))
    total = np.float32(0)
    for e in range(job.experts):
        total += load_f32(at + 4 * e)
    kept = np.float32(0)
    for j in range(used):
        # What is no number counts as 0 here, so that there is a choice in any case; it is in the total.
        best, most = np.int64(-1), np.float32(-0.5)
        for e in range(job.experts):
            p = load_f32(at + 4 * e)
            p = p if p == p else np.float32(0)
            if p > most:
                best, most = np.int64(e), p
        store_i32(chosen + 4 * (row * used + j), best)
        store_f32(shares + 4 * (row * used + j), most)
        store_f32(at + 4 * best, np.float32(-1))
        kept += most
    # A total that is no number stays: what is kept leaves it out, and could be 0.
    total = kept if job.renormalized != 0 and total == total else total
    for j in range(used):
        pair = shares + 4 * (row * used + j)
        store_f32(pair, load_f32(pair) / total)


@njit(nogil=True, cache=True)
def route(job, chosen, shares, phase):
    """One phase: `chosen` and `shares` of all rows, from their router logits, which it uses up."""
    row = take(phase, 1)
    while row < job.rows:
        _route_row(job, row, chosen, shares)
        finish(phase, 1)
        row = take(phase, 1)
    wait_for(phase, job.rows)


@njit(nogil=True, cache=True)
def _groups_of(job, index):
    """Where the groups of a layer lie."""
    return job.groups + index * job.experts * GROUP_BYTES


@njit(nogil=True, cache=True)
def _group(job, index):
    """Groups of layer `index`, and who has which slot."""
    pairs, next_slots = job.rows * job.experts_used, job.next_slots
    for e in range(job.experts):
        store_i32(next_slots + 4 * e, np.int64(0))
    for pair in range(pairs):
        at = next_slots + 4 * load_i32(job.chosen + 4 * pair)
        store_i32(at, load_i32(at) + 1)
    groups, slot = np.int64(0), np.int64(0)
    for e in range(job.experts):
        count = load_i32(next_slots + 4 * e)
        store_i32(next_slots + 4 * e, slot)
        if count > 0:
            at = _groups_of(job, index) + groups * GROUP_BYTES
            store_i32(at, np.int64(e))
            store_i32(at + 4, slot)
            store_i32(at + 8, count)
            groups += 1
            slot += count
    store_i32(job.num_groups + 4 * index, groups)
    for pair in range(pairs):
        at = next_slots + 4 * load_i32(job.chosen + 4 * pair)
        slot = load_i32(at)
        store_i32(at, slot + 1)
        store_i32(job.slot_pairs + 4 * slot, np.int64(pair))
        store_i32(job.pair_slots + 4 * pair, slot)


@njit(nogil=True, cache=True)
def group(job, index, phase):
    """`GROUPING_PHASES` phases: the experts of each row, and the groups that these make."""
    route(job, job.chosen, job.shares, phase)
    phase += PHASE_BYTES
    if take(phase, 1) == 0:
        _group(job, index)
        finish(phase, 1)
    wait_for(phase, 1)


@njit(nogil=True, cache=True)
def _load_group(groups, number):
    """Expert, first slot and rows of a group."""
    at = groups + number * GROUP_BYTES
    return load_i32(at), load_i32(at + 4), load_i32(at + 8)


@njit(nogil=True, cache=True)
def _gather(job, layer, experts, groups, first, stop, phase):
    """One phase: the normed rows of these groups, quantized if their expert wants that, come to their slots."""
    number = first + take(phase, 1)
    while number < stop:
        expert, slot, count = _load_group(groups, number)
        integers = takes_integers(experts[layer.first_expert + expert].gate_up)
        for s in range(slot, slot + count):
            source = job.normed + load_i32(job.slot_pairs + 4 * s) // job.experts_used * job.residual_stride
            target = job.gathered + s * job.gathered_stride
            if integers:
                quantize_row(source, job.hidden, 0, job.hidden, target)
            else:
                for d in range(0, 4 * job.hidden_padded, 32):
                    store8(target + d, load8(source + d))
        finish(phase, 1)
        number = first + take(phase, 1)
    wait_for(phase, stop - first)


@njit(nogil=True, cache=True)
def _products(job, layer, experts, groups, down, first, stop, phase, tile):
    """One phase: the product of each of these groups with its expert's matrix, gate and up or else down."""
    one = experts[layer.first_expert + _load_group(groups, first)[0]]
    panels = one.down.panels if down else one.gate_up.panels
    step = np.int64(_ITEM_PANELS)
    if job.rows == 1:
        # Pairs of panels go through the kernel together; 8 items for each thread.
        share = panels * (stop - first) // (8 * job.threads) // 2 * 2
        step = max(np.int64(2), min(np.int64(_DECODE_ITEM_PANELS), share))
    parts = (panels + step - 1) // step
    total = (stop - first) * parts
    item = take(phase, 1)
    while item < total:
        expert, slot, count = _load_group(groups, first + item // parts)
        low = item % parts * step
        high = min(low + step, panels)
        y, y_stride = job.expert_gate_up + slot * job.expert_stride, job.expert_stride
        if down:
            m = experts[layer.first_expert + expert].down
            x, x_stride = job.expert_activated + slot * job.activated_slot_stride, job.activated_slot_stride
            if takes_integers(m):
                x, x_stride = job.gathered + slot * job.gathered_stride, job.gathered_stride
            product_panels(m, x, x_stride, y, y_stride, count, low, high, tile)
        else:
            m = experts[layer.first_expert + expert].gate_up
            x = job.gathered + slot * job.gathered_stride
            product_panels(m, x, job.gathered_stride, y, y_stride, count, low, high, tile)
        finish(phase, 1)
        item = take(phase, 1)
    wait_for(phase, total)


@njit(nogil=True, cache=True)
def _activate(job, layer, experts, groups, first, stop, phase):
    """One phase: gate and up of all slots of these groups become one (`activate_columns`), quantized if the next
    matrix of the expert wants that: to where the row was gathered, which its product has done with."""
    width, limit, slope = job.expert_intermediate, job.gate_limit, job.gate_slope
    chunks = (width + _ACTIVATION_COLS - 1) // _ACTIVATION_COLS
    total = (stop - first) * chunks
    item = take(phase, 1)
    while item < total:
        expert, slot, count = _load_group(groups, first + item // chunks)
        low = item % chunks * _ACTIVATION_COLS
        high = min(low + _ACTIVATION_COLS, width)
        integers = takes_integers(experts[layer.first_expert + expert].down)
        for s in range(slot, slot + count):
            out = job.expert_activated + s * job.activated_slot_stride
            activate_columns(job.expert_gate_up + s * job.expert_stride, width, low, high, limit, slope, out)
            if integers:
                quantize_row(out, width, low, high, job.gathered + s * job.gathered_stride)
        finish(phase, 1)
        item = take(phase, 1)
    wait_for(phase, total)


@njit(nogil=True, cache=True)
def compute_groups(job, layer, experts, index, first, stop, phase, tile):
    """`GROUPS_PHASES` phases: what the experts of groups first..stop of layer `index` make of their rows lies in their
    slots afterwards."""
    if first == stop:
        return
    groups = _groups_of(job, index)
    _gather(job, layer, experts, groups, first, stop, phase)
    _products(job, layer, experts, groups, False, first, stop, phase + PHASE_BYTES, tile)
    _activate(job, layer, experts, groups, first, stop, phase + 2 * PHASE_BYTES)
    _products(job, layer, experts, groups, True, first, stop, phase + 3 * PHASE_BYTES, tile)


@njit(nogil=True, cache=True)
def combine(job, phase):
    """One phase: residual += the sum over each row's experts of share * result, the most probable expert first."""
    used = job.experts_used
    row = take(phase, 1)
    while row < job.rows:
        target = job.residual + row * job.residual_stride
        for d in range(0, 4 * job.hidden_padded, 32):
            total = splat(np.float32(0))
            for pair in range(row * used, row * used + used):
                result = job.expert_gate_up + load_i32(job.pair_slots + 4 * pair) * job.expert_stride
                share = splat(load_f32(job.shares + 4 * pair))
                total = fma(share, load8(result + d), total) if pair > row * used else mul(share, load8(result + d))
            store8(target + d, add(load8(target + d), total))
        finish(phase, 1)
        row = take(phase, 1)
    wait_for(phase, job.rows)
