"""A prepared model directory, mapped: weights as the kernels take them, nothing converted.

`weights.bin` is mapped copy-on-write: the arrays count as writable, as the kernels want, and a stray write would reach
a private page and never the file. Every record is compared with its digest when it is mapped: what damaged weights
compute would be remembered as if it were right.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from tierd.daemon.errors import ModelInvalid
from tierd.daemon.models.catalog import WEIGHTS, Manifest, RecordEntry, TensorEntry
from tierd.daemon.models.records import expert_record
from tierd.daemon.models.spec import ModelSpec
from tierd.kernels.cpu.weights import DecoderShape, ExpertsShape, ExpertWeights, LayerWeights, padded
from tierd.kernels.packing import PackedMatrix, WeightFormat, packed_bytes

Vector = npt.NDArray[np.float32]
HINT = "pull it again with --force"


@dataclass(frozen=True, slots=True)
class Weights:
    """Everything `CpuDecoder` takes of a model. `head` is `embed` when they are tied."""

    shape: DecoderShape
    layers: list[LayerWeights]
    embed: PackedMatrix
    final_norm: Vector  # [hidden]
    head: PackedMatrix


class RecordView:
    """The tensors of one record by name, each checked against the shape the spec asks for. `data`: all its bytes."""

    def __init__(self, record: RecordEntry, data: npt.NDArray[np.uint8]) -> None:
        self._record = record
        self._data = data
        self._tensors = {tensor.name: tensor for tensor in record.tensors}

    def matrix(self, name: str, rows: int, cols: int) -> PackedMatrix:
        """A matrix. Raises ModelInvalid when it is not there, or another one."""
        entry = self._entry(name, rows, cols)
        kind = checked_format(self._record.name, entry)
        return PackedMatrix(kind, rows, cols, self._bytes(entry))

    def vector(self, name: str, length: int) -> Vector:
        """A vector. Raises ModelInvalid when it is not there, or another one."""
        entry = self._entry(name, 1, length)
        if entry.format != WeightFormat.FP32 or entry.bytes != 4 * length:
            raise ModelInvalid(f"{self._record.name}/{name} is no plain vector of {length} floats", hint=HINT)
        return self._bytes(entry).view(np.float32)

    def vector_if(self, wanted: bool, name: str, length: int) -> Vector | None:
        """A vector of models that have it."""
        return self.vector(name, length) if wanted else None

    def panels_if(self, wanted: bool, name: str, length: int) -> Vector | None:
        """The same with what follows it, up to whole panels of rows: tensors lie that far apart."""
        if not wanted:
            return None
        self.vector(name, length)
        first = self._tensors[name].offset - self._record.offset
        return self._data[first : first + 4 * padded(length)].view(np.float32)

    def _entry(self, name: str, rows: int, cols: int) -> TensorEntry:
        entry = self._tensors.get(name)
        if entry is None:
            raise ModelInvalid(f"the model has no {self._record.name}/{name}", hint=HINT)
        if (entry.rows, entry.cols) != (rows, cols):
            raise ModelInvalid(
                f"{self._record.name}/{name} is {entry.rows} x {entry.cols}, the model needs {rows} x {cols}", hint=HINT
            )
        return entry

    def _bytes(self, entry: TensorEntry) -> npt.NDArray[np.uint8]:
        first = entry.offset - self._record.offset
        return self._data[first : first + entry.bytes]


def checked_format(record: str, entry: TensorEntry) -> WeightFormat:
    """The format of a matrix. Raises ModelInvalid for an unknown one, or another number of bytes than it takes."""
    try:
        kind = WeightFormat(entry.format)
        wanted = packed_bytes(kind, entry.rows, entry.cols)
    except ValueError as exc:
        raise ModelInvalid(f"{record}/{entry.name}: {exc}", hint=HINT) from None
    if entry.bytes != wanted:
        raise ModelInvalid(f"{record}/{entry.name} has {entry.bytes} bytes, {kind} takes {wanted}", hint=HINT)
    return kind


def shape_of(spec: ModelSpec) -> DecoderShape:
    """The kernels' view of a spec."""
    experts = None
    if (found := spec.experts) is not None:
        experts = ExpertsShape(
            found.count, found.used, found.intermediate, found.renormalized, found.layers, found.bias, found.limit,
            found.slope,
        )  # fmt: skip
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
        experts=experts,
    )


def damaged(record: str) -> ModelInvalid:
    """The error for a record whose bytes are others than those of the import."""
    return ModelInvalid(f"record {record} isn't what was imported: bytes on the disk have changed", hint=HINT)


def checked(memory: npt.NDArray[np.uint8], record: RecordEntry) -> npt.NDArray[np.uint8]:
    """The bytes of a record, compared with its digest. Raises ModelInvalid."""
    if xxhash.xxh3_128_hexdigest(memory.data) != record.digest:
        raise damaged(record.name)
    return memory


