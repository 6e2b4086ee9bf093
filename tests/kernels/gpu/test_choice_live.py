"""Chosen pages through a whole engine on a made-up card: the tokens of the CPU, wherever the pages were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engine.live import Live
from tests.kernels.gpu.cards import ExactCard, prepared
from tests.kernels.gpu.test_bounded_live import prompt, said
from tests.tiers.fake_gpu import FakeGpu
from tierd.daemon.engine import assemble

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(600)]

ASK: dict[str, Any] = {"tokens": prompt(1, 90), "max_tokens": 8, "kv_mode": "select=4"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("choice"), "fp32", 2, 128)


@pytest.fixture(scope="module")
def right(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What the CPU says."""
    with Live(model, tmp_path_factory.mktemp("cpu"), device=60, nvme=0) as live:
        (tokens,) = said(live, [ASK])
        assert tokens != said(live, [ASK | {"kv_mode": "exact"}])[0]
    return tokens


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeGpu]]:
    """Those that engines were built on; nothing is left on them."""
    made: list[FakeGpu] = []

    def choose(_threads: int, note: Any, *_: Any) -> ExactCard:
        made.append(FakeGpu(3))
        return ExactCard(made[-1], note)

    monkeypatch.setattr(assemble, "choose", choose)
    yield made
    assert made and not any(gpu.mapped or gpu.registered for gpu in made)


def engine(model: Path, store: Path, device: int, **more: Any) -> Live:
    return Live(model, store, device=device, **{"nvme": 40, "max_batch_rows": 64, "max_streams": 2} | more)


@pytest.mark.long
def test_cold_and_from_pinned_memory(model: Path, right: list[int], tmp_path: Path, cards: list[FakeGpu]) -> None:
    with engine(model, tmp_path, 16, host=8, nvme=0) as live:
        assert said(live, [ASK | {"max_tokens": 3}])[0] == right[:3]
        live.clear_device()
        assert said(live, [ASK | {"max_tokens": 2}])[0] == right[:2]


@pytest.mark.long
def test_in_company_resumed_and_picked_from_the_disk(
    model: Path, right: list[int], tmp_path: Path, cards: list[FakeGpu]
) -> None:
    with engine(model, tmp_path, 16) as live:
        assert said(live, [ASK, ASK | {"kv_mode": "exact"}, ASK])[::2] == [right, right]
        assert said(live, [ASK | {"resume": tuple(right[:3])}])[0] == right[3:]
        live.flush()
    with engine(model, tmp_path, 4) as live:
        ((tokens, end),) = live.run([ASK], timeout_s=300)
        assert tokens == right and end.data["timings"].hit_nvme >= 64
        assert live.engine.loop._streams.streaming["picked_bytes"] > 0
