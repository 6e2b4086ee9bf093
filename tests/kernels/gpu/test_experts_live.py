"""A whole engine with a mixture whose experts come to a made-up card and go: tokens, what is told, resizes, faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.daemon.engine.live import Live
from tests.kernels.gpu.cards import Memory, live_on_card, weights_of
from tests.kernels.gpu.test_cached_experts import model_of, placements
from tests.tiers.fake_gpu import FakeGpu
from tierd.daemon.engine.model.misses import ComputeCost
from tierd.daemon.engine.tend import resize
from tierd.daemon.errors import OutOfSpace
from tierd.daemon.models.catalog import load_manifest

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(600), pytest.mark.long]

ASKS = [{"tokens": [7, 9, 250], "max_tokens": 4}, {"tokens": [31, 4], "max_tokens": 3}]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Live]:
    return partial(live_on_card, monkeypatch, tmp_path)


def answers(running: Live) -> list[list[int]]:
    found = running.run(ASKS, timeout_s=300)
    assert {end.ev for _, end in found} == {"done"}, found
    return [tokens for tokens, _ in found]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_every_placement_gives_the_same_tokens(family: str, live: Callable[..., Live], tmp_path: Path) -> None:
    model = model_of(tmp_path, family, "int4-g32", 3)
    with live(model) as running:
        wanted = answers(running)
        assert not running.engine.weights.streams
    for memory, host in placements(model).values():
        with live(model, weights_bytes=memory, host_weights_bytes=host) as running:
            assert answers(running) == wanted
            found = weights_of(running)
            assert found.memory_bytes <= memory and found.lost == found.retries == 0 and 0 < found.hits <= found.uses
            assert found.device_bytes + found.host_bytes + found.nvme_bytes == load_manifest(model).bytes
            assert any("the card has places for" in note for note in running.engine.notes)


def test_a_resize_moves_places_while_an_answer_is_written(live: Callable[..., Live], tmp_path: Path) -> None:
    model, memory = model_of(tmp_path), Memory()
    some, _ = placements(model)["half in CPU memory"]
    with live(model, memory) as running:
        wanted = answers(running)
        for size in (some, 1 << 30, some):
            number = running.submit(tokens=[7, 9, 250], max_tokens=16)
            asyncio.run(resize(running.engine, {"weights_bytes": size}))
            tokens, end = running.collect(number)[number]
            assert end.ev == "done" and tokens[:4] == wanted[0] and answers(running) == wanted
            assert running.engine.weights.streams == (size == some) and weights_of(running).memory_bytes <= size
        memory.left = 4
        with pytest.raises(OutOfSpace, match="not all weights came to their places"):
            asyncio.run(resize(running.engine, {"weights_bytes": 1 << 30}))
        memory.left = None
        assert running.engine.weights.streams and answers(running) == wanted and not running.deaths


def test_a_copy_that_fails_fails_its_requests_and_nothing_else(live: Callable[..., Live], tmp_path: Path) -> None:
    model, gpu = model_of(tmp_path), FakeGpu(3)
    memory, host = placements(model)["the least, half on the disk"]
    with live(model, None, gpu, weights_bytes=memory, host_weights_bytes=host) as running:
        wanted = answers(running)
        gpu.refusals["copy"] = 10**6
        ((_, end),) = running.run([{"tokens": [99, 12, 163], "max_tokens": 4}])
        assert end.ev == "failed" and "weights " in end.data["message"]
        gpu.refusals.clear()
        assert answers(running) == wanted and not running.deaths and running.engine.pager.check() == []


def test_the_processors_compute_what_is_missing_unless_they_are_told_not_to(
    live: Callable[..., Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tmp_path)
    memory, _ = placements(model)["half in CPU memory"]
    with live(model, weights_bytes=memory, processors=2, missing_experts="fetch") as running:
        wanted = answers(running)
        assert weights_of(running).computed == 0
    monkeypatch.setattr(ComputeCost, "of", lambda _self, rows: 1e-9 * rows)  # sooner than any link
    with live(model, weights_bytes=memory, processors=2) as running:
        assert answers(running) == wanted
        found = weights_of(running)
        assert 0 < found.computed <= found.uses - found.hits
