"""The page map of a tier for `tierd top`: a byte a page and what else is shown of it, as a whole or as what changed.

A sketch follows the pager's books: the states of the slots are read as they are, what a page says of itself comes from
the pages that were touched since the last look. So a look costs what has happened, not what there is.

On disk a page has no slot that the pager knows: there it has a place of the map, which it keeps as long as it is there.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tierd.tiers.arena import Arena, SlotState
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.pager import Pager
from tierd.tiers.prefix import Node, PrefixIndex

PARTIAL, IN_HOST, DURABLE, MOVING, KEPT = 0x08, 0x10, 0x20, 0x40, 0x80  # flags of a cell, above its `SlotState`

_ROW_BYTES = 1 + 4 + 2 + 2  # of all columns
_SLOT_BYTES = 4
_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, repr=False)
class TierMap:
    """Every page of one tier at one moment.

    Attributes:
        tier: device, host or nvme.
        since: the version in which it came to have this number of slots; what is older can't be compared with it.
        cells: u8[slots], `SlotState` and flags.
        used: u32[slots], second of the last use on the scale of `Pager.page_time`, 0 for none.
        owners: u16[slots], 1 + place of the request that holds the page, 0 for none.
        prefixes: u16[slots], 1 + place of the prefix row that it belongs to, 0 for none, 65535 beyond the rows.
        changed: int64[slots], the version in which each slot changed last.
    """

    tier: str
    since: int
    cells: npt.NDArray[np.uint8]
    used: npt.NDArray[np.uint32]
    owners: npt.NDArray[np.uint16]
    prefixes: npt.NDArray[np.uint16]
    changed: npt.NDArray[np.int64]

    def part(self, version: int, base: int | None) -> dict[str, Any]:
        """What somebody lacks who has version `base`: the slots that changed, or all when that is less."""
        slots = len(self.cells)
        told: dict[str, Any] = {"tier": self.tier, "version": version, "slots": slots}
        chosen: Any = slice(None)
        if base is not None and self.since <= base <= version:
            changed = np.flatnonzero(self.changed > base)
            if len(changed) * (_ROW_BYTES + _SLOT_BYTES) < slots * _ROW_BYTES or not slots:
                told |= {"base": base, "changed": changed.astype("<u4").tobytes()}
                chosen = changed
        return told | {
            "cells": self.cells[chosen].tobytes(),
            "used": self.used[chosen].astype("<u4").tobytes(),
            "owners": self.owners[chosen].astype("<u2").tobytes(),
            "prefixes": self.prefixes[chosen].astype("<u2").tobytes(),
        }


class Sketch:
    """Makes the maps of one arena. Threading: step thread only."""

    def __init__(self, tier: Tier, arena: Arena, index: PrefixIndex) -> None:
        self._tier = tier
        self._arena = arena
        self._index = index
        self._keys: list[PageKey | None] = []  # of the page that each slot held when it was taken
        self._flags = np.zeros(0, np.uint8)
        self._used = np.zeros(0, np.uint32)
        self._prefixes = np.zeros(0, np.uint16)
        self._map: TierMap | None = None

    def take(self, nodes: Collection[Node]) -> None:
        """Notes what these pages say of themselves."""
        self._fit(len(self._arena.states))
        on_device, full, keys = self._tier is Tier.DEVICE, self._index.page_bytes, self._keys
        here = [node for node in nodes if (node.device if on_device else node.host) >= 0]
        held = [node.device if on_device else node.host for node in here]
        self._flags[held] = [
            PARTIAL * (len(node.packed) < full)
            | IN_HOST * (on_device and node.host >= 0)
            | DURABLE * node.durable
            | MOVING * (node.moves > 0)
            | KEPT * node.kept
            for node in here
        ]
        self._used[held] = [int(node.last_use_s) for node in here]
        for node, slot in zip(here, held, strict=True):
            if keys[slot] != node.key:  # until the tree is sorted anew it counts to the prefix before it
                keys[slot] = node.key
                before = self._index.get(node.parent)
                place = -1 if before is None else before.device if on_device else before.host
                self._prefixes[slot] = self._prefixes[place] if place >= 0 else 0

    def sort_in(self, slots: npt.NDArray[np.int64], numbers: npt.NDArray[np.uint16]) -> None:
        """All pages by prefix anew: `numbers[i]` belongs to the page in `slots[i]`. After `take`."""
        self._prefixes[:] = 0
        there = slots < len(self._prefixes)  # it may have shrunk since they were gathered
        self._prefixes[slots[there]] = numbers[there]

    def _fit(self, slots: int) -> None:
        if slots != len(self._keys):
            self._flags, self._used = _fitted(self._flags, slots), _fitted(self._used, slots)
            self._prefixes = _fitted(self._prefixes, slots)
            self._keys = (self._keys + [None] * slots)[:slots]

    def look(self, version: int, now_s: float, owners: npt.NDArray[np.uint16]) -> TierMap:
        """The map now. `owners` as in `TierMap`; after `take`."""
        states = np.frombuffer(bytes(self._arena.states), np.uint8)  # a copy: the arena may change its size later
        known = (states == SlotState.PINNED) | (states == SlotState.IDLE)
        cells = np.where(states == SlotState.RETIRED, np.uint8(SlotState.FREE), states)
        cells = np.where(known, cells | self._flags, cells)
        used = np.where(known, self._used, np.uint32(0))
        used[states == SlotState.PRIVATE] = int(now_s)
        prefixes = np.where(known, self._prefixes, np.uint16(0))
        self._map = _following(self._map, self._tier, version, (cells, used, owners, prefixes))
        return self._map

    def key_at(self, slot: int) -> PageKey | None:
        """The page that was seen in a slot."""
        return self._keys[slot] if 0 <= slot < len(self._keys) else None

    def slot_of(self, node: Node) -> int:
        """Where a page lies, negative for nowhere here."""
        return node.device if self._tier is Tier.DEVICE else node.host


class DiskSketch:
    """Makes the map of the store. Threading: step thread only."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._places: dict[PageKey, int] = {}
        self._free: list[int] = []  # a heap: what is low is given out first
        self._keys: list[PageKey | None] = []
        self._cells = np.zeros(0, np.uint8)
        self._used = np.zeros(0, np.uint32)
        self._prefixes = np.zeros(0, np.uint16)
        self._map: TierMap | None = None

    def take(self, nodes: Collection[Node]) -> None:
        """Notes what these pages say of themselves."""
        known, full = self._pager.index.nodes, self._pager.index.page_bytes
        for touched in nodes:
            node = known.get(touched.key)  # a page may have gone and come again
            if node is None or not (node.durable or node.writing):
                self._leave(touched.key)
                continue
            place = self._places.get(node.key)
            if place is None:
                place = self._come(node)
            state = SlotState.FILLING if not node.durable else SlotState.PINNED if node.pins else SlotState.IDLE
            flags = PARTIAL * (len(node.packed) < full) | IN_HOST * (node.host >= 0) | MOVING * (node.moves > 0)
            self._cells[place] = state | flags | KEPT * node.kept
            self._used[place] = int(node.last_use_s)
        self._fit(max(self._pager.residency.store_slots, len(self._places)))

    def _come(self, node: Node) -> int:
        place = heapq.heappop(self._free) if self._free else len(self._keys)
        if place < len(self._keys):
            self._keys[place] = node.key
        else:
            place = len(self._keys)  # what is free beyond it went when the store became smaller
            self._keys.append(node.key)
            if place >= len(self._cells):
                size = max(2 * place, 256)
                self._cells, self._used = _fitted(self._cells, size), _fitted(self._used, size)
                self._prefixes = _fitted(self._prefixes, size)
        self._places[node.key] = place
        before = self._places.get(node.parent)  # until the tree is sorted anew it counts to the prefix before it
        self._prefixes[place] = self._prefixes[before] if before is not None else 0
        return place

    def _leave(self, key: PageKey) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            self._keys[place] = None
            heapq.heappush(self._free, place)
            self._cells[place] = self._used[place] = self._prefixes[place] = 0

    def _fit(self, slots: int) -> None:
        """No place beyond the store, though more pages than it holds may have been on their way for a moment."""
        while len(self._keys) > slots:
            key, last = self._keys.pop(), len(self._keys)
            if key is None:
                continue
            place = heapq.heappop(self._free)
            self._keys[place], self._places[key] = key, place
            for column in (self._cells, self._used, self._prefixes):
                column[place], column[last] = column[last], 0

    def sort_in(self, slots: npt.NDArray[np.int64], numbers: npt.NDArray[np.uint16]) -> None:
        """As `Sketch.sort_in`."""
        self._prefixes[:] = 0
        self._prefixes[slots] = numbers

    def look(self, version: int, now_s: float, owners: npt.NDArray[np.uint16]) -> TierMap:
        """The map now. `owners` of the places that there were before; after `take`."""
        del now_s  # no page is written to there
        slots = max(self._pager.residency.store_slots, len(self._places))
        cells, used, owned = _fitted(self._cells, slots), _fitted(self._used, slots), _fitted(owners, slots)
        prefixes = np.where(cells == SlotState.FREE, np.uint16(0), _fitted(self._prefixes, slots))
        self._map = _following(self._map, Tier.NVME, version, (cells, used, owned, prefixes))
        return self._map

    @property
    def slots(self) -> int:
        """Places that have been given out at any time."""
        return len(self._keys)

    def key_at(self, slot: int) -> PageKey | None:
        """The page that was seen in a place."""
        return self._keys[slot] if 0 <= slot < len(self._keys) else None

    def slot_of(self, node: Node) -> int:
        """The place of a page, negative for none."""
        return self._places.get(node.key, -1)


_Columns = tuple[
    npt.NDArray[np.uint8], npt.NDArray[np.uint32], npt.NDArray[np.uint16], npt.NDArray[np.uint16]
]  # cells, used, owners, prefixes


def _following(last: TierMap | None, tier: Tier, version: int, columns: _Columns) -> TierMap:
    """A map of these columns that says which slots are not as in the last one."""
    cells, used, owners, prefixes = columns
    if last is None or len(last.cells) != len(cells):
        return TierMap(tier.name.lower(), version, *columns, np.full(len(cells), version, np.int64))
    same = (last.cells == cells) & (last.used == used) & (last.owners == owners) & (last.prefixes == prefixes)
    return TierMap(tier.name.lower(), last.since, *columns, np.where(same, last.changed, version))


def _fitted(column: npt.NDArray[_Scalar], slots: int) -> npt.NDArray[_Scalar]:
    """The column with another number of slots; new ones hold 0."""
    fitted = np.zeros(slots, column.dtype)
    kept = min(slots, len(column))
    fitted[:kept] = column[:kept]
    return fitted
