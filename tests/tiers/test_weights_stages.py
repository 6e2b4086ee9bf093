"""Experts on a card: kernels find what a wave says, however late copies, kernels and the disk are."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.counts import counted
from tests.tiers.fake_gpu import FakeGpu, bytes_at
from tests.tiers.faults import GatedDisk, flip
from tierd.tiers import weights_device
from tierd.tiers.cuda_memory import DeviceBlock, pinned_array
from tierd.tiers.errors import WeightsLost
from tierd.tiers.gpu import DeviceRow
from tierd.tiers.links import Link
from tierd.tiers.mover import Disturbance, Job, JobClass, Mover
from tierd.tiers.weights_cache import ExpertCache
from tierd.tiers.weights_device import Record, SlotCopies
from tierd.tiers.weights_file import Span, WeightFile
from tierd.tiers.weights_read import Piece
from tierd.tiers.weights_stages import CardFetches, DiskBelow

pytestmark = pytest.mark.usefixtures("no_files_left")

RECORD = 2 * 4096
SOON_S = 20.0


class Rig:
    """`where`: of each expert, h in registered memory, d on the disk."""

    def __init__(
        self, directory: Path, where: str, places: int = 4, stages: int = 2, seed: int = 0, overlap: bool = True
    ) -> None:
        self.gpu = FakeGpu(seed)
        self.compute = self.gpu.new_stream()
        self.mover = Mover(3, disk_threads=2, before=Disturbance(seed, 0.0005))
        self.data = np.random.default_rng(seed).integers(0, 256, (len(where), RECORD), dtype=np.uint8)
        self.path = directory / f"w{seed}"
        self.path.write_bytes(self.data.tobytes())
        self.disk = GatedDisk()
        self.file = WeightFile(self.path, self.disk.as_io())
        self.block = DeviceBlock(self.gpu, (places + stages) * RECORD, (places + stages) * RECORD)
        rows = [self.block.row(n * RECORD, RECORD) for n in range(places + stages)]
        self.rows = [row for row in rows if isinstance(row, DeviceRow)]
        copies = SlotCopies(self.gpu, self.compute, self.mover, self.rows[places:], None)
        pieces = {
            n: Piece(f"expert {n}", (Span(n * RECORD, RECORD),), (xxhash.xxh3_128_hexdigest(self.data[n].data),))
            for n, place in enumerate(where)
            if place == "d"
        }
        slots = [pinned_array(self.gpu, RECORD) for _ in range(2)] if pieces else []
        below = DiskBelow(self.file, self.mover, pieces, slots, time.monotonic) if pieces else None
        self.slots = below.slots if below is not None else []
        records = [Record(f"expert {n}", RECORD, self.memory(n) if at == "h" else None) for n, at in enumerate(where)]
        self.stages = places
        self.fetches = CardFetches(records, copies, self.mover, places, self.lay_out, below, time.monotonic)
        self.cache = ExpertCache(self.fetches, len(where), places, overlap=overlap)
        self.disk.offsets.clear()
        self.wrong: list[int] = []

    def memory(self, number: int) -> np.ndarray:
        memory = pinned_array(self.gpu, RECORD)
        memory[:] = self.data[number]
        return memory

    def lay_out(self, stage: int, expert: int, place: int) -> None:
        """A kernel, in two steps."""
        dest, source, half = self.rows[place].address, self.rows[self.stages + stage].address, RECORD // 2

        def part(at: int) -> Callable[[], object]:
            return lambda: ctypes.memmove(dest + at, source + at, half)

        self.gpu.launch(self.compute, part(0), part(half))

    def look(self, expert: int, place: int) -> None:
        """A kernel that reads an expert."""
        right = self.data[expert].tobytes()

        def compare() -> None:
            if bytes_at(self.rows[place].address, RECORD) != right:
                self.wrong.append(expert)

        self.gpu.launch(self.compute, compare, compare)

    def bring(self, *wanted: int, guessed: tuple[int, ...] = (), within_s: float = SOON_S, **how: Any) -> list[Any]:
        waves = []
        deadline_s = time.monotonic() + within_s
        for wave in self.cache.bring(dict.fromkeys(wanted, 1), dict.fromkeys(guessed, 1), deadline_s, **how):
            for expert, place in wave:
                self.look(expert, place)
            waves.append([expert for expert, _ in wave])
            self.check()
        self.check()
        return waves

    def check(self) -> None:
        """The books of the cache and of what fills it agree."""
        held = {int(expert): place for place, expert in enumerate(self.cache._held) if expert >= 0}
        assert held == self.cache._places
        busy = {place for place in range(len(self.cache._held)) if self.fetches.is_busy(place)}
        assert busy <= set(held.values()) and all(way.place == at for at, way in self.fetches._ways.items())
        assert not [place for place in busy if self.fetches.is_full(place)]
        stages = [way.stage for way in self.fetches._ways.values() if way.stage is not None]
        slots = [way.read for way in self.fetches._ways.values() if way.read is not None]
        assert len(set(map(id, stages))) == len(stages) and len(set(map(id, slots))) == len(slots)
        taken = [slot for slot in self.fetches._copies.slots if slot.number >= 0]
        assert sorted(map(id, taken)) == sorted(map(id, stages))

    def close(self) -> None:
        self.disk.gate.set()
        self.gpu.unstick()
        self.gpu.finish()
        assert self.cache.close()
        self.mover.close()
        self.file.close()
        self.block.close()
        assert self.wrong == []


@pytest.mark.parametrize("seed", range(counted(60, 8)))
def test_kernels_find_what_a_wave_says(rigs: Callable[..., Rig], seed: int) -> None:
    where = ("h" * 16, "d" * 16, "hd" * 8, "hhhd" * 4)[seed % 4]
    rig = rigs(where, places=1 + seed % 6, stages=1 + seed % 3, seed=seed, overlap=seed % 5 > 0)
    rng = np.random.default_rng(seed)
    for _ in range(6):
        rig.cache.begin(1)
        for layer in range(2):
            wanted, guessed = (rng.choice(8, 3, replace=False) + 8 * at for at in (layer, 1 - layer))
            waves = rig.bring(*wanted.tolist(), guessed=tuple(guessed.tolist()))
            assert sorted(expert for wave in waves for expert in wave) == sorted(wanted.tolist())
    stats = rig.cache.statistics()
    assert stats.uses == 36 and stats.lost == stats.retries == 0
    assert rig.fetches.copied_bytes >= RECORD * (len(set(rig.cache._places)) or 1)


def test_what_is_there_is_not_copied_again(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hhhh")
    rig.bring(0, 1)
    rig.bring(0, 1)
    assert rig.fetches.copied_bytes == 2 * RECORD and rig.cache.statistics().hits == 2


def test_a_guess_is_there_when_it_is_asked_for(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hhhh", stages=3)
    rig.bring(0, guessed=(2, 3))
    running = [slot.job for slot in rig.fetches._copies.slots if slot.job is not None]
    assert rig.mover.wait_for(running, SOON_S)
    assert rig.bring(2, 3) == [[2, 3]] and rig.cache.statistics().right == 2


def test_guesses_leave_a_stage_for_what_is_needed_at_once(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hhhhhh", places=6, stages=2)
    rig.gpu.stuck = True
    rig.cache._fill_guesses({2: 1, 3: 1, 4: 1}, set())
    assert sum(slot.busy for slot in rig.fetches._copies.slots) == 1
    rig.gpu.unstick()
    rig.bring(5)


def test_those_that_others_compute_are_told_when_the_rest_is_on_its_way(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hhhhhhhh", places=3)
    rig.bring(0)
    asked = []

    def elsewhere(missing: tuple[int, ...], coming: int) -> list[int]:
        asked.append((missing, coming))
        return [2]

    assert rig.bring(0, 1, 2, elsewhere=elsewhere) == [[0], [], [1]] and asked == [((1, 2), 0)]
    assert 2 in rig.cache._places, "the next pass may need it, and there was room"
    assert rig.bring(2) == [[2]] and rig.cache.statistics().uses == 5


def test_a_copy_that_fails_is_a_loss_and_the_next_pass_goes_on(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hhhh")
    rig.gpu.refusals["copy"] = 1
    with pytest.raises(WeightsLost, match="expert 1: .*copy is refused"):
        rig.bring(1)
    assert rig.bring(1) == [[1]] and rig.cache.statistics().lost == 1


def test_a_guess_that_fails_is_fetched_when_it_is_needed(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hhhd")
    rig.disk.failing[3 * RECORD] = 2
    rig.bring(0, guessed=(3,))
    assert rig.mover.wait_for([job for slot in rig.slots for job in slot.jobs], SOON_S)
    assert rig.bring(3) == [[3]] and rig.cache.statistics().lost == 1


@pytest.mark.parametrize("ends", [True, False])
def test_a_queue_that_is_full_is_waited_for(rigs: Callable[..., Rig], ends: bool) -> None:
    rig, gate = rigs("hhdd"), threading.Event()
    rig.mover._capacity = 1
    other = Job(lambda: gate.wait(SOON_S), Link.DISK_WRITE, 0, awaited=True)
    assert rig.mover.submit(other, JobClass.NOW)
    if ends:
        threading.Timer(0.05, gate.set).start()
        assert sorted(sum(rig.bring(0, 2), [])) == [0, 2]
    else:
        with pytest.raises(WeightsLost, match="expert 0: it has not come in time"):
            rig.bring(0, within_s=0.05)
    gate.set()
    assert rig.mover.wait_for([other], SOON_S)


@pytest.mark.parametrize("flipped", [False, True])
def test_what_the_disk_does_not_give_is_named(rigs: Callable[..., Rig], flipped: bool) -> None:
    rig = rigs("dddd")
    if flipped:
        flip(rig.path, 2 * RECORD + 77)
    else:
        rig.disk.failing[2 * RECORD] = 2
    said = "the bytes on the disk are not those of the import" if flipped else "reading failed twice"
    with pytest.raises(WeightsLost, match=f"expert 2: {said}"):
        rig.bring(1, 2)
    assert rig.bring(0, 3) and rig.cache.statistics().lost == 1


def test_a_link_that_stands_still_is_a_loss_at_the_deadline(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hhhhhh", places=2, stages=1)
    rig.gpu.stuck = True
    with pytest.raises(WeightsLost, match="expert 0: it has not come in time"):
        rig.bring(0, within_s=0.05)
    with pytest.raises(WeightsLost, match="expert 1: it has not come in time"):
        rig.bring(1, within_s=0.05)  # the stage is still being written to
    assert not rig.fetches.rest(0.05)
    rig.gpu.unstick()
    assert [one for wave in rig.bring(0, 1, 2) for one in wave] == [0, 1, 2]
    assert rig.fetches.rest(SOON_S)


def test_a_pass_that_was_dropped_leaves_nothing_wrong(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hdhdhdhd", places=2)
    for wanted in ({0: 1, 1: 1, 2: 1}, {3: 1, 4: 1}):
        waves = rig.cache.bring(wanted, {5: 1, 6: 1}, time.monotonic() + SOON_S)
        next(waves)
        waves.close()
    assert sorted(one for wave in rig.bring(6, 7, 1) for one in wave) == [1, 6, 7]


def test_an_expert_that_comes_to_memory_is_no_longer_read(rigs: Callable[..., Rig]) -> None:
    rig = rigs("dddd", places=1)
    rig.bring(0)
    rig.fetches.lies_at(0, rig.memory(0))
    rig.bring(1)
    rig.disk.offsets.clear()
    assert rig.bring(0) == [[0]] and rig.disk.offsets == []


def test_stages_are_kept_by_a_copy_that_does_not_end(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_device, "CLOSE_WAIT_S", 0.05)
    rig = rigs("hh")
    rig.gpu.stuck = True
    with pytest.raises(WeightsLost):
        rig.bring(0, within_s=0.05)
    assert not rig.fetches.close(0.05)
    gc.collect()
    rig.gpu.unstick()
    assert rig.bring(0) == [[0]]


def test_what_it_refuses(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hh")
    copies, records = rig.fetches._copies, rig.fetches.records
    with pytest.raises(ValueError, match="0 places and 2 stages"):
        CardFetches(records, copies, rig.mover, 0, rig.lay_out, None, time.monotonic)
    with pytest.raises(ValueError, match="1 experts are on the disk"):
        CardFetches([Record("a", 1, None)], copies, rig.mover, 1, rig.lay_out, None, time.monotonic)
    with pytest.raises(ValueError, match="0 slots for 0 experts"):
        DiskBelow(rig.file, rig.mover, {}, [], time.monotonic)
