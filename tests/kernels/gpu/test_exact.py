"""Exact copies beside packed pages on the card: rows see what the twin says, in chunks and alone, graphs or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.kernels.decoders import TinyModel, batch, random_sequences, tiny_model
from tests.kernels.gpu.cases import aligned
from tests.kernels.gpu.models import aligned_arena, on_card
from tests.kernels.gpu.test_decoder import Recorder
from tests.kernels.test_exact import copies_of as copies_of_twin
from tests.kernels.test_exact import forget, run
from tierd.kernels import reference
from tierd.kernels.gpu.decoder import GpuDecoder
from tierd.kernels.layout import PageLayout
from tierd.kernels.rows import Exact, Ladder

SMALL = {"heads": 2, "kv_heads": 1, "head_dim": 32, "hidden": 64, "intermediate": 64, "vocab": 40}


def copies_of(model: TinyModel, slots: int) -> NDArray[np.uint8]:
    """An arena of exact copies, of which none is there yet: NaN."""
    layout = PageLayout(model.layout.num_layers, model.layout.kv_heads, model.layout.head_dim)
    memory = aligned(slots * layout.record_bytes, torch.uint8).numpy()
    memory[:] = 0xFF
    return memory.reshape(slots, layout.record_bytes)


def check(model: TinyModel, decoder: GpuDecoder, ladder: Ladder, lengths: list[int], chunk: int) -> None:
    sequences, slots = random_sequences(np.random.default_rng(1), lengths, model.shape.vocab)
    arena, copies = aligned_arena(model, slots), copies_of(model, slots)
    whole = batch(sequences, [(0, length) for length in lengths])
    expected = reference.forward(
        model.shape, model.layers, model.embed, model.final_norm, model.head, model.layout, model.cos, model.sin,
        arena.copy(), **whole, exact=(copies_of_twin(model, slots), ladder),
    )  # fmt: skip
    found: list[list[NDArray[np.float32]]] = [[] for _ in sequences]
    start = 0
    while start < max(lengths):
        count = chunk if start + chunk < max(lengths) - 3 else 1  # the last ones decode
        of_each = [(s, start, min(len(s.tokens), start + count)) for s in sequences if start < len(s.tokens)]
        logits = run(decoder, arena, copies, ladder, of_each)
        ends = np.cumsum([end - first for _, first, end in of_each])
        for (sequence, _, end), rows in zip(of_each, np.split(logits, ends[:-1]), strict=True):
            found[sequences.index(sequence)].append(rows)
            forget(copies, sequence, ladder, end)
        start += count
    rows = np.concatenate([np.concatenate(parts) for parts in found])
    # A code may be rounded the other way in the twin, whose sums go in another order.
    torch.testing.assert_close(torch.from_numpy(rows), expected, atol=0.05, rtol=0.02)
    assert np.abs(rows - expected.numpy()).mean() < 2e-3


@pytest.mark.long
@pytest.mark.parametrize(
    ("page_format", "ladder", "windows"),
    [
        ("k4v4", Ladder(32, 32), (0, 40)),
        ("fp8", Ladder(0, 32), (0,)),
        ("k8v4", Ladder(64, 64), (0, 0)),
    ],
)
def test_rows_are_those_of_the_twin(page_format: str, ladder: Ladder, windows: tuple[int, ...]) -> None:
    model = tiny_model(page_format=page_format, windows=windows, **SMALL)
    check(model, on_card(model), ladder, [72, 37], 32)


@pytest.mark.long
def test_steps_with_copies_have_graphs_of_their_own() -> None:
    model, recorder = tiny_model(page_format="k8v8", windows=(0,), **SMALL), Recorder()
    decoder = on_card(model, capture=recorder)
    check(model, decoder, Ladder(32, 32), [72], 32)
    stats = decoder.graph_stats
    assert stats.captured == 1 and stats.replayed == recorder.replays > 0
    sequences, slots = random_sequences(np.random.default_rng(2), [1], model.shape.vocab)
    arena, inputs = aligned_arena(model, slots), batch(sequences, [(0, 1)])
    table = arena.ctypes.data + inputs.pop("page_table").astype(np.int64) * arena.shape[1]
    decoder.forward([arena], pages=table, **inputs)
    assert decoder.graph_stats.captured == 2


def test_copies_that_do_not_fit_are_refused() -> None:
    model = tiny_model(page_format="k8v8", windows=(0,), **SMALL)
    (sequence,), slots = random_sequences(np.random.default_rng(2), [33], model.shape.vocab)
    arena, copies = aligned_arena(model, slots), copies_of(model, 3)
    inputs = batch([sequence], [(0, 33)])
    table = arena.ctypes.data + inputs.pop("page_table").astype(np.int64) * arena.shape[1]
    at = copies.ctypes.data + np.arange(3, dtype=np.int64) * copies.shape[1]
    for wrong, message in ((at + 64 * np.arange(3), "page 2: .* do not lie"), (at * [1, 0, 0], "one has none")):
        with pytest.raises(ValueError, match=message):
            on_card(model).forward([arena], pages=table, **inputs, exact=Exact(wrong, copies))
    exact = tiny_model(windows=(0,), **SMALL)
    with pytest.raises(ValueError, match="pages that are exact have no exact copies"):
        on_card(exact).forward([arena], pages=table, **inputs, exact=Exact(at, copies))
    assert (arena == 0xFF).all()


def test_warm_up_compiles_with_copies_as_well() -> None:
    told: list[tuple[int, int]] = []
    model = tiny_model(page_format="k8v8", windows=(0,), **SMALL)
    on_card(model).warm_up(lambda *at: told.append(at), copies=True)
    assert told[-1] == (4, 4)
    on_card(tiny_model(windows=(0,), **SMALL)).warm_up(lambda *at: told.append(at), copies=True)
    assert told[-1] == (2, 2)
