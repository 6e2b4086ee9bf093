"""Copies to, from and on the card: a stream for each way, an event at the end of each copy, and rows for the store.

The order that makes them right, wherever the step loop is:

- A copy begins after everything that was launched on the compute stream before it was submitted: kernels that write
  what it reads, and kernels that still read a slot that has since been freed and is filled anew.
- A copy counts as done, for the mover, when its event has come. So a page is published, and a slot freed, only then,
  and a kernel that is launched afterwards finds the bytes without waiting for anything.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tierd.tiers.cuda_memory import pinned_array
from tierd.tiers.gpu import DeviceRow, Event, Gpu, GpuError, HostRow, Row, Stream, address_of_row

T = TypeVar("T")

BOUNCE_BYTES = 8 << 20  # of what a thread reads from the disk for the card at once; at least one record


class CudaCopies:
    """`copy` for a mover, and its `Crossing`. Any thread, several at once.

    Args:
        compute: the stream on which kernels run.
        bounce_bytes: see above.
    """

    def __init__(self, gpu: Gpu, compute: Stream, *, bounce_bytes: int = BOUNCE_BYTES) -> None:
        self._gpu = gpu
        self._compute = compute
        self._bounce_bytes = bounce_bytes
        self._up, self._down, self._across = gpu.new_stream(), gpu.new_stream(), gpu.new_stream()
        self._lock = threading.Lock()
        self._events: list[Event] = []  # free ones
        self._made: list[Event] = []
        self._buffers: list[HostRow] = []  # free ones, for no more threads than the mover has
        self._abandoned: list[HostRow] = []  # until the end: a card whose waits fail is given up soon

    def copy(self, dest: Row, source: Row) -> None:
        """Copies a row; returns when it is there."""
        self._finish(self._start([(dest, source)], self._stream(dest, source)))

    def poison(self, dest: Row, value: int) -> None:
        """Fills a row, for `Disturbance`; returns when it is filled: the copy that follows may take another stream."""
        if not isinstance(dest, DeviceRow):
            dest.fill(value)
            return
        with self._lock:
            event = self._event()
            self._gpu.fill(dest.address, value, dest.nbytes, self._up)
            self._gpu.record(event, self._up)
        self._finish(event)

    def fill(self, rows: Sequence[Row], read: Callable[[slice, Sequence[HostRow]], Sequence[T]]) -> list[T]:
        """See `Mover.fill`: rows of the card are read into registered memory of the CPU, and copied from there."""
        results: list[T] = []
        first = 0
        while first < len(rows):
            stop = first + 1
            if not isinstance(rows[first], DeviceRow):
                while stop < len(rows) and not isinstance(rows[stop], DeviceRow):
                    stop += 1
                results += read(slice(first, stop), [row for row in rows[first:stop] if not isinstance(row, DeviceRow)])
            else:
                room = max(1, self._bounce_bytes // rows[first].nbytes)
                while stop < len(rows) and stop - first < room and isinstance(rows[stop], DeviceRow):
                    stop += 1
                results += self._fill_device(slice(first, stop), rows[first:stop], read)
            first = stop
        return results

    def lend(self, rows: Sequence[Row], write: Callable[[Sequence[HostRow]], None]) -> None:
        """See `Mover.lend`: all at once, for the store writes them as one group."""
        far = [row for row in rows if isinstance(row, DeviceRow)]
        if not far:
            write([row for row in rows if not isinstance(row, DeviceRow)])
            return
        with self._bounce(far) as buffer:
            near = _pieces(buffer, far)
            self._finish(self._start(list(zip(near, far, strict=True)), self._down))
            copies = iter(near)
            write([next(copies) if isinstance(row, DeviceRow) else row for row in rows])

    def close(self) -> None:
        """Gives streams, events and buffers back, after the mover's end. Idempotent."""
        self._buffers.clear()
        self._abandoned.clear()
        self._events.clear()
        made, self._made = self._made, []
        for event in made:
            self._gpu.free_event(event)
        streams, self._up, self._down, self._across = (self._up, self._down, self._across), *[Stream(0)] * 3
        for stream in streams:
            if stream:
                self._gpu.free_stream(stream)

    def _fill_device(
        self, which: slice, rows: Sequence[Row], read: Callable[[slice, Sequence[HostRow]], Sequence[T]]
    ) -> list[T]:
        with self._bounce(rows) as buffer:
            near = _pieces(buffer, rows)
            results = list(read(which, near))
            # What could not be read is copied as well: nobody looks at a slot whose load failed.
            self._finish(self._start(list(zip(rows, near, strict=True)), self._up))
            return results

    def _stream(self, dest: Row, source: Row) -> Stream:
        match isinstance(dest, DeviceRow), isinstance(source, DeviceRow):
            case True, True:
                return self._across
            case True, False:
                return self._up
            case _:  # also from the CPU to the CPU: in place of the host's copy, in the same order
                return self._down

    def _start(self, pairs: Sequence[tuple[Row, Row]], stream: Stream) -> Event:
        """Queues copies, behind what the compute stream holds now; the event comes when they are done.

        Under a lock: the copies of two threads are each followed by their own event.
        """
        gpu = self._gpu
        with self._lock:
            event = self._event()
            gpu.record(event, self._compute)
            gpu.wait(stream, event)
            for dest, source in pairs:
                gpu.copy(address_of_row(dest), address_of_row(source), dest.nbytes, stream)
            gpu.record(event, stream)
        return event

    def _finish(self, event: Event) -> None:
        self._gpu.synchronize(event)
        with self._lock:
            self._events.append(event)

    def _event(self) -> Event:
        # Called with the lock held. One that an error kept from coming back is not used again.
        if self._events:
            return self._events.pop()
        event = self._gpu.new_event()
        self._made.append(event)
        return event

    @contextlib.contextmanager
    def _bounce(self, rows: Sequence[Row]) -> Iterator[HostRow]:
        """A buffer for these rows. After an error of the card nobody gets it again: copies may go on with it."""
        buffer = self._borrow(sum(row.nbytes for row in rows))
        try:
            yield buffer
        except GpuError:
            self._abandoned.append(buffer)
            raise
        except BaseException:
            self._give_back(buffer)
            raise
        self._give_back(buffer)

    def _borrow(self, size_bytes: int) -> HostRow:
        with self._lock:
            for place, buffer in enumerate(self._buffers):
                if buffer.nbytes >= size_bytes:
                    return self._buffers.pop(place)
            if self._buffers:  # too small: never more buffers than threads that are at it
                self._buffers.pop()
        return pinned_array(self._gpu, size_bytes)

    def _give_back(self, buffer: HostRow) -> None:
        with self._lock:
            self._buffers.append(buffer)


def _pieces(buffer: HostRow, rows: Sequence[Row]) -> list[HostRow]:
    """A part of the buffer for each row."""
    pieces, start = [], 0
    for row in rows:
        pieces.append(buffer[start : start + row.nbytes])
        start += row.nbytes
    return pieces
