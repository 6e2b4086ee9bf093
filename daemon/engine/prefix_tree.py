"""The tree of known prefixes for `tierd top`, gathered in slices: a walk over all pages would hold up a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tierd.daemon.engine.page_maps import DiskSketch
from tierd.tiers.keys import TOKEN_BYTES
from tierd.tiers.page import PageKey
from tierd.tiers.pager import Pager
from tierd.tiers.prefix_info import PREVIEW_TOKENS, Run
from tierd.tiers.prefixes import Prefixes

MAX_PREFIXES = 10_000
BEYOND = 0xFFFF  # number of a prefix that is not among the rows

# Key of the last page, place of the parent's row or -1; of this run alone: tokens, hits, bytes on device, host and
# disk, last use, pinned, packed tokens of its beginning.
Row: TypeAlias = tuple[PageKey, int, int, int, int, int, int, float, bool, bytes]
Slots: TypeAlias = npt.NDArray[np.int64]
Numbers: TypeAlias = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, repr=False)
class PrefixTree:
    """All prefixes, each row after that of its parent. `total`: how many there are, `rows` may be fewer."""

    version: int = 0
    rows: tuple[Row, ...] = ()
    total: int = 0


class TreeWalk:
    """One walk over all pages. What changes during it may be missed; the next walk sees it. Step thread only."""

    def __init__(self, pager: Pager, prefixes: Prefixes, disk: DiskSketch) -> None:
        self._runs = prefixes.runs()
        self._record_bytes, self._stored_bytes = pager.device.record_bytes, pager.residency.stored_bytes
        self._page_tokens = pager.page_tokens
        self._head_pages = -(-PREVIEW_TOKENS // pager.page_tokens)
        self._rows: list[Row] = []
        self._disk = disk
        self._slots: tuple[list[int], list[int], list[int]] = ([], [], [])  # by tier
        self._places: tuple[list[int], list[int], list[int]] = ([], [], [])  # of the rows that their pages belong to

    def go_on(self, clock: Callable[[], float], slice_s: float) -> bool:
        """Walks on for about so long. True when all was seen."""
        end_s = clock() + slice_s
        for run in self._runs:
            self._add(run)
            if clock() >= end_s:
                return False
        return True

    def result(self, version: int) -> tuple[PrefixTree, list[tuple[Slots, Numbers]]]:
        """The tree; and by tier, slots with 1 + the place of the row that their page belongs to."""
        kept = _newest(self._rows)
        numbers = np.full(len(self._rows), BEYOND, np.uint16)
        numbers[kept] = np.arange(1, len(kept) + 1)
        rows = tuple(
            (row[0], int(numbers[row[1]]) - 1 if row[1] >= 0 else -1, *row[2:])
            for row in (self._rows[place] for place in kept)
        )
        by_tier = [
            (np.array(slots, np.int64), numbers[places] if places else np.empty(0, np.uint16))
            for slots, places in zip(self._slots, self._places, strict=True)
        ]
        return PrefixTree(version, rows, len(self._rows)), by_tier

    def _add(self, run: Run) -> None:
        nodes, last = run.nodes, run.nodes[-1]
        slot_of = self._disk.slot_of
        found = (
            [node.device for node in nodes if node.device >= 0],
            [node.host for node in nodes if node.host >= 0],
            [place for node in nodes if node.durable and (place := slot_of(node)) >= 0],
        )
        for slots, places, held in zip(self._slots, self._places, found, strict=True):
            slots += held
            places += [len(self._rows)] * len(held)
        head = b"".join([node.packed for node in nodes[: self._head_pages]])
        self._rows.append((
            last.key,
            run.parent,
            (len(nodes) - 1) * self._page_tokens + last.num_tokens,
            last.hits,
            len(found[0]) * self._record_bytes,
            len(found[1]) * self._record_bytes,
            sum([node.durable for node in nodes]) * self._stored_bytes,
            last.last_use_s,
            last.kept,
            head[: PREVIEW_TOKENS * TOKEN_BYTES],
        ))  # fmt: skip


def _newest(rows: list[Row]) -> list[int]:
    """The places of the rows that are told: all, or those used last; none without its parent."""
    if len(rows) <= MAX_PREFIXES:
        return list(range(len(rows)))
    chosen: set[int] = set()
    for place in sorted(range(len(rows)), key=lambda place: (-rows[place][7], place)):
        if rows[place][1] < 0 or rows[place][1] in chosen:
            chosen.add(place)
        if len(chosen) == MAX_PREFIXES:
            break
    return sorted(chosen)
