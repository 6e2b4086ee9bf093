from __future__ import annotations

import itertools

import pytest

from tests.tiers.fakes import FAR_S, Rig, lost_key, stored
from tests.tiers.stand_ins import ManualMover
from tierd.tiers import loader, promote
from tierd.tiers.errors import LostReason, PageLost
from tierd.tiers.lease import Lease
from tierd.tiers.mover import JobClass
from tierd.tiers.promote import DAMAGE_EVERY_S

A = list(range(1, 13))
B = list(range(21, 33))


@pytest.fixture(autouse=True)
def one_page_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test can let pages arrive one by one."""
    monkeypatch.setattr(loader, "PAGES_PER_JOB", 1)


def fetch(rig: Rig, tokens: list[int], deadline_s: float = FAR_S) -> Lease:
    lease = rig.pager.match(tokens)
    rig.pager.fetch(lease, deadline_s)
    return lease


def loaded(lease: Lease) -> list[int]:
    """Places of the pages that are there."""
    return [place for place, node in enumerate(lease.nodes) if node.readable]


def test_loads_go_from_the_tail_to_the_head() -> None:
    rig, store = stored(A)
    lease = fetch(rig, [*A, 1])
    keys = [node.key for node in lease.nodes]
    for arrived in ([2], [1, 2], [0, 1, 2]):
        assert not lease.ready
        rig.manual.run(0)
        rig.poll()
        assert loaded(lease) == arrived
        rig.check()
    assert store.reads == keys[::-1]
    assert lease.ready
    rig.expect(lease, A)
    rig.close()


def test_what_no_row_sees_stays_in_the_store_and_is_not_waited_for() -> None:
    rig, store = stored(A, capacity=1)
    lease = rig.pager.match([*A, 1])
    keys = [node.key for node in lease.nodes]
    rig.pager.fetch(lease, FAR_S, unseen=2)
    assert lease.absent == {2}  # at once, before the only load that may be on its way has begun or ended
    rig.manual.run_all()
    rig.poll()
    assert lease.ready and store.reads == keys[2:]
    rig.pager.tables.refresh(lease)
    assert lease.streamed == 2
    rig.check()
    rig.close()


def test_loads_go_on_as_the_queue_allows() -> None:
    rig, _ = stored(A, device=3, capacity=1)
    lease = fetch(rig, [*A, 1])
    for arrived in range(3):
        assert rig.manual.queued == 1
        assert not lease.ready
        rig.manual.run_all()
        rig.poll()
        assert rig.pager.statistics().loaded_pages == arrived + 1
    assert lease.ready
    rig.expect(lease, A)
    rig.close()


def test_loads_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promote, "MAX_LOADS", 2)
    rig, _ = stored(A)
    lease = fetch(rig, [*A, 1])
    assert rig.manual.queued == rig.pager.promoter.loader.in_flight == 2
    rig.settle()
    assert lease.ready
    assert rig.pager.promoter.loader.in_flight == 0
    rig.check()
    rig.close()


def test_a_slow_disk_is_given_little_at_once() -> None:
    """What its reads have begun to fill can't be taken back."""
    ticks = itertools.count()
    mover = ManualMover(1, clock=lambda: 10.0 * next(ticks))  # a read of 64 bytes takes seconds
    long = list(range(200, 240))
    rig, _ = stored(A, long, device=20, mover=mover)
    first = fetch(rig, [*A, 1])
    rig.settle()
    lease = fetch(rig, [*long, 1])
    assert rig.pager.promoter.loader.in_flight == 8
    rig.settle()
    assert first.ready and lease.ready
    rig.expect(lease, long)
    rig.check()
    rig.close()


def test_pages_load_into_either_arena() -> None:
    rig, _ = stored(A, device=2, host=2)
    lease = fetch(rig, [*A, 1])
    rig.settle()
    assert lease.ready
    stats = rig.pager.statistics()
    assert (stats.device.used_pages, stats.host.used_pages) == (2, 1)
    rig.expect(lease, A)
    rig.check()
    rig.close()


def test_loads_make_room_among_idle_pages_and_not_among_those_of_leases() -> None:
    rig, _ = stored(A, B, device=4)
    rig.serve(B)  # three idle pages on the device
    lease = fetch(rig, [*A, 1])
    rig.settle()
    assert lease.ready
    assert loaded(lease) == [0, 1, 2]
    other = fetch(rig, [*B, 1])  # one slot is left
    rig.settle()
    assert other.ready
    assert len(loaded(other)) == 1
    assert loaded(lease) == [0, 1, 2]
    for each, tokens in ((lease, A), (other, B)):
        assert each.num_tokens == 12
        rig.expect(each, tokens)
    rig.check()
    rig.close()


