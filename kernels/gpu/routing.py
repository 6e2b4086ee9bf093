"""Which experts each row of a mixture goes through, and the rows sorted by expert: all of it on the card.

A router gives each row a number for every expert; softmax makes probabilities of them, and the row goes through the
`used` most probable ones, of equal ones the first. A row and one of its experts are a *pair*, number row * used + rank.
Pairs that have the same expert follow each other in *slots*, in ascending order; the slots of an expert are cut into
*tiles* of as many rows as a program of the product takes.

How many tiles there are the host does not know before a launch, and it does not wait to hear it. Their number has a
bound, and each expert finds its first one from how many pairs come before its own: with `below` of them that is
below / tile rows + expert (rounded down), which leaves each expert enough, or simply `below`, where that makes fewer.
Tiles that stay empty have no expert, and their programs end at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from tierd.kernels.gpu.launch import FLOAT_DTYPES, Launch, Plan, check_contiguous, check_tensor, next_power_of_2

NO_EXPERT = -1
TILE_FIELDS = 3  # expert, first slot, rows
_ROUTER_ROWS, _ROUTER_EXPERTS, _ROUTER_COLS = 4, 8, 128  # whatever the batch is: a row's bits depend on the tile
_GROUP_PAIRS = 1024


class Routed(NamedTuple):
    """`experts` int32 [rows, used], the most probable first; `shares` fp32 [rows, used]: what their results count."""

    experts: Tensor
    shares: Tensor


class Grouped(NamedTuple):
    """`slot_pairs` int32 [pairs], by slot; `tiles` int32 [tiles, TILE_FIELDS]: expert, first slot and rows, with
    NO_EXPERT where a tile is empty."""

    slot_pairs: Tensor
    tiles: Tensor


@dataclass(frozen=True, slots=True)
class Tiling:
    """How slots are cut: tiles of so many rows, at most so many of them."""

    tile_rows: int
    pairs: int
    experts: int

    @property
    def by_expert(self) -> bool:
        """Which of the two bounds on the number of tiles is the lower one."""
        return self.pairs // self.tile_rows + self.experts < self.pairs

    @property
    def tiles(self) -> int:
        """Room for tiles."""
        return self.pairs // self.tile_rows + self.experts if self.by_expert else self.pairs


@triton.jit
def _router_kernel(
    x, router, bias, logits, x_row, rows, experts, hidden,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, COLS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    sums = tl.zeros((ROWS, EXPERTS, COLS), tl.float32)
    for first in range(0, hidden, COLS):
        k = first + tl.arange(0, COLS)
        there = (k < hidden)[None, :]
        values = tl.load(x + (row * x_row)[:, None] + k[None, :], mask=(row < rows)[:, None] & there, other=0.0)
        weights = tl.load(
            router + (expert * hidden)[:, None] + k[None, :], mask=(expert < experts)[:, None] & there, other=0.0
        )
        sums += values.to(tl.float32)[:, None, :] * weights[None, :, :]
    found = tl.sum(sums, 2)
    if HAS_BIAS:
        found += tl.load(bias + expert, mask=expert < experts, other=0.0)[None, :]
    at = logits + (row * experts)[:, None] + expert[None, :]
    tl.store(at, found, mask=(row < rows)[:, None] & (expert < experts)[None, :])


@triton.jit
def _route_kernel(
    logits, chosen, shares, experts, used, RENORMALIZED: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_U: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    expert, rank = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_U)
    is_expert = expert < experts
    x = tl.load(logits + row * experts + expert, mask=is_expert, other=-float("inf"))
    p = tl.where(is_expert, tl.exp(x - tl.max(tl.where(x == x, x, -float("inf")), 0)), 0.0)
    total = tl.sum(p, 0)
    # What is no number counts as 0 here, so that there is a choice in any case; it is in the total.
    left = tl.where(is_expert, tl.where(p == p, p, 0.0), -1.0)
    best, most = tl.zeros((BLOCK_U,), tl.int32), tl.zeros((BLOCK_U,), tl.float32)
    kept = tl.zeros((), tl.float32)
    for j in range(used):
        largest = tl.max(left, 0)
        first = tl.min(tl.where(left == largest, expert, BLOCK_E), 0)
        best, most = tl.where(rank == j, first, best), tl.where(rank == j, largest, most)
        left = tl.where(expert == first, -1.0, left)
        kept += largest
    if RENORMALIZED:  # a total that is no number stays
        total = tl.where(total == total, kept, total)
    at = row * used + rank
    tl.store(chosen + at, best, mask=rank < used)
    tl.store(shares + at, most / total, mask=rank < used)


@triton.jit
def _group_kernel(
    chosen, slot_pairs, tiles, pairs, tile_rows, BY_EXPERT: tl.constexpr, BLOCK: tl.constexpr
):
    """An expert's slots and tiles. It counts the pairs of those before it by itself."""
    expert = tl.program_id(0)
    below, count = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        found = tl.load(chosen + pair, mask=pair < pairs, other=2**30)
        below += tl.sum((found < expert).to(tl.int32), 0)
        count += tl.sum((found == expert).to(tl.int32), 0)
    slot = below
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        is_mine = tl.load(chosen + pair, mask=pair < pairs, other=2**30) == expert
        rank = tl.cumsum(is_mine.to(tl.int32), 0)
        tl.store(slot_pairs + slot + rank - 1, pair, mask=is_mine)
        slot += tl.sum(is_mine.to(tl.int32), 0)
    if BY_EXPERT:
        begin, end = below // tile_rows + expert, (below + count) // tile_rows + expert + 1
    else:
        begin, end = below, below + count
    for number in range(begin, end):
        done = (number - begin) * tile_rows
        rows = tl.minimum(tl.maximum(count - done, 0), tile_rows)
        tl.store(tiles + number * 3, tl.where(rows > 0, expert, -1))
        tl.store(tiles + number * 3 + 1, below + done)
        tl.store(tiles + number * 3 + 2, rows)


