"""Errands: long work on what is kept, done in slices between the steps of running streams.

An errand is advanced by the pager's thread, a slice at a time, and has the mover do what takes a disk's time. It can be
stopped at any slice, and stops by itself at its deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from tierd.tiers.links import Link
from tierd.tiers.mover import Completion, Job, JobClass

if TYPE_CHECKING:
    from tierd.tiers.pager import Pager

# Yields between two slices: whether the next one can be done at once. If not, something has to move first.
Slices = Generator[bool, None, None]


class Errand:
    """Not thread-safe: only the pager's thread calls it. Figures may be read from any thread.

    Subclasses say in `_slices` what is done. Nothing starts before the first `advance`.

    Args:
        deadline_s: of the pager's clock.
    """

    def __init__(self, pager: Pager, deadline_s: float) -> None:
        self.ended = False
        self.stopped = ""  # why it ended before its end; empty if it did not
        self.error: Exception | None = None  # what its slices raised, or its jobs
        self.waits = False  # there is nothing to do now: `advance` need not be called at once
        self._pager = pager
        self._deadline_s = deadline_s
        self._running = self._slices()
        self._job: Job | None = None  # under way
        self._done: Completion | None = None

    def advance(self) -> bool:
        """Do the next slice if it can be done; True when all is over. To be called until then."""
        self._go_on()
        if self._pager.clock() >= self._deadline_s:
            self.stop("its time was over")
        return self.ended

    def stop(self, reason: str) -> None:
        """End it here. A slice that the mover is at ends by itself; nobody hears of it."""
        if self.ended:
            return
        self.ended, self.stopped = True, reason
        self._running.close()
        if self._job is not None:
            self._pager.mover.cancel(self._job)

    def _slices(self) -> Slices:
        """The work."""
        raise NotImplementedError

    def _go_on(self) -> None:
        if self.ended:
            return
        try:
            self.waits = not next(self._running)
        except StopIteration:
            self.ended = True
        except Exception as exc:
            self.ended, self.error = True, exc

    def _by_mover(
        self, link: Link, call: Callable[[], Any], num_bytes: int = 0
    ) -> Generator[bool, None, Any]:
        """What a job returns that runs after everything else on its link. Raises what the job raised."""
        job = Job(call, link, num_bytes, self._arrived)
        while not self._pager.mover.submit(job, JobClass.WRITE_BEHIND):
            yield False
        self._job, self._done = job, None
        while (done := self._done) is None:
            yield False
        self._job = self._done = None
        if done.error is not None:
            raise done.error
        return done.result

    def _arrived(self, done: Completion) -> None:
        self._done = done
        self._go_on()  # at once: the disk need not wait for the next `advance`
