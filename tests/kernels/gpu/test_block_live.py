"""The engine of a batch that is alone on a made-up card: many sequences at once over weights that pass through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engine.live import Live
from tests.kernels.gpu.card_bench import least_bytes
from tests.kernels.gpu.cards import ExactCard, prepared
from tests.tiers.fake_gpu import FakeGpu
from tierd.daemon.engine import assemble

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(600), pytest.mark.long]
STREAMS = 6
ASKS = [{"tokens": [number + 5, 9, 30 * number], "max_tokens": 3 + number % 3} for number in range(STREAMS + 2)]


def test_a_block_gives_the_tokens_of_each_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pages of their ends in CPU memory; a sequence that ends gives its place to the next one."""
    model = prepared(tmp_path, "bf16")
    monkeypatch.setattr(assemble, "choose", lambda _threads, note, *_: ExactCard(FakeGpu(3), note))
    with Live(model, tmp_path / "alone", device=12, nvme=0, max_batch_rows=32, max_streams=1) as live:
        right = [live.run([ask], timeout_s=300)[0][0] for ask in ASKS]
    block: dict[str, Any] = {"weights_bytes": least_bytes(model), "max_streams": STREAMS, "throughput": True}
    with Live(model, tmp_path / "block", device=STREAMS + 2, host=4, nvme=0, max_batch_rows=32, **block) as live:
        found = live.run(ASKS, timeout_s=300)
        assert [tokens for tokens, _ in found] == right and {end.ev for _, end in found} == {"done"}
        statistics = live.engine.loop.call(live.engine.weights.statistics).result(10)
        steps = live.engine.loop.call(lambda: live.engine.loop._streams.totals.steps).result(10)
        assert live.engine.weights.streams and statistics.lost == 0
        assert steps < sum(len(tokens) for tokens in right) / 2  # a pass over the weights serves them all
