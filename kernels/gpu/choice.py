"""Rows that choose, in each layer, the pages they read (`select=K`): bounds of a sequence, and the choice on the card.

Bounds lie in memory of the card. Where all pages of a sequence lie in memory that the card reads, its choice stays
there as well: what was chosen are addresses, which are put where `decode` looks for them, and the host waits for
nothing. Else the host is told what each page is worth; it chooses the same ones, for both rank the same numbers.

A sequence is asked for alone, so that what it chooses does not depend on its company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierd.kernels.gpu.batch import Addresses, Arranged, Range, check_addresses, ranges_of
from tierd.kernels.gpu.inputs import Inputs
from tierd.kernels.gpu.launch import on_host, wait_for
from tierd.kernels.gpu.pages import base_of, turning
from tierd.kernels.gpu.selection import Selected, plan_bounds, plan_select
from tierd.kernels.layout import PageLayout
from tierd.kernels.rows import Ints

Floats = NDArray[np.float32]
_ROOM_PAGES = 64  # more of them at a time


class CardBounds:
    """The bounds of the whole pages of one sequence, in all layers: 8 bytes a channel and kv head, layer and page.

    Args:
        layout: of its pages.
        device: where they lie.
        stream: that everything is launched on; None for the caller's current one.
    """

    def __init__(
        self, layout: PageLayout, device: torch.device, stream: torch.cuda.Stream | None = None
    ) -> None:
        self._layout, self._device, self._stream = layout, device, stream
        self._base = base_of(layout, device)
        shape = (2, layout.num_layers, 0, layout.kv_heads, layout.head_dim)
        self._bounds = torch.empty(shape, dtype=torch.float32, device=device)  # low and high
        self._ends = torch.zeros(2, dtype=torch.int32, device=device)  # of the pages that were asked for last

    def learn(self, layer: int, first: int, addresses: Addresses) -> None:
        """Takes the bounds of pages `first` and up, all of whose tokens are there; `addresses` of their records.

        Returns when they are taken: the memory may then be filled with something else.
        """
        with torch.cuda.stream(self._stream):
            self.take(layer, first, self.there(addresses))
            wait_for(self._device)

    def worth(self, layer: int, query: Tensor, first: int, stop: int) -> Floats:
        """What pages `first` to `stop` may be worth to a query [heads, head_dim] on the card, not scaled and not
        turned. Waits for it."""
        with torch.cuda.stream(self._stream):
            return on_host(self._select(layer, query, first, stop, 1).worth[0])

    def there(self, addresses: Addresses) -> Tensor:
        """Addresses on the card."""
        near = torch.from_numpy(np.ascontiguousarray(addresses))
        return near.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else near

    def take(self, layer: int, first: int, addresses: Tensor) -> None:
        """As `learn`, for addresses that are on the card; only queued."""
        stop = first + len(addresses)
        if stop > self._bounds.shape[2]:
            held = self._bounds
            shape = (*held.shape[:2], stop + _ROOM_PAGES, *held.shape[3:])
            self._bounds = torch.empty(shape, dtype=held.dtype, device=held.device)
            self._bounds[:, :, : held.shape[2]] = held
        low, high = self._bounds[:, layer, first:stop]
        plan_bounds(addresses, self._base, self._layout, layer, out=(low, high)).run()

    def picked(self, layer: int, query: Tensor, table: Tensor, first: int, stop: int, count: int) -> Tensor:
        """The addresses, in order, of the pages of `table` before `first`, of those from `stop` on, and of those of the
        others that may be worth most to a query: `count` in all. Only queued."""
        between = count - first - (len(table) - stop)
        places = self._select(layer, query, first, stop, between).places[0] + first
        return torch.cat((table[:first], table.index_select(0, places), table[stop:]))

    def _select(self, layer: int, query: Tensor, first: int, stop: int, count: int) -> Selected:
        turned, turn = turning(query[None], self._layout)
        for launch in turn:
            launch.run()
        low, high = self._bounds[:, layer, first:stop]
        self._ends[1] = stop - first  # a constant of its kernel: nothing is copied
        return plan_select(turned, low, high, self._ends, stop - first, count).run()


class Choices(Protocol):
    """What is chosen and learned in one pass, all of whose pages lie in memory that the card reads."""

    @property
    def tables(self) -> Sequence[Addresses]:
        """Of each sequence that chooses, all its pages."""
        ...

    def picked(self, layer: int, queries: InOrder) -> Iterable[tuple[int, Any]]:
        """Rows that choose, and the addresses, on the card, of the pages that each reads in a layer."""
        ...

    def learn(self, layer: int) -> None:
        """After a layer: what its keys are is known now."""
        ...


class InOrder:
    """Queries [rows, heads, head_dim] on the card, by the row of the caller's."""

    def __init__(self, queries: Tensor, arranged: Arranged) -> None:
        self._queries, self._arranged = queries, arranged

    def __getitem__(self, row: int) -> Tensor:
        return self._queries[int(self._arranged.new_rows[row])]


Choose = Callable[[InOrder], tuple[Sequence[Any], Addresses]]  # queries to memories and pages


class Choosing:
    """The choice of one pass, for the decoder."""

    def __init__(self, choices: Choices, arranged: Arranged, inputs: Inputs) -> None:
        self._choices, self._arranged, self._inputs = choices, arranged, inputs

    def __call__(self, layer: int, queries: Tensor) -> None:
        """Puts what is chosen in a layer where `decode` looks for it."""
        ends = self._arranged.decode_offsets
        for row, pages in self._choices.picked(layer, InOrder(queries, self._arranged)):
            at = int(self._arranged.new_rows[row])
            self._inputs.decode_pages[int(ends[at]) : int(ends[at + 1])].copy_(pages)

    def learn(self, layer: int) -> None:
        """After a layer."""
        self._choices.learn(layer)


class Asking:
    """The choice of one pass that goes layer by layer, for the decoder: the host is asked, and waited for.

    Args:
        choose: is given the queries, and says which pages are read, and the memories that they lie in.
        page_offsets: of the pass.
    """

    def __init__(
        self, choose: Choose, arranged: Arranged, inputs: Inputs, page_offsets: Ints, layout: PageLayout
    ) -> None:
        self._choose, self._arranged, self._inputs = choose, arranged, inputs
        self._page_offsets, self._layout = page_offsets, layout

    def __call__(self, layer: int, queries: Tensor) -> None:
        """As `Choosing`. Raises ValueError for pages that do not lie in the memories."""
        memories, pages = self._choose(InOrder(queries, self._arranged))
        check_addresses(pages, self._page_offsets, ranges_of(memories), self._layout, range(layer, layer + 1))
        wait_for(queries.device)  # the block that is filled now is on its way until then
        self._inputs.load_pages(self._arranged, pages)


def check_tables(choices: Choices, memories: Sequence[Range], layout: PageLayout) -> None:
    """Raises ValueError unless all pages that may be chosen lie, aligned, within one of the memories."""
    for table in choices.tables:
        check_addresses(table, np.array([0, len(table)], np.int32), memories, layout, range(layout.num_layers))
