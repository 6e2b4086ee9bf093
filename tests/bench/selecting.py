"""Decode speed with chosen pages beside exact attention, at several lengths of text, in one interleaved run.

    python -m tests.bench.selecting [--model-dir DIR] [--contexts 2048,4096,7680] [--mode select=32]... [--steps 40]

One token is computed over pages in memory, by turns exactly and in each mode; the medians of the steps are told. The
bounds of the pages are there, as they are after a prompt; what taking them costs is told by itself.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median

import numpy as np

from tests.bench.quality import CHUNK_TOKENS, REPOSITORY, Selecting
from tierd.daemon.engine.model.load import load_weights
from tierd.daemon.models.catalog import load_manifest
from tierd.kernels.layout import PAGE_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    prepared = Path(os.environ.get("TIERD_TEST_MODELS", REPOSITORY / ".cache/test-models"))
    parser.add_argument("--model-dir", type=Path, default=prepared / "smollm2-135m", help="a prepared model")
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
        subjects = [Selecting(mode, weights, spec, context + CHUNK_TOKENS) for mode in modes]
        tokens = np.random.default_rng(1).integers(0, spec.vocab, context, dtype=np.int32)
        # What the pages say does not matter: each says what the first one does.
        subjects[0].exact(tokens[:PAGE_TOKENS], 0)
        subjects[0].arena[:] = subjects[0].arena[0]
        learned_s = 0.0
        for subject in subjects:
            subject.arena[:] = subjects[0].arena
            begun_s = time.perf_counter()
            subject.learn(context // PAGE_TOKENS)
            learned_s += (time.perf_counter() - begun_s) / len(subjects)
        row = tokens[:1]
        takes: list[list[float]] = [[] for _ in range(1 + len(subjects))]
        for _ in range(options.steps):
            for place, run in enumerate((subjects[0].exact, *(subject.chosen for subject in subjects))):
                begun_s = time.perf_counter()
                run(row, context)
                takes[place].append(time.perf_counter() - begun_s)
        figures = " | ".join(f"{1 / median(times):.1f} tokens/s" for times in takes)
        print(f"| {context} | {figures} | {1000 * learned_s:.0f} ms |", flush=True)


if __name__ == "__main__":
    main()
