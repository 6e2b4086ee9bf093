"""What a prepared model consists of: the records of `weights.bin` and the source tensors each part is made from.

A record is what the engine loads, keeps or streams as one piece: the embedding, one layer, the final norm, the head.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierd.daemon.models.spec import ModelSpec

RECORD_ALIGN_BYTES = 4096  # O_DIRECT and mmap
TENSOR_ALIGN_BYTES = 64  # a cache line


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A source tensor: `slot` (q, k, gate, attn_norm, ...; a bias is `q_bias`), of `layer` or of none (-1)."""

    slot: str
    layer: int
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of a record: its parts one below the other. A vector has one row; its parts follow each other."""

    name: str
    parts: tuple[PlannedPart, ...]
    vector: bool

    @property
    def rows(self) -> int:
        """Rows of the whole."""
        return 1 if self.vector else sum(p.rows for p in self.parts)

    @property
    def cols(self) -> int:
        """Columns of the whole."""
        return sum(p.cols for p in self.parts) if self.vector else self.parts[0].cols


@dataclass(frozen=True, slots=True)
class PlannedRecord:
    """A record: tensors in the order in which they lie."""

    name: str
    tensors: tuple[PlannedTensor, ...]


def plan_records(spec: ModelSpec) -> list[PlannedRecord]:
    """The records of a model, in the order of the file: `embed`, `layer.0` ..., `final`, and `head` unless tied."""
    embed = _matrix("embed", -1, ("embed", spec.vocab), cols=spec.hidden)
    final = _vector("final_norm", -1, ("final_norm", spec.hidden))
    records = [PlannedRecord("embed", (embed,))]
    records += [PlannedRecord(f"layer.{i}", tuple(_layer(spec, i))) for i in range(spec.num_layers)]
    records.append(PlannedRecord("final", (final,)))
    if not spec.tied:
        records.append(PlannedRecord("head", (_matrix("head", -1, ("head", spec.vocab), cols=spec.hidden),)))
    return records


def _layer(spec: ModelSpec, layer: int) -> list[PlannedTensor]:
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    qkv = (("q", query), ("k", key), ("v", key))
    gate_up = (("gate", spec.intermediate), ("up", spec.intermediate))
    tensors = [
        _vector("attn_norm", layer, ("attn_norm", spec.hidden)),
        _matrix("qkv", layer, *qkv, cols=spec.hidden),
    ]
    if spec.qkv_bias:
        tensors.append(_vector("qkv_bias", layer, *((f"{slot}_bias", rows) for slot, rows in qkv)))
    if spec.qk_norm:
        tensors.append(_vector("q_norm", layer, ("q_norm", spec.head_dim)))
        tensors.append(_vector("k_norm", layer, ("k_norm", spec.head_dim)))
    tensors.append(_matrix("o", layer, ("o", spec.hidden), cols=query))
    if spec.o_bias:
        tensors.append(_vector("o_bias", layer, ("o_bias", spec.hidden)))
    tensors.append(_vector("mlp_norm", layer, ("mlp_norm", spec.hidden)))
    tensors.append(_matrix("gate_up", layer, *gate_up, cols=spec.hidden))
    if spec.mlp_bias:
        tensors.append(_vector("gate_up_bias", layer, *((f"{slot}_bias", rows) for slot, rows in gate_up)))
    tensors.append(_matrix("down", layer, ("down", spec.hidden), cols=spec.intermediate))
    if spec.mlp_bias:
        tensors.append(_vector("down_bias", layer, ("down_bias", spec.hidden)))
    return tensors


def _matrix(name: str, layer: int, *parts: tuple[str, int], cols: int) -> PlannedTensor:
    return PlannedTensor(name, tuple(PlannedPart(slot, layer, rows, cols) for slot, rows in parts), vector=False)


def _vector(name: str, layer: int, *parts: tuple[str, int]) -> PlannedTensor:
    return PlannedTensor(name, tuple(PlannedPart(slot, layer, 1, cols) for slot, cols in parts), vector=True)
