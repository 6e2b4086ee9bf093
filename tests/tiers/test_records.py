"""Records in and out of slots; the checks themselves are in test_store_damage.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.pages import NAMESPACE, RECORD_BYTES, meta, record
from tierd.tiers.errors import LostReason, PageLost
from tierd.tiers.index import Row
from tierd.tiers.records import Records, pack_page
from tierd.tiers.slab import Slabs
from tierd.tiers.slot import SlotGeometry
from tierd.tiers.store_io import OsIO, aligned_block


@pytest.fixture
def slabs(tmp_path: Path) -> Iterator[Slabs]:
    dir_fd = os.open(tmp_path, os.O_RDONLY)
    geometry = SlotGeometry(RECORD_BYTES)
    opened = Slabs(OsIO(), dir_fd, geometry, capacity_slots=4, min_free_bytes=0, direct=False)
    yield opened
    opened.close()
    os.close(dir_fd)


def test_a_record_belongs_to_its_namespace_and_row(slabs: Slabs) -> None:
    slabs.allocate(2)
    page, tokens, data = pack_page(meta(3), record(3), RECORD_BYTES)
    row = Row(1, page.key, page.parent, tokens, 9)
    Records(slabs, NAMESPACE).write(row, data)
    dest = aligned_block(RECORD_BYTES)
    Records(slabs, NAMESPACE).read(row, dest)
    assert dest.tobytes() == data.tobytes()
    for namespace, wanted, reason in (
        (b"another model 1x", row, LostReason.NAMESPACE),
        (NAMESPACE, row._replace(generation=8), LostReason.GENERATION),
        (NAMESPACE, row._replace(slot=0), LostReason.HEADER),
        (NAMESPACE, row._replace(slot=3), LostReason.SHORT if slabs.backed_bytes < 4 * 12288 else LostReason.HEADER),
    ):
        with pytest.raises(PageLost) as caught:
            Records(slabs, namespace).read(wanted, dest)
        assert caught.value.reason is reason


def test_tokens_are_packed_little_endian() -> None:
    _, tokens, data = pack_page(meta(1), record(1).data, RECORD_BYTES)
    assert tokens == b"\1\0\0\0\2\0\0\0"
    assert data.tobytes() == record(1).tobytes()
