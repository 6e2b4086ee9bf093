"""A whole engine whose weights pass through a card made of CPU memory: the tokens of the run that has all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.daemon.engine.live import Live
from tests.kernels.gpu.card_bench import Bench, least_bytes
from tests.kernels.gpu.cards import FakeCard, Memory, live_on_card, prepared, weights_of
from tests.tiers.fake_gpu import FakeGpu
from tierd.daemon.engine import assemble, backend_cuda
from tierd.daemon.engine.tend import resize
from tierd.daemon.errors import EngineFailed, OutOfSpace
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.placement_card import place_on_card
from tierd.kernels.gpu.decoder import GpuDecoder

pytestmark = pytest.mark.usefixtures("no_files_left")

ASKS = [{"tokens": [7, 9], "max_tokens": 3}]




def test_a_pass_has_the_bits_of_one_over_resident_weights(tmp_path: Path) -> None:
    model = prepared(tmp_path, "bf16")
    with Bench(model, None, None) as bench:
        wanted = bench.step(7, 0)
        assert not bench.weights.streams and bench.weights.memory_bytes > 0
    least = least_bytes(model)
    host = place_on_card(load_manifest(model), least, None).host_bytes
    with Bench(model, least, host - 1) as bench:
        found = bench.weights.statistics()
        assert bench.weights.streams and found.memory_bytes <= least
        assert min(found.host_records, found.nvme_records) > 0
        assert found.device_bytes + found.host_bytes + found.nvme_bytes == bench.manifest.bytes
        for _ in range(2):
            assert np.array_equal(bench.step(7, 0), wanted)
        found = bench.weights.statistics()
        assert found.copied_bytes >= found.pass_bytes and found.read_bytes > 0 and found.lost == found.retries == 0
        assert {row.tier for row in bench.weights.rows()} == {"device", "host", "nvme"}


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Live]:
    return partial(live_on_card, monkeypatch, tmp_path)


def answers(running: Live) -> list[int]:
    ((tokens, end),) = running.run(ASKS)
    assert end.ev == "done", end
    return tokens


@pytest.mark.long
def test_streamed_layers_give_the_tokens_of_those_that_stay(live: Callable[..., Live], tmp_path: Path) -> None:
    model = prepared(tmp_path, "int4-g32")
    manifest, least = load_manifest(model), least_bytes(model)
    with live(model) as running:
        wanted = answers(running)
        assert not running.engine.weights.streams and weights_of(running).device_bytes == manifest.bytes
    for host in (None, place_on_card(manifest, least, 1 << 30).host_bytes - 1):
        with live(model, weights_bytes=least, host_weights_bytes=host) as running:
            assert answers(running) == wanted
            found = weights_of(running)
            assert found.memory_bytes <= least and found.lost == found.retries == 0
            assert found.device_bytes + found.host_bytes + found.nvme_bytes == manifest.bytes
            assert found.copied_bytes > 0 and (found.read_bytes > 0) == (found.nvme_bytes > 0) == (host is not None)
            assert any("layers are copied to the card in every step" in note for note in running.engine.notes)


@pytest.mark.long
def test_a_resize_that_fails_leaves_the_answers_as_they_are(live: Callable[..., Live], tmp_path: Path) -> None:
    model = prepared(tmp_path, "bf16")
    memory = Memory()
    with live(model, memory) as running:
        wanted = answers(running)
        least = least_bytes(model, embed_on_card=True)
        memory.left = 1
        number = running.submit(tokens=[7, 9], max_tokens=24)
        with pytest.raises(OutOfSpace, match="the weights stay as they were: the card has .* free, .* are needed"):
            asyncio.run(resize(running.engine, {"weights_bytes": least}))
        memory.left = None
        tokens, end = running.collect(number)[number]
        assert end.ev == "done" and tokens[:3] == wanted and answers(running) == wanted
        assert not running.engine.weights.streams and not running.deaths
        asyncio.run(resize(running.engine, {"weights_bytes": least}))
        assert running.engine.weights.streams and answers(running) == wanted
        memory.left = 1
        with pytest.raises(OutOfSpace, match="not all weights came to their places, .* have; the others go on being"):
            asyncio.run(resize(running.engine, {"weights_bytes": load_manifest(model).bytes * 2}))
        assert running.engine.weights.streams and answers(running) == wanted and not running.deaths


def test_a_layer_that_does_not_come_ends_the_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepared(tmp_path, "bf16")
    monkeypatch.setattr(backend_cuda, "WEIGHTS_TIMEOUT_S", 0.05)
    warm_up = GpuDecoder.warm_up

    def stuck(self: GpuDecoder, *args: Any) -> None:
        cards[0].stuck = True
        try:
            warm_up(self, *args)
        finally:
            cards[0].unstick()

    monkeypatch.setattr(GpuDecoder, "warm_up", stuck)
    cards = [FakeGpu(3)]
    monkeypatch.setattr(assemble, "choose", lambda _threads, note, *_: FakeCard(cards[0], note))
    with pytest.raises(EngineFailed, match="the first pass could not be computed: weights layer"):
        Live(
            model, tmp_path, device=4, nvme=0, kv_format="bf16", weights_bytes=least_bytes(model), max_batch_rows=8,
            max_streams=2,
        ).__enter__()  # fmt: skip
