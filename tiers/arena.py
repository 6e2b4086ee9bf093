"""A fixed number of record slots in one block of memory, with a ledger that always balances."""

from __future__ import annotations

import contextlib
import enum
import mmap

import numpy as np
import numpy.typing as npt

POISON = 0xAA  # what a freed slot is filled with when `poison` is on: a reader of freed memory then shows at once


class SlotState(enum.IntEnum):
    """What a slot holds. The values are the low 3 bits of a byte of the page map."""

    FREE = 0
    PRIVATE = 1  # a page that one lease is writing; it has no key yet
    PINNED = 2  # a known page under at least one lease
    IDLE = 3  # a known page nobody uses: the cache
    FILLING = 4  # the destination of a copy in flight; not readable
    DRAINING = 5  # given up by its owner, while a copy still reads or writes it


class Arena:
    """`slots` records of `record_bytes` bytes in one anonymous mapping, aligned to pages of memory.

    A slot has one owner and any number of readers (copies in flight). It becomes free when the owner has dropped it
    and the last reader has released it, and each time it becomes free its generation grows: a completion that comes
    late can see that the slot is another one now.

    Not thread-safe: only the pager's thread calls it. Other threads touch bytes of rows that they were handed.

    Args:
        name: for messages and statistics.
        slots: how many records; 0 is allowed and always full.
        record_bytes: bytes of one record.
        poison: fill freed slots with 0xAA (tests; costs a write of the record).
    """

    def __init__(self, name: str, slots: int, record_bytes: int, *, poison: bool = False) -> None:
        if slots < 0 or record_bytes <= 0:
            raise ValueError(f"arena {name}: {slots} slots of {record_bytes} bytes")
        self.name = name
        self.slots = slots
        self.record_bytes = record_bytes
        self._poison = poison
        self._map = mmap.mmap(-1, max(slots * record_bytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A decode step reads pieces of a few KB all over the arena: with small pages each costs a TLB miss.
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        flat = np.frombuffer(self._map, dtype=np.uint8, count=slots * record_bytes)
        self.array: npt.NDArray[np.uint8] = flat.reshape(slots, record_bytes)  # [slots, record_bytes]
        self._free = list(range(slots - 1, -1, -1))  # a stack: the slot freed last is still warm in the caches
        self._refs = [0] * slots
        self._generations = [0] * slots
        self.states = bytearray(slots)  # SlotState of each slot
        self.counts = [slots, 0, 0, 0, 0, 0]  # slots in each SlotState

    def __repr__(self) -> str:
        return f"<Arena {self.name}: {len(self._free)} of {self.slots} slots free>"

    @property
    def num_free(self) -> int:
        """Slots that `alloc` can give out."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Slots that a live lease needs."""
        return self.counts[SlotState.PRIVATE] + self.counts[SlotState.PINNED]

    @property
    def cached(self) -> int:
        """Slots with a known page that could be evicted."""
        return self.counts[SlotState.IDLE]

    @property
    def in_flight(self) -> int:
        """Slots that a copy is filling, or that wait for their last reader."""
        return self.counts[SlotState.FILLING] + self.counts[SlotState.DRAINING]

    def row(self, slot: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot, as a view `[record_bytes]`."""
        row: npt.NDArray[np.uint8] = self.array[slot]
        return row

    def alloc(self, state: SlotState) -> int | None:
        """A free slot in `state`, owned by the caller; None when all are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._refs[slot] = 1
        self.set_state(slot, state)
        return slot

    def set_state(self, slot: int, state: SlotState) -> None:
        """Books the slot under another state. The owner alone calls it."""
        self.counts[self.states[slot]] -= 1
        self.counts[state] += 1
        self.states[slot] = state

    def state(self, slot: int) -> SlotState:
        """The state the slot is booked under."""
        return SlotState(self.states[slot])

    def generation(self, slot: int) -> int:
        """How often the slot has become free."""
        return self._generations[slot]

    def retain(self, slot: int) -> int:
        """Keeps the slot from becoming free while a copy uses it; returns the generation to release it with."""
        if self._refs[slot] <= 0:
            raise AssertionError(f"arena {self.name}: slot {slot} is free and can't be retained")
        self._refs[slot] += 1
        return self._generations[slot]

    def release(self, slot: int, generation: int) -> None:
        """Ends a `retain`."""
        if self._generations[slot] != generation or self._refs[slot] <= 0:
            raise AssertionError(f"arena {self.name}: slot {slot} was freed under a reader")
        self._unref(slot)

    def drop(self, slot: int) -> None:
        """The owner gives the slot up. It is free now, or after its last reader."""
        if self._refs[slot] <= 0 or self.states[slot] in (SlotState.FREE, SlotState.DRAINING):
            raise AssertionError(f"arena {self.name}: slot {slot} has no owner to drop it")
        self.set_state(slot, SlotState.DRAINING)
        self._unref(slot)

    def _unref(self, slot: int) -> None:
        self._refs[slot] -= 1
        if self._refs[slot] > 0:
            return
        self._generations[slot] += 1
        if self._poison:
            self.array[slot] = POISON
        self.set_state(slot, SlotState.FREE)
        self._free.append(slot)

    def check(self) -> list[str]:
        """Findings about the free list, the reference counts and the ledger; empty when all is right."""
        findings = []
        free = set(self._free)
        if len(free) != len(self._free):
            findings.append(f"{self.name}: a slot is on the free list twice")
        for slot in range(self.slots):
            state = self.state(slot)
            is_free = state is SlotState.FREE
            if is_free != (slot in free):
                findings.append(f"{self.name}: slot {slot} is {state.name} but the free list disagrees")
            if is_free != (self._refs[slot] == 0):
                findings.append(f"{self.name}: slot {slot} is {state.name} with {self._refs[slot]} references")
        counted = [self.states.count(state) for state in SlotState]
        if counted != self.counts:
            findings.append(f"{self.name}: slots by state are {counted}, the ledger says {self.counts}")
        if self.num_free + self.used + self.cached + self.in_flight != self.slots:
            findings.append(f"{self.name}: free + used + cached + in flight is not {self.slots}")
        return findings
