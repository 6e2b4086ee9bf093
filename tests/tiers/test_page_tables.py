"""Pages are read where they lie: addresses in either arena, keys of those that are streamed, holes for what is gone."""

from __future__ import annotations

import numpy as np

from tests.tiers.fakes import FAR_S, Rig, damaged, stored
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers.errors import LostReason, PageLost, StagingLost
from tierd.tiers.lease import Lease
from tierd.tiers.page import PageKey

A = list(range(1, 13))
B = list(range(101, 113))
LONG = list(range(201, 241))  # ten full pages


def addresses(rig: Rig, lease: Lease) -> list[int]:
    return rig.pager.tables.addresses(lease, lease.num_pages).tolist()


def streamed(rig: Rig, lease: Lease) -> list[PageKey]:
    return rig.pager.tables.streamed(lease, rig.pager.tables.addresses(lease, lease.num_pages))


def larger_than_memory() -> tuple[Rig, Lease, MemoryStore]:
    """A lease on ten pages, of which two arenas hold five."""
    store = MemoryStore()
    rig = Rig(device=3, host=2, store=store)
    lease = rig.start(LONG)
    rig.grow(lease, LONG, 0)
    rig.settle()
    return rig, lease, store


def test_host_pages_are_read_in_place() -> None:
    rig = Rig(device=3, host=9)
    rig.serve(A)
    rig.serve(B)
    rig.settle()
    lease = rig.start([*A, 1])
    hosts = [rig.host.address(node.host) for node in lease.nodes]
    assert addresses(rig, lease) == hosts
    rig.expect(lease, A)
    rig.allocate(lease, 12, 16)
    rig.settle()
    assert addresses(rig, lease)[:3] == hosts  # none of them was brought up to be read
    assert rig.pager.statistics().links["host_to_device"].total_bytes == 0
    rig.check()
    rig.close()


def test_a_table_is_known_pages_then_private_ones() -> None:
    rig = Rig()
    lease = rig.start(A)
    rig.grow(lease, A[:8], 0)
    rig.allocate(lease, 8, 16)
    wanted = [rig.device.address(node.device) for node in lease.nodes]
    wanted += [rig.device.address(slot) for slot in lease.private]
    assert addresses(rig, lease) == wanted
    assert rig.pager.tables.addresses(lease, 2).dtype == np.int64
    assert rig.pager.tables.addresses(lease, 2).tolist() == wanted[:2]
    assert lease.streamed == 0
    rig.close()


def test_a_page_that_is_computed_again_is_read_where_it_is_written() -> None:
    rig, store = stored(A)
    lease = rig.pager.match([*A, 1])
    store.fail_read = lambda _key: PageLost(LostReason.IO_ERROR)
    rig.pager.fetch(lease, FAR_S)
    rig.settle()
    assert addresses(rig, lease) == [0, 0, 0]
    assert lease.streamed == 0  # they are to be computed, not streamed
    rig.allocate(lease, 0, 8)
    assert addresses(rig, lease) == [rig.device.address(lease.filling[0]), rig.device.address(lease.filling[1]), 0]
    rig.close()


def test_addresses_follow_the_pages() -> None:
    rig = Rig(device=3, host=3)
    lease = rig.start(A)
    rig.grow(lease, A, 0)
    before = addresses(rig, lease)
    other = rig.pager.match(B)
    rig.allocate(other, 0, 8)
    after = addresses(rig, lease)
    assert before != after
    assert after[:2] == [rig.host.address(node.host) for node in lease.nodes[:2]]
    assert after[2] == before[2]
    rig.expect(lease, A)
    rig.check()
    rig.close()


def test_the_table_is_made_anew_only_when_something_moved() -> None:
    rig = Rig()
    lease = rig.start(A)
    rig.grow(lease, A, 0)
    addresses(rig, lease)
    table = lease.table
    addresses(rig, lease)
    rig.settle()
    addresses(rig, lease)
    assert lease.table is table
    rig.pager.evictor.make_room(8, spill=True)
    rig.settle()
    rig.expect(lease, A)
    assert lease.table is not table
    rig.close()


def test_a_sequence_may_be_larger_than_memory() -> None:
    rig, lease, store = larger_than_memory()
    assert rig.pager.capacity_pages == 3 + 2 + 1000
    keys = streamed(rig, lease)
    assert len(keys) == lease.streamed == 5
    assert keys == [node.key for node in lease.nodes if not node.readable]
    assert set(keys) <= set(store.rows)
    rig.expect(lease, LONG)
    rig.check()
    tokens = [*LONG, 1, 2, 3, 4, 5]
    rig.grow(lease, tokens, len(LONG))
    rig.expect(lease, tokens)
    rig.check()
    rig.pager.release(lease, tokens)
    rig.settle()
    rig.check()
    assert rig.serve([*tokens, 9]) >= 44  # loads fill the device, so the last partial page may find no slot
    rig.settle()
    rig.check()
    rig.close()


