"""The ring through which records of weights pass that no memory holds: read just ahead of the pass that needs them.

Every pass needs the same pieces in the same order, so the ring reads on past its end: while the last pieces of one pass
are computed on, the first ones of the next are on their way. Each piece is checked when it has come: XXH3 takes a tenth
of the time that a fast drive takes to read it, on a thread that waits for the disk anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import xxhash

from tierd.tiers.errors import JobCancelled, WeightsLost
from tierd.tiers.links import Link
from tierd.tiers.mover import Job, JobClass, Mover
from tierd.tiers.store_io import ALIGN_BYTES, Bytes, huge_block
from tierd.tiers.weights_file import Span, WeightFile

PART_BYTES = 4 << 20  # read by one job, so that a page that is needed at once waits a few milliseconds for a thread
MAX_PARTS = 64  # of a slot
RETRY_S = 0.05  # until a read that failed is tried once more
CLOSE_WAIT_S = 30.0
_MEMORY = 0.1  # weight of the newest piece in the mean time between two
_MAX_PERIOD_S = 1.0  # a pause between two passes says nothing about the time between two pieces


class Piece(NamedTuple):
    """What a slot takes: ranges of the file, one behind the other, each with its digest (hex XXH3-128)."""

    name: str
    spans: tuple[Span, ...]
    digests: tuple[str, ...]

    @property
    def slot_bytes(self) -> int:
        """Memory that it takes."""
        return sum(span.blocks_bytes for span in self.spans)

    @property
    def places(self) -> list[int]:
        """Where in a slot the bytes of each range start."""
        starts, at = [], 0
        for span in self.spans:
            starts.append(at + span.lead)
            at += span.blocks_bytes
        return starts


class RingStats(NamedTuple):
    """What has passed through a ring."""

    pieces: int  # read and found right
    read_bytes: int  # of those
    waited_s: float  # that passes stood still for them
    retries: int
    lost: int  # pieces that could not be had


class _Slot:
    """Memory of one piece. `left` belongs to whoever holds the ring's lock, the rest to the step thread."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = huge_block(size_bytes)
        self.number = -1  # of the piece that is there or on its way
        self.jobs: list[Job] = []
        self.left = 0  # parts that have not been read

    @property
    def busy(self) -> bool:
        return any(job.completion is None for job in self.jobs)


