"""Formats, placement, and that a matrix packed in pieces is the matrix packed whole."""

import os

import gguf
import numpy as np
import pytest

from tests.daemon.models.test_dequant import random_blocks
from tierd.daemon.errors import BadRequest
from tierd.daemon.models import weights
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.ggml_types import GgmlType
from tierd.daemon.models.records import PlannedPart, PlannedRecord, PlannedTensor
from tierd.daemon.models.source import SourceTensor
from tierd.daemon.models.weights import choose_format, parse_format, place, write_tensor
from tierd.kernels import packing
from tierd.kernels.packing import WeightFormat

T, F = GgmlType, WeightFormat


@pytest.mark.parametrize(
    ("kinds", "cols", "wanted", "expected"),
    [
        ({T.Q4_0}, 64, None, F.INT4_G32),
        ({T.Q4_0, T.Q4_1}, 64, None, F.INT4_G32),
        ({T.Q4_1, T.Q5_1, T.Q5_0}, 64, None, F.INT5_G32),
        ({T.Q5_0}, 64, None, F.INT5_G32),
        ({T.Q8_0, T.Q5_0}, 64, None, F.INT8_G32),
        ({T.Q4_1, T.Q8_0}, 64, None, F.INT8_G32),
        ({T.Q4_K}, 256, None, F.INT4_K),
        ({T.Q4_K, T.Q5_K}, 256, None, F.INT5_K),
        ({T.Q5_K}, 256, None, F.INT5_K),
        ({T.Q4_K, T.Q6_K}, 256, None, F.INT8_K),
        ({T.Q6_K}, 256, None, F.INT8_K),
        ({T.Q6_K, T.Q8_0}, 256, None, F.INT8_G32),
        ({T.Q4_K}, 256, F.INT4_G32, F.INT4_G32),
        ({T.F16, T.Q8_0}, 64, None, F.INT8_G32),
        ({T.BF16}, 63, None, F.BF16),
        ({T.BF16, T.F32}, 64, None, F.FP32),
        ({T.F16}, 64, None, F.FP32),
        ({T.F32}, 64, F.INT4_G32, F.INT4_G32),
        ({T.F32}, 63, F.INT4_G32, F.INT8),
        ({T.F32}, 63, F.INT8_G32, F.INT8),
        ({T.F32}, 63, F.BF16, F.BF16),
        ({T.Q4_1}, 64, F.FP32, F.FP32),
    ],
)
def test_choose_format(kinds, cols, wanted, expected):
    assert choose_format(frozenset(kinds), cols, wanted) is expected


def test_parse_format():
    assert parse_format(None) is None and parse_format("auto") is None
    assert parse_format("int8-g32") is F.INT8_G32
    with pytest.raises(BadRequest, match="'int3' isn't known") as caught:
        parse_format("int3")
    assert caught.value.hint == "take one of auto, fp32, bf16, int8, int8-g32, int4-g32, int5-g32"


def source(kind: GgmlType, w: np.ndarray) -> tuple[SourceTensor, np.ndarray]:
    """A tensor of that kind made from w, and its dequantized values."""
    number = gguf.GGMLQuantizationType(int(kind))
    data = gguf.quants.quantize(w, number)
    raw = np.ascontiguousarray(data).view(np.uint8).reshape(w.shape[0], -1)
    tensor = SourceTensor(f"w.{kind.name}", kind, *w.shape, lambda start, stop: raw[start:stop])
    return tensor, gguf.quants.dequantize(data, number)


def written(tmp_path, parts: list[SourceTensor], wanted: WeightFormat | None, vector: bool = False):
    """Write one tensor made of the parts: (its place, its bytes in the file)."""
    planned = PlannedTensor("w", tuple(PlannedPart("w", 0, p.rows, p.cols) for p in parts), vector)
    (record,) = place([PlannedRecord("r", (planned,))], lambda _: tuple(parts), wanted)
    fd = os.open(tmp_path / "weights.bin", os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, record.bytes)
        write_tensor(fd, record.tensors[0])
    finally:
        os.close(fd)
    placed = record.tensors[0]
    return placed, np.fromfile(tmp_path / "weights.bin", np.uint8)[placed.offset : placed.offset + placed.bytes]


@pytest.mark.parametrize("format", packing.ROUNDED_FORMATS)
@pytest.mark.parametrize("rows", [(48, 16, 16), (50, 7, 23), (1, 1, 1)])
def test_in_pieces_equals_whole(tmp_path, monkeypatch, format, rows):
    monkeypatch.setattr(weights, "_CHUNK_ELEMENTS", 32 * 64)  # 32 rows at a time
    rng = np.random.default_rng(1)
    parts = [source(T.F32, rng.standard_normal((n, 64)).astype(np.float32)) for n in rows]
    placed, data = written(tmp_path, [p for p, _ in parts], format)
    assert placed.format is format
    np.testing.assert_array_equal(data, packing.pack(format, np.concatenate([v for _, v in parts])))


