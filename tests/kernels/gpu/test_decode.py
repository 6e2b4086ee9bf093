"""decode: against its twin in float64 over shapes, strides, magnitudes, windows, caps and sinks; what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gpu.cases import (
    EPSILON,
    LAYER,
    LAYERS,
    Paged,
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
from tierd.kernels.gpu import decode as kernel
from tierd.kernels.gpu.launch import Plan
from tierd.kernels.gpu.merge import Merged
from tierd.kernels.layout import PageLayout

LENGTHS = st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65])


DRAWN = given(
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 4, 7, 8, 16]),
    format=st.sampled_from(["fp32", "bf16", "fp16"]),
    lengths=st.lists(LENGTHS, min_size=1, max_size=2),
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
    head_dim: int, kv_heads: int, group: int, format: str, lengths: list[int], window: int, soft_cap: float,
    with_sinks: bool, large: bool, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    case = paged(PageLayout(LAYERS, kv_heads, head_dim, format), lengths, generator, large, spare_pages=seed % 2)
    queries = strided(draw((len(lengths), kv_heads * group, head_dim), case.dtype, generator, large))
    sinks = draw((kv_heads * group,), torch.float32, generator) if with_sinks else None
    options = {"soft_cap": soft_cap, "window": window, "sinks": sinks}
    ours = run_poisoned(kernel.plan_decode(queries, case.table(), LAYER, want_mass=True, **options))
    scale = 1 / math.sqrt(head_dim)
    out, lse, mass = reference.decode(
        queries, case.memories, case.layout, LAYER, case.pages, lengths, scale=scale, **options
    )
    error = score_error(case, queries, scale)
    assert_close(ours.lse, lse, error)
    assert ours.mass is not None
    assert_close(ours.mass, mass, error)
    # Weights, and the output itself, are rounded to the pages' type.
    assert_close(ours.out, out, (2 * error + EPSILON[case.dtype]) * (128 if large else 5))


def test_several_splits_and_a_run_before_the_query() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [kernel.SPLIT_TOKENS + 17, 40]
    case = paged(PageLayout(LAYERS, 1, 64, "fp32"), lengths, generator)
    queries = draw((2, 2, 64), case.dtype, generator)
    positions = torch.tensor([lengths[0] - 1, 60], dtype=torch.int32)  # the second run ends 20 tokens before its query
    options = {"window": 30}
    ours = run_poisoned(kernel.plan_decode(queries, case.table(), LAYER, scale=0.2, positions=positions, **options))
    out, lse, _ = reference.decode(
        queries, case.memories, case.layout, LAYER, case.pages, lengths, positions.tolist(), 0.2, **options
    )
    error = score_error(case, queries, 0.2)
    assert_close(ours.out, out, 10 * error)
    assert_close(ours.lse, lse, error)
    whole = run_poisoned(kernel.plan_decode(queries[:1], one_sequence(case, 0).table(), LAYER, scale=0.2))
    out, _, _ = reference.decode(queries[:1], case.memories, case.layout, LAYER, case.pages[:1], lengths[:1], scale=0.2)
    assert_close(whole.out, out, 10 * error)


def test_each_row_may_have_a_window_of_its_own_beside_that_of_all() -> None:
    generator = torch.Generator().manual_seed(3)
    case = paged(PageLayout(LAYERS, 1, 64, "bf16"), [70, 70, 70, 20], generator)
    queries = draw((4, 2, 64), case.dtype, generator)
    windows = torch.tensor([0, 33, 50, 5], dtype=torch.int32)
    for window, seen in ((0, [0, 33, 50, 5]), (40, [40, 33, 40, 5])):
        plan = kernel.plan_decode(queries, case.table(), LAYER, window=window, windows=windows, want_mass=True)
        ours = run_poisoned(plan)
        masses = []
        for row, width in enumerate(seen):
            alone = one_sequence(case, row)
            right = run_poisoned(
                kernel.plan_decode(queries[row : row + 1], alone.table(), LAYER, window=width, want_mass=True)
            )
            assert torch.equal(ours.out[row], right.out[0]) and torch.equal(ours.lse[row], right.lse[0])
            masses.append(right.mass)
        assert torch.equal(ours.mass, torch.cat(masses))


@pytest.mark.parametrize(("format", "group"), [("fp32", 3), ("bf16", 16), ("fp16", 1)])
def test_masses_alone_are_those_beside_the_attention(format: str, group: int) -> None:
    """Of several splits, and of rows that see nothing."""
    generator = torch.Generator().manual_seed(5)
    lengths = [0, 33, kernel.SPLIT_TOKENS + 20]
    case = paged(PageLayout(LAYERS, 2, 64, format), lengths, generator, spare_pages=1)
    queries = draw((3, 2 * group, 64), case.dtype, generator)
    found = run_poisoned(kernel.plan_masses(queries, case.table(), LAYER))
    _, _, mass = reference.decode(queries, case.memories, case.layout, LAYER, case.pages, lengths, scale=0.125)
    assert_close(found, mass, score_error(case, queries, 0.125))


def test_rows_may_share_pages_and_parts_be_merged_later() -> None:
    generator = torch.Generator().manual_seed(4)
    case = paged(PageLayout(LAYERS, 1, 64, "fp32"), [40], generator)
    queries = draw((3, 2, 64), case.dtype, generator)
    table = replace(
        case.table(), offsets=torch.zeros(4, dtype=torch.int32), lengths=torch.tensor([40, 0, 19], dtype=torch.int32)
    )
    parts = Merged(torch.full((1, 3, 2, 64), math.nan), torch.full((1, 3, 2), math.nan))
    Plan(None, (), kernel.split_launches(queries, table, LAYER, parts, scale=0.2)).run()
    out, lse, _ = reference.decode(
        queries, case.memories, case.layout, LAYER, case.pages * 3, [40, 0, 19], scale=0.2
    )
    error = score_error(case, queries, 0.2)
    assert_close(parts.lse[0], lse, error)
    assert_close(parts.out[0, [0, 2]], out[[0, 2]], 10 * error)


def test_a_sequence_has_the_same_bits_in_any_company() -> None:
    generator = torch.Generator().manual_seed(1)
    case = paged(PageLayout(LAYERS, 1, 64, "bf16"), [70, 20, 0], generator)
    queries = draw((3, 2, 64), case.dtype, generator)
    together = run_poisoned(kernel.plan_decode(queries, case.table(max_pages=100), LAYER))
    alone = run_poisoned(kernel.plan_decode(queries[:1], one_sequence(case, 0).table(), LAYER))
    assert torch.equal(together.out[:1], alone.out)
    assert torch.equal(together.lse[:1], alone.lse)


def test_nan_in_a_seen_page_is_not_hidden() -> None:
    generator = torch.Generator().manual_seed(2)
    case = paged(PageLayout(LAYERS, 1, 64, "fp16"), [20, 20], generator)
    reference.page_planes(case.memories, case.pages[0][1], case.layout, LAYER)[0][0, 2, 5] = math.nan
    ours = kernel.decode(draw((2, 1, 64), case.dtype, generator), case.table(), LAYER)
    assert ours.out[0].isnan().all()
    assert ours.out[1].isfinite().all()


def one_sequence(case: Paged, index: int) -> Paged:
    return Paged(case.layout, case.memories, [case.pages[index]], [case.lengths[index]])


@pytest.mark.parametrize(
    ("queries", "options", "message"),
    [
        (torch.zeros(1, 2, 64), {}, "queries: expected bfloat16, got float32"),
        (torch.zeros(1, 2, 32, dtype=torch.bfloat16), {}, r"expected shape \[any, any, 64\], got \[1, 2, 32\]"),
        (torch.zeros(1, 3, 64, dtype=torch.bfloat16), {}, "queries: 3 heads are not a multiple of 2 kv heads"),
        (torch.zeros(2, 2, 64, dtype=torch.bfloat16), {}, "queries: 2 rows for 1 sequences"),
        (None, {"window": -1}, "window must be positive, or 0 for none, got -1"),
        (None, {"soft_cap": math.inf}, "soft_cap must be positive, or 0 for none, got inf"),
        (None, {"sinks": torch.zeros(3)}, r"sinks: expected shape \[2\], got \[3\]"),
        (None, {"positions": torch.zeros(1)}, "positions: expected int32, got float32"),
    ],
)
def test_refuses(queries: torch.Tensor | None, options: dict[str, object], message: str) -> None:
    case = paged(PageLayout(LAYERS, 2, 64, "bf16"), [5], torch.Generator())
    good = torch.zeros(1, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        kernel.decode(good if queries is None else queries, case.table(), LAYER, **options)


def test_refuses_a_layer_that_is_not_there() -> None:
    case = paged(PageLayout(LAYERS, 1, 64, "bf16"), [5], torch.Generator())
    with pytest.raises(ValueError, match="layer 2 of 2"):
        kernel.decode(torch.zeros(1, 1, 64, dtype=torch.bfloat16), case.table(), 2)
