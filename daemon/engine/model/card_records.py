"""Where the records of a model lie while a card runs it, and how they move between two passes.

A move has everything that it needs before anything is given up: whatever fails, passes go on with the places they had.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tierd.daemon.engine.model.cached_experts import CachedExperts
from tierd.daemon.engine.model.card_experts import CardExperts
from tierd.daemon.engine.model.card_memory import Card, CardFull, PassMemory, PassNeeds, pieces_of
from tierd.daemon.engine.model.load import RecordView, layer_of, map_file, record_named
from tierd.daemon.engine.model.passing import PassingLayers
from tierd.daemon.engine.model.pieces import open_file, read_record
from tierd.daemon.engine.model.weights_status import WEIGHTS_TIMEOUT_S, Counted, NotMoved
from tierd.daemon.errors import ModelInvalid
from tierd.daemon.models.catalog import Manifest
from tierd.daemon.models.placement import MAX_SLOTS, head_record
from tierd.daemon.models.placement_card import DISK_SLOTS, CardPlacement, record_card_bytes
from tierd.daemon.units import human_bytes
from tierd.kernels.gpu.layers import Ends, GpuLayer, load_ends, place_bytes
from tierd.tiers.cuda_memory import pinned_array
from tierd.tiers.errors import MoverClosed, WeightsLost
from tierd.tiers.gpu import GpuError
from tierd.tiers.mover import Mover
from tierd.tiers.store_io import Bytes, StoreIO
from tierd.tiers.weights_file import WeightFile

if TYPE_CHECKING:
    from tierd.kernels.gpu.decoder import GpuDecoder

log = logging.getLogger(__name__)

MOVE_WAIT_S = 5.0  # for copies and kernels to end: nobody's answer goes on meanwhile


class CardRecords:
    """Threading: as `CardWeights`, whose it is.

    Attributes:
        entries: all records by name; `names`: those of layers, in the order of a pass.
        layers: those that are on the card, None for the others.
        host: records in CPU memory: registered, but for the embedding, which the CPU reads.
        target: where everything is to lie.
        passing: brings the layers that are not on the card; None when all are.
        experts: those of a mixture.
    """

    def __init__(
        self, directory: Path, manifest: Manifest, target: CardPlacement, card: Card, mover: Mover, threads: int, *,
        overlap: bool, io: StoreIO | None, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._directory, self._manifest, self._card, self._mover = directory, manifest, card, mover
        self._overlap, self._io, self._clock = overlap, io, clock
        self.entries = {record.name: record for record in manifest.records}
        self.names = [f"layer.{number}" for number in range(manifest.spec.num_layers)]
        self.layers: list[GpuLayer | None] = [None] * len(self.names)
        self.host: dict[str, Bytes] = {}
        self.target = target
        self.passing: PassingLayers | None = None
        self.decoder: GpuDecoder | None = None
        self.experts = CardExperts(manifest, card, mover, self.opened, threads, overlap=overlap, clock=clock)
        self._file: WeightFile | None = None
        self._copied_before, self._read_before = Counted(), Counted()

    @property
    def passing_bytes(self) -> int:
        """Of the card, that layers pass through, and experts come to for a while."""
        return self.experts.cached_bytes + (0 if self.passing is None else self.passing.memory.device_bytes)

    def load(self, progress: Callable[[int, int], None]) -> Ends:
        """Reads what does not stay on the disk; layers and ends are on the card then, and the other layers can pass.

        Raises ModelInvalid, OSError.
        """
        spec, target, done = self._manifest.spec, self.target, 0
        total = self._manifest.bytes - sum(self.entries[name].bytes for name in target.nvme)
        mapped = map_file(self._directory, self._manifest)[1] if len(target.device) == len(self.entries) else None
        ends: dict[str, Bytes] = {}
        for name, entry in self.entries.items():
            if name in target.nvme:
                continue
            if mapped is not None:
                memory = mapped[entry.offset : entry.offset + entry.bytes]
            elif name in target.host and (name in self.names or name in self.experts.places):
                memory = self.host[name] = self.pinned(name)
            else:
                memory = read_record(self.opened(), entry)
            if name in self.experts.places:
                if name in target.device:
                    self.experts.load(name, memory)
            elif name not in self.names:
                ends[name] = memory
            elif name in target.device:
                index = self.names.index(name)
                self.layers[index] = self.loaded(index, memory)
            done += entry.bytes
            progress(done, total)
        view = {name: RecordView(record_named(self.entries, name), memory) for name, memory in ends.items()}
        embed = view["embed"].matrix("embed", spec.vocab, spec.hidden)
        if "embed" in target.host:
            self.host["embed"] = ends["embed"]
        head = embed if spec.tied else view[head_record(self._manifest)].matrix("head", spec.vocab, spec.hidden)
        norm = view["final"].vector("final_norm", spec.hidden)
        here = [name for name in ends if name in target.device]
        with self._card.filling(sum(record_card_bytes(self.entries[name]) for name in here)):
            first = None if "embed" in target.host else embed
            found = load_ends(first, norm, head, self._card.device, self._card.dtype)
        self._card.wait(self._mover, MOVE_WAIT_S)
        self.passing = self._prepared(target, self.host, self._indexes(streamed=True))
        self.experts.swap(self.experts.prepared(target, self.host, self.experts.kept))
        return found

    def on_card(self) -> set[str]:
        """The records that are on the card."""
        names = {name for name, layer in zip(self.names, self.layers, strict=False) if layer is not None}
        ends = self.entries.keys() - set(self.names) - self.experts.places.keys() - self.host.keys()
        return names | ends | self.experts.kept

    def opened(self) -> WeightFile:
        """The file, past the page cache. Raises ModelInvalid."""
        if self._file is None:
            self._file = open_file(self._directory, self._manifest, self._io)
        return self._file

    def loaded(self, index: int, memory: Bytes) -> GpuLayer:
        """A layer on the card, for good. Raises CardFull."""
        entry = self.entries[self.names[index]]
        layer = layer_of(RecordView(entry, memory), self._manifest.spec, index)
        with self._card.filling(record_card_bytes(entry)):
            return GpuLayer.load(layer, self._card.device, self._card.dtype, self.experts.tables.get(index))

    def pinned(self, name: str) -> Bytes:
        """A record in registered memory, checked."""
        entry = self.entries[name]
        return read_record(self.opened(), entry, pinned_array(self._card.gpu, entry.bytes))

    def copied(self) -> Counted:
        """What crossed the link since the start."""
        layers = self._copied_before if self.passing is None else self._copied_before.plus(self.passing.copied())
        return layers.plus(self.experts.copied())

    def read(self) -> Counted:
        """What passes read of the disk since the start."""
        layers = self._read_before if self.passing is None else self._read_before.plus(self.passing.read())
        return layers.plus(self.experts.read())

    # -- moving records --------------------------------------------------------------------------------------------

    def retarget(self, target: CardPlacement) -> None:
        """Other places from now on. What has to leave the card leaves at once; `settle` brings the rest.

        Raises ModelInvalid when the file can't be read, NotMoved when there is no memory for slots, or copies do not
        end; nothing changes then.
        """
        if target.streamed or target.expert_slots:
            self.opened()
        host = {name: one for name, one in self.host.items() if name in target.host or name in target.device}
        leaving = [n for n in self._indexes(streamed=False) if self.names[n] not in target.device]
        missing = sorted({*leaving, *self._indexes(streamed=True)})
        experts = self.experts.kept - target.device
        with self._moving():
            self._rest()
            fresh, cached = self._exchanged(target, host, missing, leaving, experts)
            for index in leaving:
                self._put(index, None)
            self.experts.forget(experts)
            self.host, self.target = host, target
            self._swap(fresh)
            self.experts.swap(cached)
            self._card.trim()

    def settle(self) -> bool:
        """Between passes: brings one record to its place. False when nothing is left to do.

        Raises ModelInvalid, and NotMoved: records that have not come stay as they are then.
        """
        target = self.target
        try:
            with self._moving():
                for index, name in enumerate(self.names):
                    if name in target.device and self.layers[index] is None:
                        self._bring(index)
                        return True
                    if name in target.host and name not in self.host:
                        self._rest()
                        host = {**self.host, name: self.pinned(name)}
                        self._swap(self._prepared(target, host, self._indexes(streamed=True)))
                        self.host = host
                        return True
                return self._settle_expert(target)
        except (NotMoved, ModelInvalid):
            card, mine = frozenset(self.on_card()), frozenset(self.host)
            streamed = tuple(self.names[index] for index in self._indexes(streamed=True))
            below = frozenset(self.entries) - card - mine
            self.target = replace(target, device=card, host=mine, nvme=below, streamed=streamed)
            raise

    def close(self) -> None:
        """Ends copies and reads, and gives everything back. Idempotent."""
        at_rest = True
        try:
            with contextlib.suppress(MoverClosed):  # whoever closed it knows that no pass runs
                self._card.wait(self._mover, MOVE_WAIT_S)
            at_rest = (self.passing is None or self.passing.close()) & self.experts.close()
        except GpuError as exc:
            at_rest = False
            log.warning("%s", exc.strerror)
        if not at_rest:
            # Freed now, it would be written into by a copy that ends later.
            log.warning("a copy of weights is stuck: %s of the card stay taken", human_bytes(self.passing_bytes))
            return
        if self.passing is not None:
            self._count(self.passing)
        if self._file is not None:
            self._file.close()
        self.passing = self._file = self.decoder = None
        self.layers = []
        self.host.clear()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _memory_of(self, name: str) -> Bytes:
        return self.host[name] if name in self.host else read_record(self.opened(), self.entries[name])

    def _put(self, index: int, layer: GpuLayer | None) -> None:
        """The decoder has a layer, or has it no more."""
        if self.layers[index] is layer:
            return
        self.layers[index] = layer
        if self.decoder is not None:
            self.decoder.set_layer(index, layer)

    def _indexes(self, *, streamed: bool) -> list[int]:
        """The layers that the decoder has, or those that it has not."""
        return [index for index, layer in enumerate(self.layers) if (layer is None) == streamed]

    def _prepared(
        self, target: CardPlacement, host: Mapping[str, Bytes], missing: Sequence[int]
    ) -> PassingLayers | None:
        """What brings the missing layers, beside what brings them now. Raises GpuError, ModelInvalid."""
        entries = {index: self.entries[self.names[index]] for index in missing}
        if not entries:
            return None
        before = None if self.passing is None else self.passing.memory
        slots = target.slots or (MAX_SLOTS if before is None else len(before.slots))
        needs = PassNeeds.of(
            entries.values(), host, slots, target.disk_slots or DISK_SLOTS, self._card.width
        )
        memory = PassMemory(self._card, needs, before)
        return PassingLayers(
            self._card, self._mover, entries, host, memory, self.experts.tables, self.opened, overlap=self._overlap,
            clock=self._clock,
        )  # fmt: skip

    def _both(
        self, target: CardPlacement, host: Mapping[str, Bytes], missing: Sequence[int], kept: set[str]
    ) -> tuple[PassingLayers | None, CachedExperts | None]:
        """As `_prepared`, with what brings the experts that are not kept."""
        fresh = self._prepared(target, host, missing)
        try:
            return fresh, self.experts.prepared(target, host, kept)
        except BaseException:
            if fresh is not None:
                fresh.close()
            raise

    def _exchanged(
        self, target: CardPlacement, host: Mapping[str, Bytes], missing: Sequence[int], leaving: Sequence[int],
        experts: set[str],
    ) -> tuple[PassingLayers | None, CachedExperts | None]:  # fmt: skip
        """As `_both`, with the memory of the layers and experts that leave if there is no other. They come back on an
        error."""
        kept = self.experts.kept - experts
        try:
            return self._both(target, host, missing, kept)
        except CardFull:
            if not leaving and not experts:
                raise
        for index in leaving:
            self._put(index, None)
        self.experts.forget(experts)
        try:
            return self._both(target, host, missing, kept)
        except (OSError, ModelInvalid):
            for index in leaving:  # into the memory that each of them had, which torch has kept
                self._put(index, self.loaded(index, self._memory_of(self.names[index])))
            for name in experts:
                self.experts.load(name, self._memory_of(name))
            self._card.wait(self._mover, MOVE_WAIT_S)
            raise

    def _settle_expert(self, target: CardPlacement) -> bool:
        """As `settle`, of an expert: layers come first, since every pass needs them."""
        for name in self.experts.places:
            if name in target.device and name not in self.experts.kept:
                self.experts.bring(name, self._clock() + WEIGHTS_TIMEOUT_S)
                self.host.pop(name, None)
                if len(self.experts.kept) == len(self.experts.places):
                    self._rest()
                    self.experts.swap(None)
                    self._card.trim()
                return True
            if name in target.host and name not in self.host:
                self.host[name] = self.pinned(name)
                self.experts.came_to_host(name, self.host[name])
                return True
        return False

    def _bring(self, index: int) -> None:
        """A layer to the card for good, by the way that those go that pass."""
        assert self.passing is not None
        name = self.names[index]
        pieces = pieces_of(self.entries[name])
        place = self._card.memory(place_bytes(pieces, self._card.width))
        layer = self.passing.keep(index, place, self._clock() + WEIGHTS_TIMEOUT_S)
        self._rest(place)
        fresh = self._prepared(self.target, self.host, [n for n in self._indexes(streamed=True) if n != index])
        self._put(index, layer)
        self._swap(fresh)
        self.host.pop(name, None)

    def _swap(self, fresh: PassingLayers | None) -> None:
        """Other layers pass from now on. Nothing was begun since `_rest`."""
        before = self.passing
        if before is not None:
            self._count(before)
            if not before.close():
                raise AssertionError("copies were begun while weights moved")
        self.passing = fresh
        self._card.trim()

    def _count(self, passed: PassingLayers) -> None:
        """What layers that pass no more have moved."""
        self._copied_before = self._copied_before.plus(passed.copied())
        self._read_before = self._read_before.plus(passed.read())

    def _rest(self, keep: object = None) -> None:
        """No kernel, no copy and no read runs: memory may change hands. Raises GpuError when something does not end."""
        self._card.wait(self._mover, MOVE_WAIT_S, keep)
        layers_rest = self.passing is None or self.passing.rest(MOVE_WAIT_S)
        if not (self.experts.rest(MOVE_WAIT_S) and layers_rest):
            size = human_bytes(self.passing_bytes)
            raise GpuError(
                errno.ETIMEDOUT, f"a copy has not ended in {MOVE_WAIT_S:g} s, and may write to {size} of slots"
            )

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """What keeps weights from moving, as one error."""
        why = ""
        try:
            yield
        except (OSError, WeightsLost, MoverClosed) as exc:
            why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        if why:  # out here: the other error holds memory that was had in vain
            log.warning("weights did not move: %s", why)
            raise NotMoved(why)
