"""The tree: children below their parents, the best branch first, folds and filters."""

from __future__ import annotations

import random

import pytest

from tierd.tui.snapshot import Snapshot
from tierd.tui.view import View, width_of
from tierd.tui.widgets.prefixes import SORTS, Prefixes, Tree
from tierd.tui.wire import EngineReport, PagerReport, PrefixRow

ENGINE = EngineReport(model="m", state="ready", pager=PagerReport(known_pages=7, lookups=3))


def row(name: str, parent: int, *, hits: int = 0, used_s: float = 0.0) -> PrefixRow:
    return PrefixRow(name.encode(), parent, 16, hits, 1, 0, 1, used_s, False, "", f"text of {name}")


def names(tree: Tree) -> str:
    return "".join(tree.rows[index].key.decode() for index in tree.order)


ROWS = (row("a", -1, hits=1), row("b", 0, hits=2), row("c", 0, hits=9), row("d", -1, hits=5), row("e", 1, hits=3))


def test_the_branch_with_the_best_child_comes_first() -> None:
    assert names(Tree(ROWS, "hits", "", frozenset())) == "acbed"


def test_a_folded_row_hides_what_is_below_it() -> None:
    assert names(Tree(ROWS, "hits", "", frozenset({b"b"}))) == "acbd"


def test_a_filter_keeps_the_way_to_what_it_finds() -> None:
    assert names(Tree(ROWS, "hits", "text of e", frozenset())) == "abe"


def test_the_last_child_is_known() -> None:
    tree = Tree(ROWS, "hits", "", frozenset())
    assert [tree.lasts(index) for index in tree.order] == ["m", "mm", "ml", "mll", "l"]


@pytest.mark.parametrize("sort", SORTS)
def test_every_row_is_shown_once_and_below_its_parent(sort: str) -> None:
    chance = random.Random(4)
    rows = tuple(
        row(f"{n:04}", chance.randint(-1, n - 1), hits=chance.randint(0, 9), used_s=chance.random()) for n in range(300)
    )
    order = Tree(rows, sort, "", frozenset()).order
    assert sorted(order) == list(range(300))
    places = {index: place for place, index in enumerate(order)}
    assert all(places[found.parent] < places[index] for index, found in enumerate(rows) if found.parent >= 0)


def panel(rows: tuple[PrefixRow, ...] | None) -> Prefixes:
    found = Prefixes(View(), id="prefixes")
    found.snapshot = Snapshot(engine=ENGINE, prefixes=rows, clock_s=10.0)
    return found


@pytest.mark.parametrize("width", [40, 64, 120])
def test_rows_fit_their_width(width: int) -> None:
    assert all(width_of(line) <= width for line in panel(ROWS).paint(width, 10))


def test_the_cursor_stays_on_its_prefix_when_rows_move() -> None:
    found = panel(ROWS)
    found.sort = "hits"
    found.paint(80, 10)
    found.cursor = 1
    assert found.selected is not None and found.selected.key == b"c"
    found.sort = "recent"
    found.paint(80, 10)
    assert found.selected.key == b"c"


def test_without_rows_the_counters_tell_and_the_rest_is_not_reported() -> None:
    text = "\n".join("".join(part for part, _ in line) for line in panel(None).paint(60, 10))
    assert "7 pages known, 3 look-ups" in text and "prefix rows: not reported by this daemon" in text


def test_a_tree_that_is_still_gathered_is_not_said_to_be_empty() -> None:
    found = Prefixes(View(), id="prefixes")
    found.snapshot = Snapshot(engine=EngineReport(model="m", state="ready"), prefixes=(), prefixes_pending=True)
    said = " ".join(text for line in found.paint(60, 10) for text, _ in line)
    assert "being gathered" in said and "nothing is remembered" not in said


def test_nothing_remembered_is_not_the_same() -> None:
    assert panel(()).paint(60, 10) == [[("nothing is remembered yet", "dim")]]
