"""Pieces of weights from the disk into slots of memory: read in parts by the mover, checked, and read once more if need
be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import xxhash

from tierd.tiers.errors import JobCancelled, WeightsLost
from tierd.tiers.links import Link
from tierd.tiers.mover import Job, JobClass, Mover
from tierd.tiers.store_io import ALIGN_BYTES, Bytes
from tierd.tiers.weights_file import Span, WeightFile

PART_BYTES = 4 << 20  # read by one job, so that a page that is needed at once waits a few milliseconds for a thread
MAX_PARTS = 64  # of a slot
RETRY_S = 0.05  # until a read that failed is tried once more
CLOSE_WAIT_S = 30.0


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


class ReadStats(NamedTuple):
    """What has been read."""

    pieces: int  # read and found right
    read_bytes: int  # of those
    retries: int
    lost: int  # pieces that could not be had


class Slot:
    """Memory of one piece. `left` belongs to whoever holds the reads' lock, the rest to the step thread."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory  # whole blocks, aligned
        self.number = -1  # of the piece that is there or on its way
        self.jobs: list[Job] = []
        self.left = 0  # parts that have not been read

    @property
    def busy(self) -> bool:
        """Whether reads into it wait or run."""
        return any(job.completion is None for job in self.jobs)

    @property
    def has_failed(self) -> bool:
        """Whether its piece could not be read."""
        return not self.busy and any(job.completion is not None and job.completion.error for job in self.jobs)

    @property
    def is_full(self) -> bool:
        """Whether a piece is there, and right."""
        return self.number >= 0 and not self.busy and not self.has_failed


class PieceReads:
    """Threading: the step thread alone calls it. Reads run as awaited jobs of the mover, on its threads.

    Args:
        clock: of the deadlines.
    """

    def __init__(self, file: WeightFile, mover: Mover, clock: Callable[[], float]) -> None:
        self._file = file
        self._mover = mover
        self._clock = clock
        self._lock = threading.Lock()
        self._pieces = self._read_bytes = self._retries = self._lost = 0

    def statistics(self) -> ReadStats:
        """Counters since the start."""
        with self._lock:
            return ReadStats(self._pieces, self._read_bytes, self._retries, self._lost)

    def start(self, slot: Slot, number: int, piece: Piece, klass: JobClass, due_s: float) -> bool:
        """Have a piece on its way into a slot that is not busy. False, and it is empty, when the queue is full."""
        slot.number, slot.jobs = number, []
        parts = _parts(slot, piece)
        slot.left = len(parts)
        for first, stop, spans in parts:
            call = partial(self._read_part, slot, piece, spans)
            job = Job(call, Link.DISK_READ, stop - first, dest=slot.memory[first:stop], awaited=True)
            if not self._mover.submit(job, klass, due_s):
                self.abandon(slot)
                return False
            slot.jobs.append(job)
        return True

    def hasten(self, slot: Slot, klass: JobClass, due_s: float) -> bool:
        """Have the reads into a slot that wait before others. False, and it is empty, when the queue is full."""
        for job in slot.jobs:
            if job.completion is None and self._mover.cancel(job) and not self._mover.submit(job, klass, due_s):
                self.abandon(slot)
                return False
        return True

    def abandon(self, slot: Slot) -> None:
        """Its piece is of no use: the slot is free again when the last read that runs has ended."""
        slot.number = -1
        slot.jobs = [job for job in slot.jobs if job.completion is None and not self._mover.cancel(job)]

    def wait(self, slot: Slot, piece: Piece, deadline_s: float) -> None:
        """Returns when a slot's piece is there and right. Raises WeightsLost when it can't be had, or not in time."""
        if not self._mover.wait_for(slot.jobs, max(0.0, deadline_s - self._clock())):
            self.abandon(slot)
            raise self.losing(piece.name, "it has not come in time")
        errors = [job.completion.error for job in slot.jobs if job.completion is not None and job.completion.error]
        if errors:
            slot.number, slot.jobs = -1, []
            error = next((error for error in errors if not isinstance(error, JobCancelled)), errors[0])
            raise error if isinstance(error, WeightsLost) else self.losing(piece.name, str(error))

    def wait_until_free(self, slot: Slot, deadline_s: float) -> bool:
        """Whether no read goes into an abandoned slot any more, in time."""
        return self._mover.wait_for(slot.jobs, deadline_s - self._clock())

    def losing(self, name: str, detail: str) -> WeightsLost:
        """The error for a piece that can't be had, counted."""
        with self._lock:
            self._lost += 1
        return WeightsLost(name, detail)

    def close(self, slots: list[Slot], wait_s: float = CLOSE_WAIT_S) -> bool:
        """Cancel the reads that wait, and wait for those that run; False when one is stuck and may still write."""
        jobs = [job for slot in slots for job in slot.jobs if job.completion is None]
        running = [job for job in jobs if not self._mover.cancel(job)]
        return self._mover.wait_for(running, wait_s)

    # -- on the threads of the mover -------------------------------------------------------------------------------

    def _read_part(self, slot: Slot, piece: Piece, spans: list[tuple[int, Bytes]]) -> None:
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
                raise self.losing(piece.name, "the bytes on the disk are not those of the import")
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
                raise self.losing(name, f"reading failed twice: {exc.strerror or exc}") from exc

    def _count_retry(self) -> None:
        with self._lock:
            self._retries += 1


def _parts(slot: Slot, piece: Piece) -> list[tuple[int, int, list[tuple[int, Bytes]]]]:
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


def _is_right(slot: Slot, piece: Piece) -> bool:
    for span, place, digest in zip(piece.spans, piece.places, piece.digests, strict=True):
        if xxhash.xxh3_128_hexdigest(slot.memory[place : place + span.num_bytes].data) != digest:
            return False
    return True
