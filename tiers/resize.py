"""Growing and shrinking the arenas of a running pager: what lies in slots that go is moved or evicted between steps."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tierd.tiers.arena import Arena, SlotState
from tierd.tiers.errors import TierFull
from tierd.tiers.journal import What
from tierd.tiers.links import Link
from tierd.tiers.mover import Completion, JobClass
from tierd.tiers.page import Tier
from tierd.tiers.prefix import Leaving, Node

if TYPE_CHECKING:
    from tierd.tiers.pager import Pager

MAX_MOVES = 16  # copies in flight: enough to keep the mover busy from one step to the next, few enough to hold up none
_LOOK_EVERY_S = 0.02  # between two walks over all known pages


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A resize in progress. `before`: sizes of device and host to go back to."""

    before: tuple[int, int]
    deadline_s: float
    done: Callable[[str], None]


class Resizer:
    """One resize at a time. Not thread-safe: only the pager's thread calls it.

    Growing takes effect at once. Shrinking retires slots, which are then emptied by `poll`: known pages are copied to
    slots that stay, those of live leases too; where there is no room, the least valuable pages are evicted and pages of
    leases spill, as if the device were full. Pages that a sequence is writing move between two steps. Nothing is lost
    to a lease, and steps go on. What can't be emptied before the deadline is told, and the old sizes come back.
    """

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._wanted: _Wanted | None = None
        self.moving = {Tier.DEVICE: 0, Tier.HOST: 0}  # copies in flight; each owns the slot that it fills
        self._found: dict[Tier, deque[Node]] = {Tier.DEVICE: deque(), Tier.HOST: deque()}
        self._looked_s = float("-inf")

    @property
    def active(self) -> bool:
        """Whether slots are being emptied."""
        return self._wanted is not None

    def needed(self) -> tuple[int, int]:
        """The slots of device and host that live leases can't do without at the moment.

        On the device these are the pages being written, and those in use that neither CPU memory nor the store could
        take over. In CPU memory these are the pages that leases read there, or will when a copy has arrived.
        """
        pager, device, host = self._pager, self._pager.device, self._pager.host
        written = device.counts[SlotState.PRIVATE] + sum(
            lease.tail is not None and lease.tail.slot >= 0 for lease in pager.leases
        )
        if pager.writeback.on and not pager.writeback.paused and pager.writeback.admission.allowed:
            below = device.slots
        else:
            below = host.slots - host.used
        on_device = max(1, written + max(0, device.counts[SlotState.PINNED] - below))
        return on_device, host.used + host.counts[SlotState.FILLING]

    def start(
        self, device_slots: int | None, host_slots: int | None, deadline_s: float, done: Callable[[str], None]
    ) -> None:
        """Begins a resize; None leaves an arena as it is.

        Args:
            deadline_s: on the pager's clock; when it has passed, the old sizes come back.
            done: called once, perhaps before this returns: with "" when the arenas have their new sizes, else with the
                reason why they have the old ones.

        Raises TierFull, with the number that would do, when it can't work or another resize goes on.
        """
        device, host = self._pager.device, self._pager.host
        if self._wanted is not None:
            raise TierFull("another resize is in progress")
        sizes = [
            (arena, arena.slots if slots is None else slots)
            for arena, slots in ((device, device_slots), (host, host_slots))
        ]
        for (arena, slots), needed in zip(sizes, self.needed(), strict=True):
            if slots > arena.max_slots:
                raise TierFull(
                    f"{slots} pages are more than the {arena.max_slots} that {arena.name} memory can grow to"
                )
            if slots < min(needed, arena.slots):
                enough = -(-needed * arena.record_bytes // 10**6)
                raise TierFull(
                    f"{slots} pages of {arena.name} memory are fewer than the {needed} that running requests need: "
                    f"{enough} MB would do"
                )
        self._wanted = _Wanted((device.slots, host.slots), deadline_s, done)
        try:
            for arena, slots in sizes:
                arena.grow(max(slots, arena.slots))
        except OSError as exc:
            for arena, before in zip((device, host), self._wanted.before, strict=True):
                arena.retire(before)
            self._wanted = None
            raise TierFull(f"there is no such memory: {exc.strerror or exc}") from exc
        for arena, slots in sizes:
            if slots < arena.slots:
                arena.retire(slots)
        self.poll()

    def poll(self) -> bool:
        """Goes on with emptying slots, and ends when they are empty or it is too late. True if something changed."""
        wanted = self._wanted
        if wanted is None:
            return False
        device, host = self._pager.device, self._pager.host
        now_s = self._pager.clock()
        if now_s - self._looked_s >= _LOOK_EVERY_S and not (device.shrunk and host.shrunk):
            self._looked_s = now_s
            self._look()
        changed = self._shed()
        changed |= self._move_written()
        for tier, arena in ((Tier.DEVICE, device), (Tier.HOST, host)):
            changed |= self._empty(tier, arena)
        if device.shrunk and host.shrunk:
            self._end(wanted, "")
        elif now_s >= wanted.deadline_s:
            reason = " and ".join(
                f"{arena.total - arena.slots} pages of {arena.name} memory beyond {arena.slots} are still in use"
                for arena in (device, host)
                if not arena.shrunk
            )
            for arena, slots in zip((device, host), wanted.before, strict=True):
                self._restore(arena, slots)
            self._end(wanted, reason)
        return changed

    def _restore(self, arena: Arena, slots: int) -> None:
        if slots > arena.slots:
            with contextlib.suppress(OSError):  # its memory went back, and somebody else has it: it stays as it is
                arena.grow(slots)

    def _end(self, wanted: _Wanted, reason: str) -> None:
        self._wanted = None
        for found in self._found.values():
            found.clear()
        if not reason:
            device, host = self._pager.device, self._pager.host
            told = f"the device has room for {device.slots} pages, CPU memory for {host.slots}"
            self._pager.residency.journal.tell(What.RESIZE, told)
        wanted.done(reason)

    def _look(self) -> None:
        """Finds the pages to move. The most valuable come first: what is left over when there is no room is evicted."""
        residency, nodes = self._pager.residency, self._pager.index.nodes.values()
        for tier, arena in ((Tier.DEVICE, self._pager.device), (Tier.HOST, self._pager.host)):
            found = [node for node in nodes if self._slot_of(node, tier) >= arena.slots]
            ranked = [(node.pins > 0, residency.value(tier, node), place) for place, node in enumerate(found)]
            self._found[tier] = deque(found[place] for _, _, place in sorted(ranked, reverse=True))

    def _shed(self) -> bool:
        """Has the least valuable pages go of those that are too many, before any is moved: then each has a place."""
        device, evictor = self._pager.device, self._pager.evictor
        on_their_way = self.moving[Tier.DEVICE] + evictor.in_motion + device.counts[SlotState.DRAINING]
        surplus = device.total - device.num_free - device.slots - on_their_way
        return evictor.shed(surplus) > 0

    def _move_written(self) -> bool:
        """Moves pages that sequences are writing. No step runs now, and a reader of the old slot holds it."""
        device, changed = self._pager.device, False
        for lease in self._pager.leases:
            for place, slot in enumerate(lease.private):
                if slot >= device.slots and (new := self._copied(slot)) is not None:
                    lease.private[place] = new
                    lease.changes += 1
                    changed = True
            for place, slot in lease.filling.items():
                if slot >= device.slots and (new := self._copied(slot)) is not None:
                    lease.filling[place] = new
                    lease.changes += 1
                    changed = True
        return changed

    def _copied(self, slot: int) -> int | None:
        device = self._pager.device
        new = device.alloc(SlotState.PRIVATE)
        if new is None:
            self._make_room(1)
            new = device.alloc(SlotState.PRIVATE)
        if new is not None:
            self._pager.mover.copy_now(device.row(new), device.row(slot))
            device.drop(slot)
        return new

    def _make_room(self, count: int) -> None:
        self._pager.evictor.make_room(count, spill=True)

    def _empty(self, tier: Tier, arena: Arena) -> bool:
        found, changed = self._found[tier], False
        while found and not arena.shrunk and self.moving[tier] < MAX_MOVES:
            node = found[0]
            if self._slot_of(node, tier) < arena.slots or node.moves or node.leaving is not Leaving.NO:
                found.popleft()  # it has gone, or is busy: seen again at the next look
                continue
            if tier is Tier.HOST and (node.device >= 0 or not arena.slots):
                found.popleft()
                changed |= self._leave_host(node)
                continue
            slot = self._slot(tier, arena, len(found))
            if slot is None or not self._start_move(node, tier, arena, slot):
                break
            found.popleft()
            changed = True
        return changed

    def _leave_host(self, node: Node) -> bool:
        """A page that need not stay in CPU memory, or can't: all of it goes."""
        residency, writeback = self._pager.residency, self._pager.writeback
        if not residency.evictable(node, Tier.HOST):
            return False
        if node.device < 0 and not node.durable and writeback.hurry(node):
            return False  # when it is written
        residency.evict(node, Tier.HOST)
        return True

    def _slot(self, tier: Tier, arena: Arena, count: int) -> int | None:
        if tier is Tier.HOST:
            return self._pager.evictor.host_slot()
        if not arena.num_free and not self.moving[tier] and not self._pager.evictor.in_motion:
            self._make_room(min(count, MAX_MOVES))
        return arena.alloc(SlotState.FILLING)

    def _start_move(self, node: Node, tier: Tier, arena: Arena, slot: int) -> bool:
        source = self._slot_of(node, tier)
        if source < arena.slots:  # making room has evicted it, or begun to
            arena.drop(slot)
            return True
        if node.moves or node.leaving is not Leaving.NO:
            arena.drop(slot)
            return True
        generation = arena.retain(source)
        arrived = partial(self._moved, node, tier, arena, source, generation, slot)
        job = self._pager.mover.copy_job(arena.row(slot), arena.row(source), Link.DEVICE_TO_DEVICE, arrived)
        if not self._pager.mover.submit(job, JobClass.NEXT):
            arena.release(source, generation)
            arena.drop(slot)
            return False
        self._pager.residency.move(node, 1)
        self.moving[tier] += 1
        return True

    def _moved(
        self, node: Node, tier: Tier, arena: Arena, source: int, generation: int, slot: int, done: Completion
    ) -> None:
        residency = self._pager.residency
        self.moving[tier] -= 1
        residency.move(node, -1)
        if done.error is None and self._slot_of(node, tier) == source:
            # Both copies are whole and nobody looks between these two lines.
            residency.take(node, tier)
            residency.place(node, tier, slot)
        else:
            arena.drop(slot)
        arena.release(source, generation)
        residency.settle(node)

    def _slot_of(self, node: Node, tier: Tier) -> int:
        return node.device if tier is Tier.DEVICE else node.host
