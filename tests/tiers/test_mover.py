from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tierd.tiers import mover as mover_module
from tierd.tiers.arena import POISON
from tierd.tiers.errors import JobCancelled, MoverClosed
from tierd.tiers.links import Link, LinkGroup
from tierd.tiers.mover import Completion, Disturbance, Job, JobClass, Mover

WAIT_S = 5.0


@pytest.fixture
def mover() -> Iterator[Mover]:
    mover = Mover(2)
    yield mover
    mover.close()


def ignore(_done: Completion) -> None:
    return None


def job(call: Callable[[], object], link: Link = Link.HOST_TO_DEVICE) -> Job:
    return Job(call, link, 0, ignore)


def awaited(call: Callable[[], object], link: Link = Link.DISK_READ) -> Job:
    return Job(call, link, 0, awaited=True)


def drain(mover: Mover, count: int) -> list[Completion]:
    found: list[Completion] = []
    deadline_s = time.monotonic() + WAIT_S
    while len(found) < count and time.monotonic() < deadline_s:
        mover.wait(0.05)
        found += mover.drain()
    return found


def test_every_job_completes_once(mover: Mover) -> None:
    links = list(Link)
    jobs = [job(lambda number=number: number, links[number % 5]) for number in range(200)]  # type: ignore[misc]
    for number, item in enumerate(jobs):
        assert mover.submit(item, list(JobClass)[number % 4])
    done = drain(mover, 200)
    assert {id(item.job) for item in done} == {id(item) for item in jobs}
    assert sorted(item.result for item in done) == list(range(200))  # type: ignore[type-var]
    assert mover.outstanding == 0
    assert mover.drain() == []


def test_copies_and_measures(mover: Mover) -> None:
    source = np.arange(200, dtype=np.uint8)
    dest = np.zeros(200, dtype=np.uint8)
    mover.submit(mover.copy_job(dest, source, Link.DEVICE_TO_HOST, ignore), JobClass.NOW)
    (done,) = drain(mover, 1)
    assert done.error is None
    assert np.array_equal(dest, source)
    stats = mover.statistics()
    assert (stats[Link.DEVICE_TO_HOST].total_bytes, stats[Link.DEVICE_TO_HOST].queued) == (200, 0)
    assert stats[Link.DISK_READ].count == 0