def map_file(
    directory: Path, manifest: Manifest, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
    """The weight file of a prepared model, mapped, and all its bytes, compared with their digests.

    `progress` is called with (bytes compared, bytes). Raises ModelInvalid.
    """
    path = directory / WEIGHTS
    try:
        with path.open("rb") as file:
            # Without a reserve: a file larger than the memory may be mapped as well, parts of it are never touched.
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.11 lacks the name
            mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as exc:
        raise ModelInvalid(f"{WEIGHTS} can't be mapped: {exc}", hint=HINT) from None
    data = np.frombuffer(mapped, np.uint8)
    if data.size != manifest.bytes:
        raise ModelInvalid(f"{WEIGHTS} has {data.size} bytes, the manifest says {manifest.bytes}", hint=HINT)
    for record in manifest.records:  # most of it is read for the first token anyway
        checked(data[record.offset : record.offset + record.bytes], record)
        progress(record.offset + record.bytes, manifest.bytes)
    return mapped, data


def load_weights(directory: Path, manifest: Manifest, progress: Callable[[int, int], None]) -> Weights:
    """Map the weights of a prepared model, all of them.

    `progress` is called with (records done, records). Raises ModelInvalid when the file, the manifest and the spec do
    not agree.
    """
    _, data = map_file(directory, manifest)
    spec = manifest.spec
    entries = {record.name: record for record in manifest.records}

    def view(name: str) -> RecordView:
        record = record_named(entries, name)
        return RecordView(record, data[record.offset : record.offset + record.bytes])

    total = spec.num_layers + 2
    embed = view("embed").matrix("embed", spec.vocab, spec.hidden)
    progress(1, total)
    layers = []
    for number in range(spec.num_layers):
        experts: tuple[ExpertWeights, ...] = ()
        if spec.experts is not None and spec.has_experts(number):
            experts = tuple(expert_of(view(expert_record(number, n)), spec) for n in range(spec.experts.count))
        layers.append(dataclasses.replace(layer_of(view(f"layer.{number}"), spec, number), experts=experts))
        progress(number + 2, total)
    head = embed if spec.tied else view("head").matrix("head", spec.vocab, spec.hidden)
    final_norm = view("final").vector("final_norm", spec.hidden)
    progress(total, total)
    return Weights(shape_of(spec), layers, embed, final_norm, head)


def record_named(entries: dict[str, RecordEntry], name: str) -> RecordEntry:
    """A record by its name. Raises ModelInvalid for one that the model does not have."""
    if name not in entries:
        raise ModelInvalid(f"the model has no record {name}", hint=HINT)
    return entries[name]


def expert_of(view: RecordView, spec: ModelSpec) -> ExpertWeights:
    """The weights of an expert in its record. Raises ModelInvalid when they do not agree with the spec."""
    assert spec.experts is not None
    width, bias = spec.experts.intermediate, spec.experts.bias
    return ExpertWeights(
        view.matrix("gate_up", 2 * width, spec.hidden),
        view.matrix("down", spec.hidden, width),
        view.panels_if(bias, "gate_up_bias", 2 * width),
        view.panels_if(bias, "down_bias", spec.hidden),
    )


def layer_of(view: RecordView, spec: ModelSpec, number: int) -> LayerWeights:
    """The weights of layer `number` in its record. Raises ModelInvalid when they do not agree with the spec."""
    mixture = spec.experts if spec.has_experts(number) else None
    dense_bias = spec.mlp_bias and mixture is None
    query = spec.heads * spec.head_dim
    fused = query + 2 * spec.kv_heads * spec.head_dim
    return LayerWeights(
        attn_norm=view.vector("attn_norm", spec.hidden),
        qkv=view.matrix("qkv", fused, spec.hidden),
        qkv_bias=view.vector_if(spec.qkv_bias, "qkv_bias", fused),
        q_norm=view.vector_if(spec.qk_norm, "q_norm", spec.head_dim),
        k_norm=view.vector_if(spec.qk_norm, "k_norm", spec.head_dim),
        o=view.matrix("o", spec.hidden, query),
        o_bias=view.vector_if(spec.o_bias, "o_bias", spec.hidden),
        mlp_norm=view.vector("mlp_norm", spec.hidden),
        gate_up=view.matrix("gate_up", 2 * spec.intermediate, spec.hidden) if mixture is None else None,
        gate_up_bias=view.vector_if(dense_bias, "gate_up_bias", 2 * spec.intermediate),
        down=view.matrix("down", spec.hidden, spec.intermediate) if mixture is None else None,
        down_bias=view.vector_if(dense_bias, "down_bias", spec.hidden),
        router=view.matrix("router", mixture.count, spec.hidden) if mixture is not None else None,
        router_bias=view.vector("router_bias", mixture.count) if mixture is not None and mixture.bias else None,
        sink_logits=view.vector_if(spec.sink_logits, "sink_logits", spec.heads),
    )
