"""Each family from a directory of transformers through importer, loader and kernels, against its own class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.daemon.engine.families import FAMILIES, VOCAB, Pass, prepare, reference

TOKENS = np.random.default_rng(5).integers(0, VOCAB, 100).tolist()
TOLERANCE = 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = reference(family)
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0].numpy()
    run = Pass(prepare(model, tmp_path))
    with run.decoder:
        whole = run(TOKENS, 0)  # one prefill
        chunked = [run(TOKENS[:37], 0), run(TOKENS[37:90], 37)]
        decoded = [run([token], 90 + place) for place, token in enumerate(TOKENS[90:])]
    assert np.abs(theirs).max() > 1.0  # no logits of nearly nothing
    assert np.abs(whole - theirs).max() < TOLERANCE
    # However it is cut, the bits are the same.
    np.testing.assert_array_equal(np.concatenate(chunked + decoded), whole)


def test_dynamic_rope_beyond_the_trained_context(tmp_path: Path) -> None:
    """The table is that of the whole context; transformers' is the same for a sequence of exactly that length."""
    model = reference("llama, dynamic rope, biases")
    tokens = np.random.default_rng(6).integers(0, VOCAB, 160).tolist()
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    run = Pass(prepare(model, tmp_path), context=160)
    with run.decoder:
        assert np.abs(run(tokens, 0) - theirs).max() < TOLERANCE
