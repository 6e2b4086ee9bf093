"""write: pages hold exactly what the twin puts there, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gpu.cases import LAYER, LAYERS, Paged, aligned, draw, few_examples, many_examples, paged, strided
from tierd.kernels import reference
from tierd.kernels.gpu.write import Spans, write
from tierd.kernels.layout import PageLayout

DRAWN = given(
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    kv_heads=st.integers(1, 3),
    format=st.sampled_from(["fp32", "bf16", "fp16"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    places=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 16)), max_size=3),
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
    head_dim: int, kv_heads: int, format: str, dtype: torch.dtype, places: list[tuple[int, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    case = paged(PageLayout(LAYERS, kv_heads, head_dim, format), [16] * len(places), generator)
    spans, rows = [], 2  # the first rows go nowhere
    for (token, count), pages in zip(places, case.pages, strict=True):
        count = min(count, 16 - token)
        spans.append((pages[0], rows, token, count))
        rows += count
    keys, values = (strided(draw((rows, kv_heads, head_dim), dtype, generator) * 100) for _ in range(2))
    before = [memory.clone() for memory in case.memories]
    write(keys, values, Spans.build(case.layout, spans, rows, case.memories, aligned(64, case.dtype)), LAYER)
    ours = [memory.clone() for memory in case.memories]
    for memory, bytes_before in zip(case.memories, before, strict=True):
        memory.copy_(bytes_before)
    reference.write(keys, values, case.memories, case.layout, LAYER, spans)
    assert all(torch.equal(memory, mine) for memory, mine in zip(case.memories, ours, strict=True))


@pytest.fixture
def case() -> Paged:
    return paged(PageLayout(LAYERS, 1, 64, "fp32"), [16, 16], torch.Generator())


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ((0, 4, 13), r"span 1: tokens 4 to 17 of 16"),
        ((0, -1, 3), r"span 1: tokens -1 to 2 of 16"),
        ((2, 0, 3), r"span 1: rows 2 to 5 of 4"),
    ],
)
def test_spans_stay_in_their_page_and_rows(case: Paged, span: tuple[int, int, int], message: str) -> None:
    spans = [(case.pages[0][0], 0, 0, 1), (case.pages[1][0], *span)]
    with pytest.raises(ValueError, match=message):
        Spans.build(case.layout, spans, 4, case.memories, aligned(64, case.dtype))


def test_spans_do_not_meet(case: Paged) -> None:
    page = case.pages[0][0]
    with pytest.raises(ValueError, match=r"span 1: writes tokens of record .* a second time"):
        Spans.build(case.layout, [(page, 0, 0, 3), (page, 1, 2, 1)], 4, case.memories, aligned(64, case.dtype))


def test_spans_write_to_known_memory(case: Paged) -> None:
    with pytest.raises(ValueError, match="span 0: no whole, aligned record"):
        Spans.build(case.layout, [(case.pages[0][0], 0, 0, 1)], 4, [], aligned(64, case.dtype))


def test_refuses_other_shapes(case: Paged) -> None:
    spans = Spans.build(case.layout, [(case.pages[0][0], 0, 0, 1)], 4, case.memories, aligned(64, case.dtype))
    with pytest.raises(ValueError, match=r"values: expected shape \[4, 1, 64\], got \[4, 2, 64\]"):
        write(torch.zeros(4, 1, 64), torch.zeros(4, 2, 64), spans, LAYER)
    with pytest.raises(ValueError, match="layer 7 of 2"):
        write(torch.zeros(4, 1, 64), torch.zeros(4, 1, 64), spans, 7)
