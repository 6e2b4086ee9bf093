"""moe, and mixture: against the reference, the same bits in every batch and however experts come, what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tierd.kernels import reference
from tierd.kernels.cpu.forward import JOB
from tierd.kernels.cpu.moe import route
from tierd.kernels.cpu.step import CpuDecoder
from tierd.kernels.cpu.team import PHASE_WORDS
from tierd.kernels.cpu.weights import ExpertsShape
from tierd.kernels.packing import PANEL_ROWS, WeightFormat

from .decoders import TinyModel, addresses, batch, forward, random_sequences, tiny_model

MANY = ExpertsShape(12, 3, 40, renormalized=False, layers=(0, 2))
FEW = ExpertsShape(4, 2, 96, renormalized=True, layers=(0, 1, 2))
CLAMPED = ExpertsShape(6, 2, 64, renormalized=True, layers=(0, 1, 2), bias=True, limit=0.7, slope=1.702)
LENGTHS = [37, 1, 20]
MODELS: dict[str, dict[str, Any]] = {
    "many, fp32": {"experts": MANY, "biases": True},
    "few, fp32": {"experts": FEW, "hidden": 50},
    "few, int4": {"experts": FEW, "format": WeightFormat.INT4_G32},
    "few, int8": {"experts": FEW, "format": WeightFormat.INT8},
    "clamped, fp32": {"experts": CLAMPED, "biases": True, "sink_logits": True, "hidden": 88},
    "clamped, int8-g32": {"experts": CLAMPED, "biases": True, "sink_logits": True, "format": WeightFormat.INT8_G32},
}


def model_of(name: str) -> TinyModel:
    return tiny_model(windows=(0, 9, 0), **MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_matches_the_reference(name: str) -> None:
    model = model_of(name)
    sequences, slots = random_sequences(np.random.default_rng(1), LENGTHS, model.shape.vocab)
    inputs = batch(sequences, [(0, n) for n in LENGTHS])
    with model.decoder(max_rows=sum(LENGTHS)) as decoder:
        logits = forward(decoder, model.arena(slots), inputs)
    parts = [getattr(model, field.name) for field in dataclasses.fields(model)]
    expected = reference.forward(*parts, model.arena(slots), **inputs).numpy()
    assert np.abs(logits - expected).max() < (1e-3 if "int" in name else 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_alone_and_in_company_a_row_has_the_same_bits(name: str) -> None:
    model = model_of(name)
    sequences, slots = random_sequences(np.random.default_rng(2), LENGTHS, model.shape.vocab)
    with model.decoder(max_rows=sum(LENGTHS), threads=3) as decoder:
        together = forward(decoder, model.arena(slots), batch(sequences, [(0, n) for n in LENGTHS]))
    alone = []
    with model.decoder(threads=1) as decoder:
        for sequence in sequences:
            arena = model.arena(slots)
            alone += [forward(decoder, arena, batch([sequence], [(n, n + 1)]))[0] for n in range(len(sequence.tokens))]
    np.testing.assert_array_equal(together, np.stack(alone))


class Source:
    """Brings the experts of a model `count` at a time, the last first, and puts others out of their places."""

    def __init__(self, model: TinyModel, decoder: CpuDecoder, count: int) -> None:
        self._model, self._decoder, self._count = model, decoder, count
        self.guesses: list[tuple[int, set[int], set[int]]] = []  # layer, what was wanted, what was guessed for the next

    def bring(self, layer: int, wanted: Mapping[int, int], guessed: Mapping[int, int]) -> Iterator[Sequence[int]]:
        self.guesses.append((layer, set(wanted), set(guessed)))
        order = sorted(wanted, reverse=True)
        table = self._decoder.weights.experts
        for first in range(0, len(order), self._count):
            wave = order[first : first + self._count]
            table.records[:] = 0  # what was there before is gone
            for expert in wave:
                weights = self._model.layers[layer].experts[expert]
                assert weights is not None
                table.put(layer, expert, weights)
            yield wave


def by_layers(
    model: TinyModel, decoder: CpuDecoder, source: Source | None, inputs: dict[str, np.ndarray], arena: np.ndarray
) -> np.ndarray:
    pages = addresses(arena, inputs["page_table"])
    decoder.start(**{name: array for name, array in inputs.items() if name != "page_table"})
    for layer in range(model.shape.num_layers):
        decoder.layer(layer, [arena], pages, experts=source)
    return decoder.finish()


def without_experts(model: TinyModel) -> TinyModel:
    return dataclasses.replace(model, layers=[dataclasses.replace(layer, experts=()) for layer in model.layers])


@pytest.mark.parametrize("count", [1, 3, 100])
@pytest.mark.parametrize("name", ["many, fp32", "few, int4", "clamped, int8-g32"])
def test_experts_that_come_bit_by_bit_give_the_same_bits(name: str, count: int) -> None:
    model = model_of(name)
    sequences, slots = random_sequences(np.random.default_rng(3), [20], model.shape.vocab)
    with model.decoder() as decoder:
        arena = model.arena(slots)
        wanted = [forward(decoder, arena, batch(sequences, [span])) for span in ((0, 19), (19, 20))]
    with without_experts(model).decoder() as decoder:
        source, arena = Source(model, decoder, count), model.arena(slots)
        for span, expected in zip(((0, 19), (19, 20)), wanted, strict=True):
            inputs = batch(sequences, [span])
            np.testing.assert_array_equal(by_layers(model, decoder, source, inputs, arena), expected)
        assert {layer for layer, _, _ in source.guesses} == set(model.shape.experts.layers)


def test_guesses_are_what_the_next_router_says_now() -> None:
    """With the second layer's experts and attention adding nothing, the guess is what comes."""
    model = model_of("few, fp32")
    sequences, slots = random_sequences(np.random.default_rng(4), [8], model.shape.vocab)
    nothing = {}
    for name in ("o", "down"):
        block = model.layers[1].o if name == "o" else model.layers[1].experts[0].down
        nothing[name] = dataclasses.replace(block, data=np.zeros_like(block.data))
    idle = tuple(dataclasses.replace(expert, down=nothing["down"]) for expert in model.layers[1].experts if expert)
    second = dataclasses.replace(model.layers[1], o=nothing["o"], experts=idle)
    third = dataclasses.replace(model.layers[2], o=nothing["o"])
    model = dataclasses.replace(model, layers=[model.layers[0], second, third])
    with without_experts(model).decoder() as decoder:
        source = Source(model, decoder, 2)
        by_layers(model, decoder, source, batch(sequences, [(0, 1)]), model.arena(slots))
    (_, _, first_guess), (_, _, guessed), (layer, wanted, last_guess) = source.guesses
    assert layer == 2 and guessed == wanted and len(first_guess) == 2 and last_guess == set()


