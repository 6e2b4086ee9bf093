"""Layers that a card has no memory for, on their way past it: slots, where they are laid out, and who brings them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from tierd.daemon.engine.model.load import checked_format
from tierd.daemon.engine.model.pieces import layer_piece
from tierd.daemon.engine.model.weights_status import Counted
from tierd.daemon.models.catalog import RecordEntry
from tierd.daemon.models.placement_card import is_vector
from tierd.kernels.gpu.layers import GpuLayer, Piece, SlotLayer, place_bytes
from tierd.tiers.cuda_memory import pinned_array
from tierd.tiers.gpu import DeviceRow, Event, Gpu, Stream
from tierd.tiers.mover import Mover
from tierd.tiers.store_io import Bytes
from tierd.tiers.weights_device import DeviceRing, Record
from tierd.tiers.weights_file import WeightFile
from tierd.tiers.weights_ring import WeightRing

_ALIGN_BYTES = 256


class Card(NamedTuple):
    """What weights need of a card. `stream` is `compute` as torch names it, None for its current one."""

    gpu: Gpu
    compute: Stream
    device: torch.device
    dtype: torch.dtype
    stream: torch.cuda.Stream | None
    arrive: Callable[[Event], None] | None


class PassingLayers:
    """Threading: as `CardWeights`, which makes it anew when other layers pass.

    Args:
        entries: the records of these layers by index, in the order of a pass.
        host: those of them that lie in registered CPU memory; the others are on the disk.
        slots, disk_slots: on the card, and in CPU memory for records of the disk.
        opened: gives the file, where it is needed.

    Raises ModelInvalid, and OSError (ENOMEM) when CPU memory can't be registered.
    """

    def __init__(
        self, card: Card, mover: Mover, entries: Mapping[int, RecordEntry], host: Mapping[str, Bytes], *, slots: int,
        disk_slots: int, opened: Callable[[], WeightFile], overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._card = card
        width = torch.empty(0, dtype=card.dtype).element_size()
        pieces = [_pieces(entry) for entry in entries.values()]
        place = self._memory(max(place_bytes(each, width) for each in pieces))
        memory = [self._memory(max(entry.bytes for entry in entries.values())) for _ in range(slots)]
        self.device_bytes = place.nbytes + sum(slot.nbytes for slot in memory)
        self.pass_bytes = sum(entry.bytes for entry in entries.values())
        below = [entry for entry in entries.values() if entry.name not in host]
        self._disk: WeightRing | None = None
        if below:
            self._disk = WeightRing(
                opened(), mover, [layer_piece(entry) for entry in below], min(disk_slots, len(below)),
                overlap=overlap, clock=clock, allocate=lambda size: pinned_array(card.gpu, size),
            )  # fmt: skip
        self._ring = DeviceRing(
            card.gpu, card.compute, mover,
            [Record(entry.name, entry.bytes, host.get(entry.name)) for entry in entries.values()],
            [DeviceRow(slot.data_ptr(), slot.nbytes) for slot in memory],
            disk=self._disk, arrive=card.arrive, overlap=overlap, clock=clock,
        )  # fmt: skip
        self._numbers = {index: number for number, index in enumerate(entries)}
        self._slots = [[SlotLayer(each, slot, place, card.dtype) for slot in memory] for each in pieces]

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def reads_disk(self) -> bool:
        """Whether some of them come from the disk."""
        return self._disk is not None

    def begin(self) -> None:
        """A pass begins."""
        self._ring.begin()

    def layer(self, index: int, deadline_s: float) -> GpuLayer | None:
        """See `CardWeights.layer`; None for a layer that is none of these."""
        number = self._numbers.get(index)
        if number is None:
            return None
        slot = self._ring.take(number, deadline_s)
        with torch.cuda.stream(self._card.stream):
            layer = self._slots[number][slot].lay_out()
        self._ring.release()  # the slot can be filled while the layer is computed
        return layer

    def used(self, index: int) -> tuple[int, int]:
        """How often a layer was in its slot when a pass needed it, and how often one did."""
        number = self._numbers.get(index)
        return (0, 0) if number is None else (self._ring.hits[number], self._ring.uses[number])

    def copied(self) -> Counted:
        """What crossed the link."""
        stats = self._ring.statistics()
        return Counted(stats.waited_s, stats.copied_bytes, 0, stats.lost, sum(self._ring.uses), sum(self._ring.hits))

    def read(self) -> Counted:
        """What was read of the disk."""
        if self._disk is None:
            return Counted()
        stats = self._disk.statistics()
        return Counted(0.0, stats.read_bytes, stats.retries, stats.lost)

    def close(self) -> bool:
        """When no kernel runs. False when a copy or a read is stuck: its memory is left to it."""
        at_rest = self._ring.close()
        if at_rest:
            self._slots = []
        return at_rest

    def _memory(self, size_bytes: int) -> torch.Tensor:
        """Bytes of the card, aligned for kernels."""
        block = torch.empty(size_bytes + _ALIGN_BYTES, dtype=torch.uint8, device=self._card.device)
        return block[-block.data_ptr() % _ALIGN_BYTES :][:size_bytes]


def _pieces(record: RecordEntry) -> Sequence[Piece]:
    return [
        Piece(
            tensor.name, None if is_vector(tensor) else checked_format(record.name, tensor), tensor.rows, tensor.cols,
            tensor.offset - record.offset, tensor.bytes,
        )  # fmt: skip
        for tensor in record.tensors
    ]
