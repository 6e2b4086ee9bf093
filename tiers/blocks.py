"""The memory of an arena: address space for its largest size, of which as much is taken as the arena has slots."""

from __future__ import annotations

import contextlib
import mmap
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierd.tiers import memory
from tierd.tiers.gpu import DeviceRow, Row


class Block(Protocol):
    """Memory that never moves. Offsets count bytes from its start.

    Attributes:
        address: where it starts, on a multiple of the system's page size.
        size_bytes: the address space.
    """

    address: int
    size_bytes: int

    def row(self, start: int, size_bytes: int) -> Row:
        """Some of its bytes."""
        ...

    def fill(self, start: int, size_bytes: int, value: int) -> None:
        """Fills bytes that nobody uses."""
        ...

    def take(self, stop: int) -> None:
        """Bytes before `stop` are going to be used. Raises OSError (ENOMEM), with nothing changed, if they can't."""
        ...

    def give_back(self, start: int, stop: int) -> None:
        """The bytes from `start` to `stop`, the last ones that were taken, are of no use any more."""
        ...


class HostBlock:
    """CPU memory that is taken by what is written: one anonymous private mapping.

    Args:
        size_bytes: wanted at least. Raises OSError (ENOMEM) when the system refuses so much.
        max_bytes: wanted as address space. Where the system refuses that (ulimit -v), `size_bytes` is less.
    """

    def __init__(self, size_bytes: int, max_bytes: int) -> None:
        self._map, self.size_bytes = _reserve(size_bytes, max_bytes)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8, count=self.size_bytes)
        self.address = int(self.array.ctypes.data)

    def row(self, start: int, size_bytes: int) -> Row:
        row: npt.NDArray[np.uint8] = self.array[start : start + size_bytes]
        return row

    def fill(self, start: int, size_bytes: int, value: int) -> None:
        self.array[start : start + size_bytes] = value

    def take(self, stop: int) -> None:
        """Nothing to do: the system gives memory when it is touched."""

    def give_back(self, start: int, stop: int) -> None:
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if stop > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _reserve(size_bytes: int, max_bytes: int) -> tuple[mmap.mmap, int]:
    """A mapping of `max_bytes`, or of `size_bytes` where that is refused, and how large it is."""
    # A decode step reads pieces of a few KB all over the arena: with small pages each costs a TLB miss.
    if max_bytes > size_bytes:
        with contextlib.suppress(OSError):
            return memory.block(max_bytes, reserve=True, large_pages=True), max_bytes
    return memory.block(size_bytes, large_pages=True), size_bytes


def host_array(row: Row) -> npt.NDArray[np.uint8]:
    """A row as an array. Raises AssertionError for one that lies in memory of the card."""
    if isinstance(row, DeviceRow):
        raise AssertionError(f"{row.nbytes} bytes at {row.address:#x} lie in memory of the card")
    return row
