"""Every kernel of the card on fresh random inputs, against its twin in float64, with poisoned outputs; for `gpu.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierd.kernels import reference
from tierd.kernels.gpu.decode import plan_decode
from tierd.kernels.gpu.embed import plan_embed
from tierd.kernels.gpu.extend import plan_extend
from tierd.kernels.gpu.fused import plan_add_norm, plan_rotate, plan_swiglu
from tierd.kernels.gpu.gather import plan_gather, plan_scatter
from tierd.kernels.gpu.launch import Plan
from tierd.kernels.gpu.matmul import plan_matmul
from tierd.kernels.gpu.merge import plan_merge
from tierd.kernels.gpu.packing import GpuMatrix
from tierd.kernels.gpu.pages import PAGE_DTYPES, PageTable, base_of
from tierd.kernels.gpu.sample import plan_sample
from tierd.kernels.gpu.shift import plan_shift
from tierd.kernels.gpu.write import Spans, plan_write
from tierd.kernels.layout import PageLayout
from tierd.kernels.packing import WeightFormat

LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Scale:
    """How large the inputs are."""

    head_dim: int
    kv_heads: int
    group: int
    lengths: tuple[int, ...]
    hidden: int
    rows: tuple[int, ...]  # of products
    vocab: int


FULL = Scale(128, 8, 4, (0, 1, 15, 16, 17, 511, 512, 513, 2000), 4096, (1, 7, 32, 64, 200), 128256)
TINY = Scale(32, 1, 2, (0, 17), 64, (1,), 50)


class Case:
    """One comparison. `error` is the largest difference over the bound that rounding explains: right up to 1."""

    def __init__(self, device: torch.device, scale: Scale, seed: int) -> None:
        self.device, self.scale = device, scale
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def matrix(self, format: WeightFormat, rows: int, cols: int) -> GpuMatrix:
        return random_matrix(format, rows, cols, self.device, self.generator)


def random_matrix(
    format: WeightFormat, rows: int, cols: int, device: torch.device, generator: torch.Generator | None = None
) -> GpuMatrix:
    """Weights of about 1 / sqrt(cols), made on the device."""
    panels, pairs, four = -(-rows // 32), -(-cols // 64), format is WeightFormat.INT4_G32
    step = 1 / math.sqrt(cols) / (4 if four else 64)
    quants = torch.randint(
        0, 256, (panels, pairs, 32 if four else 64, 32), dtype=torch.uint8, device=device, generator=generator
    )
    bits = torch.tensor([step, -7.5 * step if four else step], dtype=torch.float16).view(torch.int16).int() & 0xFFFF
    word = int(bits[0]) | int(bits[1]) << 16
    word -= (word >> 31) << 32
    shape = (panels, pairs, 2, 32) if four else (panels, pairs, 32)
    return GpuMatrix(format, rows, cols, quants, torch.full(shape, word, dtype=torch.int32, device=device))


def poisoned(plan: Plan[Any]) -> Any:
    """Runs a plan whose buffers hold NaN before."""
    for buffer in plan.buffers:
        buffer.fill_(math.nan if buffer.is_floating_point() else 77)
    return plan.run()


def paged(case: Case, format: str, lengths: Sequence[int]) -> tuple[PageLayout, Tensor, PageTable, list[list[int]]]:
    """Random pages, scattered; what sequences do not hold is random as well."""
    scale, device = case.scale, case.device
    layout = PageLayout(LAYERS, scale.kv_heads, scale.head_dim, format)
    counts = [-(-length // 16) for length in lengths]
    slots = sum(counts) + 1
    block = torch.zeros(slots * layout.record_bytes + 64, dtype=torch.uint8, device=device)
    memory = block[-block.data_ptr() % 64 :][: slots * layout.record_bytes].view(slots, -1)
    values = memory[:, : layout.payload_bytes].view(PAGE_DTYPES[format])
    values.copy_(case.draw(*values.shape, dtype=torch.float32))
    order = torch.randperm(slots, device=device, generator=case.generator).tolist()
    addresses = [memory.data_ptr() + slot * layout.record_bytes for slot in order]
    pages, used = [], 0
    for count in counts:
        pages.append(addresses[used : used + count])
        used += count
    return layout, memory, PageTable.build(layout, pages, lengths, [memory], base_of(layout, device)), pages


def attention(case: Case) -> Iterator[tuple[str, float]]:
    scale = case.scale
    heads, eps = scale.kv_heads * scale.group, 2.0**-7
    layout, memory, table, pages = paged(case, "bf16", scale.lengths)
    queries = case.draw(len(scale.lengths), heads, scale.head_dim)
    factor = 1 / math.sqrt(scale.head_dim)
    for name, options in (("", {}), (" window cap sinks", {"window": 40, "soft_cap": 30.0, "sinks": case.draw(heads)})):
        ours = poisoned(plan_decode(queries, table, LAYER, want_mass=True, **options))
        out, lse, mass = reference.decode(
            queries, [memory], layout, LAYER, pages, scale.lengths, scale=factor, **options
        )
        errors = ratio(ours.out, out, 5 * eps), ratio(ours.lse, lse, 1e-4), ratio(ours.mass, mass, 1e-4)
        yield f"decode{name}", max(errors)
    own = torch.full((len(scale.lengths),), 20, dtype=torch.int32, device=case.device)
    ours = poisoned(plan_decode(queries, table, LAYER, windows=own))
    out, lse, _ = reference.decode(queries, [memory], layout, LAYER, pages, scale.lengths, scale=factor, window=20)
    yield "decode windows of rows", max(ratio(ours.out, out, 5 * eps), ratio(ours.lse, lse, 1e-4))
    counts = [3, 20][: len(scale.lengths)] + [1] * (len(scale.lengths) - 2)
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    rows = case.draw(sum(counts), heads, scale.head_dim)
    keys, values = (case.draw(sum(counts), scale.kv_heads, scale.head_dim) for _ in range(2))
    for name, window in (("extend", 0), ("extend windows of rows", 20)):
        own = torch.full((sum(counts),), window, dtype=torch.int32, device=case.device)
        options = {"windows": own} if window else {}
        chunk = poisoned(plan_extend(rows, keys, values, offsets.to(case.device), max(counts), table, LAYER, **options))
        out, lse = reference.extend(
            rows, keys, values, offsets.tolist(), [memory], layout, LAYER, pages, scale.lengths, factor, window=window
        )
        yield name, max(ratio(chunk.out, out, 5 * eps), ratio(chunk.lse, lse, 1e-4))
    parts, lses = case.draw(3, 5, heads, scale.head_dim), case.draw(3, 5, heads, dtype=torch.float32)
    merged = poisoned(plan_merge(parts, lses))
    out, lse = reference.merge(parts, lses)
    yield "merge", max(ratio(merged.out, out, 5 * eps), ratio(merged.lse, lse, 1e-5))


def memory_moves(case: Case) -> Iterator[tuple[str, float]]:
    layout, memory, table, pages = paged(case, "bf16", [40])
    twin, base = memory.clone(), base_of(layout, case.device)
    spans = [(pages[0][0], 0, 3, 13), (pages[0][1], 13, 0, 4)]
    keys, values = (case.draw(17, layout.kv_heads, layout.head_dim) for _ in range(2))
    plan_write(keys, values, Spans.build(layout, spans, 17, [memory], base), LAYER).run()
    moved = [(address - memory.data_ptr() + twin.data_ptr(), *rest) for address, *rest in spans]
    reference.write(keys, values, [twin], layout, LAYER, moved)  # type: ignore[arg-type]
    yield "write", 0.0 if torch.equal(memory, twin) else math.inf
    size = layout.payload_bytes // 64 * 64
    records = torch.zeros((len(pages[0]), layout.record_bytes), dtype=torch.uint8, device=case.device)
    addresses = table.pages
    gathered = poisoned(plan_gather(addresses, records, size)).clone()
    wanted = torch.full_like(records, 77)
    reference.gather([memory], pages[0], wanted, size)
    yield "gather", 0.0 if torch.equal(gathered[:, :size], wanted[:, :size]) else math.inf
    memory.zero_()
    plan_scatter(gathered, addresses, size).run()
    again = torch.zeros_like(records)
    reference.gather([memory], pages[0], again, size)
    yield "scatter", 0.0 if torch.equal(again[:, :size], gathered[:, :size]) else math.inf
    angles = case.draw(len(pages[0]), layout.head_dim // 2, dtype=torch.float32)
    before = memory.clone()
    plan_shift(addresses, base, layout, LAYER, angles.cos(), angles.sin()).run()
    places = [address - memory.data_ptr() + before.data_ptr() for address in pages[0]]
    reference.shift([before], places, layout, LAYER, angles.cos(), angles.sin())
    ours, theirs = (m[:, : layout.payload_bytes].view(torch.bfloat16) for m in (memory, before))
    yield "shift", ratio(ours, theirs.double(), 0.05)


def products(case: Case) -> Iterator[tuple[str, float]]:
    hidden = case.scale.hidden
    for format in (WeightFormat.INT4_G32, WeightFormat.INT8_G32):
        matrix = case.matrix(format, hidden + 32, hidden)
        weights = reference.gpu_weights(matrix.quants, matrix.scales, matrix.rows, matrix.cols)
        for rows in case.scale.rows:
            x = case.draw(rows, hidden)
            ours = poisoned(plan_matmul(x, matrix, out_dtype=torch.float32))
            yield f"matmul {format} x{rows}", ratio(ours, x.double() @ weights.T, 0.05)
        tokens = torch.randint(0, matrix.rows, (9,), dtype=torch.int32, device=case.device, generator=case.generator)
        rows_of = poisoned(plan_embed(tokens, matrix, torch.float32))
        yield f"embed {format}", ratio(rows_of, weights[tokens.long()], 1e-6)


def fused(case: Case) -> Iterator[tuple[str, float]]:
    scale = case.scale
    x, residual, weight = case.draw(5, scale.hidden), case.draw(5, scale.hidden), case.draw(scale.hidden)
    normed, total = reference.add_norm(x, weight, 1e-6, residual)
    ours = poisoned(plan_add_norm(x, weight, 1e-6, residual))
    yield "add_norm", max(ratio(ours.normed, normed, 0.1), ratio(ours.residual, total, 1e-6))
    heads = scale.kv_heads * scale.group
    qkv = case.draw(5, heads + 2 * scale.kv_heads, scale.head_dim)
    angles = case.draw(50, scale.head_dim // 2, dtype=torch.float32)
    positions = torch.arange(5, dtype=torch.int32, device=case.device) * 9
    norms = (case.draw(scale.head_dim), case.draw(scale.head_dim))
    turned = poisoned(plan_rotate(qkv, heads, scale.kv_heads, angles.cos(), angles.sin(), positions, norms, 1e-6))
    queries, keys = reference.rotate(qkv, heads, scale.kv_heads, angles.cos(), angles.sin(), positions, norms, 1e-6)
    yield "rotate", max(ratio(turned.queries, queries, 0.1), ratio(turned.keys, keys, 0.1))
    both = case.draw(5, 2 * scale.hidden)
    yield "swiglu", ratio(poisoned(plan_swiglu(both)), reference.swiglu(both), 0.1)


def sampling(case: Case) -> Iterator[tuple[str, float]]:
    rows = 4
    logits = case.draw(rows, case.scale.vocab, dtype=torch.float32) * 3

    def vector(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=case.device)

    how = (
        vector(0.0, 1.0, 0.7, 1.3), vector(0, 0, 40, 5, dtype=torch.int32), vector(1.0, 0.9, 1.0, 0.8),
        vector(0.0, 0.0, 0.05, 0.0), vector(0.1, 0.3, 0.5, 0.7),
    )  # fmt: skip
    ours, twin = poisoned(plan_sample(logits, *how)), reference.sample(logits, *how)
    # A draw that falls on the edge between two tokens may go to either: in float32 the sums differ in the last places.
    yield "sample", float((ours != twin).sum()) / 2


def ratio(ours: Tensor, judge: Tensor, bound: float) -> float:
    """Largest difference over the bound; infinite where one is not finite and the other is."""
    finite = judge.isfinite()
    if not torch.equal(finite, ours.isfinite()):
        return math.inf
    difference = (ours.double() - judge.double())[finite].abs()
    return float(difference.max()) / bound if difference.numel() else 0.0


GROUPS: tuple[Callable[[Case], Iterator[tuple[str, float]]], ...] = (attention, memory_moves, products, fused, sampling)


def compare_all(device: torch.device, scale: Scale, seed: int) -> list[tuple[str, float]]:
    """(kernel, error) of every kernel; an error above 1 is a wrong kernel."""
    return [found for group in GROUPS for found in group(Case(device, scale, seed))]
