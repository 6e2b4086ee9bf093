"""The only place where bytes cross tiers: worker threads for copies and disk reads, one writer thread for the store.

The threads decide nothing. They take jobs in the order of their class, run them, and leave completions for the one
thread that submits and drains. An error of a job travels in its completion.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierd.tiers.errors import MoverClosed
from tierd.tiers.links import Link, LinkMeter, LinkStats

Row = npt.NDArray[np.uint8]  # [record_bytes]

_JOIN_S = 30.0  # a stuck disk must not hold the process for ever


class JobClass(enum.IntEnum):
    """Order of work: a class is served only when the ones before it are empty."""

    NOW = 0  # a sequence waits for it
    NEXT = 1  # the next step needs it: room on the device
    PREFETCH = 2
    WRITE_BEHIND = 3  # everything that changes the store: one thread, in the order of submission


@dataclass(slots=True, eq=False)
class Job:
    """One movement of bytes.

    Attributes:
        call: does it; runs on a thread of the mover and may raise.
        link: where it is counted.
        num_bytes: what it moves.
        on_done: for the submitter, to call with the completion when it drains it. The mover itself never calls it.
    """

    call: Callable[[], object]
    link: Link
    num_bytes: int
    on_done: Callable[[Completion], None]


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The end of a job. `error` is None if it did what it should."""

    job: Job
    error: Exception | None
    result: object = None


class Mover:
    """Runs jobs on `threads` workers (copies, disk reads) and one writer (the store).

    Threading: `submit`, `drain`, `close` belong to one thread. `wait` may be called by it, too. Completions can't pile
    up: no more than `capacity` jobs are submitted and not yet drained.

    When a thread dies of something that is not an error of a job, every job that has not run completes with
    `MoverClosed`, the jobs of all later submissions too, and `dead` says why.

    Args:
        threads: workers beside the writer, at least 1.
        capacity: jobs between `submit` and `drain`.
        wake: called by a mover thread after each completion (to end a wait of the submitter's own).
        copy: moves the bytes of a row; tests put delays and poison here.
    """

    def __init__(
        self,
        threads: int = 2,
        *,
        capacity: int = 1024,
        wake: Callable[[], None] | None = None,
        copy: Callable[[Row, Row], None] = np.copyto,
    ) -> None:
        if threads < 1:
            raise ValueError(f"a mover needs at least one worker, got {threads}")
        self._capacity = capacity
        self._wake = wake
        self._copy = copy
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # workers: NOW, NEXT, PREFETCH
        self._writing = threading.Condition(self._lock)  # the writer: WRITE_BEHIND
        self._arrived = threading.Condition(self._lock)
        self._queues: tuple[deque[Job], ...] = tuple(deque() for _ in JobClass)
        self._done: deque[Completion] = deque()
        self._outstanding = 0  # only the submitting thread changes it
        self._closing = False
        self._dead: MoverClosed | None = None
        self._meters = {link: LinkMeter() for link in Link}
        self._threads = self._start(threads)

    def __repr__(self) -> str:
        return f"<Mover: {self._outstanding} outstanding, {'dead' if self._dead else 'alive'}>"

    @property
    def dead(self) -> MoverClosed | None:
        """Why nothing runs any more; None while all threads live."""
        return self._dead

    @property
    def outstanding(self) -> int:
        """Jobs submitted and not yet drained."""
        return self._outstanding

    def copy_job(self, dest: Row, source: Row, link: Link, on_done: Callable[[Completion], None]) -> Job:
        """A job that copies one record. The copy releases the GIL."""
        return Job(lambda: self._copy(dest, source), link, dest.nbytes, on_done)

    def submit(self, job: Job, klass: JobClass) -> bool:
        """Queues a job; False if the queues are full: drain first, then try again."""
        if self._outstanding >= self._capacity:
            return False
        self._outstanding += 1
        self._meters[job.link].enqueue()
        with self._lock:
            if self._dead or self._closing:
                self._finish(Completion(job, self._dead or MoverClosed("the mover is closed")), 0.0)
                return True
            self._queues[klass].append(job)
            (self._writing if klass is JobClass.WRITE_BEHIND else self._work).notify()
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

    def statistics(self) -> dict[Link, LinkStats]:
        """What each link has carried."""
        return {link: meter.statistics() for link, meter in self._meters.items()}

    def close(self) -> None:
        """Lets running jobs end, fails the queued ones with `MoverClosed`, joins the threads. Idempotent."""
        with self._lock:
            self._closing = True
            self._fail_queued(self._dead or MoverClosed("the mover is closed"))
            self._work.notify_all()
            self._writing.notify_all()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _start(self, threads: int) -> list[threading.Thread]:
        workers = (self._work, (JobClass.NOW, JobClass.NEXT, JobClass.PREFETCH))
        writer = (self._writing, (JobClass.WRITE_BEHIND,))
        started = [
            threading.Thread(target=self._serve, args=workers, name=f"tierd-mover-{number}", daemon=True)
            for number in range(threads)
        ]
        started.append(threading.Thread(target=self._serve, args=writer, name="tierd-writer", daemon=True))
        for thread in started:
            thread.start()
        return started

    def _finish(self, completion: Completion, seconds: float) -> None:
        # Called with the lock held.
        failed = completion.error is not None
        self._meters[completion.job.link].record(completion.job.num_bytes, seconds, failed=failed)
        self._done.append(completion)
        self._arrived.notify_all()

    def _fail_queued(self, error: MoverClosed) -> None:
        for queue in self._queues:
            while queue:
                self._finish(Completion(queue.popleft(), error), 0.0)

    def _take(self, ready: threading.Condition, classes: tuple[JobClass, ...]) -> Job | None:
        with self._lock:
            while True:
                for klass in classes:
                    if self._queues[klass]:
                        return self._queues[klass].popleft()
                if self._closing or self._dead:
                    return None
                ready.wait()

    def _serve(self, ready: threading.Condition, classes: tuple[JobClass, ...]) -> None:
        job: Job | None = None
        try:
            while (job := self._take(ready, classes)) is not None:
                result, error = None, None
                start_s = time.perf_counter()
                try:
                    result = job.call()
                except Exception as caught:
                    error = caught
                seconds = time.perf_counter() - start_s
                with self._lock:
                    self._finish(Completion(job, error, result), seconds)
                job = None
                if self._wake is not None:
                    self._wake()
        except BaseException as cause:  # the thread ends here: whoever waits must hear of it
            self._die(job, cause)

    def _die(self, running: Job | None, cause: BaseException) -> None:
        with self._lock:
            self._dead = MoverClosed(f"{threading.current_thread().name} died: {type(cause).__name__}: {cause}")
            if running is not None:
                self._finish(Completion(running, self._dead), 0.0)
            self._fail_queued(self._dead)
            self._work.notify_all()
            self._writing.notify_all()
        if self._wake is not None:
            self._wake()