def test_a_partial_page_is_loaded_once_and_copied_for_each_who_goes_on_from_it() -> None:
    rig, store = stored(A[:6])
    leases = [fetch(rig, [*A[:6], 9]), fetch(rig, [*A[:6], 8])]
    rig.settle()
    assert len(store.reads) == 2
    for lease, token in zip(leases, (9, 8), strict=True):
        assert lease.ready
        assert lease.num_tokens == 6
        rig.expect(lease, A[:6])
        rig.grow(lease, [*A[:6], token], 6)
    for lease, token in zip(leases, (9, 8), strict=True):
        rig.expect(lease, [*A[:6], token])
    assert rig.pager.statistics().device.used_pages == 3  # the full page is shared
    rig.check()
    rig.close()


def test_a_lost_partial_page_costs_only_its_tokens() -> None:
    rig, store = stored(A[:6])
    lease = rig.pager.match([*A[:6], 9])
    assert lease.tail is not None
    assert lease.tail.source is not None
    lost = lease.tail.source.key
    store.fail_read = lost_key(lost)
    rig.pager.fetch(lease, FAR_S)
    rig.settle()
    assert lease.ready
    assert (lease.num_tokens, lease.skip(0), lease.lost) == (4, 4, True)
    assert rig.pager.statistics().misses["payload"] == 1
    assert rig.pager.index.get(lost) is None
    rig.check()
    rig.close()


def test_a_partial_page_waits_for_room_that_is_being_made_and_for_no_other() -> None:
    rig = Rig(device=3, host=3)
    rig.serve(A[:4])
    rig.serve(list(range(21, 29)))
    lease = fetch(rig, A[:4])
    assert not lease.ready
    rig.settle()
    assert lease.ready
    assert lease.num_tokens == 3
    rig.expect(lease, A[:3])
    other = rig.pager.match([7])
    rig.allocate(other, 0, 8)
    last = fetch(rig, [*A[:3], 9])  # nothing can go: it starts without
    assert last.ready
    assert (last.num_tokens, last.skip(0)) == (0, 0)
    assert rig.pager.statistics().misses == {"no_room": 1}
    rig.check()
    rig.close()


def test_a_page_that_goes_lost_before_the_fetch_is_a_miss() -> None:
    rig, store = stored([*A, 1])
    waiting = rig.pager.match([*A, 1, 2])
    store.fail_read = lambda _key: PageLost(LostReason.HEADER)
    other = rig.start([*A, 5])
    assert other.num_tokens == 0
    rig.pager.release(other, [])  # nothing of what it computed counts
    rig.pager.fetch(waiting, FAR_S)
    rig.settle()
    assert waiting.tail is None
    assert waiting.tail_tokens == 0
    assert waiting.lost
    assert rig.pager.statistics().misses["absent"] > 0
    rig.check()
    rig.close()


def test_the_engine_is_told_when_nothing_comes_any_more() -> None:
    rig, store = stored(A)
    lease = fetch(rig, [*A, 1])
    assert rig.pager.promoter.is_coming(lease)
    store.fail_read = lambda _key: PageLost(LostReason.IO_ERROR)
    rig.settle()
    assert lease.absent == {0, 1, 2}
    assert not rig.pager.promoter.is_coming(lease)
    rig.check()
    rig.close()


def test_loads_that_were_stopped_start_no_more() -> None:
    rig, store = stored(A, capacity=1)
    lease = fetch(rig, [*A, 1])
    rig.pager.promoter.stop_loading(lease)
    rig.settle()
    assert len(store.reads) == 2  # one ran, one stood ready
    assert lease.absent == {0}
    assert not lease.lost  # nothing failed
    rig.grow(lease, A, 0)
    rig.expect(lease, A)
    assert lease.num_tokens == 8
    rig.check()
    rig.close()


def test_what_a_sequence_waits_for_goes_before_what_only_fills_memory() -> None:
    rig, _ = stored(A, B, [7, 7, 7, 7], device=5)
    lease, other = rig.start([*A, 1]), rig.start([*B[:8], 1])
    rig.allocate(lease, 12, 16)
    (gone,) = [node for node in [*lease.nodes, *other.nodes] if not node.readable]
    rig.pager.tables.refresh(lease)
    rig.pager.release(other, [])
    rig.poll()  # the page of the lease that had to leave comes back in the place of an idle one
    waiting = fetch(rig, [7, 7, 7, 7, 1])
    assert [entry.klass for entry in rig.manual._runnable()] == [JobClass.NOW, JobClass.PREFETCH]
    rig.settle()
    assert gone.readable
    assert waiting.ready
    rig.check()
    rig.close()


