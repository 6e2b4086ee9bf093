from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

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


def take(arena: Arena, count: int) -> list[int]:
    slots = [arena.alloc(SlotState.IDLE) for _ in range(count)]
    return [slot for slot in slots if slot is not None]


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text("ascii").split()
    return int(fields[1]) * mmap.PAGESIZE


def test_addresses_are_those_of_the_rows_and_stay() -> None:
    arena = Arena("device", 2, 64, max_slots=100)
    assert arena.array.shape == (100, 64)
    before = [arena.address(slot) for slot in range(2)]
    assert before == [arena.row(slot).ctypes.data for slot in range(2)]
    arena.grow(100)
    assert [arena.address(slot) for slot in range(2)] == before


def test_growing_gives_out_more_slots() -> None:
    arena = Arena("device", 2, 64, max_slots=5)
    assert take(arena, 3) == [0, 1]
    arena.grow(5)
    assert take(arena, 9) == [2, 3, 4]
    assert (arena.total, arena.slots, arena.shrunk) == (5, 5, True)
    assert arena.check() == []


def test_an_arena_without_slots_can_grow() -> None:
    arena = Arena("host", 0, 64, max_slots=2)
    arena.grow(2)
    assert take(arena, 3) == [0, 1]


def test_retired_slots_are_not_given_out_and_count_until_they_are_empty() -> None:
    arena = Arena("device", 4, 64)
    low, _, _, high = take(arena, 4)
    reader = arena.retain(high)
    arena.retire(1)
    assert (arena.slots, arena.total, arena.shrunk) == (1, 4, False)
    arena.drop(1)
    arena.drop(2)
    arena.drop(high)
    assert (arena.total, arena.in_flight, arena.shrunk) == (2, 1, False)
    assert arena.alloc(SlotState.IDLE) is None
    assert arena.check() == []
    arena.release(high, reader)
    assert (arena.total, arena.shrunk) == (1, True)
    arena.drop(low)
    assert take(arena, 9) == [low]


def test_a_shrink_can_be_taken_back() -> None:
    arena = Arena("device", 4, 64)
    slots = take(arena, 3)
    arena.retire(1)
    arena.grow(4)
    assert (arena.total, arena.num_free, arena.shrunk) == (4, 1, True)
    for slot in slots:
        arena.drop(slot)
    assert sorted(take(arena, 9)) == [0, 1, 2, 3]
    assert arena.check() == []


def test_a_generation_is_never_used_twice() -> None:
    arena = Arena("device", 2, 64)
    slot = take(arena, 2)[1]
    arena.drop(slot)
    before = arena.generation(slot)
    arena.retire(1)
    arena.grow(2)
    assert arena.generation(slot) == before


@pytest.mark.parametrize("slots", [1, 9])
def test_growing_has_bounds(slots: int) -> None:
    arena = Arena("device", 2, 64, max_slots=8)
    with pytest.raises(ValueError, match="between 2 and 8"):
        arena.grow(slots)


@pytest.mark.parametrize("slots", [-1, 3])
def test_shrinking_has_bounds(slots: int) -> None:
    with pytest.raises(ValueError, match="can't shrink"):
        Arena("device", 2, 64).retire(slots)


def test_less_room_than_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="room for 1"):
        Arena("device", 2, 64, max_slots=1)


def test_where_the_system_refuses_the_room_it_can_not_grow() -> None:
    arena = Arena("device", 2, 4096, max_slots=1 << 50)
    assert (arena.slots, arena.max_slots) == (2, 2)
    assert take(arena, 3) == [0, 1]


def test_more_than_memory_can_be_reserved_and_costs_none() -> None:
    before = resident_bytes()
    arena = Arena("device", 1, 1 << 20, max_slots=1 << 20)  # 1 TB of addresses
    arena.row(0)[:] = 1
    assert arena.max_slots == 1 << 20
    assert resident_bytes() - before < 64 << 20


def test_memory_is_given_back_when_the_last_retired_slot_is_empty() -> None:
    arena = Arena("device", 64, 1 << 20)
    slots = take(arena, 64)
    arena.array[:] = 7
    full = resident_bytes()
    arena.retire(4)
    for slot in slots[5:]:
        arena.drop(slot)
    assert resident_bytes() > full - (16 << 20)  # one of them is still in use
    arena.drop(slots[4])
    assert resident_bytes() < full - (50 << 20)
    assert np.all(arena.array[:4] == 7)


@given(st.lists(st.tuples(st.sampled_from(["alloc", "retain", "drop", "release", "resize"]), st.integers(0, 9))))
def test_the_ledger_balances_while_the_size_changes(steps: list[tuple[str, int]]) -> None:
    arena = Arena("device", 4, 16, max_slots=8)
    owned: list[int] = []
    held: list[tuple[int, int]] = []
    for step, number in steps:
        if step == "alloc":
            slot = arena.alloc(SlotState(number % 4 + 1))
            assert slot is None or slot < arena.slots
            owned += [slot] if slot is not None else []
        elif step == "retain" and owned:
            slot = owned[number % len(owned)]
            held.append((slot, arena.retain(slot)))
        elif step == "drop" and owned:
            arena.drop(owned.pop(number % len(owned)))
        elif step == "release" and held:
            arena.release(*held.pop(number % len(held)))
        elif step == "resize":
            size = min(number, arena.max_slots)
            arena.grow(size) if size >= arena.slots else arena.retire(size)
        busy = set(owned) | {slot for slot, _ in held}
        assert arena.check() == []
        assert arena.total == arena.slots + sum(slot >= arena.slots for slot in busy)
        assert arena.num_free == arena.slots - sum(slot < arena.slots for slot in busy)
        assert arena.shrunk == all(slot < arena.slots for slot in busy)


def test_check_sees_broken_books() -> None:
    breaks: list[tuple[Callable[[Arena], object], str]] = [
        (lambda arena: arena._free.append(1), "twice"),
        (lambda arena: arena._free.pop(), "disagrees"),
        (lambda arena: arena._refs.__setitem__(0, 0), "references"),
        (lambda arena: arena.counts.__setitem__(0, 9), "ledger"),
        (lambda arena: arena._free.append(7), "retired slot"),
        (lambda arena: arena.set_state(0, SlotState.RETIRED), "among the first"),
    ]
    for broken, words in breaks:
        arena = Arena("device", 3, 16)
        arena.alloc(SlotState.IDLE)
        broken(arena)
        assert any(words in finding for finding in arena.check()), words
