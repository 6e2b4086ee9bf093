"""A forward pass, or a part of one, as one launch: a list of phases that every thread of the team walks through.

A pass has *stages*: stage 0 embeds the rows, stage 1 + i is layer i, the last one is the final norm and the head.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tierd.kernels.cpu.attention import ATTENTION_PHASES, attention
from tierd.kernels.cpu.masses import MASSES_PHASES, masses
from tierd.kernels.cpu.matmul import MATRIX, NO_RESIDUAL, matmul, takes_integers
from tierd.kernels.cpu.moe import GROUPING_PHASES, GROUPS_PHASES, combine, compute_groups, group, route
from tierd.kernels.cpu.ops import activate, embed, norm, norm_logit_rows, rotate_and_write
from tierd.kernels.cpu.pages import PAGE_FIELDS
from tierd.kernels.cpu.quantize import quantize
from tierd.kernels.cpu.simd import load_i32
from tierd.kernels.cpu.team import PHASE_BYTES, await_launch, close_launch, enter, leave, open_launch

LAYER = np.dtype(
    [
        ("attn_norm", np.int64),
        ("q_norm", np.int64),  # 0 for none
        ("k_norm", np.int64),
        ("mlp_norm", np.int64),
        ("window", np.int64),  # tokens, 0 for all
        ("sink_logits", np.int64),  # of each head; 0 for none
        ("qkv", MATRIX),
        ("o", MATRIX),
        ("gate_up", MATRIX),
        ("down", MATRIX),
        ("router", MATRIX),  # of a mixture, which has it instead of the two before
        ("first_expert", np.int64),  # -1 in a dense layer
    ]
)
EXPERT = np.dtype([("gate_up", MATRIX), ("down", MATRIX)])

# Everything a launch needs. Addresses, strides in bytes, counts; the first part is set once, the second each launch.
JOB = np.dtype(
    [(name, np.int64) for name in ("num_layers", "hidden", "hidden_padded", "intermediate", "heads", "kv_heads")]
    + [("head_dim", np.int64), *PAGE_FIELDS]
    + [("norm_eps", np.float32), ("query_scale", np.float32)]
    + [("gate_limit", np.float32), ("gate_slope", np.float32)]  # of experts, see ops.py; 0 for silu
    + [("embed", MATRIX), ("head", MATRIX)]
    + [(name, np.int64) for name in ("final_norm", "cos", "sin", "rope_stride", "threads", "block_queries")]
    + [(name, np.int64) for name in ("residual", "residual_stride", "normed", "qkv", "qkv_stride")]
    + [(name, np.int64) for name in ("attended", "attended_stride", "gate_up", "gate_up_stride")]
    + [(name, np.int64) for name in ("activated", "activated_stride", "product", "product_stride")]
    + [(name, np.int64) for name in ("quantized", "quantized_stride")]
    # of mixtures: see moe.py; a row of `gathered`, `expert_activated` and `expert_gate_up` is a slot's
    + [(name, np.int64) for name in ("experts", "experts_used", "expert_intermediate", "renormalized")]
    + [(name, np.int64) for name in ("router_logits", "router_stride", "chosen", "shares", "groups", "num_groups")]
    + [(name, np.int64) for name in ("next_slots", "slot_pairs", "pair_slots", "foreseen", "foreseen_shares")]
    + [(name, np.int64) for name in ("gathered", "gathered_stride", "expert_gate_up", "expert_stride")]
    + [(name, np.int64) for name in ("expert_activated", "activated_slot_stride")]
    + [(name, np.int64) for name in ("phases", "scratch", "scratch_stride", "tile")]
    # each launch
    + [(name, np.int64) for name in ("first_stage", "stop_stage", "rows", "tokens", "positions", "row_seq")]
    + [(name, np.int64) for name in ("pages", "page_offsets", "parts", "num_parts", "head_parts")]
    + [(name, np.int64) for name in ("cut_rows", "num_cut_rows", "sums", "segments")]
    # of bounded rows: a record each, their queries for sinks, where sinks lie, angles beyond the tables; bounds 0: none
    + [(name, np.int64) for name in ("bounds", "sink_queries", "sink_offsets", "far_cos", "far_sin")]
    # addresses of exact copies, one for each of `pages`, and 0 for a page without; 0: no page has one
    + [("exact", np.int64)]
    # of rows that are observed, see masses.py
    + [(name, np.int64) for name in ("observed", "num_observed", "masses", "mass_pages", "mass_parts")]
    + [(name, np.int64) for name in ("num_logits", "logit_rows", "logits", "logits_stride")]
    # what to do of a layer; of mixtures: groups to compute, and the layer whose experts are guessed, 0 for none
    + [(name, np.int64) for name in ("steps", "first_group", "stop_group", "foreseen_layer")]
)
# Of a layer; `steps` is their sum. After the first one pages may be chosen, the last two are of mixtures.
QUERIES, UNTIL_GROUPS, GROUPS, COMBINE = 8, 1, 2, 4
WHOLE_LAYER = QUERIES | UNTIL_GROUPS | GROUPS | COMBINE
ALL_GROUPS = -1  # a `stop_group`

_PRODUCT_PHASES = 2
_QUERIES_PHASES = 2 + _PRODUCT_PHASES
_ATTENTION_HALF_PHASES = _QUERIES_PHASES + 1 + _PRODUCT_PHASES + ATTENTION_PHASES + MASSES_PHASES
_DENSE_PHASES = 1 + 2 * _PRODUCT_PHASES
_MIXTURE_PHASES = _PRODUCT_PHASES + GROUPING_PHASES + GROUPS_PHASES + 1
# A guess needs 4 phases more than a layer has. It belongs to a launch of one layer, in a model of several.
PHASES_PER_LAYER = _ATTENTION_HALF_PHASES + max(_DENSE_PHASES, _MIXTURE_PHASES)
_PHASES_AROUND = 2 + _PRODUCT_PHASES


def num_stages(num_layers: int) -> int:
    """Stages of a whole pass."""
    return num_layers + 2


def num_phases(num_layers: int) -> int:
    """Phases of a whole pass: the embedding, those of the layers, the final norm, the head."""
    return PHASES_PER_LAYER * num_layers + _PHASES_AROUND


@njit(nogil=True, cache=True)
def _product(job, m, x, x_stride, y, y_stride, residual, rows, phase, tile):
    """`_PRODUCT_PHASES` phases: y = x . m^T, and residual += y unless that is NO_RESIDUAL. Rows of x are quantized
    first if the matrix wants that."""
    if takes_integers(m):
        quantize(x, x_stride, m.cols, job.quantized, job.quantized_stride, rows, phase)
        x, x_stride = job.quantized, job.quantized_stride
    matmul(
        m, x, x_stride, y, y_stride, residual, job.residual_stride, rows, phase + PHASE_BYTES, job.threads, tile
    )


@njit(nogil=True, cache=True)
def _query(job, layer, index, at, tile):
    """`_QUERIES_PHASES` phases: the queries of a layer, and its keys and values in their pages."""
    rows, normed, stride = job.rows, job.normed, job.residual_stride
    norm(job, layer.attn_norm, normed, at)
    at += PHASE_BYTES
    _product(job, layer.qkv, normed, stride, job.qkv, job.qkv_stride, NO_RESIDUAL, rows, at, tile)
    at += _PRODUCT_PHASES * PHASE_BYTES
    rotate_and_write(job, index, layer.q_norm, layer.k_norm, at)


@njit(nogil=True, cache=True)
def _attend(job, layer, index, at, scratch):
    """The rest of `_ATTENTION_HALF_PHASES` phases: the first half of a layer, and the norm of the second."""
    rows, normed, tile = job.rows, job.normed, scratch + job.tile
    attention(job, index, layer.window, layer.sink_logits, at, scratch)
    at += ATTENTION_PHASES * PHASE_BYTES
    if job.num_observed > 0 and layer.window == 0:
        masses(job, index, layer.sink_logits, at, scratch)
    at += MASSES_PHASES * PHASE_BYTES
    out, out_stride = job.product, job.product_stride
    _product(job, layer.o, job.attended, job.attended_stride, out, out_stride, job.residual, rows, at, tile)
    at += _PRODUCT_PHASES * PHASE_BYTES
    norm(job, layer.mlp_norm, normed, at)


@njit(nogil=True, cache=True)
def _dense(job, layer, at, tile):
    """`_DENSE_PHASES` phases: the MLP of a layer."""
    rows, stride, out, out_stride = job.rows, job.residual_stride, job.product, job.product_stride
    _product(job, layer.gate_up, job.normed, stride, job.gate_up, job.gate_up_stride, NO_RESIDUAL, rows, at, tile)
    at += _PRODUCT_PHASES * PHASE_BYTES
    activate(job, at)
    at += PHASE_BYTES
    _product(job, layer.down, job.activated, job.activated_stride, out, out_stride, job.residual, rows, at, tile)


@njit(nogil=True, cache=True)
def _route(job, layer, x, at, tile):
    """`_PRODUCT_PHASES` phases: what the router of a layer says to normed rows."""
    rows, out, out_stride = job.rows, job.router_logits, job.router_stride
    _product(job, layer.router, x, job.residual_stride, out, out_stride, NO_RESIDUAL, rows, at, tile)


@njit(nogil=True, cache=True)
def _mixture(job, layers, experts, index, at, tile):
    """The second half of a layer with experts, or those of its steps that are asked for."""
    layer = layers[index]
    if job.steps & UNTIL_GROUPS:
        _route(job, layer, job.normed, at, tile)
        at += _PRODUCT_PHASES * PHASE_BYTES
        group(job, index, at)
        at += GROUPING_PHASES * PHASE_BYTES
        if job.foreseen_layer > 0:
            guessed = layers[job.foreseen_layer]
            norm(job, guessed.mlp_norm, job.product, at)
            at += PHASE_BYTES
            _route(job, guessed, job.product, at, tile)
            at += _PRODUCT_PHASES * PHASE_BYTES
            route(job, job.foreseen, job.foreseen_shares, at)
            at += PHASE_BYTES
    if job.steps & GROUPS:
        stop = job.stop_group if job.stop_group != ALL_GROUPS else load_i32(job.num_groups + 4 * index)
        compute_groups(job, layer, experts, index, job.first_group, stop, at, tile)
        at += GROUPS_PHASES * PHASE_BYTES
    if job.steps & COMBINE:
        combine(job, at)


@njit(nogil=True, cache=True)
def _run(job, layers, experts, worker):
    """One thread's way through the stages of the launch."""
    scratch = job.scratch + worker * job.scratch_stride
    tile = scratch + job.tile
    phase = job.phases
    if job.first_stage == 0:
        embed(job, phase)
        phase += PHASE_BYTES
    for index in range(max(job.first_stage - 1, 0), min(job.stop_stage - 1, job.num_layers)):
        layer = layers[index]
        if job.steps & QUERIES:
            _query(job, layer, index, phase, tile)
        if job.steps & UNTIL_GROUPS:
            _attend(job, layer, index, phase + _QUERIES_PHASES * PHASE_BYTES, scratch)
        at = phase + _ATTENTION_HALF_PHASES * PHASE_BYTES
        if layer.first_expert >= 0:
            _mixture(job, layers, experts, index, at, tile)
        elif job.steps & UNTIL_GROUPS:
            _dense(job, layer, at, tile)
        phase += PHASES_PER_LAYER * PHASE_BYTES
    if job.stop_stage > job.num_layers + 1:
        norm_logit_rows(job, phase)
        count, normed, stride = job.num_logits, job.normed, job.residual_stride
        _product(
            job, job.head, normed, stride, job.logits, job.logits_stride, NO_RESIDUAL, count, phase + PHASE_BYTES, tile
        )


@njit(nogil=True, cache=True)
def work(jobs, layers, experts, control, worker):
    """Worker 0, the caller: runs the job with whoever of the team is there, returns when it is done and all have left
    it. The others: join every launch that they are in time for, until the team stops.

    One function for both, because Numba optimizes all that a function calls once more with it: 4 s for this one.
    """
    if worker == 0:
        open_launch(control)
        _run(jobs[0], layers, experts, worker)
        close_launch(control)
        return
    seen = 0
    while True:
        seen = await_launch(control, seen)
        if seen < 0:
            return
        if enter(control):
            _run(jobs[0], layers, experts, worker)
            leave(control)
