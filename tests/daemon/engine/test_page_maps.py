"""The map of one arena: what changed, and sizes that change."""

from __future__ import annotations

import numpy as np

from tests.daemon.engine.rig import Rig
from tierd.daemon.engine.page_maps import Sketch, TierMap
from tierd.tiers.arena import SlotState
from tierd.tiers.page import Tier

PROMPT = list(range(20, 60))


def sketch_of(rig: Rig) -> Sketch:
    return Sketch(Tier.DEVICE, rig.pager.device, rig.pager.index)


def taken(rig: Rig, sketch: Sketch, version: int) -> TierMap:
    sketch.take(rig.pager.index.nodes.values())
    return sketch.look(version, 100.0, np.zeros(len(rig.pager.device.states), np.uint16))


def test_only_what_changed_is_told_to_who_has_the_last_one() -> None:
    rig = Rig(64)
    sketch = sketch_of(rig)
    before = taken(rig, sketch, 5)
    rig.submit(1, PROMPT, 4)
    rig.run()
    after = taken(rig, sketch, 6)
    part = after.part(6, 5)
    changed = np.frombuffer(part["changed"], "<u4")
    assert part["base"] == 5 and set(changed) == set(np.flatnonzero(before.cells != after.cells))
    assert part["cells"] == after.cells[changed].tobytes() and len(part["used"]) == 4 * len(changed)
    assert after.part(6, 6)["changed"] == b""


def test_what_is_older_or_from_elsewhere_is_told_all() -> None:
    rig = Rig(64)
    sketch = sketch_of(rig)
    found = taken(rig, sketch, 5)
    for base in (None, 4, 6, -1):
        assert "base" not in found.part(5, base) and len(found.part(5, base)["cells"]) == 64


def test_more_than_half_is_told_as_all() -> None:
    rig = Rig(4)
    sketch = sketch_of(rig)
    taken(rig, sketch, 5)
    rig.submit(1, PROMPT[:12], 2)
    rig.run()
    assert "base" not in taken(rig, sketch, 6).part(6, 5)


def test_an_arena_of_another_size_is_another_map() -> None:
    rig = Rig(8)
    sketch = sketch_of(rig)
    rig.submit(1, PROMPT[:8], 2)
    rig.run()
    taken(rig, sketch, 5)
    rig.pager.device.retire(6)
    shrunk = taken(rig, sketch, 6)
    assert len(shrunk.cells) == 6 and shrunk.since == 6 and "base" not in shrunk.part(6, 5)
    assert [int(cell) & 7 for cell in shrunk.cells] == list(rig.pager.device.states)


def test_a_slot_that_is_to_go_shows_as_free() -> None:
    rig = Rig(8)
    held = [rig.pager.device.alloc(SlotState.FILLING) for _ in range(8)]
    sketch = sketch_of(rig)
    rig.pager.device.retire(2)
    rig.pager.device.drop(held[5])  # type: ignore[arg-type]
    found = taken(rig, sketch, 5)
    assert len(found.cells) == 8 and found.cells[5] == SlotState.FREE and found.cells[6] == SlotState.FILLING
