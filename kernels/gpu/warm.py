"""Compiling what passes launch ahead of use: a step must not wait for the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tierd.kernels.gpu.batch import ALIGN_BYTES, Range
from tierd.kernels.layout import PageLayout
from tierd.kernels.rows import Bound, Exact, Ints

if TYPE_CHECKING:
    from tierd.kernels.gpu.decoder import GpuDecoder
    from tierd.kernels.gpu.layers import GpuLayer
    from tierd.kernels.gpu.mixture import CardExpertSource

_BOUND = Bound(window=16, sinks=1, lead=1)
_CHUNK = 16


class _Pass(NamedTuple):
    """Rows of sequences, all of whose pages are one."""

    spans: list[tuple[int, int]]  # first position and rows of each
    bounds: Ints | None = None
    observed: Ints | None = None
    copy: Range | None = None  # the exact one that its pages have


def warm_up(
    decoder: GpuDecoder, progress: Callable[[int, int], None], place: Callable[[int], GpuLayer | None],
    copies: bool = False, experts: Callable[[], CardExpertSource | None] = lambda: None,
) -> None:  # fmt: skip
    """Runs passes of one row and of a chunk, as they are and with what memory modes take: a window, sinks, a row that
    is observed; with `copies`, of pages that have exact ones. They write to a page of their own, and to one copy."""
    size = decoder.layout.page_tokens
    memory, record = _page(decoder.layout, decoder.device)
    passes = [_Pass([(0, 1)]), _Pass([(0, _CHUNK)])]
    if copies and decoder.copy_layout is not None:
        copy, kept = _page(decoder.copy_layout, decoder.device)
        passes += [each._replace(copy=copy) for each in passes]
    first = _BOUND.window + _BOUND.sinks
    if decoder.has_far:
        passes += [
            _Pass([(first, 1), (0, 1)], np.array([_BOUND, Bound()], np.int32), np.array([1], np.int32)),
            _Pass([(first, 2)], np.array([_BOUND], np.int32)),
            _Pass([(first, 2)], np.array([Bound(_BOUND.window)], np.int32)),
        ]
    passes = [
        each for each in passes
        if sum(count for _, count in each.spans) <= decoder.max_rows
        and max(at + count for at, count in each.spans) <= decoder.context
    ]  # fmt: skip
    for done, each in enumerate(passes):
        progress(done, len(passes))
        counts = [count for _, count in each.spans]
        positions = np.concatenate([np.arange(at, at + count, dtype=np.int32) for at, count in each.spans])
        held = [_BOUND.lead + (at + count - 1) // size + 1 for at, count in each.spans]
        pages, ends = np.full(sum(held), memory.address), np.cumsum([0, *held], dtype=np.int32)
        rows = (
            np.zeros(len(positions), np.int32), positions, np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        )  # fmt: skip
        last = np.array([len(positions) - 1], np.int32)
        exact = Exact(np.full(len(pages), each.copy.address), each.copy) if each.copy is not None else None
        if not decoder.streams:
            decoder.forward([memory], *rows, pages, ends, last, each.bounds, None, each.observed, exact)
            continue
        decoder.start(*rows, ends, last, None, each.bounds, each.observed, exact)
        for index in range(decoder.layout.num_layers):
            decoder.layer(index, [memory], pages, place(index), experts())
        decoder.finish()
    progress(len(passes), len(passes))


def _page(layout: PageLayout, device: torch.device) -> tuple[Range, torch.Tensor]:
    """Where a page lies that nobody else uses, as long as the tensor is there."""
    record = torch.zeros(layout.record_bytes + ALIGN_BYTES, dtype=torch.uint8, device=device)
    return Range(-(-record.data_ptr() // ALIGN_BYTES) * ALIGN_BYTES, layout.record_bytes), record
