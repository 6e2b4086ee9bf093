"""What a pass launches: the embedding, layer after layer, the head.

Nothing here waits for the card, or looks at what it computes, unless experts are missing: so it can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tierd.kernels.gpu.angles import AngleTables
from tierd.kernels.gpu.attention import Turned, attend, observe, write
from tierd.kernels.gpu.fused import Rotated, plan_add_norm, plan_rotate, plan_swiglu
from tierd.kernels.gpu.inputs import Inputs
from tierd.kernels.gpu.layers import Ends, GpuLayer
from tierd.kernels.gpu.mixture import Bringing
from tierd.kernels.gpu.moe import mixture
from tierd.kernels.gpu.pages import value_dtype
from tierd.kernels.gpu.products import product_plan, rows_plan
from tierd.kernels.layout import PageLayout

if TYPE_CHECKING:
    from tierd.kernels.cpu.step import DecoderShape

Chosen = Callable[[int, Tensor], None]  # puts what a layer reads into the inputs when the queries are known


class Passed(NamedTuple):
    """A pass that has been computed: logits, and what the final norm takes of every row."""

    logits: Tensor
    branch: Tensor
    residual: Tensor | None
    masses: Tensor  # of the observed rows, see `attention.observe`


class Network:
    """The launches of one model. `dtype` is that of activations. Temporaries go back to torch's allocator meanwhile."""

    def __init__(
        self, shape: DecoderShape, ends: Ends, layout: PageLayout, angles: AngleTables, dtype: torch.dtype
    ) -> None:
        self.shape, self.ends, self.layout, self.dtype = shape, ends, layout, dtype
        self._angles = angles
        self._page_dtype = value_dtype(layout, dtype)

    def embed(self, inputs: Inputs) -> Tensor:
        """What the first layer takes of each row."""
        inputs.masses.zero_()  # here, so that a captured step begins with it
        if self.ends.embed is None:
            return inputs.embedded
        return rows_plan(inputs.tokens, self.ends.embed, self.dtype).run()

    def layer(
        self, index: int, layer: GpuLayer, branch: Tensor, residual: Tensor | None, inputs: Inputs,
        chosen: Chosen | None, bringing: Bringing | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The branch, which the last block adds to the residual, and the residual after a layer. `bringing`: of experts
        that are not on the card: then the host is asked, and nothing can be captured."""
        shape = self.shape
        normed, residual = plan_add_norm(branch, layer.attn_norm, shape.norm_eps, residual).run()
        attended = self._attend(index, layer, normed, inputs, chosen)
        branch = product_plan(attended, layer.o, layer.o_bias).run()
        normed, residual = plan_add_norm(branch, layer.mlp_norm, shape.norm_eps, residual).run()
        if layer.experts is not None:
            return mixture(shape, index, layer, normed, residual, bringing), residual
        both = product_plan(normed, layer.gate_up, layer.gate_up_bias).run()
        return product_plan(plan_swiglu(both).run(), layer.down, layer.down_bias).run(), residual

    def head(self, branch: Tensor, residual: Tensor | None, inputs: Inputs) -> Passed:
        """The end of a pass."""
        if inputs.sizes.logits:
            normed = self.normed(branch, residual, inputs.logit_rows)
            logits = product_plan(normed, self.ends.head, None, torch.float32).run()
        else:
            logits = torch.empty((0, self.shape.vocab), dtype=torch.float32, device=branch.device)
        return Passed(logits, branch, residual, inputs.masses)

    def normed(self, branch: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        """What the head takes of some rows."""
        wanted = torch.index_select(branch, 0, rows)
        rest = None if residual is None else torch.index_select(residual, 0, rows)
        return plan_add_norm(wanted, self.ends.final_norm, self.shape.norm_eps, rest).run().normed

    def _attend(
        self, index: int, layer: GpuLayer, normed: Tensor, inputs: Inputs, chosen: Chosen | None
    ) -> Tensor:
        shape, layout = self.shape, self.layout
        fused = product_plan(normed, layer.qkv, layer.qkv_bias, self._page_dtype).run()
        qkv = fused.view(len(fused), -1, shape.head_dim)
        queries, keys = self._rotated(layer, qkv, shape.kv_heads, inputs.angles)
        values = qkv[:, shape.heads + shape.kv_heads :]
        sink_queries = self._rotated(layer, qkv, 0, inputs.seen_from).queries if inputs.sizes.sink_rows else None
        write(index, keys, values, inputs, layout)
        if chosen is not None:
            chosen(index, queries)
        if inputs.sizes.observed and not shape.windows[index]:
            observe(index, queries, inputs, layout, layer.sink_logits)
        turned = Turned(queries, keys, values, sink_queries)
        attended = attend(index, turned, inputs, layout, shape.windows[index], layer.sink_logits)
        return attended.view(len(attended), -1).to(self.dtype)

    def _rotated(self, layer: GpuLayer, qkv: Tensor, kv_heads: int, angles: Tensor) -> Rotated:
        shape, tables = self.shape, self._angles
        return plan_rotate(
            qkv, shape.heads, kv_heads, tables.cos, tables.sin, angles, layer.qk_norms, shape.norm_eps
        ).run()
