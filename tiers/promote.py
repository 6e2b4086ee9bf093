"""Bringing the pages of a lease to the device: each page once, whoever waits for it, each wait with a deadline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from tierd.tiers.arena import Arena, SlotState
from tierd.tiers.errors import LostReason, PageLost, StoreBroken
from tierd.tiers.evict import Evictor
from tierd.tiers.lease import Lease, LeaseState, Load, TailCopy
from tierd.tiers.links import Link
from tierd.tiers.mover import Completion, Job, JobClass, Mover
from tierd.tiers.page import Tier
from tierd.tiers.prefix import Node
from tierd.tiers.residency import Residency
from tierd.tiers.store import Store
from tierd.tiers.writeback import Writeback

# Labels of the miss counter, beside `LostReason`.
LATE = "late"  # had not arrived at the deadline
NO_ROOM = "no_room"  # no device slot for the copy of a partial page

DAMAGE_EVERY_S = 60.0  # between two notices of pages that failed their check


class Promoter:
    """Not thread-safe: only the pager's thread calls it."""

    def __init__(
        self,
        residency: Residency,
        store: Store | None,
        mover: Mover,
        evictor: Evictor,
        writeback: Writeback,
        notify: Callable[[str], None],
    ) -> None:
        self.fetching: dict[Lease, None] = {}  # in the order of their fetches: the first gets free slots first
        self.promotions = [0, 0, 0]  # pages brought up, by the tier they came from
        self.misses: Counter[str] = Counter()  # pages that were found and did not arrive, by reason
        self.damaged_pages = 0  # of the store: they could not be read, or were not what they should be
        self._told_damaged = 0
        self._told_damaged_s = float("-inf")
        self._notify = notify
        self._residency = residency
        self._store = store
        self._mover = mover
        self._evictor = evictor
        self._writeback = writeback

    def fetch(self, lease: Lease, deadline_s: float) -> None:
        """Starts the copies of a lease; it is ready at once if there is nothing to copy."""
        lease.state = LeaseState.FETCHING
        lease.deadline_s = deadline_s
        self.fetching[lease] = None
        self._advance(lease)

    def poll(self, now_s: float) -> bool:
        """Goes on with what waited for slots, and cuts leases whose time is over. True if a lease became ready."""
        before = len(self.fetching)
        for lease in list(self.fetching):
            self._advance(lease)
            if lease.state is LeaseState.FETCHING and now_s >= lease.deadline_s:
                late = next((i for i, node in enumerate(lease.nodes) if node.device < 0), len(lease.nodes))
                self.cut(lease, late, LATE)
                self._advance(lease)
        return len(self.fetching) < before

    def tell_damage(self, now_s: float) -> None:
        """Tells the user of damaged pages: of the first at once, of later ones at most once in `DAMAGE_EVERY_S`."""
        count = self.damaged_pages
        if count == self._told_damaged or now_s - self._told_damaged_s < DAMAGE_EVERY_S:
            return
        self._told_damaged, self._told_damaged_s = count, now_s
        many = f"{count} pages on disk failed their check so far and were"
        what = "1 page on disk failed its check and was" if count == 1 else many
        self._notify(f"{what} dropped; the disk may be failing")

    def cut(self, lease: Lease, length: int, reason: str) -> None:
        """Shortens a lease to its first `length` pages. What is on its way arrives all the same, as cache."""
        lost = lease.nodes[length:]
        self.misses[reason] += len(lost) + (lease.tail is not None)
        lease.lost = True
        self.drop_tail(lease)
        lease.tail_tokens = 0  # of a tail that has arrived, too: it continued a page that is not there
        del lease.nodes[length:], lease.origins[length:]
        lease.next = min(lease.next, length)
        lease.recount()
        for node in lost:
            if node.load is not None and lease in node.load.waiters:
                node.load.waiters.remove(lease)
                lease.missing -= 1
            self._residency.unpin(node)

    def drop_tail(self, lease: Lease) -> None:
        """Gives up a tail that has not arrived."""
        tail, lease.tail = lease.tail, None
        if tail is None:
            return
        tail.cancelled = True
        if tail.slot >= 0:
            self._residency.device.drop(tail.slot)
        if tail.source is not None:
            self._residency.unpin(tail.source)

    def satisfy(self, node: Node) -> None:
        """The page came to the device by another way than its load: whoever waited need not any more."""
        if node.load is not None:
            for lease in node.load.waiters:
                lease.missing -= 1
            node.load.waiters.clear()

    def copy_private(self, lease: Lease, source_slot: int, tokens: int) -> None:
        """Gives a forked lease a copy of its parent's private page as its tail, if a slot is free for it."""
        device = self._residency.device
        slot = self._slot(1)
        if slot is None:
            return
        lease.tail = tail = TailCopy(None, slot)
        lease.tail_tokens = tokens
        # The parent goes on writing its page: behind the tokens that the fork uses.
        self._submit_tail(lease, tail, device, source_slot, Link.DEVICE_TO_DEVICE)

    def _advance(self, lease: Lease) -> None:
        while lease.next < len(lease.nodes):
            node = lease.nodes[lease.next]
            if node.device < 0:
                if node.load is None and not self._start_load(node, lease):
                    break
                if node.load is not None:
                    node.load.waiters.append(lease)
                    lease.missing += 1
            lease.next += 1
        tail = lease.tail
        if tail is not None and not tail.started:
            self._start_tail(lease, tail)
        if lease.next == len(lease.nodes) and not lease.missing and lease.tail is None:
            lease.arrive()
            self.fetching.pop(lease, None)

    def _start_load(self, node: Node, lease: Lease) -> bool:
        device, host = self._residency.device, self._residency.host
        if not node.alive or not node.has_copy:
            self.cut(lease, lease.next, LostReason.ABSENT)
            return False
        slot = self._slot(len(lease.nodes) - lease.next)
        if slot is None:
            return False
        load = Load(slot)
        release: Callable[[], None] | None = None
        if node.host >= 0:
            release = partial(host.release, node.host, host.retain(node.host))
            source = Tier.HOST
            done = partial(self._loaded, node, load, source, release)
            job = self._mover.copy_job(device.row(slot), host.row(node.host), Link.HOST_TO_DEVICE, done)
        else:
            source = Tier.NVME
            job = self._read_job(node, slot, partial(self._loaded, node, load, source, None))
        if not self._mover.submit(job, JobClass.NOW):
            device.drop(slot)
            if release is not None:
                release()
            return False
        node.load = load
        node.moves += 1
        return True

    def _slot(self, wanted: int) -> int | None:
        """A device slot to fill; None if room for `wanted` has to be made first."""
        device = self._residency.device
        if not device.num_free:
            self._evictor.make_room(wanted)
        return device.alloc(SlotState.FILLING)

    def _read_job(self, node: Node, slot: int, done: Callable[[Completion], None]) -> Job:
        store, key, row = self._store, node.key, self._residency.device.row(slot)
        if store is None:
            raise AssertionError(f"{node} is durable without a store")
        return Job(lambda: store.read_into(key, row), Link.DISK_READ, row.nbytes, done)

    def _loaded(
        self, node: Node, load: Load, source: Tier, release: Callable[[], None] | None, done: Completion
    ) -> None:
        residency = self._residency
        if release is not None:
            release()
        node.load = None
        node.moves -= 1
        waiters = list(load.waiters)
        for lease in waiters:
            lease.missing -= 1
        if done.error is None and node.device < 0:
            self.promotions[source] += 1
            residency.place(node, Tier.DEVICE, load.slot)
            residency.settle(node)
            return
        residency.device.drop(load.slot)  # it failed, or the page was computed meanwhile
        if done.error is not None:
            reason = self._failed(node, source, done.error)
            for lease in waiters:
                if node.device < 0 and node in lease.nodes:
                    self.cut(lease, lease.nodes.index(node), reason)
        residency.settle(node)

    def _failed(self, node: Node, source: Tier, error: Exception) -> str:
        """Books what a failed read means for the page; the label of its miss."""
        if source is not Tier.NVME or not isinstance(error, PageLost):
            if isinstance(error, StoreBroken):
                self._writeback.turn_off(str(error))
            return type(error).__name__
        if node.durable:
            self._residency.take(node, Tier.NVME)  # the store has dropped the row itself
        if error.reason is LostReason.STORE_OFF:
            self._writeback.turn_off(str(error))
        else:
            self.damaged_pages += error.reason is not LostReason.ABSENT
            self._writeback.add(node)  # if it has a copy higher up
        return error.reason

    def _start_tail(self, lease: Lease, tail: TailCopy) -> None:
        node, device, host = tail.source, self._residency.device, self._residency.host
        if node is None:
            return
        if not node.alive or not node.has_copy:
            self._lose_tail(lease, LostReason.ABSENT)
            return
        if tail.slot < 0:
            slot = self._slot(1)
            if slot is None:
                if not self._evictor.in_motion:
                    self._lose_tail(lease, NO_ROOM)  # other leases hold the device: computing is sooner than waiting
                return
            tail.slot = slot
        if node.device >= 0:
            self._submit_tail(lease, tail, device, node.device, Link.DEVICE_TO_DEVICE)
        elif node.host >= 0:
            self._submit_tail(lease, tail, host, node.host, Link.HOST_TO_DEVICE)
        else:
            generation = device.retain(tail.slot)
            done = partial(self._tail_arrived, lease, tail, partial(device.release, tail.slot, generation), True)
            if self._mover.submit(self._read_job(node, tail.slot, done), JobClass.NOW):
                tail.started = True
                node.moves += 1
            else:
                device.release(tail.slot, generation)

    def _submit_tail(self, lease: Lease, tail: TailCopy, arena: Arena, slot: int, link: Link) -> None:
        device = self._residency.device
        holds = (device.retain(tail.slot), arena.retain(slot))

        def release() -> None:
            device.release(tail.slot, holds[0])
            arena.release(slot, holds[1])

        done = partial(self._tail_arrived, lease, tail, release, False)
        job = self._mover.copy_job(device.row(tail.slot), arena.row(slot), link, done)
        if not self._mover.submit(job, JobClass.NOW):
            release()
            if tail.source is None:  # a fork's source may be gone later: give the tail up rather than wait
                self._lose_tail(lease, LATE)
            return
        tail.started = True
        if tail.source is not None:
            tail.source.moves += 1

    def _tail_arrived(
        self, lease: Lease, tail: TailCopy, release: Callable[[], None], from_store: bool, done: Completion
    ) -> None:
        residency, node = self._residency, tail.source
        release()
        if node is not None:
            node.moves -= 1
        if done.error is not None:
            reason = type(done.error).__name__
            if node is not None and from_store:
                reason = self._failed(node, Tier.NVME, done.error)
            if not tail.cancelled:
                self._lose_tail(lease, reason)
        elif not tail.cancelled:
            residency.device.set_state(tail.slot, SlotState.PRIVATE)
            lease.private.insert(0, tail.slot)
            lease.tail = None
            if node is not None:
                residency.unpin(node)
        if node is not None:
            residency.settle(node)

    def _lose_tail(self, lease: Lease, reason: str) -> None:
        self.misses[reason] += 1
        self.drop_tail(lease)
        lease.tail_tokens = 0
        lease.lost = True
        lease.recount()
