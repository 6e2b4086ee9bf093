"""Times a disk: one request at a time from one thread, past the page cache where that can be.

The store has several reads in flight and is faster than this: `rates.Streaming` measures that. This tells a slow disk.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tierd.daemon.plan.rates import DiskRate


class Probe(NamedTuple):
    """What came of it. `direct`: O_DIRECT works."""

    direct: bool
    rate: DiskRate


def probe_disk(directory: Path, request_bytes: int, total_bytes: int, limit_s: float) -> Probe:
    """Write and read a file of so many bytes in a directory, which is gone again then; raises OSError.

    `request_bytes`: a multiple of 4096. Writing and reading end after `limit_s` seconds each.
    """
    fd, name = tempfile.mkstemp(prefix=".tierd-disk-", dir=directory)
    os.close(fd)
    buffer = mmap.mmap(-1, request_bytes)  # on a page boundary, as O_DIRECT wants
    try:
        buffer.write(os.urandom(request_bytes))  # some disks write zeros faster than anything
        fd, direct = _opened(name, buffer)
        try:
            count = max(total_bytes // request_bytes, 1)
            start_s = time.monotonic()
            written = _until(start_s + limit_s, count, lambda place: os.pwritev(fd, [buffer], place * request_bytes))
            os.fdatasync(fd)
            write_s = max(time.monotonic() - start_s, 1e-9)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # for a file system without O_DIRECT
            start_s = time.monotonic()
            read = _until(start_s + limit_s, written, lambda place: os.preadv(fd, [buffer], place * request_bytes))
            read_s = max(time.monotonic() - start_s, 1e-9)
        finally:
            os.close(fd)
    finally:
        buffer.close()
        os.unlink(name)
    return Probe(direct, DiskRate(request_bytes, read * request_bytes / read_s, written * request_bytes / write_s))


def _opened(name: str, buffer: mmap.mmap) -> tuple[int, bool]:
    """The file, and whether it goes past the page cache: it may be refused at once or at the first write."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        fd = os.open(name, flags | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(name, flags), False
    try:
        os.pwritev(fd, [buffer], 0)
    except OSError:
        os.close(fd)
        return os.open(name, flags), False
    return fd, True


def _until(end_s: float, count: int, call: Callable[[int], object]) -> int:
    """How many of `count` calls were made before the time was up; one at least."""
    for index in range(count):
        call(index)
        if time.monotonic() >= end_s:
            return index + 1
    return count
