"""The weights of a model that a card runs: on the card as far as there is room, the others past it layer by layer.

A layer that is not on the card lies in registered CPU memory, or on the disk, as it lies in the file. It is copied into
one of a few slots ahead of its use, and laid out there by the card (`kernels.gpu.layers.SlotLayer`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tierd.daemon.engine.model.load import RecordView, layer_of, map_file, record_named, shape_of
from tierd.daemon.engine.model.passing import Card, PassingLayers
from tierd.daemon.engine.model.pieces import open_file, read_record
from tierd.daemon.engine.model.weights_status import Counted, PassMeter, WeightRow, WeightsStatus
from tierd.daemon.models.catalog import Manifest
from tierd.daemon.models.placement import MAX_SLOTS, head_record
from tierd.daemon.models.placement_card import (
    DISK_SLOTS,
    CardPlacement,
    place_on_card,
    record_card_bytes,
)
from tierd.kernels.gpu.layers import Ends, GpuLayer, load_ends
from tierd.kernels.packed_rows import unpack_rows
from tierd.tiers.cuda_memory import pinned_array
from tierd.tiers.links import Link
from tierd.tiers.mover import Mover
from tierd.tiers.store_io import Bytes, StoreIO
from tierd.tiers.weights_file import WeightFile

if TYPE_CHECKING:
    from tierd.daemon.engine.model.experts import StreamedExperts
    from tierd.kernels.cpu.weights import Floats, Ints, Rows
    from tierd.kernels.gpu.decoder import GpuDecoder

class CardWeights:
    """See `HeldWeights`. Threading: the loader builds it; from then on it is the step thread's.

    Args:
        device_bytes: of the card for resident records, slots and the place of streamed layers; None: no bound.
        host_bytes: of CPU memory for what the card does not take; what has no room there stays on the disk.
        progress: called with (bytes in place, bytes) while records are read.
        overlap: copy and read ahead.
        io: the system calls of reads.

    Raises DoesNotFit, DoesNotFitHost, ModelInvalid; ValueError for what a card does not run; OSError (ENOMEM) when CPU
    memory can't be registered. `attach` comes next; `close` before the mover's end.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        device_bytes: int | None,
        host_bytes: int | None,
        card: Card,
        mover: Mover,
        progress: Callable[[int, int], None],
        *,
        overlap: bool = True,
        io: StoreIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if manifest.spec.experts is not None:
            raise ValueError("mixtures of experts are not computed on a card yet")
        self.shape = shape_of(manifest.spec)
        self._directory, self._manifest, self._card, self._mover = directory, manifest, card, mover
        self._budget_bytes, self._host_budget_bytes = device_bytes, host_bytes
        self._overlap, self._io, self._clock = overlap, io, clock
        self._entries = {record.name: record for record in manifest.records}
        self._names = [f"layer.{number}" for number in range(manifest.spec.num_layers)]
        self._target: CardPlacement = place_on_card(manifest, device_bytes, host_bytes)
        self.layers: list[GpuLayer | None] = [None] * len(self._names)
        self._host: dict[str, Bytes] = {}
        self._file: WeightFile | None = None
        self._decoder: GpuDecoder | None = None
        self._passing: PassingLayers | None = None
        self._copied_before, self._read_before = Counted(), Counted()
        self._meter = PassMeter()
        try:
            self.ends = self._load(progress)
            self._arrange()
        except BaseException:
            self.close()
            raise

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def total_bytes(self) -> int:
        """Of all records, as they lie in the file."""
        return self._manifest.bytes

    @property
    def budget_bytes(self) -> int | None:
        """What `memory_bytes` may come to; None without a bound."""
        return self._budget_bytes

    @property
    def memory_bytes(self) -> int:
        """On the card: resident records, slots, the place of streamed layers."""
        return sum(record_card_bytes(self._entries[name]) for name in self._on_card()) + self._passing_bytes

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self._card.dtype

    def describe(self) -> str:
        """For people: what is not on the card."""
        below = sum(row.tier == "nvme" for row in self.rows())
        return (
            f"{len(self._passing or ())} of {len(self._names)} layers are copied to the card in every step, {below} of "
            "them from the disk"
        )

    @property
    def _passing_bytes(self) -> int:
        return 0 if self._passing is None else self._passing.device_bytes

    @property
    def streams(self) -> bool:
        """Whether a pass needs layers that are not on the card."""
        return self._passing is not None

    @property
    def can_move(self) -> bool:
        """Whether there is a decoder, from and to which layers can go."""
        return self._decoder is not None

    def embed_rows(self, tokens: Ints) -> Floats:
        """Rows of an embedding that is not on the card: fp32 [tokens, hidden]."""
        spec = self._manifest.spec
        matrix = RecordView(self._entries["embed"], self._host["embed"]).matrix("embed", spec.vocab, spec.hidden)
        return unpack_rows(matrix, tokens)

    def attach(self, decoder: GpuDecoder) -> None:
        """The decoder that was built of what is on the card."""
        self._decoder = decoder

    def statistics(self) -> WeightsStatus:
        """What there is to say now."""
        card, counted, disk = self._on_card(), self._copied(), self._read()
        sizes = {name: entry.bytes for name, entry in self._entries.items()}
        below = [name for name in sizes if name not in card and name not in self._host]
        rate, peak = self._meter.bytes_per_s, self._meter.peak_bytes_per_s
        return WeightsStatus(
            budget_bytes=self._budget_bytes,
            memory_bytes=self.memory_bytes,
            device_records=len(card),
            device_bytes=sum(sizes[name] for name in card),
            host_records=len(self._host),
            host_bytes=sum(sizes[name] for name in self._host),
            nvme_records=len(below),
            nvme_bytes=sum(sizes[name] for name in below),
            ring_bytes=self._passing_bytes,
            rows_bytes=0,
            pass_bytes=0 if self._passing is None else self._passing.pass_bytes,
            read_bytes=disk.read_bytes,
            copied_bytes=counted.read_bytes,
            waited_s=round(counted.waited_s, 3),
            retries=disk.retries,
            lost=counted.lost + disk.lost,
            uses=counted.uses,
            hits=counted.hits,
            bytes_per_s=round(rate),
            peak_bytes_per_s=round(peak),
            peak_share=round(rate / peak, 3) if peak else 0.0,
        )

    def rows(self) -> list[WeightRow]:
        """Every record in the order of the file: where it lies, and of streamed ones how often they were there."""
        out, card = [], self._on_card()
        for name, entry in self._entries.items():
            tier = "device" if name in card else "host" if name in self._host else "nvme"
            row = WeightRow(name, entry.bytes, tier)
            if self._passing is not None and name in self._names:
                hits, uses = self._passing.used(self._names.index(name))
                row = row._replace(hits=hits, uses=uses)
            out.append(row)
        return out

    # -- a pass ----------------------------------------------------------------------------------------------------

    def open(self, tokens: Ints, wants_logits: bool, deadline_s: float) -> Rows | None:
        """A pass begins. The decoder asks for rows of the embedding itself."""
        self._meter.begin(self._clock())
        if self._passing is not None:
            self._passing.begin()
        return None

    def layer(self, index: int, deadline_s: float) -> GpuLayer | None:
        """A layer laid out for the kernels that are launched next; None for one that the decoder has.

        Raises WeightsLost.
        """
        return None if self._passing is None else self._passing.layer(index, deadline_s)

    def experts(self, deadline_s: float) -> StreamedExperts | None:
        """There are none."""
        return None

    def head_parts(self, deadline_s: float) -> None:
        """The card has the head."""
        return

    def end(self) -> None:
        """The pass is over: what it says about the rate."""
        reads_disk = self._passing is not None and self._passing.reads_disk  # the slower one decides
        link, moved = (Link.DISK_READ, self._read()) if reads_disk else (Link.HOST_TO_DEVICE, self._copied())
        self._meter.end(self._clock(), moved.read_bytes, self._mover.statistics()[link].bytes_per_s)

    # -- moving records --------------------------------------------------------------------------------------------

    def retarget(self, memory_bytes: int) -> None:
        """Between passes: so much memory of the card from now on. What has to leave it leaves at once; `settle` brings
        the rest. The embedding stays where it is.

        Raises DoesNotFit, and ModelInvalid when the file can't be read; nothing changes then.
        """
        target = place_on_card(
            self._manifest, memory_bytes, self._host_budget_bytes, embed_on_card="embed" not in self._host
        )
        if target.streamed:
            self._opened()
        self._target, self._budget_bytes = target, memory_bytes
        for index, name in enumerate(self._names):
            if name not in target.device:
                self._put(index, None)
        for name in [name for name in self._host if name not in target.host and name not in target.device]:
            del self._host[name]
        self._arrange()

    def settle(self) -> bool:
        """Between passes: brings one record to its place. False when nothing is left to do. Raises ModelInvalid."""
        for index, name in enumerate(self._names):
            if name in self._target.device and self.layers[index] is None:
                self._put(index, self._loaded(index, self._memory_of(name)))
                self._synchronize()
                self._arrange()
                self._host.pop(name, None)  # the ring that read it is gone
                return True
            if name in self._target.host and name not in self._host:
                self._host[name] = self._pinned(name)
                self._arrange()
                return True
        return False

    def close(self) -> None:
        """Ends copies and reads, and gives everything back. Idempotent."""
        at_rest = self._drop_passing()
        if self._file is not None and at_rest:
            self._file.close()
        self._file = self._decoder = None
        self.layers = []
        if at_rest:
            self._host.clear()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _load(self, progress: Callable[[int, int], None]) -> Ends:
        spec, target, done = self._manifest.spec, self._target, 0
        total = self._manifest.bytes - sum(self._entries[name].bytes for name in target.nvme)
        mapped = map_file(self._directory, self._manifest)[1] if len(target.device) == len(self._entries) else None
        ends: dict[str, Bytes] = {}
        for name, entry in self._entries.items():
            if name in target.nvme:
                continue
            if mapped is not None:
                memory = mapped[entry.offset : entry.offset + entry.bytes]
            elif name in self._names and name in target.host:
                memory = self._host[name] = self._pinned(name)
            else:
                memory = read_record(self._opened(), entry)
            if name not in self._names:
                ends[name] = memory
            elif name in target.device:
                index = self._names.index(name)
                self.layers[index] = self._loaded(index, memory)
            done += entry.bytes
            progress(done, total)
        view = {name: RecordView(record_named(self._entries, name), memory) for name, memory in ends.items()}
        embed = view["embed"].matrix("embed", spec.vocab, spec.hidden)
        if "embed" in target.host:
            self._host["embed"] = ends["embed"]
        head = embed if spec.tied else view[head_record(self._manifest)].matrix("head", spec.vocab, spec.hidden)
        norm = view["final"].vector("final_norm", spec.hidden)
        on_card = load_ends(
            None if "embed" in target.host else embed, norm, head, self._card.device, self._card.dtype
        )
        self._synchronize()
        return on_card

    def _loaded(self, index: int, memory: Bytes) -> GpuLayer:
        """A layer on the card, for good."""
        view = RecordView(self._entries[self._names[index]], memory)
        return GpuLayer.load(layer_of(view, self._manifest.spec, index), self._card.device, self._card.dtype)

    def _memory_of(self, name: str) -> Bytes:
        return self._host[name] if name in self._host else read_record(self._opened(), self._entries[name])

    def _pinned(self, name: str) -> Bytes:
        """A record in registered memory, checked."""
        entry = self._entries[name]
        return read_record(self._opened(), entry, pinned_array(self._card.gpu, entry.bytes))

    def _opened(self) -> WeightFile:
        if self._file is None:
            self._file = open_file(self._directory, self._manifest, self._io)
        return self._file

    def _put(self, index: int, layer: GpuLayer | None) -> None:
        """The decoder has a layer, or has it no more."""
        if self.layers[index] is layer:
            return
        self.layers[index] = layer
        if self._decoder is not None:
            self._decoder.set_layer(index, layer)

    def _on_card(self) -> set[str]:
        names = {name for name, layer in zip(self._names, self.layers, strict=False) if layer is not None}
        return names | {name for name in self._entries if name not in self._names and name not in self._host}

    def _arrange(self) -> None:
        """Slots for the layers that are not on the card now."""
        self._drop_passing()
        entries = {i: self._entries[self._names[i]] for i, layer in enumerate(self.layers) if layer is None}
        if entries:
            self._passing = PassingLayers(
                self._card, self._mover, entries, self._host, slots=self._target.slots or MAX_SLOTS,
                disk_slots=self._target.disk_slots or DISK_SLOTS, opened=self._opened, overlap=self._overlap,
                clock=self._clock,
            )  # fmt: skip
            self._synchronize()

    def _synchronize(self) -> None:
        if self._card.device.type == "cuda":  # what was moved, was moved on another stream
            torch.cuda.synchronize(self._card.device)

    def _drop_passing(self) -> bool:
        """False when a copy or a read is stuck: its memory is left to it."""
        passing = self._passing
        if passing is None:
            return True
        self._copied_before, self._read_before = self._copied(), self._read()
        self._passing = None
        self._synchronize()
        return passing.close()

    def _copied(self) -> Counted:
        """What crossed the link since the start."""
        return self._copied_before if self._passing is None else self._copied_before.plus(self._passing.copied())

    def _read(self) -> Counted:
        """What passes read of the disk since the start."""
        return self._read_before if self._passing is None else self._read_before.plus(self._passing.read())
