"""Rows that read, in each layer, only those pages of their sequence that their query may weigh most (`select=K`).

Every page stays, wherever it lies; in memory are the bounds of its keys. They are taken when the last exact row of a
sequence is computed: it reads all pages anyway. Later pages are added as they fill. Then a row reads the first page,
the newest two, and of all others those that are worth most to its query: what a row reads follows from its sequence and
its position alone. In a layer that was trained with a window, it reads the newest pages.

Threading: step thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tierd.daemon.engine.batch import Addresses, Batch
from tierd.tiers.page import PageKey

Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]
Memory = Any

FIRST_PAGES = 1
NEWEST_PAGES = 2  # the one that is being written, and the one before it


class Bounds(Protocol):
    """What there is to know of the pages of one sequence: see `kernels.cpu.selection.PageBounds`."""

    def learn(self, layer: int, first: int, addresses: Addresses) -> None: ...

    def worth(self, layer: int, query: Any, first: int, stop: int) -> Floats: ...


class CardBounds(Bounds, Protocol):
    """What a card knows of them: see `kernels.gpu.choice.CardBounds`. Addresses and queries are on the card."""

    def there(self, addresses: Addresses) -> Any: ...

    def take(self, layer: int, first: int, addresses: Any) -> None: ...

    def picked(self, layer: int, query: Any, table: Any, first: int, stop: int, count: int) -> Any: ...


class Queries(Protocol):
    """Of the rows of a batch, [heads, head_dim] each, where the decoder has them."""

    def __getitem__(self, row: int, /) -> Any: ...


class Picks(Protocol):
    """Who reads pages that are in no memory: see `tiers.picking.Picker`."""

    @property
    def memory(self) -> npt.NDArray[np.uint8]: ...

    def read(self, keys: Sequence[PageKey], section: int, deadline_s: float) -> Addresses: ...


@dataclass(slots=True)
class Selection:
    """Of one sequence. `windows`: of each layer, 0 for none. `on_card`: its bounds where a card chooses by itself."""

    bounds: Bounds
    windows: Sequence[int]
    on_card: CardBounds | None = None

    def places(self, layer: int, query: Any, pages: int, count: int) -> Places:
        """Which `count` of its `pages` pages, there being more, a row in the last one reads; ascending.

        `query` [heads, head_dim].
        """
        if self.windows[layer]:
            return np.arange(pages - count, pages)
        first, stop = FIRST_PAGES, pages - NEWEST_PAGES
        worth = self.bounds.worth(layer, query, first, stop)
        best = np.argsort(-worth, kind="stable")[: count - FIRST_PAGES - NEWEST_PAGES]
        return np.concatenate((np.arange(first), first + np.sort(best), np.arange(stop, pages)))

    def picked(self, bounds: CardBounds, layer: int, query: Any, table: Any, count: int) -> Any:
        """The addresses of the pages at `places`, all of it on the card: of `table`, which has more than `count`."""
        if self.windows[layer]:
            return table[len(table) - count :]
        return bounds.picked(layer, query, table, FIRST_PAGES, len(table) - NEWEST_PAGES, count)


class Pick(NamedTuple):
    """A row that chooses, the only one of its sequence in the batch.

    `table`: addresses of all pages of the sequence, 0 for those in no memory, whose keys `key_of` gives. `fills`: the
    row is the last one of its page.
    """

    selection: Selection
    table: Addresses
    key_of: Callable[[int], PageKey]
    fills: bool


class Lesson(NamedTuple):
    """A sequence of the batch whose first `pages` pages are whole after this pass, and are to be learned."""

    selection: Selection
    pages: int


Wanted: TypeAlias = tuple[int, Pick | Lesson]  # of which sequence of the batch


class Choosing:
    """What is chosen and learned in one pass.

    Args:
        batch: of the pass. A `Pick` has as many pages in it as are to be read.
        wanted: who chooses or learns.
        picks: reads pages that are in no memory; None where there is no store.
        layer_bytes: from one layer of a record to the next.
    """

    def __init__(
        self, batch: Batch, wanted: Iterable[Wanted], picks: Picks | None, layer_bytes: int
    ) -> None:
        self._pages = batch.pages
        self._picks = picks
        self._layer_bytes = layer_bytes
        self._choosers: list[tuple[int, slice, Pick]] = []  # its row, and its pages in the batch
        self._lessons: list[tuple[slice, Lesson]] = []
        rows, offsets = np.searchsorted(batch.row_seq, np.arange(len(batch.page_offsets))), batch.page_offsets.tolist()
        for sequence, who in wanted:
            pages = slice(offsets[sequence], offsets[sequence + 1])
            if isinstance(who, Pick):
                self._choosers.append((int(rows[sequence]), pages, who))
            else:
                self._lessons.append((slice(pages.start, pages.start + who.pages), who))

    @property
    def chooses(self) -> bool:
        """Whether some row has to be asked."""
        return bool(self._choosers)

    def on_card(self) -> CardChoosing | None:
        """What a decoder chooses by that does so itself; None where it can't, or some page is in no memory."""
        choosers: list[_CardChooser] = []
        lessons: list[tuple[CardBounds, Any]] = []
        for row, where, pick in self._choosers:
            bounds = pick.selection.on_card
            if bounds is None or not pick.table.all():
                return None
            table = bounds.there(pick.table)
            choosers.append(_CardChooser(row, where.stop - where.start, pick, bounds, table))
        for where, lesson in self._lessons:
            bounds = lesson.selection.on_card
            if bounds is None:
                return None
            lessons.append((bounds, bounds.there(self._pages[where])))
        return CardChoosing(choosers, lessons)

    def choose(
        self, layer: int, deadline_s: float, memories: Sequence[Memory], pages: Addresses, queries: Queries
    ) -> tuple[Sequence[Memory], Addresses]:
        """The pages that are read in a layer, and what they lie in. Raises StagingLost when some can't be read.

        `pages` of the batch in this layer; `queries`: of its rows.
        """
        pages = pages.copy()
        keys: dict[PageKey, int] = {}  # of what has to be read, in order
        missing: list[tuple[int, int]] = []  # places among `pages`, and among `keys`
        for row, where, pick in self._choosers:
            count = where.stop - where.start
            places = pick.selection.places(layer, queries[row], len(pick.table), count)
            pages[where] = pick.table[places]
            for place in np.flatnonzero(pages[where] == 0).tolist():
                key = pick.key_of(int(places[place]))
                missing.append((where.start + place, keys.setdefault(key, len(keys))))
        if not missing:
            return memories, pages
        if self._picks is None:
            raise AssertionError(f"{len(keys)} pages are to be read without a store")
        found = self._picks.read(list(keys), layer, deadline_s) - layer * self._layer_bytes
        for at, number in missing:
            pages[at] = found[number]
        return (*memories, self._picks.memory), pages

    def learn(self, layer: int, pages: Addresses) -> None:
        """After a layer: what its keys are is known now. `pages` of the batch in this layer."""
        for where, lesson in self._lessons:
            lesson.selection.bounds.learn(layer, 0, np.ascontiguousarray(pages[where]))
        for _, _, pick in self._choosers:
            if pick.fills:
                pick.selection.bounds.learn(layer, len(pick.table) - 1, pick.table[-1:].copy())


