"""Bringing the pages of a lease to memory: each page once, whoever waits for it, each wait with a deadline.

Pages in CPU memory are read there, so only those of the store are loaded, from the last to the first: meanwhile the
engine may compute from the first on, and the two meet. A page that does not come is a hole, which the engine computes.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np

from tierd.tiers.arena import Arena, SlotState
from tierd.tiers.errors import JobCancelled, LostReason, PageLost, StoreBroken
from tierd.tiers.evict import Evictor
from tierd.tiers.journal import What
from tierd.tiers.lease import Lease, LeaseState, Load, TailCopy
from tierd.tiers.links import Link
from tierd.tiers.loader import Loader
from tierd.tiers.mover import Completion, Job, JobClass, Mover
from tierd.tiers.page import Tier
from tierd.tiers.prefix import NOWHERE, Node
from tierd.tiers.residency import Residency
from tierd.tiers.store import Store
from tierd.tiers.writeback import Writeback

# Labels of the miss counter, beside `LostReason`.
LATE = "late"  # had not arrived at the deadline
NO_ROOM = "no_room"  # no device slot for the copy of a partial page

DAMAGE_EVERY_S = 60.0  # between two notices of pages that failed their check
# In flight at once: enough for a disk to work through a step of the model, and a job for each of its reader threads.
# With 128 the disk had too little to do while this thread took in what had come (measured: 0.76 of its rate, 0.9 now).
MAX_LOADS = 256
# And no more than the disk reads in this time: what a read has begun to fill is nobody's until it ends, also when its
# request has long computed the page, and a very slow disk would hold those slots for minutes.
_AHEAD_S = 1.0
_LEAST_LOADS = 8
_REFILL_PAGES = 8  # streamed pages that may be on their way back to memory at once


class Verdict(enum.StrEnum):
    """What became of looking at a stored page."""

    GOOD = "good"
    BAD = "bad"  # it is not what was written, and was dropped
    UNREAD = "unread"  # the disk had no time for it, is off, or has it no more


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
        self.misses: Counter[str] = Counter()  # pages that were found and did not arrive, by reason
        self.damaged_pages = 0  # of the store: they could not be read, or were not what they should be
        self._most_loads = MAX_LOADS
        self._told_damaged = 0
        self._told_damaged_s = float("-inf")
        self._notify = notify
        self.loader = Loader(residency, store, mover, self._load_failed)
        self._residency = residency
        self._store = store
        self._mover = mover
        self._evictor = evictor
        self._writeback = writeback

    def fetch(self, lease: Lease, deadline_s: float, unseen: int = 0) -> None:
        """Starts the loads and copies of a lease; it is ready at once if there is nothing to move.

        Of the first `unseen` pages, which no row reads, those of the store stay there.
        """
        lease.unseen = unseen
        for place in [place for place in lease.absent if place < unseen and lease.nodes[place].durable]:
            self._leave_in_store(lease, place)
        lease.state = LeaseState.LIVE
        lease.deadline_s = deadline_s
        lease.next_load = max(lease.absent, default=NOWHERE)
        if lease.absent:
            self._most_loads = self._loads_ahead()
        self.fetching[lease] = None
        self._advance(lease)

    def poll(self, now_s: float) -> bool:
        """Goes on with what waited for slots, and gives loads up whose time is over. True if a lease moved on."""
        before = sum(len(lease.absent) for lease in self.fetching) + len(self.fetching)
        for lease in list(self.fetching):
            if now_s >= lease.deadline_s:
                self.give_up(lease)
            self._advance(lease)
        return sum(len(lease.absent) for lease in self.fetching) + len(self.fetching) < before

    def give_up(self, lease: Lease) -> None:
        """Loads no more for a lease: what is absent is to be computed. What is on its way arrives all the same."""
        late = {place for place in lease.absent if lease.nodes[place].durable} - lease.filling.keys()
        if lease.loading and (late or lease.tail is not None):
            self.misses[LATE] += len(late) + (lease.tail is not None)
            lease.lost = True
        lease.loading = False
        if lease.tail is not None:
            self.drop_tail(lease)
            lease.tail_tokens = 0

    def is_coming(self, lease: Lease) -> bool:
        """Whether anything absent may still come by itself: a load is to start or runs, or another lease computes."""
        if lease.tail is not None or (lease.loading and lease.next_load >= 0):
            return True
        absent = (lease.nodes[place] for place in lease.absent)
        return any(node.load is not None or node.computer not in (None, lease) for node in absent)

    def stop_loading(self, lease: Lease) -> None:
        """The engine computes what is absent sooner than it could be loaded: starts no more loads for the lease."""
        lease.loading = False

    def hole(self, lease: Lease, place: int) -> None:
        """A page of a lease is gone from where it was read: it is to be computed again."""
        lease.lost = True
        lease.absent.add(place)
        self.fetching[lease] = None

    def refill(self, lease: Lease) -> bool:
        """Brings streamed pages of a lease back to memory that is free now. True if a load was started.

        Of one that is being thinned only those that rows see, from the last on: in that order they are copied."""
        started, nodes, kept = False, lease.nodes[lease.unseen :], lease.kept
        if kept is not None:
            nodes = [node for number, node in enumerate(lease.nodes) if number in kept][::-1]
        if self._evictor.asked:
            return False  # what is free is meant for pages to be written: they would push each other out for ever
        for node in nodes:
            if self.loader.in_flight >= _REFILL_PAGES:
                break
            if not node.readable and node.durable and node.load is None and node.computer is None:
                target = self._slot(1) if self.loader.has_room(JobClass.PREFETCH) else None
                if target is None:
                    break
                self.loader.start(node, target, JobClass.PREFETCH)
                started = True
        self.loader.flush()
        return started

    def tell_damage(self, now_s: float) -> None:
        """Tells the user of damaged pages: of the first at once, of later ones at most once in `DAMAGE_EVERY_S`."""
        count = self.damaged_pages
        if count == self._told_damaged or now_s - self._told_damaged_s < DAMAGE_EVERY_S:
            return
        self._told_damaged, self._told_damaged_s = count, now_s
        many = f"{count} pages on disk failed their check so far and were"
        what = "1 page on disk failed its check and was" if count == 1 else many
        self._notify(f"{what} dropped; the disk may be failing")

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

    def copy_private(self, lease: Lease, source_slot: int, tokens: int) -> None:
        """Gives a forked lease a copy of its parent's private page as its tail, if a slot is free for it."""
        device = self._residency.device
        slot = device.alloc(SlotState.FILLING)
        if slot is None:
            return
        lease.tail = tail = TailCopy(None, slot)
        lease.tail_tokens = tokens
        # The parent goes on writing its page: behind the tokens that the fork uses.
        self._submit_tail(lease, tail, device, source_slot, Link.DEVICE_TO_DEVICE)

    def failed(self, node: Node, error: Exception) -> str:
        """Books what a failed read from the store means for the page; the label of its miss."""
        if not isinstance(error, PageLost):
            if isinstance(error, StoreBroken):
                self._writeback.turn_off(str(error))
            return type(error).__name__
        if node.durable:
            # The store has dropped the row itself, unless its index was full just then.
            self._residency.drop_row(node)
        if error.reason is LostReason.STORE_OFF:
            self._writeback.turn_off(str(error))
        else:
            if error.reason is not LostReason.ABSENT:
                self.damaged_pages += 1
                what = error.reason.replace("_", " ")
                self._residency.journal.tell(What.DAMAGE, f"a page on disk was wrong ({what}) and was dropped", node)
            if node.readable:
                self._writeback.add(node)
        return error.reason

    def inspect(self, node: Node, told: Callable[[Verdict], None]) -> None:
        """Reads a page of the store, to know whether it is what was written; what is wrong is booked as of any read.

        Args:
            told: called once: at once, or from a later drain of the mover.
        """
        store, residency = self._store, self._residency
        if store is None or not self._writeback.on or not node.durable or node.moves or node.writing:
            told(Verdict.UNREAD)
            return

        def read() -> None:
            store.read_into(node.key, np.empty(residency.device.record_bytes, np.uint8))

        def done(completion: Completion) -> None:
            residency.move(node, -1)
            verdict, error = Verdict.GOOD, completion.error
            if error is not None:
                verdict = Verdict.UNREAD
                if not isinstance(error, JobCancelled):
                    reason = self.failed(node, error)
                    if isinstance(error, PageLost) and reason not in (LostReason.STORE_OFF, LostReason.ABSENT):
                        verdict = Verdict.BAD
            residency.settle(node)
            told(verdict)

        residency.move(node, 1)
        job = Job(read, Link.DISK_READ, residency.stored_bytes, done)
        if not self._mover.submit(job, JobClass.PREFETCH):
            residency.move(node, -1)
            residency.settle(node)
            told(Verdict.UNREAD)

    def _advance(self, lease: Lease) -> None:
        # A page that is half computed when it arrives is computed to its end: rows after it wait for that.
        lease.absent -= {
            place for place in lease.absent if lease.nodes[place].readable and place not in lease.filling
        }
        while lease.loading and lease.next_load >= 0 and self.loader.in_flight < self._most_loads:
            place = lease.next_load
            if place in lease.absent and not self._load(lease, place):
                break
            lease.next_load -= 1
        tail = lease.tail
        if tail is not None and not tail.started:
            self._start_tail(lease, tail)
        self.loader.flush()
        if not lease.absent and lease.tail is None:
            self.fetching.pop(lease, None)

    def _loads_ahead(self) -> int:
        rate = self._mover.statistics()[Link.DISK_READ].bytes_per_s
        if not rate:
            return MAX_LOADS
        return min(max(int(rate * _AHEAD_S / self._residency.stored_bytes), _LEAST_LOADS), MAX_LOADS)

    def _load(self, lease: Lease, place: int) -> bool:
        """Starts to load an absent page, or finds that it need not be; False to try again later."""
        node = lease.nodes[place]
        if node.load is not None or node.computer is not None:
            return True
        if not node.durable:
            self.misses[LostReason.ABSENT] += 1
            lease.lost = True
            return True  # it is to be computed
        if not self.loader.has_room(JobClass.NOW):
            return False
        target = self._slot(len(lease.absent))
        if target is not None:
            self.loader.start(node, target, JobClass.NOW)
            return True
        if self._evictor.in_motion or self.loader.in_flight:
            return False  # room is being made
        self._leave_in_store(lease, place)  # no room for it: every step reads it there
        return True

    def _leave_in_store(self, lease: Lease, place: int) -> None:
        lease.absent.discard(place)
        lease.changes += 1

    def _slot(self, wanted: int) -> Load | None:
        """A slot of either arena to load into; None if room has to be made first. Pages under leases keep theirs."""
        device = self._residency.device
        if device.num_free > self._evictor.reserve or device.cached:
            slot = self._device_slot(wanted)
            if slot is not None:
                return Load(Tier.DEVICE, slot)
        slot = self._evictor.host_slot()
        return None if slot is None else Load(Tier.HOST, slot)

    def _device_slot(self, wanted: int) -> int | None:
        """A device slot to fill; None if room for `wanted` has to be made first."""
        device = self._residency.device
        if self._evictor.spilling:
            return None  # what becomes free is for rows, which can be written nowhere else
        if not device.num_free:
            self._evictor.make_room(min(wanted, device.cached + device.in_flight))
        return device.alloc(SlotState.FILLING)

    def _load_failed(self, node: Node, error: Exception) -> None:
        self.misses[self.failed(node, error)] += 1
        for lease in self.fetching:
            lease.lost |= any(lease.nodes[place] is node for place in lease.absent)

    def _start_tail(self, lease: Lease, tail: TailCopy) -> None:
        node, device, host = tail.source, self._residency.device, self._residency.host
        if node is None:
            return
        if not node.has_copy:
            self._lose_tail(lease, LostReason.ABSENT)
            return
        if not node.readable:
            if node.load is not None or not self.loader.has_room(JobClass.NOW):
                return
            target = self._slot(1)
            if target is not None:
                self.loader.start(node, target, JobClass.NOW)
            elif not self._evictor.in_motion:
                self._lose_tail(lease, NO_ROOM)
            return  # it is copied once it has arrived: for all who wait for it
        if tail.slot < 0:
            slot = self._device_slot(1)
            if slot is None:
                if not self._evictor.in_motion:
                    self._lose_tail(lease, NO_ROOM)  # other leases hold the device: computing is sooner than waiting
                return
            tail.slot = slot
        if node.device >= 0:
            self._submit_tail(lease, tail, device, node.device, Link.DEVICE_TO_DEVICE)
        else:
            self._submit_tail(lease, tail, host, node.host, Link.HOST_TO_DEVICE)

    def _submit_tail(self, lease: Lease, tail: TailCopy, arena: Arena, slot: int, link: Link) -> None:
        device = self._residency.device
        holds = (device.retain(tail.slot), arena.retain(slot))

        def release() -> None:
            device.release(tail.slot, holds[0])
            arena.release(slot, holds[1])

        done = partial(self._tail_arrived, lease, tail, release)
        job = self._mover.copy_job(device.row(tail.slot), arena.row(slot), link, done)
        if not self._mover.submit(job, JobClass.NOW):
            release()
            if tail.source is None:  # a fork's source may be gone later: give the tail up rather than wait
                self._lose_tail(lease, LATE)
            return
        tail.started = True
        if tail.source is not None:
            self._residency.move(tail.source, 1)

    def _tail_arrived(
        self, lease: Lease, tail: TailCopy, release: Callable[[], None], done: Completion
    ) -> None:
        residency, node = self._residency, tail.source
        release()
        if node is not None:
            residency.move(node, -1)
        if done.error is not None:
            if not tail.cancelled:
                self._lose_tail(lease, type(done.error).__name__)
        elif not tail.cancelled:
            residency.device.set_state(tail.slot, SlotState.PRIVATE)
            lease.private.insert(0, tail.slot)
            lease.changes += 1
            lease.tail = None
            lease.reached = len(lease.nodes) * lease.page_tokens + lease.tail_tokens
            if node is not None:
                residency.unpin(node)
        if node is not None:
            residency.settle(node)

    def _lose_tail(self, lease: Lease, reason: str) -> None:
        self.misses[reason] += 1
        self.drop_tail(lease)
        lease.tail_tokens = 0
        lease.lost = True
