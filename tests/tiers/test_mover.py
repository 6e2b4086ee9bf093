from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tierd.tiers.errors import MoverClosed
from tierd.tiers.links import Link
from tierd.tiers.mover import Completion, Job, JobClass, Mover

WAIT_S = 5.0


@pytest.fixture
def mover() -> Iterator[Mover]:
    mover = Mover(2)
    yield mover
    mover.close()


def ignore(_done: Completion) -> None:
    return None


def job(call: Callable[[], object], num_bytes: int = 0) -> Job:
    return Job(call, Link.HOST_TO_DEVICE, num_bytes, ignore)


def drain(mover: Mover, count: int) -> list[Completion]:
    found: list[Completion] = []
    deadline_s = time.monotonic() + WAIT_S
    while len(found) < count and time.monotonic() < deadline_s:
        mover.wait(0.05)
        found += mover.drain()
    return found


def test_every_job_completes_once(mover: Mover) -> None:
    jobs = [job(lambda number=number: number) for number in range(200)]  # type: ignore[misc]
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
        mover.submit(job(call), JobClass.WRITE_BEHIND)
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


@pytest.mark.parametrize("klass", [JobClass.NOW, JobClass.WRITE_BEHIND])
def test_a_dead_thread_fails_all_waiters_and_later_ones(klass: JobClass) -> None:
    mover, gate = Mover(1), threading.Event()

    def die() -> None:
        gate.wait(WAIT_S)
        raise SystemExit("killed by the test")

    mover.submit(job(die), klass)
    for other in JobClass:
        mover.submit(job(lambda: gate.wait(WAIT_S)), other)
    gate.set()
    done = drain(mover, 5)
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
    with pytest.raises(ValueError, match="at least one"):
        Mover(0)
