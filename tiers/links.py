"""What each way between two tiers carries, measured where the bytes move."""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass

_EMA_WEIGHT = 0.1  # about the last 20 transfers: follows a drive that slows down, and forgets one odd transfer


class Link(enum.StrEnum):
    """A way that bytes take. Copies inside the device go by `DEVICE_TO_DEVICE`."""

    DEVICE_TO_HOST = "device_to_host"
    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_DEVICE = "device_to_device"
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"


@dataclass(frozen=True, slots=True)
class LinkStats:
    """One link at one moment."""

    total_bytes: int  # moved since the start
    busy_s: float  # seconds that threads spent moving them (two threads at once count twice)
    count: int  # transfers
    errors: int  # transfers that failed
    queued: int  # jobs waiting or running now
    bytes_per_s: float  # moving average of the rate of one transfer; 0 before the first


class LinkMeter:
    """Counts one link. Thread-safe: the mover's threads record, any thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0
        self._busy_s = 0.0
        self._count = 0
        self._errors = 0
        self._queued = 0
        self._rate = 0.0

    def enqueue(self) -> None:
        """A job for this link was accepted."""
        with self._lock:
            self._queued += 1

    def record(self, num_bytes: int, seconds: float, *, failed: bool) -> None:
        """A job for this link ended; a failed one moved nothing that counts."""
        with self._lock:
            self._queued -= 1
            self._count += 1
            if failed:
                self._errors += 1
                return
            self._bytes += num_bytes
            self._busy_s += seconds
            if seconds > 0 and num_bytes > 0:
                rate = num_bytes / seconds
                self._rate = rate if self._rate == 0 else self._rate + _EMA_WEIGHT * (rate - self._rate)

    def statistics(self) -> LinkStats:
        """A frozen copy of the counters."""
        with self._lock:
            return LinkStats(self._bytes, self._busy_s, self._count, self._errors, self._queued, self._rate)
