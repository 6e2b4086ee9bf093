"""Pages filled at random, poisoned plans, and how far a kernel may be from its twin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from hypothesis import Phase, settings
from torch import Tensor

from tierd.kernels import reference
from tierd.kernels.gpu.launch import Plan
from tierd.kernels.gpu.pages import PAGE_DTYPES, PageTable
from tierd.kernels.layout import PageLayout

Result = TypeVar("Result")

LAYERS, LAYER = 2, 1  # the layer tested is not the first, so that offsets count
EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

# An example takes half a second under the interpreter, so that shrinking would take minutes.
few_examples = settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
many_examples = settings(few_examples, max_examples=60)


@dataclass
class Paged:
    """Some sequences over two memories (as if one were pinned CPU memory); what they do not hold is NaN."""

    layout: PageLayout
    memories: list[Tensor]  # uint8 [slots, record_bytes]
    pages: list[list[int]]
    lengths: list[int]

    @property
    def dtype(self) -> torch.dtype:
        return PAGE_DTYPES[self.layout.format]

    def table(self, max_pages: int | None = None) -> PageTable:
        base = aligned(64, self.dtype)
        return PageTable.build(self.layout, self.pages, self.lengths, self.memories, base, max_pages)


def aligned(count: int, dtype: torch.dtype) -> Tensor:
    """A tensor of `count` elements that begins at a multiple of 64 bytes, as all allocations of a card do."""
    size = torch.empty(0, dtype=dtype).element_size()
    block = torch.zeros(count * size + 64, dtype=torch.uint8)
    return block[-block.data_ptr() % 64 :][: count * size].view(dtype)


def paged(
    layout: PageLayout, lengths: Sequence[int], generator: torch.Generator, large: bool = False, spare_pages: int = 0
) -> Paged:
    """Sequences of so many tokens, on pages scattered over two memories, `spare_pages` more than each needs."""
    counts = [-(-length // layout.page_tokens) + spare_pages for length in lengths]
    slots = sum(counts) + 2
    memories = []
    for _ in range(2):
        memory = aligned(slots * layout.record_bytes, torch.uint8).view(slots, layout.record_bytes)
        memory[:, : layout.payload_bytes].view(PAGE_DTYPES[layout.format]).fill_(math.nan)
        memories.append(memory)
    order = torch.randperm(2 * slots, generator=generator).tolist()
    addresses = [memories[slot % 2][slot // 2].data_ptr() for slot in order]
    pages, used = [], 0
    for count, length in zip(counts, lengths, strict=True):
        pages.append(addresses[used : used + count])
        used += count
        for index, address in enumerate(pages[-1]):
            tokens = min(layout.page_tokens, length - index * layout.page_tokens)
            if tokens > 0:
                for plane in reference.page_planes(memories, address, layout, LAYER):
                    plane[:, :tokens] = draw((layout.kv_heads, tokens, layout.head_dim), plane.dtype, generator, large)
    return Paged(layout, memories, pages, list(lengths))


def draw(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, large: bool = False) -> Tensor:
    """Normal values; `large` ones are multiples of 16 up to 128, so that sums of their products are exact in fp32."""
    if large:
        return (torch.randint(-8, 9, tuple(shape), generator=generator) * 16).to(dtype)
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """The same values with gaps between rows and between elements; the gaps are NaN."""
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3), math.nan, dtype=tensor.dtype)
    view = wide[..., 1 : 1 + 2 * tensor.shape[-1] : 2]
    view.copy_(tensor)
    return view


def score_error(case: Paged, queries: Tensor, scale: float, extra_keys: Tensor | None = None) -> float:
    """How far fp32 may put a score from its true value: a few roundings of the largest one. Weights are off by that."""
    planes = [reference.page_planes(case.memories, a, case.layout, LAYER)[0] for pages in case.pages for a in pages]
    keys = [plane.transpose(0, 1) for plane in planes] + ([] if extra_keys is None else [extra_keys])
    if not keys:
        return 0.0
    k = torch.cat(keys).double().nan_to_num().repeat_interleave(queries.shape[1] // case.layout.kv_heads, 1)
    largest = float(torch.einsum("rhd,thd->rht", queries.double(), k).abs().max()) * scale
    return 8 * EPSILON[torch.float32] * (largest + 1)


def run_poisoned(plan: Plan[Result]) -> Result:
    """Runs a plan whose buffers hold NaN before, so that what a kernel fails to write is seen."""
    for buffer in plan.buffers:
        buffer.fill_(math.nan if buffer.is_floating_point() else 77)
    return plan.run()


def assert_close(ours: Tensor, judge: Tensor, bound: float) -> None:
    """Differences are at most `bound`; infinities and their places are the same."""
    infinite = judge.isinf()
    assert torch.equal(ours.double()[infinite], judge[infinite])
    difference = (ours.double() - judge)[~infinite].abs()
    assert bool((difference <= bound).all()), f"largest difference {difference.max():.3g}, bound {bound:.3g}"
