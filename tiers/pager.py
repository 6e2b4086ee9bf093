"""The facade of the tiers: find known pages, bring them to the device, hand out new ones, keep what was computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierd.tiers import check as checks
from tierd.tiers import upkeep
from tierd.tiers.arena import Arena, SlotState
from tierd.tiers.commit import Committer
from tierd.tiers.distrust import Distrust
from tierd.tiers.errors import StoreError, TierFull
from tierd.tiers.evict import Evictor
from tierd.tiers.journal import Journal
from tierd.tiers.keys import pack_tokens, page_key, salted_root
from tierd.tiers.lease import Lease, LeaseState, TailCopy
from tierd.tiers.mover import Mover
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.page_tables import PageTables
from tierd.tiers.prefix import Leaving, Node, PrefixIndex
from tierd.tiers.promote import Promoter
from tierd.tiers.residency import Residency
from tierd.tiers.resize import Resizer
from tierd.tiers.shares import Shares
from tierd.tiers.stats import PagerStats, collect, page_map
from tierd.tiers.store import Store
from tierd.tiers.writeback import Writeback


class Pager:
    """Pages of KV cache in a device arena, a host arena and a store.

    Threading: every method is called by one thread, which takes all decisions. The mover's threads only move bytes;
    what they finished takes effect in `poll`, on the caller's thread.

    Times: `deadline_s` and `now_s` are times of `clock`. Ages of pages are kept in a time of their own that goes on
    where the store's newest page stopped, so a clock that starts anew after a reboot does no harm.

    Args:
        layout_record_bytes: bytes of one page, the same in every tier.
        page_tokens: tokens of a full page.
        root: key before the first page: everything that makes pages comparable is in it.
        device: where pages are computed and read.
        host: CPU memory below it; None, or 0 slots: off.
        store: the NVMe tier; None: off. The pager does not close it.
        mover: moves the bytes. The pager closes it.
        clock: seconds, never going back.
        events: called with ("notice", {"text": ...}) when a tier is turned off or is full, or when
            pages on disk fail their check.
        stored_record_bytes: of a page in the store, where that is not as many.
    """

    def __init__(
        self,
        *,
        layout_record_bytes: int,
        page_tokens: int,
        root: PageKey,
        device: Arena,
        host: Arena | None,
        store: Store | None,
        mover: Mover,
        clock: Callable[[], float],
        events: Callable[[str, dict[str, object]], None],
        stored_record_bytes: int | None = None,
    ) -> None:
        for arena in (device, host):
            if arena is not None and arena.record_bytes != layout_record_bytes:
                raise ValueError(f"{arena} holds records of {arena.record_bytes} bytes, not {layout_record_bytes}")
        self.page_tokens = page_tokens
        self.root = root
        self.device = device
        self.host = host if host is not None else Arena("host", 0, layout_record_bytes)
        self.store = store
        self.mover = mover
        self.index = PrefixIndex(page_tokens)
        slots = store.capacity_slots if store is not None else 0
        self.residency = Residency(self.index, device, self.host, slots, Journal(clock), stored_record_bytes)
        self.writeback = Writeback(self.residency, store, mover, self._notice, self._recovered, self._written)
        self.evictor = Evictor(self.residency, mover, self.writeback)
        self.promoter = Promoter(self.residency, store, mover, self.evictor, self.writeback, self._notice)
        self.tables = PageTables(self.residency, self.promoter)
        self.committer = Committer(
            self.residency, self.writeback, self.promoter, self.page_time, mover.copy_now
        )
        self.resizer = Resizer(self)
        self.distrust = Distrust(self.residency)
        self.leases: set[Lease] = set()
        self.shares = Shares(self.residency, self.leases)
        self.clock = clock
        self._events = events
        self._epoch_s = 0.0  # page time = clock + epoch
        self.lookups = self.lookup_tokens = 0
        self.hit_tokens = [0, 0, 0]
        self._told_dead = False
        self._starved = False  # the last `allocate` got nothing
        if store is not None:
            try:
                self._epoch_s = upkeep.load_index(self, store)
            except StoreError as exc:  # a disk that can't be read is no reason not to start
                self.writeback.turn_off(str(exc))

    @property
    def capacity_pages(self) -> int:
        """Pages that one sequence may have: beyond memory they are streamed from the store."""
        return self.device.slots + self.host.slots + self.residency.store_slots

    @property
    def memory_pages(self) -> int:
        """Pages of memory that are free, or that no live lease needs."""
        return self.device.num_free + self.device.cached + self.host.num_free + self.host.cached

    @property
    def writable_pages(self) -> int:
        """Device slots that `allocate` can give out, now or when pages of leases have spilled."""
        device, leased = self.device, self.residency.leased.values()
        # A slot on its way comes by itself: nobody is to be preempted for it. That of an idle page counts as cached.
        leaving = sum(node.leaving is not Leaving.NO for node in leased) if self.evictor.in_motion else 0
        may_leave = len(leased) - leaving
        if not self.writeback.on or self.writeback.paused:
            room = 0 if self.mover.dead else self.host.num_free + self.host.cached
            below = sum(node.durable or node.host >= 0 for node in leased)  # these need no other slot
            may_leave = min(may_leave, room + below)
        found = device.num_free + device.cached + device.counts[SlotState.DRAINING] + leaving + may_leave
        return max(0, min(found, device.slots - device.counts[SlotState.PRIVATE]))

    def chain(self, tokens: Sequence[int], salt: bytes = b"") -> list[PageKey]:
        """The keys of the pages that `tokens` fill, without the last token, as `match` would look for them."""
        packed, size, keys = pack_tokens(tokens[:-1]), self.index.page_bytes, [salted_root(self.root, salt)]
        for start in range(0, len(packed) - size + 1, size):
            keys.append(page_key(keys[-1], packed[start : start + size]))
        return keys[1:]

    def leased_pages(self, keys: Sequence[PageKey]) -> int:
        """How many of these pages, from the first on, live leases hold or wait for."""
        for count, key in enumerate(keys):
            node = self.index.get(key)
            if node is None or not node.pins:
                return count
        return len(keys)

    def match(
        self,
        tokens: Sequence[int],
        salt: bytes = b"",
        *,
        again: bool = False,
        tenant: bytes = b"",
        quota_pages: int = 0,
    ) -> Lease:
        """A lease on the longest known run at the start of `tokens`, pinned before this returns.

        It covers at most `len(tokens) - 1` tokens, for one must be computed to go on. Beyond the last whole page the
        first tokens of another known page may count, too: they are copied into a private page (copy on write) if a
        device slot can be had for it. Loads and copies start with `fetch`.

        With `again`, for a sequence that had to give its pages back, this is no new use of them, and not counted.
        `quota_pages` bounds what this tenant may have in the cache (`shares`), 0 is no bound.
        """
        now_s = self.page_time()
        lease = Lease(salted_root(self.root, salt), self.page_tokens)
        found, source, shared = self.index.match(lease.root, pack_tokens(tokens[:-1]))
        for place, node in enumerate(found):
            self._use(node, now_s, again)
            lease.origins.append(node.nearest)
            if not node.readable:
                lease.absent.add(place)
        lease.share = self.shares.of(tenant, quota_pages, lease.root)
        self.shares.used(lease.share, found)
        lease.nodes = found
        lease.reached = len(found) * self.page_tokens
        if source is not None:
            self._use(source, now_s, again)
            lease.tail, lease.tail_of = TailCopy(source), source
            lease.tail_tokens = shared
            lease.tail_origin = source.nearest
        if not again:
            self.lookups += 1
            self.lookup_tokens += len(tokens)
            for tier, hit in zip(Tier, (lease.hit_device, lease.hit_host, lease.hit_nvme), strict=True):
                self.hit_tokens[tier] += hit
        self.leases.add(lease)
        if not lease.absent and lease.tail is None:
            lease.state = LeaseState.LIVE
        return lease

    def fetch(self, lease: Lease, deadline_s: float, unseen: int = 0) -> None:
        """Starts bringing the pages of a lease to memory, but for the first `unseen` of them; `poll` completes it.

        Meanwhile the engine may compute absent pages itself, see `Lease.skip`. A page that fails, or has not arrived
        at the deadline, is to be computed. What arrives later is cached.
        """
        self._require_live(lease)
        if lease.state is LeaseState.MATCHED:
            self.promoter.fetch(lease, deadline_s, unseen)

    def allocate(self, lease: Lease, start: int, end: int) -> bool:
        """Device slots for the rows `start` to `end` of the sequence, where it has none yet.

        False if they are not to be had now: evictions were started, ask again after `poll`; if other leases hold the
        device, wait for their release. False, too, if a page has just come, or comes from another lease: `skip` and
        `limit` know better after `poll`. Raises TierFull if there can never be so many.
        """
        self._require_live(lease)
        size = self.page_tokens
        wanted = [page for page in range(start // size, -(-end // size)) if not lease.has_slot(page)]
        if not wanted:
            return True
        pages = max(wanted[-1] + 1 - lease.dropped, lease.num_pages)
        if pages > self.capacity_pages:
            raise TierFull(f"{pages} pages do not fit the {self.capacity_pages} of all tiers")
        written = len(wanted) + len(lease.private) + len(lease.filling)
        if written > self.device.slots:
            raise TierFull(f"{written} pages to be written at once do not fit a device of {self.device.slots}")
        for page in wanted:
            node = lease.nodes[page] if page < len(lease.nodes) else None
            if node is not None and (node.readable or node.computer not in (None, lease)):
                return False
        if not self.make_room(len(wanted)):
            return False
        for page in wanted:
            self.committer.give_slot(lease, page)
        lease.changes += 1
        return True

    def make_room(self, slots: int) -> bool:
        """Whether so many device slots are free; if not, evictions were started: ask again after `poll`."""
        if self.device.num_free < slots:
            self.evictor.make_room(slots, spill=True)
        self._starved = self.device.num_free < slots
        return not self._starved

    def commit(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Names every page of the lease that `tokens` fills: it becomes shareable and is queued for write-behind.

        Args:
            lease: a live one.
            tokens: the whole sequence, as far as its keys and values are in the pages without a hole.

        If a page is known in memory already, that copy takes the place of the lease's own.
        """
        self._require_live(lease)
        self.committer.commit(lease, tokens)

    def adopt(self, lease: Lease, tokens: Sequence[int]) -> int:
        """Goes on with pages that others have computed since, as far as they lie in memory; returns how many.

        They count as found, and take the place of pages that the lease was writing. `tokens` as in `match`. Nothing
        happens while something that was found is still to come.
        """
        self._require_live(lease)
        if not lease.ready or lease.unkeyed:
            return 0
        now_s = self.page_time()
        return self.committer.adopt(lease, tokens, lambda node: self._use(node, now_s))

    def release(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Ends the lease. Every full page and the partial tail of `tokens` stay as cache. Ended already: nothing.

        Args:
            lease: any; of one that was never fetched `tokens` do not count.
            tokens: as in `commit`.
        """
        if lease.state is LeaseState.ENDED:
            return
        if lease.state is LeaseState.LIVE:
            self.commit(lease, tokens)
            self.committer.keep_tail(lease, tokens)
        self.promoter.fetching.pop(lease, None)
        lease.state = LeaseState.ENDED
        self.promoter.drop_tail(lease)
        now_s = self.page_time()
        self.committer.abandon(lease)
        for node in lease.nodes:
            node.last_use_s = now_s  # a page is never older than the pages after it
            if node.readable:
                self.committer.keep(node)
        for node in reversed(lease.nodes):
            self.residency.unpin(node)
        for slot in lease.private:
            self.device.drop(slot)
        self.shares.used(lease.share, lease.nodes)
        self.shares.trim(lease.share)
        lease.nodes, lease.private, lease.absent = [], [], set()
        self.leases.discard(lease)
        self._starved = False
        self.evictor.relax()

    def fork(self, lease: Lease, tokens: Sequence[int]) -> Lease:
        """A second lease that continues `tokens`: full pages are shared, the partial one is copied.

        `make_room` first: there must be a free device slot if there is a partial page. The fork is ready after `poll`
        then. A copy that fails leaves it with the full pages only (`reached` says so). Raises ValueError for a lease
        that is not ready, and for `tokens` that are less than its pages with a key hold.
        """
        self._require_live(lease)
        if not lease.ready or len(tokens) < len(lease.nodes) * self.page_tokens:
            raise ValueError(f"{lease} can't be forked after {len(tokens)} tokens: it is not ready, or holds more")
        self.commit(lease, tokens)
        twin = Lease(lease.root, self.page_tokens)
        twin.share = lease.share
        now_s = self.page_time()
        twin.nodes = list(lease.nodes)
        for node in twin.nodes:
            self._use(node, now_s, again=True)  # the same request: no sign that others want the page
        twin.origins = [node.nearest for node in twin.nodes]
        twin.reached = len(twin.nodes) * self.page_tokens
        rest = len(tokens) - twin.reached
        self.leases.add(twin)
        if 0 < rest < self.page_tokens and lease.private and not lease.unkeyed:
            self.promoter.copy_private(twin, lease.private[0], rest)
        self.promoter.fetch(twin, float("inf"))
        return twin

    def poll(self, now_s: float) -> bool:
        """Takes in what the mover finished, starts write-behind and evictions. True if something changed."""
        done = self.mover.drain()
        for completion in done:
            completion.job.on_done(completion)
        changed = bool(done)
        if done:
            self.shares.settle()
        self.promoter.tell_damage(now_s)
        if self.promoter.fetching:
            changed |= self.promoter.poll(now_s)
        self.promoter.loader.flush()  # of a lease that has ended while the mover's queue was full
        changed |= self.writeback.poll(now_s)
        changed |= self.evictor.poll()
        changed |= self.resizer.poll()
        self.distrust.work()
        if not self._starved:  # else it would take the slots that were just made free for somebody
            for lease in self.leases:
                if lease.streamed:
                    changed |= self.promoter.refill(lease)
        if self.mover.dead is not None and not self._told_dead:
            self._told_dead = True
            self.writeback.turn_off(str(self.mover.dead))
            self._notice(f"pages can't be moved any more: {self.mover.dead}")
        return changed

    def wait(self, timeout_s: float) -> bool:
        """Blocks until `poll` has something to take in, at most `timeout_s` seconds of real time."""
        return self.mover.wait(timeout_s)

    def flush(self, deadline_s: float) -> int:
        """Makes everything durable that is not; returns the pages left when that was not possible in time."""
        return upkeep.flush(self, deadline_s)

    def clear(self) -> int:
        """Forgets every page that no lease uses and nothing is moving, in all tiers; returns how many.

        No look-up finds them from here on. Their rows leave the disk behind the work: `flush` waits for that.
        """
        return upkeep.clear(self)

    def check(self) -> list[str]:
        """Ledgers and invariants; empty when all is right. Reads all books, so not for every step."""
        return checks.check(self)

    def statistics(self) -> PagerStats:
        """All counters, frozen; cheap enough for every second."""
        return collect(self)

    def page_map(self) -> bytes:
        """One byte a device slot: bits 0-2 `SlotState`, 0x08 partial page, 0x10 also in CPU memory, 0x20 durable,
        0x40 a copy from or to it is in flight."""
        return page_map(self)

    def close(self) -> None:
        """Stops the mover and takes in what it had finished. Flush first to keep all; the store stays open."""
        self.mover.close()
        for completion in self.mover.drain():
            completion.job.on_done(completion)

    def page_time(self) -> float:
        """Now, on the scale of `Node.last_use_s`."""
        return self.clock() + self._epoch_s

    def _use(self, node: Node, now_s: float, again: bool = False) -> None:
        node.hits += not again
        node.last_use_s = now_s
        self.residency.pin(node)
        self.writeback.touch(node)

    def _written(self, node: Node) -> None:
        self.evictor.left(node)

    def _notice(self, text: str) -> None:
        self._events("notice", {"text": text})

    def _recovered(self, text: str) -> None:
        self._events("notice_over", {"text": text})

    def _require_live(self, lease: Lease) -> None:
        if lease.state is LeaseState.ENDED:
            raise ValueError(f"{lease} has ended")
