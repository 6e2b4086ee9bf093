"""Reads of many pages at once: the same answers as one by one, whatever is wrong, batches or not."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiers.faults import FaultyIO, HookedIO
from tests.tiers.pages import RECORD_BYTES, SLOT_BYTES, holds, key, open_store, page, record
from tests.tiers.test_opening import NoDirectIO
from tierd.tiers.aio import MAX_BATCH
from tierd.tiers.errors import LostReason, PageLost
from tierd.tiers.store import Located, Store
from tierd.tiers.store_io import Bytes, aligned_block

pytestmark = pytest.mark.usefixtures("no_files_left")

SECTIONS = {"sections": 2, "section_bytes": 4096}


class NoBatchIO(HookedIO):
    """A system that refuses batches."""

    def around(self, name: str, call: Any, args: tuple[Any, ...]) -> Any:
        if name == "preadv_batch":
            raise OSError(errno.EPERM, "Operation not permitted")
        return call(*args)


KINDS = {"batches": HookedIO, "no batches": NoBatchIO, "no O_DIRECT": NoDirectIO}


def rows(count: int, record_bytes: int = RECORD_BYTES) -> Bytes:
    block = aligned_block(count * record_bytes).reshape(count, record_bytes)
    block[:] = 0xAA
    return block


def reasons(found: list[PageLost | None]) -> list[LostReason | None]:
    return [None if lost is None else lost.reason for lost in found]


def spoil(store: Store, number: int, at: int) -> None:
    """Change bytes of a page's slot on the disk."""
    row = store._index.lookup(key(number))
    assert row is not None
    with open(store._parts.directory / f"slab-{row.slot // 8:05d}.pages", "r+b") as file:
        file.seek(row.slot % 8 * SLOT_BYTES + at)
        file.write(b"wrong")


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_several_files(tmp_path: Path, kind: str) -> None:
    io = KINDS[kind]()
    with open_store(tmp_path / "kv", io=io.as_io()) as store:
        store.write([page(number) for number in range(20)])
        numbers = [13, 2, 7, 19, 0, 99, 8]
        block = rows(len(numbers))
        found = store.read_many([key(number) for number in numbers], list(block))
        assert reasons(found) == [None] * 5 + [LostReason.ABSENT, None]
        for number, row in zip(numbers, block, strict=True):
            if number != 99:
                assert row.tobytes() == record(number).tobytes()
        figures = store.statistics()
        assert (figures.pages_read, figures.bytes_read, figures.lost_pages) == (6, 6 * SLOT_BYTES, 0)
        if figures.direct_io:
            assert io.names.count("preadv_batch") == (1 if kind == "no batches" else 3)  # three files
        assert store.read_many([], []) == []


@pytest.mark.parametrize("kind", KINDS)
def test_damage_loses_its_page_alone(tmp_path: Path, kind: str) -> None:
    with open_store(tmp_path / "kv", io=KINDS[kind]().as_io()) as store:
        store.write([page(number) for number in range(6)])
        spoil(store, 1, 100)
        spoil(store, 4, 5000)
        found = store.read_many([key(number) for number in range(6)], list(rows(6)))
        assert reasons(found) == [None, LostReason.HEADER, None, None, LostReason.PAYLOAD, None]
        figures = store.statistics()
        assert (figures.quarantined_slots, figures.lost_by_reason) == (2, {"header": 1, "payload": 1})
        assert [holds(store, number) for number in range(6)] == [True, False, True, True, False, True]
        assert store.check() == []


@pytest.mark.parametrize("kind", KINDS)
def test_sections_of_many_pages(tmp_path: Path, kind: str) -> None:
    with open_store(tmp_path / "kv", io=KINDS[kind]().as_io(), **SECTIONS) as store:
        store.write([page(number) for number in range(12)])
        spoil(store, 3, 8192 + 7)
        numbers = [11, 3, 5]
        located = [where for where in store.locate_many([key(n) for n in numbers]) if isinstance(where, Located)]
        assert [where.row.key for where in located] == [key(n) for n in numbers]
        block = rows(3, store.span_bytes(2))
        start, lost = store.read_section_many(located, 0, block)
        assert (start, reasons(lost)) == (0, [None] * 3)
        for number, row in zip(numbers, block, strict=True):
            assert row[:4096].tobytes() == record(number).tobytes()[:4096]
        assert reasons(store.read_section_many(located, 0, block, 2)[1]) == [None, LostReason.PAYLOAD, None]
        assert block[2].tobytes() == record(5).tobytes()
        assert reasons(store.read_section_many(located, 1, block)[1]) == [None, LostReason.ABSENT, None]


