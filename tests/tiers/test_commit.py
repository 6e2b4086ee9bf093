"""Pages that another lease computed since: taken over by a lease that was to compute them."""

from __future__ import annotations

import pytest

from tests.tiers.fakes import Rig, viewed
from tests.tiers.stand_ins import ManualMover, MemoryStore
from tierd.tiers.gpu import Row
from tierd.tiers.lease import Lease
from tierd.tiers.page import Tier

A = list(range(1, 14))  # three full pages and one token


def test_a_lease_goes_on_with_pages_that_another_one_computed() -> None:
    rig = Rig()
    first, second = rig.start(A), rig.start(A)
    assert rig.pager.adopt(second, A) == 0
    rig.grow(first, A[:8], 0)
    assert rig.pager.adopt(second, A) == 2
    assert second.ready and second.num_tokens == second.reached == 8 and second.hit_device == 8
    rig.check()
    rig.grow(first, A, 8)
    assert rig.pager.adopt(second, A) == 1
    rig.expect(second, A[:12])
    rig.pager.release(first, A)
    rig.grow(second, A, 12)
    rig.expect(second, A)
    rig.pager.release(second, A)
    rig.check()
    rig.close()


def test_the_last_token_is_left_to_compute() -> None:
    rig = Rig()
    first, second = rig.start(A[:8]), rig.start(A[:8])
    rig.grow(first, A[:8], 0)
    assert rig.pager.adopt(second, A[:8]) == 1
    rig.check()
    rig.close()


def test_a_page_half_written_gives_way() -> None:
    rig = Rig()
    first, second = rig.start(A), rig.start(A)
    rig.grow(second, A[:6], 0)
    rig.grow(first, A, 0)
    free = rig.device.num_free
    assert rig.pager.adopt(second, A) == 2
    assert rig.device.num_free == free + 1
    assert second.num_tokens == 8  # it computed the first four itself, and then what it had of the second page is void
    rig.expect(second, A[:12])
    rig.check()
    rig.close()


def test_tokens_of_a_copied_tail_are_counted_once() -> None:
    rig = Rig()
    rig.serve(A[:6])
    second = rig.start([*A[:12], 99])
    assert second.num_tokens == 6
    first = rig.start(A)
    rig.grow(first, A, 6)
    assert rig.pager.adopt(second, [*A[:12], 99]) == 2
    assert second.num_tokens == 12
    rig.check()
    rig.close()


def test_nothing_is_taken_over_from_another_salt_or_other_tokens() -> None:
    rig = Rig()
    first = rig.start(A)
    rig.grow(first, A, 0)
    other = rig.start(A, b"other")
    assert rig.pager.adopt(other, A) == 0
    apart = rig.start([99, *A])
    assert rig.pager.adopt(apart, [99, *A]) == 0
    rig.check()
    rig.close()


def test_only_pages_in_memory_are_taken_over() -> None:
    rig = Rig(store=MemoryStore())
    second = rig.start(A)
    first = rig.start(A)
    rig.grow(first, A, 0)
    rig.pager.release(first, A)
    rig.settle()
    for node in list(rig.pager.index.nodes.values()):
        assert node.durable
        rig.pager.residency.evict(node, Tier.DEVICE)
    assert rig.pager.adopt(second, A) == 0  # a look-up would load them; nobody waits for that here
    rig.check()
    rig.close()


def test_of_a_lease_that_ended_nothing_is_taken() -> None:
    rig = Rig()
    lease = rig.start(A)
    rig.pager.release(lease, [])
    with pytest.raises(ValueError, match="has ended"):
        rig.pager.adopt(lease, A)
    rig.close()


B = list(range(1, 30))  # seven full pages and one token


def windowed(rig: Rig, exact: int, computed: int) -> Lease:
    """A lease whose first `exact` tokens have keys, and that has computed more."""
    lease = rig.start(B)
    rig.allocate(lease, 0, computed)
    rig.write(lease, B[:computed], 0)
    rig.pager.commit(lease, B[:exact])
    return lease


def test_pages_that_no_row_sees_any_more_are_free_for_others() -> None:
    rig = Rig()
    lease, free = windowed(rig, 8, 24), rig.device.num_free
    rig.pager.committer.let_go(lease, 0, 1)  # one of the two known pages is still seen
    assert (len(lease.nodes), lease.dropped) == (2, 0)
    rig.pager.committer.let_go(lease, 0, 4)
    assert (len(lease.nodes), lease.dropped, len(lease.private)) == (0, 4, 2)
    assert rig.device.num_free == free + 2 and rig.device.cached == 2
    assert [lease.has_slot(page) for page in range(7)] == [False] * 4 + [True] * 2 + [False]
    assert lease.held_until(16) == 24 and lease.skip(24) == 24
    rig.check()
    rig.pager.release(lease, B[:8])
    rig.check()
    found = rig.start(B)
    assert found.num_tokens == 8  # what was known stays so, and nothing else
    rig.expect(found, B[:8])
    rig.pager.release(found, [])
    rig.close()


def test_pages_with_sinks_stay() -> None:
    rig = Rig()
    lease = windowed(rig, 12, 24)
    head = lease.nodes[0]
    rig.pager.committer.let_go(lease, 1, 5)
    assert lease.nodes == [head] and head.pins == 1 and lease.dropped == 4 and len(lease.private) == 1
    rig.allocate(lease, 24, 28)
    rig.pager.committer.let_go(lease, 1, 6)
    assert lease.dropped == 5 and len(lease.private) == 1
    rig.check()
    rig.pager.commit(lease, B[:12])  # nothing gets a key after pages that are gone
    assert lease.nodes == [head] and rig.pager.adopt(lease, B[:13]) == 0
    rig.pager.release(lease, B[:12])
    rig.check()
    rig.close()


