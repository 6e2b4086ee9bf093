"""Making room on the device: the least valuable pages go down, and no page is lost that a lower tier can take."""

from __future__ import annotations

from tierd.tiers.arena import SlotState
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
    """

    def __init__(self, residency: Residency, mover: Mover, writeback: Writeback) -> None:
        self.in_motion = 0  # pages whose device slot becomes free when a copy or a write is over
        self.demotions = 0
        self._residency = residency
        self._mover = mover
        self._writeback = writeback
        self._wanted = 0  # slots that somebody asked for in vain
        # Where every eviction is immediate, a reserve would only drop pages early.
        self._reserve = reserve_pages(residency.device.slots) if residency.host.slots else 0

    def make_room(self, count: int) -> bool:
        """Evicts until `count` device slots are free or about to be. True if something started or became free."""
        device = self._residency.device
        changed = False
        self._wanted = max(self._wanted, count)
        while device.num_free + self.in_motion < count:
            victim = self._residency.victim(Tier.DEVICE)
            if victim is None:
                break
            if not self._evict(victim):
                self._residency.offer(victim)  # again at the next poll, when copies in flight have arrived
                break
            changed = True
        return changed

    def poll(self) -> bool:
        """Goes on with what `make_room` could not do, and keeps the reserve. True if something changed."""
        free = self._residency.device.num_free
        if free >= self._wanted:
            self._wanted = 0
        target = max(self._wanted, self._reserve)
        if free + self.in_motion >= target:
            return False
        return self.make_room(target)

    def left(self, node: Node) -> None:
        """The write that a page on its way out waited for is over; it may have failed."""
        self.in_motion -= 1
        self._residency.stop_leaving(node)
        if node.durable or node.host >= 0:
            self._go(node)
        else:
            self._residency.settle(node)

    def _evict(self, node: Node) -> bool:
        residency = self._residency
        if node.host >= 0:
            residency.evict(node, Tier.DEVICE)
            return True
        slot = self._host_slot()
        if slot is not None:
            return self._copy_down(node, slot)
        if not node.durable and self._writeback.hurry(node):
            residency.start_leaving(node, Leaving.WRITE)
            self.in_motion += 1
            return True
        if not node.durable and residency.host.in_flight and not self._mover.dead:
            return False  # the pages that fill the host now are worth less than this one: it may push one out later
        residency.evict(node, Tier.DEVICE)  # durable, or there is no tier below: the page is forgotten
        return True

    def _host_slot(self) -> int | None:
        residency = self._residency
        if not residency.host.slots or self._mover.dead:
            return None
        waiting: list[Node] = []
        slot = residency.host.alloc(SlotState.FILLING)
        while slot is None and len(waiting) < _HOST_VICTIMS:
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

    def _copy_down(self, node: Node, slot: int) -> bool:
        device, host = self._residency.device, self._residency.host
        source, generation = node.device, device.retain(node.device)

        def arrived(done: Completion) -> None:
            # Publish the copy first, then give the source up: at no moment is the page in neither tier.
            device.release(source, generation)
            node.moves -= 1
            self._residency.stop_leaving(node)
            self.in_motion -= 1
            if done.error is None:
                self.demotions += 1
                self._residency.place(node, Tier.HOST, slot)
                self._go(node)
            else:
                host.drop(slot)
                self._residency.settle(node)

        job = self._mover.copy_job(host.row(slot), device.row(source), Link.DEVICE_TO_HOST, arrived)
        if not self._mover.submit(job, JobClass.NEXT):
            device.release(source, generation)
            host.drop(slot)
            return False
        node.moves += 1
        self._residency.start_leaving(node, Leaving.COPY)
        self.in_motion += 1
        return True

    def _go(self, node: Node) -> None:
        if self._residency.evictable(node, Tier.DEVICE):
            self._residency.evict(node, Tier.DEVICE)
        else:
            self._residency.settle(node)  # a lease took it meanwhile: it stays where it is
