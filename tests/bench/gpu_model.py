"""A whole model with random weights on the card: decode, prefill, the first token of a long prefix; for `gpu.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.bench.gpu_kernels import random_matrix
from tierd.kernels.gpu.decoder import Draws, GpuDecoder
from tierd.kernels.gpu.graphs import CudaCapturer
from tierd.kernels.gpu.layers import Ends, GpuLayer
from tierd.kernels.gpu.products import Matrix, matrix_bytes
from tierd.kernels.layout import PageLayout
from tierd.kernels.packing import WeightFormat
from tierd.kernels.rows import BASE_TOKENS, Bound
from tierd.tiers.cuda_copies import CudaCopies
from tierd.tiers.cuda_memory import DeviceBlock, pinned_array
from tierd.tiers.gpu import DeviceRow


@dataclass(frozen=True)
class Shape:
    """As `kernels.cpu.step.DecoderShape`, which needs Numba."""

    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    windows: tuple[int, ...]
    norm_eps: float = 1e-5
    qk_norm: bool = False


LLAMA3_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256, (0,) * 32)
TINY = Shape(1, 64, 64, 2, 1, 16, 40, (0,))


@dataclass(frozen=True)
class Plan:
    """What is run. Contexts in tokens."""

    shape: Shape
    batches: tuple[tuple[int, int], ...]  # (sequences, context)
    steps: int
    prefix: int
    chunk: int
    pages: int  # of the arena


FULL = Plan(LLAMA3_8B, ((1, 1024), (8, 1024), (32, 1024), (8, 4096), (1, 16384)), 30, 16384, 2048, 2112)
DRY = Plan(TINY, ((1, 17), (2, 16)), 1, 32, 16, 8)


class Model:
    """A decoder over an arena on the card."""

    def __init__(self, bench: Any, plan: Plan, four_bits: bool, dry: bool) -> None:
        self.bench, self.plan, self.shape, device = bench, plan, plan.shape, bench.device
        self.dtype = torch.bfloat16
        shape = plan.shape

        def matrix(rows: int, cols: int, dense: bool) -> Matrix:
            if dense:
                return (torch.randn((rows, cols), device=device) / cols**0.5).to(self.dtype)
            return random_matrix(WeightFormat.INT4_G32, rows, cols, device)

        ones = torch.ones(shape.hidden, device=device)
        fused = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.layers = [
            GpuLayer(
                ones, matrix(fused, shape.hidden, not four_bits),
                matrix(shape.hidden, shape.heads * shape.head_dim, not four_bits), ones,
                matrix(2 * shape.intermediate, shape.hidden, not four_bits),
                matrix(shape.hidden, shape.intermediate, not four_bits),
            )
            for _ in range(shape.num_layers)
        ]  # fmt: skip
        table = matrix(shape.vocab, shape.hidden, True)
        head = random_matrix(WeightFormat.INT8_G32, shape.vocab, shape.hidden, device) if four_bits else table
        self.weight_bytes = sum(layer.nbytes for layer in self.layers) + matrix_bytes(head)
        self.layout = PageLayout(shape.num_layers, shape.kv_heads, shape.head_dim, "bf16")
        frequencies = 500000.0 ** (-np.arange(shape.head_dim // 2) / shape.head_dim * 2)
        angles = np.outer(np.arange(plan.prefix + 64), frequencies)
        self.stream = bench.gpu.new_stream()
        if not dry:
            torch.cuda.synchronize()
        self.decoder = GpuDecoder(
            shape, self.layers, Ends(table, ones, head), self.layout,  # type: ignore[arg-type]
            np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), max(plan.chunk, 64), self.dtype,
            capture=None if dry else CudaCapturer(device),
            stream=None if dry else torch.cuda.ExternalStream(self.stream, device), note=print,
        )  # fmt: skip
        record = self.layout.record_bytes
        self.block = DeviceBlock(bench.gpu, plan.pages * record, plan.pages * record)
        self.memories = [DeviceRow(self.block.address, plan.pages * record)]
        self.addresses = self.block.address + np.random.default_rng(0).permutation(plan.pages) * record

    def close(self) -> None:
        self.decoder.close()
        self.block.close()
        self.bench.gpu.free_stream(self.stream)

    def rows(self, sequences: int, first: int, count: int) -> dict[str, np.ndarray]:
        """`count` rows of each sequence from position `first` on."""
        held = -(-(first + count) // 16)
        rows = sequences * count
        return {
            "tokens": np.random.default_rng(first).integers(0, self.shape.vocab, rows).astype(np.int32),
            "positions": np.tile(np.arange(first, first + count, dtype=np.int32), sequences),
            "row_seq": np.repeat(np.arange(sequences, dtype=np.int32), count),
            "pages": self.addresses[: sequences * held],
            "page_offsets": np.arange(sequences + 1, dtype=np.int32) * held,
            "logit_rows": np.arange(count - 1, rows, count, dtype=np.int32),
        }

    def decode(self, sequences: int, context: int) -> float:
        """Seconds of a step, drawing included: greedy tokens."""
        zeros, ones = np.zeros(sequences, np.float32), np.ones(sequences, np.float32)
        draws = Draws(zeros, np.zeros(sequences, np.int32), ones, zeros, zeros)
        rows = self.rows(sequences, context - 1, 1)
        return self._step_s(partial(self.decoder.draw, self.memories, draws=draws, **rows))

    def bounded(self, sequences: int, context: int, window: int) -> float:
        """Seconds of a step of rows that see 4 sinks and a window; its logits come to the host."""
        base = (context - window) // BASE_TOKENS * BASE_TOKENS
        held = 1 - (base - context) // 16
        rows = self.rows(sequences, context - 1, 1) | {
            "pages": self.addresses[: sequences * held],
            "page_offsets": np.arange(sequences + 1, dtype=np.int32) * held,
            "bounds": np.tile(np.array(Bound(window, 4, 1, base), np.int32), (sequences, 1)),
        }
        return self._step_s(partial(self.decoder.forward, self.memories, **rows))

    def _step_s(self, step: Callable[[], object]) -> float:
        """The median, but for the first two: they compile, and are captured."""
        found = []
        for _ in range(self.plan.steps + 2):
            start = time.perf_counter()
            step()
            found.append(time.perf_counter() - start)
        return sorted(found[2:] or found)[len(found[2:]) // 2]

    def prefill(self, tokens: int) -> float:
        """Seconds for a prompt of one sequence, in chunks."""
        start = time.perf_counter()
        for first in range(0, tokens, self.plan.chunk):
            self.decoder.forward(self.memories, **self.rows(1, first, min(self.plan.chunk, tokens - first)))
        return time.perf_counter() - start


def run(bench: Any, dry: bool, directory: Path) -> None:
    """All of it, with int4 weights and with bf16 ones."""
    plan = DRY if dry else FULL
    for four_bits in (True, False):
        model = Model(bench, plan, four_bits, dry)
        name = "int4" if four_bits else "bf16"
        try:
            model.prefill(plan.chunk)  # compiles
            for sequences, context in plan.batches:
                spent_s = model.decode(sequences, context)
                moved = model.weight_bytes + sequences * context * model.layout.payload_bytes // 16
                share = moved / bench.copy_bytes_per_s / spent_s
                target = 0.75 if four_bits and sequences == 1 and context <= 1024 else 0.0
                what = f"{name} decode {sequences} x {context}"
                bench.add("model", what, sequences / spent_s, "tokens/s", share, target)
                window = min(1020, context // 2)
                rate = sequences / model.bounded(sequences, context, window)
                bench.add("model", f"{what}, sinks=4,window={window}", rate, "tokens/s")
            cold_s = model.prefill(plan.prefix)
            matrices = [m for layer in model.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
            weights = sum(m.numel() if isinstance(m, torch.Tensor) else m.rows * m.cols for m in matrices)
            attention = 2 * plan.shape.num_layers * plan.shape.heads * plan.shape.head_dim * plan.prefix**2
            flops = (2 * weights * plan.prefix + attention) / cold_s
            bench.add("model", f"{name} prefill of {plan.prefix}", flops / 1e12, "TFLOP/s", flops / bench.flops)
            bench.add("model", f"{name} first token of {plan.prefix}, cold", cold_s, "s")
            _cached(bench, model, name, directory, dry)
            stats = model.decoder.graph_stats
            steps = stats.replayed + stats.eager
            bench.add("model", f"{name} decode steps from graphs", stats.replayed, f"of {steps}")
        finally:
            model.close()
            del model


def _cached(bench: Any, model: Model, name: str, directory: Path, dry: bool) -> None:
    """The first token when the prefix is on the card, in pinned memory, on the disk."""
    plan, record = model.plan, model.layout.record_bytes
    last = model.rows(1, plan.prefix - 1, 1)
    pages, start = plan.prefix // 16, time.perf_counter()
    model.decoder.forward(model.memories, **last)
    bench.add("model", f"{name} first token of {plan.prefix}, on the card", time.perf_counter() - start, "s")
    copies = CudaCopies(bench.gpu, model.stream)
    host = pinned_array(bench.gpu, pages * record).reshape(pages, record)
    on_card = [DeviceRow(int(address), record) for address in model.addresses[:pages]]
    path = directory / f"tierd-gpu-{os.getpid()}.pages"
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(copies.copy, host, on_card))
            before = host[:: max(1, pages // 8)].copy()
            start = time.perf_counter()
            list(pool.map(copies.copy, on_card, host))
            model.decoder.forward(model.memories, **last)
            first = f"{name} first token of {plan.prefix}"
            bench.add("model", f"{first}, from pinned memory", time.perf_counter() - start, "s")
            path.write_bytes(host.data)
            _to_disk(path)
            file = _open(path)
            try:
                start = time.perf_counter()

                def bring(page: int) -> None:
                    if os.preadv(file, [host[page]], page * record) != record:
                        raise OSError(f"page {page} was cut off")
                    copies.copy(on_card[page], host[page])

                host[:] = 0
                list(pool.map(bring, range(pages)))
                model.decoder.forward(model.memories, **last)
                bench.add("model", f"{first}, from {directory}", time.perf_counter() - start, "s")
            finally:
                os.close(file)
            if not np.array_equal(host[:: max(1, pages // 8)], before):
                raise AssertionError("pages came back from the disk with other bytes")
    finally:
        path.unlink(missing_ok=True)
        copies.close()


def _to_disk(path: Path) -> None:
    """Out of the page cache, so that it is read from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _open(path: Path) -> int:
    """Past the page cache where the file system can; records are whole pages of memory."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY)
