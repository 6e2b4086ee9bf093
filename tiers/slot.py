"""One slot on disk: the header block that names its page, and the sizes that say where it lies.

A slot is one 4096-byte header block and then the record, padded to a multiple of 4096 bytes. The header says what the
record is and the checksum of its bytes; the last 8 bytes of the block are the checksum of the block itself.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import xxhash

from tierd.tiers.errors import LostReason, PageLost
from tierd.tiers.store_io import ALIGN_BYTES, Bytes

MAGIC = b"tierdkv\0"
FORMAT_VERSION = 1
HEADER_BYTES = 4096
MAX_PAGE_TOKENS = 1024
FILE_BYTES = 4 << 30
STEP_BYTES = 64 << 20

# magic, version, token count | namespace, key, parent, token digest | slot, generation, payload bytes, payload XXH3-64
_HEADER = struct.Struct("<8sII16s16s16s16sQQQQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a header block says. `generation` is unique to one write of one slot."""

    namespace: bytes  # 16
    key: bytes  # 16
    parent: bytes  # 16
    token_digest: bytes  # 16
    token_count: int
    slot: int
    generation: int
    payload_bytes: int
    payload_xxh3: int


def token_digest(tokens_le32: bytes) -> bytes:
    """blake2b-128 of the little-endian token ids."""
    return hashlib.blake2b(tokens_le32, digest_size=16).digest()


def encode_header(header: SlotHeader, block: Bytes) -> None:
    """Fill a whole header block. uint8[4096]"""
    view = block.data
    view[:] = bytes(HEADER_BYTES)
    _HEADER.pack_into(
        view, 0, MAGIC, FORMAT_VERSION, header.token_count, header.namespace, header.key, header.parent,
        header.token_digest, header.slot, header.generation, header.payload_bytes, header.payload_xxh3,
    )  # fmt: skip
    _CHECKSUM.pack_into(view, _CHECKED_BYTES, xxhash.xxh3_64_intdigest(view[:_CHECKED_BYTES]))


def decode_header(block: Bytes) -> SlotHeader:
    """Read a header block. Raises PageLost (HEADER, VERSION) when it is not one of ours, whole."""
    view = block.data
    if _CHECKSUM.unpack_from(view, _CHECKED_BYTES)[0] != xxhash.xxh3_64_intdigest(view[:_CHECKED_BYTES]):
        raise PageLost(LostReason.HEADER, "checksum of the header")
    magic, version, count, namespace, key, parent, digest, *numbers = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise PageLost(LostReason.HEADER, "magic")
    if version != FORMAT_VERSION:
        raise PageLost(LostReason.VERSION, f"version {version}")
    return SlotHeader(namespace, key, parent, digest, count, *numbers)


def compare_headers(found: SlotHeader, wanted: SlotHeader) -> None:
    """Raise PageLost unless the slot holds the very page, written by the very write, that the index names.

    The payload's checksum is not compared: it is what the record is checked against.
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
    if found.payload_bytes != wanted.payload_bytes:
        raise PageLost(LostReason.LENGTH, f"{found.payload_bytes} bytes")


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """Sizes that follow from the record: where each slot lies.

    Args:
        record_bytes: the payload of a slot.
        file_bytes: upper bound of one slab file; few large files keep the number of descriptors small.
        step_bytes: how much a file grows at a time.
    """

    record_bytes: int
    file_bytes: int = FILE_BYTES
    step_bytes: int = STEP_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return HEADER_BYTES + -(-self.record_bytes // ALIGN_BYTES) * ALIGN_BYTES

    @property
    def file_slots(self) -> int:
        """Slots of a whole slab file."""
        return max(1, self.file_bytes // self.slot_bytes)

    @property
    def step_slots(self) -> int:
        """Slots that a file grows by."""
        return max(1, self.step_bytes // self.slot_bytes)
