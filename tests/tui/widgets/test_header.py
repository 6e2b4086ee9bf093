"""The header: state, figures, and the bar when the daemon is gone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tui.rig import last_snapshot
from tierd.tui.snapshot import Phase, Snapshot, Standing
from tierd.tui.view import View, width_of
from tierd.tui.widgets.header import paint


def text(snapshot: Snapshot, width: int = 120, **more: bool) -> list[str]:
    options = {"paused": False, "readonly": False} | more
    lines = paint(snapshot, View(), width, now_s=20.0, **options)
    assert all(width_of(line) <= width for line in lines)
    return ["".join(part for part, _ in line) for line in lines]


@pytest.fixture
def busy(recordings: dict[str, Path]) -> Snapshot:
    return replace(last_snapshot(recordings["busy"]), standing=Standing(Phase.LIVE))


def test_model_state_and_rates_are_there(busy: Snapshot) -> None:
    first, second = text(busy)
    for part in ("smollm2-135m", "ready", "in 198 tok/s", "out 56.8 tok/s", "run 9", "wait 2"):
        assert part in first
    assert "step 68.4 ms" in second


@pytest.mark.parametrize("width", range(40, 200, 7))
def test_model_and_state_stay_at_every_width(busy: Snapshot, width: int) -> None:
    assert "smollm2-135m" in text(busy, width)[0] and "ready" in text(busy, width)[0]


def test_eighty_columns_hold_the_queue(busy: Snapshot) -> None:
    assert "wait 2" in text(busy, 78)[0]


def test_the_bar_tells_for_how_long_and_why(busy: Snapshot) -> None:
    gone = replace(busy, standing=Standing(Phase.DISCONNECTED, 12.0, "it is gone", "start it"))
    line = paint(gone, View(), 80, now_s=20.0, paused=False, readonly=False)[1]
    assert line[0][0].startswith(" DISCONNECTED 8.0s: it is gone (start it)") and len(line[0][0]) == 80
    assert line[0][1] == "alert"


def test_before_the_first_frame_it_says_so() -> None:
    assert text(Snapshot())[1].strip() == "connecting to the daemon"


def test_modes_are_shown(busy: Snapshot) -> None:
    assert text(busy, paused=True, readonly=True)[1].endswith("PAUSED  readonly")


def test_data_that_are_old_are_said_to_be(busy: Snapshot) -> None:
    assert "no answer" not in text(replace(busy, at_s=17.5))[1]
    assert text(replace(busy, at_s=15.5))[1].endswith("no answer for 4.5s")
    assert "no answer" not in text(replace(busy, at_s=15.5), paused=True)[1]


def test_a_replay_tells_its_place(busy: Snapshot) -> None:
    assert "frame 3 of 9" in text(replace(busy, standing=Standing(Phase.REPLAY, place=2, places=9)))[1]
