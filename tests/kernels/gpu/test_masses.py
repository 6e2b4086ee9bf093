"""What observed rows give to each page, through the whole step under the interpreter: what the CPU finds."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kernels.bounded import far
from tests.kernels.decoders import Inputs, TinyModel, addresses, batch, forward, random_sequences, tiny_model
from tests.kernels.gpu.models import aligned_arena, on_card
from tests.kernels.gpu.test_decoder import Recorder
from tests.kernels.test_masses import Masses, observe
from tierd.kernels.gpu.decoder import GpuDecoder

SMALL: dict[str, Any] = {"heads": 2, "kv_heads": 1, "hidden": 64, "intermediate": 64, "vocab": 40}
Passes = list[tuple[list[tuple[int, int]], list[int]]]  # spans of the sequences, and the rows that are observed
PASSES: Passes = [
    ([(0, 40), (0, 17)], []), ([(40, 50), (17, 18)], [8, 9, 10]), ([(50, 51), (18, 19)], [1]),
    ([(51, 52), (19, 20)], [1, 0]), ([(52, 53), (20, 20)], [0]),
]  # fmt: skip


def found_by(decoder: Any, model: TinyModel, arena: np.ndarray, passes: Passes, lengths: list[int]) -> list[Masses]:
    sequences, _ = random_sequences(np.random.default_rng(3), lengths, model.shape.vocab)
    found = []
    for spans, rows in passes:
        inputs: Inputs = batch(sequences, spans)
        if rows:
            found.append(observe(decoder, arena, inputs, rows))
        else:
            forward(decoder, arena, inputs)
    return found


def check(model: TinyModel, decoder: Any, passes: Passes = PASSES, lengths: list[int] | None = None) -> None:
    lengths = lengths or [53, 20]
    slots = sum(-(-length // 16) for length in lengths) + 3
    with model.decoder(128, threads=1) as plain:
        right = found_by(plain, model, model.arena(slots), passes, lengths)
    for ours, theirs in zip(found_by(decoder, model, aligned_arena(model, slots), passes, lengths), right, strict=True):
        pages = ours.shape[1]
        np.testing.assert_allclose(ours, theirs[:, :pages], rtol=2e-4, atol=2e-5)
        assert not theirs[:, pages:].any()


@pytest.mark.long
def test_rows_of_chunks_and_decode_rows_and_those_of_graphs() -> None:
    """Of a layer with a window nothing is known."""
    model = tiny_model(**SMALL, windows=(0, 20), sink_logits=True)
    recorder = Recorder()
    check(model, on_card(model, max_rows=128, capture=recorder))
    assert recorder.replays == 1  # two rows of which some are observed


@pytest.mark.long
@pytest.mark.parametrize("shape", [(6, 2, 32), (3, 3, 64), (16, 1, 80)])
def test_other_shapes_layer_by_layer(shape: tuple[int, int, int]) -> None:
    heads, kv_heads, head_dim = shape
    options = {**SMALL, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    model = tiny_model(**options, windows=(0, 24, 0))
    decoder: GpuDecoder = on_card(model, max_rows=128)
    by_layers = SimpleNamespace(forward=partial(decoder.forward, between=lambda: None), masses=decoder.masses)
    check(model, by_layers, [([(0, 40), (0, 9)], [38, 39, 40])], [40, 9])


def test_rows_that_cannot_be_observed_are_refused() -> None:
    model = tiny_model(**SMALL, windows=(0,))
    sequences, slots = random_sequences(np.random.default_rng(0), [5], model.shape.vocab)
    decoder, arena, inputs = on_card(model, far=far), aligned_arena(model, slots), batch(sequences, [(0, 5)])
    with pytest.raises(ValueError, match="rows 4 to 5 are to be observed, the pass has 5"):
        observe(decoder, arena, inputs, [4, 5])
    found_by(decoder, model, arena, [([(0, 5)], [])], [5])
    with pytest.raises(ValueError, match="no row of the last pass was observed"):
        decoder.masses()
    pages, bounds = addresses(arena, inputs.pop("page_table")), np.array([[3, 0, 0, 0]], np.int32)
    with pytest.raises(ValueError, match="with a window"):
        decoder.forward([arena], pages=pages, **inputs, bounds=bounds, observed=np.array([4], np.int32))
