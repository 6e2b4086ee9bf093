"""The weights of a decoder as its launches find them: a record of addresses for each layer, and parts of a matrix.

A layer lies in memory for good, or comes into one of several places for each pass. Every place that it can lie in is
described once, so that naming it to a launch costs a copy of some hundred bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.kernels.cpu.forward import EXPERT, LAYER
from tierd.kernels.cpu.matmul import MATRIX, describe_matrix
from tierd.kernels.packing import PANEL_ROWS, PackedMatrix, WeightFormat, packed_bytes, panels, sections

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Sizes of mixtures: rows of `layers` (ascending) go through `used` of `count` experts, `intermediate` wide.

    `renormalized`: the shares of the experts that a row goes through add up to one. `bias`: experts and routers have
    biases. `limit` and `slope`: of a clamped gate (see `ops.activate_columns`); 0 for silu.
    """

    count: int
    used: int
    intermediate: int
    renormalized: bool
    layers: tuple[int, ...]
    bias: bool = False
    limit: float = 0.0
    slope: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.used <= self.count or self.intermediate <= 0 or not self.layers:
            raise ValueError(f"{self.used} of {self.count} experts of {self.intermediate} in layers {self.layers}")


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a decoder. `windows` holds one entry a layer: how many tokens a row sees, 0 for all."""

    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    qk_norm: bool
    windows: tuple[int, ...]
    experts: ExpertsShape | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not share {self.kv_heads} kv heads evenly")
        if self.head_dim % PANEL_ROWS:
            raise ValueError(f"head_dim must be a multiple of {PANEL_ROWS}, got {self.head_dim}")
        if len(self.windows) != self.num_layers or min(self.windows) < 0:
            raise ValueError(f"windows needs {self.num_layers} entries of at least 0, got {self.windows}")

    @property
    def has_dense_layers(self) -> bool:
        """Whether not all layers are mixtures."""
        return self.experts is None or len(self.experts.layers) < self.num_layers

    @property
    def qkv_rows(self) -> int:
        """Outputs of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert; `gate_up` holds the gate's rows first, then those of up.

    Biases are read where they are, filled up to whole panels with zeros.
    """

    gate_up: PackedMatrix
    down: PackedMatrix
    gate_up_bias: Floats | None = None
    down_bias: Floats | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `gate_up` holds the gate's rows first, then those of up; a bias or norm that is absent is None.

    A mixture has a router instead of `gate_up` and `down`, and `experts`, or those that are in memory. `sink_logits`
    count in attention like a token each, without a value.
    """

    attn_norm: Floats  # [hidden]
    qkv: PackedMatrix  # queries, keys, values
    o: PackedMatrix
    mlp_norm: Floats  # [hidden]
    gate_up: PackedMatrix | None
    down: PackedMatrix | None
    qkv_bias: Floats | None = None
    q_norm: Floats | None = None  # [head_dim]
    k_norm: Floats | None = None  # [head_dim]
    o_bias: Floats | None = None
    gate_up_bias: Floats | None = None
    down_bias: Floats | None = None
    router: PackedMatrix | None = None
    router_bias: Floats | None = None
    sink_logits: Floats | None = None  # [heads]
    experts: tuple[ExpertWeights | None, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedLayer:
    """A layer in one place, as `WeightTable.describe` makes it. Keeps alive what it points into."""

    index: int
    record: NDArray[Any]  # LAYER [1]
    vectors: list[tuple[Floats, Floats]]  # (copy filled up to whole panels, where the values come to lie)
    weights: LayerWeights


class Part(NamedTuple):
    """Some panels of a matrix. Whoever makes it keeps their bytes where they are until the launch is over."""

    first_panel: int
    matrix: NDArray[Any]  # MATRIX [1]


class Rows(NamedTuple):
    """The rows of the embedding that a pass needs, gathered: `tokens` [rows] count rows of `matrix`."""

    tokens: Ints
    matrix: NDArray[Any]  # MATRIX [1]


class WeightTable:
    """The record of each layer that a launch reads. Layers that are not there are put before each launch of theirs."""

    def __init__(self, shape: DecoderShape, layers: Sequence[LayerWeights | None]) -> None:
        if len(layers) != shape.num_layers:
            raise ValueError(f"expected {shape.num_layers} layers, got {len(layers)}")
        self._shape = shape
        self.experts = ExpertTable(shape)
        self.records = np.zeros(shape.num_layers, LAYER)
        self._resident: list[PlacedLayer | None] = [None] * shape.num_layers
        for index, layer in enumerate(layers):
            if layer is not None:
                self.keep(self.describe(index, layer))

    def describe(self, index: int, layer: LayerWeights) -> PlacedLayer:
        """A layer whose bytes lie there, or will. Raises ValueError for one that does not fit the shape.

        Values of vectors are taken over by `put`; those of matrices are read in place.
        """
        shape = self._shape
        attended = shape.heads * shape.head_dim
        placed = PlacedLayer(index, np.zeros(1, LAYER), [], layer)
        record = placed.record[0]
        record["window"] = shape.windows[index]
        record["attn_norm"] = _vector(placed, "attn_norm", layer.attn_norm, shape.hidden)
        record["mlp_norm"] = _vector(placed, "mlp_norm", layer.mlp_norm, shape.hidden)
        if (layer.q_norm is not None) != shape.qk_norm or (layer.k_norm is not None) != shape.qk_norm:
            raise ValueError(f"qk_norm is {shape.qk_norm}, the layer's q_norm and k_norm say otherwise")
        record["q_norm"] = _vector(placed, "q_norm", layer.q_norm, shape.head_dim)
        record["k_norm"] = _vector(placed, "k_norm", layer.k_norm, shape.head_dim)
        record["sink_logits"] = _vector(placed, "sink_logits", layer.sink_logits, shape.heads)
        record["first_expert"] = self.experts.first(index)
        matrices = [("qkv", shape.qkv_rows, shape.hidden), ("o", shape.hidden, attended)]
        if shape.experts is not None and record["first_expert"] >= 0:
            if layer.router is None:
                raise ValueError(f"layer {index} is a mixture and has no router")
            matrices.append(("router", shape.experts.count, shape.hidden))
        else:
            matrices += [("gate_up", 2 * shape.intermediate, shape.hidden), ("down", shape.hidden, shape.intermediate)]
        for name, rows, cols in matrices:
            describe_checked(name, getattr(layer, name), rows, cols, record[name])
            record[name]["bias"] = _vector(placed, f"{name}_bias", getattr(layer, f"{name}_bias"), rows)
        return placed

    def put(self, placed: PlacedLayer) -> None:
        """The next launches find the layer there; its bytes have come."""
        for copy, source in placed.vectors:
            copy[: len(source)] = source
        self.records[placed.index] = placed.record[0]

    def keep(self, placed: PlacedLayer) -> None:
        """The layer stays there, and so do those of its experts that it has."""
        self.put(placed)
        for number, expert in enumerate(placed.weights.experts):
            if expert is not None:
                self.experts.keep(placed.index, number, expert)
        self._resident[placed.index] = placed

    def forget(self, index: int) -> None:
        """The layer has no place of its own any more."""
        self._resident[index] = None

    def is_resident(self, index: int) -> bool:
        """Whether the layer has a place of its own."""
        return self._resident[index] is not None

    def require_all(self) -> None:
        """Raises ValueError unless every layer has a place of its own."""
        missing = [index for index, placed in enumerate(self._resident) if placed is None]
        if missing:
            raise ValueError(f"layers {missing} are streamed: compute the pass layer by layer")
        if not self.experts.all_here:
            raise ValueError("experts are streamed: compute the pass layer by layer")


class ExpertTable:
    """The record of each expert that a launch reads, those of a layer one behind the other.

    An expert is kept where it is, or put somewhere before the launches that need it.
    """

    def __init__(self, shape: DecoderShape) -> None:
        self._shape = shape
        layers = () if shape.experts is None else shape.experts.layers
        self._count = 0 if shape.experts is None else shape.experts.count
        self._firsts = {layer: number * self._count for number, layer in enumerate(layers)}
        self._kept: list[ExpertWeights | None] = [None] * (len(layers) * self._count)
        self._missing = len(self._kept)
        self.records = np.zeros(max(1, len(self._kept)), EXPERT)  # never empty: compiled code takes its type

    def first(self, layer: int) -> int:
        """The number of a layer's first expert; -1 of a dense layer."""
        return self._firsts.get(layer, -1)

    def put(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        """The next launches find the expert there; the caller keeps it alive. Raises ValueError if it doesn't fit."""
        shape, experts = self._shape, self._shape.experts
        if experts is None or layer not in self._firsts or not 0 <= expert < experts.count:
            raise ValueError(f"there is no expert {expert} in layer {layer}")
        record = self.records[self._firsts[layer] + expert]
        for name, rows, cols in (
            ("gate_up", 2 * experts.intermediate, shape.hidden), ("down", shape.hidden, experts.intermediate),
        ):  # fmt: skip
            describe_checked(name, getattr(weights, name), rows, cols, record[name])
            bias: Floats | None = getattr(weights, f"{name}_bias")
            if (bias is not None) != experts.bias or (bias is not None and bias.shape != (padded(rows),)):
                raise ValueError(f"{name}_bias must be {padded(rows) if experts.bias else None}, got {bias!r:.80}")
            record[name]["bias"] = 0 if bias is None else bias.ctypes.data

    def keep(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        """The expert stays there."""
        self.put(layer, expert, weights)
        number = self._firsts[layer] + expert
        self._missing -= self._kept[number] is None
        self._kept[number] = weights

    def forget(self, layer: int, expert: int) -> None:
        """The expert has no place of its own any more."""
        number = self._firsts[layer] + expert
        self._missing += self._kept[number] is not None
        self._kept[number] = None

    def is_kept(self, number: int) -> bool:
        """Whether an expert, by its number among all, has a place of its own."""
        return self._kept[number] is not None

    @property
    def missing(self) -> int:
        """How many experts have no place of their own."""
        return self._missing

    @property
    def all_here(self) -> bool:
        """Whether every expert has a place of its own."""
        return not self._missing

    def has_all(self, layer: int) -> bool:
        """Whether every expert of a layer has a place of its own; so it is in a dense one."""
        first = self.first(layer)
        return first < 0 or not self._missing or None not in self._kept[first : first + self._count]


def describe_checked(name: str, matrix: PackedMatrix | None, rows: int, cols: int, record: np.void) -> None:
    """Fills a MATRIX record. Raises ValueError for a matrix of another shape, or none."""
    if matrix is None:
        raise ValueError(f"{name} is missing")
    if (matrix.rows, matrix.cols) != (rows, cols):
        raise ValueError(f"{name} must be {rows} x {cols}, got {matrix.rows} x {matrix.cols}")
    describe_matrix(matrix, record)


def check_rows(rows: Rows, count: int) -> None:
    """Raises ValueError unless there is a row of the gathered embedding for each of `count` tokens."""
    if rows.tokens.dtype != np.int32 or rows.tokens.shape != (count,) or not rows.tokens.flags.c_contiguous:
        raise ValueError(f"{count} tokens, but {rows.tokens.dtype} {rows.tokens.shape} rows of the embedding")
    there = int(rows.matrix[0]["panels"]) * PANEL_ROWS
    if count and int(rows.tokens.view(np.uint32).max()) >= there:
        raise ValueError(f"rows of the embedding must lie in 0..{there - 1}, got up to {rows.tokens.max()}")


def describe_panels(format: WeightFormat, num_panels: int, cols: int, addresses: Sequence[int]) -> NDArray[Any]:
    """A MATRIX [1] of panels whose sections lie apart, at these addresses, in the order of `panel_sections`."""
    rows = num_panels * PANEL_ROWS
    # The block is never touched: it only has the size that the description is checked against.
    whole = PackedMatrix(format, rows, cols, np.empty(packed_bytes(format, rows, cols), np.uint8))
    record = np.zeros(1, MATRIX)
    describe_matrix(whole, record[0])
    record["scales"] = record["minimums"] = addresses[0]  # those of absent sections are not read
    for (name, _, _), address in zip(panel_sections(format, rows, cols), addresses, strict=True):
        record[name] = address
    return record


def panel_sections(format: WeightFormat, rows: int, cols: int) -> list[tuple[str, int, int]]:
    """(name, offset, bytes of a panel) of each section of a packed matrix that has any bytes."""
    at, count = sections(format, rows, cols), panels(rows)
    found = [
        ("quants", 0, at.quants_bytes // count),
        ("scales", at.scales_offset, at.scales_bytes // count),
        ("minimums", at.minimums_offset, at.minimums_bytes // count),
    ]
    return [section for section in found if section[2]]


def padded(count: int) -> int:
    """Rounded up to whole panels."""
    return -(-count // PANEL_ROWS) * PANEL_ROWS


def padded_vector(name: str, vector: Floats, length: int) -> Floats:
    """A copy filled up with zeros to whole panels. Raises ValueError for another length."""
    if vector.shape != (length,):
        raise ValueError(f"{name} needs {length} values, got shape {vector.shape}")
    copy = np.zeros(padded(length), np.float32)
    copy[:length] = vector
    return copy


def _vector(placed: PlacedLayer, name: str, vector: Floats | None, length: int) -> int:
    """Address of the copy that `put` fills, 0 for None."""
    if vector is None:
        return 0
    copy = padded_vector(name, vector, length)
    placed.vectors.append((copy, vector))
    return copy.ctypes.data
