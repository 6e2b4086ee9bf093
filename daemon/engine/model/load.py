"""A prepared model directory, mapped: weights as the kernels take them, nothing converted.

`weights.bin` is mapped copy-on-write: the arrays count as writable, as the kernels want, and a stray write would reach
a private page and never the file. Its pages come from the page cache when a kernel first touches them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierd.daemon.errors import ModelInvalid
from tierd.daemon.models.catalog import WEIGHTS, Manifest, RecordEntry, TensorEntry
from tierd.daemon.models.spec import ModelSpec
from tierd.kernels.cpu.step import DecoderShape, LayerWeights
from tierd.kernels.packing import PackedMatrix, WeightFormat, packed_bytes

Vector = npt.NDArray[np.float32]
_HINT = "remove the model and pull it again"


@dataclass(frozen=True, slots=True)
class Weights:
    """Everything `CpuDecoder` takes of a model. `head` is `embed` when they are tied."""

    shape: DecoderShape
    layers: list[LayerWeights]
    embed: PackedMatrix
    final_norm: Vector  # [hidden]
    head: PackedMatrix


class _Records:
    """Tensors of a mapped file by record and name, each checked against the shape the spec asks for."""

    def __init__(self, data: npt.NDArray[np.uint8], records: tuple[RecordEntry, ...]) -> None:
        self._data = data
        self._records = {record.name: {tensor.name: tensor for tensor in record.tensors} for record in records}

    def matrix(self, record: str, name: str, rows: int, cols: int) -> PackedMatrix:
        entry = self._entry(record, name, rows, cols)
        try:
            kind = WeightFormat(entry.format)
            wanted = packed_bytes(kind, rows, cols)
        except ValueError as exc:
            raise ModelInvalid(f"{record}/{name}: {exc}", hint=_HINT) from None
        if entry.bytes != wanted:
            raise ModelInvalid(f"{record}/{name} has {entry.bytes} bytes, {kind} takes {wanted}", hint=_HINT)
        return PackedMatrix(kind, rows, cols, self._bytes(entry))

    def vector(self, record: str, name: str, length: int) -> Vector:
        entry = self._entry(record, name, 1, length)
        if entry.format != WeightFormat.FP32 or entry.bytes != 4 * length:
            raise ModelInvalid(f"{record}/{name} is no plain vector of {length} floats", hint=_HINT)
        return self._bytes(entry).view(np.float32)

    def vector_if(self, wanted: bool, record: str, name: str, length: int) -> Vector | None:
        return self.vector(record, name, length) if wanted else None

    def _entry(self, record: str, name: str, rows: int, cols: int) -> TensorEntry:
        entry = self._records.get(record, {}).get(name)
        if entry is None:
            raise ModelInvalid(f"the model has no {record}/{name}", hint=_HINT)
        if (entry.rows, entry.cols) != (rows, cols):
            raise ModelInvalid(
                f"{record}/{name} is {entry.rows} x {entry.cols}, the model needs {rows} x {cols}", hint=_HINT
            )
        return entry

    def _bytes(self, entry: TensorEntry) -> npt.NDArray[np.uint8]:
        return self._data[entry.offset : entry.offset + entry.bytes]


def shape_of(spec: ModelSpec) -> DecoderShape:
    """The kernels' view of a spec."""
    return DecoderShape(
        num_layers=spec.num_layers,
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab=spec.vocab,
        norm_eps=spec.norm_eps,
        qk_norm=spec.qk_norm,
        windows=spec.windows or (0,) * spec.num_layers,
    )


def load_weights(directory: Path, manifest: Manifest, progress: Callable[[int, int], None]) -> Weights:
    """Map the weights of a prepared model.

    `progress` is called with (records done, records). Raises ModelInvalid when the file, the manifest and the spec do
    not agree.
    """
    path = directory / WEIGHTS
    try:
        data = np.memmap(path, dtype=np.uint8, mode="c")
    except (OSError, ValueError) as exc:
        raise ModelInvalid(f"{WEIGHTS} can't be mapped: {exc}", hint=_HINT) from None
    if data.size != manifest.bytes:
        raise ModelInvalid(f"{WEIGHTS} has {data.size} bytes, the manifest says {manifest.bytes}", hint=_HINT)
    spec, records = manifest.spec, _Records(data.view(np.ndarray), manifest.records)
    total = spec.num_layers + 2
    embed = records.matrix("embed", "embed", spec.vocab, spec.hidden)
    progress(1, total)
    layers = []
    for number in range(spec.num_layers):
        layers.append(_layer(records, f"layer.{number}", spec))
        progress(number + 2, total)
    head = embed if spec.tied else records.matrix("head", "head", spec.vocab, spec.hidden)
    final_norm = records.vector("final", "final_norm", spec.hidden)
    progress(total, total)
    return Weights(shape_of(spec), layers, embed, final_norm, head)


def _layer(records: _Records, name: str, spec: ModelSpec) -> LayerWeights:
    query = spec.heads * spec.head_dim
    fused = query + 2 * spec.kv_heads * spec.head_dim
    return LayerWeights(
        attn_norm=records.vector(name, "attn_norm", spec.hidden),
        qkv=records.matrix(name, "qkv", fused, spec.hidden),
        qkv_bias=records.vector_if(spec.qkv_bias, name, "qkv_bias", fused),
        q_norm=records.vector_if(spec.qk_norm, name, "q_norm", spec.head_dim),
        k_norm=records.vector_if(spec.qk_norm, name, "k_norm", spec.head_dim),
        o=records.matrix(name, "o", spec.hidden, query),
        o_bias=records.vector_if(spec.o_bias, name, "o_bias", spec.hidden),
        mlp_norm=records.vector(name, "mlp_norm", spec.hidden),
        gate_up=records.matrix(name, "gate_up", 2 * spec.intermediate, spec.hidden),
        gate_up_bias=records.vector_if(spec.mlp_bias, name, "gate_up_bias", 2 * spec.intermediate),
        down=records.matrix(name, "down", spec.hidden, spec.intermediate),
        down_bias=records.vector_if(spec.mlp_bias, name, "down_bias", spec.hidden),
    )
