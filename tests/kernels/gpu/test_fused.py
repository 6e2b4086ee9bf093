"""fused: norm with residual, q/k norm with RoPE, SwiGLU against float64; what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gpu.cases import EPSILON, assert_close, few_examples, run_poisoned
from tierd.kernels import reference
from tierd.kernels.gpu.fused import add_norm, plan_add_norm, plan_rotate, plan_swiglu, rotate, swiglu

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
SIZES = st.sampled_from([1e-3, 1.0, 100.0])


def rows_with_gaps(
    rows: int, columns: int, dtype: torch.dtype, size: float, generator: torch.Generator
) -> torch.Tensor:
    wide = torch.full((rows, columns + 5), math.nan, dtype=dtype)
    wide[:, :columns] = (torch.randn((rows, columns), generator=generator) * size).to(dtype)
    return wide[:, :columns]


@few_examples
@given(
    rows=st.sampled_from([0, 1, 3]), hidden=st.sampled_from([1, 64, 80, 576, 1024]), dtype=DTYPES, size=SIZES,
    with_residual=st.booleans(), offset=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_add_norm(
    rows: int, hidden: int, dtype: torch.dtype, size: float, with_residual: bool, offset: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, other = (rows_with_gaps(rows, hidden, dtype, size, generator) for _ in range(2))
    weight = torch.randn(hidden, generator=generator)
    residual = other if with_residual else None
    ours = run_poisoned(plan_add_norm(x, weight, 1e-6, residual, offset))
    normed, total = reference.add_norm(x, weight, 1e-6, residual, offset)
    assert torch.equal(ours.residual.double(), total)
    assert_close(ours.normed, normed, EPSILON[dtype] * 40)


@few_examples
@given(
    rows=st.sampled_from([0, 1, 3]), heads=st.integers(1, 4), kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]), dtype=DTYPES, size=SIZES, with_norm=st.booleans(),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_rotate(
    rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, size: float, with_norm: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn((rows, heads + 2 * kv_heads + 1, head_dim), generator=generator) * size
    qkv = wide.to(dtype)[:, 1:]
    angles = torch.rand((50, head_dim // 2), generator=generator) * 7
    positions = torch.randint(0, 50, (rows,), generator=generator, dtype=torch.int32)
    weights = (torch.randn(head_dim, generator=generator), torch.randn(head_dim, generator=generator))
    norm = (weights, 1e-6) if with_norm else (None, 0.0)
    ours = run_poisoned(plan_rotate(qkv, heads, kv_heads, angles.cos(), angles.sin(), positions, *norm))
    judge = reference.rotate(qkv, heads, kv_heads, angles.cos(), angles.sin(), positions, *norm)
    largest = 20 if with_norm else 6 * size
    for mine, theirs in zip(ours, judge, strict=True):
        assert_close(mine, theirs, EPSILON[dtype] * largest)


def test_keys_may_be_left_out() -> None:
    qkv, angles = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(0)), torch.rand(9, 16)
    positions = torch.tensor([0, 8, 3], dtype=torch.int32)
    both = run_poisoned(plan_rotate(qkv, 2, 1, angles.cos(), angles.sin(), positions))
    alone = run_poisoned(plan_rotate(qkv, 2, 0, angles.cos(), angles.sin(), positions))
    assert torch.equal(alone.queries, both.queries) and alone.keys.shape == (3, 0, 32)


@few_examples
@given(
    rows=st.sampled_from([0, 1, 3]), width=st.sampled_from([1, 80, 1024, 1500]), dtype=DTYPES,
    size=st.sampled_from([1.0, 100.0]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_swiglu(rows: int, width: int, dtype: torch.dtype, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate_up = rows_with_gaps(rows, 2 * width, dtype, size, generator)
    judge = reference.swiglu(gate_up)
    difference = (run_poisoned(plan_swiglu(gate_up)).double() - judge).abs()
    assert bool((difference <= EPSILON[dtype] * judge.abs() + 1e-6 * size).all())


X = torch.zeros(2, 64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: add_norm(X, torch.zeros(63), 1e-6), r"weight: expected shape \[64\], got \[63\]"),
        (lambda: add_norm(X.T, torch.zeros(2), 1e-6), "x: values of a row must be neighbours"),
        (lambda: add_norm(X, torch.zeros(64), 1e-6, X.half()), "residual: expected float32, got float16"),
        (lambda: add_norm(X, torch.zeros(64), -1.0), "eps must not be negative"),
        (lambda: swiglu(torch.zeros(2, 7)), "gate_up: needs two equal halves, got 7 columns"),
    ],
)
def test_refuses(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 4}, "qkv: 4 heads do not hold 4 of queries and 1 of keys"),
        ({"cos": torch.zeros(9, 31)}, r"cos: expected shape \[any, 32\], got \[9, 31\]"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, r"positions: expected shape \[2\], got \[3\]"),
        ({"norm_weights": (torch.zeros(64), torch.zeros(32))}, r"k norm: expected shape \[64\], got \[32\]"),
    ],
)
def test_rotate_refuses(change: dict[str, Any], message: str) -> None:
    arguments = {
        "qkv": torch.zeros(2, 4, 64), "heads": 2, "kv_heads": 1, "cos": torch.zeros(9, 32), "sin": torch.zeros(9, 32),
        "positions": torch.zeros(2, dtype=torch.int32),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        rotate(**(arguments | change))
