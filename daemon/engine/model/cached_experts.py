"""Experts that come to a card and go: as many as there are places for, from CPU memory or the disk.

Which of them are there is up to `tiers.weights_cache`; the decoder finds them by a table of each layer
(`kernels.gpu.experts`). Rows through others may be computed by the processors meanwhile (`misses`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from tierd.daemon.engine.model.card_memory import Card, pieces_of
from tierd.daemon.engine.model.misses import LINK_START_BYTES_PER_S, Processors, computed_elsewhere
from tierd.daemon.engine.model.pieces import layer_piece
from tierd.daemon.engine.model.weights_status import Counted
from tierd.daemon.models.catalog import RecordEntry
from tierd.kernels.cpu.weights import Floats
from tierd.kernels.gpu.experts import GpuExpert, GpuExperts, SlotExpert
from tierd.kernels.gpu.mixture import Wave
from tierd.tiers.cuda_memory import pinned_array
from tierd.tiers.gpu import DeviceRow
from tierd.tiers.links import Link
from tierd.tiers.mover import JobClass, Mover
from tierd.tiers.store_io import Bytes
from tierd.tiers.weights_cache import ExpertCache
from tierd.tiers.weights_device import Record, SlotCopies
from tierd.tiers.weights_file import WeightFile
from tierd.tiers.weights_stages import CardFetches, DiskBelow


class ExpertNeeds(NamedTuple):
    """Memory for experts that come and go: counts, and bytes of each."""

    slots: int
    slot_bytes: int
    stages: int
    stage_bytes: int
    disk_slots: int
    disk_slot_bytes: int


class ExpertMemory:
    """Places and stages on the card, and registered CPU memory for what comes from the disk; shared with an earlier one
    as `PassMemory`. Raises CardFull, and OSError (ENOMEM) when CPU memory can't be registered.
    """

    def __init__(self, card: Card, needs: ExpertNeeds, before: ExpertMemory | None) -> None:
        disk, slots, stages = ([], [], []) if before is None else (before.disk, before.slots, before.stages)
        self.disk: list[Bytes] = [one for one in disk if one.nbytes == needs.disk_slot_bytes][: needs.disk_slots]
        while len(self.disk) < needs.disk_slots:
            self.disk.append(pinned_array(card.gpu, needs.disk_slot_bytes))
        self.stages: list[torch.Tensor] = list(stages)
        while len(self.stages) < needs.stages:
            self.stages.append(card.memory(needs.stage_bytes))
        self.slots: list[torch.Tensor] = slots[: needs.slots]
        while len(self.slots) < needs.slots:
            self.slots.append(card.memory(needs.slot_bytes))

    @property
    def device_bytes(self) -> int:
        """On the card."""
        return sum(int(one.nbytes) for one in (*self.slots, *self.stages))


class CachedExperts:
    """See `kernels.gpu.mixture.CardExpertSource`. `deadline_s` is that of the layer which is computed.

    Args:
        entries: the records of all experts, by number: those of a layer one behind the other.
        tables: where the decoder finds those of each layer, in the same order.
        is_kept: whether an expert, by number, has memory of its own on the card.
        host: what lies in registered CPU memory.
        opened: gives the file, where it is needed.
        processors: compute rows through experts that they were handed; None: nobody does.
    """

    def __init__(
        self, card: Card, mover: Mover, entries: list[RecordEntry], tables: Mapping[int, GpuExperts],
        is_kept: Callable[[int], bool], host: Mapping[str, Bytes], memory: ExpertMemory,
        opened: Callable[[], WeightFile], processors: Processors | None, *, overlap: bool, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._mover, self.processors, self._bytes_per_s = mover, processors, LINK_START_BYTES_PER_S
        self._card, self._entries, self.memory, self._is_kept = card, entries, memory, is_kept
        self._count = len(entries) // len(tables)
        self._tables = list(tables.values())
        self._firsts = {layer: number * self._count for number, layer in enumerate(tables)}
        self._slots: dict[tuple[int, int, int], SlotExpert] = {}  # by layer, stage and place: what they have in common
        self._lie: dict[int, int] = {}  # place to the expert that was laid out there last
        self._found: dict[int, int] = {}  # expert to the place where the decoder finds it
        self._changed: dict[int, dict[int, GpuExpert | None]] = {}  # by place of a table: what it is to be told
        self._keeping: torch.Tensor | None = None  # where one is laid out that stays
        self._kept: GpuExpert | None = None
        below = {n: layer_piece(entry) for n, entry in enumerate(entries) if entry.name not in host}
        disk = DiskBelow(opened(), mover, below, memory.disk, clock) if below else None
        copies = SlotCopies(
            card.gpu, card.compute, mover, [DeviceRow(one.data_ptr(), one.nbytes) for one in memory.stages],
            memory.stages,
        )  # fmt: skip
        places = len(memory.slots)
        self._fetches = CardFetches(
            [Record(entry.name, entry.bytes, host.get(entry.name)) for entry in entries], copies, mover, places + 1,
            self._lay_out, disk, clock,
        )  # fmt: skip
        self._cache = ExpertCache(self._fetches, len(entries), places, overlap=overlap, clock=clock)
        self._below = set(below)
        self.deadline_s = 0.0

    @property
    def reads_disk(self) -> bool:
        """Whether some of them come from the disk."""
        return bool(self._below)

    def begin(self, rows: int) -> None:
        """A pass of so many rows begins."""
        self._cache.begin(rows)
        if self.processors is not None:  # figures of the link cost too much to be asked for in every layer
            self._bytes_per_s = self._mover.statistics()[Link.HOST_TO_DEVICE].bytes_per_s or LINK_START_BYTES_PER_S

    def bring(
        self, layer: int, wanted: Mapping[int, int], guessed: Mapping[int, int], rows_of: Callable[[int], Floats]
    ) -> Iterator[Wave]:
        """See `CardExpertSource`. Raises WeightsLost."""
        first, following = self._firsts[layer], self._firsts.get(layer + 1, 0)
        here = [expert for expert in wanted if self._is_kept(first + expert)]
        if here:
            yield Wave(here)
        numbers, guesses = self._not_kept(first, wanted), self._not_kept(following, guessed)
        away: dict[int, Floats] = {}

        def elsewhere(missing: Sequence[int], ahead: int) -> list[int]:
            chosen = self._elsewhere(layer, first, [(number, numbers[number]) for number in missing], ahead)
            away.update((number - first, rows_of(number - first)) for number in chosen)
            return chosen

        for wave in self._cache.bring(numbers, guesses, self.deadline_s, elsewhere):
            self._tell()
            if wave:
                yield Wave([number - first for number, _ in wave])
            elif self.processors is not None:
                yield Wave((), self.processors.compute(layer, away))

    def memory_of(self, number: int) -> Bytes | None:
        """Where an expert lies in registered CPU memory; None for one of the disk."""
        return self._fetches.records[number].memory

    def lies_at(self, number: int, memory: Bytes) -> None:
        """See `CardFetches.lies_at`."""
        self._below.discard(number)
        self._fetches.lies_at(number, memory)

    def keep(self, number: int, place: torch.Tensor, deadline_s: float) -> None:
        """The decoder finds an expert in memory of its own from now on, by the way of those that come and go.

        Raises WeightsLost.
        """
        self._cache.forget(number)  # it may be on its way to a place, and would come when it is kept
        extra, self._keeping = len(self.memory.slots), place
        try:
            self._fetches.start(extra, number, JobClass.NOW)
            self._fetches.wait(extra, deadline_s)
        finally:
            self._fetches.abandon(extra)
            self._keeping = None
        self._found.pop(number, None)
        self._tell()

    def used(self, layer: int) -> tuple[int, int]:
        """How often experts of this layer were there, and how often they were needed."""
        numbers = slice(self._firsts[layer], self._firsts[layer] + self._count)
        return int(self._cache.hits[numbers].sum()), int(self._cache.uses[numbers].sum())

    def copied(self) -> Counted:
        """What crossed the link, and how often experts were there."""
        stats = self._cache.statistics()
        return Counted(
            stats.waited_s, self._fetches.copied_bytes, 0, 0, stats.uses, stats.hits, stats.guesses, stats.right
        )

    def read(self) -> Counted:
        """What was read of the disk, and what could not be had."""
        stats = self._fetches.statistics()
        return Counted(0.0, stats.read_bytes, stats.retries, stats.lost)

    def rest(self, wait_s: float) -> bool:
        """See `CardFetches.rest`."""
        return self._fetches.rest(wait_s)

    def close(self, wait_s: float | None = None) -> bool:
        """When no kernel runs: the decoder finds none of them any more. False when a copy or a read is stuck."""
        at_rest = self._fetches.close(wait_s)
        if at_rest:
            for number in self._found:
                self._change(number, None)
            self._tell()
            self._lie, self._found, self._slots = {}, {}, {}
        return at_rest

    # -- inside ----------------------------------------------------------------------------------------------------

    def _not_kept(self, first: int, experts: Mapping[int, int]) -> dict[int, int]:
        return {first + expert: rows for expert, rows in experts.items() if not self._is_kept(first + expert)}

    def _elsewhere(self, layer: int, first: int, missing: Sequence[tuple[int, int]], ahead: int) -> list[int]:
        """Which of a layer's missing experts, with their rows, the processors compute."""
        if self.processors is None or self.processors.cost is None:
            return []
        can = {
            number for number, _ in missing
            if self.memory_of(number) is not None and self.processors.rows.has(layer, number - first)
        }  # fmt: skip
        fetch_s = self._entries[first].bytes / self._bytes_per_s
        return computed_elsewhere(missing, can, ahead, fetch_s, self.processors.cost.of)

    def _lay_out(self, stage: int, expert: int, place: int) -> None:
        """See `tiers.weights_stages.LayOut`. Whoever was there before is found there until then, and no longer."""
        table = expert // self._count
        if place == len(self.memory.slots):
            assert self._keeping is not None
            slot = self._slot(expert, stage, self._keeping)
        else:
            before = self._lie.get(place, -1)
            if self._found.get(before) == place:  # else it has come elsewhere since it was given up here
                del self._found[before]
                self._change(before, None)
            key = table, stage, place
            if key not in self._slots:
                self._slots[key] = self._slot(expert, stage, self.memory.slots[place])
            slot = self._slots[key]
            self._lie[place], self._found[expert] = expert, place
        with torch.cuda.stream(self._card.stream):
            self._change(expert, slot.lay_out())

    def _slot(self, expert: int, stage: int, place: torch.Tensor) -> SlotExpert:
        pieces = pieces_of(self._entries[expert])
        return SlotExpert(pieces, self.memory.stages[stage], place, self._card.dtype)

    def _change(self, number: int, expert: GpuExpert | None) -> None:
        self._changed.setdefault(number // self._count, {})[number % self._count] = expert

    def _tell(self) -> None:
        """The decoder's tables say what has changed."""
        changed, self._changed = self._changed, {}
        with torch.cuda.stream(self._card.stream):
            for table, experts in changed.items():
                self._tables[table].put(experts)
