"""expand: matrices that crossed the link in the CPU's panels become what the card computes with, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.gpu.cases import aligned, run_poisoned
from tierd.kernels import card_bytes, packing
from tierd.kernels.gpu.expand import expand, plan_expand
from tierd.kernels.gpu.packing import GpuMatrix
from tierd.kernels.gpu.products import Matrix, to_card
from tierd.kernels.packing import KQuants, PackedMatrix, WeightFormat

CPU = torch.device("cpu")


def k_quants(format: WeightFormat, rows: int, cols: int) -> PackedMatrix:
    rng = np.random.default_rng(1)
    parts = 16 if format is WeightFormat.INT8_K else 8
    shape = (rows, cols // 256)
    q = rng.integers(-32, 32, (rows, cols)).astype(np.int8)
    if format is not WeightFormat.INT8_K:
        q = rng.integers(0, 16 if format is WeightFormat.INT4_K else 32, (rows, cols)).astype(np.uint8)
    steps = [rng.random(shape).astype(np.float16) for _ in range(2)]
    counts = rng.integers(-64, 64, (rows, shape[1] * parts)).astype(np.int8)
    minimums = rng.integers(0, 64, (rows, shape[1] * parts)).astype(np.uint8)
    return PackedMatrix(format, rows, cols, packing.pack_k(format, KQuants(q, steps[0], counts, steps[1], minimums)))


def packed(format: WeightFormat, rows: int, cols: int) -> PackedMatrix:
    if format not in packing.ROUNDED_FORMATS:
        return k_quants(format, rows, cols)
    w = np.random.default_rng(0).standard_normal((rows, cols)).astype(np.float32)
    return PackedMatrix(format, rows, cols, packing.pack(format, w))


def source(matrix: PackedMatrix) -> torch.Tensor:
    block = aligned(len(matrix.data), torch.uint8)
    block.copy_(torch.from_numpy(matrix.data))
    return block


def expanded(matrix: PackedMatrix, dtype: torch.dtype) -> Matrix:
    width = torch.empty(0, dtype=dtype).element_size()
    dest = aligned(card_bytes.matrix_bytes(matrix.format, matrix.rows, matrix.cols, width), torch.uint8)
    return run_poisoned(plan_expand(matrix.format, matrix.rows, matrix.cols, source(matrix), dest, dtype))


def assert_same(ours: Matrix, theirs: Matrix) -> None:
    if isinstance(theirs, GpuMatrix):
        assert isinstance(ours, GpuMatrix)
        assert torch.equal(ours.quants, theirs.quants) and torch.equal(ours.scales, theirs.scales)
        return
    assert isinstance(ours, torch.Tensor)
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("format", [WeightFormat.INT4_G32, WeightFormat.INT8_G32])
@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (40, 96), (64, 128)])
def test_codes_stay_as_they_are(format: WeightFormat, rows: int, cols: int) -> None:
    matrix = packed(format, rows, cols)
    assert_same(expanded(matrix, torch.bfloat16), to_card(matrix, CPU, torch.bfloat16))


@pytest.mark.parametrize("format", [format for format in WeightFormat if format not in ("int4-g32", "int8-g32")])
def test_other_formats_become_dense(format: WeightFormat) -> None:
    matrix = packed(format, 21, 256)
    for dtype in (torch.bfloat16, torch.float16) if format is WeightFormat.INT5_K else (torch.bfloat16,):
        assert_same(expanded(matrix, dtype), to_card(matrix, CPU, dtype))


@pytest.mark.parametrize("format", [WeightFormat.FP32, WeightFormat.INT4_G32])
def test_all_are_dense_for_activations_of_32_bits(format: WeightFormat) -> None:
    matrix = packed(format, 17, 32)
    assert_same(expanded(matrix, torch.float32), to_card(matrix, CPU, torch.float32))


def test_what_does_not_fit_is_refused() -> None:
    matrix = packed(WeightFormat.INT4_G32, 32, 64)
    block, format = source(matrix), WeightFormat.INT4_G32
    with pytest.raises(ValueError, match="dest: expected shape"):
        expand(format, 32, 64, block, aligned(100, torch.uint8), torch.bfloat16)
    size = card_bytes.matrix_bytes(format, 32, 64)
    with pytest.raises(ValueError, match="dest: must begin at a multiple of 64"):
        expand(format, 32, 64, block, aligned(size + 1, torch.uint8)[1:], torch.bfloat16)
    with pytest.raises(ValueError, match="dtype: must be a float type"):
        expand(format, 32, 64, block, aligned(size, torch.uint8), torch.int8)
