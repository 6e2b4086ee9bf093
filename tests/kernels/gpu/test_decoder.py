"""The whole step on the card's kernels, launch by launch under the interpreter, against the reference decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels import decoders
from tests.kernels.decoders import TinyModel, batch, random_sequences, tiny_model
from tests.kernels.gpu.models import aligned_arena, expected, on_card
from tierd.kernels import reference
from tierd.kernels.gpu.decoder import Draws, GpuDecoder
from tierd.kernels.packing import WeightFormat


def both(
    model: TinyModel, decoder: GpuDecoder, passes: list[list[tuple[int, int]]], lengths: list[int], seed: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Logits of each pass, ours and the reference's."""
    rng = np.random.default_rng(seed)
    sequences, slots = random_sequences(rng, lengths, model.shape.vocab)
    ours, theirs = aligned_arena(model, slots), aligned_arena(model, slots)
    found = []
    for spans in passes:
        inputs = batch(sequences, spans)
        found.append((decoders.forward(decoder, ours, inputs), expected(model, theirs, inputs)))
    return found


SMALL = {"windows": (0,), "heads": 2, "kv_heads": 1, "head_dim": 16, "hidden": 64, "intermediate": 64, "vocab": 40}
VARIANTS: list[dict[str, Any]] = [
    {"windows": (9, 0)},
    {"biases": True, "qk_norm": True, "tied": False, "windows": (9, 0), "heads": 4, "kv_heads": 4},
]
# Two prompts in chunks, then a decode row beside a chunk, then decode rows alone.
PASSES = [[(0, 17), (0, 3)], [(17, 18), (3, 21)], [(18, 19), (21, 22)], [(19, 20), (22, 22)]]


