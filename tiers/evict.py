"""Making room on the device: the least valuable pages go down, and no page is lost that a lower tier can take."""

from __future__ import annotations

import math

from tierd.tiers.arena import SlotState
from tierd.tiers.journal import What
from tierd.tiers.links import Link
from tierd.tiers.mover import Completion, JobClass, Mover
from tierd.tiers.page import Tier
from tierd.tiers.policy import reserve_pages
from tierd.tiers.prefix import Leaving, Node
from tierd.tiers.residency import Residency
from tierd.tiers.writeback import Writeback

_HOST_VICTIMS = 4  # how many host pages are looked at for one that may go at once


class Evictor:
    """Not thread-safe: only the pager's thread calls it.

    A device page goes, in this order: at once, if the host has a copy; into a host slot, if there is one or one can be
    made; at once, if it is durable; after a write to the store; at once and for ever, if there is no lower tier.

    Where that makes too little room, pages under leases *spill* in the same way, the longest there first, except that
    they never go for ever: their leases read them where they lie then.
    """

    def __init__(self, residency: Residency, mover: Mover, writeback: Writeback) -> None:
        self.in_motion = 0  # pages whose device slot becomes free when a copy or a write is over
        self.demotions = 0
        self.spills = 0  # pages under leases that left the device
        self._residency = residency
        self._mover = mover
        self._writeback = writeback
        self._wanted = 0  # slots that somebody asked for in vain
        self._waits = False  # idle pages go when copies in flight have arrived: pages under leases need not
        self._spilling = 0  # of these, how many may come from pages under leases

    @property
    def under_way(self) -> bool:
        """Whether anything runs, or waits for no more than its turn, that may make a page free or bring one."""
        writes = self._writeback.on and not self._writeback.paused
        return self._mover.outstanding > 0 or (self.in_motion > 0 and writes)

    @property
    def reserve(self) -> int:
        """Device slots to keep free ahead of need: none where every eviction is immediate."""
        return reserve_pages(self._residency.device.slots) if self._residency.host.slots else 0

    @property
    def asked(self) -> bool:
        """Whether somebody waits for device slots."""
        return self._wanted > 0

    @property
    def spilling(self) -> bool:
        """Whether somebody waits for device slots to write to."""
        return self._spilling > 0

    def make_room(self, count: int, *, spill: bool = False) -> bool:
        """Evicts until `count` device slots are free or about to be. True if something started or became free.

        Args:
            count: slots wanted.
            spill: whether pages under leases may go, too: for pages that have to be written, not for loads.
        """
        self._wanted = max(self._wanted, count)
        changed = self._evict_idle(count)
        if spill:
            self._spilling = max(self._spilling, count)
            changed |= self._spill(self._spilling)
        if self._residency.device.num_free >= self._wanted:
            self.relax()
        return changed

    def shed(self, count: int) -> int:
        """Has idle pages leave the device, wherever they lie there; how many began to. For a device that shrinks."""
        begun = 0
        while begun < count and (victim := self._residency.victim(Tier.DEVICE)) is not None:
            if not self._evict(victim):
                self._residency.offer(victim)
                break
            begun += 1
        return begun

    def relax(self) -> None:
        """Whoever asked for room has it, or asks again: nothing more leaves on its behalf."""
        self._wanted = self._spilling = 0

    def poll(self) -> bool:
        """Goes on with what `make_room` could not do, and keeps the reserve. True if something changed."""
        free = self._residency.device.num_free
        if free >= self._wanted:
            self.relax()
        target = max(self._wanted, self.reserve)
        if free + self.in_motion >= target:
            return False
        changed = self._evict_idle(target)  # the reserve is nobody's wish: `asked` stays as it is
        return self._spill(self._spilling) or changed

    def left(self, node: Node) -> None:
        """The write that a page on its way out waited for is over; it may have failed."""
        self.in_motion -= 1
        self._residency.stop_leaving(node)
        if node.durable or node.host >= 0:
            self._go(node)
        else:
            self._residency.settle(node)

    def host_slot(self, worth: float = math.inf) -> int | None:
        """A slot of the host arena to fill, by evicting idle pages if need be; None if there is none now.

        Args:
            worth: value of the page it is for; what is worth more stays.
        """
        residency = self._residency
        if not residency.host.slots or self._mover.dead:
            return None
        waiting: list[Node] = []
        slot = residency.host.alloc(SlotState.FILLING)
        while slot is None and len(waiting) < _HOST_VICTIMS and residency.heaps[Tier.HOST].least() <= worth:
            victim = residency.victim(Tier.HOST)
            if victim is None:
                break
            if victim.device < 0 and not victim.durable and self._writeback.hurry(victim):
                waiting.append(victim)  # it may go when it is written
                continue
            residency.evict(victim, Tier.HOST)
            slot = residency.host.alloc(SlotState.FILLING)
        for victim in waiting:
            residency.offer(victim)
        return slot

    def _evict_idle(self, count: int) -> bool:
        device = self._residency.device
        changed = False
        stuck: list[Node] = []
        self._waits = False
        while device.num_free + self.in_motion < count:
            victim = self._residency.victim(Tier.DEVICE)
            if victim is None:
                break
            if self._evict(victim):
                changed = True
                continue
            stuck.append(victim)  # again at the next poll, when copies in flight have arrived
            if not victim.kept:
                self._waits = True
                break  # what is worth more waits behind it; but a page that is kept holds up no other
        for victim in stuck:
            self._residency.offer(victim)
        return changed

    def _spill(self, count: int) -> bool:
        residency, changed = self._residency, False
        if self._waits:
            return False
        for node in list(residency.leased.values()):
            if residency.device.num_free + self.in_motion >= count:
                break
            if residency.spillable(node) and self._start_spill(node):
                changed = True
        return changed

    def _start_spill(self, node: Node) -> bool:
        if node.host < 0 and (slot := self.host_slot()) is not None:
            return self._copy_down(node, slot)
        if self._residency.droppable(node):
            self._drop_leased(node)
            return True
        return self._leave_after_write(node)

    def _evict(self, node: Node) -> bool:
        residency = self._residency
        if node.host >= 0:
            residency.evict(node, Tier.DEVICE)
            return True
        # It has to follow its children, even if they are worth a little more: without it nothing finds them.
        deeper = residency.host.slots if node.kids[Tier.HOST] else 0
        worth = math.inf if node.kept else residency.value(Tier.DEVICE, node, deeper)
        slot = self.host_slot(worth)
        if slot is not None:
            return self._copy_down(node, slot)
        if not node.durable and self._leave_after_write(node):
            return True
        if not node.durable and residency.host.in_flight and not self._mover.dead:
            return False  # the pages that fill the host now are worth less than this one: it may push one out later
        if node.kept and not node.durable:
            return False
        residency.evict(node, Tier.DEVICE)  # durable, or there is no tier below: the page is forgotten
        return True

    def _leave_after_write(self, node: Node) -> bool:
        if not self._writeback.hurry(node):
            return False
        self._residency.start_leaving(node, Leaving.WRITE)
        self.in_motion += 1
        return True

    def _copy_down(self, node: Node, slot: int) -> bool:
        device, host = self._residency.device, self._residency.host
        source, generation = node.device, device.retain(node.device)

        def arrived(done: Completion) -> None:
            # Publish the copy first, then give the source up: at no moment is the page in neither tier.
            device.release(source, generation)
            self._residency.move(node, -1)
            self._residency.stop_leaving(node)
            self.in_motion -= 1
            if done.error is None:
                self.demotions += 1
                self._residency.place(node, Tier.HOST, slot)
                self._residency.journal.page(What.DEMOTE, node, Tier.HOST, slot)
                self._go(node)
            else:
                host.drop(slot)
                self._residency.settle(node)

        job = self._mover.copy_job(host.row(slot), device.row(source), Link.DEVICE_TO_HOST, arrived)
        if not self._mover.submit(job, JobClass.NEXT):
            device.release(source, generation)
            host.drop(slot)
            return False
        self._residency.move(node, 1)
        self._residency.start_leaving(node, Leaving.COPY)
        self.in_motion += 1
        return True

    def _go(self, node: Node) -> None:
        if self._residency.evictable(node, Tier.DEVICE):
            self._residency.evict(node, Tier.DEVICE)
        elif self._spilling and node.pins and self._residency.droppable(node):
            self._drop_leased(node)
        else:
            self._residency.settle(node)  # a lease took it meanwhile: it stays where it is

    def _drop_leased(self, node: Node) -> None:
        self.spills += 1
        self._residency.evict(node, Tier.DEVICE)
