"""Sections of a page, read alone: the bytes of the page, or a miss."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiers.faults import FaultyIO
from tests.tiers.pages import NAMESPACE, holds, key, meta, open_store, page, read, record, verify
from tests.tiers.test_opening import NoDirectIO
from tierd.tiers.errors import LostReason, PageLost
from tierd.tiers.store import Located, Store
from tierd.tiers.store_io import aligned_block

pytestmark = pytest.mark.usefixtures("no_files_left")

SECTIONS = {"sections": 2, "section_bytes": 4096}
SHAPES = [(8192, 2, 4096), (8192, 8, 1000), (5000, 1, 0), (30_000, 3, 10_000), (40_960, 40, 1024), (600 * 64, 600, 64)]


def located(store: Store, number: int) -> Located:
    found = store.locate(key(number))
    assert found is not None
    return found


def section(store: Store, page: Located, number: int, count: int = 1) -> bytes:
    """The bytes of some sections; the memory around what is read must stay as it is."""
    span_bytes = store.span_bytes(count)
    dest = aligned_block(span_bytes + 4096)
    dest[:] = 0xAA
    start = store.read_section(page, number, dest, count)
    assert (dest[span_bytes:] == 0xAA).all()
    size = store.geometry.section_bytes
    assert start + count * size <= span_bytes
    return dest[start : start + count * size].tobytes()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("record_bytes", "sections", "section_bytes"), SHAPES)
def test_sections_are_the_bytes_of_the_page(
    tmp_path: Path, record_bytes: int, sections: int, section_bytes: int, direct: bool
) -> None:
    changes: dict[str, Any] = {} if direct else {"io": NoDirectIO().as_io()}
    shape = {"record_bytes": record_bytes, "sections": sections, "section_bytes": section_bytes}
    with open_store(tmp_path / "kv", capacity_bytes=1 << 20, **shape, **changes) as store:
        store.write([(meta(number), record(number, 0, record_bytes)) for number in range(3)])
        size = section_bytes or record_bytes
        for number in range(3):
            whole = record(number, 0, record_bytes).tobytes()
            assert read(store, number, record_bytes) == whole
            found = located(store, number)
            for first in {0, sections // 2, sections - 1}:
                assert section(store, found, first) == whole[first * size : (first + 1) * size]
                count = min(3, sections - first)
                assert section(store, found, first, count) == whole[first * size : (first + count) * size]
        assert verify(store, repair=False) == []


def test_sections_outlive_reopening(ram_path: Path) -> None:
    with open_store(ram_path / "kv", **SECTIONS) as store:
        store.write([page(1)])
    with open_store(ram_path / "kv", **SECTIONS) as store:
        assert section(store, located(store, 1), 1) == record(1).tobytes()[4096:]
        figures = store.statistics()
        assert (figures.section_reads, figures.pages_read, figures.bytes_read) == (1, 0, 4096 + 4096)


@pytest.mark.parametrize("other", [{}, {"sections": 4, "section_bytes": 2048}, {"sections": 2, "section_bytes": 4000}])
def test_a_store_with_other_sections_is_set_aside(ram_path: Path, other: dict[str, int]) -> None:
    with open_store(ram_path / "kv", **SECTIONS) as store:
        store.write([page(1)])
    with open_store(ram_path / "kv", **other) as store:
        assert any("another model, page layout" in note for note in store.notes)
        assert list(store.pages()) == []


def test_a_store_of_the_first_format_is_set_aside(ram_path: Path) -> None:
    open_store(ram_path / "kv").close()
    with sqlite3.connect(ram_path / "kv" / "index.sqlite") as connection:
        connection.execute("ALTER TABLE identity DROP COLUMN sections")
        connection.execute("ALTER TABLE identity DROP COLUMN section_bytes")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    (ram_path / "kv" / "slab-00000.pages").write_bytes(bytes(1 << 20))
    with open_store(ram_path / "kv") as store:
        assert any("version 1, this program writes 2" in note for note in store.notes)
        store.write([page(1)])
        assert holds(store, 1)


def test_unknown_pages_are_not_located(ram_path: Path) -> None:
    with open_store(ram_path / "kv", **SECTIONS) as store:
        assert store.locate(key(1)) is None


def test_every_byte_of_a_section_is_checked(ram_path: Path) -> None:
    """A flipped byte loses the sections it is in, and no other."""
    with open_store(ram_path / "kv", record_bytes=6000, sections=3, section_bytes=1800) as store:
        store.write([(meta(1), record(1, 0, 6000))])
        found = located(store, 1)
        fd = os.open(ram_path / "kv" / "slab-00000.pages", os.O_RDWR)
        for at in range(4096, 4096 + 6000, 7):
            right = os.pread(fd, 1, at)
            os.pwrite(fd, bytes([right[0] ^ (1 << at % 8)]), at)
            dest = aligned_block(store.span_bytes(1))
            for number in range(3):
                hit = number == (at - 4096) // 1800
                if hit:
                    with pytest.raises(PageLost, match=f"section {number}"):
                        store._records.read_sections(found, number, 1, dest)
                else:
                    store._records.read_sections(found, number, 1, dest)
            os.pwrite(fd, right, at)
        os.close(fd)
        assert read(store, 1, 6000) == record(1, 0, 6000).tobytes()


def test_a_damaged_section_loses_the_page(ram_path: Path) -> None:
    with open_store(ram_path / "kv", **SECTIONS) as store:
        store.write([page(1), page(2)])
        found = located(store, 1)
        with open(ram_path / "kv" / "slab-00000.pages", "r+b") as file:
            file.seek(found.row.slot * 12288 + 8192)
            file.write(b"wrong")
        assert section(store, found, 0) == record(1).tobytes()[:4096]
        with pytest.raises(PageLost) as caught:
            section(store, found, 1)
        assert caught.value.reason is LostReason.PAYLOAD
        assert store.locate(key(1)) is None
        with pytest.raises(PageLost) as caught:
            section(store, found, 1)
        assert caught.value.reason is LostReason.ABSENT  # and its slot is not blamed twice
        figures = store.statistics()
        assert (figures.quarantined_slots, figures.lost_pages, figures.lost_by_reason) == (1, 1, {"payload": 1})
        assert holds(store, 2)
        assert store.check() == []


def test_a_damaged_header_is_found_by_locate(ram_path: Path) -> None:
    with open_store(ram_path / "kv", **SECTIONS) as store:
        store.write([page(1)])
        with open(ram_path / "kv" / "slab-00000.pages", "r+b") as file:
            file.seek(130)  # in the checksums of the sections
            file.write(b"wrong")
        with pytest.raises(PageLost) as caught:
            store.locate(key(1))
        assert caught.value.reason is LostReason.HEADER
        assert store.locate(key(1)) is None


def test_a_failed_read_of_a_section_is_a_miss(ram_path: Path) -> None:
    io = FaultyIO(0, only=("preadv",))
    io.armed = False
    with open_store(ram_path / "kv", io=io.as_io(), **SECTIONS) as store:
        store.write([page(1)])
        found = located(store, 1)
        io.armed = True
        with pytest.raises(PageLost) as caught:
            section(store, found, 0)
        assert caught.value.reason is LostReason.IO_ERROR
        assert store.statistics().lost_by_reason == {"io_error": 1}


@pytest.mark.parametrize("change", ["removed", "rewritten"])
def test_a_page_that_changed_since_it_was_located(ram_path: Path, change: str) -> None:
    with open_store(ram_path / "kv", **SECTIONS) as store:
        store.write([page(1)])
        found = located(store, 1)
        store.remove([key(1)])
        store.write([page(1, 1) if change == "rewritten" else page(5)])  # in the same slot
        with pytest.raises(PageLost) as caught:
            section(store, found, 0)
        assert caught.value.reason is LostReason.ABSENT
        assert store.statistics().quarantined_slots == 0
        assert holds(store, 1, 1) if change == "rewritten" else holds(store, 5)


def test_a_closed_store_reads_no_section(ram_path: Path) -> None:
    store = open_store(ram_path / "kv", **SECTIONS)
    store.write([page(1)])
    found = located(store, 1)
    store.close()
    for action in (lambda: store.locate(key(1)), lambda: section(store, found, 0)):
        with pytest.raises(PageLost) as caught:
            action()
        assert caught.value.reason is LostReason.STORE_OFF


def test_sections_and_memory_that_are_none(ram_path: Path) -> None:
    with open_store(ram_path / "kv", namespace=NAMESPACE, **SECTIONS) as store:
        store.write([page(1)])
        found = located(store, 1)
        block = aligned_block(8192)
        for number, count in ((-1, 1), (2, 1), (1, 2), (0, 0)):
            with pytest.raises(ValueError, match="sections"):
                store.read_section(found, number, block, count)
        bad: list[Any] = [block[:4095], block[1:], block.reshape(2, -1), block.view(np.int8)]
        for dest in bad:
            with pytest.raises(ValueError, match="dest"):
                store.read_section(found, 0, dest)
