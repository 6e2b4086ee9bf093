"""Pages that are known and not there: the engine computes them while others load, each page once."""

from __future__ import annotations

import pytest

from tests.tiers.fakes import FAR_S, PAGE_TOKENS, Rig, damaged, lost_key, stored
from tierd.tiers import loader
from tierd.tiers.errors import LostReason, PageLost, StoreBroken
from tierd.tiers.lease import END, Lease

A = list(range(1, 25))  # six full pages
NEXT = 99


@pytest.fixture(autouse=True)
def one_page_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test can let pages arrive one by one."""
    monkeypatch.setattr(loader, "PAGES_PER_JOB", 1)


def fetch(rig: Rig, tokens: list[int], deadline_s: float = FAR_S) -> Lease:
    lease = rig.pager.match(tokens)
    rig.pager.fetch(lease, deadline_s)
    return lease


def compute(rig: Rig, lease: Lease, tokens: list[int], start: int, end: int) -> None:
    """One step of the engine."""
    assert rig.pager.allocate(lease, start, end)
    rig.write(lease, tokens[:end], start)
    rig.pager.commit(lease, tokens[:end])


def test_the_engine_computes_from_the_head_while_loads_come_from_the_tail() -> None:
    rig, store = stored(A, device=10)
    lease = fetch(rig, [*A, NEXT])
    position, computed = 0, []
    while (position := lease.skip(position)) < len(A):
        end = min(position + PAGE_TOKENS, lease.limit(position))
        computed.append(position // PAGE_TOKENS)
        compute(rig, lease, A, position, end)
        position = end
        rig.manual.run(0)  # a page loads in the time of a step
        rig.poll()
        rig.check()
    assert computed == [0, 1, 2]
    assert len(store.reads) == 3  # the loads of the pages that were computed never ran
    assert lease.ready
    assert not lease.lost
    assert (lease.num_tokens, lease.hit_nvme) == (12, 12)  # of 24: the others were computed
    assert lease.skip(0) == len(A)
    rig.expect(lease, A)
    rig.settle()
    rig.check()
    rig.close()


def test_a_page_that_arrives_while_it_is_computed_is_computed_to_its_end() -> None:
    rig, store = stored(A[:12], device=10)
    lease = fetch(rig, [*A[:12], NEXT])
    rig.manual.run(0)
    rig.manual.run(0)
    while rig.manual.run(0):
        pass  # all are read, and nobody has looked
    assert rig.pager.allocate(lease, 0, 4)
    rig.write(lease, A[:2], 0)  # half of the first page
    rig.poll()
    rig.check()
    assert len(store.reads) == 3
    assert lease.skip(2) == 2
    assert lease.limit(2) == PAGE_TOKENS  # no rows may be written into the pages after it
    rig.write(lease, A[:4], 2)
    rig.pager.commit(lease, A[:4])
    assert lease.ready
    assert lease.skip(4) == 12
    assert lease.num_tokens == 8
    rig.expect(lease, A[:12])
    rig.check()
    rig.close()


def test_a_failed_load_in_the_middle_costs_just_that_page() -> None:
    rig, store = stored([*A[:12], 1])
    lease = rig.pager.match([*A[:12], 1, 2])
    assert lease.num_tokens == 13
    second = lease.nodes[1].key
    store.fail_read = lost_key(second)
    rig.pager.fetch(lease, FAR_S)
    rig.settle()
    assert lease.absent == {1}
    assert lease.lost
    assert not lease.ready
    assert second not in store.rows
    assert rig.pager.statistics().misses == {"payload": 1}
    assert (lease.skip(0), lease.limit(4), lease.skip(8)) == (4, 8, 13)
    rig.expect(lease, A[:4])
    rig.check()
    compute(rig, lease, [*A[:12], 1], 4, 8)
    assert lease.ready
    assert (lease.num_tokens, lease.skip(8)) == (9, 13)
    rig.expect(lease, [*A[:12], 1])
    rig.pager.release(lease, [*A[:12], 1])
    assert rig.serve([*A[:12], 1, 2, 3]) == 13
    rig.settle()
    assert second in store.rows  # written once more
    rig.check()
    rig.close()


@pytest.mark.parametrize("error", [StoreBroken("gone"), OSError(5, "I/O error"), RuntimeError("a bug")])
def test_whatever_a_load_fails_of_the_page_is_computed(error: Exception) -> None:
    rig, store = stored(A[:8])
    lease = fetch(rig, [*A[:8], NEXT])
    store.fail_read = lambda _key: error
    rig.settle()
    assert lease.absent == {0, 1}
    assert lease.lost
    rig.grow(lease, [*A[:8], NEXT], 0)
    rig.expect(lease, [*A[:8], NEXT])
    assert lease.num_tokens == 0
    rig.pager.release(lease, [*A[:8], NEXT])
    rig.settle()
    rig.check()
    rig.close()


def test_holes_of_a_running_sequence_are_computed_again_and_what_follows_stays_valid() -> None:
    rig, _ = stored(A[:12], device=2)
    tokens = [*A[:12], 50, 51]
    lease = rig.start(tokens)
    rig.grow(lease, tokens, lease.skip(0))  # two tokens into a private page; pages have left for the store
    rig.expect(lease, tokens)
    gone = [node.key for node in lease.nodes if not node.readable]
    assert len(gone) == 2
    rig.pager.tables.lose(damaged(gone), rig.pager.leases)
    assert len(lease.absent) == 2
    assert lease.lost
    rig.check()
    hole = lease.skip(0)
    assert hole == min(lease.absent) * PAGE_TOKENS
    private = rig.pager.tables.addresses(lease, 4)[3]
    rig.grow(lease, [*tokens, 52], 14)  # mends on its way
    assert not lease.absent
    assert rig.pager.tables.addresses(lease, 4)[3] == private
    assert lease.skip(0) == 15
    rig.expect(lease, [*tokens, 52])
    rig.pager.release(lease, [*tokens, 52])
    rig.settle()
    rig.check()
    rig.close()


def test_at_the_deadline_what_has_not_come_is_to_be_computed() -> None:
    rig, _ = stored(A[:12])
    lease = fetch(rig, [*A[:12], NEXT], rig.now_s + 1)
    rig.manual.run(0)
    rig.poll()
    assert lease.loading
    rig.now_s += 1
    rig.poll()
    assert not lease.loading
    assert lease.lost
    assert lease.absent == {0, 1}
    assert rig.pager.statistics().misses == {"late": 2}
    compute(rig, lease, A, 0, 4)
    assert (lease.num_tokens, lease.skip(4)) == (8, 4)
    rig.poll()
    assert rig.pager.statistics().misses == {"late": 2}  # counted once
    rig.settle()  # the other comes late, and serves all the same
    assert lease.ready
    assert lease.num_tokens == 8
    rig.expect(lease, A[:12])
    rig.check()
    rig.close()


def test_at_the_deadline_only_pages_that_were_still_to_come_are_late() -> None:
    rig, store = stored(A[:12])
    lease = rig.pager.match([*A[:12], NEXT])
    store.fail_read = lost_key(lease.nodes[2].key)
    rig.pager.fetch(lease, rig.now_s + 1)
    rig.manual.run(0)  # the last page turns out to be lost
    rig.poll()
    assert rig.pager.allocate(lease, 0, 4)  # the first is being computed
    rig.now_s += 1
    rig.poll()
    assert rig.pager.statistics().misses == {"payload": 1, "late": 1}
    rig.close()


def test_what_comes_after_the_deadline_is_cached() -> None:
    rig, _ = stored(A[:12])
    lease = fetch(rig, [*A[:12], NEXT], rig.now_s)
    rig.poll()
    rig.pager.release(lease, [])
    rig.settle()
    assert rig.pager.match([*A[:12], NEXT]).hit_device == 12
    rig.check()
    rig.close()


def test_a_tail_that_is_late_leaves_its_tokens_to_be_computed() -> None:
    rig, _ = stored(A[:6])
    lease = fetch(rig, [*A[:6], NEXT], rig.now_s + 1)
    rig.manual.run(0)
    rig.now_s += 1
    rig.poll()
    assert lease.tail is None
    assert lease.num_tokens == 4
    assert lease.limit(lease.skip(0)) == END
    rig.settle()
    rig.grow(lease, A[:6], 0)
    rig.expect(lease, A[:6])
    rig.check()
    rig.close()


def test_two_leases_share_one_load() -> None:
    rig, store = stored(A[:12])
    first, second = fetch(rig, [*A[:12], 1]), fetch(rig, [*A[:12], 2])
    rig.settle()
    assert first.ready
    assert second.ready
    assert rig.pager.tables.addresses(first, 3).tolist() == rig.pager.tables.addresses(second, 3).tolist()
    assert len(store.reads) == 3
    rig.expect(second, A[:12])
    rig.pager.release(first, A[:12])
    rig.expect(second, A[:12])
    rig.pager.release(second, A[:12])
    rig.check()
    rig.close()


def test_a_page_that_one_lease_computes_is_waited_for_by_the_others() -> None:
    rig, store = stored(A[:8])
    first, second = fetch(rig, [*A[:8], 1]), fetch(rig, [*A[:8], 2])
    store.fail_read = lambda _key: PageLost(LostReason.IO_ERROR)
    rig.settle()
    assert first.absent == second.absent == {0, 1}
    assert rig.pager.allocate(first, 0, 4)
    assert not rig.pager.allocate(second, 0, 4)
    assert rig.pager.promoter.is_coming(second)
    assert rig.pager.allocate(second, 4, 8)  # it may compute another one, once the first is there
    rig.write(first, A[:4], 0)
    rig.pager.commit(first, A[:4])
    assert not rig.pager.allocate(second, 0, 4)  # it is there now, and nobody computes it twice
    rig.poll()
    assert second.absent == {1}
    assert second.skip(0) == 4
    compute(rig, second, A, 4, 8)
    rig.poll()
    assert first.ready
    rig.expect(first, A[:8])
    rig.expect(second, A[:8])
    assert first.num_tokens == 4  # the other one it did not compute
    rig.check()
    rig.close()


def test_a_lease_that_ends_while_it_computes_leaves_the_page_to_the_others() -> None:
    rig, store = stored(A[:8])
    first, second = fetch(rig, [*A[:8], 1]), fetch(rig, [*A[:8], 2])
    store.fail_read = lambda _key: PageLost(LostReason.IO_ERROR)
    rig.settle()
    assert rig.pager.allocate(first, 0, 8)
    rig.check()
    rig.pager.release(first, [])
    rig.check()
    assert rig.pager.statistics().device.used_pages == 0
    assert not rig.pager.promoter.is_coming(second)
    rig.grow(second, A[:8], 0)
    rig.expect(second, A[:8])
    rig.check()
    rig.close()


def test_a_load_that_was_cancelled_is_none_that_failed() -> None:
    rig, store = stored(A[:8])
    first, second = fetch(rig, [*A[:8], 1]), fetch(rig, [*A[:8], 2])
    compute(rig, first, A, 0, 4)
    rig.settle()
    assert first.ready
    assert second.ready
    assert not second.lost
    assert rig.pager.statistics().misses == {}
    assert len(store.reads) == 1
    assert len(store.rows) == 2
    assert (first.num_tokens, second.num_tokens) == (4, 8)
    rig.expect(second, A[:8])
    rig.check()
    rig.close()


def test_a_page_computed_by_a_lease_that_did_not_wait_serves_those_who_do() -> None:
    rig, store = stored(A[:4])
    slow = fetch(rig, [*A[:4], 9])
    store.fail_read = lambda _key: PageLost(LostReason.IO_ERROR)
    quick = rig.pager.match([7])
    rig.grow(quick, A[:4], 0)
    rig.poll()
    assert slow.ready
    assert rig.pager.tables.addresses(slow, 1).tolist() == rig.pager.tables.addresses(quick, 1).tolist()
    rig.settle()
    assert slow.num_tokens == 4
    rig.expect(slow, A[:4])
    rig.check()
    rig.close()


def test_a_lease_that_waits_for_pages_can_not_be_forked() -> None:
    rig, store = stored(A[:12])
    lease = rig.pager.match([*A[:12], 1])
    store.fail_read = lost_key(lease.nodes[0].key)
    rig.pager.fetch(lease, FAR_S)
    rig.settle()
    with pytest.raises(ValueError, match="can't be forked"):
        rig.pager.fork(lease, [])
    rig.mend(lease, A[:12])
    rig.settle()
    with pytest.raises(ValueError, match="can't be forked after 10 tokens"):
        rig.pager.fork(lease, A[:10])  # what comes after them is not the fork's
    twin = rig.pager.fork(lease, A[:12])
    assert twin.ready and twin.num_tokens == 12
    rig.pager.release(twin, A[:12])
    rig.pager.release(lease, A[:12])
    rig.check()
    rig.close()
