"""What page formats and bounded memory modes cost in quality: perplexity and KL divergence to exact pages.

    python -m tests.bench.quality [--model-dir DIR] [--context 1024] [--windows 2] [--formats fp16,k8v8,k8v4]
        [--ladders k8v4,k4v4 --exact-first 32 --exact-last 64,128] [--mode sinks=4,window=508]... [--json FILE]
    python -m tests.bench.quality --endless 24576 --mode sinks=4,window=1020 [--mode ...]

Text is the standard library's `pydoc_data.topics`, in windows of `--context` tokens with nothing before them. All
formats walk through a window in step with fp32 pages. A format is measured through the kernels, as the daemon would
run it, and so is a ladder: each of `--ladders` with each of `--exact-first` and `--exact-last`.

A mode is measured through the kernels, over fp32 pages. With `select=K` and `h2o=N` every token beyond the first K
pages, or N tokens, counts as one of an answer: in a daemon the prompt is exact. With `--endless` one text of so many
tokens, beyond the model's context, is fed in, and the perplexity of each eighth of it is told: it shows whether a mode
stays stable.

KL is the mean over tokens of the divergence of the distribution from the exact one, in nats. The error is that of the
perplexity's change: one standard error of the mean difference, tokens taken as independent.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tierd.daemon import kv_mode
from tierd.daemon.engine.batch import Batch
from tierd.daemon.engine.heavy import OBSERVED_TOKENS, Heavy
from tierd.daemon.engine.ladder import blocks
from tierd.daemon.engine.model.load import Weights, load_weights
from tierd.daemon.engine.model.rope import angles, frequencies, tables
from tierd.daemon.engine.runner import Runner
from tierd.daemon.engine.selection import Pick, Selection, Wanted
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.spec import ModelSpec
from tierd.kernels.cpu.selection import PageBounds
from tierd.kernels.cpu.step import CpuDecoder
from tierd.kernels.layout import PAGE_FORMATS, PAGE_TOKENS, PageLayout
from tierd.kernels.rows import COPY_FORMAT, Exact, Ladder
from tierd.tiers.page import PageKey

REPOSITORY = Path(__file__).resolve().parents[2]
CHUNK_TOKENS = 256
Ints = NDArray[np.int32]
LogProbs = torch.Tensor  # [tokens, vocab], float32


class Subject:
    """A decoder with the pages of one sequence."""

    def __init__(self, name: str, weights: Weights, spec: ModelSpec, page_format: str, context: int) -> None:
        self.name, self.page_format = name, page_format
        self.layout = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, page_format)
        freqs = frequencies(spec, spec.context)
        cos, sin = tables(freqs, spec.context)
        self.arena = np.zeros((-(-context // PAGE_TOKENS), self.layout.record_bytes), np.uint8)
        self._pages = self.arena.ctypes.data + np.arange(len(self.arena)) * self.layout.record_bytes
        self._decoder = CpuDecoder(
            weights.shape, weights.layers, weights.embed, weights.final_norm, weights.head,
            self.layout, cos, sin, CHUNK_TOKENS, os.cpu_count() or 1, partial(angles, freqs),
        )  # fmt: skip

    @property
    def token_bytes(self) -> float:
        """Bytes of one token, padding apart."""
        return self.layout.payload_bytes / self.layout.page_tokens

    def logits(self, tokens: Ints, start: int) -> NDArray[np.float32]:
        rows = np.arange(len(tokens), dtype=np.int32)
        return self._decoder.forward(
            [self.arena], tokens, rows + np.int32(start), np.zeros(len(rows), np.int32), self._pages,
            np.array([0, len(self._pages)], np.int32), rows,
        )  # fmt: skip

    def run(self, tokens: Ints, start: int) -> LogProbs:
        return torch.from_numpy(self.logits(tokens, start)).log_softmax(-1)


class Bounded(Subject):
    """fp32 pages of which a row sees what a mode lets it see. There are no more of them than the mode needs."""

    def __init__(self, text: str, weights: Weights, spec: ModelSpec, context: int) -> None:
        mode = kv_mode.parse(text)
        if mode is None:
            raise ValueError(f"{text!r} is no bounded mode")
        held = min(context, mode.exact_tokens + CHUNK_TOKENS + kv_mode.BASE_TOKENS)
        super().__init__(text, weights, spec, "fp32", held)
        self.mode, self._context = mode, context
        lead = -(-mode.sinks // PAGE_TOKENS)
        places = np.arange(-(-context // PAGE_TOKENS))
        places[lead:] = lead + (places[lead:] - lead) % (len(self.arena) - lead)
        self._pages = self._pages[places]

    @property
    def token_bytes(self) -> float:
        return super().token_bytes * min(1, self.mode.exact_tokens / self._context)

    def logits(self, tokens: Ints, start: int) -> NDArray[np.float32]:
        rows = np.arange(len(tokens), dtype=np.int32)
        bound = self.mode.bound(start, PAGE_TOKENS)
        lead, base = bound[2:]
        stop = -(-(start + len(tokens)) // PAGE_TOKENS)
        pages = np.concatenate((self._pages[:lead], self._pages[base // PAGE_TOKENS : stop]))
        return self._decoder.forward(
            [self.arena], tokens, rows + np.int32(start), np.zeros(len(rows), np.int32), pages,
            np.array([0, len(pages)], np.int32), rows, np.array([bound], np.int32),
        )  # fmt: skip


class Selecting(Subject):
    """fp32 pages of which each row reads those that it chooses, as if all after the first of them were an answer."""

    def __init__(self, text: str, weights: Weights, spec: ModelSpec, context: int) -> None:
        mode = kv_mode.parse(text)
        if mode is None or not mode.selects:
            raise ValueError(f"{text!r} selects no pages")
        super().__init__(text, weights, spec, "fp32", context)
        self.mode, self._context = mode, context
        self._selection = Selection(PageBounds(self.layout, spec.heads), weights.shape.windows)

    @property
    def token_bytes(self) -> float:
        return super().token_bytes * min(1, self.mode.read / self._context)

    def logits(self, tokens: Ints, start: int) -> NDArray[np.float32]:
        split = max(0, min(self.mode.read - start, len(tokens)))
        parts = [self.exact(tokens[:split], start)] if split else []
        if split:
            self.learn((start + split) // PAGE_TOKENS)
        starts = range(split, len(tokens), PAGE_TOKENS)
        parts += [self.chosen(tokens[at : at + PAGE_TOKENS], start + at) for at in starts]
        return np.concatenate(parts)

    def exact(self, tokens: Ints, start: int) -> NDArray[np.float32]:
        """Rows that read all before them."""
        return super().logits(tokens, start)

    def learn(self, pages: int) -> None:
        """Takes the bounds of the first pages."""
        for layer in range(self.layout.num_layers):
            self._selection.bounds.learn(layer, 0, self._pages[:pages])

    def chosen(self, tokens: Ints, start: int) -> NDArray[np.float32]:
        """Rows that choose, each of which is a sequence of its own."""
        rows, count = np.arange(len(tokens), dtype=np.int32), self.mode.read // PAGE_TOKENS
        positions = rows + np.int32(start)
        base = (positions // PAGE_TOKENS + 1) * PAGE_TOKENS - self.mode.read
        batch = Batch(
            tokens, positions, rows, self._pages[positions // PAGE_TOKENS].repeat(count),
            np.arange(0, count * len(rows) + 1, count, dtype=np.int32), rows,
            np.stack((0 * base, 0 * base, 0 * base, base), 1, dtype=np.int32),
        )  # fmt: skip
        wanted: list[Wanted] = [
            (row, Pick(self._selection, self._pages[: at // PAGE_TOKENS + 1], _nobody, (at + 1) % PAGE_TOKENS == 0))
            for row, at in enumerate(positions.tolist())
        ]
        return Runner(self._decoder, self.layout, [self.arena]).run(batch, wanted=wanted)


class Thinning(Subject):
    """fp32 pages, of which those are left that were looked at most, as if all after the first were an answer."""

    def __init__(self, text: str, weights: Weights, spec: ModelSpec, context: int) -> None:
        mode = kv_mode.parse(text)
        if mode is None or not mode.thins:
            raise ValueError(f"{text!r} thins out no pages")
        super().__init__(text, weights, spec, "fp32", context)
        self.mode, self._context = mode.fitted(weights.shape.windows), context
        self._heavy = self._new()

    def _new(self) -> Heavy:
        mode = self.mode
        first = mode.kept - OBSERVED_TOKENS
        return Heavy(mode.kept // PAGE_TOKENS, mode.recent // PAGE_TOKENS, first, PAGE_TOKENS)

    @property
    def token_bytes(self) -> float:
        return super().token_bytes * min(1, self.mode.kept / self._context)

    def logits(self, tokens: Ints, start: int) -> NDArray[np.float32]:
        if start == 0:
            self._heavy = self._new()
        parts, at = [], 0
        while at < len(tokens):
            position = start + at
            left = self.mode.kept - position if position < self.mode.kept else PAGE_TOKENS - position % PAGE_TOKENS
            parts.append(self.thinned(tokens[at : at + left], position))
            at += left
        return np.concatenate(parts)

    def forget(self, start: int) -> None:
        """Leaves as many pages as may be, before row `start`, the first one that is observed from here on."""
        mode = self.mode
        self._heavy = Heavy(mode.kept // PAGE_TOKENS, mode.recent // PAGE_TOKENS, start, PAGE_TOKENS)
        self._heavy.decide(start)

    def thinned(self, tokens: Ints, start: int) -> NDArray[np.float32]:
        """Rows of one page, or exact ones: they see the pages that are left, and are observed."""
        heavy, rows, end = self._heavy, np.arange(len(tokens), dtype=np.int32), start + len(tokens)
        if start >= self.mode.kept and heavy.is_due(start):
            heavy.decide(start)
        pages = -(-end // PAGE_TOKENS)
        kept = heavy.kept if heavy.decided else np.arange(pages)
        base, observed = (pages - len(kept)) * PAGE_TOKENS, heavy.observes(start, end)
        found = self._decoder.forward(
            [self.arena], tokens, rows + np.int32(start), np.zeros(len(rows), np.int32), self._pages[kept],
            np.array([0, len(kept)], np.int32), rows, np.array([(0, 0, 0, base)], np.int32),
            observed=rows[len(rows) - observed :],
        )  # fmt: skip
        if observed:
            heavy.take(end, self._decoder.masses())
        return found


def _nobody(place: int) -> PageKey:
    raise AssertionError(f"page {place} is in memory")


def bounded(text: str, weights: Weights, spec: ModelSpec, context: int) -> Subject:
    """The subject of a mode."""
    mode = kv_mode.parse(text)
    kind = Bounded if mode is None or not mode.spares_prompt else Selecting if mode.selects else Thinning
    return kind(text, weights, spec, context)


class OnLadder(Subject):
    """Packed pages, of whose tokens a row sees the first ones and those of its own block exact."""

    def __init__(self, weights: Weights, spec: ModelSpec, page_format: str, context: int, ladder: Ladder) -> None:
        super().__init__(
            f"{page_format}, exact first {ladder.first}, last {ladder.last}", weights, spec, page_format, context
        )
        self.ladder, self._context = ladder, context
        self.exact = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, COPY_FORMAT)
        self._copies = np.zeros((len(self._pages), self.exact.record_bytes), np.uint8)
        self._places = self._copies.ctypes.data + np.arange(len(self._copies)) * self.exact.record_bytes

    @property
    def token_bytes(self) -> float:
        exact = self.exact.payload_bytes / PAGE_TOKENS * (self.ladder.first + self.ladder.last)
        return super().token_bytes + exact / self._context

    def logits(self, tokens: Ints, start: int) -> NDArray[np.float32]:
        parts, page = [], np.arange(len(self._pages)) * PAGE_TOKENS
        for first, end in blocks(self.ladder, start, start + len(tokens), CHUNK_TOKENS):
            rows = np.arange(end - first, dtype=np.int32)
            is_exact = (page < self.ladder.first) | (page >= self.ladder.block(first))
            found = self._decoder.forward(
                [self.arena], tokens[first - start : end - start], rows + np.int32(first),
                np.zeros(len(rows), np.int32), self._pages, np.array([0, len(self._pages)], np.int32), rows,
                exact=Exact(np.where(is_exact, self._places, 0), self._copies),
            )  # fmt: skip
            parts.append(found)
        return np.concatenate(parts)


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


def endless(subject: Subject, tokens: Ints) -> list[float]:
    """Perplexity of each eighth of one text."""
    losses: list[float] = []
    for start in range(0, len(tokens) - 1, CHUNK_TOKENS):
        chunk, following = tokens[start : start + CHUNK_TOKENS], tokens[start + 1 : start + CHUNK_TOKENS + 1]
        logits = torch.from_numpy(subject.logits(chunk, start))[: len(following)]
        targets = torch.from_numpy(following).long()
        losses += torch.nn.functional.cross_entropy(logits, targets, reduction="none").tolist()
    return [math.exp(part.mean()) for part in np.array_split(np.array(losses), 8)]


def tell_endless(modes: list[str], weights: Weights, spec: ModelSpec, tokens: Ints) -> None:
    """A table of `endless`, mode by mode."""
    print(f"one text of {len(tokens)} tokens, the model's context holds {spec.context}")
    print("| mode | " + " | ".join(f"{eighth}/8" for eighth in range(1, 9)) + " |\n|" + " --- |" * 9)
    for text in modes:
        found = endless(bounded(text, weights, spec, len(tokens)), tokens)
        print(f"| {text} | " + " | ".join(f"{perplexity:.2f}" for perplexity in found) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    prepared = Path(os.environ.get("TIERD_TEST_MODELS", REPOSITORY / ".cache/test-models"))
    packed = [name for name in PAGE_FORMATS if name not in ("fp32", "bf16")]
    parser.add_argument("--model-dir", type=Path, default=prepared / "smollm2-135m", help="a prepared model")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--formats", default=",".join(packed))
    parser.add_argument("--ladders", default="", help="formats of the older pages of ladders")
    parser.add_argument("--exact-first", default="32", help="first tokens of ladders that are exact, in steps of 32")
    parser.add_argument("--exact-last", default="128", help="tokens of their blocks, in steps of 32")
    parser.add_argument("--mode", action="append", default=[], help="a bounded memory mode; repeatable")
    parser.add_argument("--endless", type=int, default=0, help="tokens of one text beyond the context")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    manifest = load_manifest(options.model_dir)
    spec, context = manifest.spec, options.context
    if context % CHUNK_TOKENS or context > spec.context:
        parser.error(f"--context takes a multiple of {CHUNK_TOKENS} up to {spec.context}")
    weights = load_weights(options.model_dir, manifest, lambda _done, _total: None)
    text = "\n".join(topics[name] for name in sorted(topics))
    tokenizer = Tokenizer.from_file(str(options.model_dir / "tokenizer.json"))
    wanted = options.endless or context * options.windows
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False).ids[:wanted], np.int32)
    if options.endless:
        tell_endless(options.mode, weights, spec, tokens)
        return
    formats, ladders = ([name for name in names.split(",") if name] for names in (options.formats, options.ladders))
    subjects = [Subject(name, weights, spec, name, context) for name in ("fp32", *formats)]
    firsts, lasts = ([int(one) for one in given.split(",")] for given in (options.exact_first, options.exact_last))
    subjects += [
        OnLadder(weights, spec, name, context, Ladder(first, last))
        for name in ladders
        for last in lasts
        for first in firsts
    ]
    subjects += [bounded(mode, weights, spec, context) for mode in options.mode]
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