def plan_route(
    x: Tensor, router: Tensor, bias: Tensor | None, used: int, renormalized: bool
) -> Plan[Routed]:
    """`route` without running it."""
    check_tensor("router", router, [torch.float32], [None, None])
    check_contiguous("router", router)
    experts, hidden = router.shape
    check_tensor("x", x, FLOAT_DTYPES, [None, hidden], router)
    check_contiguous("x", x)
    if bias is not None:
        check_tensor("bias", bias, [torch.float32], [experts], x)
    if not 0 < used <= experts:
        raise ValueError(f"rows go through 1 to {experts} experts, got {used}")
    rows = len(x)
    logits = torch.empty((rows, experts), dtype=torch.float32, device=x.device)
    chosen = torch.empty((rows, used), dtype=torch.int32, device=x.device)
    shares = torch.empty((rows, used), dtype=torch.float32, device=x.device)
    product = {
        "x": x, "router": router, "bias": bias, "logits": logits, "x_row": hidden, "rows": rows, "experts": experts,
        "hidden": hidden, "ROWS": _ROUTER_ROWS, "EXPERTS": _ROUTER_EXPERTS, "COLS": _ROUTER_COLS,
        "HAS_BIAS": bias is not None,
    }  # fmt: skip
    choice = {
        "logits": logits, "chosen": chosen, "shares": shares, "experts": experts, "used": used,
        "RENORMALIZED": renormalized, "BLOCK_E": next_power_of_2(experts), "BLOCK_U": next_power_of_2(used),
    }  # fmt: skip
    grid = (-(-rows // _ROUTER_ROWS), -(-experts // _ROUTER_EXPERTS))
    launches = Launch(_router_kernel, grid, product, 4, 3), Launch(_route_kernel, (rows,), choice, 1, 1)
    return Plan(Routed(chosen, shares), (logits, chosen, shares), launches)


def route(x: Tensor, router: Tensor, bias: Tensor | None, used: int, renormalized: bool) -> Routed:
    """The experts of each row and their shares. Twin: `reference.route`, of the router's product in fp32.

    x       float [rows, hidden], contiguous
    router  fp32 [experts, hidden], contiguous; bias fp32 [experts] or None
    used    experts that a row goes through; `renormalized`: their shares add up to one

    A row whose numbers are none has experts like any other, and shares that are no numbers. Raises ValueError for a
    wrong shape, type or device.
    """
    return plan_route(x, router, bias, used, renormalized).run()


def plan_group(chosen: Tensor, tiling: Tiling) -> Plan[Grouped]:
    """`group` without running it."""
    check_tensor("chosen", chosen, [torch.int32], [None, None])
    check_contiguous("chosen", chosen)
    if chosen.numel() != tiling.pairs:
        raise ValueError(f"chosen: {chosen.numel()} pairs, the tiling is for {tiling.pairs}")
    slot_pairs = torch.empty(tiling.pairs, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty((tiling.tiles, TILE_FIELDS), dtype=torch.int32, device=chosen.device)
    args = {
        "chosen": chosen, "slot_pairs": slot_pairs, "tiles": tiles, "pairs": tiling.pairs,
        "tile_rows": tiling.tile_rows, "BY_EXPERT": tiling.by_expert, "BLOCK": _GROUP_PAIRS,
    }  # fmt: skip
    launch = Launch(_group_kernel, (tiling.experts if tiling.pairs else 0,), args, 4, 1)
    return Plan(Grouped(slot_pairs, tiles), (slot_pairs, tiles), (launch,))


def group(chosen: Tensor, tiling: Tiling) -> Grouped:
    """Pairs sorted by expert, those of an expert in ascending order, and the tiles that they make.

    Twin: `reference.group`.

    chosen  int32 [rows, used], contiguous, of experts 0..tiling.experts - 1, which the caller has made sure of

    Raises ValueError for a wrong shape or type.
    """
    return plan_group(chosen, tiling).run()


@dataclass(frozen=True, slots=True)
class HostGroups:
    """The same on the host, where it decides what is launched."""

    used: int
    slot_pairs: NDArray[np.int32]
    spans: dict[int, tuple[int, int]]  # expert -> first slot, rows; only of experts that have rows, ascending

    @staticmethod
    def of(chosen: NDArray[np.int32]) -> HostGroups:
        """The groups of a choice [rows, used]."""
        flat = chosen.reshape(-1)
        slot_pairs = np.argsort(flat, kind="stable").astype(np.int32)
        experts, firsts, counts = np.unique(flat[slot_pairs], return_index=True, return_counts=True)
        spans = dict(zip(experts.tolist(), zip(firsts.tolist(), counts.tolist(), strict=True), strict=True))
        return HostGroups(chosen.shape[1], slot_pairs, spans)

    def pairs_of(self, expert: int) -> NDArray[np.int32]:
        """The pairs of an expert, ascending."""
        first, count = self.spans[expert]
        return self.slot_pairs[first : first + count]

    def tiles(self, experts: Sequence[int], tile_rows: int) -> NDArray[np.int32]:
        """[tiles, TILE_FIELDS] of these experts, and none that is empty."""
        found = [
            (expert, first + done, min(tile_rows, count - done))
            for expert in experts
            for first, count in [self.spans[expert]]
            for done in range(0, count, tile_rows)
        ]
        return np.array(found, np.int32).reshape(-1, TILE_FIELDS)