def test_sections_of_more_pages_than_a_batch_takes(tmp_path: Path) -> None:
    count = MAX_BATCH + 3
    with open_store(tmp_path / "kv", capacity_bytes=count * SLOT_BYTES, step_bytes=8 * SLOT_BYTES, **SECTIONS) as store:
        store.write([page(number) for number in range(count)])
        located = [where for where in store.locate_many([key(n) for n in range(count)]) if isinstance(where, Located)]
        block = rows(count, 4096)
        assert store.read_section_many(located, 1, block) == (0, [None] * count)
        for number, row in enumerate(block):
            assert row.tobytes() == record(number).tobytes()[4096:]


def test_locating_many_names_what_is_wrong(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", **SECTIONS) as store:
        store.write([page(number) for number in range(3)])
        spoil(store, 1, 20)
        found = store.locate_many([key(number) for number in (0, 1, 2, 50)])
        assert [isinstance(where, Located) for where in found] == [True, False, True, False]
        lost = [where.reason for where in found if isinstance(where, PageLost)]
        assert lost == [LostReason.HEADER, LostReason.ABSENT]


def test_a_batch_that_fails_is_read_page_by_page(tmp_path: Path) -> None:
    io = FaultyIO(0, only=("preadv_batch",))
    with open_store(tmp_path / "kv", io=io.as_io()) as store:
        store.write([page(number) for number in range(3)])
        for _ in range(2):  # and the next one is a batch again
            assert store.read_many([key(number) for number in range(3)], list(rows(3))) == [None] * 3
        assert io.count == (2 if store.statistics().direct_io else 0)


def test_a_store_that_is_off_loses_all(ram_path: Path) -> None:
    store = open_store(ram_path / "kv", **SECTIONS)
    store.write([page(1)])
    where = store.locate(key(1))
    assert where is not None
    store.close()
    off = [LostReason.STORE_OFF]
    assert reasons(store.read_many([key(1)], list(rows(1)))) == off
    assert [lost.reason for lost in store.locate_many([key(1)]) if isinstance(lost, PageLost)] == off
    assert reasons(store.read_section_many([where], 0, rows(1, 4096))[1]) == off


def test_deleted_files_are_noticed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    store.write([page(1), page(2)])
    shutil.rmtree(tmp_path / "kv")
    assert set(reasons(store.read_many([key(1), key(2)], list(rows(2))))) == {LostReason.STORE_OFF}
    assert "removed" in store.statistics().failure
    store.close()


def test_memory_that_is_none(ram_path: Path) -> None:
    with open_store(ram_path / "kv", **SECTIONS) as store:
        store.write([page(1)])
        where = store.locate(key(1))
        assert where is not None
        with pytest.raises(ValueError, match="dest"):
            store.read_many([key(1)], [np.zeros(5, np.uint8)])
        for dest in (rows(2, 4096), rows(1, 4000), aligned_block(8192)[1:4097].reshape(1, -1)):
            with pytest.raises(ValueError, match="dest"):
                store.read_section_many([where], 0, dest)


def test_unaligned_memory_is_filled_all_the_same(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store:
        store.write([page(1), page(2)])
        block = aligned_block(3 * RECORD_BYTES)[1:]
        dests = [block[:RECORD_BYTES], block[RECORD_BYTES : 2 * RECORD_BYTES]]
        assert store.read_many([key(1), key(2)], dests) == [None, None]
        assert dests[1].tobytes() == record(2).tobytes()


def test_more_pages_than_a_batch_takes(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", capacity_bytes=300 * SLOT_BYTES, file_bytes=400 * SLOT_BYTES) as store:
        store.write([page(number) for number in range(200)])
        block = rows(200)
        assert store.read_many([key(number) for number in range(200)], list(block)) == [None] * 200
        assert all(block[number].tobytes() == record(number).tobytes() for number in range(200))
        assert len(os.listdir(tmp_path / "kv")) == 3 + 2 * os.path.exists(tmp_path / "kv" / "index.sqlite-wal")
