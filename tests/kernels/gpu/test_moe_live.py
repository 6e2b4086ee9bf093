"""Whole engines with mixtures of experts on a made-up card: the tokens of the CPU, and of layers that pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.daemon.engine.live import Live
from tests.kernels.gpu.card_bench import Bench, least_bytes
from tests.kernels.gpu.cards import WIDTH, ExactCard, FakeCard, prepared
from tests.tiers.fake_gpu import FakeGpu
from tierd.daemon.engine import assemble
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.placement_card import record_card_bytes

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(600)]

MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": False}
GPT_OSS = {
    "model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 20,
    "rope_scaling": None, "max_position_embeddings": 64,
}  # fmt: skip


def model_of(directory: Path, config: dict[str, Any], format: str = "fp32", layers: int = 2) -> Path:
    return prepared(directory, format, layers, 64, **config)


def test_the_card_holds_what_was_counted(tmp_path: Path) -> None:
    with Bench(model_of(tmp_path, GPT_OSS, "int8-g32"), None, None) as bench:
        sizes = {record.name: record_card_bytes(record) for record in bench.manifest.records}
        assert bench.weights.memory_bytes == sum(sizes.values()) and not bench.weights.streams
        assert np.isfinite(bench.step(7, 0)).all()


@pytest.mark.long
@pytest.mark.parametrize("config", [GPT_OSS, MIXTRAL])
def test_the_tokens_of_the_cpu(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tmp_path, config)
    asks = [{"tokens": list(range(3, 26)), "max_tokens": 4}, {"tokens": [9, 4], "max_tokens": 6}]
    with Live(model, tmp_path / "cpu", device=20, nvme=0) as live:
        right = live.run(asks)
    monkeypatch.setattr(assemble, "choose", lambda _threads, note, *_: ExactCard(FakeGpu(3), note))
    with Live(model, tmp_path / "card", device=20, nvme=0, max_batch_rows=24, max_streams=2) as live:
        found = live.run(asks, timeout_s=300)
        assert live.engine.on_card and not live.engine.weights.streams
        rows = {row.name: row for row in live.engine.loop.call(live.engine.weights.rows).result(10)}
    assert [end.ev for _, end in found] == ["done"] * 2 and [t for t, _ in found] == [t for t, _ in right]
    manifest = load_manifest(model)
    assert sum(row.bytes for row in rows.values()) == manifest.bytes
    assert {row.tier for row in rows.values()} == {"device"} and rows["layer.1.experts"].bytes > 6 * WIDTH * WIDTH


@pytest.mark.long
def test_quantized_experts_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tmp_path, MIXTRAL, "int4-g32")
    monkeypatch.setattr(assemble, "choose", lambda _threads, note, *_: FakeCard(FakeGpu(3), note))
    with Live(
        model, tmp_path, device=4, host=2, nvme=0, kv_format="bf16", max_batch_rows=8, max_streams=2
    ) as live:  # fmt: skip
        ((tokens, end),) = live.run([{"tokens": [7, 9], "max_tokens": 3}])
        assert end.ev == "done" and len(tokens) == 3


@pytest.mark.long
@pytest.mark.parametrize("config", [GPT_OSS, MIXTRAL])
def test_layers_pass_and_their_experts_come_and_go(config: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(tmp_path, config, "int8-g32", 6)
    with Bench(model, None, None) as bench:
        wanted = bench.step(7, 0)
    with Bench(model, least_bytes(model), None) as bench:
        assert bench.weights.streams
        for _ in range(2):
            assert np.array_equal(bench.step(7, 0), wanted)
        assert {row.tier for row in bench.weights.rows() if row.name.endswith("experts")} == {"host"}
        bench.weights.retarget(bench.manifest.bytes * 2)
        while bench.weights.settle():
            pass
        assert not bench.weights.streams and np.array_equal(bench.step(7, 0), wanted)
