"""Mixtures of experts on the card: from the normed rows of a layer to what its experts make of them.

    route -> group -> gate_up of every tile -> activate -> down of every tile -> combine

Seven launches, without a word to the host, where all experts are on the card: they are captured with the rest of a
step. Where some are missing the host hears which ones are wanted, and has them brought (`mixture.py`).

What a row gets is the sum over its experts in descending order of probability, each computed from that row alone and
kept in fp32 until then. Twin: `reference.mixture`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from tierd.kernels.gpu.experts import DOWN, GATE_UP, GpuExperts, Kind
from tierd.kernels.gpu.fused import plan_add_norm
from tierd.kernels.gpu.grouped import Shape, grouped_launch
from tierd.kernels.gpu.launch import FLOAT_DTYPES, Launch, Plan, check_contiguous, check_tensor, next_power_of_2
from tierd.kernels.gpu.layers import GpuLayer
from tierd.kernels.gpu.mixture import Bringing, CardExpertSource
from tierd.kernels.gpu.routing import Grouped, HostGroups, Routed, Tiling, plan_group, plan_route

if TYPE_CHECKING:
    from tierd.kernels.cpu.weights import DecoderShape, ExpertsShape, Floats

GUESS_ROWS = 16  # with more rows most experts of a layer are needed, and a guess says nothing
_ACTIVATE_ROWS, _ACTIVATE_COLS, _COMBINE_COLS = 4, 256, 1024


@triton.jit
def _activate_kernel(
    gate_up, tiles, out, part_stride, parts, width, limit, slope,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_LIMIT: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * 3
    i = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    count = tl.load(tile + 2)
    if (tl.load(tile) < 0) | (tl.program_id(2) * ROWS >= count):
        return
    slot = (tl.load(tile + 1) + i).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (i < count)[:, None] & (column < width)[None, :]
    at = gate_up + (slot * 2 * width)[:, None] + column[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
    for part in range(1, parts):
        gate += tl.load(at + part * part_stride, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(at + part * part_stride + width, mask=mask, other=0.0).to(tl.float32)
    steepness = gate
    if HAS_LIMIT:
        # What is no number stays so.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        steepness = gate * slope
    fall = tl.exp(-tl.abs(steepness))  # exp of minus the magnitude does not overflow
    sigmoid = tl.where(steepness >= 0, 1.0, fall) / (1.0 + fall)
    target = out + (slot * width)[:, None] + column[None, :]
    tl.store(target, (gate * sigmoid * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _combine_kernel(results, shares, out, part_stride, parts, used, hidden, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(used):
        pair = row * used + j
        at = results + pair * hidden + column
        result = tl.load(at, mask=mask, other=0.0)
        for part in range(1, parts):
            result += tl.load(at + part * part_stride, mask=mask, other=0.0)
        total += tl.load(shares + pair) * result
    tl.store(out + row * hidden + column, total.to(out.dtype.element_ty), mask=mask)


class _Work:
    """What the experts of a layer make of the rows of a pass: `results` fp32 [parts, pairs, hidden]."""

    def __init__(self, x: Tensor, shape: ExpertsShape) -> None:
        rows, hidden = x.shape
        self._x, self._shape = x, shape
        self.cut = Shape.of(rows, shape.used, shape.count, x.dtype)
        self.pairs, width = rows * shape.used, shape.intermediate
        parts = self.cut.parts(2 * width, hidden, shape.used), self.cut.parts(hidden, width, shape.used)
        dtype = torch.float32 if self.cut.is_for_few else x.dtype
        self._gate_up = torch.empty((parts[0], self.pairs, 2 * width), dtype=dtype, device=x.device)
        self._activated = torch.empty((self.pairs, width), dtype=x.dtype, device=x.device)
        self.results = torch.empty((parts[1], self.pairs, hidden), dtype=torch.float32, device=x.device)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """All that is written."""
        return self._gate_up, self._activated, self.results

    def put(self, pairs: NDArray[np.int32], rows: Floats) -> None:
        """Results of these pairs that were computed elsewhere, fp32 [pairs, hidden]."""
        wanted = (len(pairs), self.results.shape[2])
        if rows.dtype != np.float32 or rows.shape != wanted:
            raise ValueError(f"an expert's rows must be float32 {wanted}, got {rows.dtype} {rows.shape}")
        at = torch.from_numpy(pairs.astype(np.int64)).to(self.results.device)
        self.results[0].index_copy_(0, at, torch.from_numpy(rows).to(self.results.device))
        self.results[1:].index_fill_(1, at, 0.0)

    def launches(self, grouped: Grouped, table: Tensor, kinds: tuple[Kind, Kind]) -> tuple[Launch, ...]:
        """The products of these tiles, and the activation between them. `table` and `kinds` of `GpuExperts`."""
        shape, width = self._shape, self._shape.intermediate
        both, cut = self._gate_up, self.cut
        args = {
            "gate_up": both, "tiles": grouped.tiles, "out": self._activated, "part_stride": both.stride(0),
            "parts": len(both), "width": width, "limit": float(shape.limit), "slope": float(shape.slope),
            "ROWS": _ACTIVATE_ROWS, "BLOCK": _ACTIVATE_COLS, "HAS_LIMIT": shape.limit > 0,
        }  # fmt: skip
        grid = (-(-width // _ACTIVATE_COLS), len(grouped.tiles), cut.tile_rows // _ACTIVATE_ROWS)
        more = cut, shape.used, shape.bias
        return (
            grouped_launch(self._x, grouped, table, GATE_UP, kinds[0], *more, both),
            Launch(_activate_kernel, grid, args, 4, 1),
            grouped_launch(self._activated, grouped, table, DOWN, kinds[1], *more, self.results),
        )


def combine_plan(results: Tensor, shares: Tensor, dtype: torch.dtype) -> Plan[Tensor]:
    """The weighted sum of what the experts of each row made of it, in the order of `shares`.

    results  fp32 [parts, pairs, hidden], parts to be added in order; shares fp32 [rows, used], rows * used pairs

    Returns [rows, hidden] of `dtype`. Raises ValueError for a wrong shape or type.
    """
    check_tensor("shares", shares, [torch.float32], [None, None])
    rows, used = shares.shape
    check_tensor("results", results, [torch.float32], [None, rows * used, None], shares)
    for name, tensor in (("results", results), ("shares", shares)):
        check_contiguous(name, tensor)
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype: must be a float type, got {dtype}")
    hidden = results.shape[2]
    out = torch.empty((rows, hidden), dtype=dtype, device=results.device)
    block = min(_COMBINE_COLS, next_power_of_2(hidden))
    args = {
        "results": results, "shares": shares, "out": out, "part_stride": results.stride(0), "parts": len(results),
        "used": used, "hidden": hidden, "BLOCK": block,
    }  # fmt: skip
    return Plan(out, (out,), (Launch(_combine_kernel, (-(-hidden // block), rows), args, 4, 1),))


def experts_plan(
    x: Tensor, routed: Routed, table: Tensor, kinds: tuple[Kind, Kind], shape: ExpertsShape
) -> Plan[Tensor]:
    """What the experts make of rows x [rows, hidden], which go where `routed` says: [rows, hidden] of the type of x.

    `table` and `kinds` are those of `GpuExperts`; all experts that are chosen are there. Raises ValueError for a wrong
    shape, type, stride or device.
    """
    work = _Work(x, shape)
    grouping = plan_group(routed.experts, Tiling(work.cut.tile_rows, work.pairs, shape.count))
    combining = combine_plan(work.results, routed.shares, x.dtype)
    buffers = (*grouping.buffers, *work.buffers, *combining.buffers)
    launches = (*grouping.launches, *work.launches(grouping.result, table, kinds), *combining.launches)
    return Plan(combining.result, buffers, launches)


def mixture(
    shape: DecoderShape, index: int, layer: GpuLayer, x: Tensor, residual: Tensor, bringing: Bringing | None
) -> Tensor:
    """Launches the second half of layer `index`, a mixture, on normed rows x [rows, hidden]: what is added to the
    residual.

    residual  what the rows are before the norm: of that the next layer's experts are guessed
    bringing  of experts that may not be on the card: asked in any case, since it counts who is used

    Raises ValueError where experts are missing and nobody brings them, and what the source raises.
    """
    experts, router, mixed = layer.experts, layer.router, shape.experts
    assert experts is not None and router is not None and mixed is not None
    routed = plan_route(x, router, layer.router_bias, mixed.used, mixed.renormalized).run()
    if bringing is None and experts.all_here:
        return experts_plan(x, routed, experts.table, experts.kinds, mixed).run()
    if bringing is None:
        raise ValueError(f"experts of layer {index} are not on the card: say who brings them")
    groups = HostGroups.of(routed.experts.cpu().numpy())
    guessed = _guessed(shape, residual, bringing.following) if len(x) <= GUESS_ROWS else {}
    work = _Work(x, mixed)
    _fill(index, x, work, experts, groups, guessed, bringing.source)
    return combine_plan(work.results, routed.shares, x.dtype).run()


def _fill(
    index: int, x: Tensor, work: _Work, experts: GpuExperts, groups: HostGroups, guessed: Mapping[int, int],
    source: CardExpertSource,
) -> None:  # fmt: skip
    """The results of all pairs, wave by wave."""
    slot_pairs = torch.from_numpy(groups.slot_pairs).to(x.device)
    wanted = {expert: rows for expert, (_, rows) in groups.spans.items()}
    missing = set(wanted)
    for wave in source.bring(index, wanted, guessed, _rows_of(x, groups)):
        came = [*wave.placed, *wave.computed]
        if not missing.issuperset(came) or len(set(came)) != len(came):
            raise AssertionError(f"experts {came} were brought, {sorted(missing)} of layer {index} are missing")
        missing.difference_update(came)
        for expert, rows in wave.computed.items():
            work.put(groups.pairs_of(expert), rows)
        if wave.placed:
            tiles = torch.from_numpy(groups.tiles(wave.placed, work.cut.tile_rows)).to(x.device)
            for launch in work.launches(Grouped(slot_pairs, tiles), experts.table, experts.kinds):
                launch.run()
    if missing:
        raise AssertionError(f"experts {sorted(missing)} of layer {index} were not brought")


def _rows_of(x: Tensor, groups: HostGroups) -> Callable[[int], Floats]:
    """See `CardExpertSource.bring`."""

    @cache
    def on_host() -> Floats:
        return x.float().cpu().numpy()

    return lambda expert: on_host()[groups.pairs_of(expert) // groups.used]


def _guessed(shape: DecoderShape, residual: Tensor, following: GpuLayer | None) -> dict[int, int]:
    """What the next layer would ask for now, as if this one's experts added nothing: its experts -> rows."""
    mixed = shape.experts
    if following is None or mixed is None or following.experts is None or following.experts.all_here:
        return {}
    assert following.router is not None
    normed = plan_add_norm(residual, following.mlp_norm, shape.norm_eps).run().normed
    routed = plan_route(normed, following.router, following.router_bias, mixed.used, mixed.renormalized).run()
    return {expert: rows for expert, (_, rows) in HostGroups.of(routed.experts.cpu().numpy()).spans.items()}
