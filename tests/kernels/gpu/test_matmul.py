"""matmul: few rows and many, both formats, against exact weights in float64; what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gpu.cases import EPSILON, few_examples, many_examples, run_poisoned, strided
from tierd.kernels import packing, reference
from tierd.kernels.gpu.matmul import column_splits, matmul, plan_matmul
from tierd.kernels.gpu.packing import GpuMatrix, from_panels
from tierd.kernels.packing import PackedMatrix, WeightFormat

DRAWN = given(
    format=st.sampled_from([WeightFormat.INT4_G32, WeightFormat.INT8_G32]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    out_dtype=st.sampled_from([None, torch.float32]),
    rows=st.sampled_from([0, 1, 2, 16, 17, 64, 65]),
    outputs=st.sampled_from([1, 31, 32, 33, 80, 130]),
    cols=st.sampled_from([32, 64, 96, 128, 512, 544]),
    size=st.sampled_from([1.0, 100.0]),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)


@few_examples
@DRAWN
def test_like_the_twin(**case: Any) -> None:
    compare(**case)


@pytest.mark.long
@many_examples
@DRAWN
def test_like_the_twin_often(**case: Any) -> None:
    compare(**case)


def compare(
    format: WeightFormat, dtype: torch.dtype, out_dtype: torch.dtype | None, rows: int, outputs: int, cols: int,
    size: float, with_bias: bool, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    matrix = random_matrix(format, outputs, cols, seed)
    x = strided((torch.randn((rows, cols), generator=generator) * size).to(dtype))
    bias = torch.randn(outputs, generator=generator) * size if with_bias else None
    ours = run_poisoned(plan_matmul(x, matrix, bias, out_dtype))
    judge = reference.quantized_matmul(x, matrix.quants, matrix.scales, outputs, bias)
    # Each weight is rounded to the activations' type, each sum to fp32 and the output to its own type.
    weights = reference.gpu_weights(matrix.quants, matrix.scales, outputs, cols).abs()
    bound = (x.double().abs() @ weights.T) * (EPSILON[dtype] / 2 + cols * EPSILON[torch.float32])
    bound += judge.abs() * EPSILON[out_dtype or dtype]
    assert ours.dtype == (out_dtype or dtype)
    assert bool(((ours.double() - judge).abs() <= bound).all())


def random_matrix(format: WeightFormat, rows: int, cols: int, seed: int = 0) -> GpuMatrix:
    w = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    return from_panels(PackedMatrix(format, rows, cols, packing.pack(format, w)))


def test_columns_are_split_for_few_rows_alone() -> None:
    matrix = random_matrix(WeightFormat.INT4_G32, 32, 1024)
    assert column_splits(matrix.panels, matrix.pairs) == 4
    assert len(plan_matmul(torch.zeros(64, 1024).half(), matrix).launches) == 2
    assert len(plan_matmul(torch.zeros(65, 1024).half(), matrix).launches) == 1


def test_a_row_has_the_same_bits_in_any_company() -> None:
    matrix = random_matrix(WeightFormat.INT4_G32, 40, 512)
    x = torch.randn((20, 512), generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(matmul(x, matrix)[:1], matmul(x[:1], matrix))


def test_nan_in_one_row_stays_there() -> None:
    matrix = random_matrix(WeightFormat.INT8_G32, 32, 64)
    x = torch.ones(2, 64).half()
    x[0, 3] = math.nan
    out = matmul(x, matrix)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize(
    ("x", "bias", "out_dtype", "message"),
    [
        (torch.zeros(2, 64), None, None, "x: expected float16 or bfloat16, got float32"),
        (torch.zeros(2, 32).half(), None, None, r"x: expected shape \[any, 64\], got \[2, 32\]"),
        (torch.zeros(2, 64).half(), torch.zeros(31), None, r"bias: expected shape \[32\], got \[31\]"),
        (torch.zeros(2, 64).half(), None, torch.int32, "out_dtype: must be a float type"),
    ],
)
def test_refuses(x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        matmul(x, random_matrix(WeightFormat.INT4_G32, 32, 64), bias, out_dtype)