@pytest.mark.parametrize(
    ("kinds", "format"),
    [
        ((T.Q4_1, T.Q4_0, T.Q4_1), F.INT4_G32),
        ((T.Q5_0, T.Q5_1, T.Q4_1), F.INT5_G32),
        ((T.Q8_0, T.Q5_0, T.Q4_0), F.INT8_G32),
        ((T.BF16, T.BF16, T.BF16), F.BF16),
        ((T.F16, T.F32, T.BF16), F.FP32),
    ],
)
def test_auto_loses_nothing(tmp_path, kinds, format):
    rng = np.random.default_rng(2)
    parts = [source(kind, rng.standard_normal((24, 96)).astype(np.float32)) for kind in kinds]
    placed, data = written(tmp_path, [p for p, _ in parts], None)
    assert placed.format is format
    unpacked = packing.unpack(format, data, 72, 96)
    np.testing.assert_array_equal(unpacked, np.concatenate([v for _, v in parts]))


@pytest.mark.parametrize(
    ("kinds", "format"),
    [
        ((T.Q4_K, T.Q4_K, T.Q4_K), F.INT4_K),
        ((T.Q4_K, T.Q5_K, T.Q4_K), F.INT5_K),
        ((T.Q5_K, T.Q4_K, T.Q6_K), F.INT8_K),
    ],
)
def test_k_quants_keep_every_value(tmp_path, monkeypatch, kinds, format):
    """The weights that the kernels compute with are those of gguf's own dequantization, to the bit."""
    monkeypatch.setattr(weights, "_CHUNK_ELEMENTS", 32 * 512)
    raws = [random_blocks(kind) for kind in kinds]
    parts = [
        SourceTensor(f"w{i}", kind, *raw.shape[:1], 512, lambda start, stop, raw=raw: raw[start:stop])
        for i, (kind, raw) in enumerate(zip(kinds, raws, strict=True))
    ]
    expected = [
        gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(int(kind)))
        for kind, raw in zip(kinds, raws, strict=True)
    ]
    placed, data = written(tmp_path, parts, None)
    assert placed.format is format
    unpacked = packing.unpack(format, data, placed.planned.rows, 512)
    np.testing.assert_array_equal(unpacked, np.concatenate(expected))


def test_vectors_follow_each_other(tmp_path):
    parts = [source(T.F16, np.full((1, n), n, np.float32)) for n in (3, 5)]
    placed, data = written(tmp_path, [p for p, _ in parts], F.INT4_G32, vector=True)
    assert (placed.format, placed.planned.cols, placed.bytes) == (F.FP32, 8, 32)
    assert data.view("<f4").tolist() == [3.0] * 3 + [5.0] * 5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", [T.F32, T.Q8_0, T.Q4_1, T.Q6_K])
def test_values_that_are_not_finite(tmp_path, kind, bad):
    size = {T.F32: 4 * 256, T.Q8_0: 34 * 8, T.Q4_1: 20 * 8, T.Q6_K: 210}[kind]
    raw = np.zeros((4, size), np.uint8)
    if kind is T.F32:
        raw[2, :4] = np.float32([bad]).view(np.uint8)
    else:
        at = 208 if kind is T.Q6_K else 0
        raw[2, at : at + 2] = np.float16([bad]).view(np.uint8)
    tensor = SourceTensor("blk.0.x", kind, 4, 256, lambda start, stop: raw[start:stop])
    with np.errstate(invalid="ignore"), pytest.raises(ModelFileError, match=r"blk.0.x: .*finite"):
        written(tmp_path, [tensor], None)
    if kind is T.F32:
        with pytest.raises(ModelFileError, match="finite"):
            written(tmp_path, [SourceTensor("v", kind, 1, 256, lambda *_: raw[2:3])], None, vector=True)


def test_records_and_tensors_are_aligned():
    def planned(name: str, rows: int, cols: int) -> PlannedTensor:
        return PlannedTensor(name, (PlannedPart(name, 0, rows, cols),), vector=rows == 1)

    records = [PlannedRecord(f"r{i}", (planned("a", 1, 3), planned("b", 17, 33), planned("c", 1, 5))) for i in range(3)]
    tensor, _ = source(T.F32, np.zeros((17, 33), np.float32))
    placed = place(records, lambda _: (tensor,), F.INT8)
    end = 0
    for record in placed:
        assert record.offset == end and record.bytes % 4096 == 0
        for a, b in zip(record.tensors, record.tensors[1:], strict=False):
            assert b.offset % 64 == 0 and a.offset + a.bytes <= b.offset
        end = record.offset + record.bytes
        assert record.tensors[-1].offset + record.tensors[-1].bytes <= end
