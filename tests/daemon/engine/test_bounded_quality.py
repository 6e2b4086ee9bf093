"""Text without an end: a real model goes on as well as it began, with sinks, and not without them."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.bench.quality import Bounded, endless
from tierd.daemon.engine.model.load import load_weights
from tierd.daemon.models.catalog import load_manifest

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"


def perplexities(models_dir: Path, mode: str, tokens: int) -> list[float]:
    """Of each eighth of a text of so many tokens."""
    directory = models_dir / MODEL
    manifest = load_manifest(directory)
    weights = load_weights(directory, manifest, lambda _done, _total: None)
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text, add_special_tokens=False).ids[:tokens]
    assert len(ids) == tokens
    return endless(Bounded(mode, weights, manifest.spec, tokens), np.array(ids, np.int32))


@pytest.mark.long
def test_a_window_alone_forgets_how_to_speak(models_dir: Path) -> None:
    with_sinks, without = (perplexities(models_dir, mode, 384) for mode in ("sinks=4,window=44", "window=48"))
    assert with_sinks[0] == pytest.approx(without[0], rel=0.01)  # the first 48 tokens see the same
    late, broken = (np.exp(np.mean(np.log(part[4:]))) for part in (with_sinks, without))
    assert late < with_sinks[0]  # those had nothing before them
    assert broken > 3 * late


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_three_contexts_of_text_are_as_likely_as_the_first(models_dir: Path) -> None:
    found = perplexities(models_dir, "sinks=4,window=1020", 3 * 8192 + 1024)
    assert max(found) < 2 * np.median(found)
    assert found[-1] < 1.5 * found[0]
