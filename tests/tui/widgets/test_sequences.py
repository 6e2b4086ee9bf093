"""Rows of requests: the token axis, one scale for all, restores."""

from __future__ import annotations

import pytest

from tierd.tui.snapshot import Snapshot
from tierd.tui.view import View, width_of
from tierd.tui.widgets.sequences import Sequences, axis
from tierd.tui.wire import EngineReport, SequenceRow

ENGINE = EngineReport(model="m", state="ready", running=2, waiting=1)


def drawn(row: SequenceRow, cells: int, longest: int) -> str:
    return "".join(text for text, _ in axis(row, View(), cells, longest))


def test_tokens_stand_from_left_to_right_by_where_they_lie() -> None:
    row = SequenceRow(1, "prefill", (("nvme", 40), ("moving", 10), ("device", 30), ("missing", 20)))
    assert drawn(row, 10, 100) == "░░░░◐███○○"


def test_rows_share_a_scale() -> None:
    assert drawn(SequenceRow(1, "decode", (("device", 50),)), 10, 100) == "█████     "


@pytest.mark.parametrize("cells", range(1, 40))
def test_an_axis_has_its_width_whatever_it_holds(cells: int) -> None:
    row = SequenceRow(1, "prefill", (("nvme", 1), ("device", 99_998), ("missing", 1)))
    assert len(drawn(row, cells, 100_000)) == cells


def panel(*rows: SequenceRow, reported: bool = True) -> Sequences:
    found = Sequences(View(), id="sequences")
    found.snapshot = Snapshot(engine=ENGINE, sequences=rows if reported else None)
    return found


def test_a_restore_tells_how_far_it_is() -> None:
    row = SequenceRow(7, "fetching", (("moving", 10),), restore_done=1, restore_total=4)
    text = "".join(part for part, _ in panel(row).paint(80, 5)[1])
    assert text.endswith("25% restored") and len(text) == 80


@pytest.mark.parametrize("width", [38, 59, 60, 120])
def test_rows_fit_their_width(width: int) -> None:
    row = SequenceRow(123, "decode", (("device", 1_000_000),), tokens_per_s=14.2, age_s=99.0)
    assert all(width_of(line) <= width for line in panel(row).paint(width, 5))


def test_the_filter_knows_phases_and_numbers() -> None:
    found = panel(SequenceRow(1, "decode"), SequenceRow(22, "waiting"))
    found.filter = "wait"
    found.paint(80, 5)
    assert found.selected is not None and found.selected.id == 22 and found.count == 1


def test_without_rows_the_counts_tell() -> None:
    text = ["".join(part for part, _ in line) for line in panel(reported=False).paint(80, 5)]
    assert text == ["2 running, 1 waiting", "rows of requests: not reported by this daemon"]


def test_no_request_is_not_the_same() -> None:
    assert panel().paint(80, 5) == [[("no request runs", "dim")]]
