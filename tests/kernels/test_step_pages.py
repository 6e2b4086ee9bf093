"""step: pages wherever they lie, passes by layers, and which addresses and turns are refused."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.kernels.packing import WeightFormat

from .decoders import Sequence, addresses, batch, forward, random_sequences, tiny_model


def _pages_of(arena: np.ndarray, *offsets_bytes: int) -> np.ndarray:
    return arena.ctypes.data + np.array(offsets_bytes, np.int64)


def test_pages_that_do_not_fit_are_refused() -> None:
    """Every address is looked at before the first row is computed: the arena, stale before, stays so."""
    model = tiny_model()
    arena = model.arena(2)
    record = arena.shape[1]
    inputs = batch([Sequence([0] * 20, [0, 0])], [(0, 20)])
    inputs.pop("page_table")
    good = _pages_of(arena, 0, record)
    with model.decoder() as decoder:
        for pages, message in (
            (_pages_of(arena, 0, record + model.layout.element_bytes + record), "page 1: .* do not lie"),
            (_pages_of(arena, 0, 2 * record - model.layout.payload_bytes + 4), "page 1: .* do not lie"),
            (_pages_of(arena, -4, 0), "page 0: .* do not lie"),
            (np.array([-record, good[0]]), "page 0: .* do not lie"),
            (np.array([good[0], np.iinfo(np.int64).max - 3]), "page 1: .* do not lie"),
            (np.array([0, good[0]]), "page 0: .* do not lie"),
            (_pages_of(arena, 0, 2), "aligned to 4 bytes"),
            (_pages_of(arena, 0), "page_offsets speak of 2 pages, got 1"),
            (good.astype(np.int32), "pages must be a contiguous int64 vector, got int32"),
            (good.astype(np.uint64), "pages must be a contiguous int64 vector, got uint64"),
            (good.reshape(2, 1), "pages must be a contiguous int64 vector"),
            (np.repeat(good, 2)[::2], "pages must be a contiguous int64 vector"),
        ):
            with pytest.raises(ValueError, match=message):
                decoder.forward([arena], pages=pages, **inputs)
        with pytest.raises(ValueError, match="page 0: .* do not lie"):
            decoder.forward([], pages=good, **inputs)
        with pytest.raises(ValueError, match="page 1: .* do not lie"):  # two halves of a record are no record
            decoder.forward([arena[0], arena[1, :4096], arena[1, 4096:]], pages=good, **inputs)
        assert (arena == 0xFF).all()
        last = _pages_of(arena, 0, 2 * record - model.layout.payload_bytes)  # not where a slot starts, but whole
        assert np.isfinite(decoder.forward([arena], pages=last, **inputs)).all()


def test_memories_that_do_not_fit_are_refused() -> None:
    model = tiny_model()
    inputs = batch([Sequence([0], [0])], [(0, 1)])
    frozen = model.arena(1)
    frozen.flags.writeable = False
    with model.decoder() as decoder:
        for arena in (frozen, model.arena(1).view(np.int8), model.arena(2)[:, ::2]):
            with pytest.raises(ValueError, match="memories must be writable contiguous uint8 arrays"):
                forward(decoder, arena, inputs)
        with pytest.raises(ValueError, match="do not lie"):
            forward(decoder, np.zeros((1, 4096), np.uint8), inputs)


@pytest.mark.parametrize("page_format", ["fp32", "fp16", "k8v4"])
def test_pages_in_any_memory_and_passes_by_layers_give_the_same_bits(page_format: str) -> None:
    """Decode and prefill rows in one batch: pages in one arena; scattered over two; the same layer by layer; and
    layer by layer with the full pages copied, slice by slice, to a staging buffer that holds one layer at a time."""
    model = tiny_model(page_format=page_format, format=WeightFormat.INT4_G32, qk_norm=True, windows=(0, 20, 0))
    layout, rng = model.layout, np.random.default_rng(6)
    sequences, slots = random_sequences(rng, [70, 33, 18], model.shape.vocab)
    earlier, inputs = batch(sequences, [(0, 69), (0, 20), (0, 1)]), batch(sequences, [(69, 70), (20, 33), (1, 18)])
    with model.decoder(max_rows=100) as decoder:
        arena = model.arena(slots)
        forward(decoder, arena, earlier)
        before = arena.copy()
        expected = forward(decoder, arena, inputs)

        # Slot s of the one arena lies at place order[s] of two.
        arenas, order = [model.arena(slots), model.arena(slots)], rng.permutation(2 * slots)[:slots]
        at = np.where(order < slots, addresses(arenas[0], order), addresses(arenas[1], order - slots))
        homes = [arenas[place // slots][place % slots] for place in order]
        for home, record in zip(homes, before, strict=True):
            home[:] = record
        table = inputs.pop("page_table")
        logits = decoder.forward(arenas, pages=at[table], **inputs)
        assert np.array_equal(logits, expected)
        assert np.array_equal(np.stack(homes), arena)

        for staged in (np.zeros(0, np.int64), table[:4]):  # the first sequence's full pages: read, not written
            for home, record in zip(homes, before, strict=True):
                home[:] = record
            buffer = np.zeros((len(staged) + 1, layout.layer_bytes), np.uint8)
            decoder.start(**inputs)
            for index in range(model.shape.num_layers):
                pages = at.copy()
                own = slice(index * layout.layer_bytes, (index + 1) * layout.layer_bytes)
                for place, slot in enumerate(staged):
                    buffer[place] = homes[slot][own]
                    homes[slot][own] = 0xFF  # nothing but the copy may be read
                    pages[slot] = buffer[place].ctypes.data - index * layout.layer_bytes
                decoder.layer(index, [*arenas, buffer], pages[table])
            assert np.array_equal(decoder.finish(), expected)
            kept = [s for s in range(slots) if s not in staged]
            assert np.array_equal(np.stack(homes)[kept], arena[kept])


def test_sequences_may_have_pages_in_common_in_some_layers_alone() -> None:
    """Common pages of the arena in one layer, a staged copy for each sequence in the next, one for both in the last."""
    model = tiny_model(windows=(0, 0, 0), context=400)
    layout, rng, common = model.layout, np.random.default_rng(9), list(range(16))
    tokens = rng.integers(0, model.shape.vocab, 256).tolist()
    sequences = [Sequence([*tokens, s, 7], [*common, 16 + s]) for s in range(3)]
    arena = model.arena(19)
    with model.decoder(max_rows=260) as decoder:
        for s in sequences:
            forward(decoder, arena, batch([s], [(0, 257)]))
        inputs = batch(sequences, [(257, 258)] * 3)
        expected = np.concatenate([forward(decoder, arena, batch([s], [(257, 258)])) for s in sequences])
        table = inputs.pop("page_table")
        copies = np.full((3, 16, layout.layer_bytes), 0xFF, np.uint8)
        decoder.start(**inputs)
        for index, staged in enumerate(((), (0, 1, 2), (0,))):
            pages, own = addresses(arena, table).reshape(3, 17), slice(index * layout.layer_bytes, None)
            kept = arena[:16].copy()
            for s in staged:
                copies[s] = arena[:16, own][:, : layout.layer_bytes]
                for reader in range(3) if len(staged) == 1 else (s,):
                    pages[reader, :16] = addresses(copies[s], np.arange(16)) - index * layout.layer_bytes
            if staged:
                arena[:16] = 0xFF  # nothing but the copies may be read
            decoder.layer(index, [arena, copies], pages.reshape(-1))
            arena[:16] = kept
            copies[:] = 0xFF
        assert np.array_equal(decoder.finish(), expected)


def test_passes_by_layers_refuse_what_is_out_of_turn() -> None:
    model = tiny_model(windows=(0, 0, 0))
    inputs = batch([Sequence([1, 2], [0])], [(0, 2)])
    arena = model.arena(1)
    pages = addresses(arena, inputs.pop("page_table"))
    with model.decoder() as decoder:
        with pytest.raises(ValueError, match="no pass is open"):
            decoder.layer(0, [arena], pages)
        with pytest.raises(ValueError, match="no pass is open"):
            decoder.finish()
        decoder.start(**inputs)
        for index in (-1, 1, 3):
            with pytest.raises(ValueError, match=f"layer {index} of 3 after 0 layers"):
                decoder.layer(index, [arena], pages)
        decoder.layer(0, [arena], pages)
        with pytest.raises(ValueError, match="layer 0 of 3 after 1 layers"):
            decoder.layer(0, [arena], pages)
        with pytest.raises(ValueError, match="has 1 of 3 layers"):
            decoder.finish()
        for index in (1, 2):
            decoder.layer(index, [arena], pages)
        with pytest.raises(ValueError, match="layer 3 of 3 after 3 layers"):
            decoder.layer(3, [arena], pages)
        assert decoder.finish().shape == (2, model.shape.vocab)
        with pytest.raises(ValueError, match="no pass is open"):
            decoder.finish()


def test_a_layer_with_bad_pages_can_be_tried_again() -> None:
    """Of a page only the layer's slice is checked, and a refusal leaves the pass where it was."""
    model = tiny_model()
    inputs = batch([Sequence([1, 2], [0])], [(0, 2)])
    arena = model.arena(1)
    slice_bytes = model.layout.layer_bytes
    memory = np.zeros(slice_bytes, np.uint8)
    with model.decoder() as decoder:
        expected = forward(decoder, arena, inputs)
        inputs.pop("page_table")
        decoder.start(**inputs)
        for index in range(2):
            memory[:] = 0xFF
            right = memory.ctypes.data - index * slice_bytes
            for address in (right + 4, right - 4, right + slice_bytes, -1 - index * slice_bytes - 3):
                with pytest.raises(ValueError, match="do not lie within one of the memories"):
                    decoder.layer(index, [memory], np.array([address]))
            decoder.layer(index, [memory], np.array([right]))
            assert np.array_equal(memory, arena[0, index * slice_bytes : (index + 1) * slice_bytes])
        assert np.array_equal(decoder.finish(), expected)


