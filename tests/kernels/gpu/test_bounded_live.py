"""Whole engines on a made-up card whose rows have bounds: the tokens of the CPU, wherever the pages were."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engine.live import Live
from tests.kernels.gpu.cards import ExactCard, prepared
from tests.tiers.fake_gpu import FakeGpu
from tierd.daemon.engine import assemble

CONTEXT = 64
MODES = ("window=20", "sinks=3,window=18", None)

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(600)]
Make = Callable[..., Live]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return prepared(tmp_path, "fp32", 1, CONTEXT)


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Engines that are built from then on compute on the card."""
    return lambda: monkeypatch.setattr(assemble, "choose", lambda _threads, note, *_: ExactCard(FakeGpu(3), note))


def prompt(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(300) for _ in range(length)]


def asks() -> list[dict[str, Any]]:
    """From one beginning; the one with sinks goes beyond the context."""
    found: list[dict[str, Any]] = []
    for number, mode in enumerate(MODES):
        endless = mode is not None and "sinks" in mode
        tokens = prompt(1, 18) + prompt(number + 2, 40 if endless else 9)
        found.append({"tokens": tokens, "max_tokens": 12} | ({"kv_mode": mode} if mode else {}))
    return found


def said(live: Live, asks: list[dict[str, Any]]) -> list[list[int]]:
    found = live.run(asks, timeout_s=300)
    assert [end.ev for _, end in found] == ["done"] * len(asks), found
    assert live.engine.loop.call(live.engine.pager.check).result(10.0) == []
    return [tokens for tokens, _ in found]


def test_the_tokens_of_the_cpu_cold_and_in_company(
    model: Path, tmp_path: Path, on_card: Callable[[], None]
) -> None:
    wanted = asks()
    with Live(model, tmp_path / "cpu", device=60, nvme=0) as live:
        right = said(live, wanted)
        assert said(live, [ask | {"kv_mode": "exact"} for ask in wanted])[:1] != right[:1]
    on_card()
    with Live(model, tmp_path / "card", device=60, nvme=60, max_batch_rows=40) as live:
        assert live.engine.on_card and said(live, wanted) == right
