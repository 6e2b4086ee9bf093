"""Experts in memory and on the disk: the same tokens in every placement, faults named, what is told of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live
from tests.daemon.engine.model.test_weights import ASKS, ROWS, STREAMS, Faults, answers, least_bytes, live, status
from tests.tiers.faults import flip
from tierd.daemon.engine.scheduler import MIN_PREFILL_ROWS
from tierd.daemon.models.catalog import WEIGHTS, load_manifest
from tierd.daemon.models.placement import place

pytestmark = pytest.mark.usefixtures("no_files_left")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers, one of them dense; twelve experts in each of the others."""
    model = reference(
        "qwen3_moe, a dense layer", num_hidden_layers=5, num_experts=12, vocab_size=600, num_experts_per_tok=3,
        moe_intermediate_size=64,
    )  # fmt: skip
    return prepare(model, tmp_path_factory.mktemp("mixture"), "int8-g32")


def dense_bytes(model: Path) -> int:
    """Of all records that are no experts."""
    return sum(record.bytes for record in load_manifest(model).records if not record.name.startswith("expert."))


def rows(running: Live) -> dict[str, Any]:
    return {row.name: row for row in running.engine.loop.call(running.engine.weights.rows).result(10)}


def move(running: Live, memory: int) -> None:
    """Nothing of the engine outlives the call: its map of the weights would stay open."""
    weights, loop = running.engine.weights, running.engine.loop
    loop.call(lambda: weights.retarget(memory)).result(10)
    while loop.call(weights.settle).result(10):
        pass


def test_experts_with_biases_come_from_the_disk(tmp_path: Path) -> None:
    model = prepare(reference("gpt_oss", num_hidden_layers=2, num_local_experts=8), tmp_path, "int8-g32")
    with live(model, tmp_path, least_bytes(model)) as running:
        streamed, found = answers(running), status(running)
        assert 0 < found.hits < found.uses and found.lost == 0 and rows(running)["layer.1.experts"].tier == "nvme"
        move(running, load_manifest(model).bytes)
        assert not running.engine.weights.streams and answers(running) == streamed


@pytest.mark.long
def test_every_placement_gives_the_same_tokens(mixture: Path, tmp_path: Path) -> None:
    manifest, dense, least = load_manifest(mixture), dense_bytes(mixture), least_bytes(mixture)
    with live(mixture, tmp_path, None) as running:
        wanted = answers(running)
        assert not running.engine.weights.streams
        assert rows(running)["layer.0.experts"].tier == "device"
    for memory in (least, dense + (manifest.bytes - dense) // 2, manifest.bytes - 1):
        with live(mixture, tmp_path, memory) as running:
            assert answers(running) == wanted
            found = status(running)
            placed = place(manifest, memory, max(ROWS, STREAMS + MIN_PREFILL_ROWS))
            assert found.memory_bytes <= placed.memory_bytes <= memory and found.retries == found.lost == 0
            assert found.experts_bytes == placed.experts_bytes > 0 and found.read_bytes > 0
            # With the least memory a hit is one that came in time, which is up to the disk.
            assert (found.hits > 0 or memory == least) and found.hits <= found.uses
            assert found.guesses >= found.right_guesses
            told = rows(running)
            assert "expert.0.0" not in told and "layer.1.experts" not in told
            experts = told["layer.0.experts"]
            assert experts.tier == "nvme" and experts.hits <= experts.uses > 0
            assert experts.bytes == sum(r.bytes for r in manifest.records if r.name.startswith("expert.0."))


@pytest.mark.long
def test_experts_move_while_a_stream_runs(mixture: Path, tmp_path: Path) -> None:
    manifest, dense, least = load_manifest(mixture), dense_bytes(mixture), least_bytes(mixture)
    with live(mixture, tmp_path, None) as running:
        wanted = answers(running)
        for memory in (dense + (manifest.bytes - dense) // 3, least, manifest.bytes, manifest.bytes - 1):
            numbers = [running.submit(**ask) for ask in ASKS]
            move(running, memory)
            found = running.collect(*numbers)
            assert [found[number][0] for number in numbers] == wanted
            assert status(running).memory_bytes <= memory
            assert answers(running) == wanted
            assert running.engine.weights.streams == (memory < manifest.bytes)


def test_experts_come_to_memory_last_and_leave_it_again(mixture: Path, tmp_path: Path) -> None:
    names = [record.name for record in load_manifest(mixture).records]
    with live(mixture, tmp_path, least_bytes(mixture)) as running:
        wanted, weights, loop = answers(running), running.engine.weights, running.engine.loop
        slots = weights._experts.streamed
        loop.call(lambda: weights.retarget(load_manifest(mixture).bytes)).result(10)
        while "expert.2.11" not in weights._memory:
            assert loop.call(weights.settle).result(10)
            assert weights.memory_bytes <= load_manifest(mixture).bytes
            others = {name for name in names if not name.startswith("expert.")}
            assert others <= weights._memory.keys() or weights._memory.keys() <= others
        assert weights._experts.streamed is slots, "what was in the slots is still there"
        assert answers(running) == wanted
        left = {name: memory for name, memory in weights._memory.items() if name.startswith("expert.")}
        loop.call(lambda: weights.retarget(least_bytes(mixture))).result(10)
        for memory in left.values():
            memory[:] = 0xFF  # NaN for whoever still reads there
        assert answers(running) == wanted


def test_a_disk_error_fails_the_requests_and_nothing_else(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(mixture, tmp_path, least_bytes(mixture)) as running:
        wanted = answers(running)
        faults = Faults(monkeypatch)
        faults.left = 10**6
        ((_, end),) = running.run(ASKS[:1])
        assert end.ev == "failed" and "can't be read from its disk: weights " in end.data["message"]
        faults.left = 0
        assert answers(running) == wanted
        assert running.deaths == [] and running.engine.pager.check() == []


@pytest.mark.long
def test_a_flipped_byte_is_named(mixture: Path, tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    shutil.copytree(mixture, model)
    records = [record for record in load_manifest(model).records if record.name.startswith("expert.2.")]

    in_each = [record.offset + record.bytes // 3 for record in records]  # whichever a token needs

    with live(model, tmp_path / "work", None) as running:
        wanted = answers(running)
    with live(model, tmp_path / "work", least_bytes(model)) as running:
        flip(model / WEIGHTS, *in_each)
        ((_, end),) = running.run(ASKS[:1])
        assert end.ev == "failed" and "weights expert.2." in end.data["message"]
        assert "the bytes on the disk are not" in end.data["message"]
        flip(model / WEIGHTS, *in_each)
        assert answers(running) == wanted
