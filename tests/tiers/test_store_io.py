"""The loops around transfers, and the directory and its lock."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.faults import FaultyIO, ShortIO
from tierd.tiers.errors import StoreBroken, StoreLocked
from tierd.tiers.store_io import (
    OsIO,
    aligned_block,
    is_aligned,
    lock_directory,
    open_directory,
    read_full,
    write_full,
)

pytestmark = pytest.mark.usefixtures("no_files_left")


@pytest.mark.parametrize("align", [1, 512, 4096])
@pytest.mark.parametrize("seed", range(5))
def test_short_and_interrupted_transfers_are_invisible(tmp_path: Path, seed: int, align: int) -> None:
    io = ShortIO(seed, align=align).as_io()
    fd = io.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    first, second = aligned_block(4096), aligned_block(3 * 4096)
    rng = np.random.default_rng(seed)
    first[:], second[:] = rng.integers(0, 256, 4096), rng.integers(0, 256, 3 * 4096)
    write_full(io, fd, [first, second.data], 4096, align)
    got = aligned_block(4 * 4096)
    assert read_full(io, fd, [got[:100], got[100:]], 4096, align) == 4 * 4096
    assert got.tobytes() == first.tobytes() + second.tobytes()
    assert read_full(io, fd, [got], 4 * 4096, align) == 4096  # the end of the file
    io.close(fd)


def test_unaligned_tail_is_transferred_again(tmp_path: Path) -> None:
    io = ShortIO(3, align=512).as_io()  # stops inside of a block
    fd = io.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    block = aligned_block(8 * 4096)
    block[:] = np.arange(len(block)) % 253
    write_full(io, fd, [block], 0, 4096)
    assert (tmp_path / "file").read_bytes() == block.tobytes()
    io.close(fd)


def test_no_progress_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    for name in ("pwritev", "preadv"):
        io = FaultyIO(0, errno.EINTR, forever=True, only=(name,)).as_io()
        transfer = write_full if name == "pwritev" else read_full
        with pytest.raises(OSError, match="no progress"):
            transfer(io, fd, [aligned_block(4096)], 0)
    os.close(fd)


def test_aligned_block() -> None:
    assert is_aligned(aligned_block(8192))
    assert not is_aligned(aligned_block(8192)[1:])
    assert not is_aligned(aligned_block(8191))


def test_directory_and_files_are_private(tmp_path: Path) -> None:
    io = OsIO()
    directory = tmp_path / "a" / "b"
    dir_fd = open_directory(io, directory)
    lock_fd = lock_directory(io, directory, dir_fd)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "lock").stat().st_mode) == 0o600
    assert not os.get_inheritable(dir_fd)
    assert not os.get_inheritable(lock_fd)
    os.close(lock_fd)
    os.close(dir_fd)
    directory.chmod(0o755)
    os.close(open_directory(io, directory))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_directory_that_is_a_link_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(StoreBroken, match="remove it"):
            open_directory(OsIO(), tmp_path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_directory_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(StoreBroken, match="belongs to user 12345"):
        open_directory(OsIO(), tmp_path / "theirs")


def test_lock_names_its_owner_and_dies_with_it(tmp_path: Path) -> None:
    code = (
        "import fcntl, os, sys; fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); fcntl.flock(fd, fcntl.LOCK_EX);"
        "os.write(fd, b'%d' % os.getpid()); print(flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "lock"], stdin=pipe, stdout=pipe) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        dir_fd = open_directory(OsIO(), tmp_path)
        with pytest.raises(StoreLocked, match=f"process {owner.pid}") as caught:
            lock_directory(OsIO(), tmp_path, dir_fd)
        assert caught.value.pid == owner.pid
        owner.kill()
        owner.wait()
        os.close(lock_directory(OsIO(), tmp_path, dir_fd))
        os.close(dir_fd)


def test_full_disk_does_not_keep_the_lock_from_being_taken(tmp_path: Path) -> None:
    io = FaultyIO(0, errno.ENOSPC, forever=True, only=("pwritev",)).as_io()
    dir_fd = open_directory(io, tmp_path)
    os.close(lock_directory(io, tmp_path, dir_fd))
    os.close(dir_fd)
