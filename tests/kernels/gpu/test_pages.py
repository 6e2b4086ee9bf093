"""pages: a table is checked while its values are on the host."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gpu.cases import LAYER, LAYERS, aligned, paged
from tierd.kernels.gpu.pages import PageTable
from tierd.kernels.layout import PageLayout

LAYOUT = PageLayout(LAYERS, 1, 64, "fp32")


def test_holds_what_it_is_given() -> None:
    case = paged(LAYOUT, [17, 0, 16], torch.Generator())
    table = case.table()
    assert table.pages.tolist() == [address for pages in case.pages for address in pages]
    assert table.offsets.tolist() == [0, 2, 2, 3]
    assert (table.lengths.tolist(), table.max_pages, table.batch) == ([17, 0, 16], 2, 3)


def test_names_the_sequence_of_a_wild_address() -> None:
    case = paged(LAYOUT, [16, 0, 16], torch.Generator())
    end = case.memories[0].data_ptr() + case.memories[0].nbytes
    for wild in (end, end - LAYOUT.payload_bytes + 64, case.pages[2][0] + 32, 0):
        case.pages[2][0] = wild
        with pytest.raises(ValueError, match="sequence 2: no whole, aligned record at address"):
            case.table()


def test_a_staged_slice_needs_its_layer_alone() -> None:
    layer_bytes = LAYOUT.payload_bytes // LAYERS
    slice_only = aligned(layer_bytes, torch.uint8)
    pages = [[slice_only.data_ptr() - LAYER * layer_bytes]]
    base = aligned(64, torch.float32)
    assert PageTable.build(LAYOUT, pages, [16], [slice_only], base, layer=LAYER).batch == 1
    with pytest.raises(ValueError, match="sequence 0: no whole"):
        PageTable.build(LAYOUT, pages, [16], [slice_only], base)


def test_lengths_fit_the_pages() -> None:
    case = paged(LAYOUT, [16], torch.Generator())
    case.lengths[0] = 17
    with pytest.raises(ValueError, match="sequence 0: 17 tokens do not fit 1 pages"):
        case.table()


def test_grids_are_large_enough() -> None:
    case = paged(LAYOUT, [40], torch.Generator())
    assert case.table(max_pages=8).max_pages == 8
    with pytest.raises(ValueError, match="max_pages is 2, but a sequence has 3 pages"):
        case.table(max_pages=2)


@pytest.mark.parametrize(("head_dim", "page_tokens"), [(24, 16), (272, 16), (64, 32)])
def test_shapes_the_kernels_do_not_take(head_dim: int, page_tokens: int) -> None:
    layout = PageLayout(1, 1, head_dim, "fp32", page_tokens)
    with pytest.raises(ValueError, match="head_dim must be a multiple of 16 up to 256|pages of 16 tokens"):
        PageTable.build(layout, [], [], [], aligned(64, torch.float32))
