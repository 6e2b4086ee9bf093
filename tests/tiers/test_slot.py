"""The header block of a slot."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tierd.tiers.errors import LostReason, PageLost
from tierd.tiers.slot import (
    HEADER_BYTES,
    SlotGeometry,
    SlotHeader,
    compare_headers,
    decode_header,
    encode_header,
    token_digest,
)
from tierd.tiers.store_io import Bytes, aligned_block

HEADER = SlotHeader(b"n" * 16, b"k" * 16, b"p" * 16, token_digest(b"\1\0\0\0"), 1, 7, 1 << 33, 8192, (1 << 64) - 3)


def encoded() -> Bytes:
    block = aligned_block(HEADER_BYTES)
    encode_header(HEADER, block)
    return block


def test_round_trip_overwrites_the_whole_block() -> None:
    block = aligned_block(HEADER_BYTES)
    block[:] = 0xAA
    encode_header(HEADER, block)
    assert decode_header(block) == HEADER
    assert block.tobytes() == encoded().tobytes()


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


def test_layout_on_disk_does_not_change() -> None:
    """The bytes of version 1. If this fails, raise FORMAT_VERSION."""
    block = encoded().tobytes()
    assert block[:16] == b"tierdkv\0" + b"\1\0\0\0" + b"\1\0\0\0"
    assert block[16:64] == b"n" * 16 + b"k" * 16 + b"p" * 16
    assert block[80:88] == (7).to_bytes(8, "little")
    assert block[112:-8] == bytes(HEADER_BYTES - 120)
    assert block[-8:].hex() == "f629afafbeded03f"


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
    ],
)
def test_each_field_is_compared(field: str, value: Any, reason: LostReason) -> None:
    compare_headers(HEADER, HEADER)
    with pytest.raises(PageLost) as caught:
        compare_headers(dataclasses.replace(HEADER, **{field: value}), HEADER)
    assert caught.value.reason is reason


@pytest.mark.parametrize(("record_bytes", "slot_bytes"), [(1, 8192), (4096, 8192), (4097, 12288), (8192, 12288)])
def test_geometry(record_bytes: int, slot_bytes: int) -> None:
    geometry = SlotGeometry(record_bytes, file_bytes=10 * slot_bytes + 1, step_bytes=slot_bytes - 1)
    assert (geometry.slot_bytes, geometry.file_slots, geometry.step_slots) == (slot_bytes, 10, 1)
