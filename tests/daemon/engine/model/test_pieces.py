"""What a ring reads of a prepared model, against the bytes of the file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import xxhash

from tests.daemon.engine.families import prepare, reference
from tierd.daemon.engine.model.pieces import layer_piece, scan_table, table
from tierd.daemon.errors import ModelInvalid
from tierd.daemon.models.catalog import WEIGHTS, RecordEntry, load_manifest
from tierd.kernels.packing import WeightFormat
from tierd.tiers.weights_file import WeightFile

pytestmark = pytest.mark.usefixtures("no_files_left")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(reference("llama", vocab_size=1000), tmp_path_factory.mktemp("pieces"), "int4-g32")


def record_of(model: Path, name: str) -> RecordEntry:
    return next(record for record in load_manifest(model).records if record.name == name)


def test_a_layer_is_read_whole(model: Path) -> None:
    record = record_of(model, "layer.1")
    piece = layer_piece(record)
    assert piece.slot_bytes == record.bytes and piece.places == [0] and piece.digests == (record.digest,)


def test_parts_and_panels_of_a_table_cover_it(model: Path) -> None:
    found = table(record_of(model, "embed"))
    assert (found.format, found.panels, found.cols) == (WeightFormat.INT4_G32, 63, 64)
    assert len(found.sections) == 3  # integers, scales, minimums
    assert found.parts(20) == [(0, 20), (20, 20), (40, 20), (60, 3)]
    data, file = (model / WEIGHTS).read_bytes(), WeightFile(model / WEIGHTS)
    scanned = scan_table(file, found, 20)
    file.close()
    assert [len(section) for section in scanned.panels] == [63] * 3
    for number, (first, count) in enumerate(found.parts(20)):
        piece = scanned.parts[number]
        for section, (span, digest) in enumerate(zip(piece.spans, piece.digests, strict=True)):
            offset, size = found.sections[section]
            whole = data[offset + first * size : offset + (first + count) * size]
            assert data[span.offset : span.offset + span.num_bytes] == whole
            assert digest == xxhash.xxh3_128_hexdigest(whole)
            assert scanned.panels[section][first] == xxhash.xxh3_128_hexdigest(whole[:size])


def test_a_table_that_is_not_what_was_imported(model: Path) -> None:
    file = WeightFile(model / WEIGHTS)
    record = record_of(model, "embed")
    wrong = msgspec.structs.replace(record, digest="0" * 32)
    with pytest.raises(ModelInvalid, match="record embed isn't what was imported"):
        scan_table(file, table(wrong), 0)
    beyond = msgspec.structs.replace(record, offset=file.size_bytes, tensors=record.tensors)
    with pytest.raises(ModelInvalid, match="record embed can't be read"):
        scan_table(file, table(beyond), 0)
    file.close()
    with pytest.raises(ModelInvalid, match="has 0 tensors instead of a matrix"):
        table(msgspec.structs.replace(record, tensors=()))
