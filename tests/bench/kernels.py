"""Speed of the CPU kernels beside a measured roofline, and of a whole decoder of SmolLM2-135M's shape.

    python -m tests.bench.kernels [--threads N] [--quick] [--only products|formats|ladders|FORMAT]

Weights are random: the figures depend on shapes and formats only. Each figure is the median of its repetitions; on a
machine that does other work, look at the smallest of several runs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
from numba import njit
from numpy.typing import NDArray

from tierd.daemon.engine.ladder import Ladders, Rungs
from tierd.kernels.cpu.matmul import MATRIX, NO_RESIDUAL, TILE_BYTES, describe_matrix, matmul, takes_integers
from tierd.kernels.cpu.quantize import quantize_row, quantized_row_bytes
from tierd.kernels.cpu.step import CpuDecoder, DecoderShape, LayerWeights
from tierd.kernels.cpu.team import PHASE_BYTES, PHASE_WORDS
from tierd.kernels.layout import PAGE_FORMATS, PageLayout
from tierd.kernels.packing import PackedMatrix, WeightFormat, pack
from tierd.kernels.rows import COPY_FORMAT, Exact, Ladder
from tierd.tiers.arena import Arena
from tierd.tiers.exact import ExactPages
from tierd.tiers.keys import root_key
from tierd.tiers.lease import Lease

SMOLLM2_135M = DecoderShape(
    num_layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152, norm_eps=1e-5,
    qk_norm=False, windows=(0,) * 30,
)  # fmt: skip
CONTEXT = 2304
LONG_CONTEXT = 4096
LADDER = Ladder(32, 128)


def median_s(run: Callable[[], object], repetitions: int) -> float:
    """Median seconds of a call, after one that warms up."""
    run()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@njit(parallel=True, nogil=True, fastmath=True)
def _read_all(a: NDArray[np.float32]) -> float:
    total = np.float32(0)
    for i in numba.prange(a.size):
        total += a[i]
    return total


def roofline() -> tuple[float, float]:
    """Bytes and float operations a second that this machine reaches: a sum over 256 MB, and numpy's sgemm."""
    big = np.ones(64 * 2**20, np.float32)
    bytes_per_s = big.nbytes / median_s(lambda: _read_all(big), 5)
    a = np.ones((1024, 1024), np.float32)
    flops = 2 * 1024**3 / median_s(lambda: a @ a, 9)
    return bytes_per_s, flops


def random_matrix(rng: np.random.Generator, format: WeightFormat, rows: int, cols: int) -> PackedMatrix:
    w = (rng.standard_normal((rows, cols), np.float32) / np.float32(np.sqrt(cols))).astype(np.float32)
    return PackedMatrix(format, rows, cols, pack(format, w))


def synthetic_decoder(page_format: str, threads: int, max_rows: int) -> CpuDecoder:
    """SmolLM2-135M in shape: int4-g32 layers, a tied int8-g32 embedding. Every layer has weights of its own."""
    rng, shape = np.random.default_rng(0), SMOLLM2_135M
    one = LayerWeights(
        attn_norm=np.ones(shape.hidden, np.float32),
        qkv=random_matrix(rng, WeightFormat.INT4_G32, shape.qkv_rows, shape.hidden),
        o=random_matrix(rng, WeightFormat.INT4_G32, shape.hidden, shape.heads * shape.head_dim),
        mlp_norm=np.ones(shape.hidden, np.float32),
        gate_up=random_matrix(rng, WeightFormat.INT4_G32, 2 * shape.intermediate, shape.hidden),
        down=random_matrix(rng, WeightFormat.INT4_G32, shape.hidden, shape.intermediate),
    )

    def copied(matrix: PackedMatrix) -> PackedMatrix:
        return PackedMatrix(matrix.format, matrix.rows, matrix.cols, matrix.data.copy())

    layers = [
        LayerWeights(
            one.attn_norm, copied(one.qkv), copied(one.o), one.mlp_norm, copied(one.gate_up), copied(one.down)
        )
        for _ in range(shape.num_layers)
    ]
    embed = random_matrix(rng, WeightFormat.INT8_G32, shape.vocab, shape.hidden)
    angles = np.outer(np.arange(LONG_CONTEXT), 10000.0 ** (-np.arange(32) / 32))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    layout = PageLayout(shape.num_layers, shape.kv_heads, shape.head_dim, page_format)
    return CpuDecoder(shape, layers, embed, one.attn_norm, embed, layout, cos, sin, max_rows, threads)


