"""Record slots in one block of memory that can grow and shrink, with a ledger that always balances."""

from __future__ import annotations

import enum
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tierd.tiers.blocks import Block, HostBlock, host_array
from tierd.tiers.gpu import Row

POISON = 0xAA  # what a freed slot is filled with when `poison` is on: a reader of freed memory then shows at once


class SlotState(enum.IntEnum):
    """What a slot holds. The values are the low 3 bits of a byte of the page map."""

    FREE = 0
    PRIVATE = 1  # a page that one lease is writing; it has no key yet
    PINNED = 2  # a known page under at least one lease
    IDLE = 3  # a known page nobody uses: the cache
    FILLING = 4  # the destination of a copy in flight; not readable
    DRAINING = 5  # given up by its owner, while a copy still reads or writes it
    RETIRED = 6  # empty, and beyond the size that the arena is shrinking to


class Arena:
    """`slots` records of `record_bytes` bytes in one block of memory, aligned to pages of it.

    A slot has one owner and any number of readers (copies in flight). It becomes free when the owner has dropped it
    and the last reader has released it, and each time it becomes free its generation grows: a completion that comes
    late can see that the slot is another one now.

    Address space is reserved for `max_slots`, memory is taken by what is written. `grow` and `retire` change `slots`
    while copies go on; no slot ever moves, so addresses stay valid. Slots beyond `slots` that are still in use are in
    the ledger as before: at every moment free + used + cached + in flight = `total`.

    Not thread-safe: only the pager's thread calls it. Other threads touch bytes of rows that they were handed.

    Args:
        name: for messages and statistics.
        slots: how many records; 0 is allowed and always full.
        record_bytes: bytes of one record.
        max_slots: how far it may grow. Where the system refuses so much address space (a limit such as ulimit -v),
            it can't grow: `max_slots` is `slots` then.
        poison: fill freed slots with 0xAA (tests; costs a write of the record).
        make_block: the memory, of so many bytes, that may grow to so many: of the CPU, or of a card.

    Raises OSError (ENOMEM) when the system refuses even `slots`.
    """

    def __init__(
        self,
        name: str,
        slots: int,
        record_bytes: int,
        *,
        max_slots: int | None = None,
        poison: bool = False,
        make_block: Callable[[int, int], Block] = HostBlock,
    ) -> None:
        if slots < 0 or record_bytes <= 0:
            raise ValueError(f"arena {name}: {slots} slots of {record_bytes} bytes")
        if max_slots is not None and max_slots < slots:
            raise ValueError(f"arena {name}: {slots} slots, and room for {max_slots}")
        self.name = name
        self.slots = slots
        self.record_bytes = record_bytes
        self._poison = poison
        self.block = make_block(slots * record_bytes, (slots if max_slots is None else max_slots) * record_bytes)
        self.max_slots = self.block.size_bytes // record_bytes
        self._free = list(range(slots - 1, -1, -1))  # a stack: the slot freed last is still warm in the caches
        self._refs = [0] * slots
        self._generations = [0] * slots
        self.states = bytearray(slots)  # SlotState of each slot; longer than `slots` while it shrinks
        self.counts = [slots, 0, 0, 0, 0, 0, 0]  # slots in each SlotState

    def __repr__(self) -> str:
        return f"<Arena {self.name}: {len(self._free)} of {self.slots} slots free>"

    @property
    def total(self) -> int:
        """Slots in the ledger: `slots`, and those beyond it that are not empty yet."""
        return len(self.states) - self.counts[SlotState.RETIRED]

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

    @property
    def shrunk(self) -> bool:
        """Whether no slot beyond `slots` is in use; their memory has been given back then."""
        return len(self.states) == self.slots

    @property
    def memory(self) -> Row:
        """All addresses that a record may ever have."""
        return self.block.row(0, self.max_slots * self.record_bytes)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All slots, where the memory is the CPU's. [max_slots, record_bytes]"""
        whole = host_array(self.block.row(0, self.max_slots * self.record_bytes))
        return whole.reshape(self.max_slots, self.record_bytes)

    def row(self, slot: int) -> Row:
        """The bytes of a slot: a view `[record_bytes]`, or their name where they lie in memory of a card."""
        return self.block.row(slot * self.record_bytes, self.record_bytes)

    def address(self, slot: int) -> int:
        """Where the record of a slot lies in memory; it never changes."""
        return self.block.address + slot * self.record_bytes

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
        if self._refs[slot] <= 0 or self.states[slot] in (SlotState.FREE, SlotState.DRAINING, SlotState.RETIRED):
            raise AssertionError(f"arena {self.name}: slot {slot} has no owner to drop it")
        self.set_state(slot, SlotState.DRAINING)
        self._unref(slot)

    def grow(self, slots: int) -> None:
        """Makes it `slots` records large, at once. While it shrinks: what is still in use beyond stays as it is.

        Raises OSError (ENOMEM), and nothing changes, where the memory must be there at once and is not (a card's).
        """
        if not self.slots <= slots <= self.max_slots:
            raise ValueError(f"arena {self.name}: {slots} slots are not between {self.slots} and {self.max_slots}")
        self.block.take(slots * self.record_bytes)
        missing = slots - len(self.states)
        if missing > 0:
            self._refs += [0] * missing
            self._generations += [0] * (slots - len(self._generations))
            self.states += bytes([SlotState.RETIRED]) * missing
            self.counts[SlotState.RETIRED] += missing
        back = [slot for slot in range(self.slots, slots) if self.states[slot] == SlotState.RETIRED]
        for slot in back:
            self.set_state(slot, SlotState.FREE)
        self._free[:0] = reversed(back)  # below the others: what is warm, and what is low, is given out first
        self.slots = slots
        self._give_back()

    def retire(self, slots: int) -> None:
        """Makes it `slots` records large, as soon as those beyond are no longer in use: `shrunk` tells.

        From here on none of them is given out. Their owners have to leave; what they hold stays readable until then.
        """
        if not 0 <= slots <= self.slots:
            raise ValueError(f"arena {self.name}: {self.slots} slots can't shrink to {slots}")
        self.slots = slots
        for slot in self._free:
            if slot >= slots:
                self.set_state(slot, SlotState.RETIRED)
        self._free = [slot for slot in self._free if slot < slots]
        self._give_back()

    def _give_back(self) -> None:
        """Once every slot beyond `slots` is empty: forgets them, and returns their memory to the system."""
        beyond = len(self.states) - self.slots
        if not beyond or self.counts[SlotState.RETIRED] < beyond:
            return
        self.block.give_back(self.slots * self.record_bytes, len(self.states) * self.record_bytes)
        del self.states[self.slots :], self._refs[self.slots :]  # generations stay: none is ever used twice
        self.counts[SlotState.RETIRED] = 0

    def _unref(self, slot: int) -> None:
        self._refs[slot] -= 1
        if self._refs[slot] > 0:
            return
        self._generations[slot] += 1
        if self._poison:
            self.block.fill(slot * self.record_bytes, self.record_bytes, POISON)
        if slot < self.slots:
            self.set_state(slot, SlotState.FREE)
            self._free.append(slot)
        else:
            self.set_state(slot, SlotState.RETIRED)
            self._give_back()

    def check(self) -> list[str]:
        """Findings about the free list, the reference counts and the ledger; empty when all is right."""
        findings = []
        free = set(self._free)
        if len(free) != len(self._free):
            findings.append(f"{self.name}: a slot is on the free list twice")
        if any(slot >= self.slots for slot in free):
            findings.append(f"{self.name}: a retired slot is on the free list")
        for slot in range(len(self.states)):
            state = self.state(slot)
            if (state is SlotState.FREE) != (slot in free):
                findings.append(f"{self.name}: slot {slot} is {state.name} but the free list disagrees")
            if (state in (SlotState.FREE, SlotState.RETIRED)) != (self._refs[slot] == 0):
                findings.append(f"{self.name}: slot {slot} is {state.name} with {self._refs[slot]} references")
            if state is SlotState.RETIRED and slot < self.slots:
                findings.append(f"{self.name}: slot {slot} is retired and among the first {self.slots}")
        counted = [self.states.count(state) for state in SlotState]
        if counted != self.counts:
            findings.append(f"{self.name}: slots by state are {counted}, the ledger says {self.counts}")
        if self.num_free + self.used + self.cached + self.in_flight != self.total:
            findings.append(f"{self.name}: free + used + cached + in flight is not {self.total}")
        return findings
