"""The twins of the CPU backend's kernels, and of its whole decoder.

Written to be read. It computes each result in the most direct way, over whole matrices and one row at a time, and
shares with the kernels only the weight and page layouts. It is not bit-equal to them: sums here go in another order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from tierd.kernels.layout import PageLayout
from tierd.kernels.packing import PackedMatrix, unpack
from tierd.kernels.reference.moe import mixture
from tierd.kernels.reference.packed import PAGE_DTYPES, read_packed
from tierd.kernels.reference.paged import put_tokens
from tierd.kernels.rows import COPY_FORMAT, Bound, Ladder

if TYPE_CHECKING:
    from tierd.kernels.cpu.weights import DecoderShape, ExpertsShape, ExpertWeights, LayerWeights


def weights(matrix: PackedMatrix) -> torch.Tensor:  # [rows, cols]
    """The float32 weights of a packed matrix."""
    return torch.from_numpy(unpack(matrix.format, matrix.data, matrix.rows, matrix.cols))


def matmul(x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, cols] times the transposed matrix, plus a bias."""
    y = x @ weights(matrix).T
    return y if bias is None else y + bias


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates heads x [rows, heads, head_dim]; cos and sin [rows, head_dim / 2]. The halves of a head are the pairs."""
    low, high = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def pages(arena: NDArray[np.uint8], layout: PageLayout, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and the values of a layer in an arena, both as [slots, kv_heads, token, head_dim].

    Views, or of packed pages what their codes stand for, in float64.
    """
    records = torch.from_numpy(arena)[:, : layout.payload_bytes]
    if layout.packed:
        slices = records[:, layer * layout.layer_bytes : (layer + 1) * layout.layer_bytes]
        planes_of = [read_packed(slot, layout) for slot in slices]
        return torch.stack([keys for keys, _ in planes_of]), torch.stack([values for _, values in planes_of])
    payload = records.view(PAGE_DTYPES[layout.format])
    planes = payload.view(len(arena), layout.num_layers, 2, layout.kv_heads, layout.head_elements)
    keys = planes[:, layer, 0].view(len(arena), layout.kv_heads, layout.head_dim, layout.page_tokens)
    values = planes[:, layer, 1].view(len(arena), layout.kv_heads, layout.page_tokens, layout.head_dim)
    return keys.transpose(2, 3), values


