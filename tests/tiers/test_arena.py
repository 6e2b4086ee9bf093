from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.tiers.arena import POISON, Arena, SlotState


def test_slots_are_distinct_aligned_and_bounded() -> None:
    arena = Arena("device", 3, 4096)
    slots = [arena.alloc(SlotState.PRIVATE) for _ in range(3)]
    assert sorted(slot for slot in slots if slot is not None) == [0, 1, 2]
    assert arena.alloc(SlotState.PRIVATE) is None
    assert arena.array.shape == (3, 4096)
    assert all(arena.row(slot).ctypes.data % 4096 == 0 for slot in range(3))
    assert (arena.num_free, arena.used, arena.cached, arena.in_flight) == (0, 3, 0, 0)
    assert arena.check() == []


def test_an_arena_without_slots_is_always_full() -> None:
    arena = Arena("host", 0, 64)
    assert arena.alloc(SlotState.FILLING) is None
    assert arena.check() == []


@pytest.mark.parametrize(("slots", "record_bytes"), [(-1, 64), (1, 0)])
def test_impossible_sizes_are_refused(slots: int, record_bytes: int) -> None:
    with pytest.raises(ValueError, match="arena x"):
        Arena("x", slots, record_bytes)


def test_a_slot_is_free_after_its_last_reader() -> None:
    arena = Arena("device", 1, 64, poison=True)
    slot = arena.alloc(SlotState.IDLE)
    assert slot == 0
    arena.row(slot)[:] = 7
    first, second = arena.retain(slot), arena.retain(slot)
    arena.drop(slot)
    assert arena.state(slot) is SlotState.DRAINING
    assert arena.alloc(SlotState.PRIVATE) is None
    arena.release(slot, first)
    assert np.all(arena.row(slot) == 7)  # a reader is still there
    arena.release(slot, second)
    assert np.all(arena.row(slot) == POISON)
    assert arena.generation(slot) == 1
    assert arena.alloc(SlotState.PRIVATE) == slot
    with pytest.raises(AssertionError, match="freed under a reader"):
        arena.release(slot, first)


def test_misuse_is_our_bug_and_says_so() -> None:
    arena = Arena("device", 1, 64)
    with pytest.raises(AssertionError, match="is free"):
        arena.retain(0)
    with pytest.raises(AssertionError, match="no owner"):
        arena.drop(0)
    slot = arena.alloc(SlotState.IDLE)
    assert slot is not None
    arena.retain(slot)
    arena.drop(slot)
    with pytest.raises(AssertionError, match="no owner"):
        arena.drop(slot)


@given(st.lists(st.tuples(st.sampled_from(["alloc", "retain", "drop", "release"]), st.integers(0, 9)), max_size=60))
def test_the_ledger_balances(steps: list[tuple[str, int]]) -> None:
    arena = Arena("device", 4, 16)
    owned: list[int] = []
    held: list[tuple[int, int]] = []
    for step, number in steps:
        if step == "alloc":
            slot = arena.alloc(SlotState(number % 3 + 1))
            owned += [slot] if slot is not None else []
        elif step == "retain" and owned:
            slot = owned[number % len(owned)]
            held.append((slot, arena.retain(slot)))
        elif step == "drop" and owned:
            arena.drop(owned.pop(number % len(owned)))
        elif step == "release" and held:
            arena.release(*held.pop(number % len(held)))
        assert arena.check() == []
        assert arena.num_free == 4 - len(set(owned) | {slot for slot, _ in held})


def test_check_sees_broken_books() -> None:
    breaks: list[tuple[Callable[[Arena], object], str]] = [
        (lambda arena: arena._free.append(1), "twice"),
        (lambda arena: arena._free.pop(), "disagrees"),
        (lambda arena: arena._refs.__setitem__(0, 0), "references"),
        (lambda arena: arena.counts.__setitem__(0, 9), "ledger"),
    ]
    for broken, words in breaks:
        arena = Arena("device", 3, 16)
        arena.alloc(SlotState.IDLE)
        broken(arena)
        assert any(words in finding for finding in arena.check()), words
