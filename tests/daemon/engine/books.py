"""What `top` must say, read off the books of the pager in the slowest way."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.daemon.engine.rig import Rig
from tierd.daemon.engine.top import TopBoard
from tierd.tiers.arena import SlotState
from tierd.tiers.page import Tier
from tierd.tiers.pager import Pager
from tierd.tiers.prefixes import Prefixes

PROMPT = list(range(20, 60))


def board_on(rig: Rig) -> TopBoard:
    return TopBoard(rig.streams, rig.pager, Prefixes(rig.pager, None), "fp32")


def look(board: TopBoard) -> Any:
    board._due_s = board._sort_due_s = float("-inf")
    board.refresh()
    return board._picture


def expected_cells(pager: Pager, tier: Tier) -> list[int]:
    """The map from the books alone, the slow way."""
    if tier is Tier.NVME:
        raise AssertionError("pages on disk have no slots: see expected_on_disk")
    arena = pager.device if tier is Tier.DEVICE else pager.host
    cells = [0 if state == SlotState.RETIRED else state for state in arena.states]
    for node in pager.index.nodes.values():
        slot = node.device if tier is Tier.DEVICE else node.host
        if slot >= 0:
            cells[slot] |= (
                0x08 * (len(node.packed) < pager.index.page_bytes) | 0x10 * (tier is Tier.DEVICE and node.host >= 0)
                | 0x20 * node.durable | 0x40 * (node.moves > 0) | 0x80 * node.kept
            )  # fmt: skip
    return cells


def expected_on_disk(pager: Pager) -> Counter[int]:
    """How many pages of each kind the map of the disk has, the slow way; of their places nobody else knows."""
    found: Counter[int] = Counter()
    for node in pager.index.nodes.values():
        if node.durable or node.writing:
            state = SlotState.FILLING if not node.durable else SlotState.PINNED if node.pins else SlotState.IDLE
            found[
                state | 0x08 * (len(node.packed) < pager.index.page_bytes) | 0x10 * (node.host >= 0)
                | 0x40 * (node.moves > 0) | 0x80 * node.kept
            ] += 1  # fmt: skip
    found[SlotState.FREE] = pager.statistics().nvme.total_pages - found.total()
    return found