def angles(positions: torch.Tensor, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [positions, head_dim / 2] of any positions, in float64; `inverse`: radians of one position."""
    phases = positions.double()[:, None] * inverse.double()
    return phases.cos(), phases.sin()


def attention_bounded(
    queries: torch.Tensor,  # [rows, heads, head_dim], neither rotated nor scaled
    keys: torch.Tensor,  # [tokens, kv_heads, head_dim] of one sequence, rotated to their positions
    values: torch.Tensor,  # the same
    positions: Sequence[int],
    inverse: torch.Tensor,  # [head_dim / 2]
    bound: Bound,
    window: int = 0,  # the layer's
    sink_logits: torch.Tensor | None = None,  # [heads]
) -> torch.Tensor:  # [rows, heads, head_dim], float64
    """Attention as StreamingLLM (arXiv 2309.17453) says it: what a row sees is a cache whose keys are rotated to their
    places in it. `bound.lead` and `bound.base` have no meaning here: all tokens are given."""
    out = torch.empty_like(queries, dtype=torch.float64)
    group = queries.shape[1] // keys.shape[1]
    turned_back = angles(-torch.arange(len(keys)), inverse)
    plain = rope(keys.double(), *turned_back)
    for row, position in enumerate(positions):
        cache = list(range(position + 1))
        if bound.sinks and position >= bound.sinks + bound.window:
            cache = [*range(bound.sinks), *range(position - bound.window + 1, position + 1)]
        elif bound.window and not bound.sinks:
            cache = cache[-bound.window :]
        places = torch.arange(len(cache))  # in the cache; before anything has left it these are the positions
        seen = torch.tensor([position - token < window if window else True for token in cache])
        tokens = torch.tensor(cache)
        if not bound.sinks:
            places = tokens
        k = rope(plain[tokens], *angles(places, inverse))[seen].repeat_interleave(group, 1)
        v = values.double()[tokens][seen].repeat_interleave(group, 1)
        q = rope(queries[row : row + 1].double(), *angles(places[-1:], inverse))[0]
        scores = torch.einsum("hd,thd->ht", q, k) / math.sqrt(queries.shape[2])
        out[row] = torch.einsum("ht,thd->hd", _weights_of(scores, sink_logits), v)
    return out


def _weights_of(scores: torch.Tensor, sink_logits: torch.Tensor | None) -> torch.Tensor:  # [heads, tokens] both
    """The softmax of scores, among which the sink logit of a head counts as one more, whose token has no value."""
    if sink_logits is None:
        return scores.softmax(-1)
    return torch.cat((scores, sink_logits.to(scores.dtype)[:, None]), -1).softmax(-1)[:, :-1]


def attention(
    queries: torch.Tensor,  # [rows, heads, head_dim], not scaled
    keys: torch.Tensor,  # [slots, kv_heads, token, head_dim]
    values: torch.Tensor,  # the same
    positions: Sequence[int],
    tables: Sequence[Sequence[int]],  # the pages of each row's sequence
    window: int = 0,
    sink_logits: torch.Tensor | None = None,  # [heads]
    exact: tuple[torch.Tensor, torch.Tensor, Ladder] | None = None,  # keys and values as above
) -> torch.Tensor:  # [rows, heads, head_dim]
    """Causal attention of each row over the pages of its sequence; `window` tokens back, or all for 0.

    `sink_logits`: those that a model learned (gpt-oss). `exact`: what rows see instead of some tokens.
    """
    out = torch.empty_like(queries)
    group = queries.shape[1] // keys.shape[1]
    for row, (position, table) in enumerate(zip(positions, tables, strict=True)):
        first = max(0, position - window + 1) if window else 0
        seen = slice(first, position + 1)
        k, v = (torch.cat([plane[slot].float() for slot in table], 1) for plane in (keys, values))
        if exact is not None:
            *copies, ladder = exact
            tokens = torch.arange(k.shape[1])
            is_exact = ((tokens < ladder.first) | (tokens >= ladder.block(position)))[:, None]
            planes = (torch.cat([plane[slot].float() for slot in table], 1) for plane in copies)
            k, v = (torch.where(is_exact, copy, plane) for copy, plane in zip(planes, (k, v), strict=True))
        k, v = (plane[:, seen].repeat_interleave(group, 0) for plane in (k, v))
        scores = torch.einsum("hd,htd->ht", queries[row], k) / math.sqrt(queries.shape[2])
        out[row] = torch.einsum("ht,htd->hd", _weights_of(scores, sink_logits), v)
    return out


def forward(
    shape: DecoderShape,
    layers: Sequence[LayerWeights],
    embed: PackedMatrix,
    final_norm: NDArray[np.float32],
    head: PackedMatrix,
    layout: PageLayout,
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    arena: NDArray[np.uint8],
    tokens: NDArray[np.int32],
    positions: NDArray[np.int32],
    row_seq: NDArray[np.int32],
    page_table: NDArray[np.int32],
    page_offsets: NDArray[np.int32],
    logit_rows: NDArray[np.int32],
    bounds: Sequence[Bound] = (),
    inverse: torch.Tensor | None = None,
    exact: tuple[NDArray[np.uint8], Ladder] | None = None,
) -> torch.Tensor:  # [logit rows, vocab]
    """`CpuDecoder` as one function: writes the rows' keys and values into the arena and returns logits.

    `exact`: an arena of fp16 pages with as many slots, for what a ladder lets rows see instead.

    `bounds`, of each sequence, with `inverse`, the frequencies of the tables: the pages are all of them, whatever a
    bound says of its own.
    """
    at = torch.from_numpy(positions).long()
    tables = [page_table[page_offsets[s] : page_offsets[s + 1]].tolist() for s in row_seq]
    slots = torch.tensor([table[p // layout.page_tokens] for table, p in zip(tables, at.tolist(), strict=True)])
    cos_rows, sin_rows = torch.from_numpy(cos)[at], torch.from_numpy(sin)[at]
    plain = replace(layout, format=COPY_FORMAT)
    x = weights(embed)[torch.from_numpy(tokens).long()]
    for index, layer in enumerate(layers):
        normed = rms_norm(x, torch.from_numpy(layer.attn_norm), shape.norm_eps)
        heads = matmul(normed, layer.qkv, _optional(layer.qkv_bias)).view(len(tokens), -1, shape.head_dim)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, torch.from_numpy(layer.q_norm), shape.norm_eps)
            k = rms_norm(k, torch.from_numpy(layer.k_norm), shape.norm_eps)
        k = rope(k, cos_rows, sin_rows)
        for row, (slot, position) in enumerate(zip(slots.tolist(), at.tolist(), strict=True)):
            record = torch.from_numpy(arena[slot])
            put_tokens(record, layout, index, k[row, :, None], v[row, :, None], position % layout.page_tokens)
            if exact is not None:
                record = torch.from_numpy(exact[0][slot])
                put_tokens(record, plain, index, k[row, :, None], v[row, :, None], position % layout.page_tokens)
        keys, values = pages(arena, layout, index)
        sink_logits = _optional(layer.sink_logits)
        if inverse is None:
            q = rope(q, cos_rows, sin_rows)
            copies = None if exact is None else (*pages(exact[0], plain, index), exact[1])
            attended = attention(q, keys, values, at.tolist(), tables, shape.windows[index], sink_logits, copies)
        else:
            attended = torch.empty_like(q)
            for s, bound in enumerate(bounds):
                mine = torch.from_numpy(row_seq) == s
                table = page_table[page_offsets[s] : page_offsets[s + 1]].tolist()
                k, v = (torch.cat([plane[slot] for slot in table], 1).transpose(0, 1) for plane in (keys, values))
                places = at[mine].tolist()
                attended[mine] = attention_bounded(
                    q[mine], k, v, places, inverse, bound, shape.windows[index], sink_logits
                ).float()
        x = x + matmul(attended.flatten(1), layer.o, _optional(layer.o_bias))
        normed = rms_norm(x, torch.from_numpy(layer.mlp_norm), shape.norm_eps)
        x = x + _mlp(shape, layer, normed)
    x = rms_norm(x[torch.from_numpy(logit_rows).long()], torch.from_numpy(final_norm), shape.norm_eps)
    return matmul(x, head)


def _mlp(shape: DecoderShape, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
    """The second half of a layer, dense or a mixture, of normed rows."""

    def one(part: LayerWeights | ExpertWeights, rows: torch.Tensor) -> torch.Tensor:
        gate_up, down = part.gate_up, part.down
        assert gate_up is not None and down is not None
        gate, up = matmul(rows, gate_up, _bias(part.gate_up_bias, gate_up)).chunk(2, -1)
        clamped = shape.experts if layer.router is not None else None
        return matmul(activate(gate, up, clamped), down, _bias(part.down_bias, down))

    if layer.router is None or shape.experts is None:
        return one(layer, x)
    experts = [partial(one, expert) for expert in layer.experts if expert is not None]
    logits = matmul(x, layer.router, _optional(layer.router_bias))
    return mixture(x, logits, shape.experts.used, shape.experts.renormalized, experts)


def activate(gate: torch.Tensor, up: torch.Tensor, experts: ExpertsShape | None = None) -> torch.Tensor:
    """silu(gate) * up, or what experts with a clamped gate make of both."""
    if experts is None or not experts.limit:
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    return gate * torch.sigmoid(experts.slope * gate) * (up + 1)


def _bias(vector: NDArray[np.float32] | None, matrix: PackedMatrix) -> torch.Tensor | None:
    """Without what fills it up to whole panels."""
    return None if vector is None else torch.from_numpy(vector[: matrix.rows])


def _optional(vector: NDArray[np.float32] | None) -> torch.Tensor | None:
    return None if vector is None else torch.from_numpy(vector)
