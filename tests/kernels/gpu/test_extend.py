"""extend: ragged chunks over cached pages against the twin in float64; what it refuses."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gpu.cases import (
    EPSILON,
    LAYER,
    LAYERS,
    assert_close,
    draw,
    few_examples,
    many_examples,
    paged,
    run_poisoned,
    score_error,
    strided,
)
from tierd.kernels import reference
from tierd.kernels.gpu import extend as kernel
from tierd.kernels.layout import PageLayout

CACHED = st.sampled_from([0, 0, 1, 15, 16, 17, 32, 47, 65])
DRAWN = given(
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 4, 7, 8, 16]),
    format=st.sampled_from(["fp32", "bf16", "fp16"]),
    sequences=st.lists(st.tuples(CACHED, st.sampled_from([0, 1, 2, 15, 16, 17, 33])), min_size=1, max_size=2),
    window=st.sampled_from([0, 0, 1, 16, 40]),
    soft_cap=st.sampled_from([0.0, 0.0, 30.0]),
    with_sinks=st.booleans(),
    large=st.booleans(),
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
    head_dim: int, kv_heads: int, group: int, format: str, sequences: list[tuple[int, int]], window: int,
    soft_cap: float, with_sinks: bool, large: bool, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    cached, counts = [c for c, _ in sequences], [n for _, n in sequences]
    case = paged(PageLayout(LAYERS, kv_heads, head_dim, format), cached, generator, large, spare_pages=seed % 2)
    bounds = list(accumulate(counts, initial=0))
    queries = strided(draw((bounds[-1], kv_heads * group, head_dim), case.dtype, generator, large))
    keys, values = (strided(draw((bounds[-1], kv_heads, head_dim), case.dtype, generator, large)) for _ in range(2))
    sinks = draw((kv_heads * group,), torch.float32, generator) if with_sinks else None
    options = {"soft_cap": soft_cap, "window": window, "sinks": sinks}
    offsets = torch.tensor(bounds, dtype=torch.int32)
    ours = run_poisoned(
        kernel.plan_extend(queries, keys, values, offsets, max(counts), case.table(), LAYER, **options)
    )
    if not len(queries):
        return
    scale = 1 / math.sqrt(head_dim)
    out, lse = reference.extend(
        queries, keys, values, bounds, case.memories, case.layout, LAYER, case.pages, cached, scale, **options
    )
    error = score_error(case, queries, scale, keys)
    assert_close(ours.lse, lse, error)
    assert_close(ours.out, out, (2 * error + EPSILON[case.dtype]) * (128 if large else 5))


def test_several_tiles_of_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    case = paged(PageLayout(LAYERS, 1, 64, "fp32"), [20], generator)
    queries = draw((40, 4, 64), case.dtype, generator)
    keys, values = (draw((40, 1, 64), case.dtype, generator) for _ in range(2))
    offsets = torch.tensor([0, 40], dtype=torch.int32)
    plan = kernel.plan_extend(queries, keys, values, offsets, 70, case.table(), LAYER, window=18)
    ours = run_poisoned(plan)
    assert plan.launches[0].grid == (3, 1, 1)  # 32 rows each, the last has none
    out, lse = reference.extend(
        queries, keys, values, [0, 40], case.memories, case.layout, LAYER, case.pages, [20], 0.125, window=18
    )
    assert_close(ours.out, out, 1e-5)
    assert_close(ours.lse, lse, 1e-5)


def test_each_row_may_have_a_window_of_its_own_beside_that_of_all() -> None:
    """Among them one that is 0 behind one that is not, as where a sequence begins to be bounded, and the reverse."""
    generator = torch.Generator().manual_seed(1)
    case = paged(PageLayout(LAYERS, 1, 64, "fp32"), [50, 3], generator)
    queries = draw((43, 4, 64), case.dtype, generator)
    keys, values = (draw((43, 1, 64), case.dtype, generator) for _ in range(2))
    offsets = torch.tensor([0, 40, 43], dtype=torch.int32)
    own = [0] * 9 + [20] * 29 + [0, 7] + [3, 1, 0]
    for window in (0, 18):
        ours = run_poisoned(
            kernel.plan_extend(
                queries, keys, values, offsets, 40, case.table(), LAYER, window=window,
                windows=torch.tensor(own, dtype=torch.int32),
            )  # fmt: skip
        )
        for width in set(own):
            both = min(width or window, window or width)
            out, lse = reference.extend(
                queries, keys, values, [0, 40, 43], case.memories, case.layout, LAYER, case.pages, [50, 3], 0.125,
                window=both,
            )  # fmt: skip
            rows = [row for row, mine in enumerate(own) if mine == width]
            assert_close(ours.out[rows], out[rows], 1e-5)
            assert_close(ours.lse[rows], lse[rows], 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"new_keys": torch.zeros(3, 2, 64)}, "new_keys: expected float16, got float32"),
        ({"new_values": torch.zeros(2, 2, 64).half()}, r"new_values: expected shape \[3, 2, 64\], got \[2, 2, 64\]"),
        ({"row_offsets": torch.zeros(3, dtype=torch.int32)}, r"row_offsets: expected shape \[2\], got \[3\]"),
        ({"max_rows": -1}, "max_rows must not be negative"),
        ({"queries": torch.zeros(3, 130, 64).half()}, "at most 64 query heads for each kv head, got 65"),
        ({"sinks": torch.zeros(2)}, r"sinks: expected shape \[4\], got \[2\]"),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    case = paged(PageLayout(LAYERS, 2, 64, "fp16"), [5], torch.Generator())
    arguments = {
        "queries": torch.zeros(3, 4, 64).half(), "new_keys": torch.zeros(3, 2, 64).half(),
        "new_values": torch.zeros(3, 2, 64).half(), "row_offsets": torch.tensor([0, 3], dtype=torch.int32),
        "max_rows": 3, "table": case.table(), "layer": LAYER,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        kernel.extend(**(arguments | change))
