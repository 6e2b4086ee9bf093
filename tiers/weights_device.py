"""Slots on a card through which records of weights pass that it has no memory for, copied just ahead of their use.

Records lie in registered memory of the CPU, or come there from the disk by a `WeightRing`. What makes it right, however
late copies and kernels run:

- A slot is handed out when its copy has ended. The host waits for that, and not the compute stream: so the wait has a
  deadline. Copies run on meanwhile, into the other slots.
- A copy into a slot waits, on a stream of its own, for the event of the last kernel that read it. Copies of pages take
  other streams, and what is copied at once is small, so that a page that is needed now waits for one part at most.
- Memory that a copy may still write into, or read, is held by its job, whoever else lets go of it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from tierd.tiers.errors import WeightsLost
from tierd.tiers.gpu import DeviceRow, Event, Gpu, GpuError, HostRow, Stream, address_of_row
from tierd.tiers.links import Link
from tierd.tiers.mover import Job, JobClass, Mover
from tierd.tiers.weights_ring import Pace, WeightRing

PART_BYTES = 4 << 20  # copied by one call, a sixth of a millisecond of a fast link
CLOSE_WAIT_S = 30.0


class Record(NamedTuple):
    """What a slot takes."""

    name: str
    num_bytes: int
    memory: HostRow | None  # registered; None: it is on the disk, in the ring's order of such records


class DeviceRingStats(NamedTuple):
    """What has passed through the slots."""

    copied_bytes: int
    waited_s: float  # that passes stood still, on the host
    lost: int


class DeviceSlot:
    """Memory of a card that records are copied into. `job` fills it. `unsure`: whether a copy into it failed whose end
    nobody has seen; set on a thread of the mover, while `job` runs. The rest is the step thread's.
    """

    def __init__(self, row: DeviceRow, owner: object, copied: Event, read: Event) -> None:
        self.row, self.owner, self.copied, self.read = row, owner, copied, read
        self.number = -1
        self.job: Job | None = None
        self.unsure = False

    @property
    def error(self) -> Exception | None:
        """Of the last copy, which has ended."""
        return self.job.completion.error if self.job is not None and self.job.completion is not None else None

    @property
    def busy(self) -> bool:
        """Whether a copy waits or runs."""
        return self.job is not None and self.job.completion is None


class SlotCopies:
    """Copies of records into slots of a card, on a stream of their own, by awaited jobs of the mover.

    Threading: the step thread's, but for what the jobs do.

    Args:
        compute: the stream on which kernels read the slots.
        rows: the slots.
        owners: what keeps the memory of each slot; held while a copy may write there. None: somebody else does.
    """

    def __init__(
        self, gpu: Gpu, compute: Stream, mover: Mover, rows: Sequence[DeviceRow], owners: Sequence[object] | None
    ) -> None:
        self._gpu, self._compute, self._mover = gpu, compute, mover
        self._stream = gpu.new_stream()
        kept = [None] * len(rows) if owners is None else owners
        self.slots = [
            DeviceSlot(row, owner, gpu.new_event(), gpu.new_event()) for row, owner in zip(rows, kept, strict=True)
        ]
        self._lock = threading.Lock()  # of the counter: never held while the card is asked, which may hang
        self._queueing = threading.Lock()
        self._copied_bytes = 0

    @property
    def copied_bytes(self) -> int:
        """Since the start."""
        with self._lock:
            return self._copied_bytes

    def start(self, slot: DeviceSlot, memory: HostRow, klass: JobClass, due_s: float) -> bool:
        """Have registered memory on its way into a slot that is free. False when the queue is full."""
        # `dest` is left out: a test that fills it before the copy would do so under kernels that still read it.
        slot.job = Job(partial(self._copy, slot, memory), Link.HOST_TO_DEVICE, memory.nbytes, awaited=True)
        if self._mover.submit(slot.job, klass, due_s):
            return True
        slot.job = None
        return False

    def hasten(self, slot: DeviceSlot, klass: JobClass, due_s: float) -> bool:
        """Have a copy that waits before others. False, and it is taken back, when the queue is full."""
        job = slot.job
        if job is None or not slot.busy or not self._mover.cancel(job) or self._mover.submit(job, klass, due_s):
            return True
        slot.job = None
        return False

    def is_free(self, slot: DeviceSlot) -> bool:
        """Whether no copy into a slot that nobody wants runs; one that waits is taken back."""
        return slot.job is None or not slot.busy or self._mover.cancel(slot.job)

    def release(self, slot: DeviceSlot) -> None:
        """All kernels that read a slot are launched: it may be filled anew when they have run."""
        self._gpu.record(slot.read, self._compute)

    def rest(self, wait_s: float) -> bool:
        """Whether no copy runs any more, within `wait_s`; what waits to begin is taken back."""
        running = [slot.job for slot in self.slots if slot.job is not None and not self._mover.cancel(slot.job)]
        for slot in self.slots:
            if slot.unsure and not slot.busy:
                slot.number = -1
                slot.job = Job(partial(self._see_end, slot), Link.HOST_TO_DEVICE, 0, awaited=True)
                if not self._mover.submit(slot.job, JobClass.NOW):
                    slot.job = None
                    return False
                running.append(slot.job)
        return self._mover.wait_for(running, wait_s) and not any(slot.unsure for slot in self.slots)

    def close(self) -> None:
        """After `rest`, and when no kernel reads the slots any more. Idempotent."""
        if not self._stream:
            return
        for slot in self.slots:
            slot.job = None  # which holds the slot, and the memory it read
            self._gpu.free_event(slot.copied)
            self._gpu.free_event(slot.read)
        self._gpu.free_stream(self._stream)
        self._stream, self.slots = Stream(0), []

    def _copy(self, slot: DeviceSlot, source: HostRow) -> None:
        """On a thread of the mover."""
        gpu, start = self._gpu, address_of_row(source)
        try:
            with self._queueing:  # the copies of two threads are each followed by their own event
                gpu.wait(self._stream, slot.read)
                for at in range(0, source.nbytes, PART_BYTES):
                    size = min(PART_BYTES, source.nbytes - at)
                    gpu.copy(slot.row.address + at, start + at, size, self._stream)
                gpu.record(slot.copied, self._stream)
        except GpuError:  # the job's end tells it; but what was queued before must not run on into what comes next
            slot.unsure = True
            with contextlib.suppress(GpuError):
                gpu.record(slot.copied, self._stream)
                self._see_end(slot, again=False)
            raise
        slot.unsure = True
        self._see_end(slot, again=False)
        with self._lock:
            self._copied_bytes += source.nbytes

    def _see_end(self, slot: DeviceSlot, *, again: bool = True) -> None:
        """On a thread of the mover: waits until what was copied into a slot has ended."""
        if again:
            self._gpu.record(slot.copied, self._stream)
        self._gpu.synchronize(slot.copied)
        slot.unsure = False


class DeviceRing:
    """Threading: the step thread alone calls it. Copies run as awaited jobs of the mover.

    Args:
        compute: the stream on which kernels read the slots.
        records: all that are streamed, in the order of a pass.
        rows: the slots.
        owners: what keeps the memory of each slot; held while a copy may write there. None: somebody else does.
        disk: brings the records that have no memory of their own; None when all have.
        overlap: copy ahead.
        clock: of the deadlines.
    """

    def __init__(
        self,
        gpu: Gpu,
        compute: Stream,
        mover: Mover,
        records: Sequence[Record],
        rows: Sequence[DeviceRow],
        *,
        owners: Sequence[object] | None = None,
        disk: WeightRing | None = None,
        overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not rows or not records or max(record.num_bytes for record in records) > min(row.nbytes for row in rows):
            raise ValueError(f"{len(rows)} slots for {len(records)} records, or slots that are too small")
        self.records = tuple(records)
        self._disk_numbers = {n: place for place, n in enumerate(n for n, r in enumerate(records) if r.memory is None)}
        if len(self._disk_numbers) != (0 if disk is None else len(disk.pieces)):
            raise ValueError(f"{len(self._disk_numbers)} records are on the disk, the ring brings others")
        self._mover, self._disk, self._clock = mover, disk, clock
        self._ahead = len(rows) if overlap else 1
        self._copies = SlotCopies(gpu, compute, mover, rows, owners)
        self._held: DeviceSlot | None = None
        self._pace = Pace(clock())
        self._lost = 0
        self._waited_s = 0.0
        self.uses = [0] * len(self.records)
        self.hits = [0] * len(self.records)

    def __repr__(self) -> str:
        return f"<DeviceRing: {len(self.records)} records through {len(self._slots)} slots>"

    @property
    def _slots(self) -> list[DeviceSlot]:
        return self._copies.slots

    def statistics(self) -> DeviceRingStats:
        """Counters since the start."""
        return DeviceRingStats(self._copies.copied_bytes, self._waited_s, self._lost)

    def begin(self) -> None:
        """A pass begins, with the first record."""
        self.release()
        if self._disk is not None:
            self._disk.begin(range(len(self._disk_numbers)))

    def take(self, number: int, deadline_s: float) -> int:
        """The slot of this record: kernels that are launched from now on, until the next call, find it there.

        Raises WeightsLost when it can't be had, or has not come at `deadline_s`.
        """
        self.release()
        start_s = self._clock()
        self._forget_failed()
        held = self._holder(number)
        self.uses[number] += 1
        self.hits[number] += held is not None and not held.busy
        self._pace.tick(start_s)
        window = self._fetch(number, deadline_s)
        slot = self._wait(number, window, deadline_s)
        self._held = slot
        self._waited_s += self._clock() - start_s
        return self._slots.index(slot)

    def end(self) -> None:
        """The pass that took the last record is over: its slot is free, for what the next one needs."""
        self.release()
        if self._ahead > 1:
            self._forget_failed()
            with contextlib.suppress(WeightsLost):  # the next pass asks again, and says so
                self._fetch(0, self._clock())

    def release(self) -> None:
        """All kernels that read the slot taken last are launched: it may be filled anew when they have run."""
        if self._held is not None:
            self._copies.release(self._held)
            self._held = None

    def rest(self, wait_s: float) -> bool:
        """Whether no copy and no read runs any more, within `wait_s`; what waits to begin is taken back.

        Passes may go on afterwards, either way.
        """
        start_s = self._clock()
        at_rest = self._copies.rest(wait_s)
        left_s = max(start_s + wait_s - self._clock(), 0.0)
        return (self._disk is None or self._disk.close(left_s)) and at_rest

    def close(self, wait_s: float | None = None) -> bool:
        """Ends the copies, when no kernel reads the slots any more; False when one is stuck. Idempotent.

        What is stuck keeps its memory until it ends.
        """
        at_rest = self.rest(CLOSE_WAIT_S if wait_s is None else wait_s)
        if at_rest:
            self._copies.close()
        return at_rest

    # -- inside ----------------------------------------------------------------------------------------------------

    def _fetch(self, number: int, deadline_s: float) -> list[int]:
        """Have the records from this one on under way, as many as there are slots for; which these are."""
        count = len(self.records)
        window = [(number + ahead) % count for ahead in range(min(self._ahead, count))]
        in_order = True  # the disk's ring gives its records in their order alone
        for ahead, wanted in enumerate(window):
            if self.records[wanted].memory is None:
                in_order = in_order and self._has_come(wanted)
                if not in_order:
                    continue
            self._start(wanted, window, self._pace.due_s(ahead), deadline_s)
        return window

    def _forget_failed(self) -> None:
        for slot in self._slots:
            if slot.error is not None:
                slot.number, slot.job = -1, None

    def _holder(self, number: int) -> DeviceSlot | None:
        return next((slot for slot in self._slots if slot.number == number), None)

    def _has_come(self, number: int) -> bool:
        """Whether a record of the disk can be had without waiting for it."""
        assert self._disk is not None
        return self._holder(number) is not None or self._disk.has(self._disk_numbers[number])

    def _start(self, number: int, window: Sequence[int], due_s: float, deadline_s: float) -> bool:
        """Have a record on its way to the card, if a slot is free for it. Raises WeightsLost."""
        if self._holder(number) is not None:
            return True
        free = next((slot for slot in self._slots if slot.number not in window and self._copies.is_free(slot)), None)
        if free is None:
            return False
        record, place = self.records[number], -1
        memory = record.memory
        if memory is None:
            assert self._disk is not None
            place = self._disk.take(self._disk_numbers[number], deadline_s)
            memory = self._disk.memory(place)
        free.number = number
        if not self._copies.start(free, memory[: record.num_bytes], JobClass.NOW, due_s):
            free.number = -1
            return False
        if place >= 0 and self._disk is not None and free.job is not None:
            self._disk.lend(place, free.job)
        return True

    def _wait(self, number: int, window: Sequence[int], deadline_s: float) -> DeviceSlot:
        """Waits until the copy of a record has ended."""
        name = self.records[number].name
        while (slot := self._holder(number)) is None:
            if self._start(number, window, self._clock(), deadline_s):
                continue
            # There are no fewer slots than records in the window, of which this one has none.
            busy = [slot.job for slot in self._slots if slot.number not in window and slot.job and slot.busy]
            if not busy:
                raise self._losing(name, "the queue of the link to the card is full")
            if not self._mover.wait_for(busy[:1], deadline_s - self._clock()):
                raise self._losing(name, "the link to the card does not answer")
        if slot.job is not None and not self._mover.wait_for([slot.job], deadline_s - self._clock()):
            raise self._losing(name, "its copy to the card has not ended in time")
        if slot.error is not None:
            raise self._losing(name, str(slot.error))
        return slot

    def _losing(self, name: str, detail: str) -> WeightsLost:
        self._lost += 1
        return WeightsLost(name, detail)
