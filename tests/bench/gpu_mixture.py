"""Mixtures of experts on the card: against the twin, and how long a layer's experts take; for `gpu.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.bench.gpu_kernels import Case, poisoned, random_matrix, ratio
from tierd.kernels import reference
from tierd.kernels.cpu.weights import ExpertsShape
from tierd.kernels.gpu.experts import GpuExpert, GpuExperts
from tierd.kernels.gpu.launch import Plan
from tierd.kernels.gpu.moe import experts_plan
from tierd.kernels.gpu.packing import GpuMatrix
from tierd.kernels.gpu.products import Matrix
from tierd.kernels.gpu.routing import plan_route
from tierd.kernels.packing import WeightFormat
from tierd.kernels.reference.decoder import activate

if TYPE_CHECKING:
    from tests.bench.gpu_suite import Bench

MODELS = {
    "Mixtral-8x7B": (4096, ExpertsShape(8, 2, 14336, True, (0,))),
    "Qwen3-30B-A3B": (2048, ExpertsShape(128, 8, 768, True, (0,))),
    "gpt-oss-20b": (2880, ExpertsShape(32, 4, 2880, True, (0,), bias=True, limit=7.0, slope=1.702)),
}
FORMATS = (WeightFormat.INT4_G32, WeightFormat.INT8_G32, None)  # None: dense


def random_experts(
    shape: ExpertsShape, hidden: int, format: WeightFormat | None, device: torch.device,
    generator: torch.Generator | None = None,
) -> tuple[GpuExperts, list[GpuExpert]]:  # fmt: skip
    """The experts of a layer, made on the device."""

    def matrix(rows: int, cols: int) -> Matrix:
        if format is None:
            found = torch.randn((rows, cols), device=device, generator=generator) / cols**0.5
            return found.to(torch.bfloat16)
        return random_matrix(format, rows, cols, device, generator)

    def bias(rows: int) -> Tensor | None:
        return torch.randn(rows, device=device, generator=generator) if shape.bias else None

    width = 2 * shape.intermediate
    found = [
        GpuExpert(matrix(width, hidden), matrix(hidden, shape.intermediate), bias(width), bias(hidden))
        for _ in range(shape.count)
    ]
    experts = GpuExperts(shape, hidden, device, torch.bfloat16)
    experts.put(dict(enumerate(found)))
    return experts, found


def compare(case: Case) -> Iterator[tuple[str, float]]:
    """Small mixtures with all that kernels know of, for the numbers of rows of the scale."""
    hidden = min(case.scale.hidden, 1024)
    shape = ExpertsShape(6, 3, max(hidden // 4, 32), False, (0,), bias=True, limit=1.0, slope=1.702)
    router = case.draw(shape.count, hidden, dtype=torch.float32) / hidden**0.5
    for format in FORMATS:
        experts, found = random_experts(shape, hidden, format, case.device, case.generator)
        twins: list[Callable[[Tensor], Tensor]] = [_twin(shape, expert) for expert in found]
        for rows in case.scale.rows:
            x = case.draw(rows, hidden)
            routed = poisoned(plan_route(x, router, None, shape.used, shape.renormalized))
            ours = poisoned(experts_plan(x, routed, experts.table, experts.kinds, shape))
            logits = x.double() @ router.double().T
            judge = reference.mixture(x.double(), logits, shape.used, shape.renormalized, twins)
            yield f"mixture {format or 'bf16'} x{rows}", ratio(ours, judge, 0.05)


def _twin(shape: ExpertsShape, expert: GpuExpert) -> Callable[[Tensor], Tensor]:
    """What an expert makes of rows, in float64."""
    gate_up, down = _exact(expert.gate_up), _exact(expert.down)

    def product(x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        return x @ weights.T if bias is None else x @ weights.T + bias.double()

    def run(rows: Tensor) -> Tensor:
        gate, up = product(rows, gate_up, expert.gate_up_bias).chunk(2, -1)
        return product(activate(gate, up, shape), down, expert.down_bias)

    return run


def _exact(matrix: Matrix) -> Tensor:
    if isinstance(matrix, GpuMatrix):
        return reference.gpu_weights(matrix.quants, matrix.scales, matrix.rows, matrix.cols)
    return matrix.double()


def run(bench: Bench, dry: bool) -> None:
    """A layer's experts, router included. The floor: bytes of the experts that some row goes through, or their work."""
    models = {"tiny": (64, ExpertsShape(4, 2, 64, True, (0,)))} if dry else MODELS
    for name, (hidden, shape) in models.items():
        router = torch.randn((shape.count, hidden), device=bench.device) / hidden**0.5
        for format in (WeightFormat.INT4_G32,) if dry else FORMATS:
            experts, found = random_experts(shape, hidden, format, bench.device)
            for rows in (1,) if dry else (1, 8, 64, 2048):
                x = torch.randn((rows, hidden), device=bench.device).to(torch.bfloat16)
                routing = plan_route(x, router, None, shape.used, shape.renormalized)
                computing = experts_plan(x, routing.result, experts.table, experts.kinds, shape)
                launches = (*routing.launches, *computing.launches)
                spent_s = bench.seconds(Plan(computing.result, (), launches).run)
                touched = len(routing.result.experts.unique())
                flops = 2 * rows * shape.used * 3 * hidden * shape.intermediate
                floor_s = max(touched * found[0].nbytes / bench.copy_bytes_per_s, flops / bench.flops)
                what = f"{name} {format or 'bf16'}, {rows} rows, {touched} experts"
                bench.add("mixture", what, spent_s * 1e6, "us", floor_s / spent_s)
            del experts, found
