"""How bytes get from one row to another, and to code that needs arrays although a row lies in memory of a card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from tierd.tiers.blocks import host_array
from tierd.tiers.gpu import HostRow, Row

T = TypeVar("T")


class Crossing(Protocol):
    """Rows of a card as arrays, for as long as a call lasts. Any thread of the mover."""

    def fill(self, rows: Sequence[Row], read: Callable[[slice, Sequence[HostRow]], Sequence[T]]) -> list[T]:
        """See `Mover.fill`."""
        ...

    def lend(self, rows: Sequence[Row], write: Callable[[Sequence[HostRow]], None]) -> None:
        """See `Mover.lend`."""
        ...


def copy_on_host(dest: Row, source: Row) -> None:
    """Copies a row of CPU memory to another. Releases the interpreter's lock."""
    np.copyto(host_array(dest), host_array(source))


def fill_on_host(dest: Row, value: int) -> None:
    """Fills a row of CPU memory."""
    host_array(dest).fill(value)
