"""What a prepared model consists of: the records of `weights.bin` and the source tensors each part is made from.

A record is what the engine loads, keeps or streams as one piece: the embedding, one layer, the final norm, the head.
In a mixture each expert is a record, too, and its layer's record has the router instead of an MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierd.daemon.models.spec import ModelSpec

RECORD_ALIGN_BYTES = 4096  # O_DIRECT and mmap
TENSOR_ALIGN_BYTES = 64  # a cache line
EXPERT_PREFIX = "expert."  # of the names of their records


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A source tensor: `slot` (q, k, gate, attn_norm, ...; a bias is `q_bias`), of `layer` or of none (-1), of an
    `expert` or of none (-1)."""

    slot: str
    layer: int
    rows: int
    cols: int
    expert: int = -1


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of a record: its parts one below the other. A vector has one row; its parts follow each other.

    `exact`: kept as fp32, whatever format is asked for.
    """

    name: str
    parts: tuple[PlannedPart, ...]
    vector: bool
    exact: bool = False

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
    """The records of a model, in the order of the file: `embed`, `layer.0` ..., `final`, and `head` unless tied.

    The experts of a layer, `expert.0.0` ..., follow it.
    """
    embed = _matrix("embed", -1, ("embed", spec.vocab), cols=spec.hidden)
    final = _vector("final_norm", -1, ("final_norm", spec.hidden))
    records, experts = [PlannedRecord("embed", (embed,))], expert_names(spec)
    for i in range(spec.num_layers):
        records.append(PlannedRecord(f"layer.{i}", tuple(_layer(spec, i))))
        if spec.experts is not None and spec.has_experts(i):
            records += [
                PlannedRecord(name, _mlp(spec, i, spec.experts.intermediate, spec.experts.bias, expert))
                for expert, name in enumerate(experts[i])
            ]
    records.append(PlannedRecord("final", (final,)))
    if not spec.tied:
        records.append(PlannedRecord("head", (_matrix("head", -1, ("head", spec.vocab), cols=spec.hidden),)))
    return records


def expert_record(layer: int, expert: int) -> str:
    """The name of the record of an expert."""
    return f"{EXPERT_PREFIX}{layer}.{expert}"


def expert_names(spec: ModelSpec) -> dict[int, list[str]]:
    """The names of the records of all experts, by layer."""
    if spec.experts is None:
        return {}
    return {layer: [expert_record(layer, number) for number in range(spec.experts.count)]
            for layer in spec.experts.layers}  # fmt: skip


def expert_places(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """By the name of its record: the layer and the number of each expert."""
    return {name: (layer, n) for layer, names in expert_names(spec).items() for n, name in enumerate(names)}


def _layer(spec: ModelSpec, layer: int) -> list[PlannedTensor]:
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    qkv = (("q", query), ("k", key), ("v", key))
    tensors = [
        _vector("attn_norm", layer, ("attn_norm", spec.hidden)),
        _matrix("qkv", layer, *qkv, cols=spec.hidden),
    ]
    if spec.qkv_bias:
        tensors.append(_vector("qkv_bias", layer, *((f"{slot}_bias", rows) for slot, rows in qkv)))
    if spec.sink_logits:
        tensors.append(_vector("sink_logits", layer, ("sink_logits", spec.heads)))
    if spec.qk_norm:
        tensors.append(_vector("q_norm", layer, ("q_norm", spec.head_dim)))
        tensors.append(_vector("k_norm", layer, ("k_norm", spec.head_dim)))
    tensors.append(_matrix("o", layer, ("o", spec.hidden), cols=query))
    if spec.o_bias:
        tensors.append(_vector("o_bias", layer, ("o_bias", spec.hidden)))
    tensors.append(_vector("mlp_norm", layer, ("mlp_norm", spec.hidden)))
    if spec.experts is not None and spec.has_experts(layer):
        # Its rounding could send tokens elsewhere, and it is small.
        part = PlannedPart("router", layer, spec.experts.count, spec.hidden)
        tensors.append(PlannedTensor("router", (part,), vector=False, exact=True))
        bias = _vector("router_bias", layer, ("router_bias", spec.experts.count))
        return [*tensors, bias] if spec.experts.bias else tensors
    return [*tensors, *_mlp(spec, layer, spec.intermediate, spec.mlp_bias)]


def _mlp(spec: ModelSpec, layer: int, width: int, bias: bool, expert: int = -1) -> tuple[PlannedTensor, ...]:
    """An MLP of a layer, or an expert."""
    gate_up = _matrix("gate_up", layer, ("gate", width), ("up", width), cols=spec.hidden, expert=expert)
    down = _matrix("down", layer, ("down", spec.hidden), cols=width, expert=expert)
    if not bias:
        return gate_up, down
    biases = (("gate_bias", width), ("up_bias", width))
    return (
        gate_up,
        _vector("gate_up_bias", layer, *biases, expert=expert),
        down,
        _vector("down_bias", layer, ("down_bias", spec.hidden), expert=expert),
    )


def _matrix(name: str, layer: int, *parts: tuple[str, int], cols: int, expert: int = -1) -> PlannedTensor:
    planned = tuple(PlannedPart(slot, layer, rows, cols, expert) for slot, rows in parts)
    return PlannedTensor(name, planned, vector=False)


def _vector(name: str, layer: int, *parts: tuple[str, int], expert: int = -1) -> PlannedTensor:
    return PlannedTensor(name, tuple(PlannedPart(slot, layer, 1, cols, expert) for slot, cols in parts), vector=True)
