"""Weights that move between card, CPU memory and disk while something fails: passes keep their bits."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.counts import counted
from tests.kernels.gpu.card_bench import Bench, least_bytes, move_while_something_fails
from tests.kernels.gpu.cards import LAYERS, prepared
from tierd.daemon.engine.model import card_records
from tierd.daemon.engine.model.weights_status import NotMoved
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.placement import DoesNotFit
from tierd.daemon.models.placement_card import place_on_card
from tierd.tiers import weights_device
from tierd.tiers.errors import WeightsLost

pytestmark = pytest.mark.usefixtures("no_files_left")


def settle(bench: Bench) -> None:
    while bench.weights.settle():
        pass


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


def test_without_memory_for_slots_everything_stays(tmp_path: Path) -> None:
    model = prepared(tmp_path, "bf16")
    with Bench(model, None, None) as bench:
        wanted, least = bench.step(7, 0), least_bytes(model, embed_on_card=True)
        for left in range(3):  # two slots and a place
            bench.memory.left = left
            with pytest.raises(NotMoved, match="the card has .* free, .* are needed"):
                bench.weights.retarget(least)
            assert not bench.weights.streams and bench.weights.budget_bytes is None and not bench.memory.live
            assert np.array_equal(bench.step(7, 0), wanted)


def test_slots_lie_where_layers_lay_if_there_is_nothing_else(tmp_path: Path) -> None:
    model = prepared(tmp_path, "bf16")
    with Bench(model, None, None) as bench:
        wanted, least = bench.step(7, 0), least_bytes(model, embed_on_card=True)
        bench.memory.left = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench.decoder, "set_layer", lambda *_: setattr(bench.memory, "left", None))
            bench.weights.retarget(least)
        for index, layer in enumerate(bench.weights.layers):
            bench.decoder.set_layer(index, layer)
        assert bench.weights.streams and np.array_equal(bench.step(7, 0), wanted)


def test_a_layer_that_finds_no_room_goes_on_being_streamed(tmp_path: Path) -> None:
    model = prepared(tmp_path, "bf16")
    with Bench(model, None, None) as bench:
        wanted, everything = bench.step(7, 0), bench.weights.memory_bytes
        bench.weights.retarget(least_bytes(model, embed_on_card=True))
        settle(bench)
        bench.memory.left = 2
        bench.weights.retarget(everything)
        with pytest.raises(NotMoved, match="are needed"):
            settle(bench)
        assert sum(layer is not None for layer in bench.weights.layers) == 2
        assert not bench.weights.settle() and bench.weights.streams  # nobody tries again unasked
        assert np.array_equal(bench.step(7, 0), wanted)
        bench.memory.left = None
        bench.weights.retarget(everything)
        settle(bench)
        assert not bench.weights.streams and np.array_equal(bench.step(7, 0), wanted)
        assert len(bench.memory.live) == LAYERS  # no slots


def test_a_layer_comes_by_the_mover_and_its_errors_are_told(tmp_path: Path) -> None:
    model = prepared(tmp_path, "bf16")
    with Bench(model, None, None) as bench:
        wanted, everything = bench.step(7, 0), bench.weights.memory_bytes
        bench.weights.retarget(least_bytes(model, embed_on_card=True))
        settle(bench)
        bench.weights.retarget(everything)
        bench.gpu.refusals["copy"] = 20
        with pytest.raises(NotMoved, match=r"weights layer\.0: .*copy is refused"):
            settle(bench)
        bench.gpu.refusals.clear()
        assert np.array_equal(bench.step(7, 0), wanted)
        copied = bench.weights.statistics().copied_bytes
        bench.weights.retarget(everything)
        settle(bench)
        moved = bench.weights.statistics().copied_bytes - copied
        assert moved >= sum(record.bytes for record in bench.manifest.records if record.name.startswith("layer."))
        assert np.array_equal(bench.step(7, 0), wanted)


def test_what_a_stuck_copy_may_write_to_is_kept_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(card_records, "MOVE_WAIT_S", 0.05)
    model = prepared(tmp_path, "bf16")
    with Bench(model, None, None) as bench:
        wanted, everything = bench.step(7, 0), bench.weights.memory_bytes
        bench.weights.retarget(least_bytes(model, embed_on_card=True))
        settle(bench)
        bench.gpu.stuck = True
        passing = bench.weights._records.passing
        assert passing is not None
        passing.begin()
        with pytest.raises(WeightsLost, match="has not ended in time"):
            passing.layer(0, 0.0)
        had, counted_bytes = dict(bench.memory.live), bench.weights.memory_bytes
        with pytest.raises(NotMoved, match="has not ended in .* and may write to .* of slots"):
            bench.weights.retarget(everything)
        assert bench.memory.live == had and bench.weights.memory_bytes == counted_bytes
        with monkeypatch.context() as patch:
            patch.setattr(weights_device, "CLOSE_WAIT_S", 0.05)
            bench.weights.close()
        assert bench.memory.live == had and bench.gpu.registered and "a copy of weights is stuck" in caplog.text
        del passing
        bench.gpu.unstick()
        assert np.array_equal(bench.step(7, 0), wanted)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(counted(20, 3)))
def test_whatever_fails_passes_keep_their_bits(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    model = prepared(tmp_path, chance.choice(["bf16", "int4-g32"]))
    with Bench(model, None, None) as bench:
        wanted, most = bench.step(7, 0), bench.weights.memory_bytes
    least = least_bytes(model, embed_on_card=True)
    host = place_on_card(load_manifest(model), least, None, embed_on_card=True).host_bytes
    with Bench(model, most, chance.choice([None, host - 1]), seed) as bench:
        def target() -> int:
            return chance.randint(least - 1, most)

        move_while_something_fails(bench, wanted, chance, target, most_left=5, most_steps=5)
