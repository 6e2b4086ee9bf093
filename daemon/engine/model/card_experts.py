"""The experts of a mixture that a card runs: all of them there for good, or as many at a time as there are places for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from tierd.daemon.engine.model.cached_experts import CachedExperts, ExpertMemory, ExpertNeeds
from tierd.daemon.engine.model.card_memory import Card, pieces_of
from tierd.daemon.engine.model.load import RecordView, expert_of, shape_of
from tierd.daemon.engine.model.misses import MAX_COMPUTED_ROWS, Processors
from tierd.daemon.engine.model.pieces import layer_piece
from tierd.daemon.engine.model.weights_status import Counted, WeightRow
from tierd.daemon.models.catalog import Manifest
from tierd.daemon.models.placement import least_expert_slots
from tierd.daemon.models.placement_card import DISK_SLOTS, CardPlacement, expert_stages, record_card_bytes
from tierd.daemon.models.records import expert_names, expert_places
from tierd.kernels.cpu.expert_rows import ExpertRows
from tierd.kernels.gpu.experts import GpuExpert, GpuExperts
from tierd.kernels.gpu.layers import place_bytes
from tierd.tiers.mover import Mover
from tierd.tiers.store_io import Bytes
from tierd.tiers.weights_file import WeightFile


class CardExperts:
    """All experts of a model; none of a dense one. Threading: as `CardWeights`, whose they are.

    Attributes:
        places: the names of their records, with the layer and the number of each.
        tables: by layer, where the decoder finds its experts.
        kept: the names of those that have memory of their own on the card.
        cached: those that come and go; None when all are kept.

    Args:
        opened: gives the file, where it is needed.
        threads: of the processors, for rows through experts that are missing; 0: they compute none.
    """

    def __init__(
        self, manifest: Manifest, card: Card, mover: Mover, opened: Callable[[], WeightFile], threads: int, *,
        overlap: bool, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._threads = threads
        self._processors: Processors | None = None
        self._manifest, self._card, self._mover, self._opened = manifest, card, mover, opened
        self._overlap, self._clock = overlap, clock
        entries = {record.name: record for record in manifest.records}
        self._names = expert_names(manifest.spec)
        self.places = expert_places(manifest.spec)
        self._entries = [entries[name] for name in self.places]
        self._numbers = {name: number for number, name in enumerate(self.places)}
        self.kept: set[str] = set()
        self.cached: CachedExperts | None = None
        self._copied_before, self._read_before = Counted(), Counted()
        self.tables: dict[int, GpuExperts] = {}
        if (experts := shape_of(manifest.spec).experts) is not None:
            with card.filling(0):
                for layer in experts.layers:
                    self.tables[layer] = GpuExperts(experts, manifest.spec.hidden, card.device, card.dtype)

    @property
    def cached_bytes(self) -> int:
        """Of the card, for those that come and go."""
        return 0 if self.cached is None else self.cached.memory.device_bytes

    def begin_computing(self) -> None:
        """Where experts come and go, the processors compute some of them from now on, whose kernels are compiled: it
        measures them."""
        if self.cached is None or not self.can_compute or self._processors is not None:
            return
        self._processors = Processors(ExpertRows(shape_of(self._manifest.spec), MAX_COMPUTED_ROWS, self._threads))
        for number in range(len(self._entries)):
            self._hand(number, self.cached.memory_of(number))
        self.cached.processors = self._processors

    @property
    def can_compute(self) -> bool:
        """Whether there is anything for the processors to compute."""
        return self._threads > 0 and self.cached is not None

    @property
    def computed(self) -> int:
        """Experts whose rows the processors computed, since the start."""
        return 0 if self._processors is None else self._processors.computed

    def load(self, name: str, memory: Bytes) -> None:
        """An expert on the card, for good. Raises CardFull."""
        entry, (layer, number) = self._entries[self._numbers[name]], self.places[name]
        weights = expert_of(RecordView(entry, memory), self._manifest.spec)
        with self._card.filling(record_card_bytes(entry)):
            expert = GpuExpert.load(weights, self._card.device, self._card.dtype)
            self.tables[layer].put({number: expert})
        self.kept.add(name)

    def forget(self, names: Collection[str]) -> None:
        """Experts leave the memory that they have on the card."""
        with torch.cuda.stream(self._card.stream):
            for layer, of_layer in self._names.items():
                if leaving := {number: None for number, name in enumerate(of_layer) if name in names}:
                    self.tables[layer].put(leaving)
        self.kept.difference_update(names)

    def prepared(self, target: CardPlacement, host: Mapping[str, Bytes], kept: Collection[str]) -> CachedExperts | None:
        """What brings those that are not kept, beside what brings them now, or that; None when all are kept.

        Raises GpuError, ModelInvalid; nothing has changed then.
        """
        if len(kept) == len(self.places):
            return None
        before, experts = self.cached, self._manifest.spec.experts
        assert experts is not None
        slots = target.expert_slots or min(least_expert_slots(self._manifest)[0], len(self.places) - len(kept))
        if before is not None and len(before.memory.slots) == slots and self._lie_as_before(host, kept, before):
            return before
        below = [entry for entry in self._entries if entry.name not in host]
        needs = ExpertNeeds(
            slots, max(place_bytes(pieces_of(entry), self._card.width) for entry in self._entries),
            expert_stages(experts.used), max(entry.bytes for entry in self._entries),
            min(target.expert_disk_slots or DISK_SLOTS, len(below)),
            max((layer_piece(entry).slot_bytes for entry in below), default=0),
        )  # fmt: skip
        memory = ExpertMemory(self._card, needs, None if before is None else before.memory)
        return CachedExperts(
            self._card, self._mover, self._entries, self.tables, self._is_kept, host, memory, self._opened,
            self._processors, overlap=self._overlap, clock=self._clock,
        )  # fmt: skip

    def swap(self, fresh: CachedExperts | None) -> None:
        """Others bring experts from now on. Nothing was begun since `rest`."""
        before = self.cached
        if before is fresh:
            return
        self._copied_before, self._read_before = self.copied(), self.read()
        if before is not None and not before.close():
            raise AssertionError("copies of experts were begun while weights moved")
        self.cached = fresh
        for number in range(len(self._entries)):
            self._hand(number, None if fresh is None else fresh.memory_of(number))

    def came_to_host(self, name: str, memory: Bytes) -> None:
        """An expert lies in registered CPU memory from now on."""
        if self.cached is not None:
            self.cached.lies_at(self._numbers[name], memory)
            self._hand(self._numbers[name], memory)

    def bring(self, name: str, deadline_s: float) -> None:
        """An expert to the card for good. Raises CardFull, WeightsLost."""
        assert self.cached is not None
        number = self._numbers[name]
        place = self._card.memory(place_bytes(pieces_of(self._entries[number]), self._card.width))
        self.cached.keep(number, place, deadline_s)
        self.kept.add(name)

    def copied(self) -> Counted:
        """What crossed the link since the start."""
        return self._copied_before if self.cached is None else self._copied_before.plus(self.cached.copied())

    def read(self) -> Counted:
        """What was read of the disk since the start."""
        return self._read_before if self.cached is None else self._read_before.plus(self.cached.read())

    def row(self, layer: int, host: Collection[str]) -> list[WeightRow]:
        """The experts of a layer as one row; none of a dense one."""
        names = self._names.get(layer)
        if names is None:
            return []
        tier = "device" if self.kept.issuperset(names) else "host"
        if any(name not in self.kept and name not in host for name in names):
            tier = "nvme"
        hits, uses = self.cached.used(layer) if self.cached is not None else (0, 0)
        size = sum(self._entries[self._numbers[name]].bytes for name in names)
        return [WeightRow(f"layer.{layer}.experts", size, tier, hits, uses)]

    def rest(self, wait_s: float) -> bool:
        """Whether no copy and no read of experts runs any more, in time."""
        return self.cached is None or self.cached.rest(wait_s)

    def close(self) -> bool:
        """When no kernel runs. False when a copy or a read is stuck: its memory is left to it."""
        if self.cached is not None and not self.cached.close():
            return False
        self._copied_before, self._read_before, self.cached = self.copied(), self.read(), None
        self.tables, self.kept = {}, set()
        if self._processors is not None:
            self._processors.rows.close()
            self._processors = None
        return True

    def _hand(self, number: int, memory: Bytes | None) -> None:
        """The processors find an expert there, or (None) no longer."""
        if self._processors is None:
            return
        entry, rows, spec = self._entries[number], self._processors.rows, self._manifest.spec
        layer, expert = self.places[entry.name]
        if memory is None:
            rows.forget(layer, expert)
            return
        rows.keep(layer, expert, expert_of(RecordView(entry, memory), spec))
        self._processors.probe(layer, expert, spec.hidden)

    def _is_kept(self, number: int) -> bool:
        return self._entries[number].name in self.kept

    def _lie_as_before(self, host: Mapping[str, Bytes], kept: Collection[str], before: CachedExperts) -> bool:
        """Whether those that are not kept lie where they come from now."""
        return all(
            before.memory_of(number) is host.get(entry.name) or entry.name in kept
            for number, entry in enumerate(self._entries)
        )
