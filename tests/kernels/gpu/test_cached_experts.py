"""Experts that come to a made-up card and go: the bits of a run that has all of them, whatever fails on the way."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.counts import counted
from tests.kernels.gpu.card_bench import Bench, least_bytes, move_while_something_fails
from tests.kernels.gpu.cards import prepared
from tests.tiers.faults import flip
from tierd.daemon.engine.model import card_records
from tierd.daemon.engine.model.weights_status import NotMoved, WeightsStatus
from tierd.daemon.models.catalog import WEIGHTS, load_manifest
from tierd.daemon.models.placement_card import CardPlacement, place_on_card, record_card_bytes
from tierd.kernels.cpu.weights import Floats
from tierd.tiers.errors import WeightsLost

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(600)]

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": False},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "mlp_only_layers": [1], "norm_topk_prob": True, "attention_bias": False,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 12, "num_experts_per_tok": 3, "sliding_window": 20,
        "rope_scaling": None,
    },
}  # fmt: skip
TOKENS = [7, 9, 250, 31, 4, 99, 163, 12]


def model_of(directory: Path, family: str = "gpt_oss", format: str = "int8-g32", layers: int = 2) -> Path:
    return prepared(directory, format, layers, 64, **FAMILIES[family])


def placements(model: Path) -> dict[str, tuple[int, int | None]]:
    """Memory of the card and of the computer: for some experts more than the least, and for the least of everything."""
    manifest = load_manifest(model)
    sizes = {record.name: record_card_bytes(record) for record in manifest.records}
    experts = [record.bytes for record in manifest.records if record.name.startswith("expert.")]
    whole, least = sum(sizes.values()), least_bytes(model)
    some = whole - sum(sizes[record.name] for record in manifest.records if record.name.startswith("expert.")) // 2
    below = place_on_card(manifest, least, None).host_bytes
    return {
        "half in CPU memory": (max(some, least), None),
        "the least, half on the disk": (least, below - sum(experts) // 2),
        "the least, all on the disk": (least, below - sum(experts) + 4 * max(experts)),
    }


def placed(bench: Bench, memory: int, host: int | None) -> CardPlacement:
    return place_on_card(bench.manifest, memory, host)


def steps(bench: Bench) -> list[np.ndarray]:
    return [bench.step(token, at) for at, token in enumerate(TOKENS[:2])]


def right(bench: Bench, wanted: list[np.ndarray]) -> bool:
    return all(itertools.starmap(np.array_equal, zip(steps(bench), wanted, strict=True)))


def status(bench: Bench) -> WeightsStatus:
    return bench.weights.statistics()


def found_on_card(bench: Bench) -> tuple[set[int], set[int]]:
    """The experts that the decoder finds, and those that lie in places, by number among all."""
    experts = bench.weights._records.experts
    assert experts.cached is not None
    here = [table.is_here(n) for table in experts.tables.values() for n in range(experts.cached._count)]
    return {number for number, is_here in enumerate(here) if is_here}, set(experts.cached._found)


def check_placements(model: Path, names: list[str]) -> None:
    with Bench(model, None, None) as bench:
        wanted = steps(bench)
        assert not bench.weights.streams and {row.tier for row in bench.weights.rows()} == {"device"}
    for memory, host in (placements(model)[name] for name in names):
        with Bench(model, memory, host) as bench:
            found = placed(bench, memory, host)
            assert found.expert_slots and status(bench).memory_bytes == found.device_bytes <= memory
            assert bench.weights.streams and right(bench, wanted) and right(bench, wanted)
            finds, lie = found_on_card(bench)
            assert finds == lie == set(bench.weights._records.experts.cached._lie.values())
            assert 0 < len(lie) <= found.expert_slots
            now = status(bench)
            assert now.device_bytes + now.host_bytes + now.nvme_bytes == bench.manifest.bytes
            assert now.experts_bytes == found.experts_bytes and now.lost == now.retries == now.computed == 0
            assert 0 < now.hits <= now.uses and now.copied_bytes > 0 and now.right_guesses <= now.guesses
            assert (now.read_bytes > 0) == (now.nvme_bytes > 0) == (host is not None)
            told = {row.name: row for row in bench.weights.rows()}
            assert told["layer.0.experts"].tier == ("nvme" if host is not None else "host")
            assert 0 < told["layer.0.experts"].uses and not any(name.startswith("expert.") for name in told)
            assert sum(row.bytes for row in told.values()) == bench.manifest.bytes
            assert "experts" in bench.weights.describe()


def test_a_placement_has_the_bits_of_the_whole(tmp_path: Path) -> None:
    check_placements(model_of(tmp_path), ["the least, half on the disk"])


@pytest.mark.long
@pytest.mark.parametrize("format", ["int8-g32", "int4-g32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_placement_has_the_bits_of_the_whole(family: str, format: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, family, format, 3)
    check_placements(model, list(placements(model)))


def test_fewer_places_than_a_step_needs(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    memory, host = placements(model)["the least, half on the disk"]
    with Bench(model, None, None) as bench:
        wanted = bench.chunk(TOKENS, 0)
    with Bench(model, memory, host) as bench:
        cached = bench.weights._records.experts.cached
        assert cached is not None and len(cached.memory.slots) == 6
        assert np.array_equal(bench.chunk(TOKENS, 0), wanted)
        most = max(cached.used(layer)[1] for layer in range(2))
        del cached
        assert most > 6, "no layer wanted more experts than there are places"


def test_an_expert_that_came_elsewhere_is_found_when_its_old_place_is_taken(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    with Bench(model, *placements(model)["the least, half on the disk"]) as bench:
        cached = bench.weights._records.experts.cached
        assert cached is not None
        for expert, place in ((3, 0), (3, 1), (5, 0)):  # given up at 0 for 5, it was wanted again before that came
            cached._lay_out(0, expert, place)
        cached._tell()
        del cached
        assert found_on_card(bench) == ({3, 5}, {3, 5})


@pytest.mark.long
def test_experts_that_stay_for_a_while_come_and_go_again(tmp_path: Path) -> None:
    """The cache had some of them when they were given memory of their own, others were on their way to it."""
    model = model_of(tmp_path)
    memory, _ = placements(model)["half in CPU memory"]
    least = least_bytes(model, embed_on_card=True)
    with Bench(model, None, None) as bench:
        wanted, whole = bench.step(7, 0), status(bench).memory_bytes
    with Bench(model, memory, None) as bench:
        bench.weights.retarget(least)
        for _ in range(2):
            assert np.array_equal(bench.step(7, 0), wanted)
            bench.weights.retarget(whole)
            cached = bench.weights._records.experts.cached
            assert cached is not None
            cached._cache._fill_guesses(dict.fromkeys(range(24), 1), set())
            for _ in range(20):
                assert bench.weights.settle()
            assert np.array_equal(bench.step(7, 0), wanted)
            bench.weights.retarget(least)
            del cached
            assert np.array_equal(bench.step(7, 0), wanted)
            finds, found = found_on_card(bench)
            assert finds == found


def test_experts_move_with_the_memory_they_are_given(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    with Bench(model, None, None) as bench:
        wanted, whole = bench.step(7, 0), status(bench).memory_bytes
        least = least_bytes(model, embed_on_card=True)
        for memory in (least, whole - 1, whole):
            bench.weights.retarget(memory)
            found = place_on_card(bench.manifest, memory, None, embed_on_card=True)
            while bench.weights.settle():
                pass
            assert status(bench).memory_bytes == found.device_bytes <= memory
            assert bench.weights.streams == (memory < whole) and np.array_equal(bench.step(7, 0), wanted)
            assert (bench.weights._records.experts.cached is None) == (memory == whole)
            live = sum(bench.memory.live.values())
            assert live <= status(bench).memory_bytes + 256 * len(bench.memory.live)


@pytest.mark.long
def test_passes_go_on_while_experts_move(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    with Bench(model, None, None) as bench:
        wanted, whole = bench.step(7, 0), status(bench).memory_bytes
        least = least_bytes(model, embed_on_card=True)
        for memory in (least, whole - 1, (least + whole) // 2, least, whole, whole - 1):
            bench.weights.retarget(memory)
            while bench.weights.settle():
                assert np.array_equal(bench.step(7, 0), wanted)


@pytest.mark.long
def test_without_memory_for_places_everything_stays(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    with Bench(model, None, None) as bench:
        wanted, least = bench.step(7, 0), least_bytes(model, embed_on_card=True)
        for left in (0, 4, 8):
            bench.memory.left = left
            with pytest.raises(NotMoved, match="are needed"):
                bench.weights.retarget(least)
            bench.memory.left = None
            assert not bench.weights.streams and np.array_equal(bench.step(7, 0), wanted)


@pytest.mark.long
def test_an_expert_that_finds_no_room_goes_on_coming_and_going(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    with Bench(model, None, None) as bench:
        wanted, whole = bench.step(7, 0), status(bench).memory_bytes
        bench.weights.retarget(least_bytes(model, embed_on_card=True))
        while bench.weights.settle():
            pass
        bench.weights.retarget(whole)
        bench.memory.left = 8
        with pytest.raises(NotMoved, match="are needed"):
            while bench.weights.settle():
                pass
        bench.memory.left = None
        kept = len(bench.weights._records.experts.kept)
        assert 0 < kept < 24 and bench.weights.streams and np.array_equal(bench.step(7, 0), wanted)
        assert not bench.weights.settle()
        bench.weights.retarget(whole)
        while bench.weights.settle():
            pass
        assert not bench.weights.streams and np.array_equal(bench.step(7, 0), wanted)


@pytest.mark.parametrize("way", ["flip", *(pytest.param(way, marks=pytest.mark.long) for way in ("disk", "link"))])
def test_what_does_not_come_is_named_and_the_next_pass_is_right(way: str, tmp_path: Path) -> None:
    model = model_of(tmp_path)
    memory, host = placements(model)["the least, all on the disk"]
    with Bench(model, memory, host) as bench:
        wanted = bench.step(7, 0)
    records = [record for record in load_manifest(model).records if record.name.startswith("expert.1.")]
    in_each = [record.offset + record.bytes // 3 for record in records]  # whichever a token needs
    with Bench(model, memory, host) as bench:
        if way == "flip":
            flip(model / WEIGHTS, *in_each)
        if way == "link":
            bench.gpu.refusals["copy"] = 50
        if way == "disk":
            bench.disk.failing.update({record.offset: 1000 for record in records})
        with pytest.raises(WeightsLost, match=r"weights (layer|expert)\.") as caught:
            bench.step(7, 0)
        if way == "flip":
            assert "expert.1." in str(caught.value) and "not those of the import" in str(caught.value)
            flip(model / WEIGHTS, *in_each)
        del caught
        bench.gpu.refusals.clear()
        bench.disk.failing.clear()
        assert np.array_equal(bench.step(7, 0), wanted)


def test_what_a_stuck_copy_may_write_to_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_records, "MOVE_WAIT_S", 0.05)
    model = model_of(tmp_path)
    memory, host = placements(model)["half in CPU memory"]
    with Bench(model, memory, host) as bench:
        wanted = bench.step(7, 0)
        experts = bench.weights.experts(0.0)
        assert experts is not None
        bench.gpu.stuck = True
        missing = [expert for expert in range(12) if expert not in experts._cache._places][:2]
        with pytest.raises(WeightsLost, match="has not come in time"):
            for _ in experts.bring(0, dict.fromkeys(missing, 1), {}, rows_of):
                pass
        del experts
        with pytest.raises(NotMoved, match="has not ended in"):
            bench.weights.retarget(memory - 1)
        bench.gpu.unstick()
        assert np.array_equal(bench.step(7, 0), wanted)


def rows_of(expert: int) -> Floats:
    raise AssertionError(f"nobody computes expert {expert}")


def test_the_processors_compute_what_is_missing_if_that_is_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tmp_path)
    memory, _ = placements(model)["half in CPU memory"]
    with Bench(model, None, None) as bench:
        wanted = steps(bench)
    with Bench(model, memory, None, threads=2) as bench, monkeypatch.context() as patch:
        check_computed(bench, wanted, patch)


def check_computed(bench: Bench, wanted: list[np.ndarray], patch: pytest.MonkeyPatch) -> None:
    """A function, so that nothing of the bench is held by its names."""
    cached = bench.weights._records.experts.cached
    assert cached is not None and cached.processors is not None and cached.processors.cost is not None
    compute, computed = cached.processors.compute, list[Mapping[int, Floats]]()

    def noted(layer: int, rows: Mapping[int, Floats]) -> dict[int, Floats]:
        computed.append(rows)
        return compute(layer, rows)

    patch.setattr(cached.processors, "compute", noted)
    patch.setattr(cached.processors.cost, "of", lambda rows: 1e-9 * rows)  # sooner than any link
    for found, logits in zip(steps(bench), wanted, strict=True):
        assert np.abs(found - logits).max() < 0.05 * np.abs(logits).max() and found.argmax() == logits.argmax()
    now = status(bench)
    assert now.computed == sum(map(len, computed)) > 0 and now.hits + now.computed <= now.uses
    patch.setattr(cached.processors.cost, "of", lambda rows: 1e9)
    steps(bench)
    assert status(bench).computed == now.computed


@pytest.mark.long
@pytest.mark.parametrize("seed", range(counted(20, 3)))
def test_whatever_fails_passes_keep_their_bits(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    model = model_of(tmp_path, chance.choice(list(FAMILIES)), chance.choice(["bf16", "int4-g32"]))
    with Bench(model, None, None) as bench:
        wanted, most = bench.step(7, 0), bench.weights.memory_bytes
    least = least_bytes(model, embed_on_card=True)
    host = place_on_card(load_manifest(model), least, None, embed_on_card=True).host_bytes
    with Bench(model, most, chance.choice([None, host - 1]) if host else None, seed) as bench:
        def target() -> int:
            return chance.choice([chance.randint(least - 1, most), most])

        move_while_something_fails(bench, wanted, chance, target, most_left=12, most_steps=40)
