from __future__ import annotations

import pytest

from tests.tiers.fakes import Rig, run
from tests.tiers.stand_ins import ManualMover
from tierd.tiers.errand import Errand, Slices
from tierd.tiers.errors import MoverClosed
from tierd.tiers.links import Link
from tierd.tiers.mover import Job, JobClass

FAR_S = float("inf")


class Walk(Errand):
    """Two slices of its own, and between them what a job returns."""

    def _slices(self) -> Slices:
        self.said = ["first"]
        yield True
        self.said.append((yield from self._by_mover(Link.DISK_READ, self.work)))
        yield True
        self.said.append("last")

    def work(self) -> str:
        return "read"


class Broken(Walk):
    def work(self) -> str:
        raise ValueError("no such page")


def test_slice_by_slice_and_on_by_itself_when_the_mover_is_done() -> None:
    rig = Rig()
    walk = Walk(rig.pager, FAR_S)
    assert not walk.advance() and walk.said == ["first"] and not walk.waits
    assert not walk.advance() and walk.waits
    assert not walk.advance() and walk.said == ["first"], "the job has not run"
    rig.manual.run_all()
    rig.poll()
    assert walk.said == ["first", "read"] and not walk.waits
    assert walk.advance() and walk.said[-1] == "last" and not walk.stopped
    assert walk.advance(), "it stays over"
    rig.close()


def test_an_error_of_a_job_ends_it() -> None:
    rig = Rig()
    walk = Broken(rig.pager, FAR_S)
    run(rig.pager, walk)
    assert walk.ended and str(walk.error) == "no such page" and walk.said == ["first"]
    rig.close()


def test_a_job_that_waits_is_taken_back_when_it_is_stopped() -> None:
    rig = Rig()
    walk = Walk(rig.pager, FAR_S)
    walk.advance()
    walk.advance()
    walk.stop("somebody said so")
    assert walk.ended and walk.stopped == "somebody said so" and rig.manual.queued == 0
    rig.poll()
    assert walk.advance() and walk.said == ["first"] and walk.error is None
    rig.close()


def test_its_deadline_stops_it_after_a_slice_at_least() -> None:
    rig = Rig()
    walk = Walk(rig.pager, rig.now_s)
    assert walk.advance() and walk.said == ["first"] and walk.stopped == "its time was over"
    rig.close()


def test_a_full_queue_holds_it_up_only() -> None:
    rig = Rig(mover=ManualMover(1, capacity=1))
    other = Job(lambda: None, Link.DISK_READ, 0)
    assert rig.mover.submit(other, JobClass.NOW)
    walk = Walk(rig.pager, FAR_S)
    for _ in range(3):
        assert not walk.advance()
    assert walk.waits
    rig.manual.run_all()
    rig.poll()
    run(rig.pager, walk)
    assert walk.said == ["first", "read", "last"]
    rig.close()


def test_a_mover_that_is_closed_ends_it() -> None:
    rig = Rig()
    walk = Walk(rig.pager, FAR_S)
    walk.advance()
    rig.close()
    with pytest.raises(MoverClosed):
        run(rig.pager, walk)
        assert walk.error is not None
        raise walk.error


class Patient(Errand):
    """Waits for something that no job of its own brings."""

    came = False

    def _slices(self) -> Slices:
        yield True
        while not self.came:
            yield False
        yield True


def test_an_errand_says_when_there_is_nothing_to_do_now() -> None:
    rig = Rig()
    patient = Patient(rig.pager, FAR_S)
    waits = []
    for turn in range(5):
        patient.came = turn >= 3
        assert not patient.advance() or turn == 4
        waits.append(patient.waits)
    assert waits == [False, True, True, False, False]
    rig.close()
