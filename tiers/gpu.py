"""The seam to the card: memory, copies, streams and events, as the tiers need them, and nothing else.

Everything that speaks of a card goes through `Gpu`. `cuda_driver` is the one for CUDA; the tests have one that delays
copies and fills their destinations with nonsense first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Stream = NewType("Stream", int)  # a handle of the driver
Event = NewType("Event", int)
Handle = NewType("Handle", int)  # of physical memory


class GpuError(OSError):
    """The card, or its driver, refused something. `errno` is ENOMEM when it has no memory, EIO otherwise."""


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """Some bytes in memory of the card, which the host can name and not look into."""

    address: int
    nbytes: int


HostRow: TypeAlias = npt.NDArray[np.uint8]
Row: TypeAlias = HostRow | DeviceRow


class Gpu(Protocol):
    """One card. Any thread; every method raises GpuError when the driver refuses.

    A copy or a fill is queued on a stream, and done when an event that was recorded after it has come.
    """

    @property
    def granularity_bytes(self) -> int:
        """What device memory is mapped in multiples of."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes of its memory that are free, and all of them."""
        ...

    def close(self) -> None:
        """Lets go of the card, after everything that was made on it. Idempotent."""
        ...

    def reserve(self, size_bytes: int) -> int:
        """Address space of the card, without memory; `release` gives it back."""
        ...

    def release(self, address: int, size_bytes: int) -> None: ...

    def map(self, address: int, size_bytes: int) -> Handle:
        """Puts memory into reserved address space, in multiples of the granularity; `unmap` takes it out."""
        ...

    def unmap(self, address: int, size_bytes: int, handle: Handle) -> None: ...

    def register(self, address: int, size_bytes: int) -> None:
        """Locks host memory in place, so that copies need no bounce buffer and kernels read it at its own address."""
        ...

    def unregister(self, address: int) -> None: ...

    def new_stream(self) -> Stream: ...

    def free_stream(self, stream: Stream) -> None: ...

    def new_event(self) -> Event: ...

    def free_event(self, event: Event) -> None: ...

    def record(self, event: Event, stream: Stream) -> None:
        """The event comes when all that the stream holds now is done."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What the stream is given from now on begins after the event."""
        ...

    def synchronize(self, event: Event) -> None:
        """Waits on the host, without the interpreter's lock, for the event."""
        ...

    def copy(self, dest: int, source: int, size_bytes: int, stream: Stream) -> None: ...

    def fill(self, dest: int, value: int, size_bytes: int, stream: Stream) -> None: ...


def address_of_row(row: Row) -> int:
    """Where a row begins."""
    return row.address if isinstance(row, DeviceRow) else int(row.ctypes.data)
