"""Where the records of a model lie: in memory for good, or on the disk, from where each pass reads them.

Pure, and without numpy: the engine places weights by it, and whoever plans for a machine asks it beforehand. On the
CPU the device's memory and the computer's are one, so there are two places and not three.

Every byte of the layers and the head is read in every pass, so what counts is how many bytes find no memory. Streamed
records come through a ring of two or three slots, each as large as the largest of them; the head, which can be larger
than ten layers, comes in parts. Of the embedding a pass needs single rows, which come in panels of 16.

Of experts a pass needs few. They go last: whatever memory the others leave is slots, in which those lie that were used
the most (`tiers.weights_cache`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tierd.daemon.models.catalog import Manifest, RecordEntry, TensorEntry
from tierd.daemon.models.records import EXPERT_PREFIX
from tierd.daemon.models.spec import ExpertsSpec

ALIGN_BYTES = 4096  # what O_DIRECT reads
MAX_SLOTS = 3  # one is computed on while two are read: the disk never waits for a check or a late thread
MIN_SLOTS = 2
PART_BYTES = 8 << 20  # of the head, when no layer is streamed: then nothing else says how large a slot is
MIN_PART_BYTES = 64 << 10
MIN_EXPERT_SLOTS = 4
_PANEL_ROWS = 16
_MAX_SECTIONS = 3  # of a packed matrix; each of them is read with up to a block too much at either end


class DoesNotFit(ValueError):
    """No placement fits the memory.

    Attributes:
        needed_bytes: the least that would do.
    """

    def __init__(self, needed_bytes: int) -> None:
        super().__init__(f"it needs at least {needed_bytes} bytes")
        self.needed_bytes = needed_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Which records lie where, and the memory that takes. Bytes of `streamed` are read in every pass, those of experts
    that have no slot when a pass needs them."""

    resident: frozenset[str]
    streamed: tuple[str, ...]  # in the order of a pass: layers, then the head
    rows: bool  # rows of the embedding are read when they are needed
    slots: int
    slot_bytes: int
    part_panels: int  # panels of the head in a slot; 0 when it is not streamed
    rows_bytes: int  # memory for the rows of a pass
    resident_bytes: int
    streamed_bytes: int
    expert_slots: int = 0
    expert_slot_bytes: int = 0

    @property
    def experts_bytes(self) -> int:
        """Memory of the slots for experts."""
        return self.expert_slots * self.expert_slot_bytes

    @property
    def ring_bytes(self) -> int:
        """Memory of the ring."""
        return self.slots * self.slot_bytes

    @property
    def memory_bytes(self) -> int:
        """Memory of everything."""
        return self.resident_bytes + self.ring_bytes + self.rows_bytes + self.experts_bytes


def place(manifest: Manifest, memory_bytes: int | None, max_rows: int) -> Placement:
    """The placement that reads the fewest bytes in a pass; everything is resident when it fits, or without a bound.

    Args:
        memory_bytes: for resident records, the ring, the rows of the embedding and the slots of experts.
        max_rows: of a pass.

    Raises DoesNotFit.
    """
    every = everything_resident(manifest)
    if memory_bytes is None or every.resident_bytes <= memory_bytes:
        return every
    candidates = list(_candidates(manifest, max_rows))
    fitting = [candidate for candidate in candidates if candidate.memory_bytes <= memory_bytes]
    if not fitting:
        raise DoesNotFit(min([every.resident_bytes, *(candidate.memory_bytes for candidate in candidates)]))
    # The third slot may cost a layer its place; a late read costs every pass more than that.
    wide = [candidate for candidate in fitting if candidate.slots != MIN_SLOTS]
    least = min(wide or fitting, key=lambda candidate: (candidate.streamed_bytes, candidate.memory_bytes))
    return _with_experts(manifest, _with_embedding(manifest, least, memory_bytes), memory_bytes)


def everything_resident(manifest: Manifest) -> Placement:
    """All records in memory."""
    names = frozenset(record.name for record in manifest.records)
    return Placement(names, (), False, 0, 0, 0, 0, manifest.bytes, 0)


def table_of(record: RecordEntry) -> TensorEntry:
    """The matrix of the record `embed` or `head`. Raises ValueError for a record of another kind."""
    if len(record.tensors) != 1:
        raise ValueError(f"record {record.name!r} has {len(record.tensors)} tensors instead of a matrix")
    return record.tensors[0]


def head_record(manifest: Manifest) -> str:
    """The record that holds the head."""
    return "embed" if manifest.spec.tied else "head"