class WeightRing:
    """Threading: the step thread alone calls it. Reads run as awaited jobs of the mover.

    Args:
        pieces: all that may be streamed.
        slots: how many of them are in memory.
        overlap: read ahead. Otherwise each piece is read when it is asked for.
        clock: of the deadlines.

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
    ) -> None:
        if slots < 1 or not pieces:
            raise ValueError(f"a ring of {slots} slots for {len(pieces)} pieces")
        self.pieces = tuple(pieces)
        self._file = file
        self._mover = mover
        self._ahead = slots if overlap else 1
        self._clock = clock
        self._lock = threading.Lock()
        self._slots = [_Slot(max(piece.slot_bytes for piece in pieces)) for _ in range(slots)]
        self._order = list(range(len(pieces)))  # of the pass that runs
        self._taken_s = clock()
        self._period_s = 0.0
        self._waited_s = 0.0
        self._pieces = self._read_bytes = self._retries = self._lost = 0
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
        with self._lock:
            return RingStats(self._pieces, self._read_bytes, self._waited_s, self._retries, self._lost)

    def begin(self, order: Sequence[int]) -> None:
        """A pass begins that takes these pieces, and so will those after it. Slots keep what they hold of them."""
        self._order = list(order)

    def take(self, number: int, deadline_s: float) -> int:
        """The slot where this piece lies, until the next call. Reads of those that follow are on their way.

        Raises WeightsLost when it can't be read, is not what was imported, or has not come at `deadline_s`.
        """
        start_s = self._clock()
        held = self._holder(number)
        self.uses[number] += 1
        self.hits[number] += held is not None and not self._slots[held].busy
        self._period_s += _MEMORY * (min(start_s - self._taken_s, _MAX_PERIOD_S) - self._period_s)
        self._taken_s = start_s
        order, place = self._order, self._order.index(number)
        window = [order[(place + ahead) % len(order)] for ahead in range(min(self._ahead, len(order)))]
        for ahead, wanted in enumerate(window):
            self._read(wanted, window, start_s + ahead * self._period_s)
        slot = self._wait(number, window, deadline_s)
        self._waited_s += self._clock() - start_s
        return slot

    def close(self) -> bool:
        """Cancel the reads that wait, and wait for those that run; False when one is stuck and may still write."""
        jobs = [job for slot in self._slots for job in slot.jobs if job.completion is None]
        running = [job for job in jobs if not self._mover.cancel(job)]
        return self._mover.wait_for(running, CLOSE_WAIT_S)

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
        slot.number, slot.jobs = number, []
        parts = self._parts(slot, self.pieces[number])
        slot.left = len(parts)
        for first, stop, spans in parts:
            call = partial(self._read_part, slot, self.pieces[number], spans)
            # The deadline puts it behind pages that are needed now and before those that have more time.
            job = Job(call, Link.DISK_READ, stop - first, dest=slot.memory[first:stop], awaited=True)
            if not self._mover.submit(job, JobClass.NOW, due_s):
                self._abandon(slot)
                return False
            slot.jobs.append(job)
        return True

    def _abandon(self, slot: _Slot) -> None:
        """Its piece is of no use: the slot is free again when the last read that runs has ended."""
        slot.number = -1
        for job in slot.jobs:
            if job.completion is None:
                self._mover.cancel(job)

    def _wait(self, number: int, window: Sequence[int], deadline_s: float) -> int:
        """Wait for a piece. A pass that was given up may have left slots full of reads for another place."""
        name = self.pieces[number].name
        while (place := self._holder(number)) is None:
            stale = [slot for slot in self._slots if slot.number not in window]
            for slot in stale:
                self._abandon(slot)
            busy = next((slot for slot in stale if slot.busy), None)
            if busy is not None and not self._mover.wait_for(busy.jobs, deadline_s - self._clock()):
                raise self._losing(name, "the disk does not answer")
            if not self._read(number, window, self._clock()) and busy is None:
                raise self._losing(name, "the queue of the disk is full")
        slot = self._slots[place]
        if not self._mover.wait_for(slot.jobs, max(0.0, deadline_s - self._clock())):
            self._abandon(slot)
            raise self._losing(name, "it has not come in time")
        errors = [job.completion.error for job in slot.jobs if job.completion is not None and job.completion.error]
        if errors:
            slot.number, slot.jobs = -1, []
            error = next((error for error in errors if not isinstance(error, JobCancelled)), errors[0])
            raise error if isinstance(error, WeightsLost) else self._losing(name, str(error))
        return place

    def _losing(self, name: str, detail: str) -> WeightsLost:
        with self._lock:
            self._lost += 1
        return WeightsLost(name, detail)

    def _parts(self, slot: _Slot, piece: Piece) -> list[tuple[int, int, list[tuple[int, Bytes]]]]:
        """(first byte of the slot, byte after the last, what to read there) of each job."""
        size = max(PART_BYTES, -(-piece.slot_bytes // MAX_PARTS // ALIGN_BYTES) * ALIGN_BYTES)
        parts: list[tuple[int, int, list[tuple[int, Bytes]]]] = []
        at = 0
        for span in piece.spans:
            for start in range(0, span.blocks_bytes, size):
                count = min(size, span.blocks_bytes - start)
                read = (span.blocks_offset + start, slot.memory[at : at + count])
                if parts and parts[-1][1] - parts[-1][0] + count <= size:
                    parts[-1] = (parts[-1][0], at + count, [*parts[-1][2], read])
                else:
                    parts.append((at, at + count, [read]))
                at += count
        return parts

    # -- on the threads of the mover -------------------------------------------------------------------------------

    def _read_part(self, slot: _Slot, piece: Piece, spans: list[tuple[int, Bytes]]) -> None:
        self._read_twice(piece.name, spans)
        with self._lock:
            slot.left -= 1
            if slot.left:
                return
        if not _is_right(slot, piece):
            # The bytes may have been hurt on their way: whatever lies on the disk is read once more.
            self._count_retry()
            at, again = 0, []
            for span in piece.spans:
                again.append((span.blocks_offset, slot.memory[at : at + span.blocks_bytes]))
                at += span.blocks_bytes
            self._read_twice(piece.name, again)
            if not _is_right(slot, piece):
                raise self._losing(piece.name, "the bytes on the disk are not those of the import")
        with self._lock:
            self._pieces += 1
            self._read_bytes += piece.slot_bytes

    def _read_twice(self, name: str, spans: list[tuple[int, Bytes]]) -> None:
        try:
            self._file.read(spans)
        except OSError:
            self._count_retry()
            time.sleep(RETRY_S)
            try:
                self._file.read(spans)
            except OSError as exc:
                raise self._losing(name, f"reading failed twice: {exc.strerror or exc}") from exc

    def _count_retry(self) -> None:
        with self._lock:
            self._retries += 1


def _is_right(slot: _Slot, piece: Piece) -> bool:
    for span, place, digest in zip(piece.spans, piece.places, piece.digests, strict=True):
        if xxhash.xxh3_128_hexdigest(slot.memory[place : place + span.num_bytes].data) != digest:
            return False
    return True