class _CardChooser(NamedTuple):
    """A row that `reads` so many pages. `table`: addresses of all pages of its sequence, on the card."""

    row: int
    reads: int
    pick: Pick
    bounds: CardBounds
    table: Any


class CardChoosing:
    """As `Choosing`, where every page lies in memory that the card reads: what is chosen stays there, and is only
    queued. `kernels.gpu.choice.Choices` for the decoder.

    Args:
        choosers: rows that choose.
        lessons: bounds of a sequence, and the addresses on the card of those first pages that are learned.
    """

    def __init__(
        self, choosers: Sequence[_CardChooser], lessons: Sequence[tuple[CardBounds, Any]]
    ) -> None:
        self._choosers = choosers
        self._lessons = lessons

    @property
    def tables(self) -> Sequence[Addresses]:
        """Of each sequence that chooses, the addresses of all its pages."""
        return [chooser.pick.table for chooser in self._choosers]

    def picked(self, layer: int, queries: Queries) -> Iterator[tuple[int, Any]]:
        """Rows that choose, and the addresses, on the card, of the pages that each reads in a layer."""
        for row, reads, pick, bounds, table in self._choosers:
            yield row, pick.selection.picked(bounds, layer, queries[row], table, reads)

    def learn(self, layer: int) -> None:
        """After a layer: what its keys are is known now."""
        for bounds, pages in self._lessons:
            bounds.take(layer, 0, pages)
        for _, _, pick, bounds, table in self._choosers:
            if pick.fills:
                bounds.take(layer, len(table) - 1, table[-1:])
