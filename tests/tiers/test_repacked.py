"""A store of packed pages, over a codec that keeps every second byte: what is written, and what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.fakes import viewed
from tests.tiers.pages import NAMESPACE, key, meta, record
from tierd.tiers.errors import LostReason, PageLost
from tierd.tiers.gpu import DeviceRow
from tierd.tiers.links import Link
from tierd.tiers.mover import Mover
from tierd.tiers.picking import Picker
from tierd.tiers.repacked import RepackedStore
from tierd.tiers.staging import Staging
from tierd.tiers.store_io import Bytes, aligned_block

LAYERS, LAYER, STORED = 6, 3000, 1500
RECORD, STORED_RECORD = 20_480, 12_288


class EverySecond:
    """`Codec`."""

    layers, layer_bytes, record_bytes = LAYERS, LAYER, RECORD
    stored_layer_bytes, stored_record_bytes = STORED, STORED_RECORD

    def encode(self, page: Bytes, stored: Bytes) -> None:
        stored[: LAYERS * STORED] = page[: LAYERS * LAYER : 2]
        stored[LAYERS * STORED :] = 0

    def decode(self, stored: Bytes, page: Bytes, layers: int) -> None:
        page[: layers * LAYER] = np.repeat(stored[: layers * STORED], 2)


def expected(number: int, version: int = 0) -> Bytes:
    """The layers of a page as they come back."""
    return np.repeat(record(number, version, RECORD)[: LAYERS * LAYER : 2], 2)


@pytest.fixture
def store(ram_path: Path) -> Iterator[RepackedStore]:
    with RepackedStore.open_packed(EverySecond(), ram_path / "kv", namespace=NAMESPACE, capacity_bytes=1 << 20) as made:
        made.write([(meta(number), record(number, 0, RECORD)) for number in range(8)])
        yield made


def test_pages_come_back_as_the_codec_makes_them(store: RepackedStore) -> None:
    dests = [np.full(RECORD, 0xAA, np.uint8) for _ in range(3)]
    assert store.read_many([key(1), key(99), key(2)], dests)[::2] == [None, None]
    for dest, number in ((dests[0], 1), (dests[2], 2)):
        assert (dest[: LAYERS * LAYER] == expected(number)).all()
    assert (dests[1] == 0xAA).all()
    one = np.zeros(RECORD, np.uint8)
    store.read_into(key(5), one)
    assert (one[: LAYERS * LAYER] == expected(5)).all()


def test_the_disk_holds_the_packed_page(store: RepackedStore) -> None:
    statistics = store.statistics()
    assert statistics.slot_bytes < RECORD and statistics.bytes_written == 8 * statistics.slot_bytes
    assert store.capacity_slots == (1 << 20) // statistics.slot_bytes
    assert store.check() == [] and store.verify_pages(-1, 100, False).findings == []


@pytest.mark.parametrize(("first", "count"), [(0, 1), (3, 2), (5, 1), (0, LAYERS)])
def test_sections_are_layers_of_memory(store: RepackedStore, first: int, count: int) -> None:
    found = [page for page in store.locate_many([key(3), key(4)]) if not isinstance(page, PageLost)]
    span_bytes = store.span_bytes(count)
    assert store.section_bytes == LAYER and span_bytes >= count * LAYER
    rows = aligned_block(2 * span_bytes).reshape(2, span_bytes)
    start, lost = store.read_section_many(found, first, rows, count)
    assert lost == [None, None]
    alone = aligned_block(span_bytes)
    assert store.read_section(found[0], first, alone, count) == start
    for line, number in ((rows[0], 3), (rows[1], 4), (alone, 3)):
        wanted = expected(number)[first * LAYER : (first + count) * LAYER]
        assert (line[start : start + count * LAYER] == wanted).all()


def test_steps_stream_and_pick_layers(store: RepackedStore) -> None:
    keys = [key(number) for number in range(8)]
    mover = Mover(1)
    try:
        staging = Staging(store, mover, LAYERS, LAYER, read_bytes=2 * LAYER)
        with staging.open(keys) as flow:
            for layer in range(LAYERS):
                for address, number in zip(flow.section(layer, 1e9), range(8), strict=True):
                    wanted = expected(number)[layer * LAYER : (layer + 1) * LAYER]
                    assert (viewed(DeviceRow(int(address), LAYER)) == wanted).all()
        picker = Picker(store, mover)
        for address, number in zip(picker.read(keys[2:5], 4, 1e9), range(2, 5), strict=True):
            assert (viewed(DeviceRow(int(address), LAYER)) == expected(number)[4 * LAYER : 5 * LAYER]).all()
        read = mover.statistics()[Link.DISK_READ].total_bytes
        stages = -(-LAYERS // 2)
        assert read == 8 * stages * store.geometry.span_bytes(2) + 3 * store.geometry.span_bytes(1)
    finally:
        mover.close()


def test_a_page_of_another_size_is_refused(store: RepackedStore) -> None:
    with pytest.raises(ValueError, match="a page of 4096 bytes"):
        store.write([(meta(1), aligned_block(4096))])


def test_a_damaged_page_is_a_miss(store: RepackedStore, ram_path: Path, broken_books: None) -> None:
    slab = ram_path / "kv" / "slab-00000.pages"
    with slab.open("r+b") as file:
        file.seek(5000)  # in the record of the first slot
        file.write(bytes(4000))
    lost = store.read_many([key(number) for number in range(8)], [np.empty(RECORD, np.uint8) for _ in range(8)])
    reasons = [one.reason for one in lost if one is not None]
    assert reasons == [LostReason.PAYLOAD]
