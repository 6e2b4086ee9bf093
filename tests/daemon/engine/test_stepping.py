"""Steps that give way to newcomers."""

from __future__ import annotations

import pytest

from tests.daemon.engine.fakes import expected
from tests.daemon.engine.rig import Rig
from tierd.daemon.engine import stepping


def test_a_long_step_gives_way_to_a_newcomer_once_and_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "LONG_STEP_S", 0.0)
    rig = Rig(max_rows=64)
    prompt = [1 + place % 50 for place in range(150)]
    rig.submit(1, prompt, 3)
    asked: list[bool] = []

    def awaited() -> bool:
        asked.append(True)
        return True

    rig.turn()
    assert rig.streams.turn(awaited) and asked == [True]
    assert rig.streams.totals.dropped_steps == 1 and rig.streams.totals.prefill_rows == 64
    rig.submit(2, prompt[:1], 3)
    rig.streams.turn(awaited)  # never two in a row; and short steps are not worth it
    assert asked == [True] and rig.of(2, "failed") == []
    rig.run()
    assert rig.tokens(1) == expected(prompt, 3) and rig.tokens(2) == expected(prompt[:1], 3)


def test_a_step_does_not_give_way_to_one_for_whom_there_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "LONG_STEP_S", 0.0)
    for priority, dropped in ((0, 0), (5, 1)):  # one in the background gives its place to whoever comes
        rig = Rig(max_rows=64, max_streams=1)
        rig.submit(1, [1 + place % 50 for place in range(150)], 3, priority=priority)
        rig.turn()
        rig.streams.turn(lambda: True)
        assert rig.streams.totals.dropped_steps == dropped
        rig.run()


def test_a_short_step_is_one_launch_and_gives_way_to_nobody() -> None:
    rig = Rig(max_rows=64)
    rig.submit(1, [1 + place % 50 for place in range(150)], 3)
    rig.turn()  # measured: 64 rows take some milliseconds
    asked: list[bool] = []
    rig.streams.turn(lambda: bool(asked.append(True)) or True)
    assert not asked and rig.streams.totals.dropped_steps == 0
    rig.run()


def test_a_step_in_which_somebody_decodes_does_not_give_way() -> None:
    rig = Rig(max_rows=64)
    rig.submit(1, [1, 2, 3], 30)
    rig.turn(2)
    rig.submit(2, [4 + place % 50 for place in range(150)], 3)
    for _ in range(3):
        rig.streams.turn(lambda: True)
    assert rig.streams.totals.dropped_steps == 0
    rig.run()
