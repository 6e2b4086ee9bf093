"""Opening: the probe of the disk, the time it takes, and what is left when it fails."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiers.faults import FaultyIO, HookedIO
from tests.tiers.pages import SLOT_BYTES, holds, open_store, page
from tierd.tiers.errors import StoreBroken

pytestmark = pytest.mark.usefixtures("no_files_left")


class NoDirectIO(HookedIO):
    """A file system without O_DIRECT."""

    def around(self, name: str, call: Any, args: tuple[Any, ...]) -> Any:
        if name == "open" and args[1] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return call(*args)


def test_plain_fallback_reads_what_direct_wrote_and_back(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store:
        store.write([page(1)])
    with open_store(tmp_path / "kv", io=NoDirectIO().as_io()) as store:
        assert not store.statistics().direct_io
        assert any("page cache" in note for note in store.notes)
        assert holds(store, 1)
        store.write([page(2)])
    with open_store(tmp_path / "kv") as store:
        assert holds(store, 1)
        assert holds(store, 2)


def test_disk_that_changes_bytes_is_refused(ram_path: Path) -> None:
    class Changing(HookedIO):
        def around(self, name: str, call: Any, args: tuple[Any, ...]) -> Any:
            moved = call(*args)
            if name == "preadv":
                args[1][0][5] ^= 1
            return moved

    with pytest.raises(StoreBroken, match="came back changed"):
        open_store(ram_path / "kv", io=Changing().as_io())


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_directory_that_cannot_be_written_is_told_with_what_to_do(ram_path: Path, code: int) -> None:
    with open_store(ram_path / "kv"):
        pass
    for name in ("open", "pwritev"):
        io = FaultyIO(0, code, forever=True, only=(name,))
        with pytest.raises(StoreBroken, match="make it writable, or give another place with --cache-dir"):
            open_store(ram_path / "kv", io=io.as_io())


def test_full_disk_leaves_the_probe_out(ram_path: Path) -> None:
    with open_store(ram_path / "kv") as store:
        store.write([page(1)])
    io = FaultyIO(0, errno.ENOSPC, forever=True, only=("pwritev",))
    with open_store(ram_path / "kv", io=io.as_io()) as store:
        assert any("left out" in note for note in store.notes)
        assert holds(store, 1)


def test_opening_reads_no_page(ram_path: Path) -> None:
    with open_store(ram_path / "kv") as store:
        store.write([page(number) for number in range(20)])
    io = HookedIO()
    with open_store(ram_path / "kv", io=io.as_io()) as store:
        assert len(list(store.pages())) == 20
    assert io.names.count("preadv") == 1  # the probe


def test_a_hundred_thousand_pages_open_at_once(ram_path: Path) -> None:
    """A million take ten times as long; the figure to hold is 5 s for them."""
    rows = 100_000

    class Sparse(HookedIO):
        def around(self, name: str, call: Any, args: tuple[Any, ...]) -> Any:
            return os.ftruncate(args[0], args[1] + args[2]) if name == "fallocate" else call(*args)

    sizes = {"capacity_bytes": rows * SLOT_BYTES, "file_bytes": 4 << 30, "step_bytes": 4 << 30}
    with open_store(ram_path / "kv", io=Sparse().as_io(), **sizes) as store:
        store._slabs.release(store._slabs.allocate(rows))
    with sqlite3.connect(ram_path / "kv" / "index.sqlite") as connection:
        values = ((slot, os.urandom(16), bytes(16), bytes(64), slot, 0, 0.0) for slot in range(rows))
        connection.executemany("INSERT INTO pages VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    connection.close()
    start = time.perf_counter()
    with open_store(ram_path / "kv", **sizes) as store:
        took_s = time.perf_counter() - start
        assert store.statistics().used_slots == rows
    assert took_s < 2.0  # 0.2 s on an idle machine
