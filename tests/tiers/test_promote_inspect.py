"""Looking at a page of the store beside the steps: what it tells, and what is booked."""

from __future__ import annotations

import pytest

from tests.tiers.fakes import FAR_S, Rig, stored
from tierd.tiers.errors import LostReason, PageLost
from tierd.tiers.journal import What
from tierd.tiers.promote import Verdict

A = list(range(1, 13))


def inspected(rig: Rig, tokens: list[int], place: int = 0) -> Verdict:
    """What looking at a page tells. Nothing is known before the mover has read it."""
    node = next(node for node in rig.pager.index.nodes.values() if node.depth == place and node.durable)
    told: list[Verdict] = []
    rig.pager.promoter.inspect(node, told.append)
    assert not told and node.moves == 1
    rig.manual.run_all()
    rig.poll()
    (verdict,) = told
    assert node.moves == 0
    rig.check()
    return verdict


def test_a_page_that_is_looked_at_is_read_beside_the_steps() -> None:
    rig, store = stored(A)
    reads = len(store.reads)
    assert inspected(rig, A) is Verdict.GOOD and len(store.reads) == reads + 1
    rig.close()


@pytest.mark.parametrize(
    ("reason", "verdict", "damaged"),
    [
        (LostReason.PAYLOAD, Verdict.BAD, 1),
        (LostReason.IO_ERROR, Verdict.BAD, 1),
        (LostReason.ABSENT, Verdict.UNREAD, 0),
        (LostReason.STORE_OFF, Verdict.UNREAD, 0),
    ],
)
def test_what_a_look_finds_is_booked_as_of_any_read(reason: LostReason, verdict: Verdict, damaged: int) -> None:
    rig, store = stored(A)
    store.fail_read = lambda _key: PageLost(reason)
    before = rig.pager.residency.durable_pages
    assert inspected(rig, A, 2) is verdict
    assert rig.pager.promoter.damaged_pages == damaged
    told = [entry.what for entry in rig.pager.residency.journal.since(0)]
    assert told.count(What.DAMAGE) == damaged
    assert rig.pager.writeback.on == (reason is not LostReason.STORE_OFF)
    assert rig.pager.residency.durable_pages < before
    rig.close()


def test_a_page_is_not_looked_at_while_it_is_on_its_way() -> None:
    rig, _ = stored(A)
    lease = rig.pager.match([*A, 1])
    rig.pager.fetch(lease, FAR_S)
    told: list[Verdict] = []
    rig.pager.promoter.inspect(lease.nodes[-1], told.append)
    assert told == [Verdict.UNREAD]
    rig.settle()
    rig.pager.release(lease, A)
    rig.close()
