"""Rows that see a window, with or without sinks: against the twin that moves keys within a cache, and bit for bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.counts import counted
from tierd.kernels.rows import Bound

from .bounded import TABLE, Bounded, far, run, sequences, twin
from .decoders import TinyModel, addresses, tiny_model

BOUNDS = st.tuples(st.integers(1, 60), st.just(0) | st.integers(1, 36)).map(lambda pair: Bound(*pair))


@settings(deadline=None, max_examples=counted(200, 8))
@given(st.data())
def test_equals_the_twin(data: st.DataObject) -> None:
    """Shapes, page formats, the layers' own windows, lengths beyond the tables, chunks of any size."""
    page_format = data.draw(st.sampled_from(["fp32", "fp16", "bf16", "k8v8"]))
    heads, kv_heads = data.draw(st.sampled_from([(2, 2), (6, 2), (7, 1)]))
    windows = data.draw(st.sampled_from([(0, 0), (20, 0), (70, 33)]))
    model = tiny_model(
        heads=heads, kv_heads=kv_heads, windows=windows, context=TABLE, page_format=page_format,
        qk_norm=data.draw(st.booleans()), sink_logits=data.draw(st.booleans()),
    )  # fmt: skip
    length = data.draw(st.integers(1, 150))
    (sequence,), slots = sequences(data.draw(st.integers(0, 99)), model, [length], [data.draw(BOUNDS)])
    arena, other = model.arena(slots), model.arena(slots)
    found, start = [], 0
    with model.decoder(far=far) as decoder:
        while start < length:
            stop = min(start + data.draw(st.integers(1, 64)), length)
            found.append(run(decoder, arena, [(sequence, start, stop)]))
            start = stop
    difference = np.abs(np.concatenate(found) - twin(model, other, sequence)).max()
    assert difference < {"fp32": 3e-5, "fp16": 2e-3, "bf16": 2e-2, "k8v8": 5e-3}[page_format]


