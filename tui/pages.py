"""The page map as cells: what a page is, in which order pages stand, what a cell of many pages shows. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, assert_never

from tierd.tui.snapshot import ArenaMap
from tierd.tui.wire import (
    CELL_KEPT,
    CELL_MOVING,
    CELL_STATE,
    DAMAGED,
    DRAINING,
    FILLING,
    FREE,
    IDLE,
    PINNED,
    PRIVATE,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Places = npt.NDArray[np.intp]


class Kind(IntEnum):
    """What a cell shows of its pages."""

    FREE = 0
    PRIVATE = 1
    LIVE = 2
    IDLE = 3
    MOVING = 4
    DAMAGED = 5
    KEPT = 6
    UNKNOWN = 7


class Order(StrEnum):
    """How pages stand in the map."""

    ADDRESS = "address"
    SEQUENCE = "sequence"
    AGE = "age"
    PREFIX = "prefix"


def _kind(cell: int) -> Kind:
    state = cell & CELL_STATE
    if state == DAMAGED:
        return Kind.DAMAGED
    if state == FREE:
        return Kind.FREE
    if cell & CELL_MOVING or state in (FILLING, DRAINING):
        return Kind.MOVING
    if cell & CELL_KEPT:
        return Kind.KEPT
    return {PRIVATE: Kind.PRIVATE, PINNED: Kind.LIVE, IDLE: Kind.IDLE}.get(state, Kind.UNKNOWN)


_KINDS = bytes(_kind(cell) for cell in range(256))  # for bytes.translate: all pages of a map in one pass
FRESH_S = (10, 60, 600)  # a page used within so many seconds has level 3, 2, 1
UNKNOWN_LEVEL = 2


def kind_of(cell: int) -> Kind:
    """What one page is shown as."""
    return Kind(_KINDS[cell])


def missing_for(order: Order, found: ArenaMap) -> str:
    """What the daemon would have to report for this order; empty when it does."""
    match order:
        case Order.ADDRESS:
            return ""
        case Order.SEQUENCE:
            return "" if found.owners else "owners of pages"
        case Order.AGE:
            return "" if found.used else "last use of pages"
        case Order.PREFIX:
            return "" if found.prefixes else "prefixes of pages"
        case _:
            assert_never(order)


def places(order: Order, found: ArenaMap) -> Places | None:
    """Slots in the order of the map, None for the order they have. Pages without the property come last.

    NumPy is loaded here, when an order is asked for that needs it: sorting 250,000 pages takes 10 ms with it.
    """
    if order is Order.ADDRESS or missing_for(order, found):
        return None
    import numpy as np

    match order:
        case Order.SEQUENCE | Order.PREFIX:
            owners = found.owners if order is Order.SEQUENCE else found.prefixes
            column = np.array(owners, dtype=np.uint32) - 1  # 0, nobody's, becomes the last
        case Order.AGE:
            column = ~np.array(found.used, dtype=np.uint32)  # newest first, never used last
        case _:
            assert_never(order)
    free = (np.frombuffer(found.cells, dtype=np.uint8) & CELL_STATE) == FREE
    column[free] = 0xFFFFFFFF
    return np.argsort(column, kind="stable")


@dataclass(slots=True)
class Ordered:
    """A map in an order: kinds and last uses of the pages as they stand."""

    found: ArenaMap
    order: Order
    places: Places | None
    kinds: bytes
    used: memoryview

    @classmethod
    def of(cls, found: ArenaMap, order: Order, given: Places | None) -> Ordered:
        """The map with the places that were worked out for it, perhaps a moment ago."""
        cells, used = found.cells, memoryview(found.used)
        if given is not None:
            import numpy as np

            cells = np.frombuffer(cells, dtype=np.uint8)[given].tobytes()
            if found.used:
                used = np.frombuffer(found.used, dtype=np.uint32)[given].data
        return cls(found, order, given, cells.translate(_KINDS), used)

    def slot(self, place: int) -> int:
        """The slot of the page that stands there."""
        return place if self.places is None else int(self.places[place])

    def place(self, slot: int) -> int:
        """Where a slot stands."""
        if self.places is None:
            return slot
        import numpy as np

        return int(np.flatnonzero(self.places == slot)[0])


def cell_kind(kinds: bytes) -> Kind:
    """What a cell of these pages shows: a damaged page always, else what most of them are."""
    if len(kinds) == 1 or kinds.count(kinds[0]) == len(kinds):
        return Kind(kinds[0])
    if Kind.DAMAGED in kinds:
        return Kind.DAMAGED
    most, found = 0, 0
    for kind in set(kinds):
        count = kinds.count(kind)
        if count > most or (count == most and kind > found):
            most, found = count, kind
    return Kind(found)


def level(used_s: int, clock_s: float | None) -> int:
    """Recency, 0 to 3. Without a clock, or for a page never used, the lowest."""
    if clock_s is None or not used_s:
        return 0
    age_s = clock_s - used_s
    for step, limit_s in enumerate(FRESH_S):
        if age_s <= limit_s:
            return 3 - step
    return 0


def pages_a_cell(slots: list[int], width: int, height: int) -> list[int]:
    """For each map the pages of a cell, powers of two, with which all fit into `height` lines beside their names.

    The map with the most lines is the first to be drawn smaller: a small tier keeps a cell for each page.
    """
    sizes = [1] * len(slots)

    def lines(place: int) -> int:
        cells = math.ceil(slots[place] / sizes[place])
        return math.ceil(cells / width)

    while sum(1 + lines(place) for place in range(len(slots))) > height:
        largest = max(range(len(slots)), key=lines)
        if lines(largest) <= 1:
            break
        sizes[largest] *= 2
    return sizes
