"""Records in and out of slots: the header goes before each write, and every read is checked against the index."""

from __future__ import annotations

from collections import deque

import numpy as np
import xxhash

from tierd.tiers.errors import LostReason, PageLost
from tierd.tiers.index import PageMeta, Row, check_usage
from tierd.tiers.keys import KEY_BYTES, TOKEN_BYTES, pack_tokens
from tierd.tiers.slab import Slabs
from tierd.tiers.slot import (
    HEADER_BYTES,
    MAX_PAGE_TOKENS,
    SlotHeader,
    compare_headers,
    decode_header,
    encode_header,
    token_digest,
)
from tierd.tiers.store_io import Buffer, Bytes, aligned_block, is_aligned

MAX_SCRATCH = 16  # scratch slots kept for the next transfer: one for each thread that is at it


class Records:
    """Writes and reads records of one namespace.

    Notes:
        `read` may run in any number of threads; each takes a scratch slot of its own.
    """

    def __init__(self, slabs: Slabs, namespace: bytes) -> None:
        self.record_bytes = slabs.geometry.record_bytes
        self._slabs = slabs
        self._namespace = namespace
        # The header block, and behind it room for a record that O_DIRECT can't take where it lies.
        self._scratch: deque[Bytes] = deque(maxlen=MAX_SCRATCH)

    def write(self, row: Row, record: Bytes) -> None:
        """Write header and record with one call. Durable after the slabs' sync. Raises OSError."""
        header = self._expected(row, xxhash.xxh3_64_intdigest(record.data))
        scratch = self._take_scratch()
        encode_header(header, scratch[:HEADER_BYTES])
        if self._fits(record):
            self._slabs.write(row.slot, [scratch[:HEADER_BYTES], record])
        else:
            scratch[HEADER_BYTES : HEADER_BYTES + self.record_bytes] = record
            scratch[HEADER_BYTES + self.record_bytes :] = 0
            self._slabs.write(row.slot, [scratch])
        self._scratch.append(scratch)

    def read(self, row: Row, dest: Bytes) -> PageLost | None:
        """Read the record of a row into dest and check everything; what is wrong with it, or None when it is right."""
        scratch = self._take_scratch()
        try:
            self._read(row, dest, scratch)
        except PageLost as lost:
            return lost
        except OSError as exc:
            return PageLost(LostReason.IO_ERROR, exc.strerror or str(exc))
        finally:
            self._scratch.append(scratch)
        return None

    def _read(self, row: Row, dest: Bytes, scratch: Bytes) -> None:
        block = scratch[:HEADER_BYTES]
        if self._fits(dest):
            wanted = HEADER_BYTES + self.record_bytes
            got = self._slabs.read(row.slot, [block, dest])
        else:
            wanted = len(scratch)
            got = self._slabs.read(row.slot, [scratch])
            dest[:] = scratch[HEADER_BYTES : HEADER_BYTES + self.record_bytes]
        if got < wanted:
            raise PageLost(LostReason.SHORT, f"{got} of {wanted} bytes")
        header = decode_header(block)
        compare_headers(header, self._expected(row, header.payload_xxh3))
        if xxhash.xxh3_64_intdigest(dest.data) != header.payload_xxh3:
            raise PageLost(LostReason.PAYLOAD, "checksum of the record")

    def _expected(self, row: Row, payload_xxh3: int) -> SlotHeader:
        return SlotHeader(
            namespace=self._namespace,
            key=row.key,
            parent=row.parent,
            token_digest=token_digest(row.tokens),
            token_count=len(row.tokens) // TOKEN_BYTES,
            slot=row.slot,
            generation=row.generation,
            payload_bytes=self.record_bytes,
            payload_xxh3=payload_xxh3,
        )

    def _fits(self, record: Bytes) -> bool:
        """True when the record can be transferred where it lies."""
        return not self._slabs.direct or is_aligned(record)

    def _take_scratch(self) -> Bytes:
        try:
            return self._scratch.pop()
        except IndexError:
            return aligned_block(self._slabs.geometry.slot_bytes)


def pack_page(meta: PageMeta, record: Buffer, record_bytes: int) -> tuple[PageMeta, bytes, Bytes]:
    """A page with its tokens and its record as they go to disk. Raises ValueError for one that can't be stored."""
    if len(meta.key) != KEY_BYTES or len(meta.parent) != KEY_BYTES:
        raise ValueError(f"keys are {KEY_BYTES} bytes")
    if not 1 <= len(meta.tokens) <= MAX_PAGE_TOKENS:
        raise ValueError(f"a page of {len(meta.tokens)} tokens")
    check_usage(meta.hits, meta.last_use_s)
    tokens = pack_tokens(meta.tokens)
    view: Bytes = np.frombuffer(record, dtype=np.uint8)
    if len(view) != record_bytes:
        raise ValueError(f"a record of {len(view)} bytes, not {record_bytes}")
    return meta, tokens, view
