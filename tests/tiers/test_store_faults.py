"""Disks that fail, fill up or go away under a store."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tiers.faults import FaultyIO, ShortIO
from tests.tiers.pages import holds, key, open_store, page, read, verify
from tierd.tiers.errors import LostReason, PageLost, StoreBroken, StoreFull

pytestmark = pytest.mark.usefixtures("no_files_left")


def test_short_and_interrupted_calls_change_nothing(ram_path: Path) -> None:
    with open_store(ram_path / "kv", io=ShortIO(1).as_io()) as store:
        store.write([page(number) for number in range(10)])
        assert all(holds(store, number) for number in range(10))


def test_failed_sync_turns_the_store_off(ram_path: Path) -> None:
    io = FaultyIO(0, only=("fdatasync",))
    io.armed = False
    with open_store(ram_path / "kv", io=io.as_io()) as store:
        store.write([page(1)])
        io.armed = True
        with pytest.raises(StoreBroken, match="fdatasync failed"):
            store.write([page(2)])
        for action in (
            lambda: store.write([page(2)]),
            lambda: store.remove([key(1)]),
            store.clear,
            store.gc,
            store.check,
            lambda: verify(store, repair=True),
            lambda: list(store.pages()),
        ):
            with pytest.raises(StoreBroken, match="fdatasync failed"):
                action()
        assert isinstance(lost := read(store, 1), PageLost)
        assert lost.reason is LostReason.STORE_OFF
        assert "fdatasync" in store.statistics().failure
    with open_store(ram_path / "kv") as store:
        assert holds(store, 1)
        assert not holds(store, 2)


def test_failed_read_is_a_miss_and_the_slot_is_set_aside(ram_path: Path) -> None:
    io = FaultyIO(0, only=("preadv",))
    io.armed = False
    with open_store(ram_path / "kv", io=io.as_io()) as store:
        store.write([page(1), page(2)])
        io.armed = True
        assert isinstance(lost := read(store, 1), PageLost)
        assert lost.reason is LostReason.IO_ERROR
        assert holds(store, 2)
        assert store.statistics().quarantined_slots == 1
        assert store.check() == []


def test_miss_on_a_full_disk_stays_a_miss(ram_path: Path) -> None:
    """The row can't be removed for want of space: the page is a miss each time, and the store goes on."""
    io = FaultyIO(0, errno.ENOSPC, forever=True, only=("sql BEGIN",))
    io.armed = False
    with open_store(ram_path / "kv", io=io.as_io()) as store:
        store.write([page(1), page(2)])
        with open(ram_path / "kv" / "slab-00000.pages", "r+b") as file:
            file.write(b"wrong")
        io.armed = True
        for _ in range(2):
            assert isinstance(lost := read(store, 1), PageLost)
            assert lost.reason is LostReason.HEADER
        assert holds(store, 2)
        with pytest.raises(StoreFull):
            store.write([page(3)])
        io.armed = False
        store.write([page(3)])
        assert store.check() == []