def test_a_store_that_is_off_ends_the_tier() -> None:
    rig, store = stored(A)
    store.fail_read = lambda _key: PageLost(LostReason.STORE_OFF)
    lease = rig.start([*A, 1])
    assert lease.num_tokens == 0
    assert not rig.pager.statistics().nvme_on
    assert len(rig.notices) == 1
    rig.settle()
    rig.check()
    rig.close()


def test_damaged_pages_are_told_at_once_then_once_a_minute() -> None:
    sequences = [[number * 100 + token for token in range(4)] for number in range(1, 6)]
    rig, store = stored(*sequences)
    store.fail_read = lambda _key: PageLost(LostReason.PAYLOAD)
    rig.start([*sequences[0], 9])
    first = "notice: 1 page on disk failed its check and was dropped; the disk may be failing"
    assert rig.notices == [first]
    for tokens in sequences[1:4]:
        rig.start([*tokens, 9])
    assert rig.notices == [first]
    rig.now_s += DAMAGE_EVERY_S
    rig.poll()
    assert rig.notices[1:] == [
        "notice: 4 pages on disk failed their check so far and were dropped; the disk may be failing"
    ]
    rig.now_s += DAMAGE_EVERY_S
    rig.poll()
    store.fail_read = lambda _key: PageLost(LostReason.ABSENT)  # no damage: it was removed meanwhile
    rig.start([*sequences[4], 9])
    assert len(rig.notices) == 2
    rig.check()
    rig.close()


def test_a_cancel_while_fetching_leaves_nothing_behind() -> None:
    rig, _ = stored([*A, 1, 2])
    lease = fetch(rig, [*A, 1, 2, 3])
    assert lease.tail is not None
    rig.pager.release(lease, [])
    rig.pager.release(lease, [])  # idempotent
    rig.check()
    rig.settle()
    stats = rig.pager.statistics()
    assert (stats.leases, stats.device.used_pages, stats.device.in_flight_pages) == (0, 0, 0)
    rig.check()
    rig.close()


def test_pages_that_come_after_their_lease_has_gone_are_cache() -> None:
    rig, store = stored(A)
    lease = fetch(rig, [*A, 1])
    rig.pager.release(lease, [])
    rig.settle()
    assert rig.pager.match([*A, 1]).hit_device == 12
    assert len(store.reads) == 3
    rig.check()
    rig.close()


def test_loads_take_no_slot_that_rows_wait_for() -> None:
    rig, _ = stored(B, device=4, host=8)
    lease = rig.start(A)
    rig.grow(lease, A, 0)
    writer = rig.pager.match([7])
    assert not rig.pager.allocate(writer, 0, 8)  # one slot is free, another one on its way
    reader = rig.pager.match([*B, 1])
    rig.pager.fetch(reader, FAR_S)
    rig.work()
    assert rig.pager.allocate(writer, 0, 8)
    rig.work()
    assert reader.ready and all(node.host >= 0 for node in reader.nodes)
    rig.expect(reader, B)
    rig.check()
    rig.close()


def test_the_copy_of_a_partial_page_takes_no_slot_that_rows_wait_for() -> None:
    rig = Rig(device=4, host=8)
    rig.serve([*B, 5, 6])
    rig.settle()
    rig.pager.evictor.make_room(4)
    rig.settle()
    lease = rig.start(A)
    rig.grow(lease, A, 0)
    writer = rig.pager.match([7])
    assert not rig.pager.allocate(writer, 0, 8)
    reader = rig.pager.match([*B, 5, 6, 7])
    assert reader.num_tokens == 14
    rig.pager.fetch(reader, FAR_S)
    rig.work()
    assert rig.pager.allocate(writer, 0, 8)
    rig.settle()
    assert reader.ready
    rig.check()
    rig.close()


def test_a_slot_goes_to_nobody_while_a_copy_that_was_given_up_writes_into_it() -> None:
    rig = Rig(device=6, host=0)
    rig.serve([*B, 5, 6])
    lease = rig.pager.match([*B, 5, 6, 7])
    rig.pager.fetch(lease, FAR_S)
    assert lease.tail is not None and lease.tail.started
    slot = lease.tail.slot
    rig.pager.release(lease, [])
    other = rig.pager.match([7])
    assert rig.pager.allocate(other, 0, 4) and rig.device.num_free == 0
    assert other.private != [slot]
    rig.check()
    rig.work()
    assert rig.device.num_free == 1
    assert rig.pager.allocate(other, 4, 8) and other.private[1] == slot
    rig.check()
    rig.close()
