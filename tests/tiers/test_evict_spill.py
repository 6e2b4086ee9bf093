"""Room among the pages of leases, which then read them below."""

from __future__ import annotations

import pytest

from tests.tiers.fakes import Rig
from tests.tiers.stand_ins import ManualMover, MemoryStore
from tierd.tiers.arena import SlotState
from tierd.tiers.errors import StoreFull, TierFull
from tierd.tiers.lease import Lease
from tierd.tiers.page import Tier
from tierd.tiers.prefix import Leaving

A = list(range(1, 13))
B = list(range(101, 113))


def running(rig: Rig, tokens: list[int] = A) -> Lease:
    """A lease that has computed its tokens."""
    lease = rig.start(tokens)
    rig.grow(lease, tokens, lease.skip(0))
    return lease


def watched(rig: Rig, lease: Lease, wanted: int) -> int:
    """Asks for `wanted` slots for another lease, a job at a time; every page has a copy all the while. Free slots."""
    other = rig.pager.match([7])
    for _ in range(50):
        if rig.pager.allocate(other, 0, wanted * 4):
            break
        assert all(node.has_copy for node in lease.nodes)
        rig.expect(lease, A)
        rig.check()
        if not rig.manual.run():
            rig.now_s += 0.1
        rig.poll()
    rig.expect(lease, A)
    rig.check()
    return len(other.private)


@pytest.mark.parametrize(
    ("host", "store", "where"),
    [
        (3, None, [(-1, True, False)] * 3),
        (1, MemoryStore, [(-1, True, True), (-1, False, True), (-1, False, True)]),
        (0, MemoryStore, [(-1, False, True)] * 3),
    ],
    ids=["host", "host and store", "store"],
)
def test_pages_under_a_lease_spill_and_are_never_without_a_copy(
    host: int, store: type[MemoryStore] | None, where: list[tuple[int, bool, bool]]
) -> None:
    rig = Rig(device=3, host=host, store=store() if store is not None else None)
    lease = running(rig)
    assert watched(rig, lease, 3) == 3
    rig.settle()
    assert [(node.device, node.host >= 0, node.durable) for node in lease.nodes] == where
    assert rig.pager.statistics().spills == 3
    rig.expect(lease, A)
    rig.check()
    rig.close()


def test_a_durable_page_spills_at_once() -> None:
    rig = Rig(device=3, host=0, store=MemoryStore())
    lease = running(rig)
    rig.pager.flush(rig.now_s + 1)
    assert rig.pager.allocate(rig.pager.match([7]), 0, 8)
    assert not rig.manual.queued
    rig.expect(lease, A)
    rig.check()
    rig.close()


def test_a_page_that_is_not_durable_is_written_before_it_spills() -> None:
    store = MemoryStore()
    rig = Rig(device=3, host=0, store=store)
    lease, other = running(rig), rig.pager.match([7])
    assert not rig.pager.allocate(other, 0, 4)
    assert lease.nodes[0].leaving is Leaving.WRITE
    assert lease.nodes[0].device >= 0
    rig.poll()  # the write starts without waiting for a group
    assert rig.manual.run()
    assert lease.nodes[0].key in store.rows
    assert lease.nodes[0].device >= 0
    rig.poll()
    assert lease.nodes[0].device < 0
    assert rig.pager.allocate(other, 0, 4)
    rig.expect(lease, A)
    rig.check()
    rig.close()


def test_idle_pages_go_before_those_of_leases() -> None:
    rig = Rig(device=6, host=6)
    rig.serve(B)
    lease = running(rig)
    rig.allocate(rig.pager.match([7]), 0, 12)
    rig.settle()
    assert rig.pager.statistics().spills == 0
    assert all(node.device >= 0 for node in lease.nodes)
    rig.check()
    rig.close()


def test_the_longest_there_spill_first_and_no_more_than_needed() -> None:
    rig = Rig(device=6, host=6)
    lease, later = running(rig), running(rig, B)
    rig.allocate(rig.pager.match([7]), 0, 8)
    rig.settle()
    assert [node.device >= 0 for node in lease.nodes + later.nodes] == [False, False, True, True, True, True]
    assert rig.pager.statistics().spills == 2
    rig.check()
    rig.close()


@pytest.mark.parametrize("with_store", [False, True])
def test_without_a_tier_below_nothing_leaves_a_lease(with_store: bool) -> None:
    store = MemoryStore() if with_store else None
    if store is not None:
        store.fail_write = StoreFull("the disk is full")
    rig = Rig(device=3, host=0, store=store)
    lease, other = running(rig), rig.pager.match([7])
    for _ in range(5):
        assert not rig.pager.allocate(other, 0, 4)
        rig.settle()
        rig.check()
    rig.expect(lease, A)
    assert all(node.device >= 0 for node in lease.nodes)
    assert rig.pager.writable_pages == 0 or with_store
    rig.pager.release(lease, A)
    rig.allocate(other, 0, 12)  # idle pages may go for ever
    rig.check()
    rig.close()


@pytest.mark.parametrize("leased", [False, True])
def test_a_page_on_its_way_out_is_one_writable_page_and_not_two(leased: bool) -> None:
    rig = Rig(device=3, host=8)
    lease = running(rig)
    if not leased:
        rig.pager.release(lease, A)
    other = rig.pager.match([7])
    assert not rig.pager.allocate(other, 0, 12)
    assert rig.pager.evictor.in_motion == 3
    assert rig.pager.writable_pages == 3
    rig.allocate(other, 0, 8)
    assert rig.pager.writable_pages == 1  # the other two are being written already
    rig.close()


