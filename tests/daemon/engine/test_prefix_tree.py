"""The tree of prefixes in slices, and cut down to the rows that are told."""

from __future__ import annotations

import random

import pytest

from tests.daemon.engine.fakes import PAGE
from tests.daemon.engine.rig import Rig
from tierd.daemon.engine import prefix_tree
from tierd.daemon.engine.page_maps import DiskSketch
from tierd.daemon.engine.prefix_tree import BEYOND, PrefixTree, TreeWalk
from tierd.tiers.prefixes import Prefixes

HEAD = [3] * (2 * PAGE)


@pytest.fixture
def rig() -> Rig:
    chance = random.Random(7)
    rig = Rig(64)
    for number in range(8):
        rig.submit(number + 1, HEAD + [chance.randrange(60) for _ in range(PAGE)], 2)
        rig.run()
    return rig


def walked(rig: Rig, slice_s: float = 1e9) -> tuple[PrefixTree, int]:
    walk, slices = TreeWalk(rig.pager, Prefixes(rig.pager, None), DiskSketch(rig.pager)), 1
    while not walk.go_on(rig.clock, slice_s):
        slices += 1
    return walk.result(1)[0], slices


def test_slices_make_the_same_tree(rig: Rig) -> None:
    whole, one = walked(rig)
    sliced, many = walked(rig, 0.0)
    assert one == 1 and many >= len(whole.rows) >= 9 and sliced == whole


def test_pages_that_go_while_it_walks_do_no_harm(rig: Rig) -> None:
    walk = TreeWalk(rig.pager, Prefixes(rig.pager, None), DiskSketch(rig.pager))
    assert not walk.go_on(rig.clock, 0.0)
    assert rig.pager.clear() > 0
    rig.mover.run_all()
    while not walk.go_on(rig.clock, 0.0):
        pass
    tree, ((slots, numbers), *_) = walk.result(1)
    assert len(slots) == len(numbers) and tree.total == len(tree.rows) == 1


def test_of_too_many_the_newest_are_told_with_their_parents(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = walked(rig)
    monkeypatch.setattr(prefix_tree, "MAX_PREFIXES", 4)
    walk = TreeWalk(rig.pager, Prefixes(rig.pager, None), DiskSketch(rig.pager))
    walk.go_on(rig.clock, 1e9)
    tree, ((_, numbers), *_) = walk.result(1)
    assert len(tree.rows) == 4 and tree.total == len(whole.rows)
    newest = sorted(whole.rows, key=lambda row: -row[7])[:4]
    assert {row[0] for row in tree.rows} == {row[0] for row in newest}
    assert all(row[1] < place for place, row in enumerate(tree.rows))
    assert set(numbers.tolist()) == {1, 2, 3, 4, BEYOND}


def test_nothing_known_is_an_empty_tree() -> None:
    tree, slices = walked(Rig(4))
    assert tree.rows == () and tree.total == 0 and slices == 1
