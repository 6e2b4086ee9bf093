"""Where the copies of each page lie: the one place that books a copy in or out of a tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from tierd.tiers.arena import Arena, SlotState
from tierd.tiers.journal import Journal, What
from tierd.tiers.keys import TOKEN_BYTES
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.policy import RecomputeCost, VictimHeap, rank
from tierd.tiers.prefix import NOWHERE, Leaving, Node, PrefixIndex

_DUPLICATE = -1e12  # before every real rank: a host copy of a page that is on the device costs nothing to drop


class Residency:
    """Copies, pins and candidates for eviction. Not thread-safe: only the pager's thread calls it.

    Args:
        index: the pages that are known.
        device, host: the arenas; a host arena of 0 slots is a tier that is off.
        store_slots: pages the store can hold; 0 without a store.
        journal: told what happens to pages.
    """

    def __init__(
        self, index: PrefixIndex, device: Arena, host: Arena, store_slots: int, journal: Journal,
        stored_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.index = index
        self.journal = journal
        self.device = device
        self.host = host
        self.store_slots = store_slots
        self.stored_bytes = device.record_bytes if stored_bytes is None else stored_bytes  # of a page in the store
        self.cost = RecomputeCost()  # the engine puts measured rates here
        self.touched: set[Node] | None = None  # pages whose books changed, while somebody looks; None: nobody does
        self.version = 0  # grows when a page under a lease begins or ceases to lie in memory
        self.leased: dict[PageKey, Node] = {}  # pages on the device under leases, the longest there first
        self.durable_pages = 0
        self.durable_pinned = 0
        self.dropped_rows: dict[PageKey, None] = {}  # rows of the store to delete; in order, each once
        self.dirty: OrderedDict[PageKey, Node] = OrderedDict()  # pages to write to the store; the oldest first
        self.evictions = [0, 0, 0]  # copies dropped to make room, by tier
        self.heaps = [
            VictimHeap[Node](1 << tier, partial(self.evictable, tier=tier), partial(self.value, tier)) for tier in Tier
        ]

    def place(self, node: Node, tier: Tier, slot: int) -> None:
        """Publishes a complete copy. An arena slot passes from the caller's ownership to the node's."""
        if node.is_in(tier):
            raise AssertionError(f"{node} has a copy in {tier.name} already")
        self.touch(node)
        state = SlotState.PINNED if node.pins else SlotState.IDLE
        if tier is Tier.DEVICE:
            node.device = slot
            self.device.set_state(slot, state)
            if node.pins:
                self.leased[node.key] = node
        elif tier is Tier.HOST:
            node.host = slot
            self.host.set_state(slot, state)
        else:
            node.durable = True
            self.durable_pages += 1
            self.durable_pinned += node.pins > 0
        self.version += node.pins > 0
        parent = self.index.get(node.parent)
        if parent is not None:
            parent.kids[tier] += 1
        self.offer(node)

    def load(self, nodes: Sequence[Node]) -> None:
        """Makes pages known that only the store has, in any order."""
        for node in nodes:
            node.durable = True
            self.index.add(node)
        self.index.settle_depths()
        self.durable_pages += len(nodes)
        for node in nodes:
            self.heaps[Tier.NVME].offer(node)

    def take(self, node: Node, tier: Tier) -> None:
        """Books a copy out. The slot is free now, or when its last reader is done. A row is left to `dropped_rows`."""
        self.touch(node)
        if tier is Tier.DEVICE:
            slot, node.device = node.device, NOWHERE
            self.device.drop(slot)
            self.leased.pop(node.key, None)
        elif tier is Tier.HOST:
            slot, node.host = node.host, NOWHERE
            self.host.drop(slot)
        else:
            node.durable = False
            self.durable_pages -= 1
            self.durable_pinned -= node.pins > 0
        self.version += node.pins > 0
        parent = self.index.get(node.parent)
        if parent is not None:
            parent.kids[tier] -= 1
            if not parent.kids[tier]:
                self.heaps[tier].offer(parent)
        if node.alive:
            self.offer(node)

    def drop_row(self, node: Node) -> None:
        """Books the durable copy out and has its row deleted. From here on no look-up finds it there."""
        self.take(node, Tier.NVME)
        self.dropped_rows[node.key] = None

    def touch(self, node: Node) -> None:
        """Notes that what the books say of the page has changed."""
        if self.touched is not None:
            self.touched.add(node)

    def move(self, node: Node, change: int) -> None:
        """A copy in flight from or to the page more (1) or less (-1)."""
        node.moves += change
        self.touch(node)

    def pin(self, node: Node) -> None:
        """One more lease needs the page."""
        self.touch(node)
        node.pins += 1
        if node.pins == 1:
            if node.device >= 0:
                self.device.set_state(node.device, SlotState.PINNED)
                self.leased[node.key] = node
            if node.host >= 0:
                self.host.set_state(node.host, SlotState.PINNED)
            self.durable_pinned += node.durable

    def unpin(self, node: Node) -> None:
        """One lease less. The last one makes it cache."""
        self.touch(node)
        node.pins -= 1
        if node.pins:
            return
        if node.device >= 0:
            self.device.set_state(node.device, SlotState.IDLE)
            self.leased.pop(node.key, None)
        if node.host >= 0:
            self.host.set_state(node.host, SlotState.IDLE)
        self.durable_pinned -= node.durable
        self.settle(node)

    def settle(self, node: Node) -> None:
        """After something ended for the page: forgets it, or makes it a candidate for eviction.

        A page without a copy stays known as long as a lease needs it, which will compute it again. A partial page goes
        when a longer one says the same and nobody uses it, or wants it kept.
        """
        self.touch(node)
        if not node.alive or node.moves or node.leaving is not Leaving.NO:
            return
        if not node.has_copy:
            if not node.pins:
                self._remove(node)
        elif not node.pins and not node.kept and self._is_superseded(node):
            self.forget(node)
        else:
            self.offer(node)

    def forget(self, node: Node) -> None:
        """Drops every copy and the page itself. It must be idle: no lease, nothing in flight."""
        if not self.is_idle(node):
            raise AssertionError(f"{node} is in use and can't be forgotten")
        if node.device >= 0:
            self.take(node, Tier.DEVICE)
        if node.host >= 0:
            self.take(node, Tier.HOST)
        if node.durable:
            self.drop_row(node)
        self._remove(node)

    def start_leaving(self, node: Node, how: Leaving) -> None:
        """The device copy is about to go. The page before it may follow at once, so that a chain leaves together."""
        node.leaving = how
        parent = self.index.get(node.parent)
        if parent is not None:
            parent.kids[Tier.DEVICE] -= 1
            self.heaps[Tier.DEVICE].offer(parent)

    def stop_leaving(self, node: Node) -> None:
        """What the device copy waited for is over: now it goes, or stays."""
        node.leaving = Leaving.NO
        parent = self.index.get(node.parent)
        if parent is not None:
            parent.kids[Tier.DEVICE] += 1

    def offer(self, node: Node) -> None:
        """Makes the page a candidate in every tier where it may be evicted."""
        for heap in self.heaps:
            heap.offer(node)

    def victim(self, tier: Tier) -> Node | None:
        """The least valuable page that may leave the tier; to be offered again if it does not."""
        return self.heaps[tier].pop()

    def evict(self, node: Node, tier: Tier) -> None:
        """Drops the copy to make room, and the page itself if that was the last one."""
        self.evictions[tier] += 1
        slot = node.device if tier is Tier.DEVICE else node.host if tier is Tier.HOST else NOWHERE
        self.journal.page(What.SPILL if node.pins else What.EVICT, node, tier, slot)
        if tier is Tier.NVME:
            self.drop_row(node)
        else:
            self.take(node, tier)
        self.settle(node)

    def is_idle(self, node: Node) -> bool:
        """Whether no lease needs the page and nothing is in flight from or to it."""
        return not node.pins and not node.moves and node.leaving is Leaving.NO

    def evictable(self, node: Node, tier: Tier) -> bool:
        """Whether the copy may go now: idle, nothing in flight, and no child in this tier (tails before heads).

        A copy in CPU memory of a page on the device may always go, and the last copy of a page that is kept never.
        """
        if not node.alive or not node.is_in(tier) or node.moves or node.leaving is not Leaving.NO:
            return False
        if tier is Tier.HOST and node.device >= 0:
            return True
        if node.pins or node.kids[tier]:
            return False
        return not node.kept or self._is_safe_without(node, tier)

    def spillable(self, node: Node) -> bool:
        """Whether the device copy of a page under a lease may begin to leave."""
        return node.alive and node.device >= 0 and not node.moves and node.leaving is Leaving.NO

    def droppable(self, node: Node) -> bool:
        """Whether the device copy may go at once although a lease needs the page: it can be read from below."""
        return self.spillable(node) and (node.host >= 0 or node.durable)

    def _is_safe_without(self, node: Node, tier: Tier) -> bool:
        """Whether a page that is kept has, or gets, another copy when this one goes."""
        if tier is Tier.DEVICE:
            return bool(node.host >= 0 or node.durable or self.host.slots or self.store_slots)
        if tier is Tier.HOST:
            return node.durable
        return node.readable

    def _remove(self, node: Node) -> None:
        self.dirty.pop(node.key, None)
        self.index.remove(node)

    def value(self, tier: Tier, node: Node, deeper: int = 0) -> float:
        """What the copy is worth there, for the order of eviction; that of a page `deeper` pages on in the sequence."""
        if tier is Tier.HOST and node.device >= 0:
            return _DUPLICATE + node.last_use_s
        tokens = node.num_tokens
        position = (node.depth + deeper) * self.index.page_bytes // TOKEN_BYTES
        return rank(node.last_use_s, node.hits, tokens, position, self.device.record_bytes, self.cost)

    def _is_superseded(self, node: Node) -> bool:
        is_partial = len(node.packed) < self.index.page_bytes
        return is_partial and self.index.is_dominated(node.parent, node.packed)
