"""The weights of a model that a card runs: on the card as far as there is room, the others past it layer by layer.

A layer that is not on the card lies in registered CPU memory, or on the disk, as it lies in the file. It is copied into
one of a few slots ahead of its use, and laid out there by the card (`kernels.gpu.layers.SlotLayer`). Experts of a
mixture that are not on the card lie there, too, and those that are used most are laid out in places of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tierd.daemon.engine.model.card_memory import Card
from tierd.daemon.engine.model.card_records import CardRecords
from tierd.daemon.engine.model.load import RecordView, shape_of
from tierd.daemon.engine.model.weights_status import PassMeter, WeightRow, WeightsStatus
from tierd.daemon.models.catalog import Manifest
from tierd.daemon.models.placement_card import place_on_card, record_card_bytes
from tierd.kernels.gpu.layers import Ends, GpuLayer
from tierd.kernels.packed_rows import unpack_rows
from tierd.tiers.links import Link
from tierd.tiers.mover import Mover
from tierd.tiers.store_io import StoreIO

if TYPE_CHECKING:
    from tierd.daemon.engine.model.cached_experts import CachedExperts
    from tierd.kernels.cpu.weights import Floats, Ints, Rows
    from tierd.kernels.gpu.decoder import GpuDecoder

class CardWeights:
    """See `HeldWeights`. Threading: the loader builds it; from then on it is the step thread's.

    Args:
        device_bytes: of the card for resident records, slots and the place of streamed layers, and experts that come
            and go; None: no bound.
        host_bytes: of CPU memory for what the card does not take; what has no room there stays on the disk.
        progress: called with (bytes in place, bytes) while records are read.
        threads: of the processors, for rows through experts that are not on the card; 0: they compute none.
        overlap: copy and read ahead.
        io: the system calls of reads.

    Raises DoesNotFit, DoesNotFitHost, ModelInvalid; ValueError for what a card does not run; OSError (ENOMEM) when the
    card has no memory, or CPU memory can't be registered. `attach` comes next; `close` before the mover's end.
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
        threads: int = 0,
        overlap: bool = True,
        io: StoreIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shape = shape_of(manifest.spec)
        self._manifest, self._card, self._mover = manifest, card, mover
        self._budget_bytes, self._host_budget_bytes = device_bytes, host_bytes
        self._clock = clock
        self._records = CardRecords(
            directory, manifest, place_on_card(manifest, device_bytes, host_bytes), card, mover, threads,
            overlap=overlap, io=io, clock=clock,
        )  # fmt: skip
        self._meter = PassMeter()
        try:
            self.ends: Ends = self._records.load(progress)
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
        """On the card: resident records, slots, the place of streamed layers, experts that come and go."""
        records = self._records
        return sum(record_card_bytes(records.entries[name]) for name in records.on_card()) + records.passing_bytes

    @property
    def layers(self) -> list[GpuLayer | None]:
        """Those on the card, by number."""
        return self._records.layers

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self._card.dtype

    def describe(self) -> str:
        """For people: what is not on the card."""
        records, said = self._records, []
        lie = {*records.host, *records.on_card()}
        if records.passing is not None:
            below, layers = sum(name not in lie for name in records.names), len(records.names)
            passing = len(records.passing)
            said.append(
                f"{passing} of {layers} layers are copied to the card in every step, {below} of them from the disk"
            )
        if (cached := records.experts.cached) is not None:
            places, experts = len(cached.memory.slots), len(records.experts.places)
            below = sum(name not in lie for name in records.experts.places)
            said.append(f"the card has places for {places} of {experts} experts, {below} of which lie on the disk")
        return "; ".join(said)

    @property
    def streams(self) -> bool:
        """Whether a pass needs layers or experts that are not on the card."""
        return self._records.passing is not None or self._records.experts.cached is not None

    @property
    def can_move(self) -> bool:
        """Whether there is a decoder, from and to which layers can go."""
        return self._records.decoder is not None

    def embed_rows(self, tokens: Ints) -> Floats:
        """Rows of an embedding that is not on the card: fp32 [tokens, hidden]."""
        spec, records = self._manifest.spec, self._records
        matrix = RecordView(records.entries["embed"], records.host["embed"]).matrix("embed", spec.vocab, spec.hidden)
        return unpack_rows(matrix, tokens)

    def attach(self, decoder: GpuDecoder) -> None:
        """The decoder that was built of what is on the card."""
        self._records.decoder = decoder

    @property
    def can_compute(self) -> bool:
        """Whether the processors may compute rows through experts that the card misses."""
        return self._records.experts.can_compute

    def begin_computing(self) -> None:
        """They do so from now on, if there are any. Their kernels are compiled."""
        self._records.experts.begin_computing()

    def statistics(self) -> WeightsStatus:
        """What there is to say now."""
        card, counted, disk = self._records.on_card(), self._records.copied(), self._records.read()
        sizes = {name: entry.bytes for name, entry in self._records.entries.items()}
        below = [name for name in sizes if name not in card and name not in self._records.host]
        rate, peak = self._meter.bytes_per_s, self._meter.peak_bytes_per_s
        return WeightsStatus(
            budget_bytes=self._budget_bytes,
            memory_bytes=self.memory_bytes,
            device_records=len(card),
            device_bytes=sum(sizes[name] for name in card),
            host_records=len(self._records.host),
            host_bytes=sum(sizes[name] for name in self._records.host),
            nvme_records=len(below),
            nvme_bytes=sum(sizes[name] for name in below),
            ring_bytes=self._records.passing_bytes - self._records.experts.cached_bytes,
            rows_bytes=0,
            pass_bytes=0 if self._records.passing is None else self._records.passing.pass_bytes,
            read_bytes=disk.read_bytes,
            copied_bytes=counted.read_bytes,
            waited_s=round(counted.waited_s, 3),
            retries=disk.retries,
            lost=counted.lost + disk.lost,
            uses=counted.uses,
            hits=counted.hits,
            experts_bytes=self._records.experts.cached_bytes,
            guesses=counted.guesses,
            right_guesses=counted.right,
            computed=self._records.experts.computed,
            bytes_per_s=round(rate),
            peak_bytes_per_s=round(peak),
            peak_share=round(rate / peak, 3) if peak else 0.0,
        )

    def rows(self) -> list[WeightRow]:
        """Every record in the order of the file: where it lies, and of streamed ones how often they were there.

        The experts of a layer are one row."""
        out, card, experts = list[WeightRow](), self._records.on_card(), self._records.experts
        for name, entry in self._records.entries.items():
            if name in experts.places:
                continue
            tier = "device" if name in card else "host" if name in self._records.host else "nvme"
            row = WeightRow(name, entry.bytes, tier)
            if self._records.passing is not None and name in self._records.names:
                hits, uses = self._records.passing.used(self._records.names.index(name))
                row = row._replace(hits=hits, uses=uses)
            out.append(row)
            if name in self._records.names:
                out += experts.row(self._records.names.index(name), self._records.host)
        return out

    # -- a pass ----------------------------------------------------------------------------------------------------

    def open(self, tokens: Ints, wants_logits: bool, deadline_s: float) -> Rows | None:
        """A pass begins. The decoder asks for rows of the embedding itself."""
        self._meter.begin(self._clock())
        if self._records.passing is not None:
            self._records.passing.begin()
        if self._records.experts.cached is not None:
            self._records.experts.cached.begin(len(tokens))
        return None

    def layer(self, index: int, deadline_s: float) -> GpuLayer | None:
        """A layer laid out for the kernels that are launched next; None for one that the decoder has.

        Raises WeightsLost.
        """
        return None if self._records.passing is None else self._records.passing.layer(index, deadline_s)

    def experts(self, deadline_s: float) -> CachedExperts | None:
        """Who brings a layer's experts; None when all are on the card."""
        cached = self._records.experts.cached
        if cached is not None:
            cached.deadline_s = deadline_s
        return cached

    def head_parts(self, deadline_s: float) -> None:
        """The card has the head."""
        return

    def end(self) -> None:
        """The pass is over: what it says about the rate, and what the next one needs."""
        records, passing, cached = self._records, self._records.passing, self._records.experts.cached
        # The slower one decides.
        reads_disk = (passing is not None and passing.reads_disk) or (cached is not None and cached.reads_disk)
        link, moved = (Link.DISK_READ, records.read()) if reads_disk else (Link.HOST_TO_DEVICE, records.copied())
        self._meter.end(self._clock(), moved.read_bytes, self._mover.statistics()[link].bytes_per_s)
        if passing is not None:
            passing.end()

    # -- moving records --------------------------------------------------------------------------------------------

    def retarget(self, memory_bytes: int) -> None:
        """Between passes: so much memory of the card from now on. What has to leave it leaves at once; `settle` brings
        the rest. The embedding stays where it is.

        Raises DoesNotFit, and what `CardRecords.retarget` raises; nothing changes then.
        """
        embed_on_card = "embed" not in self._records.host
        target = place_on_card(self._manifest, memory_bytes, self._host_budget_bytes, embed_on_card=embed_on_card)
        self._records.retarget(target)
        self._budget_bytes = memory_bytes

    def settle(self) -> bool:
        """See `CardRecords.settle`."""
        return self._records.settle()

    def close(self) -> None:
        """Ends copies and reads, and gives everything back. Idempotent."""
        self._records.close()
