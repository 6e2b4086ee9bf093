"""Draws against straightforward formulas."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.daemon.engine.sampler import BadLogits, Params, Sampler, settle, uniform
from tierd.daemon.protocol import Sampling

VOCAB = 50


def logits_of(seed: int, vocab: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32)


def distribution(logits: np.ndarray, params: Params) -> np.ndarray:
    """The probabilities that a draw must have, the long way round."""
    scaled = logits.astype(np.float64) / params.temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    kept = list(order[: params.top_k] if params.top_k else order)
    if params.top_p < 1.0:
        mass, total, head = 0.0, sum(probabilities[i] for i in kept), []
        for token in kept:
            head.append(token)
            mass += probabilities[token] / total
            if mass >= params.top_p:
                break
        kept = head
    kept = [token for token in kept if probabilities[token] >= params.min_p * probabilities.max()]
    out = np.zeros_like(probabilities)
    out[kept] = probabilities[kept]
    return out / out.sum()


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[7, 9]] = 2.0
    assert Sampler(Params(temperature=0.0), VOCAB, []).sample(logits, 0) == 7


@pytest.mark.parametrize(
    "params",
    [
        Params(),
        Params(temperature=0.5),
        Params(temperature=1.7, top_k=5),
        Params(top_p=0.6),
        Params(top_p=0.9, top_k=20),
        Params(min_p=0.1),
        Params(temperature=0.8, top_k=30, top_p=0.95, min_p=0.02),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params: Params) -> None:
    logits = logits_of(3)
    wanted = distribution(logits, params)
    sampler = Sampler(params, VOCAB, [])
    draws = 4000
    counts = np.bincount([sampler.sample(logits, position) for position in range(draws)], minlength=VOCAB)
    assert not counts[wanted == 0].any()
    # Five standard deviations of each cell.
    assert (np.abs(counts - draws * wanted) <= 5 * np.sqrt(draws * wanted * (1 - wanted)) + 1).all()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 1000),
    st.floats(0.05, 3.0),
    st.integers(0, 60),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 2**64),
)
def test_a_draw_is_the_inverse_of_the_distribution(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, draw_seed: int
) -> None:
    params = Params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=draw_seed)
    logits = logits_of(seed)
    token = Sampler(params, VOCAB, []).sample(logits, 5)
    # A token on the very border of top_p or min_p may fall either way.
    loose = replace(params, top_p=min(top_p + 1e-6, 1.0), min_p=max(min_p - 1e-6, 0.0))
    assert distribution(logits, loose)[token] > 0


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-46, 2e-39, 1.1e-38, 1e-30, 1e-20, 1e-15])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_a_temperature_next_to_nothing_is_greedy(temperature: float, more: dict[str, Any]) -> None:
    logits = np.random.default_rng(5).normal(0, 4, VOCAB).astype(np.float32)
    logits[7], logits[9] = -1e9, -np.inf
    for seed in range(5):
        sampler = Sampler(Params(temperature=temperature, seed=seed, **more), VOCAB, [])
        assert sampler.sample(logits, seed) == int(np.argmax(logits))


def test_equal_logits_are_cut_at_the_lower_ids() -> None:
    sampler = Sampler(Params(top_k=3), VOCAB, [])
    assert {sampler.sample(np.zeros(VOCAB, dtype=np.float32), position) for position in range(200)} == {0, 1, 2}


def test_top_p_over_a_flat_vocabulary_widens_its_search() -> None:
    vocab = 49152
    sampler = Sampler(Params(top_p=0.9), vocab, [])
    drawn = [sampler.sample(np.zeros(vocab, dtype=np.float32), position) for position in range(30)]
    assert max(drawn) < round(vocab * 0.9) + 1 and max(drawn) > vocab // 2


def test_penalties_against_their_formulas() -> None:
    prompt, generated = [1, 2, 2], [2, 3, 3, 3]
    params = Params(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    logits = logits_of(11)
    wanted = logits.astype(np.float64)
    for token in set(prompt) | set(generated):
        wanted[token] = wanted[token] / 1.3 if wanted[token] > 0 else wanted[token] * 1.3
    for token in set(generated):
        wanted[token] -= 0.4 + 0.2 * generated.count(token)
    adjusted = Sampler(params, VOCAB, prompt, generated)._adjust(logits)
    np.testing.assert_allclose(adjusted, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(logits, logits_of(11))


def test_bias_moves_a_token() -> None:
    logits = logits_of(5)
    assert Sampler(Params(temperature=0.0, logit_bias={17: 100.0}), VOCAB, []).sample(logits, 0) == 17
    banned = int(np.argmax(logits))
    assert Sampler(Params(temperature=0.0, logit_bias={banned: -100.0}), VOCAB, []).sample(logits, 0) != banned


def test_a_resumed_stream_draws_the_same() -> None:
    params = Params(temperature=1.2, top_p=0.95, frequency_penalty=0.3, repetition_penalty=1.1, seed=99)
    whole = Sampler(params, VOCAB, [4, 5])
    tokens: list[int] = []
    for position in range(40):
        tokens.append(whole.sample(logits_of(position), position))
        whole.accept(tokens[-1])
    for cut in (1, 17, 39):
        again, resumed = Sampler(params, VOCAB, [4, 5], tokens[:cut]), tokens[:cut]
        for position in range(cut, 40):
            resumed.append(again.sample(logits_of(position), position))
            again.accept(resumed[-1])
        assert resumed == tokens


class OnlyEven:
    """A guide that allows even tokens, and notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def masked(self, logits: np.ndarray) -> np.ndarray:
        return np.where(np.arange(logits.size) % 2 == 0, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        self.heard.append(token)


@pytest.mark.parametrize(
    "params",
    [Params(), Params(temperature=0.0), Params(top_k=5), Params(top_p=0.5), Params(min_p=0.2, top_k=3),
     Params(logit_bias={1: 90.0}), Params(top_p=0.9, repetition_penalty=2.0)],
    ids=str,
)  # fmt: skip
def test_a_guide_rules_out_tokens(params: Params) -> None:
    sampler = Sampler(params, VOCAB, [1], guide=OnlyEven())
    assert all(sampler.sample(logits_of(seed), seed) % 2 == 0 for seed in range(60))


def test_a_guide_hears_of_drawn_tokens_not_of_resumed_ones() -> None:
    guide = OnlyEven()
    sampler = Sampler(Params(), VOCAB, [1], [2, 4], guide)
    sampler.accept(6)
    assert guide.heard == [6]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_a_guess_is_the_draw_that_would_be_without_the_guide(temperature: float) -> None:
    params = Params(temperature=temperature, seed=5, presence_penalty=0.5)
    free = Sampler(params, VOCAB, [1, 2], [3])
    held = Sampler(params, VOCAB, [1, 2], [3], OnlyEven())
    for position in range(20):
        logits = logits_of(position)
        token, chance = held.guess(logits, position)
        assert token == free.sample(logits, position) and held.sample(logits, position) % 2 == 0
        whole = np.exp((logits - np.where(np.arange(VOCAB) == 3, 0.5, 0.0)) / (temperature or 1.0))
        assert chance == pytest.approx(whole[token] / whole.sum(), rel=1e-4)


def test_draws_are_even_and_independent_of_the_seed_type() -> None:
    numbers = [uniform(seed, position) for seed in (0, 1, -1, 2**60) for position in range(2000)]
    assert 0.0 <= min(numbers) and max(numbers) < 1.0
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert abs(counts - 400).max() < 100
    assert len(set(numbers)) == 8000


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_a_number_is_an_error(bad: float) -> None:
    logits = logits_of(1)
    logits[20] = bad
    for params in (Params(temperature=0.0), Params()):
        with pytest.raises(BadLogits):
            Sampler(params, VOCAB, []).sample(logits, 0)


def test_defaults_of_the_model() -> None:
    model = {"temperature": 0.2, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.05}
    free = settle(Sampling(), model, seed=7)
    assert (free.temperature, free.top_p, free.top_k, free.repetition_penalty, free.seed) == (0.2, 0.9, 40, 1.05, 7)
    own = settle(Sampling(temperature=0.7, seed=3), model, seed=7)
    assert (own.temperature, own.top_p, own.top_k, own.repetition_penalty, own.seed) == (0.7, 1.0, 0, 1.0, 3)


def test_defaults_where_the_model_says_nothing() -> None:
    plain = settle(Sampling(), {}, seed=0)
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p, plain.repetition_penalty) == (0.8, 0.95, 0, 0, 1)
    assert settle(Sampling(top_p=0.5), {}, seed=0).top_p == 0.5
    assert settle(Sampling(temperature=1.0), {}, seed=0).top_p == 1.0
    part = settle(Sampling(), {"top_p": 0.7}, seed=0)
    assert (part.temperature, part.top_p) == (0.8, 0.7)
    assert settle(Sampling(), {"temperature": 1.0}, seed=0).top_p == 1.0  # the model's own figures stay whole


@pytest.mark.parametrize(
    ("params", "limit_s"),
    [
        (Params(temperature=0.0), 0.0005),
        (Params(), 0.002),
        (Params(top_p=0.9), 0.002),
        (Params(top_k=40, top_p=0.9), 0.002),
    ],
    ids=["greedy", "plain", "top_p", "top_k"],
)
def test_a_draw_is_fast(params: Params, limit_s: float) -> None:
    sampler, logits = Sampler(params, 49152, []), logits_of(2, 49152)
    times = []
    for position in range(60):
        started = time.perf_counter()
        sampler.sample(logits, position)
        times.append(time.perf_counter() - started)
    # The limit is for a quiet machine; of many tries on a busy one some find it quiet.
    assert min(times) < limit_s
