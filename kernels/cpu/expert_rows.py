"""Rows through experts on the processors, without a decoder around them: for those that a card computes elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.kernels.cpu.forward import ALL_GROUPS, GROUPS, JOB, LAYER, work
from tierd.kernels.cpu.hidden import rows_at
from tierd.kernels.cpu.scratch import Scratch
from tierd.kernels.cpu.team import Team
from tierd.kernels.cpu.weights import DecoderShape, ExpertsShape, ExpertTable, ExpertWeights, padded

Floats = NDArray[np.float32]


class ExpertRows:
    """The experts of a model, those that were handed in, and threads that compute rows through them.

    Args:
        shape: of the model, a mixture.
        max_rows: of one call, all experts together.
        threads: that compute.

    Threading: one call at a time. `close` stops the threads; what is garbage collected closes itself.
    """

    def __init__(self, shape: DecoderShape, max_rows: int, threads: int) -> None:
        if shape.experts is None or max_rows < 1:
            raise ValueError(f"{max_rows} rows through experts of a model that has {shape.experts}")
        self._hidden, self.max_rows = shape.hidden, max_rows
        self._table = ExpertTable(shape)
        self._layers = np.zeros(1, LAYER)
        self._jobs = np.zeros(1, JOB)
        job: Any = self._jobs[0]
        self._job = job
        found = shape.experts
        # One layer, in which each row has a single expert: so a row is a pair, and the pair's place is its row's.
        single = ExpertsShape(
            found.count, 1, found.intermediate, False, (0,), found.bias, found.limit, found.slope
        )
        small = DecoderShape(1, shape.hidden, found.intermediate, 1, 1, 16, 1, shape.norm_eps, False, (0,), single)
        for name in ("num_layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "norm_eps"):
            job[name] = getattr(small, name)
        job["hidden_padded"], job["threads"] = padded(shape.hidden), threads
        self._scratch = Scratch(small, job, max_rows, threads)
        job["first_stage"], job["stop_stage"], job["steps"] = 1, 2, GROUPS
        self._pairs: NDArray[np.int32] = np.arange(max_rows, dtype=np.int32)
        job["slot_pairs"] = self._pairs.ctypes.data
        self._team = Team(threads, work, (self._jobs, self._layers, self._table.records))

    def keep(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        """An expert lies there from now on. Raises ValueError for one that does not fit the shape."""
        self._table.keep(layer, expert, weights)

    def forget(self, layer: int, expert: int) -> None:
        """An expert lies there no longer."""
        self._table.forget(layer, expert)

    def has(self, layer: int, expert: int) -> bool:
        """Whether an expert can be computed."""
        return self._table.is_kept(self._table.first(layer) + expert)

    def compute(self, layer: int, rows: Mapping[int, Floats]) -> dict[int, Floats]:
        """What each of these experts of a layer, which all were handed in, makes of its rows: normed ones, fp32 [rows,
        hidden], in and out. The bits of a row depend on nothing else.

        Raises ValueError for more rows than there is room for, and rows of another shape.
        """
        job, total = self._job, sum(len(one) for one in rows.values())
        if not self._team.close.alive or not 0 < total <= self.max_rows:
            raise ValueError(f"{total} rows in a call of at most {self.max_rows}, or it is closed")
        x = rows_at(int(job["normed"]), int(job["residual_stride"]), total)
        first = 0
        for number, (expert, one) in enumerate(rows.items()):
            if one.shape != (len(one), self._hidden) or not len(one) or not self.has(layer, expert):
                raise ValueError(f"rows {one.shape} through expert {expert} of layer {layer}")
            x[first : first + len(one), : self._hidden] = one
            self._scratch.groups[0, number] = expert, first, len(one)
            first += len(one)
        self._layers["first_expert"] = self._table.first(layer)
        self._scratch.num_groups[0], job["rows"] = len(rows), total
        job["first_group"], job["stop_group"] = 0, ALL_GROUPS
        self._scratch.phases[:] = 0
        work(self._jobs, self._layers, self._table.records, self._team.address, 0)
        y = rows_at(int(job["expert_gate_up"]), int(job["expert_stride"]), total)[:, : self._hidden]
        out: dict[int, Floats] = {}
        first = 0
        for expert, one in rows.items():
            out[expert] = y[first : first + len(one)].copy()
            first += len(one)
        return out

    def close(self) -> None:
        """Stops the threads. Idempotent."""
        self._team.close()
