"""Memory modes through a whole engine on a card made of CPU memory: the tokens are the same wherever the pages were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engine.live import Live
from tests.daemon.engine.test_bounded_live import prompt, said
from tests.kernels.gpu.test_weights_card import FakeCard, prepared
from tests.tiers.fake_gpu import FakeGpu
from tierd.daemon.engine import assemble

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(600)]

PROMPT, ANSWER = 90, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("modes"), "bf16", 128, 2)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeGpu]]:
    """Those that engines were built on; nothing is left on them."""
    made: list[FakeGpu] = []

    def choose(_threads: int, note: Any, *_: Any) -> FakeCard:
        made.append(FakeGpu(3))
        return FakeCard(made[-1], note)

    monkeypatch.setattr(assemble, "choose", choose)
    yield made
    assert made and not any(gpu.mapped or gpu.registered for gpu in made)


def engine(model: Path, store: Path, device: int, **more: Any) -> Live:
    sizes: dict[str, Any] = {"host": 0, "nvme": 40, "kv_format": "bf16", "max_batch_rows": 64, "max_streams": 2}
    return Live(model, store, device=device, **sizes | more)


def test_chosen_pages_cold_restored_and_picked_from_the_disk(
    model: Path, tmp_path: Path, cards: list[FakeGpu]
) -> None:
    ask = {"tokens": [token % 256 for token in prompt(1, PROMPT)], "max_tokens": ANSWER, "kv_mode": "select=4"}
    with engine(model, tmp_path, 16, host=8) as live:
        (right,) = said(live, [ask])
        live.flush()
        live.clear_device()
        assert said(live, [ask, ask | {"kv_mode": "select=5"}])[0] == right
    with engine(model, tmp_path, 4) as live:
        ((tokens, end),) = live.run([ask])
        assert tokens == right and end.data["timings"].hit_nvme >= 64
        assert live.engine.loop._streams.streaming["picked_bytes"] > 0
