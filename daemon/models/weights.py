"""The weight file of a prepared model: choosing formats, placing tensors, and filling them a few rows at a time.

Which format a matrix gets when none is asked for (`auto`) never loses anything that the source holds in a form the
kernels can use, and never spends more bytes than needed for that:

    all parts Q4_0 or Q4_1                  int4-g32, the same integers, scales and minima
    all parts Q4_0, Q4_1, Q5_0 or Q5_1      int5-g32, the same
    all parts Q8_0, Q5_0, Q4_0 or MXFP4     int8-g32, the same integers and scales (MXFP4: twice its numbers)
    all parts Q4_K                          int4-k, the same integers, scales and minima
    all parts Q4_K or Q5_K                  int5-k, the same
    all parts Q4_K, Q5_K or Q6_K            int8-k, the same
    any other quantized part                int8-g32 of the dequantized values (8 bits for sources of 4 to 6.6 bits)
    all parts BF16                          bf16, the same bits
    F16, F32 or a mixture of unquantized    fp32, the same values

A format that was asked for holds for every matrix, and takes over integers where it can; the K formats can't be asked
for, they hold what files have. Group formats need columns in groups of 32; a matrix that hasn't them falls back to
`int8` rows. Vectors (norms, biases) and routers of experts are always fp32.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierd.daemon.errors import BadRequest
from tierd.daemon.models.dequant import dequantize, split_affine, split_int8, split_k
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.ggml_types import GgmlType
from tierd.daemon.models.records import RECORD_ALIGN_BYTES, TENSOR_ALIGN_BYTES, PlannedRecord, PlannedTensor
from tierd.daemon.models.source import SourceTensor
from tierd.kernels import packing
from tierd.kernels.packing import GROUP_COLS, PANEL_ROWS, KQuants, WeightFormat

AUTO = "auto"
_INT4_KINDS = frozenset({GgmlType.Q4_0, GgmlType.Q4_1})
_INT5_KINDS = _INT4_KINDS | {GgmlType.Q5_0, GgmlType.Q5_1}
_INT8_KINDS = frozenset({GgmlType.Q8_0, GgmlType.Q5_0, GgmlType.Q4_0, GgmlType.MXFP4})
_K_KINDS = frozenset({GgmlType.Q4_K, GgmlType.Q5_K, GgmlType.Q6_K})
_FLOAT_KINDS = frozenset({GgmlType.F32, GgmlType.F16, GgmlType.BF16})
_CHUNK_ELEMENTS = 1 << 20  # 4 MB of fp32 a chunk, some 20 MB with all temporaries


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor with its sources, its format and its place in the file."""

    planned: PlannedTensor
    sources: tuple[SourceTensor, ...]
    format: WeightFormat
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PlacedRecord:
    """A record with its place in the file."""

    name: str
    tensors: tuple[PlacedTensor, ...]
    offset: int
    bytes: int


def parse_format(weights: str | None) -> WeightFormat | None:
    """The format that was asked for, None for `auto`. Raises BadRequest for an unknown one."""
    if weights is None or weights == AUTO:
        return None
    if weights not in packing.ROUNDED_FORMATS:
        known = ", ".join([AUTO, *packing.ROUNDED_FORMATS])
        message = f"weight format {weights[:40]!r} isn't known"
        raise BadRequest(message, hint=f"take one of {known}", param="weights")
    return WeightFormat(weights)


def choose_format(kinds: frozenset[GgmlType], cols: int, wanted: WeightFormat | None) -> WeightFormat:
    """The format of a matrix whose parts are of these kinds (the table at the top)."""
    if wanted is None:
        if kinds <= _INT4_KINDS:
            wanted = WeightFormat.INT4_G32
        elif kinds <= _INT5_KINDS:
            wanted = WeightFormat.INT5_G32
        elif kinds <= _K_KINDS:
            narrow = WeightFormat.INT4_K if kinds == {GgmlType.Q4_K} else WeightFormat.INT5_K
            wanted = WeightFormat.INT8_K if GgmlType.Q6_K in kinds else narrow
        elif kinds <= _FLOAT_KINDS:
            wanted = WeightFormat.BF16 if kinds == {GgmlType.BF16} else WeightFormat.FP32
        else:
            wanted = WeightFormat.INT8_G32
    grouped = wanted in (WeightFormat.INT8_G32, WeightFormat.INT4_G32, WeightFormat.INT5_G32)
    return WeightFormat.INT8 if grouped and cols % GROUP_COLS else wanted