def test_more_stored_pages_than_memory_holds_are_found_and_streamed() -> None:
    rig, store = stored(LONG, device=2, host=1)
    lease = rig.start([*LONG, 1])
    assert lease.num_tokens == 40
    assert lease.lost is False
    assert len(store.reads) == 3  # what memory can hold
    assert lease.streamed == 0  # nobody has looked yet
    assert len(streamed(rig, lease)) == lease.streamed == 7
    rig.grow(lease, [*LONG, 1], 40)
    rig.expect(lease, [*LONG, 1])
    rig.check()
    rig.close()


def test_pages_that_memory_has_no_room_for_are_streamed_from_the_next_look_on() -> None:
    rig, _ = stored(A, B, device=3)
    rig.start([*A, 1])
    lease = rig.pager.match([*B, 1])
    rig.pager.tables.refresh(lease)
    assert lease.streamed == 0
    rig.pager.fetch(lease, FAR_S)
    assert lease.ready
    rig.pager.tables.refresh(lease)
    assert lease.streamed == 3
    rig.expect(lease, B)
    rig.check()
    rig.close()


def test_streamed_pages_come_back_when_another_lease_gives_host_memory_back() -> None:
    rig, _ = stored(A, B, device=3, host=3)
    other, lease = rig.start([*B, 1]), rig.start([*A, 1])
    rig.allocate(lease, 12, 16)
    assert len(streamed(rig, lease)) + len(streamed(rig, other)) == 1
    rig.settle()
    rig.pager.tables.refresh(lease)
    rig.pager.tables.refresh(other)
    short, gives = (lease, other) if lease.streamed else (other, lease)
    rig.settle()
    assert len(streamed(rig, short)) == 1  # no room yet
    rig.pager.release(gives, [])
    rig.settle()
    assert streamed(rig, short) == []
    rig.expect(short, A if short is lease else B)
    rig.check()
    rig.close()


def test_streamed_pages_come_back_to_the_device_where_there_is_no_host() -> None:
    rig, _ = stored(A, B, device=4)
    lease, other = rig.start([*A, 1]), rig.start([*B, 1])
    rig.settle()
    assert len(streamed(rig, other)) == 2
    rig.expect(other, B)
    rig.pager.release(lease, [])
    rig.settle()
    assert streamed(rig, other) == []
    rig.expect(other, B)
    rig.check()
    rig.close()


def test_streamed_pages_come_back_although_the_device_is_below_its_reserve() -> None:
    rig = Rig(device=16, host=2, store=MemoryStore(), max_slots=16)
    tokens = list(range(201, 201 + 4 * 20))
    lease = rig.start(tokens)
    rig.grow(lease, tokens, 0)
    rig.settle()
    assert len(streamed(rig, lease)) == 2 and rig.pager.evictor.reserve > rig.device.num_free
    assert not rig.pager.evictor.asked
    rig.host.grow(4)
    rig.settle()
    assert streamed(rig, lease) == []
    rig.expect(lease, tokens)
    rig.check()
    rig.close()


def test_pages_do_not_come_back_into_the_slots_that_somebody_waits_for() -> None:
    rig, _ = stored(A, B, device=4)
    lease, other = rig.start([*A, 1]), rig.start([*B, 1])
    assert len(streamed(rig, lease)) + len(streamed(rig, other)) == 2
    for start in range(12, 24, 4):  # a page each time: something has to leave for it, and is not brought back
        assert rig.pager.allocate(other, start, start + 4)
        rig.write(other, [*B, *range(start, start + 4)], 12)
        rig.settle()
        rig.check()
    rig.expect(lease, A)
    rig.close()


def test_a_streamed_page_that_is_lost_becomes_a_hole() -> None:
    rig, lease, store = larger_than_memory()
    keys = streamed(rig, lease)
    rig.pager.tables.lose(damaged(keys[:2]), rig.pager.leases)
    assert lease.lost
    assert {lease.nodes[place].key for place in lease.absent} == set(keys[:2])
    assert streamed_only(rig, lease) == keys[2:]
    assert rig.pager.statistics().misses == {LostReason.PAYLOAD: 2}
    assert rig.pager.promoter.damaged_pages == 2
    rig.check()
    rig.settle()
    assert not set(keys[:2]) & set(store.rows)  # nobody finds the bad rows again
    rig.grow(lease, LONG, 0)
    assert not lease.absent
    rig.expect(lease, LONG)
    rig.pager.release(lease, LONG)
    rig.settle()
    rig.check()
    rig.close()


def test_a_store_that_went_off_during_a_step_is_given_up_at_once() -> None:
    rig, lease, _ = larger_than_memory()
    keys = streamed(rig, lease)
    off = dict.fromkeys(keys, PageLost(LostReason.STORE_OFF, "the disk failed"))
    rig.pager.tables.lose(StagingLost(keys, "the test says so", off), rig.pager.leases)
    assert not rig.pager.writeback.on
    assert rig.pager.promoter.damaged_pages == 0  # nobody has seen a damaged page
    assert {lease.nodes[place].key for place in lease.absent} == set(keys)
    rig.check()
    rig.close()