def test_a_device_that_shrinks_has_no_more_writable_pages_than_its_new_size() -> None:
    rig = Rig(device=8, host=8, max_slots=8)
    lease = running(rig)
    rig.device.retire(2)
    assert rig.pager.writable_pages == 2
    rig.pager.release(lease, A)
    rig.device.grow(8)
    rig.close()


def test_a_full_host_sends_pages_to_the_store() -> None:
    rig = Rig(device=3, host=2, store=MemoryStore())
    first = running(rig)
    assert watched(rig, first, 3) == 3
    second = rig.pager.match([8])
    with pytest.raises(AssertionError, match="no room"):
        rig.allocate(second, 0, 4)  # pages that are being written never leave
    rig.expect(first, A)
    assert sum(node.host >= 0 for node in first.nodes) == 2
    rig.check()
    rig.close()


def test_idle_pages_of_the_host_give_way_to_those_of_leases() -> None:
    rig = Rig(device=3, host=3)
    rig.serve(B)
    lease = running(rig)  # B goes down
    rig.allocate(rig.pager.match([7]), 0, 12)
    rig.expect(lease, A)
    assert all(node.host >= 0 for node in lease.nodes)
    assert rig.pager.match([*B, 1]).num_tokens == 0
    rig.check()
    rig.close()


def test_a_queue_that_is_full_delays_a_spill() -> None:
    rig = Rig(device=3, host=3, mover=ManualMover(1, capacity=1))
    lease = running(rig)
    assert watched(rig, lease, 3) == 3
    rig.settle()
    rig.check()
    rig.close()


def test_a_spill_that_fails_leaves_the_page_where_it_is() -> None:
    rig = Rig(device=3, host=3)
    lease = running(rig)

    def fail(_dest: object, _source: object) -> None:
        raise OSError("the copy failed")

    rig.mover._copy = fail
    assert not rig.pager.allocate(rig.pager.match([7]), 0, 4)
    rig.manual.run_all()
    rig.mover._copy = lambda dest, source: dest.__setitem__(slice(None), source)
    rig.poll()
    rig.expect(lease, A)
    rig.settle()
    rig.expect(lease, A)
    rig.check()
    rig.close()


def test_a_lease_that_ends_while_its_page_spills_leaves_a_cached_page() -> None:
    rig = Rig(device=3, host=3)
    lease, other = running(rig), rig.pager.match([7])
    assert not rig.pager.allocate(other, 0, 12)
    rig.pager.release(lease, A)
    rig.check()
    rig.settle()
    rig.check()
    assert rig.pager.allocate(other, 0, 12)
    assert rig.pager.match([*A, 1]).hit_host == 12
    rig.check()
    rig.close()


def test_room_that_was_found_is_not_made_twice() -> None:
    rig = Rig(device=4, host=0, store=MemoryStore())
    lease = running(rig)
    rig.pager.flush(rig.now_s + 1)
    rig.allocate(rig.pager.match([7]), 0, 8)
    rig.settle()
    assert sum(node.device >= 0 for node in lease.nodes) == 2
    assert rig.pager.statistics().spills == 1
    rig.close()


def test_room_for_a_lease_that_has_gone_is_not_made() -> None:
    rig = Rig(device=3, host=3, mover=ManualMover(1, capacity=1))
    lease, other = running(rig), rig.pager.match([7])
    assert not rig.pager.allocate(other, 0, 12)
    rig.pager.release(other, [])
    rig.settle()
    assert rig.pager.statistics().spills <= 1  # what was on its way
    rig.expect(lease, A)
    rig.check()
    rig.close()


def test_a_copy_that_wants_a_slot_takes_none_from_leases() -> None:
    store = MemoryStore()
    rig = Rig(device=4, host=0, store=store)
    rig.serve([9, 9, 9, 9])
    rig.pager.flush(rig.now_s + 1)
    lease, other = running(rig), rig.pager.match([7])
    store.fail_write = StoreFull("the disk is full")
    assert not rig.pager.allocate(other, 0, 8)  # would be had once two pages are written
    last = rig.pager.match([9, 9, 9, 8])
    rig.pager.fetch(last, rig.now_s + 100)
    assert last.tail is not None
    rig.manual.run_all()
    rig.poll()  # they are not: the copy for the last one must not drive out its own source
    rig.settle()
    rig.check()
    rig.expect(lease, A)
    assert last.tail is None
    rig.close()


def test_a_lease_larger_than_two_arenas_runs_to_the_end_of_the_third_tier() -> None:
    rig = Rig(device=2, host=2, store=MemoryStore(6))
    tokens = list(range(1, 33))  # eight pages
    lease = rig.start(tokens)
    rig.grow(lease, tokens, 0)
    rig.expect(lease, tokens)
    rig.check()
    with pytest.raises(TierFull, match="11 pages do not fit the 10 of all tiers"):
        rig.pager.allocate(lease, 40, 44)
    rig.pager.release(lease, tokens)
    rig.settle()
    rig.check()
    rig.close()


# What the user wants kept


def test_a_page_that_lies_in_both_memories_makes_room_where_nothing_else_can() -> None:
    rig = Rig(device=3, host=1)
    lease = running(rig)
    rig.settle()
    node = lease.nodes[2]
    slot = rig.host.alloc(SlotState.FILLING)
    assert slot is not None
    rig.host.row(slot)[:] = rig.device.row(node.device)
    rig.pager.residency.place(node, Tier.HOST, slot)
    assert rig.device.num_free == 0 and rig.pager.writable_pages == 1
    rig.allocate(lease, 12, 13)
    assert sum(other.device < 0 for other in lease.nodes) == 1
    rig.expect(lease, A)
    rig.pager.release(lease, A)
    rig.check()
    rig.close()
