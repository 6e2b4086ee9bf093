"""Timing a disk leaves nothing behind, whatever the disk does."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tierd.daemon.plan.disk import probe_disk

SIZES = (64 << 10, 1 << 20)


def descriptors() -> set[str]:
    """What is open, without the directory that tells it."""
    found = [f"{entry.name} {os.readlink(entry.path)}" for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
    return {one for one in found if "/proc/" not in one}


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Any:
    before = descriptors()
    yield
    assert descriptors() == before and list(tmp_path.iterdir()) == []


def test_a_disk_is_written_and_read(tmp_path: Path) -> None:
    found = probe_disk(tmp_path, *SIZES, 5.0)
    assert found.rate.request_bytes == SIZES[0]
    assert found.rate.read_bytes_per_s > 0 and found.rate.write_bytes_per_s > 0


def test_one_request_is_made_even_without_time(tmp_path: Path) -> None:
    assert probe_disk(tmp_path, *SIZES, 0.0).rate.write_bytes_per_s > 0


@pytest.mark.parametrize("when", ["open", "write"])
def test_a_file_system_that_refuses_o_direct(tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, written, direct = os.open, os.pwritev, set()

    def refuse_open(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT and when == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = opened(path, flags & ~os.O_DIRECT, *more, **named)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def refuse_write(fd: int, *rest: Any) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return written(fd, *rest)

    monkeypatch.setattr(os, "open", refuse_open)
    monkeypatch.setattr(os, "pwritev", refuse_write)
    found = probe_disk(tmp_path, *SIZES, 5.0)
    assert not found.direct and found.rate.read_bytes_per_s > 0


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        probe_disk(tmp_path, *SIZES, 5.0)
