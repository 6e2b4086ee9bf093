"""Tiny random decoders and batches for the tests of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierd.kernels.cpu.step import Angles, CpuDecoder
from tierd.kernels.cpu.weights import DecoderShape, ExpertsShape, ExpertWeights, LayerWeights, padded_vector
from tierd.kernels.layout import PageLayout
from tierd.kernels.packing import ROUNDED_FORMATS, KQuants, PackedMatrix, WeightFormat, pack, pack_k

if TYPE_CHECKING:
    from tierd.kernels.gpu.decoder import GpuDecoder

CONTEXT = 160


@dataclass(frozen=True)
class TinyModel:
    """Everything that `CpuDecoder` and the reference take."""

    shape: DecoderShape
    layers: list[LayerWeights]
    embed: PackedMatrix
    final_norm: NDArray[np.float32]
    head: PackedMatrix
    layout: PageLayout
    cos: NDArray[np.float32]
    sin: NDArray[np.float32]

    def decoder(self, max_rows: int = 64, threads: int = 2, far: Angles | None = None) -> CpuDecoder:
        return CpuDecoder(
            self.shape, self.layers, self.embed, self.final_norm, self.head, self.layout, self.cos, self.sin,
            max_rows, threads, far,
        )  # fmt: skip

    def arena(self, slots: int, fill: int = 0xFF) -> NDArray[np.uint8]:
        """An arena of stale memory: bytes of 0xFF are NaN in every page format."""
        return np.full((slots, self.layout.record_bytes), fill, np.uint8)


def random_k_quants(rng: np.random.Generator, format: WeightFormat, rows: int, cols: int) -> KQuants:
    """Weights of about 1 / sqrt(cols), every integer and count within its range."""
    bits = {WeightFormat.INT4_K: 4, WeightFormat.INT5_K: 5, WeightFormat.INT8_K: 8}[format]
    parts, signed = (16, True) if format is WeightFormat.INT8_K else (8, False)
    q = rng.integers(-(1 << bits - 1) if signed else 0, 1 << (bits - 1 if signed else bits), (rows, cols))
    counts = rng.integers(-128 if signed else 0, 128 if signed else 64, (rows, cols // 256 * parts))
    size = rng.uniform(0.5, 1, (rows, cols // 256)) / np.sqrt(cols)
    return KQuants(
        q.astype(np.int8 if signed else np.uint8), (size / np.abs(counts).max() / (1 << bits - 1)).astype(np.float16),
        counts.astype(np.int8), (-size / 63).astype(np.float16), rng.integers(0, 64, counts.shape).astype(np.uint8),
    )  # fmt: skip


def random_matrix(rng: np.random.Generator, format: WeightFormat, rows: int, cols: int) -> PackedMatrix:
    if format not in ROUNDED_FORMATS:
        return PackedMatrix(format, rows, cols, pack_k(format, random_k_quants(rng, format, rows, cols)))
    w = (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)
    return PackedMatrix(format, rows, cols, pack(format, w))


def tiny_model(
    *,
    seed: int = 0,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 32,
    hidden: int = 96,
    intermediate: int = 160,
    vocab: int = 100,
    windows: tuple[int, ...] = (0, 0),
    biases: bool = False,
    qk_norm: bool = False,
    tied: bool = True,
    format: WeightFormat = WeightFormat.FP32,
    embed_format: WeightFormat = WeightFormat.FP32,
    page_format: str = "fp32",
    context: int = CONTEXT,
    experts: ExpertsShape | None = None,
    sink_logits: bool = False,
) -> TinyModel:
    rng = np.random.default_rng(seed)

    def vector(length: int, mean: float) -> NDArray[np.float32]:
        return (mean + 0.1 * rng.standard_normal(length)).astype(np.float32)

    def expert() -> ExpertWeights:
        assert experts is not None
        width = 2 * experts.intermediate
        return ExpertWeights(
            random_matrix(rng, format, width, hidden),
            random_matrix(rng, format, hidden, experts.intermediate),
            padded_vector("bias", 3 * vector(width, 0), width) if experts.bias else None,
            padded_vector("bias", 3 * vector(hidden, 0), hidden) if experts.bias else None,
        )

    def mixture(layer: LayerWeights) -> LayerWeights:
        """The layer with experts instead of its MLP."""
        assert experts is not None
        router = random_matrix(rng, WeightFormat.FP32, experts.count, hidden)
        return replace(
            layer, gate_up=None, down=None, gate_up_bias=None, down_bias=None, router=router,
            router_bias=5 * vector(experts.count, 0) if experts.bias else None,
            experts=tuple(expert() for _ in range(experts.count)),
        )  # fmt: skip

    qkv_rows = (heads + 2 * kv_heads) * head_dim
    layers = [
        LayerWeights(
            attn_norm=vector(hidden, 1),
            qkv=random_matrix(rng, format, qkv_rows, hidden),
            o=random_matrix(rng, format, hidden, heads * head_dim),
            mlp_norm=vector(hidden, 1),
            gate_up=random_matrix(rng, format, 2 * intermediate, hidden),
            down=random_matrix(rng, format, hidden, intermediate),
            qkv_bias=vector(qkv_rows, 0) if biases else None,
            q_norm=vector(head_dim, 1) if qk_norm else None,
            k_norm=vector(head_dim, 1) if qk_norm else None,
            o_bias=vector(hidden, 0) if biases else None,
            gate_up_bias=vector(2 * intermediate, 0) if biases else None,
            down_bias=vector(hidden, 0) if biases else None,
            sink_logits=10 * vector(heads, 0) if sink_logits else None,
        )
        for _ in windows
    ]
    if experts is not None:
        layers = [mixture(layer) if n in experts.layers else layer for n, layer in enumerate(layers)]
    embed = random_matrix(rng, embed_format, vocab, hidden)
    head = embed if tied else random_matrix(rng, embed_format, vocab, hidden)
    angles = np.outer(np.arange(context), 10000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2)))
    return TinyModel(
        DecoderShape(
            len(windows), hidden, intermediate, heads, kv_heads, head_dim, vocab, 1e-5, qk_norm, windows, experts
        ),
        layers,
        embed,
        vector(hidden, 1),
        head,
        PageLayout(len(windows), kv_heads, head_dim, page_format),
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
    )  # fmt: skip


@dataclass(frozen=True)
class Sequence:
    """Tokens of one sequence and the slots of its pages."""

    tokens: list[int]
    slots: list[int]


Inputs = dict[str, NDArray[np.int32]]


def batch(sequences: list[Sequence], spans: list[tuple[int, int]], every_row: bool = True) -> Inputs:
    """Inputs of `forward` (the reference's and the one below) for the tokens first..stop of each sequence.

    An empty span leaves a sequence out.
    """
    rows = [(s, i) for s, (first, stop) in enumerate(spans) for i in range(first, stop)]
    last = [r for r, (s, i) in enumerate(rows) if i == spans[s][1] - 1]
    columns = {
        "tokens": [sequences[s].tokens[i] for s, i in rows],
        "positions": [i for _, i in rows],
        "row_seq": [s for s, _ in rows],
        "page_table": [slot for sequence in sequences for slot in sequence.slots],
        "page_offsets": np.cumsum([0] + [len(sequence.slots) for sequence in sequences]),
        "logit_rows": range(len(rows)) if every_row else last,
    }
    return {name: np.array(values, np.int32) for name, values in columns.items()}


def addresses(arena: NDArray[np.uint8], slots: NDArray[np.integer]) -> NDArray[np.int64]:
    """Where the records in these slots of an arena start."""
    return arena.ctypes.data + np.asarray(slots, np.int64) * arena.strides[0]


def forward(
    decoder: CpuDecoder | GpuDecoder, arena: NDArray[np.uint8], inputs: Inputs,
    between: Callable[[], None] | None = None,
) -> NDArray[np.float32]:  # fmt: skip
    """`forward` of a decoder with all pages in one arena."""
    rest = {name: array for name, array in inputs.items() if name != "page_table"}
    return decoder.forward([arena], pages=addresses(arena, inputs["page_table"]), **rest, between=between)


def random_sequences(rng: np.random.Generator, lengths: list[int], vocab: int) -> tuple[list[Sequence], int]:
    """Sequences of these lengths over shuffled slots, and how many slots there are (a few stay unused)."""
    needed = [-(-length // 16) for length in lengths]
    slots = rng.permutation(sum(needed) + 3).tolist()
    sequences = []
    for length, pages in zip(lengths, needed, strict=True):
        sequences.append(Sequence(rng.integers(0, vocab, length).tolist(), [slots.pop() for _ in range(pages)]))
    return sequences, sum(needed) + 3
