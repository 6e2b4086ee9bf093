"""Memory of a card for weights: how it is had, and what layers pass through that have none of their own."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from tierd.daemon.engine.model.load import checked_format
from tierd.daemon.engine.model.pieces import layer_piece
from tierd.daemon.models.catalog import RecordEntry
from tierd.daemon.models.placement_card import is_vector
from tierd.daemon.units import human_bytes
from tierd.kernels.gpu.layers import Piece, place_bytes
from tierd.tiers.cuda_memory import pinned_array
from tierd.tiers.gpu import Gpu, GpuError, Stream
from tierd.tiers.links import Link
from tierd.tiers.mover import Job, JobClass, Mover
from tierd.tiers.store_io import Bytes

_ALIGN_BYTES = 256


class CardFull(GpuError):
    """The card has no memory for this now."""


class Card(NamedTuple):
    """What weights need of a card. `stream` is `compute` as torch names it, None for its current one; `allocate` gives
    bytes of the card, and is torch's own where it is None.
    """

    gpu: Gpu
    compute: Stream
    device: torch.device
    dtype: torch.dtype
    stream: torch.cuda.Stream | None
    allocate: Callable[[int], torch.Tensor] | None = None

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return int(torch.empty(0, dtype=self.dtype).element_size())

    @property
    def free_bytes(self) -> int:
        """Of the card, with what torch keeps of memory that it has freed."""
        kept = 0
        if self.device.type == "cuda":
            kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return self.gpu.memory()[0] + kept

    def memory(self, size_bytes: int) -> torch.Tensor:
        """Bytes of the card, aligned for kernels. Raises CardFull."""
        allocate = self.allocate or partial(torch.empty, dtype=torch.uint8, device=self.device)
        with self.filling(size_bytes):
            block = allocate(size_bytes + _ALIGN_BYTES)
        return block[-block.data_ptr() % _ALIGN_BYTES :][:size_bytes]

    @contextlib.contextmanager
    def filling(self, size_bytes: int) -> Iterator[None]:
        """For what has torch take memory: in the order of the compute stream. Raises CardFull when there is none."""
        try:
            with torch.cuda.stream(self.stream):
                yield
        except torch.cuda.OutOfMemoryError:
            free = human_bytes(self.free_bytes)
            raise CardFull(errno.ENOMEM, f"the card has {free} free, {human_bytes(size_bytes)} are needed") from None

    def wait(self, mover: Mover, wait_s: float, keep: object = None) -> None:
        """Waits for the kernels that were launched so far, which may write to `keep`: it is held until they have run.

        Raises GpuError when they do not end in time.
        """
        event = self.gpu.new_event()
        self.gpu.record(event, self.compute)

        def ended(_keep: object) -> None:
            self.gpu.synchronize(event)

        job = Job(partial(ended, keep), Link.HOST_TO_DEVICE, 0, awaited=True)
        if not mover.submit(job, JobClass.NOW) or not mover.wait_for([job], wait_s):
            raise GpuError(errno.ETIMEDOUT, f"the card has not answered in {wait_s:g} s")
        self.gpu.free_event(event)
        if job.completion is not None and job.completion.error is not None:
            raise job.completion.error

    def trim(self) -> None:
        """What was freed goes back to the card, for whoever else wants it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class PassNeeds(NamedTuple):
    """Memory through which layers pass: counts, and bytes of each."""

    slots: int
    slot_bytes: int
    place_bytes: int
    disk_slots: int
    disk_slot_bytes: int

    @staticmethod
    def of(
        entries: Collection[RecordEntry], host: Collection[str], slots: int, disk_slots: int, width: int
    ) -> PassNeeds:
        """For these records, of which those in `host` lie in CPU memory."""
        below = [layer_piece(entry).slot_bytes for entry in entries if entry.name not in host]
        return PassNeeds(
            slots, max(entry.bytes for entry in entries),
            max(place_bytes(pieces_of(entry), width) for entry in entries),
            min(disk_slots, len(below)), max(below, default=0),
        )  # fmt: skip


class PassMemory:
    """Slots and a place on the card, and registered CPU memory for what comes from the disk.

    What an earlier one has of the right size is shared with it, so that only what is missing has to be had. Raises
    CardFull, and OSError (ENOMEM) when CPU memory can't be registered.
    """

    def __init__(self, card: Card, needs: PassNeeds, before: PassMemory | None) -> None:
        disk = [] if before is None else before.disk
        slots = [] if before is None else before.slots
        self.disk: list[Bytes] = [one for one in disk if one.nbytes == needs.disk_slot_bytes][: needs.disk_slots]
        while len(self.disk) < needs.disk_slots:
            self.disk.append(pinned_array(card.gpu, needs.disk_slot_bytes))
        self.slots: list[torch.Tensor] = [one for one in slots if one.nbytes == needs.slot_bytes][: needs.slots]
        while len(self.slots) < needs.slots:
            self.slots.append(card.memory(needs.slot_bytes))
        shares = before is not None and before.place.nbytes == needs.place_bytes
        self.place: torch.Tensor = before.place if before and shares else card.memory(needs.place_bytes)

    @property
    def device_bytes(self) -> int:
        """On the card."""
        return int(self.place.nbytes) + sum(int(slot.nbytes) for slot in self.slots)


def pieces_of(record: RecordEntry) -> Sequence[Piece]:
    """The tensors of a layer."""
    return [
        Piece(
            tensor.name, None if is_vector(tensor) else checked_format(record.name, tensor), tensor.rows, tensor.cols,
            tensor.offset - record.offset, tensor.bytes,
        )  # fmt: skip
        for tensor in record.tensors
    ]
