"""A draft model beside a model whose weights are streamed from the disk: the same answers with it and without, in turn.

    python -m tests.bench.draft [--models DIR] [--tokens 32] [--rounds 3] [--kinds prose,drawn,noise] [--json FILE]
    python -m tests.bench.draft --kinds copies --model DIR --tokens 96

The main model is SmolLM2-135M in fp32 with as little memory as there can be, its draft the same in int4: half a
gigabyte is read for each token, and what is guessed is nearly always right. A larger main model gains as much; its
draft guesses worse, and costs less beside it. `prose` is greedy, `drawn` at temperature 0.8, `noise` random tokens at
temperature 2: nobody can guess those. `copies` edits a text: the look-up in the text itself guesses (with `--model`, a
prepared one that can do that), and is what the two sides differ in. They take turns, each first in every other round;
medians count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.daemon.engine.live import Live
from tierd.daemon.engine.speculate import Speculate
from tierd.daemon.models import fetch
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.importer import import_model
from tierd.daemon.models.placement import DoesNotFit, place
from tierd.daemon.paths import cache_dir

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_ROWS = 128
AUTO, OFF = Speculate.AUTO, Speculate.OFF
PROMPTS = (
    "Explain how a bicycle stays upright while it is moving.",
    "Write a short story about a lighthouse keeper.",
    "The three laws of thermodynamics are",
    "A recipe for bread needs",
    "In the year 1969",
)
# To be written once more with another name.
CODE = '''
def mean_of(rows, column):
    total = 0.0
    count = 0
    for row in rows:
        value = row.get(column)
        if value is None:
            continue
        total += float(value)
        count += 1
    if not count:
        raise ValueError(f"no row has {column}")
    return total / count


def largest_of(rows, column):
    found = None
    for row in rows:
        value = row.get(column)
        if value is not None and (found is None or value > found):
            found = value
    return found
'''
NAMES = ("field", "name", "key", "label", "heading")


def prepared(models: Path) -> tuple[Path, Path]:
    """The main model and its draft, imported once."""
    source = fetch.resolve("smollm2:135m", cache_dir(), lambda *_: None, False)
    for name, weights in (("main", "fp32"), ("draft", "int4-g32")):
        if not (models / name).exists():
            import_model(source, models, name, weights, lambda *_: None)
    return models / "main", models / "draft"


def least_bytes(model: Path) -> int:
    try:
        place(load_manifest(model), 1, MAX_ROWS)
    except DoesNotFit as exc:
        return exc.needed_bytes
    raise AssertionError("a model in one byte")


def asks(kind: str, number: int, tokens: int) -> dict[str, Any]:
    more: dict[str, Any] = {"max_tokens": tokens}
    if kind == "copies":
        order = f"Write this code again, unchanged, but call `column` `{NAMES[number % len(NAMES)]}`. Only the code."
        return more | {"messages": [("user", f"{order}\n```python{CODE}```")]}
    if kind == "noise":
        rng = np.random.default_rng(number)
        words = [int(token) for token in rng.integers(100, 48_000, 24)]
        return more | {"tokens": words, "temperature": 2.0, "seed": number}
    drawn = {"temperature": 0.8, "seed": number} if kind == "drawn" else {}
    return more | drawn | {"prompt": PROMPTS[number % len(PROMPTS)]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, default=REPOSITORY / ".cache" / "draft-models")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default="prose,drawn,noise")
    parser.add_argument("--model", type=Path, help="prepared; then there is no draft model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.models.mkdir(parents=True, exist_ok=True)
    model, small = (options.model, "") if options.model else prepared(options.models)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.models) as work, Live(
        model, Path(work), device=64, nvme=0, context=768, max_streams=4, max_batch_rows=MAX_ROWS,
        weights_bytes=least_bytes(model), draft_dir=str(small),
    ) as live:  # fmt: skip
        speculator = live.engine.loop._streams._steps.speculator
        guesses = speculator.guesses
        assert (guesses is None) == bool(options.model)

        def use(on: bool) -> None:
            what = ("guesses", guesses if on else None) if guesses else ("mode", AUTO if on else OFF)
            live.engine.loop.call(lambda: setattr(speculator, *what)).result(60)

        for kind in options.kinds.split(","):
            ratios, drafted, accepted = [], 0, 0
            for number in range(options.rounds):
                rates: dict[bool, float] = {}
                answers: dict[bool, list[int]] = {}
                for on in (number % 2 == 0, number % 2 == 1):
                    use(on)
                    ((answers[on], end),) = live.run([asks(kind, number, options.tokens)], 600.0)
                    assert end.ev == "done", end
                    rates[on] = end.data["timings"].decode_tokens_per_s
                    if on:
                        drafted += end.data["timings"].drafted
                        accepted += end.data["timings"].accepted
                assert answers[True] == answers[False], (kind, number)
                ratios.append(rates[True] / rates[False])
                print(f"{kind} {number}: {rates[False]:.2f} -> {rates[True]:.2f} tok/s", flush=True)
                if guesses:
                    print(guesses.statistics(), flush=True)
            figures[kind] = {"ratio": statistics.median(ratios), "drafted": drafted, "accepted": accepted}
            print(kind, figures[kind], flush=True)
        if guesses:
            figures["draft"] = guesses.statistics()
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
