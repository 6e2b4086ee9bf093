"""Slots of weights on a card: kernels find what they ask for, however late copies, kernels and the disk are."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.counts import counted
from tests.tiers.fake_gpu import FakeGpu, bytes_at
from tests.tiers.faults import GatedDisk
from tierd.tiers.cuda_memory import DeviceBlock, pinned_array
from tierd.tiers.errors import WeightsLost
from tierd.tiers.gpu import DeviceRow, GpuError
from tierd.tiers.links import Link
from tierd.tiers.mover import Disturbance, Mover
from tierd.tiers.weights_device import DeviceRing, Record
from tierd.tiers.weights_file import Span, WeightFile
from tierd.tiers.weights_read import Piece
from tierd.tiers.weights_ring import WeightRing

pytestmark = pytest.mark.usefixtures("no_files_left")

RECORD = 2 * 4096
SOON_S = 20.0


class Rig:
    """`places`: of each record, h in registered memory, d on the disk."""

    def __init__(self, directory: Path, places: str, slots: int = 3, seed: int = 0, **options: Any) -> None:
        self.gpu = FakeGpu(seed)
        self.compute = self.gpu.new_stream()
        self.mover = Mover(3, disk_threads=2, before=Disturbance(seed, 0.0005))
        self.data = np.random.default_rng(seed).integers(0, 256, (len(places), RECORD), dtype=np.uint8)
        path = directory / f"w{seed}"
        path.write_bytes(self.data.tobytes())
        self.disk = GatedDisk()
        self.file = WeightFile(path, self.disk.as_io())
        pieces = [
            Piece(f"record {n}", (Span(n * RECORD, RECORD),), (xxhash.xxh3_128_hexdigest(self.data[n].data),))
            for n, place in enumerate(places)
            if place == "d"
        ]
        ring = None
        if pieces:
            ring = WeightRing(self.file, self.mover, pieces, 3, allocate=lambda size: pinned_array(self.gpu, size))
        self.block = DeviceBlock(self.gpu, slots * RECORD, slots * RECORD)
        rows = [self.block.row(slot * RECORD, RECORD) for slot in range(slots)]
        assert all(isinstance(row, DeviceRow) for row in rows)
        records = [self.record(n, place) for n, place in enumerate(places)]
        self.ring = DeviceRing(self.gpu, self.compute, self.mover, records, rows, disk=ring, **options)
        self.rows = rows
        self.wrong: list[int] = []

    def record(self, number: int, place: str) -> Record:
        memory = None
        if place == "h":
            memory = pinned_array(self.gpu, RECORD)
            memory[:] = self.data[number]
        return Record(f"record {number}", RECORD, memory)

    def use(self, number: int, launches: int = 3, within_s: float = SOON_S) -> None:
        """Kernels that read the slot, each in steps of its own, at some time."""
        slot = self.ring.take(number, time.monotonic() + within_s)
        row, right = self.rows[slot], self.data[number].tobytes()

        def look() -> None:
            if bytes_at(row.address, RECORD) != right:
                self.wrong.append(number)

        for _ in range(launches):
            self.gpu.launch(self.compute, look, look)

    def close(self) -> None:
        self.disk.gate.set()
        self.gpu.finish()
        assert self.ring.close()
        self.mover.close()
        self.file.close()
        self.block.close()
        assert self.wrong == []


@pytest.mark.parametrize("seed", range(counted(40, 6)))
def test_kernels_read_what_they_asked_for(rigs: Callable[..., Rig], seed: int) -> None:
    places = ("hhhhh", "ddddd", "hdhdd", "h", "dh", "hhdhhhd")[seed % 6]
    rig = rigs(places, slots=2 + seed % 2, seed=seed, overlap=seed % 5 > 0)
    for _ in range(3):
        rig.ring.begin()
        for number in range(len(places)):
            rig.use(number)
            if seed % 3 == 0:
                rig.ring.release()  # its bytes were taken over by the kernels so far
    rig.gpu.finish()
    assert rig.ring.statistics().lost == 0


def test_the_next_records_are_copied_while_one_is_used(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hhhhh")
    rig.ring.begin()
    rig.use(0)
    assert {slot.number for slot in rig.ring._slots} == {0, 1, 2}
    assert rig.mover.wait_for([slot.job for slot in rig.ring._slots if slot.job is not None], SOON_S)
    rig.use(1)
    assert {slot.number for slot in rig.ring._slots} == {1, 2, 3}  # although the kernels on 0 have not run


def test_what_stays_between_passes_is_not_copied_again(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hh")
    for _ in range(3):
        for number in range(2):
            rig.use(number)
        rig.gpu.finish()
    assert rig.ring.statistics().copied_bytes == 2 * RECORD and rig.ring.uses == [3, 3]


def test_a_pass_that_was_dropped_leaves_nothing_wrong(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hdhdhd")
    for stop in (3, 1, 6, 2, 6):
        rig.ring.begin()
        for number in range(stop):
            rig.use(number)


def test_a_record_that_the_disk_does_not_give_is_lost_and_the_next_pass_has_it(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hdh")
    rig.disk.failing = {RECORD: 2}
    rig.ring.begin()
    rig.use(0)
    with pytest.raises(WeightsLost, match="record 1"):
        rig.use(1)
    rig.ring.begin()
    for number in range(3):
        rig.use(number)


def test_a_card_that_refuses_a_copy_is_named(rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs("hhh")
    monkeypatch.setattr(rig.gpu, "copy", lambda *_: (_ for _ in ()).throw(GpuError(5, "an illegal address")))
    with pytest.raises(WeightsLost, match="an illegal address"):
        rig.use(0)
    monkeypatch.undo()
    rig.use(0)
    assert rig.ring.statistics().lost == 1


def test_a_mover_that_is_closed_ends_the_wait(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hh")
    rig.mover.close()
    with pytest.raises(WeightsLost, match="closed"):
        rig.use(0)


def test_copies_are_counted_where_pages_are(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hhh")
    rig.use(0)
    rig.gpu.finish()
    jobs = [slot.job for slot in rig.ring._slots if slot.job is not None]
    assert rig.mover.wait_for(jobs, SOON_S)
    assert rig.mover.statistics()[Link.HOST_TO_DEVICE].total_bytes == 3 * RECORD


def test_a_copy_that_does_not_end_ends_the_wait_at_the_deadline(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hhhh")
    rig.gpu.stuck = True
    start_s = time.monotonic()
    for _ in range(2):
        with pytest.raises(WeightsLost, match="has not ended in time"):
            rig.use(0, within_s=0.05)
    with pytest.raises(WeightsLost, match="does not answer"):
        rig.use(3, within_s=0.05)  # all slots are being filled
    assert time.monotonic() - start_s < SOON_S
    rig.gpu.unstick()
    for number in range(4):
        rig.use(number)
    assert rig.ring.statistics().lost == 3


def test_a_driver_that_hangs_holds_up_nobody_beyond_the_deadline(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, let_go = rigs("hhhh"), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(rig.gpu, "copy", lambda *_: let_go.wait(SOON_S))
        with pytest.raises(WeightsLost, match="has not ended in time"):
            rig.use(0, within_s=0.05)
        assert rig.ring.statistics().lost == 1 and not let_go.is_set()
    let_go.set()
    assert rig.ring.rest(SOON_S)


def test_a_full_queue_ends_the_wait_at_once(rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs("hhhhh")
    for number in range(3):
        rig.use(number)
    rig.gpu.finish()
    with monkeypatch.context() as patch:
        patch.setattr(rig.mover, "submit", lambda *_: False)
        with pytest.raises(WeightsLost, match="queue of the link to the card is full"):
            rig.use(4, within_s=float("inf"))
            rig.use(0, within_s=float("inf"))
            rig.use(1, within_s=float("inf"))
    rig.use(0)


def test_a_stuck_copy_keeps_its_memory_until_it_has_ended(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hh", slots=2)

    class Memory:
        pass

    slots, source = [Memory(), Memory()], pinned_array(rig.gpu, RECORD)
    alive = [weakref.ref(slot) for slot in slots]
    records = [Record("a", RECORD, source), rig.record(1, "h")]
    ring = DeviceRing(rig.gpu, rig.compute, rig.mover, records, rig.rows, owners=slots)
    registered = len(rig.gpu.registered)
    rig.gpu.stuck = True
    with pytest.raises(WeightsLost):
        ring.take(0, time.monotonic() + 0.01)
    assert not ring.rest(0.01) and not ring.close(0.01)
    job = ring._slots[0].job
    assert job is not None
    del ring, slots, source, records
    gc.collect()
    assert alive[0]() is not None and len(rig.gpu.registered) == registered  # although nobody else knows of it
    rig.gpu.unstick()
    assert rig.mover.wait_for([job], SOON_S)
    del job
    until_s = time.monotonic() + SOON_S
    while alive[0]() is not None and time.monotonic() < until_s:  # the thread that copied lets go of it soon
        gc.collect()
    assert alive[0]() is None and len(rig.gpu.registered) == registered - 2


def test_a_copy_whose_end_nobody_saw_counts_as_running_until_somebody_does(rigs: Callable[..., Rig]) -> None:
    rig = rigs("hhh", overlap=False)
    rig.gpu.refusals.update(copy=1, synchronize=2)
    with pytest.raises(WeightsLost, match="copy is refused"):
        rig.use(0)
    assert not rig.ring.rest(SOON_S) and not rig.gpu.refusals["synchronize"]
    assert rig.ring.rest(SOON_S)
    for number in range(3):
        rig.use(number)


@pytest.mark.parametrize("places", ["hhhhh", "ddddd", "hdhdd"])
def test_the_end_of_a_pass_starts_the_next_one(rigs: Callable[..., Rig], places: str) -> None:
    rig = rigs(places)
    rig.ring.begin()
    for number in range(5):
        rig.use(number)
    until_s = time.monotonic() + SOON_S
    while {slot.number for slot in rig.ring._slots} != {0, 1, 2}:  # those of the disk as they come
        assert time.monotonic() < until_s
        rig.ring.end()
    assert rig.mover.wait_for([slot.job for slot in rig.ring._slots if slot.job is not None], SOON_S)
    hits = sum(rig.ring.hits)
    rig.ring.begin()
    for number in range(3):
        rig.use(number)
    assert sum(rig.ring.hits) == hits + 3


def test_slots_too_small_are_refused() -> None:
    gpu = FakeGpu()
    with pytest.raises(ValueError, match="too small"):
        DeviceRing(gpu, gpu.new_stream(), None, [Record("a", 9, None)], [DeviceRow(0, 8)])
