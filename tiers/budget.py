"""How much may be written to the stores in a day: a count that outlives the process, and that engines share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

DAY_S = 86_400
FILE_NAME = "writes-today"  # below the root of the stores: removing a store does not forget what was written to it


class WriteBudget:
    """Bytes of pages that may be written between two midnights (UTC), by all engines that share a file.

    The file holds one line, the day and the bytes. Each engine adds its own under a lock and learns the sum. It is
    never synced and may be lost: then the day starts anew. A clock that is set back keeps the count until midnight.

    Threading: `share` on the thread that writes the store, everything else on the pager's.

    Args:
        daily_bytes: 0 for no bound; what is written is counted all the same.
        file: None to count only in this process.
        wall: seconds since 1970.
    """

    def __init__(self, daily_bytes: int = 0, file: Path | None = None, wall: Callable[[], float] = time.time) -> None:
        self.daily_bytes = daily_bytes
        self._file = file
        self._wall = wall
        self._lock = threading.Lock()
        self._day = self._today()
        self._shared_bytes = 0  # of the day, as the file said last
        self._own_bytes = 0  # not in it yet
        self.share()

    @property
    def spent_bytes(self) -> int:
        """Written today, by all."""
        with self._lock:
            self._turn()
            return self._shared_bytes + self._own_bytes

    @property
    def left_share(self) -> float:
        """How much of the day's bytes is left, from 0 to 1; 1 without a bound."""
        return max(0.0, 1.0 - self.spent_bytes / self.daily_bytes) if self.daily_bytes else 1.0

    @property
    def day(self) -> int:
        """Days since 1970, by the clock."""
        return self._today()

    def allows(self, record_bytes: int) -> int:
        """How many records may be written now."""
        if not self.daily_bytes:
            return 1 << 30
        return max(0, self.daily_bytes - self.spent_bytes) // record_bytes

    def spend(self, num_bytes: int) -> None:
        """Counts what is being written; a negative number takes back what was not."""
        with self._lock:
            self._turn()
            self._own_bytes += num_bytes

    def share(self) -> None:
        """Adds what was counted here to the file, and learns what others added. An error costs accuracy, no more."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                # Another engine has it for some microseconds: then it is our turn after the next group of pages.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with self._lock:
                    self._turn()
                    shared_bytes = max(0, _parsed(os.pread(fd, 64, 0), self._day) + self._own_bytes)
                    os.pwrite(fd, f"{self._day} {shared_bytes}".ljust(40).encode() + b"\n", 0)
                    self._shared_bytes, self._own_bytes = shared_bytes, 0
            finally:
                os.close(fd)

    def _today(self) -> int:
        return int(self._wall() // DAY_S)

    def _turn(self) -> None:
        today = self._today()
        if today > self._day:
            self._shared_bytes = self._own_bytes = 0
        self._day = today


def _parsed(line: bytes, today: int) -> int:
    """The bytes of a line of the file; 0 when it is of an earlier day or damaged."""
    day, _, count = line.decode("ascii", "replace").strip().partition(" ")
    if not (day.isdigit() and count.isdigit()) or int(day) < today:
        return 0
    return int(count)
