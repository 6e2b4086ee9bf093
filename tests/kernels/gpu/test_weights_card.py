"""A whole engine whose weights pass through a card made of CPU memory: the tokens of the run that has all of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.daemon.engine.live import Live
from tests.kernels.gpu.cards import FakeCard, prepared
from tests.kernels.gpu.cases import aligned
from tests.tiers.fake_gpu import FakeGpu
from tierd.daemon.engine import assemble
from tierd.daemon.engine.batch import Batch
from tierd.daemon.engine.model import rope
from tierd.daemon.engine.model.passing import Card
from tierd.daemon.engine.model.weights_card import CardWeights
from tierd.daemon.engine.model.weights_status import WeightsStatus
from tierd.daemon.engine.runner import Runner
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.placement import DoesNotFit
from tierd.daemon.models.placement_card import place_on_card
from tierd.kernels.gpu.decoder import GpuDecoder
from tierd.kernels.layout import PageLayout
from tierd.tiers.mover import Disturbance, Mover

pytestmark = pytest.mark.usefixtures("no_files_left")

ASKS = [{"tokens": [7, 9], "max_tokens": 3}]


class Bench:
    """Passes of one row over weights of a card, without an engine around them."""

    def __init__(self, model: Path, device_bytes: int | None, host_bytes: int | None) -> None:
        self.gpu = FakeGpu(5)
        self.manifest = load_manifest(model)
        spec = self.manifest.spec
        self.mover = Mover(3, before=Disturbance(5, 0.001))
        card = Card(
            self.gpu, self.gpu.new_stream(), torch.device("cpu"), torch.bfloat16, None, self.gpu.synchronize
        )
        self.weights = CardWeights(
            model, self.manifest, device_bytes, host_bytes, card, self.mover, lambda _done, _total: None
        )
        layout = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, "bf16")
        tables = rope.tables(rope.frequencies(spec, 16), 16)
        self.decoder = GpuDecoder(
            self.weights.shape, self.weights.layers, self.weights.ends, layout, *tables, 8, torch.bfloat16,
            embed_rows=self.weights.embed_rows if self.weights.ends.embed is None else None,
        )  # fmt: skip
        self.weights.attach(self.decoder)
        self.page = aligned(layout.record_bytes, torch.uint8).numpy()
        self.runner = Runner(self.decoder, layout, [self.page], weights=self.weights)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.weights.close()
        self.mover.close()
        # A real card has copies; this one, whose memory is the computer's, has views of what it was loaded from.
        del self.decoder, self.runner
        gc.collect()  # arrays that are registered as long as they live
        assert not self.gpu.registered

    def step(self, token: int, position: int) -> np.ndarray:
        one, zero = np.array([token], np.int32), np.zeros(1, np.int32)
        where = np.array([self.page.ctypes.data], np.int64)
        return self.runner.run(
            Batch(one, np.array([position], np.int32), zero, where, np.array([0, 1], np.int32), zero)
        )


def least_bytes(model: Path, **more: bool) -> int:
    with pytest.raises(DoesNotFit) as caught:
        place_on_card(load_manifest(model), 1, None, **more)
    return caught.value.needed_bytes


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


@pytest.mark.long
def test_layers_move_between_passes(tmp_path: Path) -> None:
    model = prepared(tmp_path, "bf16")
    with Bench(model, None, None) as bench:
        wanted, least = bench.step(7, 0), least_bytes(model, embed_on_card=True)
        everything = bench.weights.memory_bytes
        for memory in (least, everything - 1, everything):
            bench.weights.retarget(memory)
            while bench.weights.settle():
                assert np.array_equal(bench.step(7, 0), wanted)
            assert bench.weights.memory_bytes <= memory and np.array_equal(bench.step(7, 0), wanted)
            assert bench.weights.streams == (memory < everything)
        with pytest.raises(DoesNotFit):
            bench.weights.retarget(least - 1)
        assert np.array_equal(bench.step(7, 0), wanted)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Live]:
    def make(model: Path, **sizes: Any) -> Live:
        monkeypatch.setattr(assemble, "choose", lambda _threads, note, *_: FakeCard(FakeGpu(3), note))
        return Live(
            model, tmp_path, device=4, host=2, nvme=0, kv_format="bf16", max_batch_rows=8, max_streams=2, **sizes
        )

    return make


def status(running: Live) -> WeightsStatus:
    found: WeightsStatus = running.engine.loop.call(running.engine.weights.statistics).result(10)
    return found


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
        assert not running.engine.weights.streams and status(running).device_bytes == manifest.bytes
    for host in (None, place_on_card(manifest, least, 1 << 30).host_bytes - 1):
        with live(model, weights_bytes=least, host_weights_bytes=host) as running:
            assert answers(running) == wanted
            found = status(running)
            assert found.memory_bytes <= least and found.lost == found.retries == 0
            assert found.device_bytes + found.host_bytes + found.nvme_bytes == manifest.bytes
            assert found.copied_bytes > 0 and (found.read_bytes > 0) == (found.nvme_bytes > 0) == (host is not None)
            assert any("layers are copied to the card in every step" in note for note in running.engine.notes)
