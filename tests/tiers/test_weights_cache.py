"""Experts in slots: what is wanted comes, what is used most stays, guesses come early, and a clear loss otherwise."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.tiers.faults import GatedDisk, flip
from tierd.tiers import weights_read
from tierd.tiers.errors import WeightsLost
from tierd.tiers.links import Link
from tierd.tiers.mover import Disturbance, Job, JobClass, Mover
from tierd.tiers.weights_cache import ExpertCache
from tierd.tiers.weights_fetches import DiskFetches
from tierd.tiers.weights_file import Span, WeightFile
from tierd.tiers.weights_read import Piece

pytestmark = pytest.mark.usefixtures("no_files_left")

BYTES = 2 * 4096
COUNT = 16
SOON_S = 20.0


class Rig:
    def __init__(self, directory: Path, slots: int = 6, *, overlap: bool = True, mover: Mover | None = None) -> None:
        self.path = directory / "w"
        self.data = np.random.default_rng(3).integers(0, 256, COUNT * BYTES, dtype=np.uint8)
        self.path.write_bytes(self.data.tobytes())
        self.disk = GatedDisk()
        self.file = WeightFile(self.path, self.disk.as_io())
        self.mover = mover or Mover(1, disk_threads=3)
        pieces = [
            Piece(f"expert {n}", (Span(n * BYTES, BYTES),), (xxhash.xxh3_128_hexdigest(self.bytes_of(n).data),))
            for n in range(COUNT)
        ]
        self.fetches = DiskFetches(self.file, self.mover, pieces, slots, time.monotonic)
        self.cache = ExpertCache(self.fetches, COUNT, slots, overlap=overlap)
        self.disk.offsets.clear()

    def bytes_of(self, expert: int) -> np.ndarray:
        return self.data[expert * BYTES : (expert + 1) * BYTES]

    def bring(self, *wanted: int, guessed: tuple[int, ...] = (), within_s: float = SOON_S) -> list[list[int]]:
        """The waves; each expert of a wave has its bytes while the wave lasts."""
        waves = []
        deadline_s = time.monotonic() + within_s
        for wave in self.cache.bring(dict.fromkeys(wanted, 1), dict.fromkeys(guessed, 1), deadline_s):
            for expert, place in wave:
                assert np.array_equal(self.fetches.memory(place)[:BYTES], self.bytes_of(expert)), expert
            waves.append([expert for expert, _ in wave])
        assert sorted(expert for wave in waves for expert in wave) == sorted(wanted)
        return waves

    def passes(self, *wanted: int, times: int = 1) -> None:
        for _ in range(times):
            self.cache.begin(1)
            self.bring(*wanted)

    def settle(self) -> None:
        """Waits until nothing is being read."""
        deadline_s = time.monotonic() + SOON_S
        while any(slot.busy for slot in self.fetches._slots):
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    def reads(self) -> list[int]:
        """Experts that were read since the last call."""
        found = sorted(offset // BYTES for offset in self.disk.offsets)
        self.disk.offsets.clear()
        return found

    def close(self) -> None:
        self.disk.gate.set()
        assert self.cache.close()
        self.mover.close()
        self.file.close()


@pytest.mark.parametrize("slots", [1, 2, 5, COUNT])
@pytest.mark.parametrize("overlap", [True, False])
def test_every_layer_gets_what_it_wants(rigs: Callable[..., Rig], slots: int, overlap: bool) -> None:
    rig = rigs(slots, overlap=overlap, mover=Mover(1, disk_threads=3, before=Disturbance(5)))
    rng = np.random.default_rng(1)
    for _ in range(12):
        rig.cache.begin(1)
        for layer in range(2):
            wanted, guessed = (rng.choice(8, 3, replace=False) + 8 * at for at in (layer, 1 - layer))
            rig.bring(*wanted.tolist(), guessed=tuple(guessed.tolist()))
    stats = rig.cache.statistics()
    assert stats.uses == 12 * 2 * 3 and stats.lost == stats.retries == 0
    assert stats.hits > 0 or slots < 5
    assert rig.fetches.memory_bytes == slots * BYTES


def test_what_is_there_comes_first_and_is_not_read_again(rigs: Callable[..., Rig]) -> None:
    rig = rigs(6)
    rig.passes(1, 2)
    assert rig.reads() == [1, 2]
    rig.cache.begin(1)
    rig.disk.gate.clear()
    waves = rig.cache.bring({1: 1, 2: 1, 3: 1}, {}, time.monotonic() + SOON_S)
    assert sorted(expert for expert, _ in next(waves)) == [1, 2]
    rig.disk.gate.set()
    assert [expert for expert, _ in next(waves)] == [3]
    assert list(waves) == [] and rig.reads() == [3]
    assert (rig.cache.statistics().uses, rig.cache.statistics().hits) == (5, 2)


def test_the_most_used_stay_while_others_pass_through(rigs: Callable[..., Rig]) -> None:
    rig = rigs(4)
    rig.passes(0, 1, 2, times=4)
    rig.reads()
    for other in range(4, 12):
        rig.passes(0, 1, other)
    assert rig.reads() == list(range(4, 12))


def test_more_than_there_are_slots_come_one_after_the_other(rigs: Callable[..., Rig]) -> None:
    rig = rigs(3)
    rig.cache.begin(64)
    assert len(rig.bring(*range(COUNT))) >= COUNT // 3
    assert rig.reads() == list(range(COUNT))


def test_a_guess_is_there_when_it_was_right(rigs: Callable[..., Rig]) -> None:
    rig = rigs(6)
    rig.cache.begin(1)
    rig.bring(0, 1, guessed=(8, 9))
    rig.settle()
    assert rig.reads() == [0, 1, 8, 9]
    rig.bring(8, 10)
    assert rig.reads() == [10]
    stats = rig.cache.statistics()
    assert (stats.guesses, stats.right, stats.hits) == (2, 1, 1)


def test_a_guess_takes_no_place_from_what_is_used_more(rigs: Callable[..., Rig]) -> None:
    rig = rigs(4)
    rig.passes(0, 1, 2, 3, times=3)
    rig.cache.begin(1)
    rig.bring(0, 1, guessed=(8, 9))
    rig.settle()
    assert rig.reads() == [0, 1, 2, 3]


def test_without_overlap_nothing_is_read_ahead(rigs: Callable[..., Rig]) -> None:
    rig = rigs(6, overlap=False)
    rig.cache.begin(1)
    assert rig.bring(0, 1, guessed=(8, 9)) == [[0], [1]]
    assert rig.reads() == [0, 1]


def test_a_read_that_fails_once_is_tried_again(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.disk.failing[3 * BYTES] = 1
    rig.passes(3)
    assert rig.cache.statistics().retries == 1


def test_a_read_that_fails_is_a_loss_and_the_next_pass_tries_anew(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.disk.failing[3 * BYTES] = 3
    rig.cache.begin(1)
    with pytest.raises(WeightsLost, match="expert 3: reading failed twice"):
        rig.bring(3)
    rig.passes(3)
    assert rig.cache.statistics().lost == 1


def test_a_guess_that_fails_is_read_again_when_it_is_needed(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.disk.failing[9 * BYTES] = 2
    rig.cache.begin(1)
    rig.bring(0, guessed=(9,))
    rig.settle()
    rig.bring(9)
    assert rig.reads().count(9) == 3


@pytest.mark.parametrize("ends", [True, False])
def test_a_queue_that_is_full_is_waited_for(rigs: Callable[..., Rig], ends: bool) -> None:
    rig, gate = rigs(mover=Mover(1, disk_threads=3, capacity=1)), threading.Event()
    other = Job(lambda: gate.wait(SOON_S), Link.DISK_READ, 0, awaited=True)
    assert rig.mover.submit(other, JobClass.NOW)
    rig.cache.begin(1)
    if ends:
        threading.Timer(0.05, gate.set).start()
        assert sorted(sum(rig.bring(1, 2), [])) == [1, 2]
    else:
        with pytest.raises(WeightsLost, match="expert 1: the queue of the disk is full"):
            rig.bring(1, within_s=0.05)
    gate.set()
    assert rig.mover.wait_for([other], SOON_S)


def test_flipped_bytes_are_named(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    flip(rig.path, 5 * BYTES + 77)
    rig.cache.begin(1)
    with pytest.raises(WeightsLost, match="expert 5: the bytes on the disk are not those of the import"):
        rig.bring(5)
    rig.passes(4)


def test_a_disk_that_stands_still_is_a_loss_at_the_deadline(rigs: Callable[..., Rig]) -> None:
    rig = rigs(2)
    rig.cache.begin(1)
    rig.disk.gate.clear()
    with pytest.raises(WeightsLost, match="expert 5: it has not come in time"):
        rig.bring(5, within_s=0.05)
    rig.disk.gate.set()
    rig.passes(5, 6)


def test_what_comes_too_late_is_read_anew(rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of which a part was still running: the other part was taken back."""
    monkeypatch.setattr(weights_read, "PART_BYTES", BYTES // 2)
    rig = rigs(2, mover=Mover(1, disk_threads=1))
    rig.cache.begin(1)
    rig.disk.gate.clear()
    with pytest.raises(WeightsLost, match="expert 5: it has not come in time"):
        rig.bring(5, within_s=0.05)
    rig.cache.begin(1)
    threading.Timer(0.05, rig.disk.gate.set).start()
    rig.bring(5)


def test_when_all_places_are_being_read_into_it_waits_for_one(rigs: Callable[..., Rig]) -> None:
    rig = rigs(1)
    rig.cache.begin(1)
    rig.disk.gate.clear()
    with pytest.raises(WeightsLost):
        rig.bring(5, within_s=0.05)
    with pytest.raises(WeightsLost, match="expert 6: the disk does not answer"):
        rig.bring(6, within_s=0.05)
    rig.disk.gate.set()
    rig.passes(6)


def test_what_it_refuses(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    with pytest.raises(ValueError, match="0 slots for 16 experts"):
        DiskFetches(rig.file, rig.mover, rig.fetches.pieces, 0, time.monotonic)
    assert repr(rig.cache) == "<ExpertCache: 16 experts, 6 places>"
