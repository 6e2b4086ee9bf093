"""select: bounds of pages and the choice among them, as their twins; that the bounds bound; what is refused."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gpu.cases import LAYER, LAYERS, draw, paged, run_poisoned
from tierd.kernels.gpu.pages import base_of
from tierd.kernels.gpu.selection import plan_bounds, plan_select
from tierd.kernels.layout import PageLayout
from tierd.kernels.reference import page_planes, selected

CPU = torch.device("cpu")


def test_bounds_and_choice_like_the_twins() -> None:
    generator = torch.Generator().manual_seed(0)
    layout = PageLayout(LAYERS, 2, 48, "bf16")
    case = paged(layout, [100, 33, 0], generator)
    flat = [address for pages in case.pages for address in pages]
    held = [min(16, length - 16 * n) for length in (100, 33, 0) for n in range(-(-length // 16))]
    lengths = torch.tensor(held, dtype=torch.int32)
    low, high = run_poisoned(plan_bounds(torch.tensor(flat), base_of(layout, CPU), layout, LAYER, lengths))
    for ours, theirs in zip((low, high), selected.bounds(flat, case.memories, layout, LAYER, held), strict=True):
        torch.testing.assert_close(ours.double(), theirs)
    queries = draw((3, 6, 48), torch.bfloat16, generator)
    offsets = torch.tensor([0, 7, 10, 10], dtype=torch.int32)
    ours = run_poisoned(plan_select(queries, low, high, offsets, 8, 4))
    wanted = selected.select(queries, low, high, offsets.tolist(), 4, 48**-0.5)
    assert [[place for place in row if place >= 0] for row in ours.places.tolist()] == wanted
    assert ours.places.tolist()[1:] == [[0, 1, 2, -1], [-1] * 4]
    torch.testing.assert_close(ours.worth.sum(1), torch.tensor([1.0, 1.0, 0.0]))
    # No key of a page scores more than its bounds say.
    for page, (address, length) in enumerate(zip(flat[:7], held, strict=False)):
        keys = page_planes(case.memories, address, layout, LAYER)[0][:, :length].double().repeat_interleave(3, 0)
        x = queries[0].double()
        most = torch.maximum(*(x * bound[page].double().repeat_interleave(3, 0) for bound in (low, high))).sum(-1)
        assert (torch.einsum("hd,htd->ht", x, keys).amax(1) <= most + 1e-9).all()


def test_refuses() -> None:
    low = torch.zeros(3, 2, 16)
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="3 heads are not a multiple of 2"):
        plan_select(torch.zeros(1, 3, 16), low, low, offsets, 3, 1)
    with pytest.raises(ValueError, match="k must be 1 to 3 pages, got 4"):
        plan_select(torch.zeros(1, 2, 16), low, low, offsets, 3, 4)
    with pytest.raises(ValueError, match="high: expected shape"):
        plan_select(torch.zeros(1, 2, 16), low, low[:2], offsets, 3, 1)