def test_many_rows_need_no_guess() -> None:
    model = model_of("few, fp32")
    sequences, slots = random_sequences(np.random.default_rng(5), [17], model.shape.vocab)
    with without_experts(model).decoder() as decoder:
        source = Source(model, decoder, 4)
        by_layers(model, decoder, source, batch(sequences, [(0, 17)]), model.arena(slots))
    assert [guessed for _, _, guessed in source.guesses] == [set()] * 3


def routed(logits: np.ndarray, used: int, *, renormalized: bool) -> tuple[np.ndarray, np.ndarray]:
    rows, count = logits.shape
    padded = np.zeros((rows, -(-count // 16) * 16), np.float32)
    padded[:, :count] = logits
    chosen, shares = np.full((rows, used), -9, np.int32), np.zeros((rows, used), np.float32)
    job, phase = np.zeros(1, JOB)[0], np.zeros(PHASE_WORDS, np.int64)
    job["rows"], job["experts"], job["experts_used"], job["renormalized"] = rows, count, used, renormalized
    job["router_logits"], job["router_stride"] = padded.ctypes.data, padded.strides[0]
    route(job, chosen.ctypes.data, shares.ctypes.data, phase.ctypes.data)
    return chosen, shares


@pytest.mark.parametrize("renormalized", [True, False])
def test_route_is_softmax_and_the_most_probable(renormalized: bool) -> None:
    import torch

    logits = (3 * np.random.default_rng(6).standard_normal((9, 13))).astype(np.float32)
    logits[0, 12] = 200.0
    logits[1] -= 500.0
    chosen, shares = routed(logits, 4, renormalized=renormalized)
    theirs, their_shares = reference.route(torch.from_numpy(logits), 4, renormalized)
    np.testing.assert_array_equal(chosen, theirs.numpy())
    np.testing.assert_allclose(shares, their_shares.numpy(), rtol=1e-5, atol=1e-30)


def test_of_equal_experts_the_first_is_chosen() -> None:
    chosen, shares = routed(np.zeros((1, 5), np.float32), 3, renormalized=False)
    assert chosen.tolist() == [[0, 1, 2]] and np.allclose(shares, 0.2)


@pytest.mark.parametrize("renormalized", [True, False])
def test_what_is_no_number_spoils_its_row_and_nothing_else(renormalized: bool) -> None:
    logits = np.zeros((4, 5), np.float32)
    logits[0, 3], logits[2], logits[3, 1] = np.nan, np.nan, np.inf
    chosen, shares = routed(logits, 2, renormalized=renormalized)
    for row in (0, 2, 3):
        assert np.isnan(shares[row]).all() and len(set(chosen[row].tolist())) == 2
    assert chosen[1].tolist() == [0, 1] and np.isfinite(shares[1]).all()


@pytest.mark.parametrize("name", ["many, fp32", "few, fp32", "clamped, fp32"])
def test_a_token_that_is_no_number_spoils_its_sequence_and_the_decoder_lives(name: str) -> None:
    model = tiny_model(windows=(0, 9, 0), tied=False, **MODELS[name])
    data = model.embed.data.copy()
    data.view(np.float32).reshape(-1, model.shape.hidden, PANEL_ROWS)[0, :, 7] = np.nan
    model = dataclasses.replace(model, embed=dataclasses.replace(model.embed, data=data))
    sequences, slots = random_sequences(np.random.default_rng(8), [6, 5], 7)
    sequences[0].tokens[2] = 7
    with model.decoder() as decoder:
        logits = forward(decoder, model.arena(slots), batch(sequences, [(0, 6), (0, 5)]))
        assert np.isfinite(logits[[0, 1, *range(6, 11)]]).all() and np.isnan(logits[2:6]).all()
        alone = forward(decoder, model.arena(slots), batch(sequences[1:], [(0, 5)]))
    np.testing.assert_array_equal(alone, logits[6:])


def test_what_is_refused() -> None:
    model = model_of("few, fp32")
    layer = model.layers[1]
    with pytest.raises(ValueError, match="layer 1 is a mixture and has no router"):
        dataclasses.replace(model, layers=[model.layers[0], dataclasses.replace(layer, router=None), layer]).decoder()
    wide = dataclasses.replace(layer.experts[0], down=layer.experts[0].gate_up)
    wrong = dataclasses.replace(layer, experts=(wide, *layer.experts[1:]))
    with pytest.raises(ValueError, match="down must be 50 x 96"):
        dataclasses.replace(model, layers=[model.layers[0], wrong, layer]).decoder()
    with pytest.raises(ValueError, match="5 of 4 experts"):
        dataclasses.replace(FEW, used=5)
    long = np.zeros(97, np.float32)
    for bias, wrong in ((True, long), (True, None), (False, long)):
        shape = dataclasses.replace(model.shape, experts=dataclasses.replace(FEW, bias=bias))
        one = dataclasses.replace(layer, experts=(dataclasses.replace(layer.experts[0], gate_up_bias=wrong),))
        with pytest.raises(ValueError, match="gate_up_bias must be"):
            dataclasses.replace(model, shape=shape, layers=[one, layer, layer]).decoder()
    sequences, slots = random_sequences(np.random.default_rng(7), [4], model.shape.vocab)
    inputs, arena = batch(sequences, [(0, 4)]), model.arena(slots)
    with without_experts(model).decoder() as decoder:
        with pytest.raises(ValueError, match="experts are streamed: compute the pass layer by layer"):
            forward(decoder, arena, inputs)
        with pytest.raises(ValueError, match="experts of layer 0 are streamed"):
            by_layers(model, decoder, None, inputs, arena)
        with pytest.raises(ValueError, match="no expert 4 in layer 0"):
            decoder.weights.experts.put(0, 4, layer.experts[0])


def test_experts_are_kept_and_forgotten_one_by_one() -> None:
    model = model_of("few, fp32")
    with model.decoder() as decoder:
        table = decoder.weights.experts
        assert table.all_here and table.has_all(2)
        table.forget(2, 1)
        table.forget(2, 1)
        assert not table.all_here and not table.has_all(2) and table.has_all(1)
        weights = model.layers[2].experts[1]
        assert weights is not None
        table.keep(2, 1, weights)
        assert table.all_here
