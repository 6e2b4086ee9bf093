"""One slot on disk: the header that names its page, and the sizes that say where it lies.

A slot is a header of one or more 4096-byte blocks and then the record, padded to a multiple of 4096 bytes. The record
begins with a number of equal sections (one for each layer of a page), each of which can be read and checked alone. The
header says what the record is, its checksum and that of each section; its last 8 bytes are the checksum of the header.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from tierd.tiers.errors import LostReason, PageLost
from tierd.tiers.store_io import ALIGN_BYTES, Bytes

MAGIC = b"tierdkv\0"
FORMAT_VERSION = 2
MAX_PAGE_TOKENS = 1024
FILE_BYTES = 4 << 30
STEP_BYTES = 64 << 20

# magic, version, token count | namespace, key, parent, token digest | slot, generation, payload bytes, section bytes |
# number of sections. The checksums follow, XXH3-64 of the whole record and then of each section: a whole record is
# checked by one call, which lets other threads run meanwhile.
_HEADER = struct.Struct("<8sII16s16s16s16sQQQQI4x")
_CHECKSUM = struct.Struct("<Q")


class SlotHeader(NamedTuple):
    """What a header says. `generation` is unique to one write of one slot."""

    namespace: bytes  # 16
    key: bytes  # 16
    parent: bytes  # 16
    token_digest: bytes  # 16
    token_count: int
    slot: int
    generation: int
    payload_bytes: int
    section_bytes: int
    sections: int
    checksums: tuple[int, ...] = ()  # XXH3-64 of the record, then of each section


def token_digest(tokens_le32: bytes) -> bytes:
    """blake2b-128 of the little-endian token ids."""
    return hashlib.blake2b(tokens_le32, digest_size=16).digest()


def pack_identity(header: SlotHeader) -> bytes:
    """What a header says of its page, without the checksums: the start of the header."""
    return _HEADER.pack(
        MAGIC, FORMAT_VERSION, header.token_count, header.namespace, header.key, header.parent, header.token_digest,
        header.slot, header.generation, header.payload_bytes, header.section_bytes, header.sections,
    )  # fmt: skip


def encode_header(header: SlotHeader, block: Bytes) -> None:
    """Fill a whole header. uint8[header_bytes]"""
    view = block.data
    view[:] = bytes(len(view))
    view[: _HEADER.size] = pack_identity(header)
    struct.pack_into(f"<{len(header.checksums)}Q", view, _HEADER.size, *header.checksums)
    checked = len(view) - _CHECKSUM.size
    _CHECKSUM.pack_into(view, checked, xxhash.xxh3_64_intdigest(view[:checked]))


def check_header(block: Bytes, wanted: SlotHeader) -> tuple[int, ...]:
    """The checksums of a header that says the very same as the wanted one. uint8[header_bytes]. Raises PageLost."""
    view = block.data
    checked = len(view) - _CHECKSUM.size
    if (
        view[: _HEADER.size] != pack_identity(wanted)
        or _CHECKSUM.unpack_from(view, checked)[0] != xxhash.xxh3_64_intdigest(view[:checked])
    ):
        compare_headers(decode_header(block), wanted)  # slower, and finds what is wrong
        raise PageLost(LostReason.HEADER, "bytes that mean nothing")
    return struct.unpack_from(f"<{wanted.sections + 1}Q", view, _HEADER.size)


def decode_header(block: Bytes) -> SlotHeader:
    """Read a header. uint8[header_bytes]. Raises PageLost (HEADER, VERSION) when it is not one of ours, whole."""
    view = block.data
    checked = len(view) - _CHECKSUM.size
    if _CHECKSUM.unpack_from(view, checked)[0] != xxhash.xxh3_64_intdigest(view[:checked]):
        raise PageLost(LostReason.HEADER, "checksum of the header")
    magic, version, count, namespace, key, parent, digest, slot, generation, payload_bytes, section_bytes, sections = (
        _HEADER.unpack_from(view)
    )
    if magic != MAGIC:
        raise PageLost(LostReason.HEADER, "magic")
    if version != FORMAT_VERSION:
        raise PageLost(LostReason.VERSION, f"version {version}")
    if _HEADER.size + (sections + 1) * _CHECKSUM.size > checked:
        raise PageLost(LostReason.HEADER, f"{sections} sections")
    checksums = struct.unpack_from(f"<{sections + 1}Q", view, _HEADER.size)
    return SlotHeader(
        namespace, key, parent, digest, count, slot, generation, payload_bytes, section_bytes, sections, checksums
    )


def compare_headers(found: SlotHeader, wanted: SlotHeader) -> None:
    """Raise PageLost unless the slot holds the very page, written by the very write, that the index names.

    The checksums are not compared: they are what the record is checked against.
    """
    if found.namespace != wanted.namespace:
        raise PageLost(LostReason.NAMESPACE)
    if found.key != wanted.key or found.slot != wanted.slot:
        raise PageLost(LostReason.KEY, f"slot {wanted.slot} holds another page")
    if (found.parent, found.token_digest, found.token_count) != (
        wanted.parent,
        wanted.token_digest,
        wanted.token_count,
    ):
        raise PageLost(LostReason.TOKENS)
    if found.generation != wanted.generation:
        raise PageLost(LostReason.GENERATION, f"{found.generation}, not {wanted.generation}")
    if (found.payload_bytes, found.section_bytes, found.sections) != (
        wanted.payload_bytes,
        wanted.section_bytes,
        wanted.sections,
    ):
        raise PageLost(LostReason.LENGTH, f"{found.payload_bytes} bytes in sections of {found.section_bytes}")


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """Sizes that follow from the record: where each slot and each section lies.

    Args:
        record_bytes: the payload of a slot.
        file_bytes: upper bound of one slab file; few large files keep the number of descriptors small.
        step_bytes: how much a file grows at a time.
        sections: equal parts of the record that can be read alone.
        section_bytes: of each; 0 means the whole record, as one section.

    Raises ValueError for sections that the record can't hold.
    """

    record_bytes: int
    file_bytes: int = FILE_BYTES
    step_bytes: int = STEP_BYTES
    sections: int = 1
    section_bytes: int = 0

    def __post_init__(self) -> None:
        if self.record_bytes < 1:
            raise ValueError(f"a record of {self.record_bytes} bytes")
        if self.sections == 1 and self.section_bytes == 0:
            object.__setattr__(self, "section_bytes", self.record_bytes)
        if self.sections < 1 or not 1 <= self.section_bytes <= self.record_bytes // self.sections:
            raise ValueError(
                f"{self.sections} sections of {self.section_bytes} bytes are no parts of {self.record_bytes} bytes"
            )

    @property
    def header_bytes(self) -> int:
        """Bytes before the record: one block for up to 495 sections."""
        return _align_up(_HEADER.size + (self.sections + 2) * _CHECKSUM.size)

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return self.header_bytes + _align_up(self.record_bytes)

    @property
    def file_slots(self) -> int:
        """Slots of a whole slab file."""
        return max(1, self.file_bytes // self.slot_bytes)

    @property
    def step_slots(self) -> int:
        """Slots that a file grows by."""
        return max(1, self.step_bytes // self.slot_bytes)

    def checksums(self, record: Bytes) -> tuple[int, ...]:
        """XXH3-64 of a record, then of each section. uint8[record_bytes]"""
        view, size, digest = record.data, self.section_bytes, xxhash.xxh3_64_intdigest
        return digest(view), *[digest(view[at : at + size]) for at in range(0, self.sections * size, size)]

    def span_bytes(self, count: int) -> int:
        """Size of an aligned buffer that takes any `count` consecutive sections with the blocks that they lie in."""
        if self.section_bytes % ALIGN_BYTES == 0:
            return count * self.section_bytes
        return _align_up(count * self.section_bytes + ALIGN_BYTES - 1)


def _align_up(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
