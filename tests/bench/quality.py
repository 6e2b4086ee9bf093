"""What page formats cost in quality: perplexity and KL divergence to exact pages, with and without a precision ladder.

    python -m tests.bench.quality [--model-dir DIR] [--context 1024] [--windows 2] [--formats fp16,k8v8,k8v4]
        [--ladders k8v4,k4v4 --exact-first 4 --exact-last 128] [--json FILE]

Text is the standard library's `pydoc_data.topics`, in windows of `--context` tokens with nothing before them. All
formats walk through a window in step with fp32 pages. A format is measured through the kernels, as the daemon would
run it. A ladder is not: its pages are fp32, and what is older than the newest `--exact-last` tokens, the first
`--exact-first` pages apart, is replaced by what packed pages would give back, 16 tokens at a time.

KL is the mean over tokens of the divergence of the distribution from the exact one, in nats. The error is that of the
perplexity's change: one standard error of the mean difference, tokens taken as independent.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tierd.daemon.engine.model.load import Weights, load_weights
from tierd.daemon.engine.model.rope import frequencies, tables
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.spec import ModelSpec
from tierd.kernels import reference
from tierd.kernels.cpu.step import CpuDecoder
from tierd.kernels.layout import PAGE_FORMATS, PAGE_TOKENS, PageLayout

REPOSITORY = Path(__file__).resolve().parents[2]
CHUNK_TOKENS = 256
Ints = NDArray[np.int32]
LogProbs = torch.Tensor  # [tokens, vocab], float32


class Subject:
    """A decoder with the pages of one sequence."""

    def __init__(self, name: str, weights: Weights, spec: ModelSpec, page_format: str, context: int) -> None:
        self.name, self.page_format = name, page_format
        self.layout = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, page_format)
        cos, sin = tables(frequencies(spec, spec.context), spec.context)
        self.arena = np.zeros((-(-context // PAGE_TOKENS), self.layout.record_bytes), np.uint8)
        self._pages = self.arena.ctypes.data + np.arange(len(self.arena)) * self.layout.record_bytes
        self._decoder = CpuDecoder(
            weights.shape, weights.layers, weights.embed, weights.final_norm, weights.head,
            self.layout, cos, sin, CHUNK_TOKENS, os.cpu_count() or 1,
        )  # fmt: skip

    @property
    def token_bytes(self) -> float:
        """Bytes of one token, padding apart."""
        return self.layout.payload_bytes / self.layout.page_tokens

    def run(self, tokens: Ints, start: int) -> LogProbs:
        rows = np.arange(len(tokens), dtype=np.int32)
        logits = self._decoder.forward(
            [self.arena], tokens, rows + np.int32(start), np.zeros(len(rows), np.int32), self._pages,
            np.array([0, len(self._pages)], np.int32), rows,
        )  # fmt: skip
        return torch.from_numpy(logits).log_softmax(-1)


class Ladder(Subject):
    """fp32 pages, of which older ones hold what pages of `page_format` would give back."""

    def __init__(
        self, weights: Weights, spec: ModelSpec, page_format: str, context: int, first_pages: int, last_pages: int
    ) -> None:
        super().__init__(f"{page_format} ladder", weights, spec, "fp32", context)
        self.page_format, self._first, self._last = page_format, first_pages, last_pages
        self._packed = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, page_format)

    @property
    def token_bytes(self) -> float:
        pages, exact = len(self.arena), min(self._first + self._last, len(self.arena))
        return (self._packed.payload_bytes * (pages - exact) + self.layout.payload_bytes * exact) / pages / PAGE_TOKENS

    def run(self, tokens: Ints, start: int) -> LogProbs:
        parts = []
        for at in range(0, len(tokens), PAGE_TOKENS):
            parts.append(super().run(tokens[at : at + PAGE_TOKENS], start + at))
            page = (start + at) // PAGE_TOKENS - self._last + 1
            if page >= self._first:
                self._repack(torch.from_numpy(self.arena[page]))
        return torch.cat(parts)

    def _repack(self, record: torch.Tensor) -> None:
        packed = torch.zeros(self._packed.record_bytes, dtype=torch.uint8)
        for layer in range(self.layout.num_layers):
            keys, values = reference.page_planes([record], record.data_ptr(), self.layout, layer)
            reference.put_tokens(packed, self._packed, layer, keys, values, 0)
            keys, values = reference.page_planes([packed], packed.data_ptr(), self._packed, layer)
            reference.put_tokens(record, self.layout, layer, keys.float(), values.float(), 0)


@dataclass
class Tally:
    """What a subject has said so far, against fp32 pages."""

    losses: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    same_best: list[bool] = field(default_factory=list)

    def add(self, exact: LogProbs, found: LogProbs, following: Ints) -> None:
        rows = torch.arange(len(following))
        loss = -found[rows, torch.from_numpy(following).long()]
        self.losses += loss.tolist()
        self.differences += (loss + exact[rows, torch.from_numpy(following).long()]).tolist()
        self.divergences += (exact.exp() * (exact - found)).sum(-1).tolist()
        self.same_best += (exact.argmax(-1) == found.argmax(-1)).tolist()

    def row(self) -> dict[str, float]:
        change = np.array(self.differences)
        return {
            "perplexity": math.exp(np.mean(self.losses)),
            "change_percent": 100 * math.expm1(change.mean()),
            "error_percent": 100 * float(change.std()) / math.sqrt(len(change)),
            "kl": float(np.mean(self.divergences)),
            "same_best_percent": 100 * float(np.mean(self.same_best)),
        }


def measure(subjects: list[Subject], tokens: Ints, context: int) -> dict[str, dict[str, float]]:
    """`tokens` in windows; the first subject is the exact one."""
    tallies = {subject.name: Tally() for subject in subjects}
    for window in tokens.reshape(-1, context):
        for start in range(0, context, CHUNK_TOKENS):
            chunk, following = window[start : start + CHUNK_TOKENS], window[start + 1 : start + CHUNK_TOKENS + 1]
            exact = subjects[0].run(chunk, start)
            for subject in subjects:
                found = exact if subject is subjects[0] else subject.run(chunk, start)
                tallies[subject.name].add(exact, found, following)
    return {
        subject.name: {"token_bytes": subject.token_bytes, **tallies[subject.name].row()} for subject in subjects
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    prepared = Path(os.environ.get("TIERD_TEST_MODELS", REPOSITORY / ".cache/test-models"))
    packed = [name for name in PAGE_FORMATS if name not in ("fp32", "bf16")]
    parser.add_argument("--model-dir", type=Path, default=prepared / "smollm2-135m", help="a prepared model")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--formats", default=",".join(packed))
    parser.add_argument("--ladders", default="", help="formats of the older pages of ladders")
    parser.add_argument("--exact-first", type=int, default=4, help="pages of a ladder that stay exact (sinks)")
    parser.add_argument("--exact-last", type=int, default=128, help="newest tokens of a ladder that are exact")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    manifest = load_manifest(options.model_dir)
    spec, context = manifest.spec, options.context
    if context % CHUNK_TOKENS or context > spec.context:
        parser.error(f"--context takes a multiple of {CHUNK_TOKENS} up to {spec.context}")
    weights = load_weights(options.model_dir, manifest, lambda _done, _total: None)
    formats, ladders = ([name for name in names.split(",") if name] for names in (options.formats, options.ladders))
    subjects = [Subject(name, weights, spec, name, context) for name in ("fp32", *formats)]
    last_pages = options.exact_last // PAGE_TOKENS
    subjects += [Ladder(weights, spec, name, context, options.exact_first, last_pages) for name in ladders]
    text = "\n".join(topics[name] for name in sorted(topics))
    tokenizer = Tokenizer.from_file(str(options.model_dir / "tokenizer.json"))
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False).ids[: context * options.windows], np.int32)
    found = measure(subjects, tokens, context)
    exact_bytes = found["fp32"]["token_bytes"]
    print(f"{options.model_dir.name}, {options.windows} windows of {context} tokens")
    print("| pages | bytes a token | of fp16 | perplexity | change | +- | KL | same best |\n|" + " --- |" * 8)
    for name, row in found.items():
        size = row["token_bytes"]
        print(
            f"| {name} | {size:,.0f} | {200 * size / exact_bytes:.0f}% | {row['perplexity']:.4f} "
            f"| {row['change_percent']:+.3f}% | {row['error_percent']:.3f}% | {row['kl']:.6f} "
            f"| {row['same_best_percent']:.2f}% |"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
