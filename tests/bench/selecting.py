"""Decode speed with fewer pages beside exact attention, at several lengths of text, in one interleaved run.

    python -m tests.bench.selecting [--model-dir DIR] [--contexts 2048,4096,7680] [--mode select=32]... [--steps 40]

One token is computed over pages in memory, by turns exactly and in each mode (`select=K` or `h2o=N`); the medians of
the steps are told. The bounds of the pages that are selected from are there, as they are after a prompt; what taking
them costs is told by itself.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median

import numpy as np

from tests.bench.quality import CHUNK_TOKENS, REPOSITORY, Ints, Selecting, Subject, Thinning, bounded
from tierd.daemon.engine.model.load import load_weights
from tierd.daemon.models.catalog import load_manifest
from tierd.kernels.layout import PAGE_TOKENS


def prepared(subject: Subject, row: Ints, context: int) -> tuple[Callable[[], object], float | None]:
    """A step after so many tokens, none of them of its pages' last one; and what taking bounds has cost, in seconds."""
    if isinstance(subject, Selecting):
        begun_s = time.perf_counter()
        subject.learn(context // PAGE_TOKENS)
        return partial(subject.chosen, row, context), time.perf_counter() - begun_s
    if not isinstance(subject, Thinning):
        raise ValueError(f"{subject.name} neither selects pages nor thins them out")

    def step() -> None:
        subject.forget(context)
        subject.thinned(row, context)

    return step, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    prepared_models = Path(os.environ.get("TIERD_TEST_MODELS", REPOSITORY / ".cache/test-models"))
    parser.add_argument("--model-dir", type=Path, default=prepared_models / "smollm2-135m", help="a prepared model")
    parser.add_argument("--contexts", default="2048,4096,7680")
    parser.add_argument("--mode", action="append", default=[], help="repeatable; select=32 if there is none")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    manifest = load_manifest(options.model_dir)
    spec = manifest.spec
    weights = load_weights(options.model_dir, manifest, lambda _done, _total: None)
    modes: list[str] = options.mode or ["select=32"]
    print("| tokens | exact | " + " | ".join(modes) + " | bounds of all pages |\n|" + " --- |" * (3 + len(modes)))
    for context in map(int, options.contexts.split(",")):
        exact = Subject("exact", weights, spec, "fp32", context + CHUNK_TOKENS)
        subjects = [bounded(mode, weights, spec, context + CHUNK_TOKENS) for mode in modes]
        tokens = np.random.default_rng(1).integers(0, spec.vocab, context, dtype=np.int32)
        # What the pages say does not matter: each says what the first one does.
        exact.logits(tokens[:PAGE_TOKENS], 0)
        exact.arena[:] = exact.arena[0]
        for subject in subjects:
            subject.arena[:] = exact.arena
        row = tokens[:1]
        steps = [prepared(subject, row, context) for subject in subjects]
        learned_s = [took_s for _, took_s in steps if took_s is not None]
        runs: list[Callable[[], object]] = [partial(exact.logits, row, context), *(run for run, _ in steps)]
        takes: list[list[float]] = [[] for _ in runs]
        for _ in range(options.steps):
            for place, run in enumerate(runs):
                begun_s = time.perf_counter()
                run()
                takes[place].append(time.perf_counter() - begun_s)
        figures = " | ".join(f"{1 / median(times):.1f} tokens/s" for times in takes)
        print(f"| {context} | {figures} | {1000 * mean(learned_s or [0]):.0f} ms |", flush=True)


if __name__ == "__main__":
    main()
