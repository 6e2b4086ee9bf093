"""Experts of a running model that are not all in memory: who brings them to the decoder, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from tierd.daemon.engine.model.load import RecordView, expert_of
from tierd.daemon.engine.model.weights_status import Counted, WeightRow
from tierd.daemon.models.catalog import Manifest
from tierd.daemon.models.placement import least_expert_slots
from tierd.daemon.models.records import expert_names, expert_places
from tierd.kernels.cpu.weights import ExpertTable
from tierd.tiers.mover import Mover
from tierd.tiers.weights_cache import ExpertCache
from tierd.tiers.weights_fetches import DiskFetches
from tierd.tiers.weights_file import Span, WeightFile
from tierd.tiers.weights_read import Piece


class StreamedExperts:
    """Threading: the step thread's. `deadline_s` is that of the layer which is computed.

    Args:
        table: where launches find experts.
        slots: for experts that are not kept there.
    """

    def __init__(
        self, manifest: Manifest, table: ExpertTable, file: WeightFile, mover: Mover, slots: int, *, overlap: bool,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        spec = manifest.spec
        assert spec.experts is not None
        entries = {record.name: record for record in manifest.records}
        self._spec = spec
        self._count = spec.experts.count
        self._table = table
        self._records = [entries[name] for names in expert_names(spec).values() for name in names]
        pieces = [
            Piece(record.name, (Span(record.offset, record.bytes),), (record.digest,)) for record in self._records
        ]
        self.slots = slots
        self._fetches = DiskFetches(file, mover, pieces, slots, clock)
        self._cache = ExpertCache(self._fetches, len(pieces), slots, overlap=overlap, clock=clock)
        self._put: dict[int, int] = {}  # where launches find an expert: its number to its place
        self.deadline_s = 0.0

    @property
    def cache_bytes(self) -> int:
        """Memory held."""
        return self._fetches.memory_bytes

    def begin(self, rows: int) -> None:
        """A pass of so many rows begins."""
        self._cache.begin(rows)

    def bring(self, layer: int, wanted: Mapping[int, int], guessed: Mapping[int, int]) -> Iterator[Sequence[int]]:
        """See `kernels.cpu.mixture.ExpertSource`. Raises WeightsLost."""
        first, following = self._table.first(layer), self._table.first(layer + 1)
        here = [expert for expert in wanted if self._table.is_kept(first + expert)]
        if here:
            yield here
        numbers = self._not_kept(first, wanted)
        guesses = self._not_kept(following, guessed)
        for wave in self._cache.bring(numbers, guesses, self.deadline_s):
            for number, place in wave:
                if self._put.get(number) != place:
                    self._put[number] = place
                    view = RecordView(self._records[number], self._fetches.memory(place))
                    self._table.put(layer, number - first, expert_of(view, self._spec))
            yield [number - first for number, _ in wave]

    def moved(self) -> None:
        """Experts came to places of their own, or left them: launches may find others than were put."""
        self._put.clear()

    def counted(self) -> Counted:
        """What was read, and how often experts were there."""
        stats = self._cache.statistics()
        return Counted(
            stats.waited_s, stats.read_bytes, stats.retries, stats.lost, stats.uses, stats.hits, stats.guesses,
            stats.right,
        )  # fmt: skip

    def used(self, layer: int) -> tuple[int, int]:
        """How often experts of this layer were there, and how often they were needed."""
        numbers = slice(self._table.first(layer), self._table.first(layer) + self._count)
        return int(self._cache.hits[numbers].sum()), int(self._cache.uses[numbers].sum())

    def close(self) -> bool:
        """End the reads; False when one is stuck."""
        return self._cache.close()

    def _not_kept(self, first: int, experts: Mapping[int, int]) -> dict[int, int]:
        """Those of a layer's experts that lie in slots, by number."""
        return {first + expert: rows for expert, rows in experts.items() if not self._table.is_kept(first + expert)}


class Experts:
    """All experts of a model. Threading: the step thread's.

    Attributes:
        places: the names of their records, with the layer and the number of each.
        streamed: those that are not in memory; None when all are.
    """

    def __init__(self, manifest: Manifest, mover: Mover, *, overlap: bool, clock: Callable[[], float]) -> None:
        self._manifest = manifest
        self._mover = mover
        self._overlap = overlap
        self._clock = clock
        self._names = expert_names(manifest.spec)
        self.places = expert_places(manifest.spec)
        sizes = {record.name: record.bytes for record in manifest.records}
        self._bytes = {layer: sum(sizes[name] for name in names) for layer, names in self._names.items()}
        self.streamed: StreamedExperts | None = None
        self._earlier = Counted()  # by those before

    @property
    def memory_bytes(self) -> int:
        """Of the slots for those that are streamed."""
        return self.streamed.cache_bytes if self.streamed is not None else 0

    def arrange(self, table: ExpertTable, slots: int, opened: Callable[[], WeightFile]) -> None:
        """Slots for those that are not kept, none without need; what lies in them stays, unless their number changes.

        `slots` 0: all are to be kept, until then it takes the least.
        """
        slots = min(slots or least_expert_slots(self._manifest)[0], table.missing)
        if self.streamed is not None and self.streamed.slots == slots:
            self.streamed.moved()
            return
        self.close()
        if slots:
            self.streamed = StreamedExperts(
                self._manifest, table, opened(), self._mover, slots, overlap=self._overlap, clock=self._clock
            )

    def begin(self, rows: int) -> None:
        """A pass of so many rows begins."""
        if self.streamed is not None:
            self.streamed.begin(rows)

    def counted(self) -> Counted:
        """What was read since the start, and how often experts were there."""
        return self._earlier.plus(self.streamed.counted()) if self.streamed is not None else self._earlier

    def row(self, layer: int, in_memory: Collection[str]) -> list[WeightRow]:
        """The experts of a layer as one row; none of a dense one."""
        if layer not in self._names:
            return []
        here = all(name in in_memory for name in self._names[layer])
        hits, uses = self.streamed.used(layer) if self.streamed is not None else (0, 0)
        return [WeightRow(f"layer.{layer}.experts", self._bytes[layer], "device" if here else "nvme", hits, uses)]

    def close(self) -> bool:
        """Nothing is streamed any more; False when a read is stuck."""
        self._earlier = self.counted()
        streamed, self.streamed = self.streamed, None
        return streamed.close() if streamed is not None else True
