"""The ring of weights: every piece in turn, read ahead, checked, and a clear loss where it can't be had."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.tiers.faults import GatedDisk, flip
from tests.tiers.stand_ins import ManualMover
from tierd.tiers.errors import WeightsLost
from tierd.tiers.mover import Disturbance, Mover
from tierd.tiers.weights_file import Span, WeightFile
from tierd.tiers.weights_read import Piece
from tierd.tiers.weights_ring import WeightRing

pytestmark = pytest.mark.usefixtures("no_files_left")

PIECE_BYTES = 3 * 4096
COUNT = 7
SOON_S = 20.0


class Rig:
    def __init__(self, directory: Path, slots: int = 3, *, overlap: bool = True, mover: Mover | None = None) -> None:
        self.path = directory / "w"
        self.data = np.random.default_rng(3).integers(0, 256, COUNT * PIECE_BYTES, dtype=np.uint8)
        self.path.write_bytes(self.data.tobytes())
        self.disk = GatedDisk()
        self.file = WeightFile(self.path, self.disk.as_io())
        self.mover = mover or Mover(1, disk_threads=3)
        self.ring = WeightRing(self.file, self.mover, [self.piece(n) for n in range(COUNT)], slots, overlap=overlap)
        self.disk.offsets.clear()

    def piece(self, number: int) -> Piece:
        """The first two are whole; each of the others is two ranges that lie apart and begin anywhere."""
        start = number * PIECE_BYTES
        spans = (Span(start, PIECE_BYTES),) if number < 2 else (Span(start + 100, 3000), Span(start + 8192, 1))
        digests = [xxhash.xxh3_128_hexdigest(self.data[s.offset : s.offset + s.num_bytes].data) for s in spans]
        return Piece(f"piece {number}", spans, tuple(digests))

    def take(self, number: int, within_s: float = SOON_S) -> None:
        slot = self.ring.take(number, time.monotonic() + within_s)
        piece, memory = self.ring.pieces[number], self.ring.memory(slot)
        for span, place in zip(piece.spans, piece.places, strict=True):
            wanted = self.data[span.offset : span.offset + span.num_bytes]
            assert np.array_equal(memory[place : place + span.num_bytes], wanted)

    def settle(self) -> None:
        """Waits until nothing is being read."""
        deadline_s = time.monotonic() + SOON_S
        while any(slot.busy for slot in self.ring._slots):
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    def read_pieces(self) -> list[int]:
        return [offset // PIECE_BYTES for offset in self.disk.offsets if offset % PIECE_BYTES == 0]

    def close(self) -> None:
        self.disk.gate.set()
        assert self.ring.close()
        self.mover.close()
        self.file.close()


@pytest.mark.parametrize("slots", [1, 2, 3, COUNT])
@pytest.mark.parametrize("overlap", [True, False])
def test_every_pass_finds_every_piece(rigs: Callable[..., Rig], slots: int, overlap: bool) -> None:
    rig = rigs(slots, overlap=overlap, mover=Mover(1, disk_threads=3, before=Disturbance(5)))
    for _ in range(4):
        for number in range(COUNT):
            rig.take(number)
    rig.settle()
    stats = rig.ring.statistics()
    if slots == COUNT:
        assert stats.pieces == COUNT
    elif overlap:
        assert 4 * COUNT <= stats.pieces < 4 * COUNT + slots
    else:
        assert COUNT < stats.pieces <= 4 * COUNT  # those that nothing displaces stay
    assert stats.retries == stats.lost == 0


def test_the_next_pieces_are_read_while_one_is_used(rigs: Callable[..., Rig]) -> None:
    rig = rigs(3)
    rig.take(0)
    rig.settle()
    assert sorted(rig.read_pieces()) == [0, 1, 2]
    rig.take(COUNT - 1)  # the pass after this one begins at 0, which is still here
    rig.settle()
    assert sorted(rig.read_pieces()) == [0, 1, 2, COUNT - 1]


def test_the_end_of_a_pass_makes_room_for_the_next_one(rigs: Callable[..., Rig]) -> None:
    rig = rigs(3)
    rig.take(COUNT - 1)
    rig.settle()
    assert sorted(rig.read_pieces()) == [0, 1, COUNT - 1]
    rig.ring.end()
    rig.settle()
    assert sorted(rig.read_pieces()) == [0, 1, 2, COUNT - 1]


def test_without_overlap_nothing_is_read_ahead(rigs: Callable[..., Rig]) -> None:
    rig = rigs(3, overlap=False)
    for number in range(3):
        rig.take(number)
        rig.ring.end()
        rig.settle()
        assert rig.read_pieces() == list(range(number + 1))


def test_a_pass_that_leaves_pieces_out(rigs: Callable[..., Rig]) -> None:
    rig = rigs(2)
    order = [1, 3, 6]
    rig.ring.begin(order)
    for _ in range(3):
        for number in order:
            rig.take(number)
    rig.settle()
    assert set(rig.read_pieces()) == set(order)


def test_a_pass_that_was_given_up_and_begun_again(rigs: Callable[..., Rig]) -> None:
    rig = rigs(3, mover=Mover(1, disk_threads=1, before=Disturbance(6)))
    for stop in (3, 5, 1, 6, 2):
        rig.ring.begin(range(COUNT))
        for number in range(stop):
            rig.take(number)


def test_look_ahead_never_goes_before_what_is_needed_now(tmp_path: Path) -> None:
    mover = ManualMover(1)
    rig = Rig(tmp_path, 3, mover=mover)  # type: ignore[arg-type]
    queued: list[tuple[int, float]] = []
    submit = mover.submit

    def note(job: Any, klass: Any, deadline_s: float = float("inf")) -> bool:
        queued.append((int(klass), deadline_s))
        return submit(job, klass, deadline_s)

    mover.submit = note  # type: ignore[method-assign]
    rig.ring._pace._period_s = 0.5
    now_s = time.monotonic()
    rig.take(0)
    deadlines = [deadline_s for _, deadline_s in queued]
    assert deadlines == sorted(deadlines) and deadlines[-1] - deadlines[0] > 0.5
    assert abs(deadlines[0] - now_s) < 0.5
    rig.close()


def test_a_read_that_fails_once_is_tried_again(rigs: Callable[..., Rig]) -> None:
    rig = rigs(2)
    rig.disk.failing = {0: 1, 2 * PIECE_BYTES: 1}
    for number in range(COUNT):
        rig.take(number)
    stats = rig.ring.statistics()
    assert stats.retries == 2 and stats.lost == 0


def test_a_disk_that_fails_is_a_loss_and_is_asked_again_later(rigs: Callable[..., Rig]) -> None:
    rig = rigs(3)
    rig.disk.failing = {2 * PIECE_BYTES: 10**6}
    rig.take(0)
    rig.take(1)
    for _ in range(2):
        with pytest.raises(WeightsLost, match="weights piece 2: reading failed twice: Input/output error") as caught:
            rig.take(2)
        assert caught.value.record == "piece 2"
    rig.disk.failing = {}
    rig.take(2)
    rig.take(3)
    assert rig.ring.statistics().lost >= 2


def test_what_failed_while_it_was_read_ahead_is_read_again(rigs: Callable[..., Rig]) -> None:
    rig = rigs(3)
    rig.disk.failing = {2 * PIECE_BYTES: 2}
    rig.take(0)
    rig.settle()
    for number in range(4):
        rig.take(number)
    assert rig.ring.statistics().lost == 1


def test_a_flipped_byte_is_named_and_never_used(rigs: Callable[..., Rig]) -> None:
    rig = rigs(3)
    flip(rig.path, 4 * PIECE_BYTES + 8192)
    for number in range(4):
        rig.take(number)
    with pytest.raises(WeightsLost, match="weights piece 4: the bytes on the disk are not those of the import"):
        rig.take(4)
    assert rig.ring.statistics().retries >= 1
    rig.path.write_bytes(rig.data.tobytes())  # the same file, mended
    rig.take(4)


def test_a_disk_that_hangs_is_waited_for_until_the_deadline(rigs: Callable[..., Rig]) -> None:
    rig = rigs(2)
    rig.disk.gate.clear()
    with pytest.raises(WeightsLost, match="piece 0: it has not come in time"):
        rig.take(0, within_s=0.05)
    with pytest.raises(WeightsLost, match="piece 5: the disk does not answer"):
        rig.take(5, within_s=0.05)  # both slots belong to reads that hang
    rig.disk.gate.set()
    for number in range(COUNT):
        rig.take(number)


def test_a_full_queue_is_a_loss(rigs: Callable[..., Rig]) -> None:
    rig = rigs(3, mover=Mover(1, disk_threads=1, capacity=1))
    rig.disk.gate.clear()
    threading.Timer(0.05, rig.disk.gate.set).start()
    rig.take(0)  # one read at a time: nothing is read ahead, and nothing is lost
    rig.settle()
    rig.take(1)
    closed = rigs(3)
    closed.mover.close()
    with pytest.raises(WeightsLost, match="the mover is closed"):
        closed.take(0)


def test_a_ring_needs_slots_and_pieces(rigs: Callable[..., Rig]) -> None:
    rig = rigs(3)
    for pieces, slots in ((rig.ring.pieces, 0), ((), 3)):
        with pytest.raises(ValueError, match="slots for"):
            WeightRing(rig.file, rig.mover, pieces, slots)
