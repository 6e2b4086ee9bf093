"""What each way between two tiers carries, measured where the bytes move."""

from __future__ import annotations

import contextlib
import copy
import enum
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import assert_never

# The rate looks back over about this much time in which the link was busy: it follows a drive that slows down, and
# forgets one odd transfer.
_MEMORY_S = 0.5
# What the link can do is judged by pieces of so much activity: shorter ones say more of the clock than of the link.
_PIECE_S = 0.02
_PIECES = 200  # the newest, for the rate that few of them beat


class LinkGroup(enum.StrEnum):
    """Links that share what they run on. Each group has its own queue and threads, so none waits for another."""

    COPIES = "copies"
    DISK_READS = "disk_reads"
    DISK_WRITES = "disk_writes"


class Link(enum.StrEnum):
    """A way that bytes take. Copies inside the device go by `DEVICE_TO_DEVICE`."""

    DEVICE_TO_HOST = "device_to_host"
    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_DEVICE = "device_to_device"
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"

    @property
    def group(self) -> LinkGroup:
        """Whose queue and threads serve this link."""
        match self:
            case Link.DEVICE_TO_HOST | Link.HOST_TO_DEVICE | Link.DEVICE_TO_DEVICE:
                return LinkGroup.COPIES
            case Link.DISK_READ:
                return LinkGroup.DISK_READS
            case Link.DISK_WRITE:
                return LinkGroup.DISK_WRITES
            case _:
                assert_never(self)


@dataclass(frozen=True, slots=True)
class LinkStats:
    """One link at one moment."""

    total_bytes: int  # moved since the start
    busy_s: float  # seconds that threads spent moving them (two threads at once count twice)
    active_s: float  # seconds in which at least one transfer ran
    waited_s: float  # seconds that the transfers stood in the queue, all together
    count: int  # transfers that ended, failed ones included
    errors: int  # transfers that failed or could not be run
    cancelled: int  # transfers that were given up before they ran; not in `count`
    queued: int  # jobs waiting or running now
    bytes_per_s: float  # of the link as a whole while it is active, lately; 0 before the first transfer
    peak_bytes_per_s: float  # the best piece of 20 ms of activity since the start; 0 before the first one
    p99_bytes_per_s: float  # that one in a hundred of the newest pieces beats
    compute_wait_s: float  # seconds in which there was nothing to compute until this link had brought something


class LinkMeter:
    """Counts one link. Not thread-safe: whoever has several threads calls it under a lock. Times are of one clock."""

    def __init__(self) -> None:
        self._bytes = 0
        self._busy_s = 0.0
        self._active_s = 0.0
        self._waited_s = 0.0
        self._count = 0
        self._errors = 0
        self._cancelled = 0
        self._queued = 0
        self._running = 0
        self._seen_s = 0.0  # up to when `_active_s` is counted
        self._recent_bytes = 0.0  # both decay with active time; their ratio is the rate
        self._recent_s = 0.0
        self._fresh_s = 0.0  # active time since the last transfer that counted
        self._piece_bytes, self._piece_s = 0, 0.0
        self._pieces: deque[float] = deque(maxlen=_PIECES)  # rates
        self._peak = 0.0
        self._urgent = 0
        self._compute_wait_s = 0.0

    @property
    def urgent(self) -> bool:
        """Whether a job that is needed at once has not ended."""
        return self._urgent > 0

    def enqueue(self, *, urgent: bool = False) -> None:
        """A job for this link was accepted."""
        self._queued += 1
        self._urgent += urgent

    def settle(self, *, urgent: bool) -> None:
        """Its end was told: whoever needed it at once needs it no more."""
        self._urgent -= urgent

    def hold_up(self, seconds: float) -> None:
        """There was nothing to compute for so long, until a job of this link had ended."""
        self._compute_wait_s += seconds

    def begin(self, now_s: float, waited_s: float) -> None:
        """A job was taken from the queue and runs from now on."""
        self._pass(now_s)
        self._running += 1
        self._waited_s += waited_s

    def end(self, now_s: float, num_bytes: int, seconds: float, *, failed: bool) -> None:
        """A job that ran for `seconds` ended; a failed one moved nothing that counts."""
        self._pass(now_s)
        self._running -= 1
        self._queued -= 1
        self._count += 1
        if failed:
            self._errors += 1
            return
        self._bytes += num_bytes
        self._busy_s += seconds
        self._piece_bytes += num_bytes
        if self._piece_s >= _PIECE_S:
            self._pieces.append(self._piece_bytes / self._piece_s)
            self._peak = max(self._peak, self._pieces[-1])
            self._piece_bytes, self._piece_s = 0, 0.0
        if num_bytes > 0:
            kept = math.exp(-self._fresh_s / _MEMORY_S)
            self._recent_bytes = self._recent_bytes * kept + num_bytes
            self._recent_s = self._recent_s * kept + self._fresh_s
            self._fresh_s = 0.0

    def abandon(self, *, cancelled: bool) -> None:
        """A job left the queue without having run: cancelled, or because the mover stopped."""
        self._queued -= 1
        if cancelled:
            self._cancelled += 1
        else:
            self._count += 1
            self._errors += 1

    def _pass(self, now_s: float) -> None:
        if self._running and now_s > self._seen_s:
            self._active_s += now_s - self._seen_s
            self._fresh_s += now_s - self._seen_s
            self._piece_s += now_s - self._seen_s
        self._seen_s = now_s

    def snapshot(self) -> LinkMeter:
        """A meter that stands still: what takes long with the figures need not hold up whoever counts."""
        twin = copy.copy(self)
        twin._pieces = self._pieces.copy()
        return twin

    def statistics(self) -> LinkStats:
        """A frozen copy of the counters. It sorts: ask a `snapshot` where somebody waits."""
        rates = sorted(self._pieces)
        return LinkStats(
            total_bytes=self._bytes,
            busy_s=self._busy_s,
            active_s=self._active_s,
            waited_s=self._waited_s,
            count=self._count,
            errors=self._errors,
            cancelled=self._cancelled,
            queued=self._queued,
            bytes_per_s=self._recent_bytes / self._recent_s if self._recent_s > 0 else 0.0,
            peak_bytes_per_s=self._peak,
            p99_bytes_per_s=rates[int(0.99 * (len(rates) - 1))] if rates else 0.0,
            compute_wait_s=self._compute_wait_s,
        )


@contextlib.contextmanager
def held_up(meters: Iterable[LinkMeter], lock: threading.Lock, clock: Callable[[], float]) -> Iterator[None]:
    """Counts the time of the block for each link that has something urgent when it begins. `lock` guards the meters."""
    with lock:
        start_s, late = clock(), [meter for meter in meters if meter.urgent]
    try:
        yield
    finally:
        with lock:
            for meter in late:
                meter.hold_up(clock() - start_s)
