"""A store whose pages are packed more than those in memory: encoded when they are written, decoded when they are read.

Whoever reads or writes sees pages as memory holds them; what lies on the disk, and is checked there, is the packed
record. A page that comes back is not the bits that were computed, so such a store has a namespace of its own. Encoding
and decoding run where the read or the write runs, on the threads of the mover.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from tierd.tiers.errors import PageLost
from tierd.tiers.page import PageKey
from tierd.tiers.records import Located
from tierd.tiers.store import PageMeta, Store
from tierd.tiers.store_io import ALIGN_BYTES, Buffer, Bytes, aligned_block


class Codec(Protocol):
    """Turns pages of memory into pages of the store and back, whole or some layers. Any thread, several at once.

    Attributes:
        layers: of a page; each is a section.
        layer_bytes, record_bytes: in memory.
        stored_layer_bytes, stored_record_bytes: in the store.
    """

    layers: int
    layer_bytes: int
    record_bytes: int
    stored_layer_bytes: int
    stored_record_bytes: int

    def encode(self, page: Bytes, stored: Bytes) -> None:
        """A page of memory as it is stored. uint8[record_bytes], uint8[stored_record_bytes]"""
        ...

    def decode(self, stored: Bytes, page: Bytes, layers: int) -> None:
        """Some layers of a stored page as memory holds them: of as many bytes as they take, or more."""
        ...


class RepackedStore(Store):
    """See `Store`, for pages as memory holds them. `open_packed` makes one."""

    _codec: Codec
    _rooms: threading.local

    @classmethod
    def open_packed(cls, codec: Codec, directory: Path, **more: Any) -> Self:
        """`Store.open`, without what the codec says itself."""
        store = cls.open(
            directory, record_bytes=codec.stored_record_bytes, sections=codec.layers,
            section_bytes=codec.stored_layer_bytes, **more,
        )  # fmt: skip
        store._codec, store._rooms = codec, threading.local()
        return store

    @property
    def section_bytes(self) -> int:
        return self._codec.layer_bytes

    def span_bytes(self, count: int) -> int:
        return -(-count * self._codec.layer_bytes // ALIGN_BYTES) * ALIGN_BYTES

    def write(self, batch: Sequence[tuple[PageMeta, Buffer]]) -> None:
        size = self._codec.stored_record_bytes
        room = self._room(len(batch) * size)
        packed: list[tuple[PageMeta, Buffer]] = []
        for place, (meta, record) in enumerate(batch):
            page = np.frombuffer(record, np.uint8)
            if len(page) != self._codec.record_bytes:
                raise ValueError(f"a page of {len(page)} bytes, not {self._codec.record_bytes}")
            stored = room[place * size : (place + 1) * size]
            self._codec.encode(page, stored)
            packed.append((meta, stored))
        super().write(packed)

    def read_into(self, key: PageKey, dest: Bytes) -> None:
        stored = self._room(self._codec.stored_record_bytes)
        super().read_into(key, stored)
        self._codec.decode(stored, dest, self._codec.layers)

    def read_many(self, keys: Sequence[PageKey], dests: Sequence[Bytes]) -> list[PageLost | None]:
        size = self._codec.stored_record_bytes
        room = self._room(len(keys) * size)
        rows = [room[place * size : (place + 1) * size] for place in range(len(keys))]
        found = super().read_many(keys, rows)
        for stored, dest, lost in zip(rows, dests, found, strict=True):
            if lost is None:
                self._codec.decode(stored, dest, self._codec.layers)
        return found

    def read_section(self, located: Located, section: int, dest: Bytes, count: int = 1) -> int:
        stored = self._room(self.geometry.span_bytes(count))
        start = super().read_section(located, section, stored, count)
        self._codec.decode(stored[start:], dest, count)
        return 0

    def read_section_many(
        self, pages: Sequence[Located], section: int, dest: Bytes, count: int = 1
    ) -> tuple[int, list[PageLost | None]]:
        span_bytes = self.geometry.span_bytes(count)
        rows = self._room(len(pages) * span_bytes).reshape(-1, span_bytes)
        start, found = self._reader.read_section_many(pages, section, rows, count)
        for stored, line, lost in zip(rows, dest, found, strict=True):
            if lost is None:
                self._codec.decode(stored[start:], line, count)
        return 0, found

    def _room(self, num_bytes: int) -> Bytes:
        """Aligned scratch of the calling thread, kept until it needs more: a mover has few threads, and small jobs."""
        found: Bytes | None = getattr(self._rooms, "found", None)
        if found is None or len(found) < num_bytes:
            found = self._rooms.found = aligned_block(num_bytes)
        return found[:num_bytes]
