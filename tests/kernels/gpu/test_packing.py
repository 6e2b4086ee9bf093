"""packing: the card's layout holds the same weights as the CPU's panels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tierd.kernels import packing, reference
from tierd.kernels.gpu.packing import GpuMatrix, from_panels
from tierd.kernels.packing import PackedMatrix, WeightFormat


def packed(format: WeightFormat, rows: int, cols: int, seed: int = 0) -> PackedMatrix:
    w = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    return PackedMatrix(format, rows, cols, packing.pack(format, w))


@pytest.mark.parametrize("format", [WeightFormat.INT4_G32, WeightFormat.INT8_G32])
@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (16, 64), (33, 96), (48, 160), (64, 128)])
def test_no_weight_changes(format: WeightFormat, rows: int, cols: int) -> None:
    matrix = packed(format, rows, cols)
    gpu = from_panels(matrix)
    # The CPU defines the weights in float32, so the exact ones are rounded once.
    exact = reference.gpu_weights(gpu.quants, gpu.scales, rows, cols)
    assert torch.equal(exact.float(), reference.weights(matrix))


@pytest.mark.parametrize("format", [WeightFormat.INT4_G32, WeightFormat.INT8_G32])
def test_what_fills_up_is_zero(format: WeightFormat) -> None:
    gpu = from_panels(packed(format, 40, 96))
    whole = reference.gpu_weights(gpu.quants, gpu.scales, 64, 128)
    assert whole[40:].abs().max() == 0
    assert whole[:, 96:].abs().max() == 0


def test_other_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="the card takes int4-g32 and int8-g32, got bf16"):
        from_panels(packed(WeightFormat.BF16, 16, 32))


def test_shapes_are_checked() -> None:
    gpu = from_panels(packed(WeightFormat.INT4_G32, 32, 64))
    with pytest.raises(ValueError, match=r"quants: expected shape \[2, 1, 32, 32\], got \[1, 1, 32, 32\]"):
        GpuMatrix(gpu.format, 33, 64, gpu.quants, gpu.scales)
    with pytest.raises(ValueError, match="whole groups of 32, got 32 x 40"):
        GpuMatrix(gpu.format, 32, 40, gpu.quants, gpu.scales)
