"""A file of weights, read past the page cache: what is streamed through memory must not fill it up behind our back."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from tierd.tiers.aio import MAX_BATCH, AioReader
from tierd.tiers.store_io import ALIGN_BYTES, Bytes, OsIO, StoreIO, address_of, aligned_block, read_full

# What is larger is read by a call of its own. That takes less of the processors than a batch, of which Python makes
# arrays first: 4 MiB at a time nothing to speak of, where batches of 1 MiB take 75 ms a GB.
BATCHED_BYTES = 256 << 10
_SCAN_BYTES = 8 << 20


class Span(NamedTuple):
    """Some bytes of a file, and the aligned blocks around them that O_DIRECT reads."""

    offset: int
    num_bytes: int

    @property
    def lead(self) -> int:
        """From the start of the blocks to that of the bytes."""
        return self.offset % ALIGN_BYTES

    @property
    def blocks_offset(self) -> int:
        """Where the blocks start in the file."""
        return self.offset - self.lead

    @property
    def blocks_bytes(self) -> int:
        """Length of the blocks."""
        return -(-(self.lead + self.num_bytes) // ALIGN_BYTES) * ALIGN_BYTES


class WeightFile:
    """Threading: `read` from any thread, several at once. `close` when none reads.

    Args:
        path: a file of whole blocks of 4096 bytes.
        io: the system calls; tests put faults here.

    Raises OSError when it can't be opened, ValueError when it does not consist of whole blocks.
    """

    def __init__(self, path: Path, io: StoreIO | None = None) -> None:
        self._io: StoreIO = io or OsIO()
        self._reader = AioReader()
        self._batches = True
        self.direct = True
        try:
            self._fd = self._io.open(path, os.O_RDONLY | os.O_DIRECT)
            read_full(self._io, self._fd, [aligned_block(ALIGN_BYTES)], 0, ALIGN_BYTES)
        except OSError as exc:
            if hasattr(self, "_fd"):
                self._io.close(self._fd)
            if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.direct = False  # a file system without it: plain reads, whose cache is given back each time
            self._fd = self._io.open(path, os.O_RDONLY)
        self.size_bytes = self._io.fstat(self._fd).st_size
        if self.size_bytes % ALIGN_BYTES:
            self.close()
            raise ValueError(f"{path.name} has {self.size_bytes} bytes, which are no whole blocks of {ALIGN_BYTES}")

    def __repr__(self) -> str:
        return f"<WeightFile: {self.size_bytes} bytes, {'O_DIRECT' if self.direct else 'plain reads'}>"

    def read(self, parts: Sequence[tuple[int, Bytes]]) -> None:
        """Fill buffers from offsets of the file, all of them aligned. Raises OSError when one can't be filled."""
        small = [part for part in parts if part[1].nbytes <= BATCHED_BYTES]
        rest = [part for part in parts if part[1].nbytes > BATCHED_BYTES]
        for first in range(0, len(small), MAX_BATCH):
            batch = small[first : first + MAX_BATCH]
            rest += [part for part, there in zip(batch, self._try_batch(batch), strict=True) if not there]
        for offset, dest in rest:
            if read_full(self._io, self._fd, [dest], offset, ALIGN_BYTES) < dest.nbytes:
                raise OSError(errno.EIO, "the file ends too early")
        if not self.direct:
            for offset, dest in parts:
                with contextlib.suppress(OSError):  # a file system that keeps no such books
                    os.posix_fadvise(self._fd, offset, dest.nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give the descriptor back."""
        self._reader.close()
        self._io.close(self._fd)

    def _try_batch(self, pieces: Sequence[tuple[int, Bytes]]) -> list[bool]:
        """Which pieces were read; those that were not are read one by one, which finds out why."""
        if not (self.direct and self._batches and len(pieces) > 1):
            return [False] * len(pieces)
        offsets = np.array([offset for offset, _ in pieces], np.int64)
        vectors = np.array([[(address_of(dest), dest.nbytes)] for _, dest in pieces], np.uint64)
        try:
            found = self._io.preadv_batch(self._reader, self._fd, offsets, vectors)
        except OSError:
            self._batches = False  # not here
            return [False] * len(pieces)
        return [int(count) == dest.nbytes for count, (_, dest) in zip(found, pieces, strict=True)]


def scan(file: WeightFile, whole: Span, tables: Sequence[Sequence[Span]]) -> tuple[str, list[list[str]]]:
    """Digests of a record and of parts of it, in one pass over it: hex XXH3-128.

    Args:
        whole: the record, whole blocks.
        tables: ranges within it, in each table ascending and apart from one another.

    Raises OSError.
    """
    everything = xxhash.xxh3_128()
    found: list[list[str]] = [[] for _ in tables]
    parts = [xxhash.xxh3_128() for _ in tables]
    block = aligned_block(min(_SCAN_BYTES, whole.num_bytes))
    for start in range(whole.offset, whole.offset + whole.num_bytes, _SCAN_BYTES):
        view = block[: min(_SCAN_BYTES, whole.offset + whole.num_bytes - start)]
        file.read([(start, view)])
        everything.update(view.data)
        for number, spans in enumerate(tables):
            for span, piece in _pieces(spans[len(found[number]) :], start, view):
                parts[number].update(piece.data)
                if start + view.nbytes >= span.offset + span.num_bytes:
                    found[number].append(parts[number].hexdigest())
                    parts[number].reset()
    return everything.hexdigest(), found


def _pieces(spans: Sequence[Span], start: int, view: Bytes) -> Iterator[tuple[Span, Bytes]]:
    """What of these ranges lies in a view of the file that starts there."""
    for span in spans:
        if span.offset >= start + view.nbytes:
            return
        yield span, view[max(0, span.offset - start) : span.offset + span.num_bytes - start]
