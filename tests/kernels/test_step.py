"""step: the whole pass against the reference, its bits under every cut of the work, and what it refuses."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.kernels import reference
from tierd.kernels.cpu.step import CpuDecoder, DecoderShape
from tierd.kernels.layout import PAGE_FORMATS, PageLayout
from tierd.kernels.packing import WeightFormat

from .decoders import Sequence, TinyModel, batch, forward, random_sequences, tiny_model

LENGTHS = [37, 5, 90, 1]


def reference_logits(model: TinyModel, arena: np.ndarray, inputs: dict[str, np.ndarray]) -> np.ndarray:
    parts = [getattr(model, field.name) for field in dataclasses.fields(model)]
    return reference.forward(*parts, arena, **inputs).numpy()


WIDE: dict[str, Any] = {"heads": 8, "hidden": 256, "intermediate": 256}  # columns in blocks of 256


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({}, 1e-5),
        ({"biases": True}, 1e-5),
        ({"qk_norm": True}, 1e-5),
        ({"tied": False}, 1e-5),
        ({"windows": (20, 0, 7)}, 1e-5),
        ({"format": WeightFormat.INT4_G32, "embed_format": WeightFormat.INT8_G32}, 1e-3),
        ({"format": WeightFormat.INT8, "embed_format": WeightFormat.INT4_G32}, 1e-3),
        ({"format": WeightFormat.BF16, "embed_format": WeightFormat.INT8}, 1e-5),
        ({**WIDE, "format": WeightFormat.INT4_K, "embed_format": WeightFormat.INT8_K}, 1e-3),
        ({**WIDE, "format": WeightFormat.INT5_K, "embed_format": WeightFormat.INT4_K}, 1e-3),
        ({"head_dim": 80, "heads": 7, "kv_heads": 1, "hidden": 50, "intermediate": 45, "vocab": 33}, 1e-5),
        ({"head_dim": 16, "heads": 4, "kv_heads": 4, "hidden": 8, "intermediate": 9, "biases": True}, 1e-5),
        # A value of K or V that rounds the other way moves a logit by about a unit of the page's format.
        ({"page_format": "fp16"}, 1e-3),
        ({"page_format": "bf16"}, 1e-2),
        ({"page_format": "fp8"}, 1e-2),
        # One of 16 steps would move it by more than an error does: formats of 4 bits are tested in test_pages.py.
        ({"page_format": "k8v8", "qk_norm": True, "windows": (20, 0)}, 3e-3),
        ({"page_format": "k8v8", "head_dim": 80, "heads": 7, "kv_heads": 1}, 3e-3),
    ],
)
def test_matches_the_reference(options: dict[str, Any], bound: float) -> None:
    model = tiny_model(**options)
    sequences, slots = random_sequences(np.random.default_rng(1), LENGTHS, model.shape.vocab)
    inputs = batch(sequences, [(0, n) for n in LENGTHS])
    arena, other = model.arena(slots), model.arena(slots)
    with model.decoder(max_rows=sum(LENGTHS)) as decoder:
        logits = forward(decoder, arena, inputs)
    assert logits.shape == (sum(LENGTHS), model.shape.vocab)
    assert np.abs(logits - reference_logits(model, other, inputs)).max() < bound
    if model.layout.format == "fp32":
        payload = slice(0, model.layout.payload_bytes)
        ours, theirs = (a[:, payload].copy().view(np.float32) for a in (arena, other))
        assert np.array_equal(np.isnan(ours), np.isnan(theirs))  # the same cells were written, and no others
        assert np.nanmax(np.abs(ours - theirs)) < bound


@pytest.mark.parametrize("page_format", list(PAGE_FORMATS))
def test_decoding_token_by_token_gives_the_bits_of_one_prefill(page_format: str) -> None:
    model = tiny_model(page_format=page_format, format=WeightFormat.INT4_G32, biases=True, qk_norm=True)
    sequences, slots = random_sequences(np.random.default_rng(2), [40], model.shape.vocab)
    with model.decoder() as decoder:
        whole_pages, step_pages = model.arena(slots), model.arena(slots)
        whole = forward(decoder, whole_pages, batch(sequences, [(0, 40)]))
        steps = [forward(decoder, step_pages, batch(sequences, [(i, i + 1)]))[0] for i in range(40)]
    assert np.array_equal(np.stack(steps), whole)
    assert np.array_equal(step_pages, whole_pages)


def test_long_sequences_give_the_same_bits_however_threads_share_them() -> None:
    """Past a segment of attention one row is the work of several threads; in a prefill it is that of one."""
    length = 600
    model = tiny_model(heads=3, kv_heads=1, windows=(0, 300), context=length)
    sequences, slots = random_sequences(np.random.default_rng(7), [length], model.shape.vocab)
    arena = model.arena(slots)
    with model.decoder(max_rows=length, threads=1) as decoder:
        whole = forward(decoder, arena, batch(sequences, [(0, length)]))
    before = arena.copy()
    with model.decoder(max_rows=length, threads=3) as decoder:
        for first, stop in ((255, 256), (256, 257), (250, 262), (511, 513), (550, 600), (599, 600), (0, 600)):
            assert np.array_equal(forward(decoder, arena, batch(sequences, [(first, stop)])), whole[first:stop])
    assert np.array_equal(arena, before)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_cut_of_the_work_gives_the_same_bits(data: st.DataObject) -> None:
    """Sequences computed whole on one thread, against mixed chunks in any order on some threads."""
    model = _models()[data.draw(st.integers(0, len(_models()) - 1))]
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    sequences, slots = random_sequences(np.random.default_rng(len(lengths)), lengths, model.shape.vocab)
    expected = []
    with model.decoder(threads=1) as decoder:
        for sequence in sequences:
            inputs = batch([sequence], [(0, len(sequence.tokens))])
            expected.append(forward(decoder, model.arena(slots), inputs))
    done = [0] * len(lengths)
    arena = model.arena(slots)
    with model.decoder(max_rows=240, threads=data.draw(st.integers(1, 3))) as decoder:
        while done != lengths:
            spans = [
                (first, first + data.draw(st.integers(0, length - first)))
                for first, length in zip(done, lengths, strict=True)
            ]
            if all(first == stop for first, stop in spans):
                spans = list(zip(done, lengths, strict=True))
            logits = forward(decoder, arena, batch(sequences, spans))
            parts = [rows[first:stop] for rows, (first, stop) in zip(expected, spans, strict=True)]
            assert np.array_equal(logits, np.concatenate(parts))
            done = [stop for _, stop in spans]


def _models() -> list[TinyModel]:
    return [
        tiny_model(format=WeightFormat.INT4_G32, embed_format=WeightFormat.INT8_G32, page_format="fp16"),
        tiny_model(**WIDE, format=WeightFormat.INT5_K, embed_format=WeightFormat.INT8_K),
        tiny_model(windows=(9, 0), biases=True, qk_norm=True, tied=False),
        tiny_model(heads=7, kv_heads=1, head_dim=64, format=WeightFormat.INT8, page_format="bf16"),
        tiny_model(heads=7, kv_heads=1, head_dim=64, page_format="k8v4"),
        tiny_model(heads=3, kv_heads=3, page_format="k4v8", windows=(20, 0)),
    ]


def test_stale_memory_has_no_influence() -> None:
    model = tiny_model()
    sequences, slots = random_sequences(np.random.default_rng(3), [33], model.shape.vocab)
    inputs = batch(sequences, [(0, 33)])
    with model.decoder() as decoder:
        poisoned = forward(decoder, model.arena(slots, 0xFF), inputs)
        assert np.array_equal(forward(decoder, model.arena(slots, 0), inputs), poisoned)
    assert np.isfinite(poisoned).all()


def test_shared_pages_serve_two_sequences() -> None:
    """A second sequence starts on the first one's full pages: its rows give the bits of a cold run."""
    model = tiny_model(page_format="fp16")
    first = Sequence(list(range(40)), [4, 1, 3])
    second = Sequence([*range(32), 7, 7, 7], [4, 1, 0])
    with model.decoder() as decoder:
        arena = model.arena(6)
        forward(decoder, arena, batch([first], [(0, 40)]))
        warm = forward(decoder, arena, batch([first, second], [(40, 40), (32, 35)]))
        cold = forward(decoder, model.arena(6), batch([second], [(0, 35)]))
    assert np.array_equal(warm, cold[32:])


