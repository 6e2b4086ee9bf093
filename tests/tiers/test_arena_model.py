"""An arena against a plain model: who owns which slot, who reads it, and what its bytes must be.

While a slot has an owner or a reader its bytes are those that the owner wrote; growing and shrinking change nothing
about that. A slot that became free is poisoned, and is never handed out under a generation that it had before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.tiers.profiles import big, small
from tierd.tiers.arena import POISON, Arena, SlotState

RECORD_BYTES = 32
OWNED = [SlotState.PRIVATE, SlotState.PINNED, SlotState.IDLE, SlotState.FILLING]


@dataclass
class Held:
    content: int
    state: SlotState
    readers: list[int] = field(default_factory=list)  # generations
    owned: bool = True


class ArenaMachine(RuleBasedStateMachine):
    arena: Arena

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, Held] = {}
        self.generations: dict[int, int] = {}
        self.size = self.serial = 0

    @initialize(slots=st.integers(0, 8), more=st.integers(0, 8))
    def build(self, slots: int, more: int) -> None:
        self.arena = Arena("device", slots, RECORD_BYTES, max_slots=slots + more, poison=True)
        self.size, self.most = slots, slots + more

    @rule(state=st.sampled_from(OWNED))
    def alloc(self, state: SlotState) -> None:
        free = [slot for slot in range(self.size) if slot not in self.held]
        slot = self.arena.alloc(state)
        if slot is None:
            assert not free
            return
        assert slot in free
        generation = self.arena.generation(slot)
        assert generation >= self.generations.get(slot, 0)
        self.generations[slot] = generation
        self.serial = (self.serial + 1) % POISON
        self.arena.row(slot)[:] = self.serial
        self.held[slot] = Held(self.serial, state)

    @precondition(lambda self: any(held.owned for held in self.held.values()))
    @rule(data=st.data(), state=st.sampled_from(OWNED))
    def book(self, data: st.DataObject, state: SlotState) -> None:
        slot = data.draw(st.sampled_from([slot for slot, held in self.held.items() if held.owned]))
        self.arena.set_state(slot, state)
        self.held[slot].state = state

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.held[slot].readers.append(self.arena.retain(slot))

    @precondition(lambda self: any(held.readers for held in self.held.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([slot for slot, held in self.held.items() if held.readers]))
        self.arena.release(slot, self.held[slot].readers.pop())
        self._maybe_free(slot)

    @precondition(lambda self: any(held.owned for held in self.held.values()))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([slot for slot, held in self.held.items() if held.owned]))
        self.arena.drop(slot)
        self.held[slot].owned = False
        self.held[slot].state = SlotState.DRAINING
        self._maybe_free(slot)

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """What a late completion, or an owner that forgot, might do: refused, and nothing changes."""
        slot = data.draw(st.integers(0, max(0, len(self.arena.states) - 1)))
        if slot >= len(self.arena.states):
            return
        held = self.held.get(slot)
        if held is None:
            with pytest.raises(AssertionError):
                self.arena.retain(slot)
        if held is None or not held.owned:
            with pytest.raises(AssertionError):
                self.arena.drop(slot)
        with pytest.raises(AssertionError):
            self.arena.release(slot, self.arena.generation(slot) - 1)

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        self.size = data.draw(st.integers(self.size, self.most))
        self.arena.grow(self.size)

    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        self.size = data.draw(st.integers(0, self.size))
        self.arena.retire(self.size)

    @invariant()
    def books_and_bytes(self) -> None:
        if not hasattr(self, "arena"):
            return
        arena = self.arena
        assert arena.check() == []
        assert arena.slots == self.size
        beyond = [slot for slot in self.held if slot >= self.size]
        assert arena.shrunk == (not beyond)
        assert arena.total == self.size + len(beyond)
        for slot, held in self.held.items():
            assert arena.state(slot) is held.state
            assert np.all(arena.row(slot) == held.content)
        for slot in range(self.size):
            if slot not in self.held and arena.generation(slot):
                # Poison, or zeros where its memory was given back and taken again.
                assert np.all(arena.row(slot) == POISON) or np.all(arena.row(slot) == 0)
        states = [held.state for held in self.held.values()]
        assert arena.used == sum(state in (SlotState.PRIVATE, SlotState.PINNED) for state in states)
        assert arena.cached == states.count(SlotState.IDLE)

    def _maybe_free(self, slot: int) -> None:
        held = self.held[slot]
        if not held.owned and not held.readers:
            del self.held[slot]
            self.generations[slot] += 1


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = small(40, 40)


@pytest.mark.long
def test_arena_machine_at_length() -> None:
    run_state_machine_as_test(ArenaMachine, settings=big(500, 120))