def test_a_prompt_in_chunks_and_decode_rows() -> None:
    model = tiny_model(**{**SMALL, "windows": (0, 9)}, biases=True, qk_norm=True, tied=False)
    for ours, theirs in both(model, on_card(model), PASSES[:3], [22, 24]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("options", VARIANTS)
def test_prompts_of_larger_models(options: dict[str, Any]) -> None:
    model = tiny_model(**options)
    for ours, theirs in both(model, on_card(model), PASSES, [22, 24]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("format", "dtype", "page_format"),
    [
        (WeightFormat.INT4_G32, torch.float16, "fp16"),
        (WeightFormat.INT8_G32, torch.bfloat16, "bf16"),
        (WeightFormat.INT8_G32, torch.float16, "fp32"),  # pages finer than the activations
    ],
)
def test_quantized_weights_and_activations_of_16_bits(
    format: WeightFormat, dtype: torch.dtype, page_format: str
) -> None:
    model = tiny_model(
        format=format, embed_format=WeightFormat.INT8_G32, page_format=page_format, biases=True, **SMALL
    )
    bound = {torch.float16: 0.01, torch.bfloat16: 0.08}[dtype]  # a few roundings of the activations
    for ours, theirs in both(model, on_card(model, dtype), [[(0, 5)], [(5, 6)]], [7]):
        assert np.abs(ours - theirs).max() < bound * np.abs(theirs).max()


@pytest.mark.parametrize("page_format", ["k8v8", pytest.param("fp8", marks=pytest.mark.long)])
def test_packed_pages(page_format: str) -> None:
    model = tiny_model(page_format=page_format, **SMALL)
    bound = {"k8v8": 0.03, "fp8": 0.1}[page_format]  # of what the exact pages of the twin give
    exact = replace(model, layout=replace(model.layout, format="fp32"))
    found = []
    for tried in (model, exact):
        rng = np.random.default_rng(0)
        sequences, slots = random_sequences(rng, [19], model.shape.vocab)
        arena, decoder = aligned_arena(tried, slots), on_card(tried)
        passes = [decoders.forward(decoder, arena, batch(sequences, [span])) for span in ((0, 17), (17, 18))]
        found.append(np.concatenate(passes))
    assert 0 < np.abs(found[0] - found[1]).max() < bound * np.abs(found[1]).max()


def test_other_formats_become_dense() -> None:
    model = tiny_model(format=WeightFormat.INT5_G32, embed_format=WeightFormat.INT8, **SMALL)
    for ours, theirs in both(model, on_card(model), [[(0, 5)]], [6]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_layer_by_layer_with_slices_of_pages_in_a_ring() -> None:
    model = tiny_model(**{**SMALL, "windows": (0, 0)})
    decoder, rng = on_card(model), np.random.default_rng(0)
    sequences, slots = random_sequences(rng, [20], model.shape.vocab)
    arena = aligned_arena(model, slots)
    decoders.forward(decoder, arena, batch(sequences, [(0, 19)]))
    before = arena.copy()
    inputs = batch(sequences, [(19, 20)])
    whole = decoders.forward(decoder, arena, inputs)
    size, table = model.layout.layer_bytes, inputs.pop("page_table")
    ring = aligned_arena(model, 1).reshape(-1)[: 2 * size].reshape(2, size)
    decoder.start(**inputs)
    for layer in range(len(model.layers)):
        for place, slot in enumerate(table):
            ring[place] = before[slot, layer * size : (layer + 1) * size]
        pages = ring.ctypes.data + np.arange(2, dtype=np.int64) * size - layer * size
        decoder.layer(layer, [ring], pages)
        ring[:] = 0xFF
    np.testing.assert_array_equal(decoder.finish(), whole)
    asked: list[None] = []
    inputs["page_table"] = table
    arena[:] = before
    between = decoders.forward(decoder, arena, inputs, lambda: asked.append(None))
    np.testing.assert_array_equal(between, whole)
    assert len(asked) == len(model.layers)


def test_hidden_states_are_what_the_head_takes() -> None:
    model = tiny_model(**SMALL)
    decoder, rng = on_card(model), np.random.default_rng(1)
    sequences, slots = random_sequences(rng, [5, 1], model.shape.vocab)
    arena = aligned_arena(model, slots)
    logits = decoders.forward(decoder, arena, batch(sequences, [(0, 5), (0, 1)]))
    rows = np.array([5, 0], np.int32)
    head = reference.weights(model.head).numpy()
    np.testing.assert_allclose(decoder.hidden(rows) @ head.T, logits[rows], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="the last pass has 6 rows"):
        decoder.hidden(np.array([6], np.int32))


def test_tokens_are_drawn_on_the_card() -> None:
    model = tiny_model(**SMALL)
    decoder, rng = on_card(model), np.random.default_rng(2)
    sequences, slots = random_sequences(rng, [3, 4], model.shape.vocab)
    arena = aligned_arena(model, slots)
    inputs = batch(sequences, [(0, 3), (0, 4)], every_row=False)
    logits = decoders.forward(decoder, arena, inputs)
    pages = decoders.addresses(arena, inputs.pop("page_table"))
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    draws = Draws(zeros, np.zeros(2, np.int32), ones, zeros, zeros)
    assert decoder.draw([arena], pages=pages, draws=draws, **inputs).tolist() == logits.argmax(1).tolist()


class Recorder:
    """Captures by keeping the call: a replay computes the step anew, on the numbers that were loaded."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.replays = fails, 0

    def __call__(self, run: Any) -> Any:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        run()

        def replay() -> Any:
            self.replays += 1
            return run()

        return replay


def test_decode_steps_replay_a_graph_for_their_bucket() -> None:
    model = tiny_model(**SMALL)
    recorder = Recorder()
    decoder = on_card(model, capture=recorder)
    spans = [[(0, 3), (0, 2), (0, 2)]] + [[(3 + n, 4 + n), (2 + n, 3 + n), (2 + n, 3 + n)] for n in range(3)]
    spans.append([(6, 7), (5, 5), (5, 5)])  # one row: another bucket
    for ours, theirs in both(model, decoder, spans, [9, 7, 7]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    stats = decoder.graph_stats
    assert (stats.captured, stats.replayed, stats.eager) == (2, 2, 2) and recorder.replays == 2


def test_without_a_graph_steps_run_eagerly_and_say_so_once() -> None:
    model = tiny_model(**SMALL)
    notes: list[str] = []
    decoder = on_card(model, capture=Recorder(fails=True), note=notes.append)
    for ours, theirs in both(model, decoder, [[(0, 5)], [(5, 6)], [(6, 7)]], [7]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert len(notes) == 1 and "up to 1 rows and 32 pages run without a CUDA graph: operation not" in notes[0]
    assert decoder.graph_stats.eager == 2


def test_warm_up_compiles_without_pages_of_the_engine() -> None:
    done: list[tuple[int, int]] = []
    on_card(tiny_model(**SMALL)).warm_up(lambda *at: done.append(at))
    assert done[-1] == (2, 2)


def test_what_does_not_fit_is_refused_before_memory_is_touched() -> None:
    model = tiny_model(**SMALL)
    decoder, rng = on_card(model, max_rows=8), np.random.default_rng(0)
    sequences, slots = random_sequences(rng, [5], model.shape.vocab)
    arena = aligned_arena(model, slots)
    inputs = batch(sequences, [(0, 5)])
    pages = decoders.addresses(arena, inputs.pop("page_table"))
    with pytest.raises(ValueError, match="do not lie, aligned to 64"):
        decoder.forward([arena], pages=pages + 8, **inputs)
    with pytest.raises(ValueError, match="no pass is open"):
        decoder.finish()
    decoder.start(**inputs)
    with pytest.raises(ValueError, match="the open pass has 0 of 1 layers"):
        decoder.finish()
    with pytest.raises(ValueError, match="layer 1 of 1 after 0"):
        decoder.layer(1, [arena], pages)
    decoder.close()
    with pytest.raises(ValueError, match="the decoder is closed"):
        decoder.forward([arena], pages=pages, **inputs)
    assert (arena == 0xFF).all()