@pytest.mark.parametrize("page_format", ["fp32", "fp16", "k8v8", "k4v4"])
def test_sequences_with_common_segments_give_the_bits_of_each_alone(page_format: str) -> None:
    """Decode and prefill rows of sequences that branch off one another, within segments and at their ends; the windows
    of the second layer start anywhere."""
    model = tiny_model(heads=3, kv_heads=1, windows=(0, 300, 0), page_format=page_format, context=800)
    rng, free = np.random.default_rng(8), iter(range(400))
    sequences: list[Sequence] = []
    # tokens, and the pages that the sequence before it has too
    for length, pages in ((790, 0), (513, 32), (600, 32), (785, 37), (700, 33), (560, 16), (270, 16), (40, 0)):
        before = sequences[-1] if sequences else Sequence([], [])
        tokens = before.tokens[: 16 * pages] + rng.integers(0, 100, length - 16 * pages).tolist()
        slots = before.slots[:pages] + [next(free) for _ in range(-(-length // 16) - pages)]
        sequences.append(Sequence(tokens, slots))
    lengths = [len(sequence.tokens) for sequence in sequences]
    new_rows = [1, 1, 1, 21, 1, 3, 1, 40]
    arena = model.arena(next(free))
    with model.decoder(max_rows=800, threads=1) as decoder:
        expected = [
            forward(decoder, arena, batch([sequence], [(0, length)]))[-count:]
            for sequence, length, count in zip(sequences, lengths, new_rows, strict=True)
        ]
    before_all = arena.copy()
    together = batch(sequences, [(n - count, n) for n, count in zip(lengths, new_rows, strict=True)])
    for threads in (1, 3):
        with model.decoder(max_rows=800, threads=threads) as decoder:
            assert np.array_equal(forward(decoder, arena, together), np.concatenate(expected))
            assert np.array_equal(arena, before_all)
            for some in ([0, 1], [3, 5], [6, 0, 1, 2]):  # what a pass leaves behind is nothing to the next one
                few = batch([sequences[s] for s in some], [(lengths[s] - 1, lengths[s]) for s in some])
                assert np.array_equal(forward(decoder, arena, few), np.stack([expected[s][-1] for s in some]))


def test_only_the_wanted_logits_come_back_in_their_order() -> None:
    model = tiny_model()
    sequences, slots = random_sequences(np.random.default_rng(4), [20], model.shape.vocab)
    inputs = batch(sequences, [(0, 20)])
    with model.decoder() as decoder:
        every = forward(decoder, model.arena(slots), inputs)
        some = np.array([19, 3, 3], np.int32)
        assert np.array_equal(forward(decoder, model.arena(slots), {**inputs, "logit_rows": some}), every[some])
        none = {**inputs, "logit_rows": np.zeros(0, np.int32)}
        assert forward(decoder, model.arena(slots), none).shape == (0, model.shape.vocab)


def test_whoever_is_asked_between_layers_may_end_a_pass() -> None:
    model = tiny_model()
    sequences, slots = random_sequences(np.random.default_rng(5), [20], model.shape.vocab)
    inputs = batch(sequences, [(0, 20)])
    asked: list[int] = []

    def refuse_late() -> None:
        asked.append(1)
        if len(asked) == model.shape.num_layers:
            raise InterruptedError

    with model.decoder() as decoder:
        whole = forward(decoder, model.arena(slots), inputs)
        with pytest.raises(InterruptedError):
            forward(decoder, model.arena(slots), inputs, refuse_late)
        asked.clear()
        assert np.array_equal(forward(decoder, model.arena(slots), inputs, lambda: asked.append(1)), whole)
        assert len(asked) == model.shape.num_layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [0, 100]}, "tokens must lie in 0..99"),
        ({"tokens": [0, -1]}, "tokens must lie"),
        ({"tokens": [0]}, "1 tokens, but 2 positions"),
        ({"tokens": [], "positions": [], "row_seq": []}, "1 to 64 rows, got 0"),
        ({"positions": [0, 160]}, "positions must lie in 0..159"),
        ({"positions": [0, 16]}, "row 1 is at position 16, its sequence has 1 pages"),
        ({"positions": [1, 1]}, "must ascend in position"),
        ({"row_seq": [0, 1]}, "row_seq must lie in 0..0"),
        ({"page_table": [3]}, "page 0: .* do not lie within one of the memories"),
        ({"page_table": [-1]}, "page 0: .* do not lie within"),
        ({"page_table": [0, 5], "page_offsets": [0, 2]}, "page 1: .* do not lie within"),
        ({"page_offsets": [0, 2]}, "page_offsets speak of 2 pages, got 1"),
        ({"page_offsets": [-1, 1]}, "page_offsets must ascend from 0"),
        ({"page_offsets": [1, 0]}, "page_offsets must ascend"),
        ({"page_offsets": []}, "row_seq must lie"),
        ({"logit_rows": [2]}, "logit_rows must lie in 0..1"),
        ({"logit_rows": [0] * 65}, "at most 64 rows of logits"),
        ({"tokens": np.zeros(2)}, "tokens must be a contiguous int32 vector, got float64"),
        ({"tokens": np.zeros((2, 1), np.int32)}, "tokens must be a contiguous int32 vector"),
        ({"positions": np.zeros(4, np.int32)[::2]}, "positions must be a contiguous int32 vector"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    model = tiny_model()
    inputs: dict[str, Any] = {
        "tokens": [0, 1], "positions": [0, 1], "row_seq": [0, 0], "page_table": [0], "page_offsets": [0, 1],
        "logit_rows": [1],
    }  # fmt: skip
    inputs = {n: v if isinstance(v, np.ndarray) else np.array(v, np.int32) for n, v in {**inputs, **change}.items()}
    arena = model.arena(3)
    with model.decoder() as decoder, pytest.raises(ValueError, match=message):
        forward(decoder, arena, inputs)
    assert (arena == 0xFF).all()


def test_rows_of_a_sequence_must_be_adjacent() -> None:
    model = tiny_model()
    inputs = batch([Sequence([0, 0], [0]), Sequence([0, 0], [1])], [(0, 1), (0, 2)])
    inputs["row_seq"] = np.array([1, 0, 1], np.int32)
    with model.decoder() as decoder, pytest.raises(ValueError, match="adjacent"):
        forward(decoder, model.arena(2), inputs)


def test_weights_that_do_not_fit_are_refused() -> None:
    model = tiny_model()
    layer = model.layers[0]
    for change, message in (
        ({"layers": model.layers[:1]}, "expected 2 layers, got 1"),
        ({"final_norm": np.ones(5, np.float32)}, "final_norm needs 96 values"),
        ({"embed": layer.o}, "embed must be 100 x 96, got 96 x 192"),
        ({"layers": [layer, dataclasses.replace(layer, down=layer.o)]}, "down must be 96 x 160"),
        ({"layers": [layer, dataclasses.replace(layer, o_bias=np.ones(5, np.float32))]}, "o_bias needs 96 values"),
        ({"layers": [layer, dataclasses.replace(layer, q_norm=np.ones(32, np.float32))]}, "qk_norm is False"),
        ({"layout": PageLayout(2, 2, 64)}, "is not that of the decoder"),
        ({"layout": PageLayout(2, 2, 32, page_tokens=32)}, "pages of 16 tokens"),
        ({"cos": model.cos[:, :4]}, "cos and sin must be"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(model, **change).decoder()
    for arguments in ({"max_rows": 0}, {"threads": 0}):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            model.decoder(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "do not share"),
        ({"head_dim": 24}, "multiple of 16"),
        ({"windows": (0,)}, "windows needs 2 entries"),
        ({"vocab": 0}, "vocab must be positive"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    shape = DecoderShape(2, 32, 32, 4, 2, 16, 10, 1e-5, False, (0, 0))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(shape, **change)


def test_closing_ends_the_threads_and_the_decoder() -> None:
    model = tiny_model()
    before = threading.active_count()
    decoder = model.decoder(threads=3)
    assert threading.active_count() == before + 2
    decoder.close()
    decoder.close()
    assert threading.active_count() == before
    inputs = batch([Sequence([0], [0])], [(0, 1)])
    with pytest.raises(ValueError, match="closed"):
        forward(decoder, model.arena(1), inputs)
    inputs.pop("page_table")
    by_layers = (lambda: decoder.start(**inputs), lambda: decoder.layer(0, [], np.zeros(1, np.int64)), decoder.finish)
    for refused in by_layers:
        with pytest.raises(ValueError, match="closed"):
            refused()


def test_a_forgotten_decoder_closes_itself() -> None:
    before = threading.active_count()
    decoder = tiny_model().decoder(threads=2)
    assert threading.active_count() == before + 1
    del decoder
    assert threading.active_count() == before


def test_warm_up_reports_its_progress() -> None:
    seen: list[tuple[int, int]] = []
    CpuDecoder.warm_up(lambda done, total: seen.append((done, total)))
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] and seen == sorted(seen)
