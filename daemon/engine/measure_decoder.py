"""Times passes of a real decoder, on a random model or on given weights, and takes them apart into `plan.rates`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from tierd.daemon.engine.model.load import Weights
from tierd.daemon.models.placement import MAX_SLOTS
from tierd.daemon.plan.rates import Compute
from tierd.kernels.cpu.step import CpuDecoder, DecoderShape, LayerWeights
from tierd.kernels.layout import PAGE_TOKENS, PageLayout
from tierd.kernels.packing import PackedMatrix, WeightFormat, packed_bytes, sections
from tierd.tiers.mover import Mover
from tierd.tiers.page import PageKey
from tierd.tiers.staging import Staging
from tierd.tiers.store import PageMeta, Store
from tierd.tiers.store_io import aligned_block
from tierd.tiers.weights_file import Span, WeightFile
from tierd.tiers.weights_read import Piece
from tierd.tiers.weights_ring import WeightRing

DECODE_ROWS = (1, 2, 4, 8, 16, 32)
PROMPT_ROWS = (64, 256)
CHUNK_ROWS = 256  # of a prompt, that attention over many rows is measured with
LONG_TOKENS = 2048  # that rows look at for it
STREAM_PAGES = 96
RANDOM_BYTES = 64 << 20  # of a random model's layers: larger than most caches
SECTION_WAIT_S = 30.0
PIECE_ALIGN_BYTES = 4096
_HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD_DIM, _VOCAB = 1024, 2816, 16, 4, 64, 16384

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rig:
    """A decoder with pages to run it on. `arena` [pages, record_bytes]: every page of it holds numbers."""

    decoder: CpuDecoder
    shape: DecoderShape
    layout: PageLayout
    arena: npt.NDArray[np.uint8]
    format: str

    @property
    def layer_elements(self) -> int:
        """Matrix elements of all layers."""
        shape = self.shape
        attended = shape.heads * shape.head_dim
        return shape.num_layers * shape.hidden * (shape.qkv_rows + attended + 3 * shape.intermediate)

    @property
    def layer_bytes(self) -> int:
        """Bytes of the matrices of all layers."""
        shape, kind = self.shape, WeightFormat(self.format)
        attended = shape.heads * shape.head_dim
        sizes = ((shape.qkv_rows, shape.hidden), (shape.hidden, attended), (2 * shape.intermediate, shape.hidden),
                 (shape.hidden, shape.intermediate))  # fmt: skip
        return shape.num_layers * sum(packed_bytes(kind, *size) for size in sizes)

    @property
    def attended_elements(self) -> int:
        """What one row computes with for one token: layers x heads x head_dim."""
        return self.shape.num_layers * self.shape.heads * self.shape.head_dim

    def run(self, positions: Ints, row_seq: Ints, pages: list[int], offsets: list[int], logits: int) -> float:
        """Seconds of a pass; the last `logits` rows give logits."""
        rows = len(positions)
        tokens = np.arange(rows, dtype=np.int32) % self.shape.vocab
        addresses = self.arena.ctypes.data + np.array(pages, np.int64) * self.layout.record_bytes
        wanted = np.arange(rows - logits, rows, dtype=np.int32)
        start_s = time.perf_counter()
        self.decoder.forward(
            [self.arena], tokens, positions, row_seq, addresses, np.array(offsets, np.int32), wanted
        )
        return time.perf_counter() - start_s

    def many_sequences(self, rows: int) -> float:
        """A pass over rows of sequences of their own that look at next to nothing: the matrices of the layers alone.

        Sixteen of them share a page and write different tokens of it, so that no memory is needed for hundreds.
        """
        positions = np.arange(rows, dtype=np.int32) % PAGE_TOKENS
        pages = [row // PAGE_TOKENS for row in range(rows)]
        return self.run(positions, np.arange(rows, dtype=np.int32), pages, list(range(rows + 1)), 0)

    def head(self, rows: int) -> float:
        """The logits of so many rows."""
        zeros = np.zeros(rows, np.int32)
        numbers, offsets = np.arange(rows, dtype=np.int32), np.arange(rows + 1, dtype=np.int32)
        self.decoder.start(zeros, zeros, numbers, offsets, numbers)
        pages = np.full(rows, self.arena.ctypes.data, np.int64)
        for layer in range(self.shape.num_layers):
            self.decoder.layer(layer, [self.arena], pages)
        start_s = time.perf_counter()
        self.decoder.finish()
        return time.perf_counter() - start_s

    def one_sequence(self, first: int, rows: int) -> float:
        """A pass over rows that follow each other in one sequence, from position `first` on, without logits."""
        count = -(-(first + rows) // PAGE_TOKENS)
        positions = np.arange(first, first + rows, dtype=np.int32)
        return self.run(positions, np.zeros(rows, np.int32), list(range(count)), [0, count], 0)


@contextlib.contextmanager
def rig(weights: Weights, format: str, threads: int, kv_format: str) -> Iterator[Rig]:
    """A rig of these weights."""
    shape = weights.shape
    layout = PageLayout(shape.num_layers, shape.kv_heads, shape.head_dim, kv_format)
    arena = np.zeros((LONG_TOKENS // PAGE_TOKENS, layout.record_bytes), np.uint8)
    arena[:] = 0x3C  # small numbers in every format, and memory that is really there: zeroed memory is one page
    table = np.ones((LONG_TOKENS, shape.head_dim // 2), np.float32)
    decoder = CpuDecoder(
        shape, weights.layers, weights.embed, weights.final_norm, weights.head, layout, table, table,
        max(PROMPT_ROWS), threads,
    )  # fmt: skip
    with decoder:
        yield Rig(decoder, shape, layout, arena, format)


@contextlib.contextmanager
def random_rig(format: str, threads: int, kv_format: str) -> Iterator[Rig]:
    """A rig of a random model in a weight format, of as many layers as fill `RANDOM_BYTES`."""
    kind = WeightFormat(format)
    fused = (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM
    sizes = ((fused, _HIDDEN), (_HIDDEN, _HEADS * _HEAD_DIM), (2 * _INNER, _HIDDEN), (_HIDDEN, _INNER))
    num_layers = -(-RANDOM_BYTES // sum(packed_bytes(kind, *size) for size in sizes))
    norm = np.ones(_HIDDEN, np.float32)
    layers = [
        LayerWeights(norm, qkv, o, norm, gate_up, down)
        for qkv, o, gate_up, down in ([_random(kind, *size) for size in sizes] for _ in range(num_layers))
    ]
    shape = DecoderShape(
        num_layers, _HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD_DIM, _VOCAB, 1e-5, False, (0,) * num_layers
    )
    table = _random(kind, _VOCAB, _HIDDEN)
    with rig(Weights(shape, layers, table, norm, table), format, threads, kv_format) as made:
        yield made


def _random(kind: WeightFormat, rows: int, cols: int) -> PackedMatrix:
    """A packed matrix of small numbers: what they are has no influence on the time, as long as none is denormal."""
    at = sections(kind, rows, cols)
    data = np.zeros(at.total_bytes, np.uint8)
    quants = data[: at.quants_bytes]
    if kind is WeightFormat.FP32:
        quants.view(np.float32)[:] = 0.01
    elif kind is WeightFormat.BF16:
        quants.view(np.uint16)[:] = 0x3C24  # 0.01
    else:
        quants[:] = np.resize(np.random.default_rng(0).integers(0, 120, 4096, dtype=np.uint8), quants.shape)
    scales = data[at.scales_offset : at.scales_offset + at.scales_bytes]
    if at.scales_bytes:
        scales.view(np.float32 if kind is WeightFormat.INT8 else np.float16)[:] = 1e-3
    return PackedMatrix(kind, rows, cols, data)


def compute_rates(rig: Rig, rounds: int) -> Compute:
    """The rates of a rig. In each round every pass has its turn; the median of the rounds counts, and in a round the
    fastest of three passes, for another process that takes a core is no property of the machine."""
    seconds: dict[tuple[str, int], list[float]] = {}

    def note(name: str, number: int, call: Callable[[], float]) -> None:
        repeats = 3 if number <= PROMPT_ROWS[0] else 1
        seconds.setdefault((name, number), []).append(min(call() for _ in range(repeats)))

    rows_measured = DECODE_ROWS + PROMPT_ROWS
    rig.many_sequences(1)
    for _ in range(rounds):
        for rows in rows_measured:
            note("layers", rows, partial(rig.many_sequences, rows))
        for rows in DECODE_ROWS:
            note("head", rows, partial(rig.head, rows))
    median = {key: statistics.median(found) for key, found in seconds.items()}
    elements, head = rig.layer_elements, rig.shape.vocab * rig.shape.hidden
    layers = {rows: median["layers", rows] for rows in rows_measured}
    heads = {rows: median["head", rows] for rows in DECODE_ROWS}
    beyond = heads[DECODE_ROWS[-1]] / DECODE_ROWS[-1]  # nobody asks for many more logits than there are streams
    alone_s, many_s = attention_rates(rig, rounds)
    return Compute(
        format=rig.format,
        rows=rows_measured,
        layer_s=tuple(layers[rows] / elements for rows in rows_measured),
        head_s=tuple(heads.get(rows, beyond * rows) / head for rows in rows_measured),
        attend_s={rig.layout.format: alone_s},
        attend_many_s={rig.layout.format: many_s},
    )


def attention_rates(rig: Rig, rounds: int) -> tuple[float, float]:
    """Seconds of one row, layer, token, head and element of a head: of a row alone, and of many of one prompt."""
    long, short, chunk, first = [], [], [], []
    for _ in range(rounds):
        long.append(min(rig.one_sequence(LONG_TOKENS - 1, 1) for _ in range(3)))
        short.append(min(rig.one_sequence(0, 1) for _ in range(3)))
        chunk.append(rig.one_sequence(LONG_TOKENS - CHUNK_ROWS, CHUNK_ROWS))
        first.append(rig.one_sequence(0, CHUNK_ROWS))
    # Both passes of a pair have the same matrices, so the difference is what the tokens before cost.
    alone_s = max(statistics.median(long) - statistics.median(short), 1e-6) / (LONG_TOKENS - 1)
    further = CHUNK_ROWS * (LONG_TOKENS - CHUNK_ROWS)
    many_s = max(statistics.median(chunk) - statistics.median(first), 1e-6) / further
    return alone_s / rig.attended_elements, many_s / rig.attended_elements


def page_rates(rig: Rig, directory: Path, rounds: int) -> tuple[float, float]:
    """Bytes per second of pages that pass the ring, and what a byte of them costs a step that computes meanwhile."""
    layout = rig.layout
    keys = [PageKey(hashlib.blake2b(b"measure %d" % page, digest_size=16).digest()) for page in range(STREAM_PAGES)]
    store = Store.open(
        directory, record_bytes=layout.record_bytes, namespace=b"measure".ljust(16), sections=layout.num_layers,
        section_bytes=layout.layer_bytes, capacity_bytes=(STREAM_PAGES + 8) * (layout.record_bytes + 8192),
    )  # fmt: skip
    with store, contextlib.closing(Mover(wake=lambda: None)) as mover:
        record = aligned_block(layout.record_bytes)
        record[:] = 0x3C
        store.write([
            (PageMeta(key, keys[max(page - 1, 0)], tuple(range(PAGE_TOKENS)), page, 0.0), record)
            for page, key in enumerate(keys)
        ])  # fmt: skip
        staging = Staging(store, mover, layout.num_layers, layout.layer_bytes)
        alone, past, computed = [], [], []
        for _ in range(rounds + 1):
            alone.append(_streamed(rig, staging, keys, compute=False))
            past.append(_streamed(rig, staging, keys, compute=True))
            computed.append(rig.one_sequence(STREAM_PAGES * PAGE_TOKENS - 1, 1))
        staging.release()
    passed = STREAM_PAGES * layout.num_layers * layout.layer_bytes
    return _apart(passed, alone, past, computed)


def weight_rates(path: Path, rig: Rig, rounds: int) -> tuple[float, float]:
    """The same for records of weights, each as large as a layer of the rig, while its layers compute."""
    num_layers = rig.shape.num_layers
    size = max(rig.layer_bytes // num_layers // PIECE_ALIGN_BYTES, 1) * PIECE_ALIGN_BYTES
    block = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    digest = xxhash.xxh3_128_hexdigest(block.data)
    with path.open("wb") as written:
        for _ in range(num_layers):
            written.write(block.data)
        written.flush()
        os.fsync(written.fileno())
    pieces = [Piece(f"layer.{n}", (Span(n * size, size),), (digest,)) for n in range(num_layers)]
    with contextlib.closing(Mover(wake=lambda: None)) as mover, contextlib.closing(WeightFile(path)) as file:
        ring = WeightRing(file, mover, pieces, MAX_SLOTS)
        alone, past, computed = [], [], []
        for _ in range(rounds + 1):
            alone.append(_layers(rig, ring, compute=False))
            past.append(_layers(rig, ring, compute=True))
            computed.append(_layers(rig, None, compute=True))
        ring.close()
    return _apart(size * num_layers, alone, past, computed)


def _apart(passed: int, alone: list[float], past: list[float], computed: list[float]) -> tuple[float, float]:
    """Bytes per second and seconds per byte, from passes that only read, that do both, and that only compute.

    The fastest of each: their difference is small, and what other processes do to one of them would be all of it.
    """
    alone_s, past_s, compute_s = min(alone), min(past), min(computed)
    return passed / alone_s, max(past_s - compute_s, 0.0) / passed


def _layers(rig: Rig, ring: WeightRing | None, *, compute: bool) -> float:
    """Seconds of one row through all layers, of taking all pieces out of the ring, or of both."""
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    pages = np.array([rig.arena.ctypes.data], np.int64)
    start_s = time.perf_counter()
    if ring is not None:
        ring.begin(range(rig.shape.num_layers))
    if compute:
        rig.decoder.start(one, zero, zero, np.array([0, 1], np.int32), zero)
    for layer in range(rig.shape.num_layers):
        if ring is not None:
            ring.take(layer, time.monotonic() + SECTION_WAIT_S)
        if compute:
            rig.decoder.layer(layer, [rig.arena], pages)
    if compute:
        rig.decoder.finish()
    return time.perf_counter() - start_s


def _streamed(rig: Rig, staging: Staging, keys: list[PageKey], *, compute: bool) -> float:
    """Seconds of one decode step whose pages are all read past it, or of the reads alone."""
    count = len(keys)
    tokens = np.ones(1, np.int32)
    places = np.array([count * PAGE_TOKENS - 1], np.int32)
    zero, offsets = np.zeros(1, np.int32), np.array([0, count], np.int32)
    start_s = time.perf_counter()
    if compute:
        rig.decoder.start(tokens, places, zero, offsets, zero)
    with staging.open(keys) as flow:
        memories = [rig.arena, *flow.memories]
        for layer in range(rig.layout.num_layers):
            slices = flow.section(layer, time.monotonic() + SECTION_WAIT_S)
            if compute:
                rig.decoder.layer(layer, memories, slices - layer * rig.layout.layer_bytes)
    if compute:
        rig.decoder.finish()
    return time.perf_counter() - start_s
