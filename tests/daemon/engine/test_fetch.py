"""Waiting for pages or computing them, and what a request is told that gets none."""

from __future__ import annotations

import pytest

from tests.daemon.engine.fakes import PAGE, expected
from tests.daemon.engine.rig import Rig
from tests.tiers.stand_ins import ManualMover
from tierd.daemon.engine import fetch
from tierd.daemon.engine.loading import GRACE_S
from tierd.daemon.engine.scheduler import Phase
from tierd.daemon.errors import EngineFailed, OutOfSpace
from tierd.tiers.errors import MoverClosed
from tierd.tiers.page import Tier
from tierd.tiers.policy import RecomputeCost

PROMPT = [number % 60 for number in range(40 * PAGE + 1)]


class LateMover(ManualMover):
    """Jobs run when `late` is off."""

    late = False

    def run_all(self) -> int:
        return 0 if self.late else super().run_all()


def stored(rig: Rig) -> None:
    """Leaves the prompt's pages in the store only."""
    rig.submit(1, PROMPT, 1)
    rig.run()
    assert rig.pager.flush(rig.clock() + 60) == 0
    for node in list(rig.pager.index.nodes.values()):
        if node.device >= 0:
            rig.pager.residency.evict(node, Tier.DEVICE)


def test_pages_that_come_are_waited_for() -> None:
    rig = Rig(store=64, max_rows=512, context=2000)
    stored(rig)
    rows = rig.streams.totals.prefill_rows
    rig.submit(2, PROMPT, 4)
    rig.run()
    assert rig.streams.totals.prefill_rows == rows + 1
    assert rig.tokens(2) == expected(PROMPT, 4)


def test_pages_that_are_late_are_computed_a_few_at_a_time() -> None:
    """The loads show nothing: a first step takes no longer than they were waited for, and then they come."""
    mover = LateMover(1)
    rig = Rig(store=64, max_rows=512, context=2000, mover=mover)
    stored(rig)
    rig.pager.residency.cost = RecomputeCost(0.01, 0.0)
    mover.late = True
    rows = rig.streams.totals.prefill_rows
    rig.submit(2, PROMPT, 4)
    rig.turn()
    assert rig.streams.count(Phase.FETCHING) == 1
    rig.clock.now_s += GRACE_S
    rig.turn(2)
    computed = rig.streams.totals.prefill_rows - rows
    assert PAGE <= computed <= 4 * PAGE
    mover.late = False
    rig.run()
    assert rig.streams.totals.prefill_rows - rows < computed + 2 * PAGE
    assert rig.tokens(2) == expected(PROMPT, 4)


def test_who_gets_no_page_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    assert isinstance(fetch.stuck(rig.pager, 1000), OutOfSpace)
    monkeypatch.setattr(rig.mover, "_dead", MoverClosed("tierd-writer died: the test says so"))
    error = fetch.stuck(rig.pager, 1000)
    assert isinstance(error, EngineFailed) and "the test says so" in str(error)
