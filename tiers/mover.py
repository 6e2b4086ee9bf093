"""The only place where bytes cross tiers: one arbiter for each group of links, each with threads of its own.

Copies in memory, reads of the disk and writes to it wait in three queues, so that a slow disk holds up no copy. What a
job moves, pages or anything else, the arbiter does not know: it sees a link, a class and a deadline.

The threads decide nothing. They run jobs in order and leave completions for the one thread that submits and drains. An
error of a job travels in its completion.
"""

from __future__ import annotations

import enum
import heapq
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from tierd.tiers.arena import POISON
from tierd.tiers.blocks import host_array
from tierd.tiers.copies import Crossing, copy_on_host, fill_on_host
from tierd.tiers.errors import JobCancelled, MoverClosed
from tierd.tiers.gpu import HostRow, Row
from tierd.tiers.links import Link, LinkGroup, LinkMeter, LinkStats, held_up

T = TypeVar("T")

# Readers of the disk. Measured on a virtual NVMe drive, O_DIRECT: reads of 720 KiB gain nothing beyond 4 (2.2 GB/s);
# reads of 96 KiB reach 0.8 GB/s with 4 threads, 1.0 with 8, 1.2 with 16 or 32.
DISK_THREADS = 8
_JOIN_S = 30.0  # for all threads together: a stuck disk, on which each of its readers hangs, must not hold the process


class JobClass(enum.IntEnum):
    """Order of work on a link: a class is served only when the ones before it are empty."""

    NOW = 0  # a sequence waits for it
    NEXT = 1  # the next step needs it: room on the device
    PREFETCH = 2
    WRITE_BEHIND = 3  # everything that changes the store; one thread serves the disk's writes, so they keep their order


def _nobody(_done: Completion) -> None:
    """For jobs that are awaited."""


@dataclass(slots=True, eq=False)
class Job:
    """One movement of bytes.

    Attributes:
        call: does it; runs on a thread of the mover and may raise. It is let go of then, with what it holds.
        link: where it is counted, and whose threads run it.
        num_bytes: what it moves.
        on_done: for the submitter, to call with the completion when it drains it. The mover itself never calls it.
        dest: the memory it fills, for `Disturbance`.
        awaited: its submitter takes the end of it from `completion` after `wait_for`; it is never drained.
        completion: how it ended; None before. Set under the mover's lock, once.
        urgent: whether it was submitted for now or for the next step.
    """

    call: Callable[[], object]
    link: Link
    num_bytes: int
    on_done: Callable[[Completion], None] = _nobody
    dest: Row | None = None
    awaited: bool = False
    completion: Completion | None = field(default=None, init=False)
    urgent: bool = field(default=False, init=False)


@dataclass(slots=True, eq=False)
class Completion:
    """The end of a job. `error` is None if it did what it should. Nobody changes it."""

    job: Job
    error: Exception | None
    result: object = None


class _Entry(NamedTuple):
    """A queued job; entries sort in the order of service."""

    klass: JobClass
    deadline_s: float
    number: int  # unique, so that jobs themselves are never compared
    job: Job
    queued_s: float


class _Lane:
    """The queue of one group of links. Everything in it happens under the mover's lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self.ready = threading.Condition(lock)
        self.entries: list[_Entry] = []  # a heap

    def push(self, entry: _Entry) -> None:
        heapq.heappush(self.entries, entry)
        self.ready.notify()

    def pop(self) -> _Entry:
        return heapq.heappop(self.entries)

    def remove(self, job: Job) -> _Entry | None:
        """Takes a job out of the middle; None if it is not here. Linear: the queues hold a few hundred jobs."""
        for place, entry in enumerate(self.entries):
            if entry.job is job:
                self.entries[place] = self.entries[-1]
                self.entries.pop()
                heapq.heapify(self.entries)
                return entry
        return None


class Disturbance:
    """A test mode: every job starts late, and the memory that it fills holds 0xAA until it does.

    Whoever reads a destination before the completion, or lets go of a source too early, then sees wrong bytes at once.
    """

    def __init__(self, seed: int, max_delay_s: float = 0.002, fill: Callable[[Row, int], None] = fill_on_host) -> None:
        self._random = random.Random(seed)
        self._max_delay_s, self._fill = max_delay_s, fill
        self._lock = threading.Lock()

    def __call__(self, job: Job) -> None:
        """Called by the mover's thread before the job."""
        if job.dest is not None:
            self._fill(job.dest, POISON)
        with self._lock:
            delay_s = self._random.random() * self._max_delay_s
        time.sleep(delay_s)


