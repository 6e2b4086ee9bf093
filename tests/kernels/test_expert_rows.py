"""Rows through experts alone: the numbers of the reference, the same bits in any company, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.test_moe import model_of
from tierd.kernels.cpu.expert_rows import ExpertRows
from tierd.kernels.cpu.weights import ExpertWeights
from tierd.kernels.packing import PackedMatrix, unpack

MAX_ROWS = 24


def dense(matrix: PackedMatrix) -> torch.Tensor:
    return torch.from_numpy(unpack(matrix.format, matrix.data, matrix.rows, matrix.cols)).double()


def through(expert: ExpertWeights, rows: np.ndarray, limit: float, slope: float) -> np.ndarray:
    """As `kernels.cpu.ops.activate_columns` says, in float64."""
    both = torch.from_numpy(rows).double() @ dense(expert.gate_up).T
    if expert.gate_up_bias is not None:
        both += torch.from_numpy(expert.gate_up_bias[: both.shape[1]]).double()
    gate, up = both.chunk(2, 1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
        out = gate * torch.sigmoid(slope * gate) * up
    else:
        out = torch.nn.functional.silu(gate) * up
    out = out @ dense(expert.down).T
    if expert.down_bias is not None:
        out += torch.from_numpy(expert.down_bias[: out.shape[1]]).double()
    return out.numpy()


@pytest.mark.parametrize("name", ["many, fp32", "few, fp32", "few, int4", "clamped, int8-g32"])
def test_rows_through_experts(name: str) -> None:
    model = model_of(name)
    shape, rng = model.shape, np.random.default_rng(5)
    assert shape.experts is not None
    layer = shape.experts.layers[-1]
    some = ExpertRows(shape, MAX_ROWS, 2)
    for number, expert in enumerate(model.layers[layer].experts):
        assert expert is not None
        some.keep(layer, number, expert)
    x = {n: rng.standard_normal((rows, shape.hidden)).astype(np.float32) for n, rows in ((3, 5), (0, 1), (2, 18))}
    found = some.compute(layer, x)
    for number, rows in x.items():
        expert = model.layers[layer].experts[number]
        assert expert is not None
        right = through(expert, rows, shape.experts.limit, shape.experts.slope)
        assert np.abs(found[number] - right).max() < (2e-3 if "int" in name else 1e-4) * np.abs(right).max()
        for at in range(len(rows)):
            alone = some.compute(layer, {number: rows[at : at + 1]})
            np.testing.assert_array_equal(alone[number][0], found[number][at])
    some.forget(layer, 3)
    assert not some.has(layer, 3) and some.has(layer, 2) and not some.has(shape.experts.layers[0], 2)
    for wrong in ({3: x[0]}, {2: x[0][:, 1:]}, {0: np.zeros((MAX_ROWS + 1, shape.hidden), np.float32)}, {}):
        with pytest.raises(ValueError, match="rows"):
            some.compute(layer, wrong)
    some.close()
    with pytest.raises(ValueError, match="closed"):
        some.compute(layer, {0: x[0]})
    with pytest.raises(ValueError, match="0 rows"):
        ExpertRows(shape, 0, 1)
