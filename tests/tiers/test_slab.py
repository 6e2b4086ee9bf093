"""The slab files and the ledger of their slots."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiers.faults import FaultyIO, HookedIO
from tierd.tiers import slab
from tierd.tiers.errors import StoreBroken, StoreFull
from tierd.tiers.slab import Slabs, probe, remove_slabs
from tierd.tiers.slot import SlotGeometry
from tierd.tiers.store_io import OsIO, aligned_block

SLOT = 8192
GEOMETRY = SlotGeometry(4096, file_bytes=8 * SLOT, step_bytes=3 * SLOT)

pytestmark = pytest.mark.usefixtures("no_files_left")


@pytest.fixture
def dir_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def make(dir_fd: int, **changes: Any) -> Slabs:
    arguments: dict[str, Any] = {"capacity_slots": 20, "min_free_bytes": 0, "direct": False}
    return Slabs(changes.pop("io", OsIO()), dir_fd, changes.pop("geometry", GEOMETRY), **{**arguments, **changes})


def test_files_grow_by_steps_up_to_the_capacity(dir_fd: int, tmp_path: Path) -> None:
    slabs = make(dir_fd)
    assert slabs.allocate(1) == [0]
    assert (tmp_path / "slab-00000.pages").stat().st_size == 3 * SLOT
    assert slabs.allocate(19) == list(range(1, 20))
    sizes = [(tmp_path / f"slab-0000{i}.pages").stat().st_size for i in range(3)]
    assert sizes == [8 * SLOT, 8 * SLOT, 4 * SLOT]
    assert slabs.backed_bytes == 20 * SLOT
    with pytest.raises(StoreFull, match="0 of 20 slots"):
        slabs.allocate(1)
    slabs.release([7])
    slabs.quarantine([8])
    assert slabs.allocate(1) == [7]
    assert (slabs.reserved, slabs.quarantined, slabs.free_slots) == (19, 1, 0)
    assert slabs.check() == []
    slabs.close()


def test_reopening_keeps_slots_and_adopts_rows(dir_fd: int) -> None:
    slabs = make(dir_fd)
    slabs.allocate(10)
    block = aligned_block(SLOT)
    block[:] = 7
    slabs.write(9, [block])
    slabs.sync([9])
    slabs.close()
    slabs = make(dir_fd)
    slabs.adopt(np.array([0, 9]))
    got = aligned_block(SLOT)
    assert slabs.read(9, [got]) == SLOT
    assert got.tobytes() == block.tobytes()
    assert slabs.used_slots() == {0, 9}
    assert slabs.allocate(2) == [1, 2]
    assert slabs.check() == []
    assert slabs.notes == []
    slabs.close()


def test_odd_files_are_put_right(dir_fd: int, tmp_path: Path) -> None:
    slabs = make(dir_fd)
    slabs.allocate(20)
    slabs.close()
    os.truncate(tmp_path / "slab-00000.pages", 5 * SLOT - 1)
    os.truncate(tmp_path / "slab-00002.pages", 9 * SLOT)
    (tmp_path / "slab-00001.pages").unlink()
    (tmp_path / "slab-00001.pages").symlink_to("/etc/passwd")
    (tmp_path / "slab-00003.pages").write_bytes(b"x")
    slabs = make(dir_fd)
    assert len(slabs.notes) == 4
    assert slabs.unbacked_ranges() == [(4, 8), (8, 16), (20, 1 << 62)]
    assert not (tmp_path / "slab-00003.pages").exists()
    assert slabs.check() == []
    assert sorted(slabs.allocate(20)) == list(range(20))
    slabs.close()


def test_directory_under_the_name_of_a_file(dir_fd: int, tmp_path: Path) -> None:
    (tmp_path / "slab-00000.pages").mkdir()
    slabs = make(dir_fd)
    assert slabs.allocate(1) == [0]
    assert (tmp_path / "slab-00000.pages.aside").is_dir()
    slabs.close()


def test_smaller_capacity_cuts_and_removes(dir_fd: int, tmp_path: Path) -> None:
    slabs = make(dir_fd)
    slabs.allocate(20)
    slabs.close()
    slabs = make(dir_fd, capacity_slots=6)
    assert slabs.backed_bytes == 6 * SLOT
    assert sorted(os.listdir(tmp_path)) == ["slab-00000.pages"]
    slabs.close()


def test_shrink_gives_the_tails_back(dir_fd: int, tmp_path: Path) -> None:
    slabs = make(dir_fd)
    slabs.mark_used(slabs.allocate(20))
    slabs.release([4, 5, 6, 7, *range(8, 16), 18])
    assert slabs.shrink() == (4 + 8) * SLOT
    assert (tmp_path / "slab-00001.pages").stat().st_size == 0
    assert slabs.check() == []
    assert sorted(slabs.allocate(13)) == [4, 5, 6, 7, *range(8, 16), 18]
    assert slabs.check() == []
    slabs.close()


def test_minimum_of_free_space_is_left(dir_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab, "INDEX_SPARE_BYTES", SLOT)  # which is far more than this disk has

    class SmallDisk(HookedIO):
        def around(self, name: str, call: Any, args: tuple[Any, ...]) -> Any:
            result = call(*args)
            if name != "fstatvfs":
                return result
            fields = list(result)
            fields[1], fields[4] = SLOT, 12  # fragment size and available fragments
            return os.statvfs_result(fields)

    slabs = make(dir_fd, io=SmallDisk().as_io(), min_free_bytes=10 * SLOT)
    assert slabs.allocate(1) == [0]
    assert slabs.backed_bytes == 2 * SLOT  # a smaller step than the usual three
    slabs.close()
    slabs = make(dir_fd, io=SmallDisk().as_io(), min_free_bytes=12 * SLOT)
    with pytest.raises(StoreFull, match="left"):
        slabs.allocate(3)
    assert slabs.grow_refusals == 1
    assert slabs.check() == []
    slabs.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_refused_space(dir_fd: int, code: int) -> None:
    slabs = make(dir_fd, io=FaultyIO(0, code, only=("fallocate",)).as_io())
    assert slabs.allocate(1) == [0]  # one slot where three were refused
    assert slabs.backed_bytes == SLOT
    slabs.close()
    slabs = make(dir_fd, io=FaultyIO(0, code, forever=True, only=("fallocate",)).as_io())
    with pytest.raises(StoreFull, match="refused"):
        slabs.allocate(2)
    assert (slabs.backed_bytes, slabs.free_slots, slabs.reserved) == (SLOT, 20, 0)
    assert slabs.check() == []
    slabs.close()


def test_failed_sync_is_final(dir_fd: int) -> None:
    slabs = make(dir_fd, io=FaultyIO(0, errno.ENOSPC, only=("fdatasync",)).as_io())
    with pytest.raises(StoreBroken, match="not durable"):
        slabs.sync(slabs.allocate(1))
    slabs.close()


def test_check_finds_each_broken_invariant(dir_fd: int, tmp_path: Path) -> None:
    slabs = make(dir_fd)
    slots = slabs.allocate(3)
    slabs.used += 1
    assert any("used" in line for line in slabs.check())
    slabs.used -= 1
    slabs.release(slots[:1])
    slabs._free.append(0)
    assert any("twice" in line for line in slabs.check())
    slabs._free.clear()
    assert any("free list" in line for line in slabs.check())
    slabs._free.append(0)
    assert slabs.check() == []
    os.truncate(tmp_path / "slab-00000.pages", SLOT)
    assert any("long" in line for line in slabs.check())
    with pytest.raises(AssertionError):
        slabs.release([0])
    slabs.close()


@pytest.mark.parametrize("direct", [False, True])
def test_probe(dir_fd: int, tmp_path: Path, direct: bool) -> None:
    try:
        probe(OsIO(), dir_fd, SLOT, direct=direct)
    except OSError as exc:
        assert direct and exc.errno == errno.EINVAL
    assert os.listdir(tmp_path) == []

    class Changing(HookedIO):
        def around(self, name: str, call: Any, args: tuple[Any, ...]) -> Any:
            result = call(*args)
            if name == "preadv":
                args[1][0][3] = 99
            return result

    with pytest.raises(OSError, match="came back changed|Invalid"):
        probe(Changing().as_io(), dir_fd, SLOT, direct=direct)
    assert os.listdir(tmp_path) == []


def test_remove_slabs_leaves_other_files(dir_fd: int, tmp_path: Path) -> None:
    for name in ("slab-00000.pages", "slab-00001.pages", "slab-0.pages", "lock"):
        (tmp_path / name).touch()
    assert remove_slabs(OsIO(), dir_fd) == 2
    assert sorted(os.listdir(tmp_path)) == ["lock", "slab-0.pages"]