def _candidates(manifest: Manifest, max_rows: int) -> Iterator[Placement]:
    """Every number of streamed layers, with the head in memory and without, with each number of slots."""
    layers = [record for record in manifest.records if record.name.startswith("layer.")]
    head = next(record for record in manifest.records if record.name == head_record(manifest))
    embed = next(record for record in manifest.records if record.name == "embed")
    others = [record for record in manifest.records if not record.name.startswith(EXPERT_PREFIX)]
    fixed = [record for record in others if record not in (*layers, head, embed)]
    least_slots, expert_bytes = least_expert_slots(manifest)
    for head_stays in (True, False):
        rows = not (head_stays and manifest.spec.tied)
        rows_bytes = _rows_bytes(embed, max_rows) if rows else 0
        for count in range(len(layers) + 1):
            numbers = spread(count, len(layers))
            streamed = [layers[number] for number in numbers]
            here = [*fixed, *(layer for layer in layers if layer not in streamed), *([head] if head_stays else [])]
            slot_bytes, panels = _slot(streamed, None if head_stays else head)
            names = [record.name for record in streamed] + ([] if head_stays else [head.name])
            each_pass = sum(record.bytes for record in streamed) + (0 if head_stays else table_of(head).bytes)
            for slots in (MAX_SLOTS, MIN_SLOTS) if names else (0,):
                yield Placement(
                    frozenset(record.name for record in here), tuple(names), rows, slots, slot_bytes, panels,
                    rows_bytes, sum(record.bytes for record in here), each_pass, least_slots, expert_bytes,
                )  # fmt: skip


def spread(count: int, total: int) -> list[int]:
    """`count` of `total` numbers, evenly: what is computed without the disk lies between what is read meanwhile."""
    return [number * total // count for number in range(count)]


def _slot(layers: Sequence[RecordEntry], head: RecordEntry | None) -> tuple[int, int]:
    """Bytes of a slot for these records, and panels of a part of the head."""
    largest = max((layer.bytes for layer in layers), default=0)
    if head is None:
        return largest, 0
    panel_bytes, panels = _panels(head)
    extra_bytes = 2 * ALIGN_BYTES * _MAX_SECTIONS
    part_bytes = max(largest, MIN_PART_BYTES) if largest else PART_BYTES
    count = min(max(1, (part_bytes - extra_bytes) // panel_bytes), panels)
    return max(largest, _up(count * panel_bytes + extra_bytes)), count


def _rows_bytes(embed: RecordEntry, max_rows: int) -> int:
    """Memory for the panels of as many tokens, each of which may need one of its own."""
    panel_bytes, panels = _panels(embed)
    return _up(min(max_rows, panels) * panel_bytes)


def _panels(record: RecordEntry) -> tuple[int, int]:
    """Bytes of a panel of a matrix, rounded up, and how many it has."""
    table = table_of(record)
    panels = -(-table.rows // _PANEL_ROWS)
    return -(-table.bytes // panels), panels


def _with_embedding(manifest: Manifest, found: Placement, memory_bytes: int) -> Placement:
    """The same with a whole embedding of its own instead of single rows, where that fits what is left."""
    embed = next(record for record in manifest.records if record.name == "embed")
    spare_bytes = memory_bytes - found.memory_bytes + found.rows_bytes
    if manifest.spec.tied or embed.bytes > spare_bytes:
        return found
    return dataclasses.replace(
        found, resident=found.resident | {"embed"}, rows=False, rows_bytes=0,
        resident_bytes=found.resident_bytes + embed.bytes,
    )  # fmt: skip


def least_expert_slots(manifest: Manifest) -> tuple[int, int]:
    """The least slots that experts need, and bytes of one: a row's experts of a layer, and as many of the next."""
    experts = manifest.spec.experts
    if experts is None:
        return 0, 0
    largest = max(record.bytes for record in manifest.records if record.name.startswith(EXPERT_PREFIX))
    return least_slots(experts), largest


def least_slots(experts: ExpertsSpec) -> int:
    """The least slots that experts need."""
    return min(max(MIN_EXPERT_SLOTS, 2 * experts.used), experts.total)


def _with_experts(manifest: Manifest, found: Placement, memory_bytes: int) -> Placement:
    """The same with as many slots as what is left has room for."""
    if manifest.spec.experts is None:
        return found
    more = (memory_bytes - found.memory_bytes) // found.expert_slot_bytes
    return dataclasses.replace(found, expert_slots=min(found.expert_slots + more, manifest.spec.experts.total))


def _up(count: int) -> int:
    return -(-count // ALIGN_BYTES) * ALIGN_BYTES
