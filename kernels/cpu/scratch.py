"""The memory that a decoder computes in: rows of activations, what threads have for themselves, phases of a launch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.kernels.cpu.attention import max_block_queries, scratch_bytes
from tierd.kernels.cpu.forward import ALL_GROUPS, WHOLE_LAYER, num_phases
from tierd.kernels.cpu.matmul import TILE_BYTES
from tierd.kernels.cpu.quantize import quantized_row_bytes
from tierd.kernels.cpu.team import PHASE_WORDS
from tierd.kernels.cpu.weights import DecoderShape, ExpertsShape, padded


class Scratch:
    """Allocates everything for passes of at most `max_rows` rows and names it in the job, which must not outlive it.

    `phases` is zeroed before each launch. `groups` [layers, experts, 3] and `foreseen` [rows * experts used] are what
    launches of mixtures leave (see moe.py), `num_groups` [layers] how many groups there are.
    """

    def __init__(self, shape: DecoderShape, job: Any, max_rows: int, threads: int) -> None:
        self._kept: list[NDArray[np.uint8]] = []
        self._job = job
        widest = max(shape.hidden, shape.heads * shape.head_dim)
        if shape.has_dense_layers:
            widest = max(widest, shape.intermediate)
            self._rows("gate_up", "gate_up_stride", 4 * padded(2 * shape.intermediate), max_rows)
            self._rows("activated", "activated_stride", 4 * padded(shape.intermediate), max_rows)
        for buffer, stride, cols in (
            ("residual", "residual_stride", shape.hidden),
            ("normed", "residual_stride", shape.hidden),
            ("product", "product_stride", shape.hidden),
            ("qkv", "qkv_stride", shape.qkv_rows),
            ("attended", "attended_stride", shape.heads * shape.head_dim),
        ):
            self._rows(buffer, stride, 4 * padded(cols), max_rows)
        self._rows("quantized", "quantized_stride", quantized_row_bytes(widest), max_rows)
        group = shape.heads // shape.kv_heads
        job["block_queries"] = max_block_queries(shape.head_dim, group)
        job["tile"] = -(-scratch_bytes(shape.head_dim, group) // 64) * 64
        job["scratch_stride"] = job["tile"] + TILE_BYTES
        job["scratch"] = self._aligned(threads * int(job["scratch_stride"]))
        self.phases = np.zeros(num_phases(shape.num_layers) * PHASE_WORDS + 8, np.int64)
        job["phases"] = -(-self.phases.ctypes.data // 64) * 64
        job["steps"], job["stop_group"] = WHOLE_LAYER, ALL_GROUPS
        self.num_groups, self.foreseen = self._ints(shape.num_layers), self._ints(0)
        self.groups = np.zeros((shape.num_layers, 0, 3), np.int32)
        if shape.experts is not None:
            self._set_mixture(shape, shape.experts, max_rows)

    def _set_mixture(self, shape: DecoderShape, experts: ExpertsShape, max_rows: int) -> None:
        job, slots = self._job, max_rows * experts.used
        job["experts"], job["experts_used"] = experts.count, experts.used
        job["expert_intermediate"], job["renormalized"] = experts.intermediate, experts.renormalized
        job["gate_limit"], job["gate_slope"] = experts.limit, experts.slope
        self._rows("router_logits", "router_stride", 4 * padded(experts.count), max_rows)
        quantized = quantized_row_bytes(max(shape.hidden, experts.intermediate))
        self._rows("gathered", "gathered_stride", max(4 * padded(shape.hidden), quantized), slots)
        # Gate and up of a slot, and later its result.
        both = max(padded(2 * experts.intermediate), padded(shape.hidden))
        self._rows("expert_gate_up", "expert_stride", 4 * both, slots)
        self._rows("expert_activated", "activated_slot_stride", 4 * padded(experts.intermediate), slots)
        self.groups = np.zeros((shape.num_layers, experts.count, 3), np.int32)
        self.foreseen = self._ints(slots)
        self._mixture_ints = [self._ints(slots) for _ in range(5)]
        names = ("chosen", "shares", "slot_pairs", "pair_slots", "foreseen_shares")  # shares are float32: as large
        for name, array in zip(names, self._mixture_ints, strict=True):
            job[name] = array.ctypes.data
        self._next_slots = self._ints(experts.count)
        for name, array in (("groups", self.groups), ("num_groups", self.num_groups), ("foreseen", self.foreseen)):
            job[name] = array.ctypes.data
        job["next_slots"] = self._next_slots.ctypes.data

    @staticmethod
    def _ints(count: int) -> NDArray[np.int32]:
        return np.zeros(count, np.int32)

    def _rows(self, buffer: str, stride: str, row_bytes: int, rows: int) -> None:
        """Rows of a buffer, zeroed."""
        self._job[stride] = _odd_lines(row_bytes)
        self._job[buffer] = self._aligned(rows * int(self._job[stride]))

    def _aligned(self, count_bytes: int) -> int:
        """Address of zeroed memory that starts on a cache line."""
        array = np.zeros(count_bytes + 64, np.uint8)
        self._kept.append(array)
        return -(-array.ctypes.data // 64) * 64


def _odd_lines(row_bytes: int) -> int:
    """Bytes from row to row, an odd number of cache lines: the same column of many rows, 12,288 bytes apart, would lie
    in one set of the first-level cache."""
    lines = -(-row_bytes // 64)
    return 64 * (lines + 1 - lines % 2)
