"""Records in and out of slots: the header goes before each write, and every read is checked against the index."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from tierd.tiers.errors import LostReason, PageLost
from tierd.tiers.index import PageMeta, Row, check_usage
from tierd.tiers.keys import KEY_BYTES, TOKEN_BYTES, pack_tokens
from tierd.tiers.slab import Slabs
from tierd.tiers.slot import MAX_PAGE_TOKENS, SlotHeader, check_header, encode_header, token_digest
from tierd.tiers.store_io import ALIGN_BYTES, Buffer, Bytes, address_of, aligned_block, is_aligned

MAX_SCRATCH = 16  # scratch slots kept for the next transfer: one for each thread that is at it


class Located(NamedTuple):
    """A page whose header was read and is right: its sections can be read without another look-up."""

    row: Row
    checksums: tuple[int, ...]


class Records:
    """Writes and reads records of one namespace.

    Notes:
        The reading methods may run in any number of threads; each takes a scratch slot of its own.
    """

    def __init__(self, slabs: Slabs, namespace: bytes) -> None:
        self.record_bytes = slabs.geometry.record_bytes
        self._slabs = slabs
        self._geometry = slabs.geometry
        self._header_bytes = slabs.geometry.header_bytes
        self._slot_bytes = slabs.geometry.slot_bytes
        self._sections = slabs.geometry.sections
        self._section_bytes = slabs.geometry.section_bytes
        self._namespace = namespace
        # The header, and behind it room for a record that O_DIRECT can't take where it lies.
        self._scratch: deque[Bytes] = deque(maxlen=MAX_SCRATCH)

    def write(self, row: Row, record: Bytes) -> None:
        """Write header and record with one call. Durable after the slabs' sync. Raises OSError."""
        header = self._expected(row)._replace(checksums=self._geometry.checksums(record))
        scratch, start = self._take_scratch(), self._header_bytes
        encode_header(header, scratch[:start])
        if self._fits(record):
            self._slabs.write(row.slot, [scratch[:start], record])
        else:
            scratch[start : start + self.record_bytes] = record
            scratch[start + self.record_bytes :] = 0
            self._slabs.write(row.slot, [scratch])
        self._scratch.append(scratch)

    def read(self, row: Row, dest: Bytes) -> None:
        """Read the record of a row into dest and check everything. uint8[record_bytes]. Raises PageLost."""
        scratch, start = self._take_scratch(), self._header_bytes
        block = scratch[:start]
        if self._fits(dest):
            self._fill(row, [block, dest], start + self.record_bytes)
        else:
            self._fill(row, [scratch], self._slot_bytes)
            dest[:] = scratch[start : start + self.record_bytes]
        checksums = check_header(block, self._expected(row))
        self._scratch.append(scratch)
        if xxhash.xxh3_64_intdigest(dest.data) != checksums[0]:
            raise PageLost(LostReason.PAYLOAD, "checksum of the record")

    def locate(self, row: Row) -> Located:
        """Read and check the header of a row, and nothing more. Raises PageLost."""
        scratch = self._take_scratch()
        block = scratch[: self._header_bytes]
        self._fill(row, [block], self._header_bytes)
        checksums = check_header(block, self._expected(row))
        self._scratch.append(scratch)
        return Located(row, checksums[1:])

    def read_sections(self, located: Located, first: int, count: int, dest: Bytes) -> int:
        """Read some sections, with the blocks that they lie in, into an aligned dest and check them.

        Returns where in dest the first of them starts. Raises PageLost, and ValueError for sections that there are not.
        """
        size, lead = self._section_bytes, self.section_start(first, count)
        start = self._header_bytes + first * size
        view = dest.data[: -(-(lead + count * size) // ALIGN_BYTES) * ALIGN_BYTES]
        self._fill(located.row, [view], len(view), start - lead)
        digest, at = xxhash.xxh3_64_intdigest, lead
        for checksum in located.checksums[first : first + count]:
            if digest(view[at : at + size]) != checksum:
                raise PageLost(LostReason.PAYLOAD, f"checksum of section {first + (at - lead) // size}")
            at += size
        return lead

    def read_batch(self, rows: Sequence[Row], dests: Sequence[Bytes]) -> list[bool]:
        """Which of these records were read and are right; what is wrong with the others, `read` says. Aligned dests."""
        if not all(map(self._fits, dests)):
            return [False] * len(rows)
        blocks = self._header_blocks(len(rows))
        vectors = np.empty((len(rows), 2, 2), dtype=np.uint64)
        vectors[:, 0, 0] = address_of(blocks) + np.arange(len(rows)) * self._header_bytes
        vectors[:, 0, 1] = self._header_bytes
        vectors[:, 1, 0] = [address_of(dest) for dest in dests]
        vectors[:, 1, 1] = self.record_bytes
        digest, right = xxhash.xxh3_64_intdigest, [False] * len(rows)

        def check(number: int) -> None:
            sums = self._header_says(rows[number], blocks[number])
            right[number] = sums is not None and digest(dests[number].data) == sums[0]

        self._slabs.read_batch([row.slot for row in rows], vectors, check)
        return right

    def locate_batch(self, rows: Sequence[Row]) -> list[Located | None]:
        """The rows whose headers were read and are right; what is wrong with the others, `locate` says."""
        blocks = self._header_blocks(len(rows))
        vectors = np.empty((len(rows), 1, 2), dtype=np.uint64)
        vectors[:, 0, 0] = address_of(blocks) + np.arange(len(rows)) * self._header_bytes
        vectors[:, 0, 1] = self._header_bytes
        located: list[Located | None] = [None] * len(rows)

        def check(number: int) -> None:
            if sums := self._header_says(rows[number], blocks[number]):
                located[number] = Located(rows[number], sums[1:])

        self._slabs.read_batch([row.slot for row in rows], vectors, check)
        return located

    def read_sections_batch(self, pages: Sequence[Located], first: int, count: int, dest: Bytes) -> list[bool]:
        """Which pages' sections were read and are right; what is wrong with the others, `read_sections` says.

        dest: aligned uint8[n, span_bytes(count)]; in each row the first section starts where `read_sections` says.
        """
        size, lead = self._section_bytes, self.section_start(first, count)
        start = self._header_bytes + first * size
        vectors = np.empty((len(pages), 1, 2), dtype=np.uint64)
        vectors[:, 0, 0] = address_of(dest) + np.arange(len(pages)) * dest.strides[0]
        vectors[:, 0, 1] = -(-(lead + count * size) // ALIGN_BYTES) * ALIGN_BYTES
        digest, starts = xxhash.xxh3_64_intdigest, [lead + number * size for number in range(count)]
        right = [False] * len(pages)

        def check(number: int) -> None:
            view = dest[number].data
            found = tuple(digest(view[at : at + size]) for at in starts)
            right[number] = found == pages[number].checksums[first : first + count]

        self._slabs.read_batch([page.row.slot for page in pages], vectors, check, start - lead)
        return right

    def section_start(self, first: int, count: int) -> int:
        """Where in its blocks section `first` starts. Raises ValueError unless there are so many from it on."""
        if not (count > 0 and 0 <= first <= self._sections - count):
            raise ValueError(f"sections {first} to {first + count} of {self._sections}")
        return (self._header_bytes + first * self._section_bytes) % ALIGN_BYTES

    def _header_blocks(self, count: int) -> Bytes:
        """Memory for the headers of a batch. uint8[count, header_bytes]"""
        return aligned_block(count * self._header_bytes).reshape(count, -1)

    def _header_says(self, row: Row, block: Bytes) -> tuple[int, ...] | None:
        try:
            return check_header(block, self._expected(row))
        except PageLost:
            return None

    def _fill(self, row: Row, buffers: list[Buffer], wanted: int, skip_bytes: int = 0) -> None:
        try:
            got = self._slabs.read(row.slot, buffers, skip_bytes)
        except OSError as exc:
            raise PageLost(LostReason.IO_ERROR, exc.strerror or str(exc)) from exc
        if got < wanted:
            raise PageLost(LostReason.SHORT, f"{got} of {wanted} bytes")

    def _expected(self, row: Row) -> SlotHeader:
        """What the header of a row's slot says, but for the checksums."""
        slot, key, parent, tokens, generation = row
        return SlotHeader(
            self._namespace, key, parent, token_digest(tokens), len(tokens) // TOKEN_BYTES, slot, generation,
            self.record_bytes, self._section_bytes, self._sections,
        )  # fmt: skip

    def _fits(self, record: Bytes) -> bool:
        """True when the record can be transferred where it lies."""
        return not self._slabs.direct or is_aligned(record)

    def _take_scratch(self) -> Bytes:
        try:
            return self._scratch.pop()
        except IndexError:
            return aligned_block(self._slot_bytes)


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


def check_dest(dest: Bytes, size_bytes: int, *, exact: bool = False) -> None:
    """Raise ValueError unless this memory takes so many bytes. uint8[size_bytes]

    Unless `exact` it may be larger, and must be aligned.
    """
    size = len(dest)
    if dest.dtype != np.uint8 or dest.ndim != 1 or size < size_bytes or (exact and size > size_bytes):
        raise ValueError(f"dest is {dest.dtype}{dest.shape}, not uint8[{size_bytes}]")
    if not dest.flags.c_contiguous or (not exact and address_of(dest) % ALIGN_BYTES):
        raise ValueError(f"dest is not contiguous or not on a boundary of {ALIGN_BYTES} bytes")
