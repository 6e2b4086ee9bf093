"""Who fills the places of a cache of experts; and the one that reads them from the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tierd.tiers.errors import WeightsLost
from tierd.tiers.mover import JobClass, Mover
from tierd.tiers.store_io import Bytes, huge_block
from tierd.tiers.weights_file import WeightFile
from tierd.tiers.weights_read import Piece, PieceReads, ReadStats, Slot


class Fetches(Protocol):
    """Experts and places by number. Threading: the step thread's.

    Attributes:
        source: what brings them, for people.
    """

    source: str

    def poll(self) -> None:
        """Takes note of what has come since the last call."""
        ...

    def start(self, place: int, expert: int, klass: JobClass) -> bool:
        """Have an expert on its way into a place that is not busy. False, and the place is empty, when a queue is
        full."""
        ...

    def hasten(self, place: int) -> bool:
        """What is on its way into a place is needed now. False, and the place is empty, when a queue is full."""
        ...

    def abandon(self, place: int) -> None:
        """What lies in a place, or is on its way, is of no use. It may be busy for a while."""
        ...

    def wait(self, place: int, deadline_s: float) -> None:
        """Returns when a place is full. Raises WeightsLost when its expert can't be had, or not in time."""
        ...

    def wait_until_free(self, place: int, deadline_s: float) -> bool:
        """Whether nothing is on its way into a place any more, in time."""
        ...

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether `start` can have an expert on its way, as far as queues go, in time."""
        ...

    def is_busy(self, place: int) -> bool:
        """Whether something is on its way into a place."""
        ...

    def is_full(self, place: int) -> bool:
        """Whether an expert is there, and right."""
        ...

    def losing(self, expert: int, detail: str) -> WeightsLost:
        """The error for an expert that can't be had, counted."""
        ...

    def statistics(self) -> ReadStats:
        """Counters since the start, of the disk."""
        ...

    def close(self) -> bool:
        """Take back what waits, and wait for what runs; False when something is stuck and may still write."""
        ...


class DiskFetches:
    """See `Fetches`: places are memory of their own. Reads run as awaited jobs of the mover.

    Args:
        pieces: all experts.
        places: how many.
        clock: of the deadlines.
    """

    source = "the disk"

    def __init__(
        self, file: WeightFile, mover: Mover, pieces: Sequence[Piece], places: int, clock: Callable[[], float]
    ) -> None:
        if places < 1 or not pieces:
            raise ValueError(f"{places} slots for {len(pieces)} experts")
        self.pieces = tuple(pieces)
        self._reads = PieceReads(file, mover, clock)
        self._mover, self._clock = mover, clock
        slot_bytes = max(piece.slot_bytes for piece in pieces)
        memory = huge_block(places * slot_bytes)
        self._slots = [Slot(memory[n * slot_bytes : (n + 1) * slot_bytes]) for n in range(places)]

    @property
    def memory_bytes(self) -> int:
        """Memory held."""
        return sum(slot.memory.nbytes for slot in self._slots)

    def memory(self, place: int) -> Bytes:
        """The bytes of a place."""
        return self._slots[place].memory

    def poll(self) -> None:
        """See `Fetches`: jobs say it themselves."""

    def start(self, place: int, expert: int, klass: JobClass) -> bool:
        """See `Fetches`."""
        return self._reads.start(self._slots[place], expert, self.pieces[expert], klass, self._clock())

    def hasten(self, place: int) -> bool:
        """See `Fetches`."""
        return self._reads.hasten(self._slots[place], JobClass.NOW, self._clock())

    def abandon(self, place: int) -> None:
        """See `Fetches`."""
        self._reads.abandon(self._slots[place])

    def wait(self, place: int, deadline_s: float) -> None:
        """See `Fetches`."""
        slot = self._slots[place]
        self._reads.wait(slot, self.pieces[slot.number], deadline_s)

    def wait_until_free(self, place: int, deadline_s: float) -> bool:
        """See `Fetches`."""
        return self._reads.wait_until_free(self._slots[place], deadline_s)

    def wait_for_room(self, timeout_s: float) -> bool:
        """See `Fetches`."""
        return self._mover.wait_for_room(timeout_s)

    def is_busy(self, place: int) -> bool:
        """See `Fetches`."""
        return self._slots[place].busy

    def is_full(self, place: int) -> bool:
        """See `Fetches`."""
        return self._slots[place].is_full

    def losing(self, expert: int, detail: str) -> WeightsLost:
        """See `Fetches`."""
        return self._reads.losing(self.pieces[expert].name, detail)

    def statistics(self) -> ReadStats:
        """See `Fetches`."""
        return self._reads.statistics()

    def close(self) -> bool:
        """See `Fetches`."""
        return self._reads.close(self._slots)
