from __future__ import annotations

from tests.tiers.fakes import Rig
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers.errors import StoreFull

A = list(range(1, 13))
B = list(range(101, 113))


def room(rig: Rig, count: int) -> int:
    """Free device slots after one call, before anything in flight arrives."""
    rig.pager.evictor.make_room(count)
    return rig.device.num_free


def test_without_lower_tiers_pages_are_dropped_at_once() -> None:
    rig = Rig(device=3, host=0)
    rig.serve(A)
    assert room(rig, 2) == 2
    assert rig.pager.statistics().known_pages == 1
    rig.check()
    rig.close()


def test_with_a_host_they_are_copied_down_first() -> None:
    rig = Rig(device=3, host=3)
    rig.serve(A)
    assert room(rig, 2) == 0
    assert rig.pager.evictor.in_motion == 2
    rig.check()
    rig.manual.run_all()
    rig.poll()
    assert rig.device.num_free == 2
    assert rig.pager.statistics().known_pages == 3
    rig.check()
    rig.close()


def test_a_page_with_a_host_copy_goes_at_once() -> None:
    rig = Rig(device=3, host=3)
    rig.serve(A)
    room(rig, 3)
    rig.settle()
    lease = rig.start([*A, 1])
    rig.pager.release(lease, A)
    assert room(rig, 3) == 3
    rig.check()
    rig.close()


def test_a_durable_page_goes_at_once_when_there_is_no_host() -> None:
    rig = Rig(device=3, host=0, store=MemoryStore())
    rig.serve(A)
    rig.pager.flush(rig.now_s + 1)
    assert room(rig, 3) == 3
    assert rig.pager.statistics().known_pages == 3
    rig.check()
    rig.close()


def test_a_page_that_is_not_durable_is_written_first() -> None:
    store = MemoryStore()
    rig = Rig(device=3, host=0, store=store)
    rig.serve(A)
    assert room(rig, 1) == 0
    rig.poll()  # starts the write without waiting for a group
    rig.manual.run_all()
    assert len(store.rows) == 3
    rig.check()
    rig.poll()
    assert rig.device.num_free == 1
    rig.check()
    rig.close()


def test_a_page_that_can_not_be_written_is_dropped_in_the_end() -> None:
    store = MemoryStore()
    store.fail_write = StoreFull("full")
    rig = Rig(device=3, host=0, store=store)
    rig.serve(A)
    rig.serve(B)
    rig.settle()
    assert rig.pager.statistics().known_pages <= 3
    rig.check()
    rig.close()


def test_a_full_host_gives_up_its_least_valuable_page() -> None:
    rig = Rig(device=3, host=2)
    rig.serve(A)
    rig.now_s += 100
    rig.serve(B)
    rig.settle()
    stats = rig.pager.statistics()
    assert stats.host.cached_pages == 2
    assert stats.host.evictions == 1
    rig.check()
    rig.close()


def test_a_reserve_is_kept_ahead_of_need() -> None:
    rig = Rig(device=32, host=32)
    for start in range(0, 320, 20):
        rig.serve(list(range(start, start + 8)))
    rig.settle()
    assert rig.device.num_free >= 2
    rig.check()
    rig.close()


def test_a_copy_down_that_fails_leaves_the_page_where_it_is() -> None:
    rig = Rig(device=3, host=3)
    rig.serve(A)

    def fail(_dest: object, _source: object) -> None:
        raise OSError("the copy failed")

    rig.mover._copy = fail
    room(rig, 1)
    rig.manual.run_all()
    rig.poll()
    lease = rig.pager.match([*A, 1])
    assert lease.hit_device == 12
    rig.expect(lease, A)
    rig.pager.release(lease, A)
    rig.check()
    rig.close()
