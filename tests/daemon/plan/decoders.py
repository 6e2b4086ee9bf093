"""A small decoder, and the memory that it allocates."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import numpy as np

from tierd.daemon.engine.model.load import shape_of
from tierd.daemon.models.spec import ModelSpec
from tierd.kernels.cpu.step import CpuDecoder
from tierd.kernels.cpu.weights import ExpertWeights, LayerWeights, padded
from tierd.kernels.layout import PageLayout
from tierd.kernels.packing import PackedMatrix, WeightFormat, packed_bytes


def tiny_decoder(spec: ModelSpec, rows: int, threads: int) -> CpuDecoder:
    """A decoder whose weights are zero."""
    return CpuDecoder(*_parts(spec), rows, threads)


def allocated_bytes(spec: ModelSpec, rows: int, threads: int) -> int:
    """Bytes of numpy arrays that a decoder makes for itself: weights and position tables are there before."""
    parts = _parts(spec)
    CpuDecoder.warm_up(lambda _done, _total: None)  # compiling allocates as well
    tracemalloc.start()
    try:
        with CpuDecoder(*parts, rows, threads):
            arrays = [tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)]
            found = tracemalloc.take_snapshot().filter_traces(arrays)
        return sum(trace.size for trace in found.traces)
    finally:
        tracemalloc.stop()


def _parts(spec: ModelSpec) -> tuple[Any, ...]:
    """Shape, weights, layout and position tables."""

    def matrix(rows: int, cols: int) -> PackedMatrix:
        size = packed_bytes(WeightFormat.FP32, rows, cols)
        return PackedMatrix(WeightFormat.FP32, rows, cols, np.zeros(size, np.uint8))

    def vector(wanted: bool, length: int) -> Any:
        return np.ones(length, np.float32) if wanted else None

    attended = spec.heads * spec.head_dim
    fused = attended + 2 * spec.kv_heads * spec.head_dim
    norm = np.ones(spec.hidden, np.float32)
    layers = [
        LayerWeights(
            norm, matrix(fused, spec.hidden), matrix(spec.hidden, attended), norm,
            matrix(2 * spec.intermediate, spec.hidden), matrix(spec.hidden, spec.intermediate),
            qkv_bias=vector(spec.qkv_bias, fused), o_bias=vector(spec.o_bias, spec.hidden),
            q_norm=vector(spec.qk_norm, spec.head_dim), k_norm=vector(spec.qk_norm, spec.head_dim),
            sink_logits=vector(spec.sink_logits, spec.heads),
            gate_up_bias=vector(spec.mlp_bias, 2 * spec.intermediate), down_bias=vector(spec.mlp_bias, spec.hidden),
        )
        for _ in range(spec.num_layers)
    ]  # fmt: skip
    if (experts := spec.experts) is not None:
        one = ExpertWeights(
            matrix(2 * experts.intermediate, spec.hidden), matrix(spec.hidden, experts.intermediate),
            vector(experts.bias, padded(2 * experts.intermediate)), vector(experts.bias, padded(spec.hidden)),
        )  # fmt: skip
        for index in experts.layers:
            layers[index] = dataclasses.replace(
                layers[index], gate_up=None, down=None, router=matrix(experts.count, spec.hidden),
                router_bias=vector(experts.bias, experts.count), experts=(one,) * experts.count,
            )  # fmt: skip
    table = np.ones((16, spec.head_dim // 2), np.float32)
    head = matrix(spec.vocab, spec.hidden)
    layout = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim)
    return shape_of(spec), layers, head, norm, head, layout, table, table
