"""The ring through which records of weights pass that no memory holds: read just ahead of the pass that needs them.

Every pass needs the same pieces in the same order, so the ring reads on past its end: while the last pieces of one pass
are computed on, the first ones of the next are on their way. Each piece is checked when it has come: XXH3 takes a tenth
of the time that a fast drive takes to read it, on a thread that waits for the disk anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tierd.tiers.mover import Job, JobClass, Mover
from tierd.tiers.store_io import Bytes, huge_block
from tierd.tiers.weights_file import WeightFile
from tierd.tiers.weights_read import CLOSE_WAIT_S, Piece, PieceReads, Slot

_MEMORY = 0.1  # weight of the newest piece in the mean time between two
_MAX_PERIOD_S = 1.0  # a pause between two passes says nothing about the time between two pieces


class RingStats(NamedTuple):
    """What has passed through a ring."""

    pieces: int  # read and found right
    read_bytes: int  # of those
    waited_s: float  # that passes stood still for them
    retries: int
    lost: int  # pieces that could not be had


class Pace:
    """How long a pass computes between two pieces, lately: that is how much later the ones after them are needed."""

    def __init__(self, now_s: float) -> None:
        self._taken_s = now_s
        self._period_s = 0.0

    def tick(self, now_s: float) -> None:
        """A piece is needed."""
        self._period_s += _MEMORY * (min(now_s - self._taken_s, _MAX_PERIOD_S) - self._period_s)
        self._taken_s = now_s

    def due_s(self, ahead: int) -> float:
        """When the one that comes so many pieces later is needed."""
        return self._taken_s + ahead * self._period_s


class WeightRing:
    """Threading: the step thread alone calls it. Reads run as awaited jobs of the mover.

    Args:
        pieces: all that may be streamed.
        slots: how many of them are in memory.
        overlap: read ahead. Otherwise each piece is read when it is asked for.
        clock: of the deadlines.
        allocate: gives the memory of a slot.

    The bytes of piece n lie in `memory(slot)` at `pieces[n].places`.
    """

    def __init__(
        self,
        file: WeightFile,
        mover: Mover,
        pieces: Sequence[Piece],
        slots: int,
        *,
        overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
        allocate: Callable[[int], Bytes] = huge_block,
    ) -> None:
        if slots < 1 or not pieces:
            raise ValueError(f"a ring of {slots} slots for {len(pieces)} pieces")
        self.pieces = tuple(pieces)
        self._reads = PieceReads(file, mover, clock)
        self._ahead = slots if overlap else 1
        self._clock = clock
        self._slots = [Slot(allocate(max(piece.slot_bytes for piece in pieces))) for _ in range(slots)]
        self._order = list(range(len(pieces)))  # of the pass that runs
        self._pace = Pace(clock())
        self._waited_s = 0.0
        self.uses = [0] * len(self.pieces)  # how often each piece was needed
        self.hits = [0] * len(self.pieces)  # and how often it was there then

    def __repr__(self) -> str:
        return f"<WeightRing: {len(self.pieces)} pieces through {len(self._slots)} slots>"

    @property
    def ring_bytes(self) -> int:
        """Memory held."""
        return sum(slot.memory.nbytes for slot in self._slots)

    def memory(self, slot: int) -> Bytes:
        """The bytes of a slot."""
        return self._slots[slot].memory

    def statistics(self) -> RingStats:
        """Counters since the start."""
        reads = self._reads.statistics()
        return RingStats(reads.pieces, reads.read_bytes, self._waited_s, reads.retries, reads.lost)

    def begin(self, order: Sequence[int]) -> None:
        """A pass begins that takes these pieces, and so will those after it. Slots keep what they hold of them."""
        self._order = list(order)

    def take(self, number: int, deadline_s: float) -> int:
        """The slot where this piece lies, until the next call. Reads of those that follow are on their way.

        Raises WeightsLost when it can't be read, is not what was imported, or has not come at `deadline_s`.
        """
        start_s = self._clock()
        for failed in [slot for slot in self._slots if slot.has_failed]:
            self._reads.abandon(failed)  # read ahead, perhaps while the disk had a fault that is over
        held = self._holder(number)
        self.uses[number] += 1
        self.hits[number] += held is not None and not self._slots[held].busy
        self._pace.tick(start_s)
        window = self._read_on(self._order.index(number))
        slot = self._wait(number, window, deadline_s)
        self._waited_s += self._clock() - start_s
        return slot

    def end(self) -> None:
        """The pass that took the last piece is over: its slot is free, for what the next one needs."""
        if self._ahead > 1:
            self._read_on(0)

    def has(self, number: int) -> bool:
        """Whether a piece is there, so that `take` would not wait."""
        held = self._holder(number)
        return held is not None and self._slots[held].is_full

    def lend(self, slot: int, job: Job) -> None:
        """A job of the mover's reads a slot: nothing is read into it until that has ended."""
        self._slots[slot].jobs.append(job)

    def close(self, wait_s: float = CLOSE_WAIT_S) -> bool:
        """Cancel the reads that wait, and wait for those that run; False when one is stuck and may still write."""
        return self._reads.close(self._slots, wait_s)

    def _read_on(self, place: int) -> list[int]:
        """Have the pieces from a place in the order on their way, as many as there are slots for; which these are."""
        order = self._order
        window = [order[(place + ahead) % len(order)] for ahead in range(min(self._ahead, len(order)))]
        for ahead, wanted in enumerate(window):
            self._read(wanted, window, self._pace.due_s(ahead))
        return window

    def _holder(self, number: int) -> int | None:
        return next((place for place, slot in enumerate(self._slots) if slot.number == number), None)

    def _read(self, number: int, window: Sequence[int], due_s: float) -> bool:
        """Have a piece on its way, if a slot is free for it."""
        if self._holder(number) is not None:
            return True
        free = [slot for slot in self._slots if slot.number not in window and not slot.busy]
        if not free:
            return False
        slot = min(free, key=lambda slot: slot.number >= 0)  # an empty one, while there is one
        # The deadline puts it behind pages that are needed now and before those that have more time.
        return self._reads.start(slot, number, self.pieces[number], JobClass.NOW, due_s)

    def _wait(self, number: int, window: Sequence[int], deadline_s: float) -> int:
        """Wait for a piece. A pass that was given up may have left slots full of reads for another place."""
        piece = self.pieces[number]
        while (place := self._holder(number)) is None:
            stale = [slot for slot in self._slots if slot.number not in window]
            for slot in stale:
                self._reads.abandon(slot)
            busy = next((slot for slot in stale if slot.busy), None)
            if busy is not None and not self._reads.wait_until_free(busy, deadline_s):
                raise self._reads.losing(piece.name, "the disk does not answer")
            if not self._read(number, window, self._clock()) and busy is None:
                raise self._reads.losing(piece.name, "the queue of the disk is full")
        self._reads.wait(self._slots[place], piece, deadline_s)
        return place
