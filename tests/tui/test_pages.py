"""Cells of the map: what a page is, orders, what a cell of many pages shows."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest

from tierd.tui.pages import Cells, Kind, Order, cell_kind, kind_of, level, missing_for, pages_a_cell, places
from tierd.tui.snapshot import ArenaMap
from tierd.tui.wire import CELL_KEPT, CELL_MOVING, DAMAGED, DRAINING, FILLING, FREE, IDLE, PINNED, PRIVATE


def arena(cells: list[int], used: list[int] | None = None, owners: list[int] | None = None) -> ArenaMap:
    none = array("H")
    return ArenaMap("device", 1, bytes(cells), array("I", used or ()), array("H", owners or ()), none)


@pytest.mark.parametrize(
    ("cell", "kind"),
    [(FREE, Kind.FREE), (PRIVATE, Kind.PRIVATE), (PINNED, Kind.LIVE), (IDLE, Kind.IDLE), (FILLING, Kind.MOVING),
     (DRAINING, Kind.MOVING), (IDLE | CELL_MOVING, Kind.MOVING), (IDLE | CELL_KEPT, Kind.KEPT),
     (DAMAGED | CELL_MOVING | CELL_KEPT, Kind.DAMAGED), (7, Kind.UNKNOWN), (FREE | CELL_KEPT, Kind.FREE)],
)  # fmt: skip
def test_what_a_page_is(cell: int, kind: Kind) -> None:
    assert kind_of(cell) is kind


def test_a_cell_shows_what_most_of_its_pages_are() -> None:
    assert cell_kind(bytes([Kind.IDLE, Kind.FREE, Kind.IDLE])) is Kind.IDLE


def test_a_cell_always_shows_a_damaged_page() -> None:
    assert cell_kind(bytes([Kind.IDLE] * 50 + [Kind.DAMAGED])) is Kind.DAMAGED


def test_the_newest_pages_come_first_by_age_and_free_ones_last() -> None:
    found = arena([IDLE, FREE, IDLE, IDLE], used=[5, 9, 0, 7])
    order = places(Order.AGE, found)
    assert order is not None and list(order) == [3, 0, 2, 1]


def test_pages_of_a_request_stand_together() -> None:
    found = arena([PINNED, IDLE, PINNED, PINNED], owners=[2, 0, 1, 2])
    order = places(Order.SEQUENCE, found)
    assert order is not None and list(order) == [2, 0, 3, 1]


def test_an_order_that_the_daemon_does_not_report_is_that_of_addresses() -> None:
    found = arena([IDLE, IDLE])
    assert places(Order.AGE, found) is None
    assert missing_for(Order.AGE, found) == "last use of pages"
    assert not missing_for(Order.ADDRESS, found)


def test_slots_and_places_are_each_others_inverse() -> None:
    found = arena([IDLE] * 6, used=[3, 9, 1, 8, 2, 7])
    cells = Cells(found, places(Order.AGE, found), 1, 10.0)
    assert [cells.place(cells.slot(place)) for place in range(6)] == list(range(6))
    assert [found.used[cells.slot(place)] for place in range(6)] == [9, 8, 7, 3, 2, 1]


@pytest.mark.parametrize("order", [Order.ADDRESS, Order.AGE])
@pytest.mark.parametrize("size", [1, 8])
def test_cells_that_follow_look_like_new_ones(order: Order, size: int) -> None:
    chance = random.Random(7)
    kinds = [FREE, PRIVATE, PINNED, IDLE, DAMAGED]
    cells, used = chance.choices(kinds, k=203), [chance.randint(0, 900) for _ in range(203)]
    found = arena(cells, used)
    given = places(order, found)
    following = Cells(found, given, size, 900.0)
    for version in range(2, 30):
        changed = array("I", sorted(chance.sample(range(203), 5)))
        for slot in changed:
            cells[slot], used[slot] = chance.choice(kinds), chance.randint(0, 900 + version)
        clock_s = 900.0 + version
        now = replace(arena(cells, used), version=version, base=version - 1, changed=changed)
        assert following.follow(now, clock_s)
        made = Cells(now, given, size, clock_s)
        stepped = int(clock_s) % 5 == 0  # else brightness may be as it was some seconds ago
        shift = 0 if stepped else 2
        assert [look >> shift for look in following.looks] == [look >> shift for look in made.looks]


def test_cells_do_not_follow_a_map_that_tells_of_changes_to_another() -> None:
    held = Cells(arena([IDLE] * 4, used=[1] * 4), None, 1, 9.0)
    later = replace(arena([FREE] * 4, used=[0] * 4), version=3, base=2)
    assert not held.follow(later, 9.0)
    assert not held.follow(replace(later, base=-1), 9.0)


@pytest.mark.parametrize(("age_s", "wanted"), [(0, 3), (10, 3), (11, 2), (60, 2), (600, 1), (601, 0)])
def test_recency(age_s: int, wanted: int) -> None:
    assert level(1000, 1000.0 + age_s) == wanted


def test_what_was_never_used_is_old() -> None:
    assert level(0, 5.0) == 0 and level(5, None) == 0


def test_the_largest_tier_is_the_first_to_be_drawn_smaller() -> None:
    assert pages_a_cell([100, 100_000], 100, 20) == [1, 64]


def test_a_screen_without_room_ends_at_a_line_each() -> None:
    assert pages_a_cell([1000, 1000], 10, 1) == [128, 128]
