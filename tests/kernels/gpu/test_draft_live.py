"""Whole engines on a made-up card with a draft model, on the card or beside it: the tokens of the run without one."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engine.live import Live
from tests.kernels.gpu.card_bench import least_bytes
from tests.kernels.gpu.cards import LAYERS, ExactCard, prepared
from tests.tiers.fake_gpu import FakeGpu
from tierd.daemon.engine import assemble, draft
from tierd.daemon.errors import BadConfig, OutOfSpace
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.plan.draft import card_draft_bytes
from tierd.daemon.units import human_bytes

CONTEXT = 64
ASKS: list[dict[str, Any]] = [
    {"tokens": [7, 9, 300, 11], "max_tokens": 6},
    {"tokens": [5, 6, 7], "max_tokens": 4, "temperature": 0.8, "seed": 4},
]

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(600)]
Make = Callable[..., Live]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("model"), "fp32", 1, CONTEXT)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with so many layers that some can be streamed."""
    return prepared(tmp_path_factory.mktemp("deep"), "bf16", LAYERS, CONTEXT)


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu(3)


@pytest.fixture
def live(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> Make:
    """On the card, with a draft model that always guesses, however unsure; None: without one."""
    monkeypatch.setattr(assemble, "choose", lambda _threads, note, *_: ExactCard(gpu, note))
    monkeypatch.setattr(draft, "LEAST_CHANCE", 0.0)

    def make(guesser: Path | None, main: Path = model, **more: Any) -> Live:
        settings: dict[str, Any] = {"device": 12, "nvme": 0, "max_batch_rows": 32, "max_streams": 2, "card": True}
        settings |= {"speculate": "on" if guesser else "off", "draft_dir": str(guesser or ""), "draft_on_card": True}
        return Live(main, tmp_path, **settings | more)

    return make


def answers(live: Live) -> list[list[int]]:
    found = live.run(ASKS, timeout_s=300)
    assert [end.ev for _, end in found] == ["done"] * len(ASKS), found
    return [tokens for tokens, _ in found]


def told(live: Live) -> dict[str, Any]:
    figures: dict[str, Any] = live.engine.loop.call(live.engine.board.figures).result(10)
    found: dict[str, Any] = figures["speculation"]["draft"]
    return found


@pytest.mark.parametrize("on_card", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_same_answers_wherever_the_draft_model_is_computed(
    live: Make, model: Path, gpu: FakeGpu, on_card: bool
) -> None:
    with live(None) as running:
        plain, alone = answers(running), sum(gpu.mapped.values())
    with live(model, draft_on_card=on_card) as running:
        taken = sum(gpu.mapped.values()) - alone
        assert answers(running) == plain
        figures = told(running)
        assert figures["on"] == ("card" if on_card else "processors") and figures["off"] == ""
        assert (taken > 0) == on_card and figures["memory_bytes"] > 0
        assert 2 < figures["right_drafts"] <= figures["drafted_tokens"]
    assert not gpu.mapped and not gpu.registered


@pytest.mark.long
@pytest.mark.parametrize("guesses_right", [True, False])
def test_the_same_answers_over_streamed_weights(
    live: Make, model: Path, deep: Path, guesses_right: bool
) -> None:
    least = least_bytes(deep)
    with live(None, deep) as running:
        plain = answers(running)
    with live(deep if guesses_right else model, deep, weights_bytes=least) as running:
        assert running.engine.weights.streams and answers(running) == plain
        figures = told(running)
        assert figures["drafted_tokens"] > 0 and (figures["right_drafts"] > 2) == guesses_right
        copied = running.engine.loop.call(running.engine.weights.statistics).result(10)
        assert copied.copied_bytes > 0 and copied.lost == 0


def test_a_card_without_memory_for_it_is_told_with_the_numbers(live: Make, model: Path, gpu: FakeGpu) -> None:
    taken = card_draft_bytes(load_manifest(model), 2).total
    running = live(model)
    gpu.limit_bytes = running.config.device_bytes + taken
    with pytest.raises(BadConfig, match=f"{human_bytes(taken)} of the draft model and .* of weights are more"):
        running.__enter__()


def test_memory_that_the_card_refuses_is_told(live: Make, model: Path, gpu: FakeGpu, monkeypatch: Any) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "out of memory")

    monkeypatch.setattr(draft, "check_pair", lambda *_: monkeypatch.setattr(ExactCard, "device_block", refused))
    with pytest.raises(OutOfSpace, match="no memory for the draft model tiny, which takes .*: out of memory"):
        live(model).__enter__()
    gc.collect()  # the maps of weights hold descriptors
    assert not gpu.mapped and not gpu.registered
