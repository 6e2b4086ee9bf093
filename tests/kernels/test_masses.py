"""What rows give to each page: against the twin, and that nothing else has an influence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.counts import counted
from tierd.kernels import reference
from tierd.kernels.cpu.step import CpuDecoder
from tierd.kernels.reference.packed import turned

from .decoders import Inputs, Sequence, TinyModel, addresses, batch, forward, random_sequences, tiny_model

Masses = NDArray[np.float64]


def observe(decoder: CpuDecoder, arena: NDArray[np.uint8], inputs: Inputs, rows: list[int]) -> Masses:
    rest: dict[str, Any] = {name: array for name, array in inputs.items() if name != "page_table"}
    pages = addresses(arena, inputs["page_table"])
    decoder.forward([arena], pages=pages, **rest, observed=np.array(rows, np.int32))
    return decoder.masses()


def twin(model: TinyModel, decoder: CpuDecoder, arena: NDArray[np.uint8], inputs: Inputs, rows: list[int]) -> Masses:
    """The same rows once more, layer by layer, and the masses of their queries."""
    pages = addresses(arena, inputs["page_table"])
    rest: dict[str, Any] = {name: array for name, array in inputs.items() if name != "page_table"}
    offsets, positions, row_seq = (inputs[name] for name in ("page_offsets", "positions", "row_seq"))
    mine = [pages[offsets[row_seq[row]] :][: positions[row] // 16 + 1].tolist() for row in rows]
    found = np.zeros((len(rows), max(map(len, mine))))
    decoder.start(*(rest[name] for name in ("tokens", "positions", "row_seq", "page_offsets", "logit_rows")))
    heads, kv_heads = model.shape.heads, model.shape.kv_heads
    for layer, window in enumerate(model.shape.windows):
        asked: list[NDArray[np.float32]] = []

        def choose(
            queries: NDArray[np.float32], asked: list[NDArray[np.float32]] = asked
        ) -> tuple[list[NDArray[np.uint8]], NDArray[np.int64]]:
            asked.append(queries.copy())
            return [arena], pages

        decoder.layer(layer, [arena], pages, choose=choose)
        if window:
            continue
        logits = model.layers[layer].sink_logits
        _, _, masses = reference.decode(
            turned(torch.from_numpy(asked[0][rows]), model.layout.rotation), [torch.from_numpy(arena).reshape(-1)],
            model.layout, layer, mine,
            [int(positions[row]) + 1 for row in rows], sinks=None if logits is None else torch.from_numpy(logits),
        )  # fmt: skip
        ends = np.cumsum([len(one) for one in mine])
        for place, part in enumerate(np.split(masses.sum(1).numpy() * (heads // kv_heads), ends[:-1])):
            found[place, : len(part)] += part
    return found


def inputs_of(rng: np.random.Generator, model: TinyModel, lengths: list[int]) -> tuple[Inputs, NDArray[np.uint8]]:
    sequences, slots = random_sequences(rng, lengths, model.shape.vocab)
    return batch(sequences, [(0, length) for length in lengths]), model.arena(slots)


@settings(max_examples=counted(150, 4), deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from([(6, 2, 32), (3, 3, 64), (16, 1, 80), (4, 2, 128)]),
    st.sampled_from(["fp32", "fp16", "bf16", "fp8", "k8v8", "k4v8"]), st.booleans(),
    st.lists(st.integers(1, 70), min_size=1, max_size=3),
)  # fmt: skip
def test_they_are_those_of_the_twin(
    seed: int, shape: tuple[int, int, int], page_format: str, sink_logits: bool, lengths: list[int]
) -> None:
    heads, kv_heads, head_dim = shape
    model = tiny_model(
        seed=seed, heads=heads, kv_heads=kv_heads, head_dim=head_dim, windows=(0, 24, 0), page_format=page_format,
        sink_logits=sink_logits,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    inputs, arena = inputs_of(rng, model, lengths)
    count = len(inputs["tokens"])
    rows = sorted(rng.choice(count, min(count, 5), replace=False).tolist())
    with model.decoder(256) as decoder:
        found = observe(decoder, arena, inputs, rows)
        wanted = twin(model, decoder, arena, inputs, rows)
    seen = wanted.shape[1]
    np.testing.assert_allclose(found[:, :seen], wanted, rtol=2e-4, atol=2e-5)
    assert not found[:, seen:].any()
    if not sink_logits:
        np.testing.assert_allclose(found.sum(1), 2 * heads, rtol=1e-5)


def test_they_are_the_same_bits_in_company_in_chunks_and_on_any_number_of_threads() -> None:
    model, lengths = tiny_model(seed=3), [150, 41]
    rng = np.random.default_rng(3)
    sequences, slots = random_sequences(rng, lengths, model.shape.vocab)
    with model.decoder(256, threads=2) as decoder:
        arena = model.arena(slots)
        together = observe(decoder, arena, batch(sequences, [(0, 150), (0, 41)]), [149, 150 + 40])
    with model.decoder(256, threads=1) as decoder:
        arena = model.arena(slots)
        forward(decoder, arena, batch(sequences[:1], [(0, 139)]))
        alone = observe(decoder, arena, batch(sequences[:1], [(139, 150)]), [10])
    assert alone[0].tobytes() == together[0, : alone.shape[1]].tobytes()


def test_who_is_observed_says_what_it_says_unobserved() -> None:
    model = tiny_model(seed=4)
    inputs, arena = inputs_of(np.random.default_rng(4), model, [60])
    with model.decoder(64) as decoder:
        plain = forward(decoder, arena, inputs)
        rest: dict[str, Any] = {name: array for name, array in inputs.items() if name != "page_table"}
        pages, rows = addresses(arena, inputs["page_table"]), np.arange(60, dtype=np.int32)
        assert decoder.forward([arena], pages=pages, **rest, observed=rows).tobytes() == plain.tobytes()
        forward(decoder, arena, inputs)
        with pytest.raises(ValueError, match="no row of the last pass was observed"):
            decoder.masses()


def test_rows_that_cannot_be_observed_are_refused() -> None:
    model = tiny_model()
    sequence = Sequence(list(range(20)), [0, 1])
    inputs, arena = batch([sequence], [(0, 20)]), model.arena(2)
    with model.decoder(64) as decoder:
        with pytest.raises(ValueError, match="rows 4 to 20 are to be observed, the pass has 20"):
            observe(decoder, arena, inputs, [4, 20])
        bounds = np.array([[16, 0, 0, 0]], np.int32)
        rest: dict[str, Any] = {name: array for name, array in inputs.items() if name != "page_table"}
        pages = addresses(arena, inputs["page_table"])
        with pytest.raises(ValueError, match="with a window"):
            decoder.forward([arena], pages=pages, **rest, bounds=bounds, observed=np.array([3], np.int32))