def said(rig: Rig, lease: Lease) -> list[bytes]:
    """What each page of its table says."""
    rig.pager.tables.refresh(lease)
    return [rig.record_at(address).tobytes() for address in lease.table.tolist()]


def test_thinned_pages_go_from_anywhere_and_the_known_ones_that_are_kept_are_copied() -> None:
    rig = Rig()
    lease = windowed(rig, 12, 24)
    whole, free = said(rig, lease), rig.device.num_free
    assert rig.pager.committer.thin(lease, {0, 1, 3, 5}) == 0
    assert (len(lease.nodes), lease.numbers, lease.dropped) == (1, [1, 3, 5], 2)
    assert said(rig, lease) == [whole[page] for page in (0, 1, 3, 5)]
    assert rig.device.num_free == free and rig.device.cached == 2, "one private page went, one was copied"
    rig.check()
    rig.allocate(lease, 24, 28)
    assert lease.numbers == [1, 3, 5, 6] and lease.has_slot(6) and not lease.has_slot(7)
    assert rig.pager.committer.thin(lease, {0, 3, 6, 7}) == 0
    assert (lease.numbers, lease.dropped) == ([3, 6], 4)
    rig.pager.commit(lease, B[:12])  # nothing gets a key after pages that are gone
    assert len(lease.nodes) == 1
    rig.pager.release(lease, B[:12])
    rig.check()
    found = rig.start(B)
    assert found.num_tokens == 12
    rig.expect(found, B[:12])
    rig.pager.release(found, [])
    rig.close()


def test_no_more_is_copied_than_the_device_has_room_for() -> None:
    rig = Rig(device=7)
    lease = windowed(rig, 24, 24)
    kept = {0, 1, 2, 3, 4, 5}
    whole = said(rig, lease)
    assert rig.pager.committer.thin(lease, kept) == 15  # one had a slot
    assert (len(lease.nodes), lease.numbers, lease.dropped) == (5, [5], 0) and said(rig, lease) == whole
    rig.pager.make_room(1)
    rig.settle()
    rig.check()
    rig.pager.release(lease, [])
    rig.close()
    half = Rig(device=20)
    lease = windowed(half, 24, 24)
    whole = said(half, lease)
    half.allocate(lease, 24, 56)
    assert half.pager.committer.thin(lease, frozenset(range(14)), most=1) == 0 and len(lease.nodes) == 5
    assert half.pager.committer.thin(lease, frozenset(range(14))) == 0 and len(lease.nodes) == 4
    assert said(half, lease)[:6] == whole and lease.numbers == list(range(4, 14))
    half.check()
    half.pager.release(lease, [])
    half.close()


class Counting(ManualMover):
    """Knows from where to where it has copied at once."""

    copies: list[tuple[bytes, bytes]]

    def copy_now(self, dest: Row, source: Row) -> None:
        super().copy_now(dest, source)
        self.copies.append((viewed(dest).tobytes(), viewed(source).tobytes()))


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_the_mover_copies_what_is_kept(tier: Tier) -> None:
    mover = Counting(1)
    mover.copies = []
    rig = Rig(mover=mover)
    lease = windowed(rig, 12, 24)
    whole = said(rig, lease)
    if tier is Tier.HOST:
        rig.pager.make_room(7)
        rig.settle()
        assert all(node.device < 0 <= node.host for node in lease.nodes)
    assert rig.pager.committer.thin(lease, {0, 1, 2, 5}) == 0
    assert mover.copies == [(whole[page], whole[page]) for page in (2, 1)]
    assert said(rig, lease) == [whole[page] for page in (0, 1, 2, 5)]
    rig.pager.release(lease, [])
    rig.check()
    rig.close()


def test_of_streamed_pages_those_come_back_that_rows_see_the_last_first() -> None:
    store = MemoryStore()
    rig = Rig(device=8, host=0, store=store)
    lease = windowed(rig, 20, 24)
    whole = said(rig, lease)
    rig.settle()
    rig.pager.make_room(7)
    rig.settle()
    assert not any(node.readable for node in lease.nodes)
    rig.pager.evictor.relax()
    store.reads.clear()
    keys = [node.key for node in lease.nodes]
    assert rig.pager.committer.thin(lease, {0, 1, 3, 5}) == 0
    assert rig.pager.promoter.refill(lease)
    rig.settle()
    assert store.reads == [keys[number] for number in (3, 1, 0)]
    assert rig.pager.committer.thin(lease, {0, 1, 3, 5}) == 0
    assert said(rig, lease) == [whole[page] for page in (0, 1, 3, 5)]
    rig.check()
    rig.pager.release(lease, [])
    rig.close()


def test_of_a_lease_that_waits_for_pages_none_go() -> None:
    rig = Rig()
    lease = windowed(rig, 12, 24)
    lease.absent.add(1)
    assert rig.pager.committer.thin(lease, {0, 5}) == 0 and len(lease.nodes) == 3 and not lease.dropped
    lease.absent.clear()
    rig.pager.release(lease, [])
    rig.close()
