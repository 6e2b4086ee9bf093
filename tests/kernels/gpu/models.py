"""Tiny decoders on the card's kernels, beside the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.kernels.decoders import Inputs, TinyModel
from tests.kernels.gpu.cases import aligned
from tierd.kernels import reference
from tierd.kernels.cpu.weights import LayerWeights
from tierd.kernels.gpu.decoder import GpuDecoder
from tierd.kernels.gpu.experts import GpuExperts
from tierd.kernels.gpu.layers import GpuLayer, load_ends

CPU = torch.device("cpu")


def on_card(model: TinyModel, dtype: torch.dtype = torch.float32, max_rows: int = 64, **more: Any) -> GpuDecoder:
    """The model, under the interpreter."""
    layers = [GpuLayer.load(layer, CPU, dtype, experts_of(model, layer, dtype)) for layer in model.layers]
    ends = load_ends(model.embed, model.final_norm, model.head, CPU, dtype)
    return GpuDecoder(model.shape, layers, ends, model.layout, model.cos, model.sin, max_rows, dtype, **more)


def experts_of(model: TinyModel, layer: LayerWeights, dtype: torch.dtype) -> GpuExperts | None:
    """Those of a layer that are there; None of a dense one."""
    if layer.router is None or model.shape.experts is None:
        return None
    return GpuExperts.load(layer.experts, model.shape.experts, model.shape.hidden, CPU, dtype)


def aligned_arena(model: TinyModel, slots: int) -> np.ndarray:
    """Stale memory, aligned as a card's is."""
    memory = aligned(slots * model.layout.record_bytes, torch.uint8).numpy()
    memory[:] = 0xFF
    return memory.reshape(slots, model.layout.record_bytes)


def expected(model: TinyModel, arena: np.ndarray, inputs: Inputs) -> np.ndarray:
    """The reference's logits; writes its arena."""
    return reference.forward(
        model.shape, model.layers, model.embed, model.final_norm, model.head, model.layout, model.cos, model.sin,
        arena, **inputs,
    ).numpy()  # fmt: skip
