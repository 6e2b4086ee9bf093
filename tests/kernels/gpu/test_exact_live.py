"""Exact tokens beside packed pages through a whole engine on a made-up card: cold, restored and made up the same."""

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

SIZES: dict[str, Any] = {"device": 16, "nvme": 40, "max_batch_rows": 48, "max_streams": 2}
LADDER: dict[str, Any] = {"kv_format": "k8v8", "kv_exact_first": 32, "kv_exact_last": 32}
ASK: dict[str, Any] = {"tokens": prompt(1, 70), "max_tokens": 4, "kv_mode": "exact_first=32,exact_last=32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("exact"), "fp32", 1, 128, head_dim=32)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeGpu]]:
    made: list[FakeGpu] = []

    def choose(_threads: int, note: Any, *_: Any) -> ExactCard:
        made.append(FakeGpu(5))
        return ExactCard(made[-1], note)

    monkeypatch.setattr(assemble, "choose", choose)
    yield made
    assert made and not any(gpu.mapped or gpu.registered for gpu in made)


def engine(model: Path, store: Path, **more: Any) -> Live:
    return Live(model, store, **SIZES | LADDER | more)


def copies(live: Live) -> dict[str, int]:
    """Statistics of the copies, whose books balance."""
    ladders = live.engine.loop._streams.ladders
    assert ladders is not None and live.engine.loop.call(ladders.pages.check).result(10.0) == []
    return ladders.statistics()


@pytest.fixture(scope="module")
def right(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What the CPU says."""
    with engine(model, tmp_path_factory.mktemp("cpu"), nvme=0) as live:
        return said(live, [ASK])[0]


def test_the_tokens_of_the_cpu(model: Path, right: list[int], tmp_path: Path, cards: list[FakeGpu]) -> None:
    with engine(model, tmp_path, nvme=0) as live:
        assert said(live, [ASK])[0] == right and copies(live)["cached_pages"] > 0


@pytest.mark.long
def test_going_on_within_a_page(model: Path, right: list[int], tmp_path: Path, cards: list[FakeGpu]) -> None:
    """Of a page that begins as a known one, the known copy is copied on the card."""
    again = ASK | {"tokens": [*ASK["tokens"], right[0], 9], "max_tokens": 2}
    with engine(model, tmp_path, nvme=0) as live:
        said(live, [ASK])
        warm = said(live, [again])[0]
        assert copies(live)["made_up_rows"] == 0 < copies(live)["cached_pages"]
    with engine(model, tmp_path, nvme=0) as live:
        assert said(live, [again])[0] == warm


@pytest.mark.long
def test_beside_packed_ones_and_restored(
    model: Path, right: list[int], tmp_path: Path, cards: list[FakeGpu]
) -> None:
    """Copies are not in the store: they are made up."""
    asks = [ASK, {"tokens": prompt(2, 40), "max_tokens": 4, "kv_mode": "exact"}]
    with engine(model, tmp_path) as live:
        (_, packed) = [said(live, [ask])[0] for ask in asks]
        assert said(live, asks) == [right, packed]
        live.flush()
    with engine(model, tmp_path) as live:
        ((tokens, end), (others, _)) = live.run(asks, timeout_s=300)
        assert tokens == right and others == packed
        assert end.data["timings"].hit_nvme >= 32 and copies(live)["made_up_rows"] >= 32
