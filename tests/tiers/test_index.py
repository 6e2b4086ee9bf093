"""The index: its rows, and what makes it set aside."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiers.faults import FaultyIO
from tests.tiers.pages import NAMESPACE, key, meta
from tierd.tiers.errors import StoreBroken, StoreFull
from tierd.tiers.index import ASIDE_NAME, INDEX_NAME, Identity, Index, IndexUnusable, PageMeta, Row
from tierd.tiers.opening import set_aside
from tierd.tiers.store_io import OsIO

IDENTITY = Identity(NAMESPACE, 8192, 2, 4096, 8)

pytestmark = pytest.mark.usefixtures("no_files_left")


@pytest.fixture
def dir_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def row(slot: int, number: int, version: int = 0) -> tuple[Row, PageMeta]:
    page = meta(number, version)
    tokens = b"".join(token.to_bytes(4, "little") for token in page.tokens)
    return Row(slot, page.key, page.parent, tokens, 100 + slot), page


def open_index(tmp_path: Path, dir_fd: int, **changes: Any) -> Index:
    return Index.open(changes.pop("io", OsIO()), tmp_path, dir_fd, changes.pop("identity", IDENTITY))


def edit(tmp_path: Path, *statements: str) -> None:
    connection = sqlite3.connect(tmp_path / INDEX_NAME, isolation_level=None)
    for statement in statements:
        connection.execute(statement).fetchall()
    connection.close()


def test_rows_survive_and_openings_are_counted(tmp_path: Path, dir_fd: int) -> None:
    index = open_index(tmp_path, dir_fd)
    assert index.opens == 1
    assert stat.S_IMODE((tmp_path / INDEX_NAME).stat().st_mode) == 0o600
    assert index.add([row(0, 10), row(3, 11)]) == []
    assert stat.S_IMODE((tmp_path / f"{INDEX_NAME}-wal").stat().st_mode) == 0o600
    index.close()
    index = open_index(tmp_path, dir_fd)
    assert index.opens == 2
    assert index.lookup(key(10)) == row(0, 10)[0]
    assert index.lookup(key(12)) is None
    assert index.slots().tolist() == [0, 3]
    assert index.rows_after(-1, 9) == [row(0, 10)[0], row(3, 11)[0]]
    assert list(index.metas()) == [meta(10), meta(11)]
    assert index.check() == []
    index.close()


def test_adding_replaces_and_removing_is_exact(tmp_path: Path, dir_fd: int) -> None:
    index = open_index(tmp_path, dir_fd)
    index.add([row(0, 10), row(1, 11)])
    assert index.add([row(2, 10, 5)]) == [0]
    assert not index.remove_row(row(0, 10)[0])
    assert index.remove([key(11), key(99)]) == [1]
    assert index.remove_row(row(2, 10)[0])
    assert index.slots().tolist() == []
    index.add([row(slot, slot) for slot in range(10)])
    assert index.remove_ranges([(2, 4), (7, 1 << 62)]) == 5
    assert index.slots().tolist() == [0, 1, 4, 5, 6]
    assert index.clear() == [0, 1, 4, 5, 6]
    index.compact()
    assert list(index.metas()) == []
    index.close()


def test_touches_wait_for_the_next_commit(tmp_path: Path, dir_fd: int) -> None:
    index = open_index(tmp_path, dir_fd)
    index.add([row(0, 10)])
    index.touch({key(10): (7, 1.5), key(77): (1, 2.0)})
    assert next(index.metas()).hits == 0
    index.add([row(1, 11)])
    found = next(index.metas())
    assert (found.hits, found.last_use_s) == (7, 1.5)
    index.touch({key(11): (9, 2.5)})
    index.flush_touches()
    index.touch({key(11): (2, 3.5)})
    index.add([row(1, 11, 9)])  # a touch before a rewrite speaks of the page before
    assert [page.hits for page in index.metas()] == [7, 9]
    for hits, last_use_s in ((-1, 0.0), (1 << 62, 0.0), (0, float("nan")), (0, float("inf"))):
        with pytest.raises(ValueError, match="not a count and a time"):
            index.touch({key(10): (hits, last_use_s)})
    index.close()


def test_scan_of_many_chunks(tmp_path: Path, dir_fd: int) -> None:
    index = open_index(tmp_path, dir_fd)
    index.add([row(slot, slot) for slot in range(8192)])
    assert [found.slot for found in index.rows_after(99, 8)] == list(range(100, 108))
    assert [found.key for found in index.metas()] == [key(slot) for slot in range(8192)]
    index.close()


def test_failed_commit_leaves_nothing(tmp_path: Path, dir_fd: int) -> None:
    for code, error in ((errno.ENOSPC, StoreFull), (errno.EIO, StoreBroken)):
        io = FaultyIO(0, code, only=("sql COMMIT",))
        io.armed = False
        index = open_index(tmp_path, dir_fd, io=io.as_io())
        io.armed = True
        with pytest.raises(error):
            index.add([row(0, 10), row(1, 11)])
        assert index.slots().tolist() == []
        assert index.lookup(key(10)) is None
        index.add([row(0, 10)])
        index.clear()
        index.close()


@pytest.mark.parametrize(
    "statement",
    [
        "PRAGMA user_version = 1",
        "UPDATE identity SET namespace = x'00'",
        "UPDATE identity SET record_bytes = 4096",
        "UPDATE identity SET sections = 1",
        "UPDATE identity SET section_bytes = 4095",
        "UPDATE identity SET file_slots = 9",
        "UPDATE identity SET opens = -1",
        "UPDATE identity SET opens = 'many'",
        "DELETE FROM identity",
        "DROP TABLE pages",
        "CREATE TABLE other (x)",
        "CREATE TRIGGER t AFTER UPDATE ON identity BEGIN DELETE FROM pages; END",
        "ALTER TABLE pages ADD COLUMN x",
    ],
)
def test_index_of_another_store_is_unusable(tmp_path: Path, dir_fd: int, statement: str) -> None:
    open_index(tmp_path, dir_fd).close()
    edit(tmp_path, statement)
    with pytest.raises(IndexUnusable):
        open_index(tmp_path, dir_fd)
    set_aside(OsIO(), dir_fd)
    assert (tmp_path / ASIDE_NAME).exists()
    open_index(tmp_path, dir_fd).close()


@pytest.mark.parametrize(
    "assignment",
    [
        "slot = -1",
        "key = x'00'",
        "key = '0123456789abcdef'",
        "parent = x'00'",
        "parent = 3",
        "tokens = x''",
        "tokens = x'000000'",
        "tokens = zeroblob(5000)",
        "tokens = 'abcd'",
        "generation = -1",
        "generation = 'x'",
        "hits = -1",
        "hits = x'00'",
        "last_use_s = 9e999",
        "last_use_s = 'late'",
    ],
)
def test_damaged_rows_are_dropped(tmp_path: Path, dir_fd: int, assignment: str) -> None:
    index = open_index(tmp_path, dir_fd)
    index.add([row(0, 10), row(1, 11)])
    index.close()
    edit(tmp_path, f"UPDATE pages SET {assignment} WHERE slot = 1")
    index = open_index(tmp_path, dir_fd)
    assert list(index.metas()) == [meta(10)]
    index.close()


@pytest.mark.parametrize("content", [b"", b"x", b"SQLite format 3\0" + bytes(84), bytes(8192), os.urandom(8192)])
def test_garbage_is_unusable(tmp_path: Path, dir_fd: int, content: bytes) -> None:
    (tmp_path / INDEX_NAME).write_bytes(content)
    with pytest.raises(IndexUnusable):
        open_index(tmp_path, dir_fd)


def test_links_are_not_followed(tmp_path: Path, dir_fd: int) -> None:
    open_index(tmp_path, dir_fd).close()
    (tmp_path / INDEX_NAME).rename(tmp_path / "elsewhere")
    (tmp_path / INDEX_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IndexUnusable, match="not a file"):
        open_index(tmp_path, dir_fd)
    set_aside(OsIO(), dir_fd)
    open_index(tmp_path, dir_fd).close()
    (tmp_path / f"{INDEX_NAME}-wal").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IndexUnusable, match="not a file"):
        open_index(tmp_path, dir_fd)


def test_one_index_is_kept_aside(tmp_path: Path, dir_fd: int) -> None:
    (tmp_path / f"{INDEX_NAME}-wal").write_bytes(b"old log")
    for content in (b"first", b"second"):
        (tmp_path / INDEX_NAME).write_bytes(content)
        set_aside(OsIO(), dir_fd)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == {ASIDE_NAME: b"second"}


def test_leftover_log_is_not_replayed_into_a_new_index(tmp_path: Path, dir_fd: int) -> None:
    index = open_index(tmp_path, dir_fd)
    index.add([row(0, 10)])
    log = (tmp_path / f"{INDEX_NAME}-wal").read_bytes()
    index.close()
    (tmp_path / INDEX_NAME).unlink()
    (tmp_path / f"{INDEX_NAME}-wal").write_bytes(log)
    index = open_index(tmp_path, dir_fd)
    assert list(index.metas()) == []
    index.close()


def test_flipped_bytes_never_break_the_opening(ram_path: Path) -> None:
    """Any byte of the file: the index opens with rows of the right shape, or is unusable; nothing else."""
    dir_fd = os.open(ram_path, os.O_RDONLY)
    index = open_index(ram_path, dir_fd)
    index.add([row(slot, slot) for slot in range(60)])
    index.close()
    content = (ram_path / INDEX_NAME).read_bytes()
    rng = random.Random(5)
    unusable = 0
    for at in [*range(100), *rng.sample(range(100, len(content)), 400)]:
        damaged = bytearray(content)
        damaged[at] ^= 1 << rng.randrange(8)
        (ram_path / INDEX_NAME).write_bytes(damaged)
        try:
            index = open_index(ram_path, dir_fd)
        except IndexUnusable:
            unusable += 1
        else:
            for found in index.metas():
                assert len(found.key) == len(found.parent) == 16
                assert 1 <= len(found.tokens) <= 1024
            index.close()
        for suffix in ("", "-wal", "-shm", "-journal"):
            (ram_path / f"{INDEX_NAME}{suffix}").unlink(missing_ok=True)
    os.close(dir_fd)
    assert 50 < unusable < 450