def test_an_error_travels_in_the_completion(mover: Mover) -> None:
    mover.submit(job(lambda: 1 // 0), JobClass.NOW)
    mover.submit(job(lambda: "fine"), JobClass.NOW)
    done = drain(mover, 2)
    assert sorted(type(item.error).__name__ for item in done) == ["NoneType", "ZeroDivisionError"]
    assert mover.dead is None


def test_classes_are_served_in_order() -> None:
    mover = Mover(1)
    gate, ran = threading.Event(), []
    mover.submit(job(lambda: gate.wait(WAIT_S)), JobClass.NOW)
    for klass in (JobClass.PREFETCH, JobClass.NEXT, JobClass.NOW):
        mover.submit(job(lambda klass=klass: ran.append(klass)), klass)  # type: ignore[misc]
    gate.set()
    drain(mover, 4)
    mover.close()
    assert ran == [JobClass.NOW, JobClass.NEXT, JobClass.PREFETCH]


def test_writes_keep_their_order_on_one_thread(mover: Mover) -> None:
    ran: list[tuple[int, str]] = []
    for number in range(50):
        call = lambda number=number: ran.append((number, threading.current_thread().name))  # noqa: E731 - binds number
        mover.submit(job(call, Link.DISK_WRITE), JobClass.WRITE_BEHIND)
    drain(mover, 50)
    assert [number for number, _ in ran] == list(range(50))
    assert {name for _, name in ran} == {"tierd-writer"}


def test_the_queues_are_bounded() -> None:
    mover, gate = Mover(1, capacity=3), threading.Event()
    accepted = [mover.submit(job(lambda: gate.wait(WAIT_S)), JobClass.NOW) for _ in range(5)]
    assert accepted == [True, True, True, False, False]
    gate.set()
    drain(mover, 3)
    assert mover.submit(job(lambda: None), JobClass.NOW)
    mover.close()


def test_room_for_an_awaited_job_comes_with_the_end_of_another() -> None:
    mover, gate = Mover(1, capacity=2), threading.Event()
    awaited = [Job(lambda: gate.wait(WAIT_S), Link.HOST_TO_DEVICE, 0, awaited=True) for _ in range(3)]
    assert mover.wait_for_room(0.0)
    assert [mover.submit(one, JobClass.NOW) for one in awaited] == [True, True, False]
    assert not mover.wait_for_room(0.01) and not mover.wait_for_room(-1.0)
    threading.Timer(0.05, gate.set).start()
    assert mover.wait_for_room(WAIT_S) and mover.submit(awaited[2], JobClass.NOW)
    assert mover.wait_for(awaited, WAIT_S)
    mover.close()


def test_close_fails_what_did_not_run_and_joins() -> None:
    mover, gate = Mover(1), threading.Event()
    mover.submit(job(lambda: gate.wait(WAIT_S)), JobClass.NOW)
    time.sleep(0.02)
    mover.submit(job(lambda: "too late"), JobClass.NOW)
    threading.Timer(0.05, gate.set).start()
    mover.close()
    mover.close()
    done = mover.drain()
    assert sorted(type(item.error).__name__ for item in done) == ["MoverClosed", "NoneType"]
    mover.submit(job(lambda: None), JobClass.NOW)
    (late,) = mover.drain()
    assert isinstance(late.error, MoverClosed)


def test_close_waits_for_stuck_threads_once_and_not_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_module, "_JOIN_S", 0.1)
    mover, gate = Mover(1, disk_threads=8), threading.Event()
    for _ in range(8):
        mover.submit(job(lambda: gate.wait(WAIT_S), Link.DISK_READ), JobClass.NOW)
    time.sleep(0.05)
    start_s = time.monotonic()
    mover.close()
    assert time.monotonic() - start_s < 0.5
    gate.set()
    mover.close()


@pytest.mark.parametrize("link", [Link.DEVICE_TO_DEVICE, Link.DISK_READ, Link.DISK_WRITE])
def test_a_dead_thread_fails_all_waiters_and_later_ones(link: Link) -> None:
    mover, gate = Mover(1, disk_threads=1), threading.Event()

    def die() -> None:
        gate.wait(WAIT_S)
        raise SystemExit("killed by the test")

    mover.submit(job(die, link), JobClass.NOW)
    for other in JobClass:
        mover.submit(job(lambda: gate.wait(WAIT_S), link), other)
    waiter = awaited(lambda: gate.wait(WAIT_S), link)
    mover.submit(waiter, JobClass.PREFETCH)
    gate.set()
    done = drain(mover, 5)
    assert mover.wait_for([waiter], WAIT_S)
    assert waiter.completion is not None
    assert isinstance(waiter.completion.error, MoverClosed)
    assert len(done) == 5
    failed = [item.error for item in done if item.error is not None]
    assert failed
    assert all(isinstance(error, MoverClosed) and "SystemExit: killed by the test" in str(error) for error in failed)
    assert mover.dead is not None
    mover.submit(job(lambda: None), JobClass.NOW)
    (late,) = drain(mover, 1)
    assert late.error is mover.dead
    mover.close()


def test_wake_is_called_after_each_completion() -> None:
    woken = threading.Semaphore(0)
    mover = Mover(1, wake=woken.release)
    mover.submit(job(lambda: None), JobClass.NOW)
    assert woken.acquire(timeout=WAIT_S)
    assert len(mover.drain()) == 1
    mover.close()


def test_wait_ends_when_nothing_can_come(mover: Mover) -> None:
    start_s = time.monotonic()
    assert not mover.wait(WAIT_S)
    assert time.monotonic() - start_s < 1


def test_no_workers_is_refused() -> None:
    for threads, disk_threads in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one"):
            Mover(threads, disk_threads=disk_threads)


def test_in_a_class_the_earliest_deadline_comes_first() -> None:
    mover, gate = Mover(1), threading.Event()
    ran: list[str] = []
    mover.submit(job(lambda: gate.wait(WAIT_S)), JobClass.NOW)
    for name, klass, deadline_s in (
        ("without", JobClass.NOW, float("inf")),
        ("late", JobClass.NOW, 9.0),
        ("early", JobClass.NOW, 3.0),
        ("next", JobClass.NEXT, 1.0),
        ("as early, later", JobClass.NOW, 3.0),
    ):
        mover.submit(job(lambda name=name: ran.append(name)), klass, deadline_s)  # type: ignore[misc]
    gate.set()
    drain(mover, 6)
    mover.close()
    assert ran == ["early", "as early, later", "late", "without", "next"]


@pytest.mark.parametrize("slow", LinkGroup)
def test_a_slow_link_holds_up_no_other(slow: LinkGroup) -> None:
    mover, gate = Mover(1, disk_threads=1), threading.Event()
    for link in Link:
        if link.group is slow:
            mover.submit(job(lambda: gate.wait(WAIT_S), link), JobClass.NOW)
    others = [link for link in Link if link.group is not slow]
    for link in others:
        mover.submit(job(lambda: "through", link), JobClass.PREFETCH)
    assert [done.result for done in drain(mover, len(others))] == ["through"] * len(others)
    gate.set()
    mover.close()


def test_the_disk_is_read_by_as_many_threads_as_asked_for() -> None:
    mover, together = Mover(1, disk_threads=5), threading.Barrier(5)
    for _ in range(5):
        mover.submit(job(lambda: together.wait(WAIT_S), Link.DISK_READ), JobClass.NOW)
    assert all(done.error is None for done in drain(mover, 5))
    mover.close()


def test_a_cancelled_job_does_not_run() -> None:
    mover, gate, ran = Mover(1), threading.Event(), []
    running = job(lambda: gate.wait(WAIT_S))
    mover.submit(running, JobClass.NOW)
    jobs = [job(lambda number=number: ran.append(number)) for number in range(6)]  # type: ignore[misc]
    for item in jobs:
        mover.submit(item, JobClass.NEXT)
    while mover.statistics()[Link.HOST_TO_DEVICE].waited_s == 0:
        time.sleep(0.001)  # until the first one runs
    assert mover.cancel(jobs[0])
    assert mover.cancel(jobs[3])
    assert not mover.cancel(jobs[3])
    assert not mover.cancel(running)
    cancelled = mover.drain()
    assert [done.job for done in cancelled] == [jobs[0], jobs[3]]
    assert all(isinstance(done.error, JobCancelled) for done in cancelled)
    gate.set()
    drain(mover, 5)
    mover.close()
    assert ran == [1, 2, 4, 5]
    assert not mover.cancel(jobs[1])
    stats = mover.statistics()[Link.HOST_TO_DEVICE]
    assert (stats.count, stats.errors, stats.cancelled, stats.queued) == (5, 0, 2, 0)


def test_awaited_jobs_end_beside_the_drain(mover: Mover) -> None:
    jobs = [awaited(lambda: "read"), awaited(lambda: 1 // 0), awaited(lambda: "copied", Link.DEVICE_TO_HOST)]
    for item in jobs:
        assert mover.submit(item, JobClass.NOW)
    assert mover.wait_for(jobs, WAIT_S)
    ends = [item.completion for item in jobs]
    assert [end and end.result for end in ends] == ["read", None, "copied"]
    assert isinstance(ends[1] and ends[1].error, ZeroDivisionError)
    assert mover.outstanding == 0
    assert mover.drain() == []
    assert mover.wait_for([], 0.0)


def test_waiting_for_a_job_has_an_end(mover: Mover) -> None:
    gate = threading.Event()
    slow = awaited(lambda: gate.wait(WAIT_S))
    mover.submit(slow, JobClass.NOW)
    assert not mover.wait_for([slow], 0.02)
    gate.set()
    assert mover.wait_for([slow], float("inf"))


def test_awaited_jobs_are_bounded_by_themselves() -> None:
    mover, gate = Mover(1, capacity=2), threading.Event()
    jobs = [awaited(lambda: gate.wait(WAIT_S)) for _ in range(3)]
    assert [mover.submit(item, JobClass.NOW) for item in jobs] == [True, True, False]
    assert mover.submit(job(lambda: None), JobClass.NOW)  # what is drained has its own bound
    gate.set()
    assert mover.wait_for(jobs[:2], WAIT_S)
    assert mover.submit(jobs[2], JobClass.NOW)
    mover.close()


def test_a_closed_mover_ends_awaited_jobs(mover: Mover) -> None:
    mover.close()
    late = awaited(lambda: None)
    assert mover.submit(late, JobClass.NOW)
    assert late.completion is not None
    assert isinstance(late.completion.error, MoverClosed)


def test_disturbance_ruins_the_destination_until_the_copy_has_come() -> None:
    seen: list[int] = []

    def copy(dest: np.ndarray, source: np.ndarray) -> None:
        seen.append(int(dest[0]))
        dest[:] = source

    dest = np.zeros(64, np.uint8)
    mover = Mover(1, copy=copy, before=Disturbance(3, max_delay_s=0.001))
    mover.submit(mover.copy_job(dest, np.full(64, 7, np.uint8), Link.HOST_TO_DEVICE, ignore), JobClass.NOW)
    mover.submit(job(lambda: None), JobClass.NOW)  # fills nothing
    drain(mover, 2)
    mover.close()
    assert seen == [POISON]
    assert dest.tolist() == [7] * 64


def test_a_hook_that_dies_is_a_thread_that_dies() -> None:
    def die(_job: Job) -> None:
        raise RuntimeError("the hook")

    mover = Mover(1, before=die)
    mover.submit(job(lambda: None), JobClass.NOW)
    (done,) = drain(mover, 1)
    assert done.error is mover.dead
    assert mover.statistics()[Link.HOST_TO_DEVICE].queued == 0
    mover.close()


def test_links_measure_the_wait_and_the_work() -> None:
    times = iter(range(100))
    mover = Mover(1, clock=lambda: float(next(times)))  # 1 s from one look at the clock to the next
    mover.submit(Job(lambda: None, Link.DISK_WRITE, 50, ignore), JobClass.WRITE_BEHIND)
    drain(mover, 1)
    mover.close()
    stats = mover.statistics()[Link.DISK_WRITE]
    assert (stats.waited_s, stats.busy_s, stats.active_s, stats.total_bytes) == (1.0, 1.0, 2.0, 50)


def test_standing_still_for_a_job_is_counted_for_its_link(mover: Mover) -> None:
    slow = awaited(lambda: time.sleep(0.05))
    mover.submit(slow, JobClass.NOW)
    assert mover.wait_for([slow], WAIT_S)
    waited = {link: stats.compute_wait_s for link, stats in mover.statistics().items()}
    assert waited.pop(Link.DISK_READ) > 0.02 and not any(waited.values())


@pytest.mark.parametrize(("klass", "counts"), [(JobClass.NEXT, True), (JobClass.PREFETCH, False)])
def test_idling_is_counted_for_what_is_needed_at_once(mover: Mover, klass: JobClass, counts: bool) -> None:
    gate = threading.Event()
    mover.submit(job(lambda: gate.wait(WAIT_S)), klass)
    with mover.idle():
        gate.set()
        drain(mover, 1)
    with mover.idle():
        pass
    assert (mover.statistics()[Link.HOST_TO_DEVICE].compute_wait_s > 0.0) is counts
