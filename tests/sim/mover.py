"""The real mover's queues on the fake clock, without its threads.

A job runs when its time is over, not when it is submitted, and its destination holds poison meanwhile: whoever frees a
source or reads a destination too early gets wrong bytes. How long a job takes follows from its link's speed and from
chance, so jobs overtake each other; only those that change the store keep their order.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.sim.clock import Clock
from tierd.tiers.errors import MoverClosed
from tierd.tiers.links import Link, LinkGroup
from tierd.tiers.mover import Completion, Job, JobClass, Mover


@dataclass(slots=True, eq=False)
class _Flight:
    job: Job
    started_s: float
    ends_s: float


class SimMover(Mover):
    """`Mover`, single-threaded: whoever waits moves the clock on to the next end of a job.

    Args:
        speeds: bytes a second of each link.
        latency_s: of each link, on average; drawn anew for every job.
        width: copies that run at once, and disk reads; one job at a time changes the store.
    """

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        *,
        speeds: Mapping[Link, float],
        latency_s: Mapping[Link, float],
        width: int = 2,
        capacity: int = 1024,
    ) -> None:
        self._sim_clock = clock
        self._rng = rng
        self._speeds = speeds
        self._latency_s = latency_s
        self._flights: dict[LinkGroup, list[_Flight]] = {group: [] for group in LinkGroup}
        self.slowness = 1.0  # of the disk, now
        super().__init__(width, disk_threads=width, capacity=capacity, clock=clock)

    @property
    def next_s(self) -> float:
        """When the next job ends; infinity if none runs, now if there is something to drain."""
        if self._done:
            return self._sim_clock.now_s
        return min((flight.ends_s for flight in self._all_flights()), default=math.inf)

    @property
    def slowest_s(self) -> float:
        """How long the slowest of the running jobs takes, in all."""
        return max((flight.ends_s - flight.started_s for flight in self._all_flights()), default=0.0)

    def submit(self, job: Job, klass: JobClass, deadline_s: float = math.inf) -> bool:
        taken = super().submit(job, klass, deadline_s)
        self._take_off()
        return taken

    def advance(self) -> None:
        """Ends every job whose time is over, in the order of their times."""
        while True:
            over = [flight for flight in self._all_flights() if flight.ends_s <= self._sim_clock.now_s]
            if not over:
                return
            flight = min(over, key=lambda flight: flight.ends_s)
            job = flight.job
            self._flights[job.link.group].remove(flight)
            result, error = None, None
            try:
                result = job.call()
            except Exception as caught:
                error = caught
            with self._lock:
                seconds = flight.ends_s - flight.started_s
                self._meters[job.link].end(flight.ends_s, job.num_bytes, seconds, failed=error is not None)
                self._finish(Completion(job, error, result))
            self._take_off()

    def drain(self) -> list[Completion]:
        self.advance()
        return super().drain()

    def wait(self, timeout_s: float) -> bool:
        if not self._done:
            self._sim_clock.go_to(min(self.next_s, self._sim_clock.now_s + timeout_s))
            self.advance()
        return bool(self._done)

    def wait_for(self, jobs: Iterable[Job], timeout_s: float) -> bool:
        until_s = self._sim_clock.now_s + timeout_s
        pending = list(jobs)
        while pending := [job for job in pending if job.completion is None]:
            next_s = min((flight.ends_s for flight in self._all_flights()), default=math.inf)
            if next_s > until_s:
                self._sim_clock.go_to(until_s)
                return False
            self._sim_clock.go_to(next_s)
            self.advance()
        return True

    def die(self) -> None:
        """A thread of the mover died: nothing runs any more."""
        with self._lock:
            self._dead = MoverClosed("the simulated mover died")
            for flight in self._all_flights():
                self._meters[flight.job.link].end(self._sim_clock.now_s, 0, 0.0, failed=True)
                self._finish(Completion(flight.job, self._dead))
            for flights in self._flights.values():
                flights.clear()
            self._stop(self._dead)

    def close(self) -> None:
        super().close()
        self._sim_clock.go_to(max((flight.ends_s for flight in self._all_flights()), default=0.0))
        self.advance()

    def _start(self, counts: dict[LinkGroup, int]) -> list[threading.Thread]:
        self._counts = counts
        return []

    def _all_flights(self) -> list[_Flight]:
        return [flight for flights in self._flights.values() for flight in flights]

    def _take_off(self) -> None:
        """Starts what a thread would be free for."""
        now_s = self._sim_clock.now_s
        for group, lane in self._lanes.items():
            flights = self._flights[group]
            while lane.entries and len(flights) < self._counts[group]:
                entry = lane.pop()
                job = entry.job
                self._meters[job.link].begin(now_s, now_s - entry.queued_s)
                if job.dest is not None:
                    job.dest.fill(0xAA)
                seconds = job.num_bytes / self._speeds[job.link]
                seconds += self._rng.expovariate(1.0) * self._latency_s[job.link]
                if group is not LinkGroup.COPIES:
                    seconds *= self.slowness
                flights.append(_Flight(job, now_s, now_s + seconds))
