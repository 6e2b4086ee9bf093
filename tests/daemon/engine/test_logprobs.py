"""Log probabilities against a plain softmax, and as streams tell them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.daemon.engine.fakes import VOCAB, logits_for
from tests.daemon.engine.rig import END, Rig
from tests.daemon.engine.vocabularies import byte_level
from tierd.daemon.engine.logprobs import NEVER, Logprobs, log_softmax

PROMPT = [5, 9, 2, 7, 1, 1, 8, 3, 30, 31]


def exact(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - wide.max() - math.log(float(np.exp(wide - wide.max()).sum()))


def model_says(history: list[int]) -> np.ndarray:
    return exact(logits_for(np.array(history, np.int32), np.arange(len(history), dtype=np.int32)))


def told(rig: Rig, number: int = 1) -> list[dict]:
    return [entry for data in rig.of(number, "text") for entry in data.get("logprobs", [])]


def test_log_softmax_is_that_of_a_wide_softmax() -> None:
    logits = np.random.default_rng(1).standard_normal(49_152).astype(np.float32) * 8
    assert np.abs(log_softmax(logits) - exact(logits)).max() < 1e-5
    assert log_softmax(np.array([900.0, -900.0], np.float32))[0] == 0.0


@pytest.mark.parametrize("temperature", [0.0, 1.4])
def test_every_token_has_an_entry_of_the_model_itself(temperature: float) -> None:
    rig = Rig()
    sampling = {"temperature": temperature, "seed": 7, "frequency_penalty": 1.0, "logit_bias": {4: 3.0}}
    rig.submit(1, PROMPT, 20, sampling=sampling, logprobs=3)
    rig.run()
    tokens, entries = rig.tokens(1), told(rig)
    assert [entry["token"] for entry in entries] == tokens and len(tokens) == 20
    total = 0.0
    for place, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
        wanted = model_says([*PROMPT, *tokens[:place]])
        assert entry["logprob"] == pytest.approx(wanted[token], abs=1e-5)
        best = sorted(range(VOCAB), key=lambda other: -wanted[other])[:3]
        assert [top["token"] for top in entry["top"]] == best
        assert [top["logprob"] for top in entry["top"]] == pytest.approx(wanted[best].tolist(), abs=1e-5)
        assert bytes(entry["bytes"]) == bytes([token]) and entry["text"] == chr(token)
        total += wanted[token]
    assert rig.of(1, "done")[0]["logprob_sum"] == pytest.approx(total, abs=1e-3)


def test_without_being_asked_nothing_is_told() -> None:
    rig = Rig()
    rig.submit(1, PROMPT)
    rig.submit(2, PROMPT, logprobs=0)
    rig.run()
    assert all(set(data) == {"text", "tokens"} for data in rig.of(1, "text"))
    assert "logprob_sum" not in rig.of(1, "done")[0]
    assert len(told(rig, 2)) == 8 and all(entry["top"] == [] for entry in told(rig, 2))


def test_entries_travel_with_their_tokens_and_resume_with_them() -> None:
    whole, resumed = Rig(), Rig()
    whole.submit(1, PROMPT, 12, logprobs=2)
    whole.run()
    resumed.submit(1, PROMPT, 12, logprobs=2, resume=tuple(whole.tokens(1)[:5]))
    resumed.run()
    for data in [*whole.of(1, "text"), *resumed.of(1, "text")]:
        assert [entry["token"] for entry in data["logprobs"]] == data["tokens"]
    assert told(resumed) == told(whole)[5:]


def test_the_end_token_counts_and_is_not_told() -> None:
    rig = Rig()
    rig.submit(1, PROMPT, 200, sampling={"ignore_eos": False, "temperature": 3.0, "seed": 3}, logprobs=0)
    rig.run()
    assert rig.of(1, "done")[0]["finish"] == "stop"
    history = [*PROMPT, *rig.tokens(1)]
    last = model_says(history)[END]
    total = sum(entry["logprob"] for entry in told(rig)) + last
    assert len(told(rig)) == len(rig.tokens(1))
    assert rig.of(1, "done")[0]["logprob_sum"] == pytest.approx(total, abs=1e-3)


def test_a_token_that_is_ruled_out_has_a_finite_figure() -> None:
    logprobs = Logprobs(byte_level(), 2)
    logits = np.array([0.0, -np.inf], np.float32)
    logprobs.add(logits, 0)
    (entry,) = logprobs.take(1)
    assert [top["logprob"] for top in entry["top"]] == [0.0, NEVER]
    assert logprobs.take(1) == []