def test_a_pass_that_is_not_finished_is_dropped() -> None:
    model = tiny_model()
    first, second = batch([Sequence([1, 2], [0])], [(0, 2)]), batch([Sequence([5], [1])], [(0, 1)])
    arena = model.arena(2)
    with model.decoder() as decoder:
        expected = forward(decoder, arena, second)
        dropped = {name: array for name, array in first.items() if name != "page_table"}
        decoder.start(**dropped)
        assert np.array_equal(forward(decoder, arena, second), expected)
        with pytest.raises(ValueError, match="no pass is open"):
            decoder.finish()
        decoder.start(**dropped)
        table = second.pop("page_table")
        decoder.start(**second)
        for index in range(2):
            decoder.layer(index, [arena], addresses(arena, table))
        assert np.array_equal(decoder.finish(), expected)


def test_what_was_checked_at_the_start_does_not_change_before_the_finish() -> None:
    model = tiny_model()
    inputs = batch([Sequence([1, 2], [0])], [(0, 2)])
    arena = model.arena(1)
    with model.decoder() as decoder:
        expected = forward(decoder, arena, inputs)
        pages = addresses(arena, inputs.pop("page_table"))
        decoder.start(**inputs)
        for array in inputs.values():
            array[:] = 2**30
        for index in range(2):
            decoder.layer(index, [arena], pages)
        assert np.array_equal(decoder.finish(), expected)
