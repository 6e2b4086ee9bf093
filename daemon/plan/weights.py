"""The memory calculator's half about weights: bytes of each record, by format, as `tierd pull` would write it.

The sizes of packed matrices are those of `kernels.packing`, the order and padding those of `models.records`; numpy is
imported with them, so this is for commands and not for the front.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tierd.daemon.models.records import expert_names
from tierd.daemon.plan.shape import Layer, Matrix, Shape

if TYPE_CHECKING:
    from tierd.daemon.models.catalog import Manifest

_RECORD_ALIGN_BYTES = 4096
_TENSOR_ALIGN_BYTES = 64


class WeightBytes(NamedTuple):
    """Bytes of the records. `head` is 0 where it is the embedding. A layer counts with its experts; those of all layers
    take `experts`, the largest of them `expert`."""

    embed: int
    layers: tuple[int, ...]
    final: int
    head: int
    experts: int = 0
    expert: int = 0

    @property
    def total(self) -> int:
        """All of them: the size of `weights.bin`."""
        return self.embed + sum(self.layers) + self.final + self.head

    @property
    def outside(self) -> int:
        """What is not a layer."""
        return self.embed + self.final + self.head


def weight_formats() -> tuple[str, ...]:
    """The formats that `tierd pull` may be asked for."""
    from tierd.kernels.packing import ROUNDED_FORMATS  # numpy

    return tuple(format.value for format in ROUNDED_FORMATS)


def weight_bytes(shape: Shape, format: str) -> WeightBytes:
    """Bytes of the records in a weight format. Raises ValueError for a format that `kernels.packing` doesn't know."""
    table = _record(shape, [Matrix("table", shape.vocab, shape.hidden)], [], format)
    each = [_expert(shape, layer, format) for layer in shape.layers]
    return WeightBytes(
        embed=table,
        layers=tuple(_layer(shape, layer, format) for layer in shape.layers),
        final=_record(shape, [], [shape.hidden], format),
        head=0 if shape.tied else table,
        experts=sum(layer.experts * size for layer, size in zip(shape.layers, each, strict=True)),
        expert=max(each, default=0),
    )


def prepared_bytes(manifest: Manifest) -> WeightBytes:
    """The same of a prepared model: what its manifest says."""
    found = {record.name: record.bytes for record in manifest.records}
    layers = [found[f"layer.{index}"] for index in range(manifest.spec.num_layers)]
    experts = [found[name] for names in expert_names(manifest.spec).values() for name in names]
    for index, names in expert_names(manifest.spec).items():
        layers[index] += sum(found[name] for name in names)
    return WeightBytes(
        found["embed"], tuple(layers), found["final"], found.get("head", 0), sum(experts), max(experts, default=0)
    )


def _layer(shape: Shape, layer: Layer, format: str) -> int:
    """A layer with its experts, each of which is a record."""
    own = [matrix for matrix in layer.matrices if matrix.copies == 1]
    return _record(shape, own, layer.vectors, format) + layer.experts * _expert(shape, layer, format)


def _expert(shape: Shape, layer: Layer, format: str) -> int:
    """One expert of a layer; 0 of a dense one."""
    single = [msgspec.structs.replace(matrix, copies=1) for matrix in layer.matrices if matrix.copies > 1]
    return _record(shape, single, layer.expert_vectors, format) if single else 0


def _record(shape: Shape, matrices: tuple[Matrix, ...] | list[Matrix], vectors: tuple[int, ...] | list[int],
            format: str) -> int:  # fmt: skip
    sizes = [_matrix_bytes("fp32" if matrix.exact else format, matrix.rows, matrix.cols) for matrix in matrices]
    sizes += [4 * length for length in vectors]
    total = sum(-(-size // _TENSOR_ALIGN_BYTES) * _TENSOR_ALIGN_BYTES for size in sizes)
    return -(-total // _RECORD_ALIGN_BYTES) * _RECORD_ALIGN_BYTES


def _matrix_bytes(format: str, rows: int, cols: int) -> int:
    from tierd.kernels.packing import GROUP_COLS, WeightFormat, packed_bytes  # numpy

    kind = WeightFormat(format)
    if kind in (WeightFormat.INT8_G32, WeightFormat.INT4_G32, WeightFormat.INT5_G32) and cols % GROUP_COLS:
        kind = WeightFormat.INT8  # as `models.weights.choose_format` does
    return packed_bytes(kind, rows, cols)
