"""Experts that come to the card over its link: what a miss costs beside the link, a hit, and the processors' way; for
`gpu.py`."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tests.bench.gpu_mixture import MODELS
from tests.bench.gpu_weights import fill
from tierd.daemon.engine.model.cached_experts import CachedExperts, ExpertMemory, ExpertNeeds
from tierd.daemon.engine.model.card_memory import Card, pieces_of
from tierd.daemon.engine.model.misses import ComputeCost, Processors
from tierd.daemon.models.catalog import RecordEntry, TensorEntry
from tierd.daemon.models.placement_card import expert_stages
from tierd.kernels.cpu.expert_rows import ExpertRows
from tierd.kernels.cpu.weights import DecoderShape, ExpertsShape, ExpertWeights
from tierd.kernels.gpu.experts import GpuExperts
from tierd.kernels.gpu.layers import place_bytes
from tierd.kernels.gpu.packing import GpuMatrix
from tierd.kernels.gpu.products import to_card
from tierd.kernels.packing import PackedMatrix, WeightFormat, packed_bytes
from tierd.tiers.cuda_copies import CudaCopies
from tierd.tiers.cuda_memory import pinned_array
from tierd.tiers.mover import Mover
from tierd.tiers.weights_file import WeightFile

if TYPE_CHECKING:
    from tests.bench.gpu_suite import Bench

EXPERTS, DEADLINE_S = 16, 60.0
FORMAT = WeightFormat.INT4_G32


def entry_of(number: int, hidden: int, shape: ExpertsShape) -> RecordEntry:
    """The record of an expert, without biases."""
    tensors, at = [], 0
    for name, rows, cols in (("gate_up", 2 * shape.intermediate, hidden), ("down", hidden, shape.intermediate)):
        size = packed_bytes(FORMAT, rows, cols)
        tensors.append(TensorEntry(name, FORMAT.value, rows, cols, at, size))
        at += -(-size // 64) * 64
    return RecordEntry(f"expert.0.{number}", 0, -(-at // 4096) * 4096, "", tuple(tensors))


def weights_of(entry: RecordEntry, memory: np.ndarray) -> ExpertWeights:
    """The same as kernels of the processors take it."""
    gate_up, down = (
        PackedMatrix(FORMAT, one.rows, one.cols, memory[one.offset : one.offset + one.bytes]) for one in entry.tensors
    )
    return ExpertWeights(gate_up, down)


def run(bench: Bench, dry: bool) -> None:
    """A layer's experts, half of which have a place."""
    models = {"tiny": (64, ExpertsShape(4, 2, 64, True, (0,)))} if dry else MODELS
    for name, (hidden, found) in models.items():
        shape = replace(found, count=min(found.count, EXPERTS), bias=False)
        entries = [entry_of(number, hidden, shape) for number in range(shape.count)]
        pieces, size = pieces_of(entries[0]), entries[0].bytes
        memories = [pinned_array(bench.gpu, size) for _ in entries]
        for number, memory in enumerate(memories):
            fill(memory, pieces, number)
        _fetch(bench, dry, name, hidden, shape, entries, memories)


def _fetch(
    bench: Bench, dry: bool, name: str, hidden: int, shape: ExpertsShape, entries: list[RecordEntry],
    memories: list[np.ndarray],
) -> None:  # fmt: skip
    gpu, stream = bench.gpu, bench.gpu.new_stream()
    card = Card(gpu, stream, bench.device, torch.bfloat16, None if dry else torch.cuda.ExternalStream(stream))
    copies = CudaCopies(gpu, stream)
    mover = Mover(8, copy=copies.copy, crossing=copies)
    table = GpuExperts(shape, hidden, bench.device, torch.bfloat16)
    pieces, size = pieces_of(entries[0]), entries[0].bytes
    needs = ExpertNeeds(shape.count // 2, place_bytes(pieces), expert_stages(shape.used), size, 0, 0)
    memory = ExpertMemory(card, needs, None)
    host = {entry.name: one for entry, one in zip(entries, memories, strict=True)}
    experts = CachedExperts(
        card, mover, entries, {0: table}, lambda _number: False, host, memory, _no_file, None, overlap=True,
        clock=time.monotonic,
    )  # fmt: skip
    try:
        link = _link_bytes_per_s(bench, card, memories[0], dry)
        missed, there = [], []
        for turn in range(1 if dry else 8):
            wanted = [(turn * shape.used + n) % shape.count for n in range(shape.used)]
            missed.append(_bring(experts, wanted, dry))
            there.append(_bring(experts, wanted, dry))
            for number in wanted:
                _check(table, number, weights_of(entries[number], memories[number]), bench.device)
        miss_s, hit_s = float(np.median(missed)), float(np.median(there))
        floor_s = shape.used * size / link
        what = f"{name} {FORMAT}, {shape.used} experts"
        bench.add("experts", f"{what} over the link", miss_s * 1e3, "ms", floor_s / miss_s, 0.9)
        bench.add("experts", f"{what} that are there", hit_s * 1e6, "us")
        cost = _processors(hidden, shape, weights_of(entries[0], memories[0]))
        for rows in (1, 8):
            bench.add("experts", f"{name}, {rows} rows on the processors", cost.of(rows) * 1e3, "ms")
    finally:
        experts.close()
        mover.close()
        copies.close()
        gpu.free_stream(stream)


def _bring(experts: CachedExperts, wanted: list[int], dry: bool) -> float:
    """Seconds until the kernels that lay them out have run."""
    experts.begin(1)
    experts.deadline_s = time.monotonic() + DEADLINE_S
    start = time.perf_counter()
    for _ in experts.bring(0, dict.fromkeys(wanted, 1), {}, _no_rows):
        pass
    if not dry:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _check(table: GpuExperts, number: int, weights: ExpertWeights, device: torch.device) -> None:
    found = table._held[number]
    assert found is not None, f"expert {number} is not there"
    for matrix, packed in ((found.gate_up, weights.gate_up), (found.down, weights.down)):
        right = to_card(packed, device, torch.bfloat16)
        assert isinstance(matrix, GpuMatrix) and isinstance(right, GpuMatrix)
        if not torch.equal(matrix.quants, right.quants) or not torch.equal(matrix.scales, right.scales):
            raise AssertionError(f"expert {number} is another one on the card than in CPU memory")


def _processors(hidden: int, shape: ExpertsShape, weights: ExpertWeights) -> ComputeCost:
    decoder = DecoderShape(1, hidden, hidden, 1, 1, 16, 16, 1e-5, False, (0,), shape)
    processors = Processors(ExpertRows(decoder, 64, os.cpu_count() or 1))
    processors.rows.keep(0, 0, weights)
    processors.probe(0, 0, hidden)
    processors.rows.close()
    assert processors.cost is not None
    return processors.cost


def _link_bytes_per_s(bench: Bench, card: Card, source: np.ndarray, dry: bool) -> float:
    """Of one copy, the best of some."""
    dest, event, best = card.memory(source.nbytes), bench.gpu.new_event(), 0.0
    for _ in range(1 if dry else 10):
        start = time.perf_counter()
        bench.gpu.copy(dest.data_ptr(), int(source.ctypes.data), source.nbytes, card.compute)
        bench.gpu.record(event, card.compute)
        bench.gpu.synchronize(event)
        best = max(best, source.nbytes / (time.perf_counter() - start))
    bench.gpu.free_event(event)
    return best


def _no_file() -> WeightFile:
    raise AssertionError("nothing lies on a disk")


def _no_rows(expert: int) -> np.ndarray:
    raise AssertionError(f"nobody computes expert {expert}")
