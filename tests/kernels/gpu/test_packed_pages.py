"""Pages of fp8 and of codes: written as the twin writes them, read by decode and extend as they stand for."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.gpu.cases import LAYER, LAYERS, aligned, assert_close, draw, run_poisoned
from tierd.kernels import reference
from tierd.kernels.gpu.decode import plan_decode
from tierd.kernels.gpu.extend import plan_extend
from tierd.kernels.gpu.pages import PageTable, base_of
from tierd.kernels.gpu.write import Spans, plan_write
from tierd.kernels.layout import PageLayout

CPU = torch.device("cpu")
FORMATS = ["fp8", "k8v8", "k8v4", "k4v8", "k4v4"]
TOKENS = 21


class Pages:
    """Two pages of one sequence in some format, filled by the kernel and, beside it, by the twin."""

    def __init__(self, format: str, head_dim: int, kv_heads: int = 1) -> None:
        self.layout = PageLayout(LAYERS, kv_heads, head_dim, format)
        size = self.layout.record_bytes
        self.ours, self.theirs = (aligned(2 * size, torch.uint8).view(2, size) for _ in range(2))
        generator = torch.Generator().manual_seed(head_dim)
        shape = (TOKENS, kv_heads, head_dim)
        self.keys = draw(shape, torch.float32, generator) + 3 * draw((1, kv_heads, head_dim), torch.float32, generator)
        self.values = draw(shape, torch.float32, generator)
        self.generator = generator
        # The first page in pieces, token by token as a decode step writes it; the second one half full.
        for first, count in ((0, 3), (3, 1), (4, 12), (16, 5)):
            page, token = divmod(first, 16)
            self.write(page, token, first, count)

    def write(self, page: int, token: int, row: int, count: int) -> None:
        for memory, twin in ((self.ours, False), (self.theirs, True)):
            span = [(memory[page].data_ptr(), row, token, count)]
            if twin:
                reference.write(self.keys, self.values, [memory], self.layout, LAYER, span)
            else:
                spans = Spans.build(self.layout, span, TOKENS, [memory], base_of(self.layout, CPU))
                run_poisoned(plan_write(self.keys, self.values, spans, LAYER))

    def addresses(self) -> list[int]:
        return [self.ours[page].data_ptr() for page in range(2)]

    def table(self, length: int = TOKENS) -> PageTable:
        return PageTable.build(self.layout, [self.addresses()], [length], [self.ours], base_of(self.layout, CPU))


def planes(memory: torch.Tensor, layout: PageLayout) -> list[torch.Tensor]:
    """What a memory's tokens stand for: keys and values [tokens, kv_heads, head_dim]."""
    found = [reference.page_planes([memory], memory[page].data_ptr(), layout, LAYER) for page in range(2)]
    return [torch.cat([pair[n].transpose(0, 1) for pair in found])[:TOKENS].double() for n in range(2)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("head_dim", [32, *(pytest.param(size, marks=pytest.mark.long) for size in (80, 96, 128))])
def test_pages_are_written_as_the_twin_writes_them(format: str, head_dim: int) -> None:
    pages = Pages(format, head_dim)
    for ours, theirs, original in zip(
        planes(pages.ours, pages.layout), planes(pages.theirs, pages.layout), (pages.keys, pages.values), strict=True
    ):
        # Numbers that lie between two codes may go either way; all others have the same code.
        assert (ours - theirs).abs().max() <= (theirs - original.double()).abs().max() * 2.1
        assert float(((ours - theirs).abs() > 1e-3).double().mean()) < 0.02
    untouched = pages.layout.layer_bytes  # of the other layer
    assert not pages.ours[:, :untouched].any()


@pytest.mark.parametrize("format", FORMATS)
def test_decode_reads_what_the_codes_stand_for(format: str) -> None:
    pages = Pages(format, 32)
    queries = draw((1, 2, 32), torch.float32, pages.generator)
    ours = run_poisoned(plan_decode(queries, pages.table(), LAYER, window=18, want_mass=True))
    out, lse, mass = reference.decode(
        queries, [pages.ours], pages.layout, LAYER, [pages.addresses()], [TOKENS], scale=1 / math.sqrt(32), window=18
    )
    assert_close(ours.out, out, 1e-4)
    assert_close(ours.lse, lse, 1e-4)
    assert ours.mass is not None
    assert_close(ours.mass, mass, 1e-4)


@pytest.mark.parametrize("format", ["fp8", "k4v8"])
def test_extend_reads_what_the_codes_stand_for(format: str) -> None:
    pages = Pages(format, 32)
    queries = draw((3, 2, 32), torch.float32, pages.generator)
    keys, values = (draw((3, 1, 32), torch.float32, pages.generator) for _ in range(2))
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    ours = run_poisoned(plan_extend(queries, keys, values, offsets, 3, pages.table(), LAYER))
    out, lse = reference.extend(
        queries, keys, values, [0, 3], [pages.ours], pages.layout, LAYER, [pages.addresses()], [TOKENS],
        1 / math.sqrt(32),
    )  # fmt: skip
    assert_close(ours.out, out, 1e-4)
    assert_close(ours.lse, lse, 1e-4)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_no_number_is_not_hidden(format: str) -> None:
    pages = Pages(format, 32)
    pages.values[17, 0, 5] = math.nan
    pages.write(1, 1, 17, 1)
    out = run_poisoned(plan_decode(draw((1, 1, 32), torch.float32, pages.generator), pages.table(), LAYER)).out
    assert out.isnan().any()


def test_a_page_is_not_begun_and_continued_in_one_launch() -> None:
    pages = Pages("k8v8", 32)
    address = pages.addresses()[0]
    spans = [(address, 0, 0, 1), (address, 1, 1, 2)]
    with pytest.raises(ValueError, match="span 1: the page's first token is written in this launch"):
        Spans.build(pages.layout, spans, TOKENS, [pages.ours], base_of(pages.layout, CPU))
