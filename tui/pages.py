"""The page map as cells: what a page is, in which order pages stand, what a cell of many pages shows. Pure."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import deque
from enum import IntEnum, StrEnum
from itertools import chain, compress
from typing import assert_never

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


# For bytes.translate: all pages of a map in one pass.
_KINDS = bytes(_kind(cell) for cell in range(256))
_IS_FREE = bytes(cell & CELL_STATE == FREE for cell in range(256))
_TAKEN = bytes(cell & CELL_STATE != FREE for cell in range(256))
_EVERY = tuple(Kind)
_FROM_LAST = _EVERY[::-1]  # where as many pages are of one kind as of another, the later one shows
_AGEING = frozenset({Kind.LIVE, Kind.IDLE})  # what has brightness
AGE_STEP_S = 5
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


def places(order: Order, found: ArenaMap) -> array[int] | None:
    """Slots as they stand, None for the order they have; pages without the property come last, then free ones.

    Without NumPy, which would take 20 MiB: sorting 150,000 pages takes 60 to 100 ms.
    """
    if order is Order.ADDRESS or missing_for(order, found):
        return None
    match order:
        case Order.SEQUENCE:
            column = found.owners
        case Order.PREFIX:
            column = found.prefixes
        case Order.AGE:
            column = found.used
        case _:
            assert_never(order)
    every, newest_first = range(found.slots), order is Order.AGE
    placed = sorted(compress(every, found.cells.translate(_TAKEN)), key=column.__getitem__, reverse=newest_first)
    if not newest_first:  # nobody's pages have number 0
        nobodys = bisect_right(placed, 0, key=column.__getitem__)
        placed = placed[nobodys:] + placed[:nobodys]
    return array("I", chain(placed, compress(every, found.cells.translate(_IS_FREE))))


class Cells:
    """The map of a tier as cells of several pages: of each cell what it shows and when its pages were used last.

    Made once, then it follows: what a new map costs is what changed in it.

    Args:
        found: the map.
        given: its slots in the order in which they stand, as `places` gave it, perhaps a moment ago.
        size: pages a cell.
        clock_s: the engine's time, for brightness.
    """

    def __init__(self, found: ArenaMap, given: array[int] | None, size: int, clock_s: float | None) -> None:
        self.found = found
        self.given = given
        self.size = size
        self._cells, self._used = bytearray(found.cells), found.used  # as the pages stand
        self._places: array[int] | None = None  # the other way round: where each slot stands
        if given is not None:
            self._cells = bytearray(map(found.cells.__getitem__, given))
            self._used = array("I", map(found.used.__getitem__, given) if found.used else ())
            self._places = array("I", bytes(4 * found.slots))
            deque(map(self._places.__setitem__, given, range(found.slots)), maxlen=0)
        kinds, used, starts = self._cells.translate(_KINDS), self._used, range(0, found.slots, size)
        self._kinds = bytearray(cell_kind(kinds[start : start + size]) for start in starts)
        self._newest = array("I", (max(used[start : start + size], default=0) for start in starts))
        self.looks = bytearray(len(starts))  # of each cell: its kind times 4 and its level
        self._step = -1
        self.follow(found, clock_s)

    def follow(self, found: ArenaMap, clock_s: float | None) -> bool:
        """Go on to a newer map and a later time. False: what changed in it is not known, or it is of other pages."""
        held, self._clock_s = self.found, clock_s
        if held is not found and not held.version == found.version == found.base:
            if found.base != held.version or found.slots != held.slots or bool(found.used) != bool(held.used):
                return False
            self._take(found)
        step = int(clock_s or 0.0) // AGE_STEP_S if found.used else 0
        if step != self._step:
            self._step = step
            for cell in range(len(self.looks)):
                self._show(cell)
        return True

    def slot(self, place: int) -> int:
        """The slot of the page that stands there."""
        return place if self.given is None else self.given[place]

    def place(self, slot: int) -> int:
        """Where a slot stands."""
        return slot if self._places is None else self._places[slot]

    def _take(self, found: ArenaMap) -> None:
        """Takes in what changed. A cell is looked through only when that may be of consequence for what it shows."""
        held, self.found = self.found, found
        before, now, newest, size, places = held.cells, found.cells, self._newest, self.size, self._places
        if places is None:
            self._cells, self._used = bytearray(found.cells), found.used
        touched, mixed, older = set(), set(), set()
        for slot in found.changed:
            place = slot if places is None else places[slot]
            cell = place // size
            touched.add(cell)
            if _KINDS[before[slot]] != _KINDS[now[slot]]:
                mixed.add(cell)
            if found.used:
                used_s = found.used[slot]
                if used_s >= newest[cell]:
                    newest[cell] = used_s
                elif held.used[slot] == newest[cell]:
                    older.add(cell)
            if places is not None:
                self._cells[place] = now[slot]
                if found.used:
                    self._used[place] = found.used[slot]
        for cell in mixed:
            self._kinds[cell] = cell_kind(self._cells[cell * size : (cell + 1) * size].translate(_KINDS))
        for cell in older:
            newest[cell] = max(self._used[cell * size : (cell + 1) * size])
        for cell in touched:
            self._show(cell)

    def _show(self, cell: int) -> None:
        kind, recent = self._kinds[cell], 0
        if kind in _AGEING:
            recent = level(self._newest[cell], self._clock_s) if self.found.used else UNKNOWN_LEVEL
        self.looks[cell] = 4 * kind + recent


def cell_kind(kinds: bytes | bytearray) -> Kind:
    """What a cell of these pages shows: a damaged page always, else what most of them are."""
    first = kinds[0]
    if len(kinds) == 1 or kinds.count(first) == len(kinds):
        return _EVERY[first]
    if Kind.DAMAGED in kinds:
        return Kind.DAMAGED
    counts = [kinds.count(kind) for kind in _FROM_LAST]
    return _FROM_LAST[counts.index(max(counts))]


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
