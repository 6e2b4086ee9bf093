"""Layers that a card has no memory for, on their way past it: slots, where they are laid out, and who brings them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from tierd.daemon.engine.model.card_memory import Card, PassMemory, pieces_of
from tierd.daemon.engine.model.pieces import layer_piece
from tierd.daemon.engine.model.weights_status import Counted
from tierd.daemon.models.catalog import RecordEntry
from tierd.kernels.gpu.experts import GpuExperts
from tierd.kernels.gpu.layers import GpuLayer, SlotLayer
from tierd.tiers.gpu import DeviceRow
from tierd.tiers.mover import Mover
from tierd.tiers.store_io import Bytes
from tierd.tiers.weights_device import DeviceRing, Record
from tierd.tiers.weights_file import WeightFile
from tierd.tiers.weights_ring import WeightRing

_ALIGN_BYTES = 256


class PassingLayers:
    """Threading: as `CardWeights`, which makes it anew when other layers pass.

    Args:
        entries: the records of these layers by index, in the order of a pass.
        host: those of them that lie in registered CPU memory; the others are on the disk.
        memory: that they pass through. One that was closed before may have had the same.
        opened: gives the file, where it is needed.
        experts: of layers that are mixtures, by index.

    Raises ModelInvalid, and GpuError.
    """

    def __init__(
        self, card: Card, mover: Mover, entries: Mapping[int, RecordEntry], host: Mapping[str, Bytes],
        memory: PassMemory, opened: Callable[[], WeightFile], experts: Mapping[int, GpuExperts], *,
        overlap: bool = True, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._card, self.memory = card, memory
        self._pieces = [pieces_of(entry) for entry in entries.values()]
        self.pass_bytes = sum(entry.bytes for entry in entries.values())
        below = [entry for entry in entries.values() if entry.name not in host]
        self._disk: WeightRing | None = None
        if below:
            free = iter(memory.disk)
            self._disk = WeightRing(
                opened(), mover, [layer_piece(entry) for entry in below], len(memory.disk),
                overlap=overlap, clock=clock, allocate=lambda _size: next(free),
            )  # fmt: skip
        self._ring = DeviceRing(
            card.gpu, card.compute, mover,
            [Record(entry.name, entry.bytes, host.get(entry.name)) for entry in entries.values()],
            [DeviceRow(slot.data_ptr(), slot.nbytes) for slot in memory.slots],
            owners=memory.slots, disk=self._disk, overlap=overlap, clock=clock,
        )  # fmt: skip
        self._numbers = {index: number for number, index in enumerate(entries)}
        self._experts = [experts.get(index) for index in entries]
        self._slots = [
            [SlotLayer(each, slot, memory.place, card.dtype, mixture) for slot in memory.slots]
            for each, mixture in zip(self._pieces, self._experts, strict=True)
        ]

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
        return self._laid_out(number, deadline_s, None)

    def keep(self, index: int, place: torch.Tensor, deadline_s: float) -> GpuLayer:
        """One of these layers, laid out in memory of its own by kernels that are launched now. Raises WeightsLost."""
        return self._laid_out(self._numbers[index], deadline_s, place)

    def end(self) -> None:
        """The pass is over: what the next one needs first is on its way."""
        self._ring.end()

    def _laid_out(self, number: int, deadline_s: float, place: torch.Tensor | None) -> GpuLayer:
        slot = self._ring.take(number, deadline_s)
        passing = self._slots[number][slot]
        if place is not None:
            passing = SlotLayer(
                self._pieces[number], self.memory.slots[slot], place, self._card.dtype, self._experts[number]
            )
        with torch.cuda.stream(self._card.stream):
            layer = passing.lay_out()
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

    def rest(self, wait_s: float) -> bool:
        """Whether no copy and no read runs any more, in time. Passes may go on afterwards, either way."""
        return self._ring.rest(wait_s)

    def close(self) -> bool:
        """When no kernel runs. False when a copy or a read is stuck: its memory is left to it."""
        at_rest = self._ring.close()
        if at_rest:
            self._slots = []
        return at_rest
