"""The map: cells, cursor, zoom, orders, what is known of a page."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from tierd.tui.pages import Order
from tierd.tui.snapshot import ArenaMap, Snapshot
from tierd.tui.view import View, width_of
from tierd.tui.widgets.residency import Residency
from tierd.tui.wire import (
    CELL_DURABLE,
    CELL_IN_HOST,
    CELL_PARTIAL,
    DAMAGED,
    FREE,
    IDLE,
    PINNED,
    PRIVATE,
    EngineReport,
    PageDetail,
    SequenceRow,
)

ENGINE = EngineReport(model="m", state="ready")


def arena(tier: str, cells: list[int], used: list[int] | None = None, owners: list[int] | None = None) -> ArenaMap:
    return ArenaMap(tier, 1, bytes(cells), array("I", used or ()), array("H", owners or ()), array("H"))


def panel(*maps: ArenaMap, clock_s: float | None = None) -> Residency:
    found = Residency(View(), id="residency")
    found.snapshot = Snapshot(engine=ENGINE, maps=maps, clock_s=clock_s, sequences=(SequenceRow(41, "decode"),))
    found.post_message = lambda message: True  # type: ignore[method-assign]
    return found


def text(found: Residency, width: int = 20, height: int = 12) -> list[str]:
    lines = found.paint(width, height)
    assert len(lines) <= height and all(width_of(line) <= width for line in lines)
    return ["".join(part for part, _ in line) for line in lines]


def test_every_page_has_its_cell() -> None:
    found = panel(arena("device", [PINNED, IDLE, FREE, PRIVATE, DAMAGED]), arena("nvme", [IDLE, FREE]))
    lines = text(found)
    assert lines[0].startswith("device  5 pages") and lines[1] == "█▆·▞✗"
    assert lines[2].startswith("disk  2 pages") and lines[3] == "░·"


def test_brightness_follows_the_last_use() -> None:
    found = panel(arena("device", [IDLE] * 4, used=[100, 60, 1, 0]), clock_s=100.0)
    assert [role for _, role in found.paint(20, 12)[1]] == ["device.3", "device.2", "device.1", "device.0"]


def test_only_what_changed_is_drawn_anew_and_all_of_it_is() -> None:
    cells, used = [IDLE] * 40, [100] * 40
    found = panel(arena("device", cells, used), clock_s=100.0)
    found.paint(20, 12)
    cells[25], used[3] = DAMAGED, 1
    found.show(replace(found.snapshot, maps=(arena("device", cells, used),)))
    again = panel(arena("device", cells, used), clock_s=100.0)
    assert found.paint(20, 12) == again.paint(20, 12)


def test_a_large_tier_is_drawn_smaller_until_it_fits() -> None:
    found = panel(arena("device", [IDLE] * 10_000))
    assert "32 a cell" in text(found, 40, 12)[0]
    found.action_zoom(-1)
    assert "16 a cell" in text(found, 40, 12)[0]
    found.action_fit()
    assert "32 a cell" in text(found, 40, 12)[0]


def test_zoomed_in_the_map_follows_the_cursor() -> None:
    found = panel(arena("device", [IDLE] * 9_999 + [DAMAGED]))
    found.zoom = 1
    found.jump("device", 9_999)
    assert any("◉" in line for line in text(found))


def test_the_cursor_moves_by_cells_and_lines() -> None:
    found = panel(arena("device", [IDLE] * 50), arena("host", [IDLE] * 50))
    found.paint(20, 20)
    for step, wanted in (
        ((1, 0), ("device", 0)), ((1, 0), ("device", 1)), ((0, 1), ("device", 21)), ((0, 1), ("device", 41)),
        ((0, 1), ("host", 1)), ((-1, 0), ("host", 0)), ((-1, 0), ("host", 0)), ((0, -1), ("device", 40)),
    ):  # fmt: skip
        found.action_step(*step)
        found.paint(20, 20)
        assert found.cursor == wanted


def test_the_cursor_stays_on_its_page_in_another_order() -> None:
    found = panel(arena("device", [IDLE] * 30, used=list(range(1, 31))), clock_s=40.0)
    found.paint(20, 12)
    found.jump("device", 29)
    found.action_order()
    found.action_order()
    assert found.order is Order.AGE and found.cursor == ("device", 29)
    assert text(found)[1].startswith("◉")


def test_an_order_that_is_not_reported_says_so() -> None:
    found = panel(arena("device", [IDLE]))
    found.order = Order.AGE
    assert "by address (last use of pages not reported)" in text(found, 100)[0]


def test_a_page_that_is_gone_loses_the_cursor() -> None:
    found = panel(arena("device", [IDLE] * 9))
    found.paint(20, 12)
    found.jump("device", 8)
    found.show(replace(found.snapshot, maps=(arena("device", [IDLE] * 4),)))
    assert found.cursor is None


@pytest.mark.parametrize("slot", [-1, 9, 1 << 40])
def test_a_page_that_is_none_is_not_jumped_to(slot: int) -> None:
    found = panel(arena("device", [IDLE] * 9))
    found.paint(20, 12)
    found.jump("device", slot)
    found.jump("attic", 0)
    assert found.cursor is None


def test_what_the_map_knows_of_a_page() -> None:
    cell = PINNED | CELL_PARTIAL | CELL_IN_HOST | CELL_DURABLE
    found = panel(arena("device", [cell], used=[90], owners=[1]), clock_s=100.0)
    found.paint(120, 20)
    found.jump("device", 0)
    said = "\n".join(text(found, 120, 20))
    for part in ("device page 0", "live", "request 41", "used 10s ago", "not full", "also in RAM", "also on disk"):
        assert part in said


def test_what_the_daemon_tells_of_a_page() -> None:
    found = panel(arena("nvme", [IDLE]))
    found.paint(120, 20)
    found.jump("nvme", 0)
    found.detail = PageDetail(
        key="0123456789abcdef99", text="Call me\nIshmael", tokens=16, first_token=32, leases=0, checksum="bad",
        copies=("host", "nvme"), victim_rank=0,
    )  # fmt: skip
    said = "\n".join(text(found, 120, 20))
    for part in ("key 0123456789abcdef ", "16 tokens from 32", "checksum bad", "copies RAM + disk",
                 "next to be evicted", "“Call me Ishmael”"):  # fmt: skip
        assert part in said


def test_without_a_map_it_is_said_why() -> None:
    assert "page map: not reported" in " ".join(text(panel(), 60))
    found = panel()
    found.snapshot = Snapshot()
    assert text(found) == ["no engine, no pages"]