class Mover:
    """Runs jobs: `threads` workers for copies, `disk_threads` for disk reads, one for everything that writes the disk.

    Each group of links has one queue: by class, in a class the earliest deadline first, then in the order of
    submission. A deadline is only an order: a job that is late runs all the same, unless its submitter cancels it.

    Threading: `submit`, `cancel`, `drain`, `wait`, `wait_for` and `close` belong to one thread. Completions can't pile
    up: no more than `capacity` jobs are submitted and not yet drained, and no more than that are awaited.

    When a thread dies of something that is not an error of a job, every job that has not run completes with
    `MoverClosed`, the jobs of all later submissions too, and `dead` says why.

    Args:
        threads: workers for copies, at least 1.
        disk_threads: workers for disk reads, at least 1: the depth at which the disk is read.
        capacity: jobs between `submit` and `drain`.
        wake: called by a mover thread after each completion (to end a wait of the submitter's own).
        copy: moves the bytes of a row; tests put faults here.
        crossing: for rows in memory of a card, which the store can't read or fill itself.
        before: called by a mover thread before each job: see `Disturbance`.
        clock: seconds, for the figures of the links.
    """

    def __init__(
        self,
        threads: int = 2,
        *,
        disk_threads: int = DISK_THREADS,
        capacity: int = 1024,
        wake: Callable[[], None] | None = None,
        copy: Callable[[Row, Row], None] = copy_on_host,
        crossing: Crossing | None = None,
        before: Callable[[Job], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if threads < 1 or disk_threads < 1:
            raise ValueError(f"a mover needs at least one worker of a kind, got {threads} and {disk_threads}")
        self._capacity = capacity
        self._wake = wake
        self._copy = copy
        self._crossing = crossing
        self._before = before
        self._clock = clock
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._lanes = {group: _Lane(self._lock) for group in LinkGroup}
        self._done: deque[Completion] = deque()
        self._submitted = self._outstanding = self._awaited = 0
        self._pending: set[Job] = set()  # what `wait_for` waits for
        self._closing = False
        self._dead: MoverClosed | None = None
        self._meters = {link: LinkMeter() for link in Link}
        counts = {LinkGroup.COPIES: threads, LinkGroup.DISK_READS: disk_threads, LinkGroup.DISK_WRITES: 1}
        self._threads = self._start(counts)

    def __repr__(self) -> str:
        return f"<Mover: {self._outstanding} outstanding, {'dead' if self._dead else 'alive'}>"

    @property
    def dead(self) -> MoverClosed | None:
        """Why nothing runs any more; None while all threads live."""
        return self._dead

    @property
    def outstanding(self) -> int:
        """Jobs submitted and not yet drained; awaited ones are not counted."""
        return self._outstanding

    def copy_job(self, dest: Row, source: Row, link: Link, on_done: Callable[[Completion], None]) -> Job:
        """A job that copies one record. The copy releases the GIL."""
        return Job(lambda: self._copy(dest, source), link, dest.nbytes, on_done, dest)

    def copy_now(self, dest: Row, source: Row) -> None:
        """Copies a record on the calling thread, of slots that no job uses."""
        self._copy(dest, source)

    def fill(self, rows: Sequence[Row], read: Callable[[slice, Sequence[HostRow]], Sequence[T]]) -> list[T]:
        """For the call of a job: has `read` fill rows, wherever they lie.

        `read(which, arrays)` fills the arrays, which stand for these rows, and says how each of them went; it may be
        called several times. Returns all that it said, in order.
        """
        if self._crossing is None:
            return list(read(slice(0, len(rows)), [host_array(row) for row in rows]))
        return self._crossing.fill(rows, read)

    def lend(self, rows: Sequence[Row], write: Callable[[Sequence[HostRow]], None]) -> None:
        """For the call of a job: calls `write` with the bytes of rows, wherever they lie."""
        if self._crossing is None:
            write([host_array(row) for row in rows])
        else:
            self._crossing.lend(rows, write)

    def submit(self, job: Job, klass: JobClass, deadline_s: float = float("inf")) -> bool:
        """Queues a job; False if the queues are full: drain (or wait) first, then try again."""
        with self._lock:
            if (self._awaited if job.awaited else self._outstanding) >= self._capacity:
                return False
            if job.awaited:
                self._awaited += 1
            else:
                self._outstanding += 1
            job.completion, job.urgent = None, klass <= JobClass.NEXT
            self._meters[job.link].enqueue(urgent=job.urgent)
            if self._dead or self._closing:
                self._give_up(job, self._dead or MoverClosed("the mover is closed"))
                return True
            self._submitted += 1
            self._lanes[job.link.group].push(_Entry(klass, deadline_s, self._submitted, job, self._clock()))
        return True

    def cancel(self, job: Job) -> bool:
        """Takes a job back. True: it will not run, and completes with `JobCancelled`. False: it runs, or has ended."""
        with self._lock:
            if self._lanes[job.link.group].remove(job) is None:
                return False
            self._give_up(job, JobCancelled("the job was cancelled before it ran"))
        return True

    def drain(self) -> list[Completion]:
        """Everything that ended since the last call, each job exactly once."""
        if not self._done:  # a deque's truth is atomic; a completion that arrives now is found by the next call
            return []
        with self._lock:
            done = list(self._done)
            self._done.clear()
            self._outstanding -= len(done)
        return done

    def wait(self, timeout_s: float) -> bool:
        """Waits until there is something to drain; False if nothing came in time, or nothing can come."""
        with self._lock:
            if not self._done and self._outstanding:
                self._arrived.wait(timeout_s)
            return bool(self._done)

    def wait_for(self, jobs: Iterable[Job], timeout_s: float) -> bool:
        """Waits until all these awaited jobs have ended, one way or another; False if they have not in time.

        Whoever computes stands still meanwhile: that is counted for their links. One thread at a time."""
        with self._lock:
            assert not self._pending, "two wait at once: one of them would never be woken"
            self._pending = {job for job in jobs if job.completion is None}
            start_s, late = self._clock(), {job.link for job in self._pending}
            in_time = self._arrived.wait_for(lambda: not self._pending, min(timeout_s, threading.TIMEOUT_MAX))
            self._pending = set()
            for link in late:
                self._meters[link].hold_up(self._clock() - start_s)
            return in_time

    def wait_for_room(self, timeout_s: float) -> bool:
        """Waits until an awaited job can be submitted; False if none can in time. From the thread of `wait_for`."""
        with self._lock:
            return self._arrived.wait_for(lambda: self._awaited < self._capacity, min(timeout_s, threading.TIMEOUT_MAX))

    def idle(self) -> AbstractContextManager[None]:
        """While the submitter has nothing to compute: counted for each link that moves what is needed at once."""
        return held_up(self._meters.values(), self._lock, self._clock)

    def statistics(self) -> dict[Link, LinkStats]:
        """What each link has carried."""
        with self._lock:
            meters = {link: meter.snapshot() for link, meter in self._meters.items()}
        return {link: meter.statistics() for link, meter in meters.items()}

    def close(self) -> None:
        """Lets running jobs end, fails the queued ones with `MoverClosed`, joins the threads. Idempotent."""
        with self._lock:
            self._closing = True
            self._stop(self._dead or MoverClosed("the mover is closed"))
        until_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _start(self, counts: dict[LinkGroup, int]) -> list[threading.Thread]:
        names = {LinkGroup.COPIES: "tierd-mover", LinkGroup.DISK_READS: "tierd-reader"}
        started = [
            threading.Thread(target=self._serve, args=(self._lanes[group],), name=f"{name}-{number}", daemon=True)
            for group, name in names.items()
            for number in range(counts[group])
        ]
        writer = self._lanes[LinkGroup.DISK_WRITES]
        started.append(threading.Thread(target=self._serve, args=(writer,), name="tierd-writer", daemon=True))
        for thread in started:
            thread.start()
        return started

    def _finish(self, completion: Completion) -> None:
        # Called with the lock held.
        job = completion.job
        job.completion = completion
        self._meters[job.link].settle(urgent=job.urgent)
        if job.awaited:
            self._awaited -= 1
            self._pending.discard(job)
            if self._pending:
                return  # whoever waits is woken once, by the last of these jobs
        else:
            self._done.append(completion)
        self._arrived.notify_all()

    def _give_up(self, job: Job, error: JobCancelled | MoverClosed) -> None:
        # Called with the lock held, for a job that did not run.
        self._meters[job.link].abandon(cancelled=isinstance(error, JobCancelled))
        self._finish(Completion(job, error))

    def _stop(self, error: MoverClosed) -> None:
        # Called with the lock held.
        for lane in self._lanes.values():
            while lane.entries:
                self._give_up(lane.pop().job, error)
            lane.ready.notify_all()

    def _take(self, lane: _Lane) -> Job | None:
        # Called with the lock held.
        while not lane.entries:
            if self._closing or self._dead:
                return None
            lane.ready.wait()
        entry = lane.pop()
        now_s = self._clock()
        self._meters[entry.job.link].begin(now_s, now_s - entry.queued_s)
        return entry.job

    def _run(self, job: Job) -> None:
        if self._before is not None:
            self._before(job)
        start_s, result, error = self._clock(), None, None
        try:
            result = job.call()
        except Exception as caught:
            error = caught
        now_s = self._clock()
        job.call, job.dest = tuple, None  # its completion and it hold each other: memory would wait for the collector
        with self._lock:
            self._meters[job.link].end(now_s, job.num_bytes, now_s - start_s, failed=error is not None)
            self._finish(Completion(job, error, result))
        if self._wake is not None and not job.awaited:
            self._wake()

    def _serve(self, lane: _Lane) -> None:
        job: Job | None = None
        try:
            while True:
                with self._lock:
                    job = self._take(lane)
                if job is None:
                    return
                self._run(job)
        except BaseException as cause:  # the thread ends here: whoever waits must hear of it
            self._die(job, cause)

    def _die(self, running: Job | None, cause: BaseException) -> None:
        with self._lock:
            self._dead = MoverClosed(f"{threading.current_thread().name} died: {type(cause).__name__}: {cause}")
            if running is not None and running.completion is None:
                self._meters[running.link].end(self._clock(), running.num_bytes, 0.0, failed=True)
                self._finish(Completion(running, self._dead))
            self._stop(self._dead)
        if self._wake is not None:
            self._wake()
