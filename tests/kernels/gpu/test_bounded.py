"""Rows with a window, with or without sinks, through the whole step under the interpreter: against the twin."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.bounded import TABLE, Bounded, far, run, sequences, twin
from tests.kernels.decoders import TinyModel, tiny_model
from tests.kernels.gpu.models import aligned_arena, on_card
from tests.kernels.gpu.test_decoder import Recorder
from tierd.kernels.gpu.decoder import GpuDecoder
from tierd.kernels.rows import Bound

SMALL: dict[str, Any] = {
    "heads": 2, "kv_heads": 1, "hidden": 64, "intermediate": 64, "vocab": 40, "context": TABLE,
}  # fmt: skip
Spans = list[tuple[int, int]]  # of each sequence


def passes(
    model: TinyModel, decoder: GpuDecoder, made: list[Bounded], slots: int, steps: list[Spans]
) -> list[np.ndarray]:
    """Logits of all rows of each sequence; an empty span leaves it out."""
    arena = aligned_arena(model, slots)
    found: list[list[np.ndarray]] = [[] for _ in made]
    for spans in steps:
        wanted = [(n, span) for n, span in enumerate(spans) if span[0] < span[1]]
        rows = run(decoder, arena, [(made[n], *span) for n, span in wanted])
        for n, (start, stop) in wanted:
            found[n].append(rows[: stop - start])
            rows = rows[stop - start :]
    return [np.concatenate(parts) for parts in found]


def check(model: TinyModel, bounds: list[Bound], lengths: list[int], steps: list[Spans], **more: Any) -> None:
    """Against the twin, of which each sequence has its own pass."""
    made, slots = sequences(1, model, lengths, bounds)
    decoder = on_card(model, max_rows=200, far=far, **more)
    for found, sequence in zip(passes(model, decoder, made, slots, steps), made, strict=True):
        np.testing.assert_allclose(found, twin(model, model.arena(slots), sequence), rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_chunks_and_decode_rows_of_two_bounds_beside_each_other() -> None:
    """The first passes from what is exact to what is bounded within a chunk, and goes on beyond the tables."""
    model = tiny_model(**SMALL, windows=(20,), sink_logits=True)
    steps = [[(0, 50), (0, 20)], [(50, 95), (20, 21)], [(95, 97), (21, 22)], [(97, 98), (22, 22)]]
    check(model, [Bound(30, 5), Bound(17)], [98, 22], steps)


def test_a_graph_serves_rows_whatever_their_bounds() -> None:
    model = tiny_model(**SMALL, windows=(0,), qk_norm=True, sink_logits=True)
    recorder = Recorder()
    steps = [[(0, 22), (0, 22), (0, 22)]] + [[(n, n + 1)] * 3 for n in range(22, 27)]
    check(model, [Bound(16, 8), Bound(16), Bound()], [27, 27, 27], steps, capture=recorder)
    assert recorder.replays == 3  # from position 24 on one row sees sinks: two buckets, and two first steps


@pytest.mark.long
@pytest.mark.parametrize(
    ("bound", "windows"),
    [(Bound(40), (0,)), (Bound(40, 5), (30,)), (Bound(16, 33), (0,)), (Bound(33, 20), (50,))],
)
def test_pages_out_of_the_window_may_be_given_to_others(bound: Bound, windows: tuple[int, ...]) -> None:
    """They hold NaN before each row. Far beyond the tables, whose pages begin at a multiple of 256 tokens."""
    model, length = tiny_model(**SMALL, windows=windows), 530
    (sequence,), slots = sequences(5, model, [length], [bound])
    right = twin(model, model.arena(slots), sequence)
    decoder, arena = on_card(model, max_rows=200, far=far), aligned_arena(model, slots)
    for start in range(0, length, 106):
        chunk = run(decoder, arena, [(sequence, start, start + 106)])
        np.testing.assert_allclose(chunk, right[start : start + 106], rtol=1e-4, atol=1e-4)
    for at in (bound.sinks + bound.window, 300, 511, 512, 529):
        held = aligned_arena(model, slots)
        for page in [*range(-(-bound.sinks // 16)), *range((at - bound.window + 1) // 16, at // 16 + 1)]:
            held[sequence.slots[page]] = arena[sequence.slots[page]]
        row = run(decoder, held, [(sequence, at, at + 1)])[0]
        np.testing.assert_allclose(row, right[at], rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(("page_format", "bound"), [("bf16", 0.08), ("fp16", 0.01), ("k8v8", 0.03)])
def test_other_pages_and_activations(page_format: str, bound: float) -> None:
    model = tiny_model(**SMALL, windows=(0,), page_format=page_format)
    (sequence,), slots = sequences(2, model, [60], [Bound(20, 5)])
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(page_format, torch.float32)
    (found,) = passes(model, on_card(model, dtype, far=far), [sequence], slots, [[(0, 59)], [(59, 60)]])
    right = twin(model, model.arena(slots), sequence)
    assert np.abs(found - right).max() < bound * np.abs(right).max()


def test_layer_by_layer_gives_the_bits_of_one_pass() -> None:
    model = tiny_model(**SMALL, windows=(0,))
    (sequence,), slots = sequences(6, model, [24], [Bound(16, 2)])
    arena, decoder = aligned_arena(model, slots), on_card(model, far=far)
    whole = run(decoder, arena, [(sequence, 0, 24)])
    asked: list[None] = []
    by_layers = SimpleNamespace(forward=partial(decoder.forward, between=lambda: asked.append(None)))
    np.testing.assert_array_equal(run(by_layers, aligned_arena(model, slots), [(sequence, 0, 24)]), whole)
    assert len(asked) == 1


def test_what_modes_launch_is_compiled_ahead() -> None:
    told: list[tuple[int, int]] = []
    on_card(tiny_model(**SMALL, windows=(0,)), far=far).warm_up(lambda *at: told.append(at))
    assert told == [(n, 5) for n in range(6)]


def test_without_angles_beyond_the_tables_rows_end_there() -> None:
    model = tiny_model(**SMALL, windows=(0,))
    (sequence,), slots = sequences(6, model, [TABLE + 1], [Bound(20, 5)])
    with pytest.raises(ValueError, match=f"positions must lie in 0..{TABLE - 1}"):
        run(on_card(model, max_rows=200), aligned_arena(model, slots), [(sequence, 0, TABLE + 1)])