def place(
    records: list[PlannedRecord],
    find: Callable[[PlannedTensor], tuple[SourceTensor, ...]],
    wanted: WeightFormat | None,
) -> list[PlacedRecord]:
    """Formats and offsets of everything. Reads no weights."""
    placed: list[PlacedRecord] = []
    offset = 0
    for record in records:
        start, tensors = offset, []
        for planned in record.tensors:
            sources = find(planned)
            if planned.vector:
                format, size = WeightFormat.FP32, 4 * planned.cols
            else:
                kinds = frozenset(s.kind for s in sources)
                format = choose_format(kinds, planned.cols, WeightFormat.FP32 if planned.exact else wanted)
                size = packing.packed_bytes(format, planned.rows, planned.cols)
            tensors.append(PlacedTensor(planned, sources, format, offset, size))
            offset = _up(offset + size, TENSOR_ALIGN_BYTES)
        offset = _up(offset, RECORD_ALIGN_BYTES)
        placed.append(PlacedRecord(record.name, tuple(tensors), start, offset - start))
    return placed


def write_tensor(fd: int, tensor: PlacedTensor) -> None:
    """Read, convert and write one tensor, a few rows at a time. Raises ModelFileError for values that aren't finite."""
    try:
        if tensor.planned.vector:
            values = np.concatenate([dequantize(s.kind, s.read(0, 1)) for s in tensor.sources], axis=1)
            if not np.isfinite(values).all():
                raise ValueError("it holds values that aren't finite")
            _pwrite(fd, values.astype("<f4").view(np.uint8).reshape(-1), tensor.offset)
        else:
            _write_matrix(fd, tensor)
    except ModelFileError:
        raise
    except ValueError as exc:
        names = ", ".join(s.name for s in tensor.sources)
        raise ModelFileError(f"tensor {names}: {exc}; the file is damaged, fetch it again") from exc


def _write_matrix(fd: int, tensor: PlacedTensor) -> None:
    """Pack runs of whole panels and put each section's share where the layout of the whole matrix wants it."""
    rows, cols = tensor.planned.rows, tensor.planned.cols
    whole, num_panels = packing.sections(tensor.format, rows, cols), packing.panels(rows)
    pack = _packer(tensor)
    step = max(PANEL_ROWS, _CHUNK_ELEMENTS // cols // PANEL_ROWS * PANEL_ROWS)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        block = pack(start, stop)
        part = packing.sections(tensor.format, stop - start, cols)
        for at, size, total_at, total in (
            (0, part.quants_bytes, 0, whole.quants_bytes),
            (part.scales_offset, part.scales_bytes, whole.scales_offset, whole.scales_bytes),
            (part.minimums_offset, part.minimums_bytes, whole.minimums_offset, whole.minimums_bytes),
        ):
            skipped = start // PANEL_ROWS * (total // num_panels)
            _pwrite(fd, block[at : at + size], tensor.offset + total_at + skipped)


def _packer(tensor: PlacedTensor) -> Callable[[int, int], npt.NDArray[np.uint8]]:
    """How rows `start` to `stop` become a packed block: from the source's own integers if the format can hold them."""
    kinds = {s.kind for s in tensor.sources}

    def affine(start: int, stop: int) -> npt.NDArray[np.uint8]:
        parts = [split_affine(kind, raw) for kind, raw in _rows(tensor.sources, start, stop)]
        quants, scales, minima = (np.concatenate(p) for p in zip(*parts, strict=True))
        return packing.pack_affine(tensor.format, quants, scales, minima)

    def int8(start: int, stop: int) -> npt.NDArray[np.uint8]:
        parts = [split_int8(kind, raw) for kind, raw in _rows(tensor.sources, start, stop)]
        quants, scales = (np.concatenate(p) for p in zip(*parts, strict=True))
        return packing.pack_int8_g32(quants, scales)

    def k_quants(start: int, stop: int) -> npt.NDArray[np.uint8]:
        parts = [split_k(kind, raw, tensor.format) for kind, raw in _rows(tensor.sources, start, stop)]
        fields = [tuple(getattr(part, f.name) for f in dataclasses.fields(part)) for part in parts]
        return packing.pack_k(tensor.format, KQuants(*(np.concatenate(field) for field in zip(*fields, strict=True))))

    def values(start: int, stop: int) -> npt.NDArray[np.uint8]:
        parts = [dequantize(kind, raw) for kind, raw in _rows(tensor.sources, start, stop)]
        return packing.pack(tensor.format, np.concatenate(parts))

    if tensor.format not in packing.ROUNDED_FORMATS:
        return k_quants
    if tensor.format is WeightFormat.INT4_G32 and kinds <= _INT4_KINDS:
        return affine
    if tensor.format is WeightFormat.INT5_G32 and kinds <= _INT5_KINDS:
        return affine
    if tensor.format is WeightFormat.INT8_G32 and kinds <= _INT8_KINDS:
        return int8
    return values


def _rows(
    sources: tuple[SourceTensor, ...], start: int, stop: int
) -> Iterator[tuple[GgmlType, npt.NDArray[np.uint8]]]:
    """Rows `start` to `stop` of the sources one below the other, as pieces of one kind each."""
    first = 0
    for source in sources:
        low, high = max(start, first), min(stop, first + source.rows)
        if low < high:
            yield source.kind, source.read(low - first, high - first)
        first += source.rows


def _pwrite(fd: int, data: npt.NDArray[np.uint8], offset: int) -> None:
    view = np.ascontiguousarray(data).data
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