@pytest.mark.parametrize("replaced_by", ["nothing", "link", "new directory"])
def test_directory_removed_under_a_running_store(ram_path: Path, replaced_by: str) -> None:
    directory = ram_path / "kv"
    store = open_store(directory)
    store.write([page(1)])
    shutil.rmtree(directory)
    if replaced_by == "link":
        directory.symlink_to(ram_path)
    elif replaced_by == "new directory":
        open_store(directory).close()
    assert isinstance(read(store, 1), PageLost)
    for action in (lambda: store.write([page(2)]), lambda: store.remove([key(1)]), store.gc):
        with pytest.raises(StoreBroken, match="removed"):
            action()
    store.close()
    if replaced_by == "link":
        with pytest.raises(StoreBroken, match="is a link"):
            open_store(directory)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_room_is_asked_for_by_taking_it(ram_path: Path, code: int) -> None:
    io = FaultyIO(0, code, forever=True, only=("fallocate",))
    io.armed = False
    with open_store(ram_path / "kv", io=io.as_io()) as store:
        store.write([page(1)])
        before = sorted(path.name for path in (ram_path / "kv").iterdir())
        store.require_room()
        io.armed = True
        with pytest.raises(StoreFull):
            store.require_room()
        io.armed = False
        store.require_room()
        assert holds(store, 1) and store.check() == []
        assert sorted(path.name for path in (ram_path / "kv").iterdir()) == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_filled_by_others_while_running(ram_path: Path, code: int) -> None:
    """Nothing more fits; what is there is read and can make way for new pages, and the figures say what happened."""
    io = FaultyIO(0, code, forever=True, only=("fallocate",))
    io.armed = False
    with open_store(ram_path / "kv", io=io.as_io()) as store:
        store.write([page(number) for number in range(3)])
        io.armed = True
        with pytest.raises(StoreFull):
            store.write([page(10)])
        figures = store.statistics()
        assert (figures.grow_refusals, figures.failure, figures.pages_written) == (1, "", 3)
        assert figures.bytes_written == 3 * figures.slot_bytes
        assert all(holds(store, number) for number in range(3))
        store.remove([key(0)])
        store.write([page(10)])
        assert holds(store, 10)
        io.armed = False
        store.write([page(11)])
        assert store.check() == []


def test_directory_removed_in_the_middle_of_a_write(ram_path: Path) -> None:
    store = open_store(ram_path / "kv")
    sync = store._slabs.sync

    def sync_and_remove(slots: list[int]) -> None:
        sync(slots)
        shutil.rmtree(ram_path / "kv")

    store._slabs.sync = sync_and_remove  # type: ignore[method-assign,assignment]
    with pytest.raises(StoreBroken):
        store.write([page(1)])
    store.close()


def test_interrupt_in_the_middle_of_a_write(ram_path: Path) -> None:
    store = open_store(ram_path / "kv")

    def interrupt(_slots: list[int]) -> None:
        raise KeyboardInterrupt

    store._slabs.sync = interrupt  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        store.write([page(1)])
    with pytest.raises(StoreBroken, match="KeyboardInterrupt"):
        store.write([page(1)])
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_real_full_disk(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", mount], check=True)
    try:
        with open_store(mount / "kv", capacity_bytes=64 << 20, step_bytes=1 << 20, file_bytes=32 << 20) as store:
            written = 0
            with pytest.raises(StoreFull):
                for written in range(10_000):
                    store.write([page(written)])
            assert written > 100
            assert store.statistics().grow_refusals == 1
            assert all(holds(store, number) for number in range(written))
            store.remove([key(number) for number in range(10)])  # the index has kept room for this
            store.write([page(20_000)])
            ballast = mount / "ballast"
            with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            with contextlib.suppress(StoreFull):  # now somebody else took the rest: full, and nothing worse
                for number in range(30_000, 31_000):
                    store.write([page(number)])
            assert number < 30_100
            assert holds(store, 20_000)
            assert all(holds(store, number) for number in range(10, written))
            assert store.check() == []
        with pytest.raises(StoreBroken, match="make room"):  # not a byte for the log of the index
            ballast.write_bytes(bytes(os.statvfs(mount).f_bavail * 4096 + ballast.stat().st_size))
            open_store(mount / "kv", capacity_bytes=64 << 20, step_bytes=1 << 20, file_bytes=32 << 20)
        ballast.unlink()
        with open_store(mount / "kv", capacity_bytes=64 << 20, step_bytes=1 << 20, file_bytes=32 << 20) as store:
            assert all(holds(store, number) for number in range(10, written))
        subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
        with pytest.raises(StoreBroken, match="Read-only"):
            open_store(mount / "kv")
    finally:
        subprocess.run(["umount", mount], check=True)


def test_read_only_directory(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere; the read-only mount is in test_real_full_disk")
    tmp_path.chmod(0o500)
    with pytest.raises(StoreBroken, match="writable"):
        open_store(tmp_path / "kv")
    tmp_path.chmod(0o700)
