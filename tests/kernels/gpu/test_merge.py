"""merge: parts of an attention add up to the whole, exactly, whatever empty parts hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gpu.cases import EPSILON, assert_close, draw, few_examples, run_poisoned, strided
from tierd.kernels import reference
from tierd.kernels.gpu.merge import merge, plan_merge


@few_examples
@given(
    parts=st.sampled_from([0, 1, 2, 15, 16, 17, 40]),
    rows=st.integers(0, 2),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    size=st.sampled_from([1.0, 1e4]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_like_the_twin(
    parts: int, rows: int, heads: int, head_dim: int, dtype: torch.dtype, size: float, with_sinks: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    outs = strided(draw((parts, rows, heads, head_dim), dtype, generator) * size)
    lses = strided(draw((parts, rows, heads), torch.float32, generator) * size)
    empty = torch.rand((parts, rows, heads), generator=generator) < 0.3
    lses[empty], outs[empty] = -math.inf, math.nan
    sinks = draw((heads,), torch.float32, generator) if with_sinks else None
    ours = run_poisoned(plan_merge(outs, lses, sinks))
    out, lse = reference.merge(outs, lses, sinks)
    error = 4 * EPSILON[torch.float32] * 5 * size
    assert_close(ours.lse, lse, error)
    assert_close(ours.out, out, 5 * size * (error + EPSILON[dtype]))


def test_the_twin_is_attention_over_the_union() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (draw((n, 2, 64), torch.float32, generator) for n in (3, 20, 20))
    sinks = draw((2,), torch.float32, generator)
    see = torch.ones((3, 20), dtype=torch.bool)
    parts = [reference.attend(queries, keys[s], values[s], see[:, s], 0.1) for s in (slice(0, 7), slice(7, 20))]
    outs, lses, _ = (torch.stack(part) if part[0].shape == part[1].shape else part for part in zip(*parts, strict=True))
    merged, merged_lse = reference.merge(outs, lses, sinks)
    out, lse, _ = reference.attend(queries, keys, values, see, 0.1, sinks=sinks)
    assert torch.allclose(merged, out)
    assert torch.allclose(merged_lse, lse)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        (torch.zeros(2, 3, 64), torch.zeros(2, 3), "outs: expected shape"),
        (torch.zeros(2, 3, 1, 64), torch.zeros(2, 1, 3), r"lses: expected shape \[2, 3, 1\], got \[2, 1, 3\]"),
        (torch.zeros(2, 3, 1, 64), torch.zeros(2, 3, 1).double(), "lses: expected float32, got float64"),
        (torch.zeros(2, 3, 1, 512), torch.zeros(2, 3, 1), "outs: head_dim must be 1 to 256, got 512"),
    ],
)
def test_refuses(outs: torch.Tensor, lses: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge(outs, lses)
