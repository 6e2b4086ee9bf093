"""Rows that see some tokens exact and the others packed: against the twin, and bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.counts import counted
from tierd.kernels import reference
from tierd.kernels.cpu.step import CpuDecoder
from tierd.kernels.rows import COPY_FORMAT, Exact, Ladder

from .decoders import Sequence, TinyModel, addresses, batch, random_sequences, tiny_model

if TYPE_CHECKING:
    from tierd.kernels.gpu.decoder import GpuDecoder

Arena = NDArray[np.uint8]
CHUNK = 24


def copies_of(model: TinyModel, slots: int) -> Arena:
    """An arena of exact copies, of which none is there yet: NaN."""
    return np.full((slots, replace(model.layout, format=COPY_FORMAT).record_bytes), 0xFF, np.uint8)


def run(
    decoder: CpuDecoder | GpuDecoder, arena: Arena, copies: Arena, ladder: Ladder,
    spans: list[tuple[Sequence, int, int]], written: Arena | None = None,
) -> NDArray[np.float32]:  # fmt: skip
    """One pass over rows start..stop of some sequences, those of each block as a sequence of their own; all logits.

    `written`: where whole pages before the rows' own blocks are packed to instead.
    """
    parts: list[tuple[Sequence, int, int]] = []
    for sequence, start, stop in spans:
        while start < stop:
            end = min(stop, ladder.block(start) + ladder.last)
            parts.append((sequence, start, end))
            start = end
    tables, exact = [], []
    for sequence, start, stop in parts:
        slots = np.array(sequence.slots[: -(-stop // 16)])
        page = np.arange(len(slots)) * 16
        is_exact = (page < ladder.first) | (page >= ladder.block(start))
        where = addresses(arena, slots)
        tables.append(where if written is None else np.where(is_exact, addresses(written, 0 * slots), where))
        exact.append(np.where(is_exact, addresses(copies, slots), 0))
    positions = np.concatenate([np.arange(start, stop, dtype=np.int32) for _, start, stop in parts])
    return decoder.forward(
        [arena] if written is None else [arena, written],
        np.concatenate([np.array(s.tokens[start:stop], np.int32) for s, start, stop in parts]),
        positions,
        np.repeat(np.arange(len(parts), dtype=np.int32), [stop - start for _, start, stop in parts]),
        np.concatenate(tables),
        np.cumsum([0] + [len(table) for table in tables]).astype(np.int32),
        np.arange(len(positions), dtype=np.int32),
        exact=Exact(np.concatenate(exact), copies),
    )


def forget(copies: Arena, sequence: Sequence, ladder: Ladder, computed: int) -> None:
    """Makes NaN of the copies that no row from `computed` on may see."""
    for place, slot in enumerate(sequence.slots):
        if ladder.first <= place * 16 < ladder.block(computed):
            copies[slot] = 0xFF


ladders = st.builds(Ladder, st.sampled_from([0, 32, 64]), st.sampled_from([32, 64]))


@settings(max_examples=counted(200, 5), deadline=None)
@given(
    ladders, st.sampled_from(["k8v8", "k8v4", "k4v8", "k4v4", "fp8"]), st.integers(0, 3), st.integers(-2, 2),
    st.sampled_from([1, 3]), st.sampled_from([(0, 0), (0, 40)]), st.integers(0, 99),
)  # fmt: skip
def test_rows_are_those_of_the_twin(
    ladder: Ladder, page_format: str, blocks: int, beside: int, group: int, windows: tuple[int, ...], seed: int
) -> None:
    """Positions around the ends of blocks; prompts in chunks, two sequences at once."""
    model = tiny_model(seed=seed, heads=2 * group, windows=windows, page_format=page_format)
    rng = np.random.default_rng(seed)
    stop = max(1, min(158, blocks * ladder.last + beside))
    sequences, slots = random_sequences(rng, [stop, max(1, stop // 2)], model.shape.vocab)
    arena, copies = model.arena(slots), copies_of(model, slots)
    twin_arena, twin_copies = arena.copy(), copies.copy()
    whole = batch(sequences, [(0, len(sequence.tokens)) for sequence in sequences])
    expected = reference.forward(
        model.shape, model.layers, model.embed, model.final_norm, model.head, model.layout, model.cos, model.sin,
        twin_arena, **whole, exact=(twin_copies, ladder),
    )  # fmt: skip
    found: list[list[NDArray[np.float32]]] = [[], []]
    with model.decoder() as decoder:
        for start in range(0, stop, CHUNK):
            spans = [(s, start, min(len(s.tokens), start + CHUNK)) for s in sequences if start < len(s.tokens)]
            logits = run(decoder, arena, copies, ladder, spans)
            ends = np.cumsum([end - first for _, first, end in spans])
            for (sequence, _, end), rows in zip(spans, np.split(logits, ends[:-1]), strict=True):
                found[sequences.index(sequence)].append(rows)
                forget(copies, sequence, ladder, end)
    rows = np.concatenate([np.concatenate(parts) for parts in found])
    # A code may be rounded the other way in the twin, whose sums go in another order.
    torch.testing.assert_close(torch.from_numpy(rows), expected, atol=0.05, rtol=0.02)
    assert np.abs(rows - expected.numpy()).mean() < 2e-3


@pytest.mark.parametrize("page_format", ["k8v8", "k4v4"])
def test_bits_do_not_depend_on_chunks_company_or_threads(page_format: str) -> None:
    model, ladder = tiny_model(page_format=page_format), Ladder(32, 64)
    sequences, slots = random_sequences(np.random.default_rng(3), [150, 140], model.shape.vocab)
    one, other = sequences
    with model.decoder(max_rows=160) as decoder, model.decoder(threads=1) as alone:
        arena, copies = model.arena(slots), copies_of(model, slots)
        whole = run(decoder, arena, copies, ladder, [(one, 0, 150)])
        again, its_copies, rows = model.arena(slots), copies_of(model, slots), []
        for at in range(150):
            if at == 40:
                run(alone, again, its_copies, ladder, [(other, 0, 60)])
            beside = [(other, at, at + 1)] if 60 <= at < 140 else []
            rows.append(run(alone, again, its_copies, ladder, [(one, at, at + 1), *beside])[:1])
            forget(its_copies, one, ladder, at + 1)
    assert (np.concatenate(rows) == whole).all()
    pages = one.slots[:9]
    payload = model.layout.payload_bytes
    assert (again[pages, :payload] == arena[pages, :payload]).all()


def test_what_was_restored_goes_on_with_the_same_bits() -> None:
    """Of a known prefix the packed pages are there alone. Its first tokens and those of the last block are computed
    once more, for their copies, and nothing is written into its pages."""
    model, ladder = tiny_model(page_format="k8v4"), Ladder(32, 64)
    (one,), slots = random_sequences(np.random.default_rng(4), [150], model.shape.vocab)
    with model.decoder(max_rows=160) as decoder:
        arena, copies = model.arena(slots), copies_of(model, slots)
        cold = run(decoder, arena, copies, ladder, [(one, 0, 144)])
        later = run(decoder, arena, copies, ladder, [(one, 144, 150)])
        before, nothing = arena.copy(), copies_of(model, slots)
        computed = run(decoder, arena, nothing, ladder, [(one, 0, 32), (one, 128, 144)], model.arena(1))
        assert (arena == before).all()
        assert (computed == np.concatenate((cold[:32], cold[128:144]))).all()
        assert (run(decoder, arena, nothing, ladder, [(one, 144, 150)]) == later).all()


def test_pages_without_copies_are_read_as_ever() -> None:
    model = tiny_model(page_format="k8v8")
    sequences, slots = random_sequences(np.random.default_rng(5), [70, 40], model.shape.vocab)
    inputs = batch(sequences, [(0, 70), (0, 0)])
    table = inputs.pop("page_table")
    with model.decoder(max_rows=80) as decoder:
        arena = model.arena(slots)
        plain = decoder.forward([arena], pages=addresses(arena, table), **inputs)
        none = Exact(np.zeros(len(table), np.int64), copies_of(model, 1))
        assert (decoder.forward([arena], pages=addresses(arena, table), **inputs, exact=none) == plain).all()


def test_beside_rows_with_a_window() -> None:
    """One pass over a sequence with copies and another with a bound: each as if it were alone."""
    model, ladder = tiny_model(page_format="k4v4"), Ladder(32, 64)
    (one, other), slots = random_sequences(np.random.default_rng(7), [90, 50], model.shape.vocab)
    bound = np.array([[0, 0, 0, 0], [20, 0, 0, 0]], np.int32)
    with model.decoder(max_rows=160) as decoder:
        arena, copies = model.arena(slots), copies_of(model, slots)
        run(decoder, arena, copies, ladder, [(one, 0, 64)])
        together = model.arena(slots)
        together[:] = arena
        its_copies = copies.copy()
        alone = run(decoder, arena, copies, ladder, [(one, 64, 90)])
        inputs = batch([one, other], [(64, 90), (0, 50)])
        table = inputs.pop("page_table")
        page = np.arange(len(one.slots)) * 16
        of_one = np.where((page < 32) | (page >= 64), addresses(its_copies, np.array(one.slots)), 0)
        exact = Exact(np.concatenate((of_one, np.zeros(len(other.slots), np.int64))), its_copies)
        both = decoder.forward([together], pages=addresses(together, table), **inputs, bounds=bound, exact=exact)
        inputs = batch([other], [(0, 50)])
        table = inputs.pop("page_table")
        windowed = decoder.forward([arena], pages=addresses(arena, table), **inputs, bounds=bound[1:])
    assert (both[:26] == alone).all()
    assert (both[26:] == windowed).all()


def test_copies_that_do_not_fit_are_refused() -> None:
    model = tiny_model(page_format="k8v8")
    (one,), slots = random_sequences(np.random.default_rng(6), [70], model.shape.vocab)
    inputs = batch([one], [(0, 70)])
    arena, copies = model.arena(slots), copies_of(model, 5)
    pages = addresses(arena, inputs.pop("page_table"))
    good = addresses(copies, np.arange(5))
    with model.decoder(max_rows=80) as decoder:
        for exact, message in (
            (good[:4], "page_offsets speak of 5 pages, got 4 exact ones"),
            (np.where(np.arange(5) == 1, 0, good), "of 2 pages that are read together one has an exact copy"),
            (good + 4096, "do not lie within one of the memories"),
            (good.astype(np.int32), "exact pages must be a contiguous int64 vector"),
        ):
            with pytest.raises(ValueError, match=message):
                decoder.forward([arena], pages=pages, **inputs, exact=Exact(exact, copies))
        with pytest.raises(ValueError, match="rows with a bound have no exact copies"):
            bounds = np.array([[64, 0, 0, 0]], np.int32)
            decoder.forward([arena], pages=pages, **inputs, bounds=bounds, exact=Exact(good, copies))
        assert (arena == 0xFF).all()
