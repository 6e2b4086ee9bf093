"""A card that is made of CPU memory and does everything as late, and in as odd an order, as a real one may."""

from __future__ import annotations

import ctypes
import errno
import mmap
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tierd.tiers.arena import POISON
from tierd.tiers.gpu import Event, GpuError, Handle, Stream

Mark = tuple[int, int]  # a stream, and how many of its operations


@dataclass
class Operation:
    """One entry of a stream. `steps` run one at a time, with those of other streams in between."""

    steps: deque[Callable[[], None]]
    after: Mark | None = None
    is_copy: bool = False


@dataclass
class Lane:
    """A stream."""

    waiting: deque[Operation] = field(default_factory=deque)
    given: int = 0
    done: int = 0


class FakeGpu:
    """`Gpu`. Nothing happens until somebody waits; then streams go on in a random order, step by step.

    A copy first fills its destination with 0xAA, and reads its source in a later step. Touching device memory that is
    not mapped raises AssertionError where the copy is submitted. Any thread.

    Attributes:
        limit_bytes: of device memory.
        unregistrable_from: `register` fails once so many bytes are registered.
        stuck: copies do not go on, and nothing behind them, while this is set; `unstick` ends it.
        refusals: how many of the next calls of a method fail.
    """

    granularity_bytes = 1 << 12

    def __init__(self, seed: int = 0, limit_bytes: int = 1 << 30) -> None:
        self.limit_bytes = limit_bytes
        self.unregistrable_from = 1 << 40
        self.stuck = False
        self.refusals: Counter[str] = Counter()
        self.closed = False
        self.registered: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.lanes: dict[Stream, Lane] = {}
        self.events: dict[Event, Mark | None] = {}
        self._spaces: dict[int, mmap.mmap] = {}
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._unstuck = threading.Condition(self._lock)
        self._next = 1000

    def unstick(self) -> None:
        with self._lock:
            self.stuck = False
            self._unstuck.notify_all()

    def memory(self) -> tuple[int, int]:
        return self.limit_bytes - sum(self.mapped.values()), self.limit_bytes

    def close(self) -> None:
        self.closed = True

    def reserve(self, size_bytes: int) -> int:
        space = mmap.mmap(-1, size_bytes)
        address = int(np.frombuffer(space, np.uint8).ctypes.data)
        self._spaces[address] = space
        return address

    def release(self, address: int, size_bytes: int) -> None:
        assert len(self._spaces.pop(address)) == size_bytes
        assert not [at for at in self.mapped if address <= at < address + size_bytes], "released with memory in it"

    def map(self, address: int, size_bytes: int) -> Handle:
        assert not size_bytes % self.granularity_bytes and address not in self.mapped
        if size_bytes > self.limit_bytes - sum(self.mapped.values()):
            raise GpuError(errno.ENOMEM, "out of memory")
        self.mapped[address] = size_bytes
        return Handle(self._number())

    def unmap(self, address: int, size_bytes: int, handle: Handle) -> None:
        assert self.mapped.pop(address) == size_bytes

    def register(self, address: int, size_bytes: int) -> None:
        with self._lock:
            self._may("register", errno.ENOMEM)
            if sum(self.registered.values()) + size_bytes > self.unregistrable_from:
                raise GpuError(errno.ENOMEM, "no more pages can be locked")
            for at, size in self.registered.items():
                assert address + size_bytes <= at or at + size <= address, "registered twice"
            self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def new_stream(self) -> Stream:
        stream = Stream(self._number())
        self.lanes[stream] = Lane()
        return stream

    def free_stream(self, stream: Stream) -> None:
        del self.lanes[stream]

    def new_event(self) -> Event:
        event = Event(self._number())
        self.events[event] = None
        return event

    def free_event(self, event: Event) -> None:
        del self.events[event]

    def record(self, event: Event, stream: Stream) -> None:
        with self._lock:
            self.events[event] = (stream, self.lanes[stream].given)

    def wait(self, stream: Stream, event: Event) -> None:
        with self._lock:
            self._give(stream, Operation(deque(), self.events[event]))

    def synchronize(self, event: Event) -> None:
        self._may("synchronize")
        while True:
            with self._lock:
                mark = self.events[event]
                if mark is None or self._passed(mark):
                    return
                if not self._step():
                    self._unstuck.wait()

    def copy(self, dest: int, source: int, size_bytes: int, stream: Stream) -> None:
        self._may("copy")
        self._check(dest, size_bytes)
        self._check(source, size_bytes)
        steps = [lambda: ctypes.memset(dest, POISON, size_bytes), lambda: ctypes.memmove(dest, source, size_bytes)]
        with self._lock:
            self._give(stream, Operation(deque(steps), is_copy=True))

    def fill(self, dest: int, value: int, size_bytes: int, stream: Stream) -> None:
        self._check(dest, size_bytes)
        self.launch(stream, lambda: ctypes.memset(dest, value, size_bytes))

    def launch(self, stream: Stream, *steps: Callable[[], object]) -> None:
        """A kernel."""
        with self._lock:
            self._give(stream, Operation(deque(steps)))

    def finish(self) -> None:
        """Waits for everything."""
        with self._lock:
            while any(lane.waiting for lane in self.lanes.values()):
                assert self._step(), "it is stuck"

    def _give(self, stream: Stream, operation: Operation) -> None:
        lane = self.lanes[stream]
        lane.waiting.append(operation)
        lane.given += 1

    def _passed(self, mark: Mark) -> bool:
        return self.lanes[Stream(mark[0])].done >= mark[1]

    def _step(self) -> bool:
        """Whether anything could go on."""
        ready = [
            lane
            for lane in self.lanes.values()
            if lane.waiting
            and not (self.stuck and lane.waiting[0].is_copy)
            and (lane.waiting[0].after is None or self._passed(lane.waiting[0].after))
        ]
        if not ready:
            assert self.stuck, "streams wait for one another"
            return False
        lane = self._random.choice(ready)
        operation = lane.waiting[0]
        if operation.steps:
            operation.steps.popleft()()
        if not operation.steps:
            lane.waiting.popleft()
            lane.done += 1
        return True

    def _may(self, method: str, code: int = errno.EIO) -> None:
        with self._lock:
            if self.refusals[method] > 0:
                self.refusals[method] -= 1
                raise GpuError(code, f"{method} is refused")

    def _check(self, address: int, size_bytes: int) -> None:
        for start, space in self._spaces.items():
            if start <= address < start + len(space):
                covered = sum(
                    max(0, min(address + size_bytes, at + size) - max(address, at))
                    for at, size in self.mapped.items()
                )
                assert covered == size_bytes, f"{size_bytes} bytes at {address:#x} are not mapped"

    def _number(self) -> int:
        with self._lock:
            self._next += 1
            return self._next


def bytes_at(address: int, size_bytes: int) -> bytes:
    """What memory holds."""
    return ctypes.string_at(address, size_bytes)


def put(address: int, data: bytes) -> None:
    """Writes memory."""
    ctypes.memmove(address, data, len(data))
