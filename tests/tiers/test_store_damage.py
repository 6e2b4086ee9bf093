"""Slots, files and rows that changed behind the store's back: always a miss, never wrong bytes."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.pages import RECORD_BYTES, SLOT_BYTES, holds, key, open_store, page, read, verify
from tierd.tiers.errors import LostReason, PageLost, StoreBroken, StoreFull
from tierd.tiers.store import Store
from tierd.tiers.store_io import aligned_block

pytestmark = pytest.mark.usefixtures("no_files_left")


def test_every_byte_of_a_slot(store: Store) -> None:
    """Each byte of header and record flipped: always a miss, never wrong bytes, and the slot is not used again."""
    store.write([page(1)])
    slab = store._parts.directory / "slab-00000.pages"
    fd = os.open(slab, os.O_RDWR)
    row = store._index.lookup(key(1))
    assert row is not None
    base = row.slot * SLOT_BYTES
    dest = aligned_block(RECORD_BYTES)
    for at in range(SLOT_BYTES):
        right = os.pread(fd, 1, base + at)
        os.pwrite(fd, bytes([right[0] ^ (1 << at % 8)]), base + at)
        with pytest.raises(PageLost):
            store._records.read(row, dest)
            pytest.fail(f"byte {at} is not checked")
        os.pwrite(fd, right, base + at)
    assert holds(store, 1)
    os.pwrite(fd, b"\xff\x00", base + 5000)
    os.close(fd)
    lost = read(store, 1)
    assert isinstance(lost, PageLost)
    assert lost.reason is LostReason.PAYLOAD
    assert isinstance(again := read(store, 1), PageLost)
    assert again.reason is LostReason.ABSENT
    figures = store.statistics()
    assert (figures.quarantined_slots, figures.lost_pages, figures.free_slots) == (1, 1, 31)
    store.write([page(number) for number in range(10, 41)])
    with pytest.raises(StoreFull):
        store.write([page(50)])
    assert all(holds(store, number) for number in range(10, 41))


def test_truncation_at_every_sector(ram_path: Path) -> None:
    with open_store(ram_path / "kv") as store:
        store.write([page(number) for number in range(3)])
    slab = ram_path / "kv" / "slab-00000.pages"
    whole = slab.read_bytes()
    index = (ram_path / "kv" / "index.sqlite").read_bytes()
    for size in range(0, len(whole), 512):
        slab.write_bytes(whole[:size])
        (ram_path / "kv" / "index.sqlite").write_bytes(index)
        with open_store(ram_path / "kv") as store:
            assert [holds(store, number) for number in range(3)] == [size >= (n + 1) * SLOT_BYTES for n in range(3)]
            assert store.check() == []


def test_truncated_while_open_and_extended(store: Store) -> None:
    store.write([page(number) for number in range(3)])
    slab = store._parts.directory / "slab-00000.pages"
    size = slab.stat().st_size
    os.truncate(slab, 2 * SLOT_BYTES + 4096)
    assert isinstance(lost := read(store, 2), PageLost)
    assert lost.reason is LostReason.SHORT
    os.truncate(slab, size + 10 * SLOT_BYTES)
    assert holds(store, 0)
    assert holds(store, 1)
    os.truncate(slab, size)


@pytest.mark.parametrize("reopen", [False, True])
def test_swapped_slots_and_stale_copies(ram_path: Path, reopen: bool) -> None:
    store = open_store(ram_path / "kv")
    store.write([page(1)])
    slab = ram_path / "kv" / "slab-00000.pages"
    stale = slab.read_bytes()[:SLOT_BYTES]
    store.write([page(2), page(3)])
    store.write([page(1, 1)])  # in slot 3; slot 0 is free again
    store.write([page(1, 2)])  # in slot 0 once more
    if reopen:
        store.close()
    with open(slab, "r+b") as file:
        file.write(stale)
        second, third = (os.pread(file.fileno(), SLOT_BYTES, slot * SLOT_BYTES) for slot in (1, 2))
        os.pwrite(file.fileno(), third + second, SLOT_BYTES)
    if reopen:
        store = open_store(ram_path / "kv")
    reasons = [lost.reason for number in (1, 2, 3) if isinstance(lost := read(store, number), PageLost)]
    assert reasons == [LostReason.GENERATION, LostReason.KEY, LostReason.KEY]
    store.close()


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("UPDATE pages SET parent = zeroblob(16)", LostReason.TOKENS),
        ("UPDATE pages SET tokens = x'01000000'", LostReason.TOKENS),
        ("UPDATE pages SET tokens = CAST(tokens || x'01000000' AS BLOB)", LostReason.TOKENS),
        ("UPDATE pages SET generation = generation + 1", LostReason.GENERATION),
        ("UPDATE pages SET slot = slot + 1", LostReason.HEADER),
        ("UPDATE pages SET slot = slot + 50", LostReason.ABSENT),
        ("UPDATE pages SET key = zeroblob(16)", LostReason.ABSENT),
    ],
)
def test_wrong_rows_are_misses(ram_path: Path, sql: str, reason: LostReason) -> None:
    with open_store(ram_path / "kv") as store:
        store.write([page(7)])
    with sqlite3.connect(ram_path / "kv" / "index.sqlite") as connection:
        connection.execute(sql)
    connection.close()
    with open_store(ram_path / "kv") as store:
        assert isinstance(lost := read(store, 7), PageLost)
        assert lost.reason is reason
        assert store.check() == []


def test_verify_finds_and_repairs(store: Store) -> None:
    store.write([page(number) for number in range(6)])
    with open(store._parts.directory / "slab-00000.pages", "r+b") as file:
        for slot in (1, 4):
            file.seek(slot * SLOT_BYTES + 4096)
            file.write(b"wrong")
    findings = verify(store, repair=False)
    assert len(findings) == 2
    assert store.statistics().used_slots == 6
    assert all("removed" in line for line in verify(store, repair=True))
    assert verify(store, repair=True) == []
    assert len(list(store.pages())) == 4


def test_check_finds_a_row_without_a_slot(store: Store) -> None:
    store.write([page(1)])
    row = store._index.lookup(key(1))
    assert row is not None
    store._slabs.quarantine([row.slot])
    assert any("rows" in line for line in store.check())
    store._index.remove([key(1)])
    store._slabs.allocate(1)
    assert any("reserved" in line for line in store.check())
    store._slabs.release(np.flatnonzero(store._slabs._state == 1).tolist())


def test_damaged_lookup_turns_off_and_starts_afresh(ram_path: Path) -> None:
    store = open_store(ram_path / "kv")
    store.write([page(1)])
    damage = sqlite3.DatabaseError("malformed")
    damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT

    def stumble(_key: bytes) -> None:
        raise StoreBroken("the index failed") from damage

    store._index.lookup = stumble  # type: ignore[method-assign,assignment]
    assert isinstance(lost := read(store, 1), PageLost)
    assert lost.reason is LostReason.STORE_OFF
    with pytest.raises(StoreBroken, match="on again when the model is loaded anew"):
        store.write([page(2)])
    store.close()
    with open_store(ram_path / "kv") as store:
        assert list(store.pages()) == []
        assert any("no index" in note for note in store.notes)
