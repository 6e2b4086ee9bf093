"""Loads, many pages to a job: each page ends on its own."""

from __future__ import annotations

from tests.tiers.fakes import FAR_S, Rig
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers.errors import LostReason, PageLost
from tierd.tiers.links import Link
from tierd.tiers.loader import PAGES_PER_JOB

LONG = [place * 7 % 50 for place in range(4 * 40)]


def stored(**sizes: int) -> tuple[Rig, MemoryStore]:
    """A rig whose store alone holds the pages of LONG."""
    store = MemoryStore()
    first = Rig(device=60, host=0, store=store)
    first.serve(LONG)
    first.pager.flush(FAR_S)
    first.close()
    return Rig(store=store, **sizes), store


def test_pages_share_a_job() -> None:
    rig, _ = stored(device=60, host=0)
    lease = rig.pager.match([*LONG, 1])
    rig.pager.fetch(lease, FAR_S)
    pages = len(lease.nodes)
    assert rig.manual.queued == -(-pages // PAGES_PER_JOB) and rig.pager.promoter.loader.in_flight == pages
    rig.work()
    assert not lease.absent
    assert rig.mover.statistics()[Link.DISK_READ].total_bytes == pages * rig.device.record_bytes
    rig.pager.release(lease, [])
    rig.check()


def test_a_page_that_fails_costs_none_of_the_others_in_its_job() -> None:
    rig, store = stored(device=60, host=0)
    lease = rig.pager.match([*LONG, 1])
    bad = lease.nodes[33].key
    store.fail_read = lambda key: PageLost(LostReason.PAYLOAD) if key == bad else None
    rig.pager.fetch(lease, FAR_S)
    rig.work()
    assert lease.absent == {33} and lease.lost
    assert rig.pager.promoter.misses == {LostReason.PAYLOAD: 1}
    rig.pager.release(lease, [])
    rig.check()


def test_a_job_that_fails_as_a_whole_fails_all_its_pages() -> None:
    rig, store = stored(device=60, host=0)
    store.read_many = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    lease = rig.pager.match([*LONG, 1])
    pages = len(lease.nodes)
    rig.pager.fetch(lease, FAR_S)
    rig.work()
    assert len(lease.absent) == pages and not rig.pager.promoter.is_coming(lease)
    assert rig.pager.promoter.misses["ZeroDivisionError"] == pages
    rig.pager.release(lease, [])
    rig.check()


def test_a_full_queue_takes_the_job_later() -> None:
    rig, _ = stored(device=60, host=0)
    rig.mover._capacity = 0
    lease = rig.pager.match([*LONG, 1])
    rig.pager.fetch(lease, FAR_S)
    assert rig.manual.queued == 0
    rig.mover._capacity = 100
    for _ in range(10):
        rig.poll()
        rig.manual.run_all()
    rig.poll()
    assert not lease.absent
    rig.pager.release(lease, [])
    rig.check()


def test_a_full_queue_keeps_no_load_of_a_lease_that_has_ended() -> None:
    rig, _ = stored(device=60, host=0)
    rig.mover._capacity = 0
    lease = rig.pager.match([*LONG, 1])
    rig.pager.fetch(lease, FAR_S)
    rig.pager.release(lease, [])
    rig.mover._capacity = 100
    rig.settle()
    assert rig.pager.promoter.loader.in_flight == 0
    assert rig.device.in_flight == 0
    rig.check()


def test_a_job_is_taken_back_when_all_its_pages_are_being_computed() -> None:
    rig, store = stored(device=60, host=0)
    lease = rig.pager.match([*LONG, 1])
    rig.pager.fetch(lease, FAR_S)
    first = len(lease.nodes) % PAGES_PER_JOB  # loads begin at the end: the job of the first pages has what is left
    jobs = rig.manual.queued
    assert first > 1
    assert rig.pager.allocate(lease, 0, 4)
    assert rig.manual.queued == jobs  # the others in the job of this page would be lost with it
    assert rig.pager.allocate(lease, 4, 4 * first)
    assert rig.manual.queued == jobs - 1
    rig.work()
    assert lease.absent == set(range(first))
    assert not {node.key for node in lease.nodes[:first]} & set(store.reads)
    rig.pager.release(lease, [])
    rig.check()
