"""What was planned beside what is measured, and nothing where there is neither."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.daemon.engine.families import prepare, reference
from tierd.daemon.engine.foresight import MAX_PLANS, Foresight, Seen
from tierd.daemon.engine.scheduler import Phase
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.machine import Sizes
from tierd.daemon.models.catalog import load_manifest

MIB = 1 << 20


@pytest.fixture(scope="module")
def foresight(tmp_path_factory: pytest.TempPathFactory) -> Foresight:
    root = tmp_path_factory.mktemp("foresight")
    model = prepare(reference("llama"), root / "model")
    config = EngineConfig(
        model_dir=str(model), cache_dir=str(root / "cache" / "kv"), device_bytes=MIB, host_bytes=0, nvme_bytes=0,
        nvme_min_free_bytes=0, threads=2, kv_format="fp32", context=0,
    )  # fmt: skip
    return Foresight(config, load_manifest(model), 2, 128)


@pytest.fixture
def sizes(foresight: Foresight) -> Sizes:
    return Sizes(MIB, 0, 0, 0, foresight._subject.formats[0][1].total)


def request(phase: Phase = Phase.DECODE, tokens: int = 60, generated: int = 20, cached: int = 0) -> Any:
    done = {"ttft_ms": 250.0, "prefill_tokens_per_s": 160.0, "recomputed": 40 - cached}
    timings = SimpleNamespace(decode_tokens_per_s=40.0, **done)
    return SimpleNamespace(
        phase=phase, beams=None, tokens=[1] * tokens, generated=generated, resumed=0, prompt_tokens=tokens - generated,
        cached_tokens=cached, times=SimpleNamespace(first_token_s=5.0), timings=lambda: timings,
    )  # fmt: skip


def test_before_anything_ran_there_is_a_plan_and_no_measurement(foresight: Foresight, sizes: Sizes) -> None:
    rows, note = foresight.rows(Seen(), sizes, sizes.weights_bytes)
    assert [row.measured for row in rows] == [None, None, None, sizes.weights_bytes]
    assert all(row.planned > 0 for row in rows) and "assumed rates" in note


def test_the_plan_is_for_the_load_that_is_measured(foresight: Foresight, sizes: Sizes) -> None:
    seen = foresight.watch([request(), request()])
    assert (seen.streams, seen.context_tokens, seen.decode_tokens_per_s) == (2, 60, 80.0)
    assert (seen.prompt_tokens, seen.ttft_s, seen.prefill_tokens_per_s) == (40, 0.25, 160.0)
    rows, _ = foresight.rows(seen, sizes, 1)
    assert rows[0].name.startswith("decode, 2 streams at ") and rows[0].measured == 80.0
    assert rows[1].measured == 160.0 and rows[2].measured == 0.25
    again = foresight.watch([])
    assert again == seen  # the last load stays until there is another


def test_a_prompt_that_was_known_says_nothing_of_the_first_token(foresight: Foresight) -> None:
    foresight.seen = Seen()
    seen = foresight.watch([request(cached=30)])
    assert seen.ttft_s is None and seen.prefill_tokens_per_s is None


def test_an_answer_that_has_just_begun_has_no_rate(foresight: Foresight) -> None:
    foresight.seen = Seen()
    assert foresight.watch([request(generated=3)]).streams == 0
    assert foresight.watch([request(Phase.PREFILL)]).streams == 0


def test_what_cannot_be_planned_is_said(foresight: Foresight, sizes: Sizes) -> None:
    rows, note = foresight.rows(Seen(), sizes._replace(weights_bytes=1), 0)
    assert rows == [] and note.startswith("there is no plan")


def test_plans_are_kept_and_bounded(foresight: Foresight, sizes: Sizes) -> None:
    foresight.rows(Seen(), sizes, 0)
    made = dict(foresight._plans)
    foresight.rows(Seen(), sizes, 0)
    assert foresight._plans == made and len(foresight._plans) <= MAX_PLANS
