"""The weights of a running model: which records are in memory, and those that every pass reads from the disk.

When all of them fit, the file is mapped. Otherwise resident records are read into memory of their own, so that no page
cache decides what stays, and the others pass through a ring.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tierd.daemon.engine.model.experts import Experts, StreamedExperts
from tierd.daemon.engine.model.load import RecordView, Vector, expert_of, layer_of, map_file, record_named, shape_of
from tierd.daemon.engine.model.pieces import Table, Tables, drop_mapped, layer_piece, open_file, part_in, read_record
from tierd.daemon.engine.model.weights_status import Counted, PassMeter, WeightRow, WeightsStatus
from tierd.daemon.models.catalog import Manifest
from tierd.daemon.models.placement import MAX_SLOTS, Placement, head_record, place
from tierd.kernels.cpu.step import CpuDecoder, DecoderShape, LayerWeights
from tierd.kernels.cpu.weights import Ints, Part, PlacedLayer, Rows, describe_panels
from tierd.kernels.packing import PANEL_ROWS, PackedMatrix
from tierd.tiers.links import Link
from tierd.tiers.mover import Mover
from tierd.tiers.store_io import Bytes, StoreIO, address_of
from tierd.tiers.weights_file import WeightFile
from tierd.tiers.weights_ring import WeightRing
from tierd.tiers.weights_rows import PanelReader


class ModelWeights:
    """Threading: the loader builds it; from then on it is the step thread's.

    Args:
        memory_bytes: for resident records, the ring and rows; None for all records in memory.
        max_rows: of a pass.
        progress: called with (bytes in place, bytes) while records are read.
        overlap: read ahead.
        io: the system calls of streamed reads.

    Raises DoesNotFit, ModelInvalid. `attach` comes next; `close` before the mover's end.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        memory_bytes: int | None,
        max_rows: int,
        mover: Mover,
        progress: Callable[[int, int], None],
        *,
        overlap: bool = True,
        io: StoreIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shape: DecoderShape = shape_of(manifest.spec)
        self._directory = directory
        self._manifest = manifest
        self._budget_bytes = memory_bytes
        self._max_rows = max_rows
        self._mover = mover
        self._overlap = overlap
        self._io = io
        self._clock = clock
        self._entries = {record.name: record for record in manifest.records}
        self._head_name = head_record(manifest)
        self._layer_names = [f"layer.{number}" for number in range(manifest.spec.num_layers)]
        self._layer_numbers = {name: number for number, name in enumerate(self._layer_names)}
        self._experts = Experts(manifest, mover, overlap=overlap, clock=clock)
        self._target: Placement = place(manifest, memory_bytes, max_rows)
        self._memory: dict[str, Bytes] = {}  # resident records
        self._mapped: mmap.mmap | None = None
        self._in_map: set[str] = set()
        self._file: WeightFile | None = None
        self._tables = Tables(manifest)
        self._decoder: CpuDecoder | None = None
        self._ring: WeightRing | None = None
        self._panels: tuple[Table, PanelReader] | None = None
        self._numbers: dict[str, int] = {}  # pieces of layers
        self._placed: dict[int, list[PlacedLayer]] = {}  # by layer and slot
        self._parts: list[tuple[int, list[Part]]] = []  # of the head: piece, and by slot
        self._earlier = Counted()  # by rings and readers that are gone
        self._meter = PassMeter()
        try:
            self._load(progress)
        except BaseException:
            self.close()
            raise

    # -- building --------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> list[LayerWeights | None]:
        """Those in memory."""
        spec = self._manifest.spec
        names = enumerate(self._layer_names)
        return [layer_of(self._view(name), spec, n) if name in self._memory else None for n, name in names]

    @property
    def embed(self) -> PackedMatrix | None:
        """The embedding, if it is in memory."""
        return self._matrix("embed", "embed")

    @property
    def head(self) -> PackedMatrix | None:
        """The head, if it is in memory."""
        return self.embed if self._manifest.spec.tied else self._matrix("head", "head")

    @property
    def final_norm(self) -> Vector:
        """The last norm. [hidden]"""
        return self._view("final").vector("final_norm", self._manifest.spec.hidden)

    @property
    def total_bytes(self) -> int:
        """Of all records."""
        return self._manifest.bytes

    @property
    def budget_bytes(self) -> int | None:
        """What `memory_bytes` may come to; None without a bound."""
        return self._budget_bytes

    @property
    def memory_bytes(self) -> int:
        """Held: resident records, the ring, rows of the embedding."""
        ring_bytes = self._ring.ring_bytes if self._ring is not None else 0
        rows_bytes = self._panels[1].memory_bytes if self._panels is not None else 0
        resident_bytes = sum(self._entries[name].bytes for name in self._memory)
        return resident_bytes + ring_bytes + rows_bytes + self._experts.memory_bytes

    @property
    def streams(self) -> bool:
        """Whether a pass needs anything that is not in memory: it goes layer by layer then."""
        return self._ring is not None or self._panels is not None or self._experts.streamed is not None

    @property
    def can_move(self) -> bool:
        """Whether layers can come and go: a card holds all of them."""
        return self._decoder is not None

    def attach(self, decoder: CpuDecoder) -> None:
        """The decoder that was built of what is in memory."""
        self._decoder = decoder
        for name in self._memory.keys() & self._experts.places.keys():
            self._place(name)
        self._arrange()

    def close(self) -> None:
        """End the reads and give everything back. Idempotent."""
        at_rest = self._experts.close() & self._drop_ring()
        if self._file is not None and at_rest:  # a read that is stuck keeps its descriptor
            self._file.close()
        self._file = self._decoder = self._mapped = None
        self._memory.clear()

    # -- a pass ----------------------------------------------------------------------------------------------------

    def open(self, tokens: Ints, wants_logits: bool, deadline_s: float) -> Rows | None:
        """A pass begins: the rows of the embedding that it needs, None when it is in memory. Raises WeightsLost."""
        self._meter.begin(self._clock())
        self._experts.begin(len(tokens))
        if self._ring is not None:
            parts = [number for number, _ in self._parts] if wants_logits else []
            if order := [*self._numbers.values(), *parts]:
                self._ring.begin(order)
        if self._panels is None:
            return None
        found, reader = self._panels
        needed, places = np.unique(tokens // PANEL_ROWS, return_inverse=True)
        reader.gather(needed.astype(np.int64), deadline_s)
        matrix = describe_panels(found.format, len(needed), found.cols, [address_of(b) for b in reader.blocks])
        return Rows((places * PANEL_ROWS + tokens % PANEL_ROWS).astype(np.int32), matrix)

    def layer(self, index: int, deadline_s: float) -> PlacedLayer | None:
        """Where a layer lies until the next one is asked for; None for one that is always there. Raises WeightsLost."""
        number = self._numbers.get(self._layer_names[index])
        if number is None or self._ring is None:
            return None
        return self._placed[index][self._ring.take(number, deadline_s)]

    def experts(self, deadline_s: float) -> StreamedExperts | None:
        """Who brings a layer's experts; None when all are in memory."""
        if self._experts.streamed is not None:
            self._experts.streamed.deadline_s = deadline_s
        return self._experts.streamed

    def head_parts(self, deadline_s: float) -> Iterator[Part] | None:
        """The head part by part, None when it is in memory. Raises WeightsLost while it is gone through."""
        ring = self._ring
        if ring is None or not self._parts:
            return None
        return (by_slot[ring.take(number, deadline_s)] for number, by_slot in self._parts)

    def end(self) -> None:
        """The pass is over: reads for the next one go on, and what this one says about the rate."""
        if self._ring is not None:
            self._ring.end()
        read_bytes = self._counted().read_bytes + self._experts.counted().read_bytes
        self._meter.end(self._clock(), read_bytes, self._mover.statistics()[Link.DISK_READ].bytes_per_s)

    def statistics(self) -> WeightsStatus:
        """What there is to say now."""
        counted = self._counted().plus(self._experts.counted())
        resident = [self._entries[name].bytes for name in self._memory]
        ring_bytes = self._ring.ring_bytes if self._ring is not None else 0
        rows_bytes = self._panels[1].memory_bytes if self._panels is not None else 0
        rate, peak = self._meter.bytes_per_s, self._meter.peak_bytes_per_s
        return WeightsStatus(
            budget_bytes=self._budget_bytes,
            memory_bytes=self.memory_bytes,
            device_records=len(resident),
            device_bytes=sum(resident),
            nvme_records=len(self._entries) - len(resident),
            nvme_bytes=self._manifest.bytes - sum(resident),
            ring_bytes=ring_bytes,
            rows_bytes=rows_bytes,
            pass_bytes=sum(piece.slot_bytes for piece in self._ring.pieces) if self._ring is not None else 0,
            read_bytes=counted.read_bytes,
            waited_s=round(counted.waited_s, 3),
            retries=counted.retries,
            lost=counted.lost,
            uses=counted.uses,
            hits=counted.hits,
            bytes_per_s=round(rate),
            peak_bytes_per_s=round(peak),
            peak_share=round(rate / peak, 3) if peak else 0.0,
            experts_bytes=self._experts.memory_bytes,
            guesses=counted.guesses,
            right_guesses=counted.right,
        )

    def rows(self) -> list[WeightRow]:
        """Every record in the order of the file: where it lies, and of streamed ones how often they were there.

        The experts of a layer are one row."""
        numbers = self._numbers if self._ring is not None else {}
        out = []
        for name, entry in self._entries.items():
            if name in self._experts.places:
                continue
            row = WeightRow(name, entry.bytes, "device" if name in self._memory else "nvme")
            if self._ring is not None and (number := numbers.get(name)) is not None:
                row = row._replace(hits=self._ring.hits[number], uses=self._ring.uses[number])
            out.append(row)
            out += self._experts.row(self._layer_numbers.get(name, -1), self._memory)
        return out

    # -- moving records --------------------------------------------------------------------------------------------

    def retarget(self, memory_bytes: int) -> None:
        """Between passes: so much memory from now on. What has to leave it leaves at once; `settle` brings the rest.

        Raises DoesNotFit, and ModelInvalid when the file can't be read; nothing changes then.
        """
        target = place(self._manifest, memory_bytes, self._max_rows)
        self._tables.streamed(self._memory.keys() & target.resident, target.part_panels, self._opened)
        self._target, self._budget_bytes = target, memory_bytes
        for name in sorted(self._memory.keys() - target.resident):
            self._drop(name)
        self._arrange()

    def settle(self) -> bool:
        """Between passes: brings one record into memory that has its place there. False when nothing is left to do.

        Raises ModelInvalid for a record that can't be read, or isn't what was imported: it goes on being streamed.
        """
        experts, missing = self._experts.places, self._target.resident - self._memory.keys()
        # Experts last: the others are read in every pass.
        name = min(missing, key=lambda name: (name in experts, name), default=None)
        if name is None:
            return False
        self._memory[name] = self._read(name)
        self._place(name)
        if name in experts:
            self._arrange_experts()
        else:
            self._arrange()
        return True

    # -- inside ----------------------------------------------------------------------------------------------------

    def _load(self, progress: Callable[[int, int], None]) -> None:
        names = [record.name for record in self._manifest.records if record.name in self._target.resident]
        if len(names) == len(self._entries):
            self._mapped, data = map_file(self._directory, self._manifest, progress)
            for name, record in self._entries.items():
                self._memory[name] = data[record.offset : record.offset + record.bytes]
            self._in_map = set(names)
            return
        done = 0
        for name in names:
            self._memory[name] = self._read(name)
            done += self._entries[name].bytes
            progress(done, self._target.resident_bytes)

    def _view(self, name: str) -> RecordView:
        return RecordView(record_named(self._entries, name), self._memory[name])

    def _matrix(self, record: str, name: str) -> PackedMatrix | None:
        if record not in self._memory:
            return None
        spec = self._manifest.spec
        return self._view(record).matrix(name, spec.vocab, spec.hidden)

    def _opened(self) -> WeightFile:
        """The file, past the page cache. Raises ModelInvalid when it isn't as it should be."""
        if self._file is None:
            self._file = open_file(self._directory, self._manifest, self._io)
        return self._file

    def _read(self, name: str) -> Bytes:
        """A record in memory of its own, checked. Raises ModelInvalid."""
        return read_record(self._opened(), record_named(self._entries, name))

    def _place(self, name: str) -> None:
        """The decoder finds a record in memory."""
        decoder, spec = self._attached(), self._manifest.spec
        if (index := self._layer_numbers.get(name)) is not None:
            decoder.weights.keep(decoder.weights.describe(index, layer_of(self._view(name), spec, index)))
        elif (expert := self._experts.places.get(name)) is not None:
            decoder.weights.experts.keep(*expert, expert_of(self._view(name), spec))
        else:
            decoder.set_ends(self.embed, self.head)

    def _drop(self, name: str) -> None:
        """A record leaves memory, and the page cache when it lay there."""
        decoder, record = self._attached(), self._entries[name]
        del self._memory[name]
        if (index := self._layer_numbers.get(name)) is not None:
            decoder.weights.forget(index)
        elif (expert := self._experts.places.get(name)) is not None:
            decoder.weights.experts.forget(*expert)
        else:
            decoder.set_ends(self.embed, self.head)
        if name in self._in_map and self._mapped is not None:
            self._in_map.discard(name)
            drop_mapped(self._directory, self._mapped, record)

    def _attached(self) -> CpuDecoder:
        if self._decoder is None:
            raise AssertionError("no decoder was attached")
        return self._decoder

    def _arrange(self) -> None:
        """The ring and the reader of rows for what is not in memory now."""
        tables = self._tables.streamed(self._memory.keys(), self._target.part_panels, self._opened)
        self._drop_ring()
        self._arrange_experts()
        decoder, spec = self._attached(), self._manifest.spec
        layers = [name for name in self._layer_names if name not in self._memory]
        pieces = [*(layer_piece(self._entries[name]) for name in layers), *tables.parts]
        if (rows := tables.rows) is not None:
            most = min(self._max_rows, rows.panels)
            reader = PanelReader(
                self._opened(), self._mover, "embed", rows.sections, tables.digests, most, clock=self._clock
            )
            self._panels = (rows, reader)
        if not pieces:
            return
        slots = self._target.slots or MAX_SLOTS
        ring = self._ring = WeightRing(
            self._opened(), self._mover, pieces, slots, overlap=self._overlap, clock=self._clock
        )
        for number, name in enumerate(layers):
            index, record = self._layer_numbers[name], self._entries[name]
            views = [RecordView(record, ring.memory(slot)[: record.bytes]) for slot in range(slots)]
            self._numbers[name] = number
            self._placed[index] = [decoder.weights.describe(index, layer_of(view, spec, index)) for view in views]
        if (head := tables.head) is not None:
            for number, (first, count) in enumerate(head.parts(tables.part_panels), len(layers)):
                places = [ring.memory(slot) for slot in range(slots)]
                self._parts.append((number, [part_in(memory, head, pieces[number], first, count) for memory in places]))

    def _arrange_experts(self) -> None:
        self._experts.arrange(self._attached().weights.experts, self._target.expert_slots, self._opened)

    def _drop_ring(self) -> bool:
        """False when a read is stuck: its memory is left to it."""
        self._earlier = self._counted()
        ring, self._ring, self._panels = self._ring, None, None
        self._numbers, self._placed, self._parts = {}, {}, []
        return ring.close() if ring is not None else True

    def _counted(self) -> Counted:
        """What came through rings and readers of rows since the start."""
        found = self._earlier
        if self._ring is not None:
            stats = self._ring.statistics()
            uses, hits = sum(self._ring.uses), sum(self._ring.hits)
            found = found.plus(Counted(stats.waited_s, stats.read_bytes, stats.retries, stats.lost, uses, hits))
        if self._panels is not None:
            reader = self._panels[1]
            found = found.plus(Counted(reader.waited_s, reader.read_bytes, reader.retries, reader.lost))
        return found
