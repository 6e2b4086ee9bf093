"""Mixtures of experts on the card: against the reference, the same bits in any company, and however experts come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels import decoders
from tests.kernels.decoders import TinyModel, addresses, batch, random_sequences, tiny_model
from tests.kernels.gpu.models import CPU, aligned_arena, on_card
from tests.kernels.gpu.test_decoder import Recorder, both
from tierd.daemon.engine.model.load import shape_of
from tierd.daemon.plan.auto_card import mixture_bytes
from tierd.daemon.plan.known import known_shape
from tierd.kernels.cpu.weights import ExpertsShape
from tierd.kernels.gpu.decoder import GpuDecoder
from tierd.kernels.gpu.experts import COLUMNS, GpuExpert, Kind
from tierd.kernels.gpu.mixture import Wave
from tierd.kernels.gpu.moe import experts_plan
from tierd.kernels.gpu.routing import plan_route
from tierd.kernels.packing import WeightFormat
from tierd.kernels.reference.decoder import activate, matmul

SMALL = {"heads": 2, "kv_heads": 1, "head_dim": 16, "hidden": 64, "vocab": 40}
MIXTRAL = ExpertsShape(4, 2, 96, renormalized=True, layers=(0, 1))
QWEN3 = ExpertsShape(12, 3, 32, renormalized=False, layers=(1,))
GPT_OSS = ExpertsShape(6, 2, 64, renormalized=True, layers=(0, 1), bias=True, limit=0.7, slope=1.702)
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"experts": MIXTRAL},
    "qwen3": {"experts": QWEN3, "qk_norm": True},
    "gpt-oss": {"experts": GPT_OSS, "biases": True, "sink_logits": True, "hidden": 96},
}
HALF = torch.float16


def model_of(name: str, **more: Any) -> TinyModel:
    return tiny_model(**{"windows": (0, 9), "intermediate": 64, **SMALL, **MODELS[name], **more})


def one_layer(name: str, **more: Any) -> TinyModel:
    """Its mixture alone."""
    return model_of(name, windows=(0,), experts=replace(MODELS[name]["experts"], layers=(0,)), **more)


@pytest.mark.parametrize("name", ["gpt-oss", *(pytest.param(n, marks=pytest.mark.long) for n in ("mixtral", "qwen3"))])
def test_chunks_and_decode_rows_like_the_reference(name: str) -> None:
    model = model_of(name)
    passes = [[(0, 17), (0, 3)], [(17, 18), (3, 5)], [(18, 19), (5, 6)]]
    for ours, theirs in both(model, on_card(model), passes, [20, 7]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "format", [WeightFormat.INT4_G32, *(pytest.param(f, marks=pytest.mark.long) for f in ("int8-g32", "bf16"))]
)
@pytest.mark.parametrize("name", MODELS)
def test_quantized_experts(name: str, format: str) -> None:
    model = one_layer(name, format=WeightFormat(format), page_format="fp16")
    for ours, theirs in both(model, on_card(model, HALF), [[(0, 5)], [(5, 6)]], [7]):
        assert np.abs(ours - theirs).max() < 0.015 * np.abs(theirs).max()


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_chunks_of_many_rows(name: str) -> None:
    """Tiles of 64 rows, and the second bound on their number."""
    model = model_of(name, format=WeightFormat.INT8_G32, page_format="fp16")
    for ours, theirs in both(model, on_card(model, HALF, max_rows=128), [[(0, 70)]], [70]):
        assert np.abs(ours - theirs).max() < 0.015 * np.abs(theirs).max()


@pytest.mark.parametrize("format", [WeightFormat.INT4_G32, pytest.param(WeightFormat.BF16, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("mixtral", marks=pytest.mark.long)])
def test_alone_and_in_company_a_row_has_the_same_bits(name: str, format: WeightFormat) -> None:
    model = one_layer(name, format=format, page_format="fp16")
    lengths = [3, 1, 2]
    sequences, slots = random_sequences(np.random.default_rng(2), lengths, model.shape.vocab)
    arena, decoder = aligned_arena(model, slots), on_card(model, HALF)
    decoders.forward(decoder, arena, batch(sequences, [(0, length - 1) for length in lengths]))
    before = arena.copy()
    together = decoders.forward(decoder, arena, batch(sequences, [(length - 1, length) for length in lengths]))
    for sequence, expected in zip(sequences, together, strict=True):
        arena[:] = before
        length = len(sequence.tokens)
        found = decoders.forward(decoder, arena, batch([sequence], [(length - 1, length)]))[0]
        np.testing.assert_array_equal(found, expected)


def test_decode_steps_are_captured() -> None:
    model, recorder = model_of("qwen3"), Recorder()
    decoder = on_card(model, capture=recorder)
    spans = [[(0, 3), (0, 2)]] + [[(3 + n, 4 + n), (2 + n, 3 + n)] for n in range(3)]
    for ours, theirs in both(model, decoder, spans, [7, 6]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert decoder.graph_stats.captured == 1 and recorder.replays == 2


@pytest.mark.parametrize(("name", "rows"), [("mixtral-8x7b", 1), ("qwen3-30b-a3b", 64), ("gpt-oss-20b", 576)])
def test_the_plan_counts_what_a_mixture_takes(name: str, rows: int) -> None:
    spec = known_shape(name).spec
    assert spec is not None and spec.experts is not None
    shape = shape_of(spec).experts
    assert shape is not None
    x, router = (torch.empty((n, spec.hidden), dtype=t, device="meta") for n, t in ((rows, HALF), (shape.count, None)))
    routing = plan_route(x, router, None, shape.used, shape.renormalized)
    table = torch.empty((shape.count, COLUMNS), dtype=torch.int64, device="meta")
    sizes = (2 * shape.intermediate, spec.hidden), (spec.hidden, shape.intermediate)
    kinds = tuple(Kind(*size, WeightFormat.INT4_G32, HALF) for size in sizes)
    plan = experts_plan(x, routing.result, table, kinds, shape)
    taken = sum(buffer.nbytes for buffer in (*routing.buffers, *plan.buffers)) + table.nbytes * len(shape.layers)
    assert taken <= mixture_bytes(spec, spec.experts, rows) <= 1.5 * taken


class Source:
    """Brings `count` experts at a time, the last first, and puts all others out of their places. Every second one it
    computes by itself, if it is `able`."""

    def __init__(self, model: TinyModel, decoder: GpuDecoder, count: int, able: bool = False) -> None:
        self.model, self.decoder, self.count, self.able = model, decoder, count, able
        self.guesses: list[tuple[int, set[int], set[int]]] = []  # layer, what was wanted, what was guessed for the next

    def bring(
        self, layer: int, wanted: Mapping[int, int], guessed: Mapping[int, int],
        rows_of: Callable[[int], np.ndarray],
    ) -> Iterator[Wave]:  # fmt: skip
        self.guesses.append((layer, set(wanted), set(guessed)))
        order = sorted(wanted, reverse=True)
        for first in range(0, len(order), self.count):
            wave = order[first : first + self.count]
            mine = [expert for expert in wave if self.able and expert % 2]
            placed = [expert for expert in wave if expert not in mine]
            self.place(layer, placed)
            yield Wave(placed, {expert: self.compute(layer, expert, rows_of(expert), wanted) for expert in mine})

    def place(self, layer: int, experts: Sequence[int]) -> None:
        table = self.decoder._layers[layer].experts
        assert table is not None
        weights = self.model.layers[layer].experts
        dtype = self.decoder._dtype
        table.put(dict.fromkeys(range(len(weights))))
        table.put({n: GpuExpert.load(weights[n], CPU, dtype) for n in experts})

    def compute(self, layer: int, expert: int, rows: np.ndarray, wanted: Mapping[int, int]) -> np.ndarray:
        weights = self.model.layers[layer].experts[expert]
        assert weights is not None and rows.shape == (wanted[expert], self.model.shape.hidden)
        biases = [
            None if bias is None else torch.from_numpy(bias[: matrix.rows])
            for bias, matrix in ((weights.gate_up_bias, weights.gate_up), (weights.down_bias, weights.down))
        ]
        gate, up = matmul(torch.from_numpy(rows), weights.gate_up, biases[0]).chunk(2, -1)
        return matmul(activate(gate, up, self.model.shape.experts), weights.down, biases[1]).numpy()


def without_experts(model: TinyModel) -> TinyModel:
    def emptied(layer: Any) -> Any:
        return replace(layer, experts=(None,) * len(layer.experts))

    return replace(model, layers=[emptied(layer) for layer in model.layers])


def by_layers(model: TinyModel, decoder: GpuDecoder, source: Source, inputs: decoders.Inputs, arena: Any) -> np.ndarray:
    pages = addresses(arena, inputs["page_table"])
    decoder.start(**{name: array for name, array in inputs.items() if name != "page_table"})
    for layer in range(model.shape.num_layers):
        decoder.layer(layer, [arena], pages, experts=source)
    return decoder.finish()


@pytest.mark.parametrize("count", [1, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("mixtral", marks=pytest.mark.long)])
def test_experts_that_come_bit_by_bit_give_the_same_bits(name: str, count: int) -> None:
    model = model_of(name, format=WeightFormat.INT4_G32, page_format="fp16")
    sequences, slots = random_sequences(np.random.default_rng(3), [7], model.shape.vocab)
    arena, decoder = aligned_arena(model, slots), on_card(model, HALF)
    wanted = [decoders.forward(decoder, arena, batch(sequences, [span])) for span in ((0, 6), (6, 7))]
    decoder, arena = on_card(without_experts(model), HALF), aligned_arena(model, slots)
    source = Source(model, decoder, count)
    assert decoder.streams
    for span, expected in zip(((0, 6), (6, 7)), wanted, strict=True):
        found = by_layers(model, decoder, source, batch(sequences, [span]), arena)
        np.testing.assert_array_equal(found, expected)


def test_rows_that_the_source_computes_are_added() -> None:
    model = model_of("gpt-oss")
    sequences, slots = random_sequences(np.random.default_rng(3), [7], model.shape.vocab)
    arena, decoder = aligned_arena(model, slots), on_card(model)
    wanted = decoders.forward(decoder, arena, batch(sequences, [(0, 7)]))
    decoder = on_card(without_experts(model))
    source = Source(model, decoder, 3, able=True)
    found = by_layers(model, decoder, source, batch(sequences, [(0, 7)]), arena)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_guesses_are_what_the_next_router_says_now() -> None:
    """With the second layer's experts and attention adding nothing, the guess is what comes."""
    model = model_of("mixtral", windows=(0, 0, 0), experts=replace(MIXTRAL, layers=(0, 1, 2)))
    block = model.layers[1].o
    nothing = replace(block, data=np.zeros_like(block.data))
    idle = tuple(
        replace(expert, down=replace(expert.down, data=np.zeros_like(expert.down.data)))
        for expert in model.layers[1].experts if expert is not None
    )  # fmt: skip
    second, third = replace(model.layers[1], o=nothing, experts=idle), replace(model.layers[2], o=nothing)
    model = replace(model, layers=[model.layers[0], second, third])
    decoder = on_card(without_experts(model))
    sequences, slots = random_sequences(np.random.default_rng(4), [17], model.shape.vocab)
    source = Source(model, decoder, 100)
    by_layers(model, decoder, source, batch(sequences, [(0, 1)]), aligned_arena(model, slots))
    (_, _, first_guess), (_, _, guessed), (layer, wanted, last_guess) = source.guesses
    assert layer == 2 and guessed == wanted and len(first_guess) == 2 and last_guess == set()
    for index in range(3):
        source.place(index, [])
    source.guesses.clear()
    by_layers(model, decoder, source, batch(sequences, [(0, 17)]), aligned_arena(model, slots))
    assert [guessed for _, _, guessed in source.guesses] == [set()] * 3  # many rows need none


def test_what_is_not_brought_is_missed() -> None:
    model = model_of("mixtral")
    decoder = on_card(without_experts(model))
    sequences, slots = random_sequences(np.random.default_rng(4), [3], model.shape.vocab)
    inputs, arena = batch(sequences, [(0, 3)]), aligned_arena(model, slots)

    class Forgetful(Source):
        def bring(self, *args: Any) -> Iterator[Wave]:
            yield from list(super().bring(*args))[1:]

    with pytest.raises(AssertionError, match="of layer 0 were not brought"):
        by_layers(model, decoder, Forgetful(model, decoder, 1), inputs, arena)
    with pytest.raises(ValueError, match="experts of layer 0 are not on the card: say who brings them"):
        by_layers(model, decoder, None, inputs, arena)
    with pytest.raises(ValueError, match=r"layers \[0, 1\], or experts of them, are streamed"):
        decoders.forward(decoder, arena, inputs)
