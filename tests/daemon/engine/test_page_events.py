"""Entries of the journal in words, and where their pages lie now."""

from __future__ import annotations

from typing import Any

import pytest

from tests.daemon.engine.rig import Rig
from tierd.daemon.engine import page_events
from tierd.tiers.journal import Entry, What
from tierd.tiers.page import Tier

PROMPT = list(range(20, 60))


def slot_of(tier: Tier, node: Any) -> int:
    return int(node.device if tier is Tier.DEVICE else node.host)


@pytest.mark.parametrize("what", list(What))
def test_every_entry_says_something(what: What) -> None:
    for count in (1, 2):
        told = page_events.text(Entry(1, what, 0.0, count, "said", None, Tier.DEVICE, 3))
        plural = "s" * (count - 1)
        assert told == "said" or f"{count} page{plural}" in told or f"{count} request{plural}" in told


def test_a_row_says_where_the_page_lies_now() -> None:
    rig = Rig(16, host=16, store=40)
    rig.submit(1, PROMPT, 4)
    rig.run()
    journal = rig.pager.residency.journal
    start = len(journal.since(0))
    node = max(rig.pager.index.nodes.values(), key=lambda node: node.depth)
    journal.page(What.RESTORE, node, Tier.HOST, 9)
    [row] = page_events.rows(rig.pager, start, slot_of)
    assert (row["tier"], row["slot"], row["key"]) == ("device", node.device, node.key)
    assert row["text"] == "1 page came from disk to RAM" and row["number"] == start + 1


def test_of_a_page_that_is_gone_it_says_where_it_was() -> None:
    rig = Rig(16)
    rig.submit(1, PROMPT, 4)
    rig.run()
    start = rig.pager.residency.journal.since(0)
    slots = {node.key: node.device for node in rig.pager.index.nodes.values()}
    rig.pager.evictor.shed(1)
    [row] = page_events.rows(rig.pager, start[-1].number if start else 0, slot_of)
    assert row["kind"] == "evict" and (row["tier"], row["slot"]) == ("device", slots[row["key"]])


def test_what_concerns_no_page_has_no_place() -> None:
    rig = Rig(16)
    rig.pager.residency.journal.tell(What.RESIZE, "another size")
    row = page_events.rows(rig.pager, 0, slot_of)[-1]
    assert row.keys() == {"number", "kind", "text", "at_s"}
