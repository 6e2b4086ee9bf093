"""Gauges: parts in proportion, nothing that is there without a cell, figures that add up."""

from __future__ import annotations

import pytest

from tests.tui.scenes import tier
from tierd.tui.snapshot import Snapshot
from tierd.tui.view import View, width_of
from tierd.tui.widgets.gauges import bar, paint
from tierd.tui.wire import DaemonReport, EngineReport, TierReport


def drawn(report: TierReport, cells: int, high: int | None = None) -> str:
    return "".join(text for text, _ in bar("device", report, View(), cells, high))


def lines(height: int, width: int = 60, **tiers: TierReport) -> list[str]:
    engine = EngineReport(model="m", state="ready", tiers=tiers)
    painted = paint(Snapshot(engine=engine), View(), width, height)
    assert all(width_of(line) <= width for line in painted)
    return ["".join(text for text, _ in line) for line in painted]


def test_parts_have_cells_by_size() -> None:
    assert drawn(tier(100, 50, 20, 10), 10) == "█████▆▆◐··"


@pytest.mark.parametrize("cells", range(5, 60))
def test_a_bar_is_as_long_as_it_has_to_be_and_shows_all_there_is(cells: int) -> None:
    text = drawn(tier(100_000, 1, 1, 1), cells)
    assert len(text) == cells
    assert {"█", "▆", "◐", "·"} == set(text)


def test_the_most_that_was_in_use_is_marked() -> None:
    assert drawn(tier(100, 10, 0), 10, high=70) == "█······│··"


def test_a_mark_at_the_very_end_stays_on_the_bar() -> None:
    assert drawn(tier(100, 100, 0), 10, high=100) == "█████████│"


def test_weights_count() -> None:
    report = tier(100, 50, 0, weights_bytes=100 << 20)
    assert drawn(report, 8) == "▚▚▚▚██··"
    assert "157 MB of 210 MB" in lines(3, device=report)[0]
    assert "75%" in lines(3, device=report)[0]


def test_a_tier_that_is_off_says_so() -> None:
    assert lines(3, host=TierReport())[0].split() == ["RAM", "off"]


def test_details_come_with_room() -> None:
    tiers = {"device": tier(100, 50, 25, evictions=7), "nvme": tier(10, 0, 5)}
    assert len(lines(2, 90, **tiers)) == 2
    text = lines(8, 90, **tiers)
    assert text[1].split() == ["█", "live", "52.4", "MB", "▆", "cached", "26.2", "MB", "·", "free", "26.2", "MB",
                               "evicted", "7"]  # fmt: skip
    assert "pages 5.2 MB" in text[4]


def test_without_a_model_nothing_is_drawn() -> None:
    assert paint(Snapshot(daemon=DaemonReport(version="1")), View(), 40, 8) == [[("no model is loaded", "dim")]]
    assert paint(Snapshot(), View(), 40, 8) == [[("nothing is known yet", "dim")]]