def in_single_rows(model: TinyModel, sequence: Bounded, slots: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    arena = model.arena(slots)
    with model.decoder(far=far) as decoder:
        rows = [run(decoder, arena, [(sequence, at, at + 1)]) for at in range(len(sequence.tokens))]
    return np.concatenate(rows), arena


@settings(deadline=None, max_examples=counted(60, 3))
@given(st.data())
def test_chunks_and_company_change_no_bit(data: st.DataObject) -> None:
    """Sequences of any bounds, or none, in chunks of any size beside each other, against one row at a time alone."""
    model = tiny_model(
        page_format=data.draw(st.sampled_from(["fp32", "fp16", "k8v4"])), windows=(0, 40), context=TABLE
    )
    lengths = data.draw(st.lists(st.integers(1, 140) | st.integers(280, 340), min_size=2, max_size=2))
    bounds = [data.draw(BOUNDS | st.just(Bound())) for _ in lengths]
    made, slots = sequences(data.draw(st.integers(0, 99)), model, lengths, bounds)
    arena = model.arena(slots)
    chance = random.Random(data.draw(st.integers(0, 999)))
    found: list[list[NDArray[np.float32]]] = [[] for _ in made]
    done = [0] * len(made)
    with model.decoder(max_rows=128, threads=2, far=far) as decoder:
        while any(at < length for at, length in zip(done, lengths, strict=True)):
            spans = []
            for index, sequence in enumerate(made):
                stop = min(done[index] + chance.randint(0, 60), lengths[index])
                if stop > done[index]:
                    spans.append((sequence, done[index], stop))
                    done[index] = stop
            if not spans:
                continue
            rows = run(decoder, arena, spans)
            for sequence, start, stop in spans:
                found[made.index(sequence)].append(rows[: stop - start])
                rows = rows[stop - start :]
    for index, sequence in enumerate(made):
        alone, pages = in_single_rows(model, sequence, slots)
        assert np.array_equal(np.concatenate(found[index]), alone)
        assert np.array_equal(arena[sequence.slots], pages[sequence.slots])


@pytest.mark.parametrize("bound", [Bound(500), Bound(86, 10), Bound(64, 32)])
def test_what_holds_the_whole_sequence_changes_no_bit(bound: Bound) -> None:
    model = tiny_model(context=TABLE, windows=(0, 30))
    (bounded, exact), slots = sequences(3, model, [TABLE, TABLE], [bound, Bound()])
    exact.tokens = bounded.tokens
    arena = model.arena(slots)
    with model.decoder(max_rows=2 * TABLE) as decoder:
        first = run(decoder, arena, [(bounded, 0, TABLE)])
        plain = decoder.forward(
            [arena], np.array(exact.tokens, np.int32), np.arange(TABLE, dtype=np.int32), np.zeros(TABLE, np.int32),
            addresses(arena, np.array(exact.slots)), np.array([0, len(exact.slots)], np.int32),
            np.arange(TABLE, dtype=np.int32),
        )  # fmt: skip
    assert np.array_equal(first, plain)
    assert np.array_equal(arena[bounded.slots], arena[exact.slots])


@pytest.mark.parametrize("bound", [Bound(40), Bound(40, 5), Bound(33, 20)])
def test_pages_out_of_the_window_may_be_given_to_others(bound: Bound) -> None:
    """Everything but the sinks and the window is overwritten before each row; where the table begins changes no bit."""
    model = tiny_model(context=TABLE)
    length = 700
    (sequence,), slots = sequences(5, model, [length], [bound])
    arena = model.arena(slots)
    with model.decoder(max_rows=length, far=far) as decoder:
        whole = run(decoder, arena, [(sequence, 0, length)])
        for at in (bound.sinks + bound.window, 300, 301, 511, 512, 699):
            held = model.arena(slots)
            kept = range((at - bound.window + 1) // 16, at // 16 + 1)
            for page in [*range(-(-bound.sinks // 16)), *kept]:
                held[sequence.slots[page]] = arena[sequence.slots[page]]
            for base in {None, 0}:
                assert np.array_equal(run(decoder, held, [(sequence, at, at + 1)], base)[0], whole[at])


def test_layer_by_layer_gives_the_bits_of_one_pass() -> None:
    model = tiny_model(context=TABLE)
    (sequence,), slots = sequences(6, model, [130], [Bound(40, 20)])
    arena, other = model.arena(slots), model.arena(slots)
    with model.decoder(max_rows=130, far=far) as decoder:
        whole = run(decoder, arena, [(sequence, 0, 130)])
        table, bound = sequence.table(0, 130, None)
        rows = np.arange(130, dtype=np.int32)
        decoder.start(
            np.array(sequence.tokens, np.int32), rows, np.zeros(130, np.int32), np.array([0, len(table)], np.int32),
            rows, bounds=np.array([bound], np.int32),
        )  # fmt: skip
        for layer in range(2):
            decoder.layer(layer, [other], addresses(other, np.array(table)))
        assert np.array_equal(decoder.finish(), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bounds": np.zeros((2, 4), np.int32)}, r"bounds must be contiguous int32 \[1, 4\]"),
        ({"bounds": np.zeros((1, 4), np.int64)}, "bounds must be contiguous int32"),
        ({"bounds": np.array([[-1, 0, 0, 0]], np.int32)}, "must not be negative"),
        ({"bounds": np.array([[0, 4, 1, 0]], np.int32)}, "sinks need a window"),
        ({"bounds": np.array([[20, 17, 1, 0]], np.int32)}, "and pages before the others"),
        ({"bounds": np.array([[90, 10, 1, 0]], np.int32)}, "within the 96 positions"),
        ({"bounds": np.array([[20, 0, 0, 16]], np.int32)}, "a multiple of 256 tokens"),
        ({"bounds": np.array([[0, 0, 0, 8]], np.int32)}, "or of a page without a window"),
        ({"bounds": np.array([[20, 0, 0, 256]], np.int32)}, r"row 0 sees token 0, its pages begin at 256"),
        ({"bounds": np.array([[20, 4, 3, 0]], np.int32)}, "its sequence has 2 pages"),
        ({"positions": np.array([96], np.int32)}, r"positions must lie in 0..95"),
    ],
)  # fmt: skip
def test_bounds_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    model = tiny_model(context=TABLE)
    arena = model.arena(2)
    zero = np.zeros(1, np.int32)
    arguments = {
        "memories": [arena], "tokens": zero, "positions": zero, "row_seq": zero,
        "pages": addresses(arena, np.arange(2)), "page_offsets": np.array([0, 2], np.int32), "logit_rows": zero,
        "bounds": np.array([[20, 4, 1, 0]], np.int32),
    }  # fmt: skip
    with model.decoder() as decoder:
        decoder.forward(**arguments)
        with pytest.raises(ValueError, match=message):
            decoder.forward(**arguments | change)
