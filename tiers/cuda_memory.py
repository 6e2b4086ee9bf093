"""Memory of arenas where there is a card: its own, mapped piece by piece, and CPU memory that it reads in place.

Neither ever moves, and both grow and shrink: the card's by mapping memory into reserved addresses, the CPU's by
registering the mapping that `HostBlock` has, in chunks. (`torch.pin_memory` would round a pool up to a power of two.)
"""

from __future__ import annotations

import errno
import threading
import weakref

import numpy as np
import numpy.typing as npt

from tierd.tiers.blocks import HostBlock
from tierd.tiers.gpu import DeviceRow, Event, Gpu, GpuError, Handle, Row, Stream

CHUNK_BYTES = 64 << 20
_HOST_PAGE_BYTES = 4096


class DeviceBlock:
    """Memory of the card, in chunks. Threading: that of its arena.

    Args:
        size_bytes: taken at once. Raises GpuError (an OSError) when the card has no more.
        max_bytes: reserved as addresses.
        chunk_bytes: mapped together; rounded up to what the card can map.
    """

    def __init__(self, gpu: Gpu, size_bytes: int, max_bytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        step = gpu.granularity_bytes
        self._gpu = gpu
        self._chunk_bytes = -(-chunk_bytes // step) * step
        self.size_bytes = max(size_bytes, max_bytes)
        self._reserved_bytes = max(1, -(-self.size_bytes // self._chunk_bytes)) * self._chunk_bytes
        self._handles: list[Handle] = []
        self._stream, self._event = Stream(0), Event(0)
        self.address = gpu.reserve(self._reserved_bytes)
        try:
            self._stream = gpu.new_stream()
            self._event = gpu.new_event()
            self.take(size_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def taken_bytes(self) -> int:
        """Memory that the card is without."""
        return len(self._handles) * self._chunk_bytes

    def row(self, start: int, size_bytes: int) -> Row:
        return DeviceRow(self.address + start, size_bytes)

    def fill(self, start: int, size_bytes: int, value: int) -> None:
        self._gpu.fill(self.address + start, value, size_bytes, self._stream)
        self._gpu.record(self._event, self._stream)
        self._gpu.synchronize(self._event)

    def take(self, stop: int) -> None:
        before = len(self._handles)
        try:
            while self.taken_bytes < stop:
                address = self.address + self.taken_bytes
                self._handles.append(self._gpu.map(address, self._chunk_bytes))
        except GpuError:
            self._unmap(before)
            raise

    def give_back(self, start: int, stop: int) -> None:
        self._unmap(-(-start // self._chunk_bytes))

    def close(self) -> None:
        """Gives memory and addresses back, when nothing on the card uses them any more. Idempotent."""
        if not self._reserved_bytes:
            return
        self._unmap(0)
        self._gpu.release(self.address, self._reserved_bytes)
        if self._event:
            self._gpu.free_event(self._event)
        if self._stream:
            self._gpu.free_stream(self._stream)
        self._reserved_bytes = 0

    def _unmap(self, keep: int) -> None:
        while len(self._handles) > keep:
            handle = self._handles.pop()
            self._gpu.unmap(self.address + self.taken_bytes, self._chunk_bytes, handle)


class PinnedBlock(HostBlock):
    """CPU memory registered with the card, chunk by chunk, by a thread of its own while the model loads.

    Kernels read pages in it at their addresses, so nothing may be put there before `wait`. A chunk holds whole records:
    no copy crosses from one registration to the next.

    Threading: `wait`, `take`, `give_back` and `close` belong to the arena's thread.
    """

    def __init__(
        self, gpu: Gpu, size_bytes: int, max_bytes: int, record_bytes: int, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        super().__init__(size_bytes, max_bytes)
        if record_bytes % _HOST_PAGE_BYTES:
            raise ValueError(f"records of {record_bytes} bytes do not fill pages of memory, and can't be registered")
        self._gpu = gpu
        self._chunk_bytes = max(1, chunk_bytes // record_bytes) * record_bytes
        self._stop_bytes = size_bytes
        self._sizes: list[int] = []  # of the chunks that are registered, one after the other
        self._error: OSError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._register, name="tierd-pinner", daemon=True)
        self._thread.start()

    @property
    def pinned_bytes(self) -> int:
        """Registered, from the start of the block."""
        return sum(self._sizes)

    def wait(self, timeout_s: float) -> int:
        """Waits until all of it is registered. Returns the bytes that are: fewer when the system or the card refuses.

        Raises GpuError when the time is over, or the thread died of something else.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise GpuError(errno.ETIMEDOUT, f"{self.size_bytes} bytes of CPU memory were not registered in time")
        if self._error is not None and not isinstance(self._error, GpuError):
            raise GpuError(errno.EIO, f"registering CPU memory failed: {self._error}") from self._error
        return self.pinned_bytes

    def refusal(self) -> str:
        """Why less than all is registered; "" if all is."""
        return str(self._error.strerror or self._error) if self._error is not None else ""

    def take(self, stop: int) -> None:
        before = len(self._sizes)
        try:
            self._pin(stop)
        except GpuError:
            self._unpin(before)
            raise

    def give_back(self, start: int, stop: int) -> None:
        # Pages that are locked must not be taken from under the card: the chunk with the last record stays whole.
        keep = -(-start // self._chunk_bytes)
        self._unpin(keep)
        super().give_back(max(start, self.pinned_bytes), stop)

    def close(self) -> None:
        """Unregisters everything, when no copy and no kernel uses it any more. Idempotent."""
        self._closing = True
        self._thread.join()
        self._unpin(0)

    def _register(self) -> None:
        try:
            self._pin(self._stop_bytes)
        except OSError as exc:
            self._error = exc
        except Exception as exc:  # whoever waits must hear of it
            self._error = OSError(errno.EIO, f"{type(exc).__name__}: {exc}")

    def _pin(self, stop: int) -> None:
        start = self.pinned_bytes
        while start < stop and not self._closing:
            size = min(self._chunk_bytes, self.size_bytes - start)
            self._gpu.register(self.address + start, size)
            self._sizes.append(size)
            start += size

    def _unpin(self, keep: int) -> None:
        while len(self._sizes) > keep:
            self._sizes.pop()
            self._gpu.unregister(self.address + sum(self._sizes))


def pinned_array(gpu: Gpu, size_bytes: int) -> npt.NDArray[np.uint8]:
    """CPU memory that is registered for as long as the array, or a view of it, is alive. Raises OSError (ENOMEM).

    Whoever lets go of it knows that no copy and no kernel uses it any more.
    """
    block = HostBlock(size_bytes, size_bytes)
    array = block.array
    gpu.register(block.address, -(-max(size_bytes, 1) // _HOST_PAGE_BYTES) * _HOST_PAGE_BYTES)
    weakref.finalize(array, gpu.unregister, block.address).atexit = False
    return array