def inputs(arena: NDArray[np.uint8], sequences: int, first: int, stop: int) -> dict[str, Any]:
    """Rows first..stop of each sequence, its pages being neighbours in the arena; logits of the last row of each."""
    pages, count = -(-stop // 16), stop - first
    columns = {
        "tokens": np.arange(sequences * count) % 1000,
        "positions": np.tile(np.arange(first, stop), sequences),
        "row_seq": np.repeat(np.arange(sequences), count),
        "page_offsets": np.arange(sequences + 1) * pages,
        "logit_rows": np.arange(1, sequences + 1) * count - 1,
    }
    return {
        "memories": [arena],
        "pages": arena.ctypes.data + np.arange(sequences * pages) * arena.shape[1],
        **{name: values.astype(np.int32) for name, values in columns.items()},
    }


def bench_decode(decoder: CpuDecoder, arena: NDArray[np.uint8], repetitions: int) -> None:
    for sequences, context in ((1, 64), (1, 2000), (8, 64), (8, 2000)):
        batch = inputs(arena, sequences, context - 1, context)
        seconds = median_s(lambda batch=batch: decoder.forward(**batch), repetitions)
        print(
            f"  decode   batch {sequences}, context {context:4}: {1e3 * seconds:7.2f} ms,"
            f" {sequences / seconds:6.1f} tokens/s"
        )


def bench_prefill(decoder: CpuDecoder, arena: NDArray[np.uint8], repetitions: int) -> None:
    for tokens, chunk in ((512, 512), (512, 256), (2048, 512), (2048, 256)):
        batches = [inputs(arena, 1, first, first + chunk) for first in range(0, tokens, chunk)]

        def run(batches: list[dict[str, Any]] = batches) -> None:
            for batch in batches:
                decoder.forward(**batch)

        seconds = median_s(run, repetitions)
        print(f"  prefill  {tokens:4} in chunks of {chunk}: {1e3 * seconds:7.0f} ms, {tokens / seconds:6.1f} tokens/s")


@njit(nogil=True, cache=True)
def _repeat(m, x, x_stride, y, y_stride, rows, phases, count, threads, tile):
    for i in range(count):
        matmul(
            m, x, x_stride, y, y_stride, NO_RESIDUAL, NO_RESIDUAL, rows, phases + i * PHASE_BYTES, threads, tile
        )


def product_s(matrix: PackedMatrix, rows: int, threads: int, count: int) -> float:
    """Seconds of one product of `rows` rows with the matrix: the best of five runs of `count` in a row."""
    record = np.zeros((), MATRIX)[()]
    describe_matrix(matrix, record)
    x, y = np.ones((rows, matrix.cols), np.float32), np.zeros((rows, int(record["panels"]) * 16), np.float32)
    tiles = np.zeros((threads, TILE_BYTES), np.uint8)
    source: NDArray[Any] = x
    if takes_integers(record):
        source = np.zeros((rows, quantized_row_bytes(matrix.cols)), np.uint8)
        for row in range(rows):
            quantize_row(x[row:].ctypes.data, matrix.cols, 0, matrix.cols, source[row:].ctypes.data)

    def run() -> float:
        phases = np.zeros(count * PHASE_WORDS, np.int64)

        def work(thread: int) -> None:
            _repeat(
                record, source.ctypes.data, source.strides[0], y.ctypes.data, y.strides[0], rows, phases.ctypes.data,
                count, threads, tiles[thread].ctypes.data,
            )  # fmt: skip

        team = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
        start = time.perf_counter()
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
        return (time.perf_counter() - start) / count

    return min(run() for _ in range(5))


def bench_products(threads: int, roof: tuple[float, float]) -> None:
    """Matrix products of the decoder's shapes, 1 row and 512 rows. (The head is read from memory, the rest from the
    caches.)"""
    rng = np.random.default_rng(0)
    for format in (WeightFormat.INT4_G32, WeightFormat.INT5_G32, WeightFormat.INT8_G32):
        for rows, cols in ((960, 576), (3072, 576), (576, 1536), (49152, 576)):
            matrix = random_matrix(rng, format, rows, cols)
            decode_s = product_s(matrix, 1, threads, 500 if rows < 10000 else 20)
            rate = matrix.data.nbytes / decode_s
            text = (
                f"  {format:8} {rows:5} x {cols:4}: 1 row {1e6 * decode_s:6.0f} us,"
                f" {rows * cols / decode_s / 1e9:5.1f} Gweights/s, {rate / 1e9:5.1f} GB/s ({rate / roof[0]:4.0%})"
            )
            if rows < 10000:
                flops = 2 * 512 * rows * cols / product_s(matrix, 512, threads, 4)
                text += f"; 512 rows {flops / 1e9:5.0f} GFLOP/s ({flops / roof[1]:4.0%} of sgemm)"
            print(text)


def bench_formats(threads: int, rounds: int) -> None:
    """A decode step over a long context in every page format, in turn: median, and median quotient of a round."""
    with contextlib.ExitStack() as stack:
        steps: dict[str, Callable[[], object]] = {}
        for page_format in PAGE_FORMATS:
            decoder = stack.enter_context(synthetic_decoder(page_format, threads, 8))
            arena = np.full((LONG_CONTEXT // 16, decoder.layout.record_bytes), 0x3C, np.uint8)
            steps[page_format] = partial(decoder.forward, **inputs(arena, 1, LONG_CONTEXT - 1, LONG_CONTEXT))
            steps[page_format]()
        found: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                found[name].append(median_s(step, 3))
    print(f"a decode step at {LONG_CONTEXT} tokens, {threads} threads, {rounds} rounds")
    for name, seconds in found.items():
        quotient = statistics.median(a / b for a, b in zip(seconds, found["fp32"], strict=True))
        print(f"  {name}: {1e3 * statistics.median(seconds):6.2f} ms, {quotient:.2f} of fp32")


class LadderStep:
    """A decode step at `tokens` tokens as the engine does it under a ladder: with its books, and its tables."""

    def __init__(self, decoder: CpuDecoder, arena: NDArray[np.uint8], tokens: int) -> None:
        layout, ladder = decoder.layout, LADDER
        record = dataclasses.replace(layout, format=COPY_FORMAT).record_bytes
        copies = Arena("exact", (ladder.first + ladder.last) // 16 + 3, record)
        copies.array[:] = 0x3C
        self._ladders = Ladders(ExactPages(copies), ladder, 0, 16)
        self._rungs, self._lease, self._start = Rungs.of(ladder, tokens), Lease(root_key("bench"), 16), tokens - 1
        for first, stop in ((0, ladder.first), (ladder.block(tokens - 1), tokens)):
            self._ladders.cover(self._rungs, first, stop)
        self._decoder, self._memory = decoder, copies.array
        self._batch = inputs(arena, 1, tokens - 1, tokens)

    def books(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Pages, and copies of them."""
        self._ladders.prepare(self._rungs, self._lease, self._start)
        self._ladders.cover(self._rungs, self._start, self._start + 1)
        return self._ladders.table(self._rungs, self._batch["pages"], self._start, self._start // 16)

    def __call__(self) -> object:
        _, exact = self.books()
        return self._decoder.forward(**self._batch, exact=Exact(exact, self._memory))


def bench_ladders(threads: int, rounds: int) -> None:
    """Decode steps with exact copies beside packed pages and without, in turn: medians and their quotient."""
    print(f"decode steps, exact {LADDER.first} and {LADDER.last} beside packed pages, {threads} threads")
    for page_format in ("k8v4", "k4v4"):
        with synthetic_decoder(page_format, threads, 8) as decoder:
            arena = np.full((LONG_CONTEXT // 16, decoder.layout.record_bytes), 0x3C, np.uint8)
            for tokens in (1024, LONG_CONTEXT):
                with_copies = LadderStep(decoder, arena, tokens)
                steps = partial(decoder.forward, **inputs(arena, 1, tokens - 1, tokens)), with_copies
                found: tuple[list[float], list[float]] = [], []
                for step in steps:
                    step()
                for number in range(2 * rounds):
                    for which in (0, 1) if number % 2 else (1, 0):
                        start = time.perf_counter()
                        steps[which]()
                        found[which].append(time.perf_counter() - start)
                plain, ladder = (statistics.median(seconds) for seconds in found)
                books = median_s(with_copies.books, rounds)
                print(
                    f"  {page_format} at {tokens:4} tokens: {1e3 * plain:6.2f} ms without, {1e3 * ladder:6.2f} with:"
                    f" {ladder / plain:.3f}; books and tables {1e6 * books:.0f} us"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=numba.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", choices=("products", "formats", "ladders", *PAGE_FORMATS), help="one part")
    arguments = parser.parse_args()
    repetitions = 3 if arguments.quick else 9
    start = time.perf_counter()
    CpuDecoder.warm_up(lambda done, total: None)
    print(f"kernels ready in {time.perf_counter() - start:.1f} s (compiled, or loaded from Numba's cache)")
    if arguments.only in (None, "products"):
        roof = roofline()
        print(f"roofline: {roof[0] / 1e9:.1f} GB/s read, {roof[1] / 1e9:.0f} GFLOP/s sgemm (numpy)")
        bench_products(arguments.threads, roof)
    if arguments.only in (None, "formats"):
        bench_formats(arguments.threads, repetitions)
    if arguments.only in (None, "ladders"):
        bench_ladders(arguments.threads, 20 * repetitions)
    for page_format in PAGE_FORMATS:
        if arguments.only == page_format or (arguments.only is None and page_format in ("fp32", "fp16", "k8v4")):
            with synthetic_decoder(page_format, arguments.threads, 512) as decoder:
                # Small numbers in every page format stand for the context that a decode step sees. Not zeros: memory
                # that nobody has written is one page of the kernel's, over and over, and comes from the cache.
                arena = np.full((8 * CONTEXT // 16, decoder.layout.record_bytes), 0x3C, np.uint8)
                print(f"pages {page_format}, {arguments.threads} threads")
                bench_decode(decoder, arena, 3 * repetitions)
                bench_prefill(decoder, arena, repetitions)


if __name__ == "__main__":
    main()
