from __future__ import annotations

from tests.tiers.fakes import FAR_S, ManualMover, MemoryStore, Rig
from tierd.tiers.errors import LostReason, PageLost
from tierd.tiers.promote import DAMAGE_EVERY_S

A = list(range(1, 13))


def stored(*sequences: list[int], device: int = 8, host: int = 0, capacity: int = 1024) -> tuple[Rig, MemoryStore]:
    """A fresh pager over a store that holds these sequences."""
    store = MemoryStore()
    rig = Rig(device=20, host=0, store=store)
    for tokens in sequences:
        rig.serve(tokens)
    rig.pager.flush(rig.now_s + 1)
    rig.close()
    return Rig(device=device, host=host, store=store, mover=ManualMover(1, capacity=capacity)), store


def test_loads_go_on_as_slots_and_queues_allow() -> None:
    rig, _ = stored(A, device=3, capacity=1)
    lease = rig.pager.match([*A, 1])
    rig.pager.fetch(lease, FAR_S)
    for arrived in range(3):
        assert rig.manual.queued == 1
        assert not lease.ready
        rig.manual.run_all()
        rig.poll()
        assert rig.pager.promoter.promotions[2] == arrived + 1
    assert lease.ready
    rig.expect(lease, A)
    rig.close()


def test_two_leases_that_can_not_both_fit_end_at_their_deadlines() -> None:
    rig, _ = stored(A, [*range(21, 33)], device=4)
    first, second = rig.pager.match([*A, 1]), rig.pager.match([*range(21, 33), 1])
    for lease in (first, second):
        rig.pager.fetch(lease, rig.now_s + 1)
    rig.settle()
    assert first.ready
    assert not second.ready
    rig.now_s += 1
    rig.settle()
    assert second.ready
    assert second.num_tokens == 4
    rig.check()
    rig.close()


def test_a_partial_page_loads_straight_into_a_private_page() -> None:
    rig, store = stored(A[:6])
    lease = rig.start([*A[:6], 9])
    assert lease.num_tokens == 6
    assert len(store.reads) == 2
    assert rig.pager.statistics().device.used_pages == 2
    rig.expect(lease, A[:6])
    rig.check()
    rig.close()


def test_a_lost_partial_page_costs_only_its_tokens() -> None:
    rig, store = stored(A[:6])
    lease = rig.pager.match([*A[:6], 9])
    assert lease.tail is not None
    assert lease.tail.source is not None
    lost = lease.tail.source.key
    store.fail_read = lambda key: PageLost(LostReason.PAYLOAD) if key == lost else None
    rig.pager.fetch(lease, FAR_S)
    rig.settle()
    assert lease.ready
    assert (lease.num_tokens, lease.lost) == (4, True)
    assert rig.pager.statistics().misses == {"payload": 1}
    assert rig.pager.index.get(lost) is None
    rig.check()
    rig.close()


def test_a_partial_page_waits_for_room_that_is_being_made_and_for_no_other() -> None:
    rig = Rig(device=3, host=3)
    rig.serve(A[:4])
    rig.serve(list(range(21, 29)))
    lease = rig.pager.match(A[:4])
    rig.pager.fetch(lease, FAR_S)
    assert not lease.ready
    rig.settle()
    assert lease.ready
    assert lease.num_tokens == 3
    rig.expect(lease, A[:3])
    other = rig.pager.match([7])
    rig.pager.allocate(other, 1)
    last = rig.pager.match([*A[:3], 9])  # nothing can go: it starts without
    rig.pager.fetch(last, FAR_S)
    assert last.ready
    assert last.num_tokens == 0
    assert rig.pager.statistics().misses == {"no_room": 1}
    rig.check()
    rig.close()


def test_a_page_that_goes_lost_before_the_fetch_is_a_miss() -> None:
    rig, store = stored([*A, 1])
    waiting = rig.pager.match([*A, 1, 2])
    store.fail_read = lambda _key: PageLost(LostReason.HEADER)
    other = rig.start([*A, 5])
    assert other.num_tokens == 0
    rig.pager.fetch(waiting, FAR_S)
    assert waiting.ready
    assert waiting.num_tokens == 0
    assert rig.pager.statistics().misses["absent"] > 0
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


def test_a_page_computed_meanwhile_does_not_make_the_others_ready() -> None:
    rig, _ = stored([*A[:8], 1])
    slow = rig.pager.match([*A[:8], 5])
    rig.pager.fetch(slow, FAR_S)
    quick = rig.pager.match([7])
    rig.grow(quick, A[:4], 0)  # the first of the two pages that are on their way
    assert rig.manual.run(0)  # its load ends, too late to be of use
    rig.poll()
    assert not slow.ready
    rig.settle()
    assert slow.ready
    rig.expect(slow, A[:8])
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
