"""Sections that are read when they are asked for: right bytes at the right addresses, or a named loss."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.pages import key, meta, record
from tests.tiers.stand_ins import ManualMover
from tests.tiers.test_staging import PAGES, RECORD_BYTES, SECTION_BYTES, SECTIONS, SlowIO, make_store, wanted
from tierd.tiers import picking
from tierd.tiers.errors import StagingLost
from tierd.tiers.mover import Disturbance, Mover
from tierd.tiers.picking import GROUP_PAGES, Picker
from tierd.tiers.store import Store

pytestmark = pytest.mark.usefixtures("no_files_left")
FAR_S = float("inf")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with make_store(tmp_path) as opened:
        yield opened


@pytest.fixture
def picker(store: Store) -> Iterator[Picker]:
    mover = Mover(1, disk_threads=3, before=Disturbance(3, max_delay_s=0.001))
    yield Picker(store, mover)
    mover.close()


def picked(picker: Picker, numbers: list[int], section: int) -> list[bytes]:
    addresses = picker.read([key(number) for number in numbers], section, FAR_S)
    first = picker.memory.ctypes.data
    assert all(first <= address <= first + picker.memory.nbytes - SECTION_BYTES for address in addresses.tolist())
    return [ctypes.string_at(address, SECTION_BYTES) for address in addresses.tolist()]


def test_any_section_of_any_pages(picker: Picker) -> None:
    for section in (3, 0, SECTIONS - 1, 3):
        for numbers in ([5], [*range(PAGES)], [7, 3], []):
            assert picked(picker, numbers, section) == wanted(numbers, section)
    assert PAGES > 2 * GROUP_PAGES
    picker.release()
    assert picker.memory.nbytes == 0 and picked(picker, [1], 1) == wanted([1], 1)


def test_what_was_read_is_read_once_as_long_as_there_is_room(store: Store) -> None:
    mover = ManualMover(1)
    slot_bytes = -(-SECTION_BYTES // 64) * 64
    picker, span_bytes = Picker(store, mover, max_bytes=6 * slot_bytes), store.span_bytes(1)
    reads = []
    for numbers, section in (([1, 2], 0), ([1, 2], 0), ([2, 1], 1), ([1, 3], 0), ([2], 1), ([9, 8], 5), ([2], 0)):
        before = picker.read_bytes
        assert picked(picker, numbers, section) == wanted(numbers, section)
        reads.append((picker.read_bytes - before) // span_bytes)
    assert reads == [2, 0, 2, 1, 0, 2, 1], "room for six: the last used the longest ago went"
    assert picker.memory.nbytes == 6 * slot_bytes
    assert picked(picker, [*range(9)], 0) == wanted([*range(9)], 0), "one read may need more"
    assert picker.memory.nbytes == 9 * slot_bytes


def test_every_lost_page_is_named(store: Store, picker: Picker) -> None:
    with open(store._parts.directory / "slab-00000.pages", "r+b") as file:
        file.seek(7 * (4096 + RECORD_BYTES) + 4096 + 2 * SECTION_BYTES)
        file.write(b"wrong")
    assert picked(picker, [6, 7], 1) == wanted([6, 7], 1)
    with pytest.raises(StagingLost, match="checksum of section 2") as caught:
        picked(picker, [6, 7, 8], 2)
    assert caught.value.keys == (key(7),) and set(caught.value.bad) == {key(7)}
    with pytest.raises(StagingLost) as caught:
        picked(picker, [6, 77], 2)
    assert caught.value.keys == (key(77),)


def test_pages_that_moved_since(store: Store, picker: Picker) -> None:
    """One written anew elsewhere is found again, one that is gone is lost, and no slot is blamed."""
    assert picked(picker, [1, 2, 3], 4) == wanted([1, 2, 3], 4)
    store.remove([key(1), key(2)])
    store.write([(meta(number), record(number, 0, RECORD_BYTES)) for number in (50, 51, 2)])
    assert picked(picker, [3, 2, 50], 5) == wanted([3, 2, 50], 5)
    with pytest.raises(StagingLost) as caught:
        picked(picker, [1], 5)
    assert caught.value.keys == (key(1),) and store.statistics().quarantined_slots == 0


def test_where_pages_lie_is_not_remembered_without_a_bound(picker: Picker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picking, "MAX_KNOWN", 5)
    for first in range(0, 30, 3):
        numbers = [first, first + 1, first + 2]
        assert picked(picker, numbers, 1) == wanted(numbers, 1)
        assert len(picker._known) <= 8


def test_a_full_queue_is_a_loss(store: Store) -> None:
    picker = Picker(store, ManualMover(1, capacity=1))
    with pytest.raises(StagingLost, match="queue of the disk is full") as caught:
        picker.read([key(number) for number in range(GROUP_PAGES + 2)], 0, FAR_S)
    assert caught.value.keys == (key(GROUP_PAGES), key(GROUP_PAGES + 1))


def test_what_does_not_come_in_time_is_a_loss_and_its_memory_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picking, "CLOSE_WAIT_S", 0.01)
    io = SlowIO()
    with make_store(tmp_path, io=io) as store:
        mover = Mover(1, disk_threads=1)
        picker = Picker(store, mover, clock=lambda: 0.0)
        assert picked(picker, [1], 0) == wanted([1], 0)
        held = picker._target
        io.gate.clear()
        try:
            with pytest.raises(StagingLost, match="not in time") as caught:
                picker.read([key(2)], 0, 0.01)
            assert caught.value.keys == (key(2),) and picker._target is not held
        finally:
            io.gate.set()
            mover.close()
