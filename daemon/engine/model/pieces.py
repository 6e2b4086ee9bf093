"""What a ring reads of a prepared model: whole layers, parts of the head, and rows of the embedding."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

from tierd.daemon.engine.model.load import HINT, checked, checked_format, damaged, record_named
from tierd.daemon.errors import ModelInvalid
from tierd.daemon.models.catalog import WEIGHTS, Manifest, RecordEntry
from tierd.daemon.models.placement import head_record, table_of
from tierd.kernels.cpu.weights import Part, describe_panels, panel_sections
from tierd.kernels.packing import WeightFormat, panels
from tierd.tiers.store_io import Bytes, StoreIO, address_of, huge_block
from tierd.tiers.weights_file import Span, WeightFile, scan
from tierd.tiers.weights_read import Piece


@dataclass(frozen=True, slots=True)
class Table:
    """The matrix of the embedding or the head, and where the sections of its panels lie in the file."""

    record: RecordEntry
    format: WeightFormat
    panels: int
    cols: int
    sections: tuple[tuple[int, int], ...]  # (offset, bytes of a panel)

    def spans(self, first: int, count: int) -> tuple[Span, ...]:
        """Where some panels lie, one range in each section."""
        return tuple(Span(offset + first * size, count * size) for offset, size in self.sections)

    def parts(self, part_panels: int) -> list[tuple[int, int]]:
        """(first panel, panels) of each part."""
        return [
            (first, min(part_panels, self.panels - first)) for first in range(0, self.panels, part_panels)
        ]


@dataclass(frozen=True, slots=True)
class Scanned:
    """Digests of what is read of a table."""

    parts: list[Piece]
    panels: list[list[str]]  # [sections][panels]


def layer_piece(record: RecordEntry) -> Piece:
    """A whole layer."""
    return Piece(record.name, (Span(record.offset, record.bytes),), (record.digest,))


def table(record: RecordEntry) -> Table:
    """The table of a record. Raises ModelInvalid when it holds something else."""
    try:
        entry = table_of(record)
    except ValueError as exc:
        raise ModelInvalid(str(exc), hint=HINT) from None
    kind = checked_format(record.name, entry)
    found = panel_sections(kind, entry.rows, entry.cols)
    sections = tuple((entry.offset + offset, size) for _, offset, size in found)
    return Table(record, kind, panels(entry.rows), entry.cols, sections)


def scan_table(file: WeightFile, found: Table, part_panels: int) -> Scanned:
    """Read a table once, compare it with its digest, and note those of its panels and of its parts, if it has any.

    From then on these say whether a read is right. Raises ModelInvalid when it is not what was imported, or can't be
    read.
    """
    record = found.record
    parts = found.parts(part_panels) if part_panels else []
    by_section = [
        [Span(offset + first * size, count * size) for first, count in parts] for offset, size in found.sections
    ]
    single = [[Span(offset + n * size, size) for n in range(found.panels)] for offset, size in found.sections]
    try:
        whole, digests = scan(file, Span(record.offset, record.bytes), [*by_section, *single])
    except OSError as exc:
        raise ModelInvalid(f"record {record.name} can't be read: {exc.strerror or exc}", hint=HINT) from exc
    if whole != record.digest:
        raise damaged(record.name)
    pieces = [
        Piece(
            f"{record.name}, panels {first} to {first + count}",
            found.spans(first, count),
            tuple(section[number] for section in digests[: len(by_section)]),
        )
        for number, (first, count) in enumerate(parts)
    ]
    return Scanned(pieces, digests[len(by_section) :])


@dataclass(frozen=True, slots=True)
class Streamed:
    """What passes read of the head and of the embedding; of one that is in memory there is None and nothing."""

    part_panels: int
    head: Table | None
    parts: list[Piece]  # of the head
    rows: Table | None
    digests: list[list[str]]  # of the rows: [sections][panels]


class Tables:
    """The head and the embedding of a prepared model, each read and checked once for a size of its parts."""

    def __init__(self, manifest: Manifest) -> None:
        self._entries = {record.name: record for record in manifest.records}
        self._head_name = head_record(manifest)
        self._tied = manifest.spec.tied
        self._scanned: dict[tuple[str, int], Scanned] = {}

    def streamed(self, resident: Set[str], part_panels: int, opened: Callable[[], WeightFile]) -> Streamed:
        """What has to be read while these records are in memory; `opened` gives the file, and is asked if need be.

        `part_panels` 0: as before. Raises ModelInvalid.
        """
        part_panels = part_panels or max([panels for _, panels in self._scanned], default=0)
        if not self._entries.keys() <= resident:
            opened()  # layers are not scanned, but have to be there
        head = self._table(self._head_name, resident)
        parts = [] if head is None else self._scan(head, part_panels, opened).parts
        rows = self._table("embed", resident)
        digests = [] if rows is None else self._scan(rows, part_panels if self._tied else 0, opened).panels
        return Streamed(part_panels, head, parts, rows, digests)

    def _table(self, name: str, resident: Set[str]) -> Table | None:
        return None if name in resident else table(record_named(self._entries, name))

    def _scan(self, found: Table, part_panels: int, opened: Callable[[], WeightFile]) -> Scanned:
        key = (found.record.name, part_panels)
        if key not in self._scanned:
            self._scanned[key] = scan_table(opened(), found, part_panels)
        return self._scanned[key]


def part_in(memory: Bytes, head: Table, piece: Piece, first: int, count: int) -> Part:
    """`count` panels of the head from `first` on, whose piece comes to lie in `memory`."""
    base = address_of(memory)
    return Part(first, describe_panels(head.format, count, head.cols, [base + place for place in piece.places]))


def open_file(directory: Path, manifest: Manifest, io: StoreIO | None) -> WeightFile:
    """The weights of a prepared model, past the page cache. Raises ModelInvalid when the file isn't as it should be."""
    try:
        file = WeightFile(directory / WEIGHTS, io)
    except (OSError, ValueError) as exc:
        raise ModelInvalid(f"{WEIGHTS} can't be opened: {exc}", hint=HINT) from None
    found, wanted = file.size_bytes, manifest.bytes
    if found != wanted:
        file.close()
        raise ModelInvalid(f"{WEIGHTS} has {found} bytes, the manifest says {wanted}", hint=HINT)
    return file


def read_record(file: WeightFile, record: RecordEntry, memory: Bytes | None = None) -> Bytes:
    """A record in memory of its own, or in what is given, checked. Raises ModelInvalid."""
    memory = huge_block(record.bytes) if memory is None else memory
    try:
        file.read([(record.offset, memory)])
    except OSError as exc:
        raise ModelInvalid(f"record {record.name} can't be read: {exc.strerror or exc}", hint=HINT) from exc
    return checked(memory, record)


def drop_mapped(directory: Path, mapped: mmap.mmap, record: RecordEntry) -> None:
    """A record of a mapped file leaves memory, and the page cache."""
    mapped.madvise(mmap.MADV_DONTNEED, record.offset, record.bytes)
    with contextlib.suppress(OSError), (directory / WEIGHTS).open("rb") as file:
        os.posix_fadvise(file.fileno(), record.offset, record.bytes, os.POSIX_FADV_DONTNEED)