def streamed_only(rig: Rig, lease: Lease) -> list[PageKey]:
    """Without the holes, which are no reads of a step."""
    rig.pager.tables.refresh(lease)
    return [
        node.key for place, node in enumerate(lease.nodes) if not node.readable and place not in lease.absent
    ]


def test_a_page_that_came_back_meanwhile_is_not_lost() -> None:
    rig, lease, _ = larger_than_memory()
    there = next(node for node in lease.nodes if node.readable)
    strange = [there.key, PageKey(b"unknown")]
    rig.pager.tables.lose(damaged(strange), rig.pager.leases)
    assert not lease.absent
    assert rig.pager.statistics().misses == {}
    rig.check()
    rig.close()


def test_a_page_that_nobody_needs_any_more_is_forgotten_when_it_is_lost() -> None:
    rig, store = stored(A)
    lease = rig.pager.match([*A, 1])
    keys = [node.key for node in lease.nodes]
    rig.pager.release(lease, [])
    rig.pager.tables.lose(damaged(keys), rig.pager.leases)
    assert rig.pager.statistics().known_pages == 0
    rig.settle()
    assert not store.rows
    rig.check()
    rig.close()


def test_a_store_that_is_turned_off_leaves_holes_where_pages_were_streamed() -> None:
    rig, lease, _ = larger_than_memory()
    keys = streamed(rig, lease)
    rig.pager.writeback.turn_off("the disk is gone")
    rig.pager.tables.refresh(lease)
    assert [lease.nodes[place].key for place in sorted(lease.absent)] == keys
    assert lease.streamed == 0
    assert not rig.pager.promoter.is_coming(lease)
    rig.check()
    rig.pager.release(lease, LONG[: lease.skip(0)])
    rig.settle()
    rig.check()
    rig.close()


def test_holes_that_a_lost_store_left_are_computed_where_memory_can_hold_them() -> None:
    rig, _ = stored(A, B, device=4, host=1)
    lease, other = rig.start([*A, 1]), rig.start([*B, 1])
    rig.pager.writeback.turn_off("the disk is gone")
    rig.pager.tables.refresh(other)
    assert len(other.absent) == 1
    rig.pager.release(lease, A)
    rig.grow(other, B, 0)
    assert other.ready
    rig.expect(other, B)
    assert other.num_tokens == 8
    rig.check()
    rig.close()


def test_a_page_that_is_only_late_stays_in_the_store() -> None:
    rig, store = stored(LONG, device=4, host=0)
    lease = rig.pager.match([*LONG, 1])
    rig.pager.fetch(lease, FAR_S)
    rig.settle()
    (late, *_) = keys = rig.pager.tables.streamed(lease, rig.pager.tables.addresses(lease, lease.num_pages))
    rig.pager.tables.lose(StagingLost([late], "not in time"), rig.pager.leases)
    assert len(lease.absent) == 1 and late in store.rows and late in keys
    assert rig.pager.promoter.damaged_pages == 0
    rig.pager.release(lease, [])
    rig.settle()
    assert late in store.rows
    rig.check()


def test_a_window_of_a_lease_with_pages_given_back() -> None:
    rig = Rig()
    lease = rig.start(LONG)
    rig.grow(lease, LONG[:8], 0)
    rig.allocate(lease, 8, 24)
    tables = rig.pager.tables
    whole = tables.addresses(lease, 6).tolist()
    assert tables.addresses(lease, 6, 3).tolist() == whole[3:]
    assert tables.addresses(lease, 6, 4, 1).tolist() == [whole[0], *whole[4:]]
    rig.pager.committer.let_go(lease, 1, 4)
    found = tables.addresses(lease, 6, 2, 1).tolist()
    assert (found[0], found[3:]) == (whole[0], whole[4:])
    assert set(found[1:3]) <= set(whole)  # pages that are gone are given as some page that is there
    rig.pager.release(lease, [])
    rig.check()
    rig.close()


def test_streamed_pages_of_a_window() -> None:
    rig, lease, _ = larger_than_memory()
    tables = rig.pager.tables
    missing = set(streamed(rig, lease))
    given = [lease.nodes[place].key for place in (0, 1, 4, 5, 6)]
    found = tables.streamed(lease, tables.addresses(lease, 7, 4, 2), 4, 2)
    assert found == [key for key in given if key in missing] and found
    rig.pager.release(lease, LONG)
    rig.close()


def test_streamed_pages_of_those_that_are_left() -> None:
    rig, lease, _ = larger_than_memory()
    tables = rig.pager.tables
    missing = set(streamed(rig, lease))
    places = np.array([0, 2, 3, 6])
    found = tables.streamed_at(lease, places)
    assert found == [lease.nodes[place].key for place in places if lease.nodes[place].key in missing] and found
    rig.pager.release(lease, [])
    rig.check()
    rig.close()
