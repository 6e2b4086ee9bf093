"""Weights that lie elsewhere in every pass: the bits of a decoder that has them all."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tierd.kernels.cpu.step import CpuDecoder
from tierd.kernels.cpu.weights import Part, PlacedLayer, Rows, describe_panels, panel_sections
from tierd.kernels.packing import PANEL_ROWS, PackedMatrix, WeightFormat, panels

from .decoders import TinyModel, batch, forward, random_sequences, tiny_model


def cut(matrix: PackedMatrix, first: int, count: int, kept: list[object]) -> NDArray[Any]:
    """Some panels of a matrix, each section copied to memory of its own."""
    pieces = [
        matrix.data[offset + first * size : offset + (first + count) * size].copy()
        for _, offset, size in panel_sections(matrix.format, matrix.rows, matrix.cols)
    ]
    kept += pieces
    return describe_panels(matrix.format, count, matrix.cols, [piece.ctypes.data for piece in pieces])


class Streamed:
    """A decoder without weights of its own; each pass hands them in, from copies made for it."""

    def __init__(self, model: TinyModel, layers: list[int], ends: bool = True) -> None:
        self.model = model
        self.streamed = layers
        self.ends = ends
        self.kept: list[object] = []
        resident = [None if index in layers else layer for index, layer in enumerate(model.layers)]
        self.decoder = CpuDecoder(
            model.shape, resident, None if ends else model.embed, model.final_norm, None if ends else model.head,
            model.layout, model.cos, model.sin, 64, 2,
        )  # fmt: skip

    def rows(self, tokens: NDArray[np.int32]) -> Rows:
        matrix = self.model.embed
        needed, places = np.unique(tokens // PANEL_ROWS, return_inverse=True)
        block: list[NDArray[np.uint8]] = []
        for _, offset, size in panel_sections(matrix.format, matrix.rows, matrix.cols):
            block.append(np.concatenate([matrix.data[offset + n * size : offset + (n + 1) * size] for n in needed]))
        self.kept += block
        described = describe_panels(matrix.format, len(needed), matrix.cols, [part.ctypes.data for part in block])
        return Rows((places * PANEL_ROWS + tokens % PANEL_ROWS).astype(np.int32), described)

    def placed(self, index: int) -> PlacedLayer | None:
        if index not in self.streamed:
            return None
        layer = self.model.layers[index]
        copies: dict[str, Any] = {}
        for field in dataclasses.fields(layer):
            value = getattr(layer, field.name)
            if isinstance(value, PackedMatrix):
                value = dataclasses.replace(value, data=value.data.copy())
            copies[field.name] = value
        return self.decoder.weights.describe(index, dataclasses.replace(layer, **copies))

    def parts(self, size: int) -> list[Part]:
        head = self.model.head
        total = panels(head.rows)
        return [
            Part(first, cut(head, first, min(size, total - first), self.kept)) for first in range(0, total, size)
        ]

    def run(self, arena: NDArray[np.uint8], inputs: dict[str, Any], part_panels: int = 3) -> NDArray[np.float32]:
        inputs = dict(inputs)
        pages = arena.ctypes.data + inputs.pop("page_table").astype(np.int64) * self.model.layout.record_bytes
        self.decoder.start(**inputs, rows=self.rows(inputs["tokens"]) if self.ends else None)
        for index in range(self.model.shape.num_layers):
            self.decoder.layer(index, [arena], pages, self.placed(index))
        return self.decoder.finish(self.parts(part_panels) if self.ends else None)


@pytest.mark.parametrize("format", WeightFormat)
@pytest.mark.parametrize("layers", [[0, 1, 2], [1], []])
def test_streamed_weights_give_the_bits_of_resident_ones(format: WeightFormat, layers: list[int]) -> None:
    model = tiny_model(
        format=format, embed_format=format, windows=(0, 0, 0), biases=True, qk_norm=True, tied=False,
        hidden=256, heads=8, intermediate=256,  # whole blocks of any format
    )  # fmt: skip
    sequences, slots = random_sequences(np.random.default_rng(1), [23, 4], model.shape.vocab)
    inputs = batch(sequences, [(0, 23), (0, 4)])
    arena, other = model.arena(slots), model.arena(slots)
    with model.decoder() as decoder:
        wanted = forward(decoder, arena, inputs)
    streamed = Streamed(model, layers)
    with streamed.decoder:
        assert np.array_equal(streamed.run(other, inputs), wanted)
        assert np.array_equal(other, arena)
        assert np.array_equal(streamed.run(other, inputs, part_panels=1), wanted)


def test_a_hidden_size_that_fills_no_panels() -> None:
    model = tiny_model(hidden=50, intermediate=45, vocab=33, biases=True, tied=False)
    sequences, slots = random_sequences(np.random.default_rng(2), [20], model.shape.vocab)
    inputs = batch(sequences, [(0, 20)])
    with model.decoder() as decoder:
        wanted = forward(decoder, model.arena(slots), inputs)
    streamed = Streamed(model, [0, 1])
    with streamed.decoder:
        assert np.array_equal(streamed.run(model.arena(slots), inputs), wanted)


def test_a_pass_without_logits_asks_for_no_head() -> None:
    model = tiny_model()
    sequences, slots = random_sequences(np.random.default_rng(3), [5], model.shape.vocab)
    inputs = batch(sequences, [(0, 5)]) | {"logit_rows": np.zeros(0, np.int32)}
    streamed = Streamed(model, [0])
    with streamed.decoder as decoder:
        arena = model.arena(slots)
        pages = arena.ctypes.data + inputs.pop("page_table").astype(np.int64) * model.layout.record_bytes
        decoder.start(**inputs, rows=streamed.rows(inputs["tokens"]))
        for index in range(2):
            decoder.layer(index, [arena], pages, streamed.placed(index))
        untouched = iter(())
        assert decoder.finish(untouched).shape == (0, model.shape.vocab)


def test_a_layer_may_come_and_go() -> None:
    model = tiny_model()
    sequences, slots = random_sequences(np.random.default_rng(4), [9], model.shape.vocab)
    inputs = batch(sequences, [(0, 9)])
    streamed = Streamed(model, [0, 1], ends=False)
    with streamed.decoder as decoder:
        wanted = streamed.run(model.arena(slots), inputs)
        for index in range(2):
            decoder.weights.keep(decoder.weights.describe(index, model.layers[index]))
        assert np.array_equal(forward(decoder, model.arena(slots), inputs), wanted)
        decoder.weights.forget(1)
        with pytest.raises(ValueError, match=r"layers \[1\] are streamed"):
            forward(decoder, model.arena(slots), inputs)


def test_what_is_missing_or_wrong_is_refused() -> None:
    model = tiny_model(vocab=100)
    sequences, slots = random_sequences(np.random.default_rng(5), [3], model.shape.vocab)
    inputs = batch(sequences, [(0, 3)])
    streamed, arena = Streamed(model, [0, 1]), model.arena(slots)
    with streamed.decoder as decoder:
        with pytest.raises(ValueError, match="are streamed"):
            forward(decoder, arena, inputs)
        pages = arena.ctypes.data + inputs.pop("page_table").astype(np.int64) * model.layout.record_bytes
        rows = streamed.rows(inputs["tokens"])
        with pytest.raises(ValueError, match="the embedding is streamed"):
            decoder.start(**inputs)
        for wrong in (rows.tokens[:2], rows.tokens.astype(np.int64)):
            with pytest.raises(ValueError, match="3 tokens, but"):
                decoder.start(**inputs, rows=rows._replace(tokens=wrong))
        with pytest.raises(ValueError, match="rows of the embedding must lie in"):
            decoder.start(**inputs, rows=rows._replace(tokens=rows.tokens + 1000))
        decoder.start(**inputs, rows=rows)
        for placed in (None, streamed.placed(1)):
            with pytest.raises(ValueError, match="layer 0 is streamed"):
                decoder.layer(0, [arena], pages, placed)
        for index in range(2):
            decoder.layer(index, [arena], pages, streamed.placed(index))
        whole = streamed.parts(3)
        with pytest.raises(ValueError, match="the head is streamed"):
            decoder.finish()
        with pytest.raises(ValueError, match="panel 3 of the head after 0 panels"):
            decoder.finish(whole[1:])
        with pytest.raises(ValueError, match="end at panel 3"):
            decoder.finish(whole[:1])
        with pytest.raises(ValueError, match="more than the head has"):
            decoder.finish([*whole, Part(7, whole[0].matrix)])
        assert decoder.finish(whole).shape == (3, 100)
    with pytest.raises(ValueError, match="head must be 100 x 96"):
        model.decoder().set_ends(model.embed, model.layers[0].o)
