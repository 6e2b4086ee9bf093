"""The header block of a slot."""

from __future__ import annotations

from typing import Any

import pytest
import xxhash

from tierd.tiers.errors import LostReason, PageLost
from tierd.tiers.slot import (
    SlotGeometry,
    SlotHeader,
    check_header,
    compare_headers,
    decode_header,
    encode_header,
    token_digest,
)
from tierd.tiers.store_io import Bytes, aligned_block

HEADER_BYTES = 4096
HEADER = SlotHeader(
    b"n" * 16, b"k" * 16, b"p" * 16, token_digest(b"\1\0\0\0"), 1, 7, 1 << 33, 8192, 2730, 3, ((1 << 64) - 3, 5, 6, 9)
)


def encoded(header: SlotHeader = HEADER, header_bytes: int = HEADER_BYTES) -> Bytes:
    block = aligned_block(header_bytes)
    encode_header(header, block)
    return block


def test_round_trip_overwrites_the_whole_block() -> None:
    block = aligned_block(HEADER_BYTES)
    block[:] = 0xAA
    encode_header(HEADER, block)
    assert decode_header(block) == HEADER
    assert block.tobytes() == encoded().tobytes()


@pytest.mark.parametrize(("sections", "blocks"), [(495, 1), (496, 2), (1007, 2), (1008, 3)])
def test_headers_grow_with_their_checksums(sections: int, blocks: int) -> None:
    geometry = SlotGeometry(sections * 4096, sections=sections, section_bytes=4096)
    assert geometry.header_bytes == blocks * 4096
    header = HEADER._replace(section_bytes=4096, sections=sections, checksums=tuple(range(sections + 1)))
    block = encoded(header, geometry.header_bytes)
    assert decode_header(block) == header
    with pytest.raises(PageLost):
        decode_header(block[:-4096] if blocks > 1 else block[:-8])


def test_count_of_sections_beyond_the_block() -> None:
    block = encoded()
    block[112:116] = list((496).to_bytes(4, "little"))  # not by damage, which the checksum finds, but by a wrong writer
    block[-8:] = list(xxhash.xxh3_64_intdigest(block[:-8].tobytes()).to_bytes(8, "little"))
    with pytest.raises(PageLost, match="496 sections"):
        decode_header(block)


def test_every_bit_of_the_block_is_checked() -> None:
    block = encoded()
    for at in range(HEADER_BYTES):
        for bit in range(8):
            block[at] ^= 1 << bit
            with pytest.raises(PageLost) as caught:
                decode_header(block)
            assert caught.value.reason in (LostReason.HEADER, LostReason.VERSION)
            block[at] ^= 1 << bit
    assert decode_header(block) == HEADER


def test_a_header_that_says_the_same_gives_its_checksums() -> None:
    assert check_header(encoded(), HEADER._replace(checksums=())) == HEADER.checksums


@pytest.mark.parametrize(
    ("at", "reason"), [(0, LostReason.HEADER), (8, LostReason.VERSION), (40, LostReason.KEY), (117, LostReason.HEADER)]
)
def test_a_header_that_says_something_else_is_examined(at: int, reason: LostReason) -> None:
    block = encoded()
    block[at] ^= 1
    with pytest.raises(PageLost) as caught:
        check_header(block, HEADER)
    assert caught.value.reason is LostReason.HEADER  # its own checksum
    block[-8:] = list(xxhash.xxh3_64_intdigest(block[:-8].tobytes()).to_bytes(8, "little"))
    with pytest.raises(PageLost) as caught:
        check_header(block, HEADER)
    assert caught.value.reason is reason


def test_layout_on_disk_does_not_change() -> None:
    """The bytes of version 2. If this fails, raise FORMAT_VERSION."""
    block = encoded().tobytes()
    assert block[:16] == b"tierdkv\0" + b"\2\0\0\0" + b"\1\0\0\0"
    assert block[16:64] == b"n" * 16 + b"k" * 16 + b"p" * 16
    assert block[80:88] == (7).to_bytes(8, "little")
    assert block[104:120] == (2730).to_bytes(8, "little") + (3).to_bytes(8, "little")
    assert block[120:152] == b"".join(number.to_bytes(8, "little") for number in HEADER.checksums)
    assert block[152:-8] == bytes(HEADER_BYTES - 160)
    assert block[-8:].hex() == "0fab7d5eecfe5292"


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("namespace", b"N" * 16, LostReason.NAMESPACE),
        ("key", b"K" * 16, LostReason.KEY),
        ("slot", 8, LostReason.KEY),
        ("parent", b"P" * 16, LostReason.TOKENS),
        ("token_digest", b"T" * 16, LostReason.TOKENS),
        ("token_count", 2, LostReason.TOKENS),
        ("generation", 1, LostReason.GENERATION),
        ("payload_bytes", 8191, LostReason.LENGTH),
        ("section_bytes", 2729, LostReason.LENGTH),
        ("sections", 2, LostReason.LENGTH),
    ],
)
def test_each_field_is_compared(field: str, value: Any, reason: LostReason) -> None:
    compare_headers(HEADER, HEADER)
    with pytest.raises(PageLost) as caught:
        compare_headers(HEADER._replace(**{field: value}), HEADER)
    assert caught.value.reason is reason


@pytest.mark.parametrize(("record_bytes", "slot_bytes"), [(1, 8192), (4096, 8192), (4097, 12288), (8192, 12288)])
def test_geometry(record_bytes: int, slot_bytes: int) -> None:
    geometry = SlotGeometry(record_bytes, file_bytes=10 * slot_bytes + 1, step_bytes=slot_bytes - 1)
    assert (geometry.slot_bytes, geometry.file_slots, geometry.step_slots) == (slot_bytes, 10, 1)


def test_sections_of_a_record() -> None:
    geometry = SlotGeometry(10_000, sections=3, section_bytes=3000)
    assert (geometry.header_bytes, geometry.slot_bytes) == (4096, 4096 + 12288)
    record = aligned_block(10_000)
    record[:] = [at % 251 for at in range(10_000)]
    whole, *parts = geometry.checksums(record)
    assert whole == xxhash.xxh3_64_intdigest(record.tobytes())
    assert parts == [xxhash.xxh3_64_intdigest(record[at : at + 3000].tobytes()) for at in (0, 3000, 6000)]
    assert SlotGeometry(9000).section_bytes == 9000


@pytest.mark.parametrize(
    ("section_bytes", "count", "span_bytes"), [(8192, 3, 24576), (3000, 1, 8192), (5000, 2, 16384)]
)
def test_a_span_takes_the_sections_wherever_they_lie(section_bytes: int, count: int, span_bytes: int) -> None:
    geometry = SlotGeometry(section_bytes * 40, sections=40, section_bytes=section_bytes)
    assert geometry.span_bytes(count) == span_bytes
    for first in range(40 - count):
        start = geometry.header_bytes + first * section_bytes
        end = start + count * section_bytes
        assert -(-end // 4096) * 4096 - start // 4096 * 4096 <= span_bytes


@pytest.mark.parametrize(("record_bytes", "sections", "section_bytes"), [(10, 0, 1), (10, 3, 4), (10, 2, 0), (0, 1, 0)])
def test_sections_that_are_none(record_bytes: int, sections: int, section_bytes: int) -> None:
    with pytest.raises(ValueError):
        SlotGeometry(record_bytes, sections=sections, section_bytes=section_bytes)
