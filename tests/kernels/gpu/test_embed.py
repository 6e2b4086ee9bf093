"""embed: against the exact weights; what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.decoders import random_matrix
from tests.kernels.gpu.cases import run_poisoned
from tierd.kernels import reference
from tierd.kernels.gpu.embed import plan_embed
from tierd.kernels.gpu.packing import from_panels
from tierd.kernels.packing import WeightFormat


@pytest.mark.parametrize("format", [WeightFormat.INT4_G32, WeightFormat.INT8_G32])
@pytest.mark.parametrize("cols", [32, 96, 320])
def test_rows_are_the_exact_weights(format: WeightFormat, cols: int) -> None:
    matrix = from_panels(random_matrix(np.random.default_rng(0), format, 70, cols))
    tokens = torch.tensor([0, 69, 31, 32, 5], dtype=torch.int32)
    weights = reference.gpu_weights(matrix.quants, matrix.scales, 70, cols)
    for dtype in (torch.float32, torch.float16):
        ours = run_poisoned(plan_embed(tokens, matrix, dtype))
        rtol = 1e-3 if dtype.itemsize == 2 else 1e-6
        torch.testing.assert_close(ours, weights[tokens.long()].to(dtype), rtol=rtol, atol=0)


def test_refuses() -> None:
    matrix = from_panels(random_matrix(np.random.default_rng(0), WeightFormat.INT8_G32, 32, 32))
    with pytest.raises(ValueError, match="tokens: expected int32, got int64"):
        plan_embed(torch.zeros(1, dtype=torch.int64), matrix, torch.float16)
    with pytest.raises(ValueError, match="dtype: must be a float type"):
        plan_embed(torch.zeros(1, dtype=torch.int32), matrix, torch.int32)
