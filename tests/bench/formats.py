"""Weight and page formats of the default model: perplexity, decode and prefill speed, bytes.

    python tests/bench/formats.py [--windows 4] [--pages fp32,fp16,bf16]

Every matrix of the prepared model is unpacked to fp32 and packed again in the format of the row; `as imported` is the
model as `tierd pull` prepares it. Perplexity is that of the standard library's `pydoc_data.topics`, in windows of 1,024
tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tierd.daemon.engine.model.load import Weights, load_weights
from tierd.daemon.engine.model.rope import frequencies, tables
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.spec import ModelSpec
from tierd.kernels.cpu.step import CpuDecoder
from tierd.kernels.layout import PAGE_TOKENS, PageLayout
from tierd.kernels.packing import ROUNDED_FORMATS, PackedMatrix, WeightFormat, pack, unpack

REPOSITORY = Path(__file__).resolve().parents[2]
WINDOW_TOKENS = 1024
CHUNK_TOKENS = 256
Ints = NDArray[np.int32]


def repacked(weights: Weights, form: WeightFormat) -> Weights:
    """The same weights, every matrix in `form`."""

    def again(matrix: PackedMatrix) -> PackedMatrix:
        w = unpack(matrix.format, matrix.data, matrix.rows, matrix.cols)
        return PackedMatrix(form, matrix.rows, matrix.cols, pack(form, w))

    matrices = ("qkv", "o", "gate_up", "down")
    layers = [
        dataclasses.replace(layer, **{name: again(getattr(layer, name)) for name in matrices})
        for layer in weights.layers
    ]
    embed = again(weights.embed)
    head = embed if weights.head is weights.embed else again(weights.head)
    return dataclasses.replace(weights, layers=layers, embed=embed, head=head)


class Subject:
    """A decoder with one sequence's pages."""

    def __init__(self, weights: Weights, spec: ModelSpec, page_format: str, threads: int) -> None:
        layout = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, page_format)
        cos, sin = tables(frequencies(spec, spec.context), spec.context)
        count = WINDOW_TOKENS * 2 // PAGE_TOKENS
        self._arena = np.zeros((count, layout.record_bytes), np.uint8)
        self._pages = self._arena.ctypes.data + np.arange(count) * layout.record_bytes
        self.decoder = CpuDecoder(
            weights.shape, weights.layers, weights.embed, weights.final_norm, weights.head,
            layout, cos, sin, 512, threads,
        )

    def run(self, tokens: Ints, start: int, logits: bool = False) -> NDArray[np.float32]:
        rows = len(tokens)
        return self.decoder.forward(
            [self._arena], tokens, np.arange(start, start + rows, dtype=np.int32), np.zeros(rows, np.int32),
            self._pages, np.array([0, len(self._pages)], np.int32),
            np.arange(0 if logits else rows - 1, rows, dtype=np.int32),
        )

    def loss(self, tokens: Ints) -> float:
        """Sum of negative log-likelihoods of all tokens but the first."""
        total = 0.0
        for start in range(0, len(tokens), CHUNK_TOKENS):
            chunk = tokens[start : start + CHUNK_TOKENS]
            logits = self.run(chunk, start, logits=True).astype(np.float64)
            following = tokens[start + 1 : start + 1 + len(chunk)]
            logits = logits[: len(following)]
            peak = logits.max(axis=1)
            log_sum = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
            total += float((log_sum - logits[np.arange(len(following)), following]).sum())
        return total

    def decode_tokens_per_s(self, context: int, tokens: Ints, steps: int = 24) -> float:
        times = []
        for step in range(steps):
            begun = time.perf_counter()
            self.run(tokens[step : step + 1], context + step)
            times.append(time.perf_counter() - begun)
        return 1 / statistics.median(times)

    def prefill_tokens_per_s(self, tokens: Ints) -> float:
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            self.run(tokens, 0)
            times.append(time.perf_counter() - begun)
        return len(tokens) / statistics.median(times)


def subjects(weights: Weights, pages: list[str]) -> Iterator[tuple[str, str, Weights]]:
    for page_format in pages:
        yield "as imported", page_format, weights
    for form in ROUNDED_FORMATS:
        yield form.value, pages[0], repacked(weights, form)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    prepared = Path(os.environ.get("TIERD_TEST_MODELS", REPOSITORY / ".cache/test-models"))
    parser.add_argument("--model-dir", type=Path, default=prepared / "smollm2-135m")
    parser.add_argument("--windows", type=int, default=4, help="windows of 1,024 tokens")
    parser.add_argument("--pages", default="fp32,fp16,bf16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    manifest = load_manifest(options.model_dir)
    weights = load_weights(options.model_dir, manifest, lambda _done, _total: None)
    text = "\n".join(topics[name] for name in sorted(topics))
    tokenizer = Tokenizer.from_file(str(options.model_dir / "tokenizer.json"))
    tokens = np.array(tokenizer.encode(text[:200_000], add_special_tokens=False).ids, np.int32)
    print(f"{'weights':14}{'pages':8}{'MB':>8}{'perplexity':>12}{'decode/s':>10}{'at 1000':>10}{'prefill/s':>11}")
    for name, page_format, chosen in subjects(weights, options.pages.split(",")):
        subject = Subject(chosen, manifest.spec, page_format, options.threads)
        total = count = 0.0
        for window in range(options.windows):
            part = tokens[window * WINDOW_TOKENS : (window + 1) * WINDOW_TOKENS]
            total, count = total + subject.loss(part), count + len(part) - 1
        matrices = [getattr(layer, part) for layer in chosen.layers for part in ("qkv", "o", "gate_up", "down")]
        size = sum(matrix.data.nbytes for matrix in [*matrices, chosen.embed]) / 1e6
        perplexity = math.exp(total / count) if count else float("nan")
        print(
            f"{name:14}{page_format:8}{size:8.1f}{perplexity:12.4f}"
            f"{subject.decode_tokens_per_s(64, tokens):10.1f}{subject.decode_tokens_per_s(1000, tokens):10.1f}"
            f"{subject.prefill_tokens_per_s(tokens[:512]):11.1f}", flush=True,
        )
        subject.decoder.close()


if __name__ == "__main__":
    main()
