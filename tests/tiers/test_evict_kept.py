"""Pages that the user wants kept: they leave a tier only where another one has them."""

from __future__ import annotations

import pytest

from tests.tiers.fakes import Rig
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers.errors import StoreFull
from tierd.tiers.page import Tier
from tierd.tiers.prefix import Node

A = list(range(1, 13))
B = list(range(101, 113))


def keep(rig: Rig, tokens: list[int]) -> list[Node]:
    """The user wants these pages kept."""
    lease = rig.start([*tokens, 0])
    nodes = lease.nodes
    for node in nodes:
        node.kept = True
    rig.pager.release(lease, tokens)
    rig.settle()
    return nodes


def test_a_page_that_is_kept_has_its_last_copy_to_the_end() -> None:
    rig = Rig(device=3, host=0)
    rig.serve(A)
    kept = keep(rig, A)
    other = rig.pager.match(B)
    assert not rig.pager.allocate(other, 0, 4)
    rig.settle()
    assert not rig.pager.allocate(other, 0, 4)
    assert all(node.device >= 0 for node in kept)
    rig.check()
    rig.close()


@pytest.mark.parametrize(("host", "with_store"), [(3, False), (0, True), (2, True)])
def test_a_page_that_is_kept_goes_down_and_stays_there(host: int, with_store: bool) -> None:
    rig = Rig(device=3, host=host, store=MemoryStore(3) if with_store else None)
    rig.serve(A)
    kept = keep(rig, A)
    for start in range(100, 200, 20):
        rig.now_s += 1000
        rig.serve(list(range(start, start + 12)))
        rig.settle()
        rig.check()
        assert all(node.has_copy for node in kept)
    assert rig.serve([*A, 1][:13]) == 12
    rig.settle()
    rig.check()
    rig.close()


def test_a_page_that_is_kept_and_has_nowhere_to_go_holds_up_no_other() -> None:
    store = MemoryStore()
    store.fail_write = StoreFull("the disk is full")
    rig = Rig(device=3, host=0, store=store)
    rig.serve(A[:4])
    kept = keep(rig, A[:4])
    rig.now_s += 100_000  # it is the first that would go
    rig.serve(B[:8])
    rig.settle()  # the store is found full
    assert rig.pager.writeback.paused
    other = rig.pager.match([7])
    rig.allocate(other, 0, 8)
    assert kept[0].device >= 0
    assert not rig.pager.allocate(other, 8, 12)
    rig.check()
    rig.close()


def test_a_page_that_is_kept_displaces_host_pages_of_greater_value() -> None:
    rig = Rig(device=4, host=3)
    rig.serve(A[:4])
    lease = rig.start([*A[:4], 0])
    (kept,) = lease.nodes
    kept.kept = True
    for _ in range(3):
        rig.serve(B)  # often used, so worth more
    other = rig.pager.match([7])
    rig.allocate(other, 0, 12)  # they go down
    rig.pager.release(other, [])
    rig.pager.release(lease, A[:4])
    assert (rig.host.num_free, kept.host) == (0, -1)
    rig.allocate(rig.pager.match([7]), 0, 16)
    assert kept.host >= 0
    rig.check()
    rig.close()


def test_a_partial_page_that_is_kept_stays_beside_the_longer_one() -> None:
    rig = Rig()
    rig.serve(A[:6])
    (partial,) = [node for node in rig.pager.index.nodes.values() if node.num_tokens == 2]
    partial.kept = True
    rig.serve(A)
    rig.settle()
    assert partial.alive
    rig.check()
    rig.close()


def test_a_page_that_is_kept_leaves_the_store_only_when_memory_has_it() -> None:
    rig = Rig(device=3, host=0, store=MemoryStore())
    rig.serve(A)
    (*_, last) = keep(rig, A)
    rig.pager.flush(rig.now_s + 1)
    assert rig.pager.residency.evictable(last, Tier.NVME)
    rig.pager.evictor.make_room(1)
    assert not last.readable
    assert not rig.pager.residency.evictable(last, Tier.NVME)
    rig.close()
