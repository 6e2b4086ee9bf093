"""Experts into places on a card: each crosses the link as it lies in the file, into a stage, and is laid out from
there.

An expert lies in registered memory of the CPU, or comes there from the disk first. So it goes one or two ways, each of
which is a job of the mover; what follows on it is done when somebody asks: the step thread looks after every wait and
before every layer. Nothing is copied into a place itself. Its kernels are launched in the order of the compute stream,
behind all that read the expert before: so a place is free as soon as nobody wants what is on its way there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tierd.tiers.errors import WeightsLost
from tierd.tiers.mover import Job, JobClass, Mover
from tierd.tiers.store_io import Bytes
from tierd.tiers.weights_device import CLOSE_WAIT_S, DeviceSlot, Record, SlotCopies
from tierd.tiers.weights_file import WeightFile
from tierd.tiers.weights_read import Piece, PieceReads, ReadStats, Slot


class LayOut(Protocol):
    """Launches the kernels that lay an expert out."""

    def __call__(self, stage: int, expert: int, place: int) -> None: ...


def _nowhere(stage: int, expert: int, place: int) -> None:
    raise AssertionError(f"expert {expert} has come after the end")


class DiskBelow:
    """Experts that lie on the disk: `pieces` by number, and slots of registered memory that they are read into."""

    def __init__(
        self, file: WeightFile, mover: Mover, pieces: dict[int, Piece], memories: Sequence[Bytes],
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        if not memories or max(piece.slot_bytes for piece in pieces.values()) > min(one.nbytes for one in memories):
            raise ValueError(f"{len(memories)} slots for {len(pieces)} experts, or slots that are too small")
        self.pieces = pieces
        self.reads = PieceReads(file, mover, clock)
        self.slots = [Slot(memory) for memory in memories]


@dataclass(slots=True, eq=False)
class _Way:
    """An expert on its way into a place: it waits, is read, waits again, or is copied."""

    expert: int
    place: int
    klass: JobClass
    read: Slot | None = None
    stage: DeviceSlot | None = None


class CardFetches:
    """See `Fetches`. Threading: the step thread's, with the compute stream current where it launches.

    Args:
        records: all experts; those without memory are on the disk.
        copies: whose slots are the stages.
        places: how many.
        lay_out: see `LayOut`.
        disk: brings those that are there; None when none is.
        clock: of the deadlines.
    """

    source = "the link to the card"

    def __init__(
        self, records: Sequence[Record], copies: SlotCopies, mover: Mover, places: int, lay_out: LayOut,
        disk: DiskBelow | None, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        largest, stages = max(record.num_bytes for record in records), copies.slots
        if places < 1 or not stages or largest > min(stage.row.nbytes for stage in stages):
            raise ValueError(f"{places} places and {len(stages)} stages for experts, or stages that are too small")
        below = {number for number, record in enumerate(records) if record.memory is None}
        if below != (set() if disk is None else disk.pieces.keys()):
            raise ValueError(f"{len(below)} experts are on the disk, others are read from it")
        self.records = list(records)
        self._copies, self._mover, self._lay_out, self._disk, self._clock = copies, mover, lay_out, disk, clock
        self._full = [False] * places
        self._ways: dict[int, _Way] = {}  # by place, in the order in which they were begun
        self._errors: dict[int, WeightsLost] = {}  # of ways that ended in nothing, by place
        self._lost = 0

    @property
    def copied_bytes(self) -> int:
        """What crossed the link since the start."""
        return self._copies.copied_bytes

    def lies_at(self, expert: int, memory: Bytes) -> None:
        """An expert of the disk has come to registered memory of the CPU."""
        self.records[expert] = self.records[expert]._replace(memory=memory)

    # -- Fetches ---------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """See `Fetches`: lays out what has arrived, and has those that wait go on as far as there is room."""
        for way in list(self._ways.values()):
            self._note_end(way)
        for way in sorted(self._ways.values(), key=lambda one: one.klass):
            if way.stage is None and not self._go_on(way):
                return

    def start(self, place: int, expert: int, klass: JobClass) -> bool:
        """See `Fetches`; it waits where there is no room in a queue."""
        self._errors.pop(place, None)
        self._full[place] = False
        self._ways[place] = _Way(expert, place, klass)
        self.poll()
        return True

    def hasten(self, place: int) -> bool:
        """See `Fetches`."""
        way = self._ways.get(place)
        if way is None or way.klass is JobClass.NOW:
            return True
        way.klass, done = JobClass.NOW, True
        if way.stage is not None:
            done = self._copies.hasten(way.stage, JobClass.NOW, self._clock())
        elif way.read is not None and self._disk is not None:
            done = self._disk.reads.hasten(way.read, JobClass.NOW, self._clock())
        if not done:
            self.abandon(place)
        return done

    def abandon(self, place: int) -> None:
        """See `Fetches`. It is free at once: what runs goes on into a stage, or a slot, that waits for its end."""
        self._full[place] = False
        self._errors.pop(place, None)
        way = self._ways.pop(place, None)
        if way is None:
            return
        if way.stage is not None:
            self._copies.is_free(way.stage)  # a copy that waits is taken back
            way.stage.number = -1
        if way.read is not None and self._disk is not None:
            self._disk.reads.abandon(way.read)

    def wait(self, place: int, deadline_s: float) -> None:
        """See `Fetches`."""
        if not self.wait_until_free(place, deadline_s):
            expert = self._ways[place].expert
            self.abandon(place)
            raise self.losing(expert, "it has not come in time")
        if (error := self._errors.pop(place, None)) is not None:
            raise error

    def wait_until_free(self, place: int, deadline_s: float) -> bool:
        """See `Fetches`."""
        self.poll()
        while (way := self._ways.get(place)) is not None:
            jobs, left_s = self._jobs_of(way), deadline_s - self._clock()
            done = self._mover.wait_for(jobs, max(left_s, 0.0)) if jobs else self._mover.wait_for_room(left_s)
            if not done:
                return False
            self.poll()
        return True

    def wait_for_room(self, timeout_s: float) -> bool:
        """See `Fetches`."""
        return self._mover.wait_for_room(timeout_s)

    def is_busy(self, place: int) -> bool:
        """See `Fetches`."""
        return place in self._ways

    def is_full(self, place: int) -> bool:
        """See `Fetches`."""
        return self._full[place]

    def losing(self, expert: int, detail: str) -> WeightsLost:
        """See `Fetches`."""
        self._lost += 1
        return WeightsLost(self.records[expert].name, detail)

    def statistics(self) -> ReadStats:
        """See `Fetches`."""
        read = ReadStats(0, 0, 0, 0) if self._disk is None else self._disk.reads.statistics()
        return read._replace(lost=read.lost + self._lost)

    def rest(self, wait_s: float) -> bool:
        """Whether no copy and no read runs any more, within `wait_s`. What is on its way is given up; passes may go on
        afterwards, either way."""
        for place in list(self._ways):
            self.abandon(place)
        start_s = self._clock()
        at_rest = self._copies.rest(wait_s)
        left_s = max(start_s + wait_s - self._clock(), 0.0)
        return (self._disk is None or self._disk.reads.close(self._disk.slots, left_s)) and at_rest

    def close(self, wait_s: float | None = None) -> bool:
        """See `Fetches`; when no kernel reads the stages any more. Idempotent."""
        at_rest = self.rest(CLOSE_WAIT_S if wait_s is None else wait_s)
        if at_rest:
            self._copies.close()
            self._lay_out = _nowhere  # whoever gave it holds this, and memory that would wait for the collector
        return at_rest

    # -- inside ----------------------------------------------------------------------------------------------------

    def _note_end(self, way: _Way) -> None:
        """What a job has left behind that has ended."""
        if way.stage is not None:
            if way.stage.busy:
                return
            if way.stage.error is not None:
                self._fail(way, self.losing(way.expert, str(way.stage.error)))
                return
            self._lay_out(self._copies.slots.index(way.stage), way.expert, way.place)
            self._copies.release(way.stage)
            way.stage.number = -1
            del self._ways[way.place]
            self._full[way.place] = True
        elif way.read is not None and not way.read.busy and self._disk is not None and way.read.has_failed:
            try:
                self._disk.reads.wait(way.read, self._disk.pieces[way.expert], self._clock())
            except WeightsLost as exc:
                self._fail(way, exc)

    def _fail(self, way: _Way, error: WeightsLost) -> None:
        self.abandon(way.place)
        self._errors[way.place] = error

    def _go_on(self, way: _Way) -> bool:
        """Begins what comes next on a way; False when a queue is full."""
        record = self.records[way.expert]
        if way.read is None and record.memory is None:
            return self._read(way)
        if way.read is not None and way.read.busy:
            return True
        memory = record.memory if way.read is None else way.read.memory[self._piece_of(way).places[0] :]
        assert memory is not None
        free = [one for one in self._copies.slots if one.number < 0 and self._copies.is_free(one)]
        if len(free) <= self._spared(way, self._copies.slots):
            return True
        stage = free[0]
        if not self._copies.start(stage, memory[: record.num_bytes], way.klass, self._clock()):
            return False
        stage.number, way.stage = way.expert, stage
        if way.read is not None and stage.job is not None:
            way.read.jobs.append(stage.job)  # nothing is read there until it has been copied
            way.read.number, way.read = -1, None
        return True

    def _read(self, way: _Way) -> bool:
        assert self._disk is not None
        free = [one for one in self._disk.slots if one.number < 0 and not one.busy]
        if len(free) <= self._spared(way, self._disk.slots):
            return True
        if not self._disk.reads.start(free[0], way.expert, self._piece_of(way), way.klass, self._clock()):
            return False
        way.read = free[0]
        return True

    @staticmethod
    def _spared(way: _Way, slots: Sequence[object]) -> int:
        """How many slots have to stay free: guesses leave one for what is needed at once."""
        return int(way.klass is not JobClass.NOW and len(slots) > 1)

    def _piece_of(self, way: _Way) -> Piece:
        assert self._disk is not None
        return self._disk.pieces[way.expert]

    def _jobs_of(self, way: _Way) -> list[Job]:
        """What a way waits for: its own jobs, or one that holds what it needs. None where a queue is full."""
        if way.stage is not None and way.stage.job is not None:
            return [way.stage.job]
        if way.read is not None and way.read.busy:
            return way.read.jobs
        if way.read is None and self.records[way.expert].memory is None and self._disk is not None:
            held = [slot.jobs for slot in self._disk.slots if slot.busy]
            if held:
                return held[0]
        return next(([stage.job] for stage in self._copies.slots if stage.job is not None and stage.busy), [])
