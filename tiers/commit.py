"""What a lease writes, and what becomes of it: slots to write to, keys for full pages, partial ones that are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from tierd.tiers.arena import SlotState
from tierd.tiers.gpu import Row
from tierd.tiers.keys import pack_tokens, page_key
from tierd.tiers.lease import Lease
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.prefix import Node
from tierd.tiers.promote import Promoter
from tierd.tiers.residency import Residency
from tierd.tiers.writeback import Writeback

THINNED_PAGES = 16  # copied at once: they take some milliseconds


class Committer:
    """Not thread-safe: only the pager's thread calls it. `page_time` is now on the scale of `Node.last_use_s`; `copy`
    is `Mover.copy_now`."""

    def __init__(
        self, residency: Residency, writeback: Writeback, promoter: Promoter, page_time: Callable[[], float],
        copy: Callable[[Row, Row], None],
    ) -> None:  # fmt: skip
        self.collisions = 0  # keys that named other tokens than ours
        self._residency = residency
        self._writeback = writeback
        self._promoter = promoter
        self._page_time = page_time
        self._copy = copy

    def commit(self, lease: Lease, tokens: Sequence[int]) -> None:
        """See `Pager.commit`."""
        size = lease.page_tokens
        for place in [place for place in lease.filling if (place + 1) * size <= len(tokens)]:
            self._fill(lease, place, pack_tokens(tokens[place * size : (place + 1) * size]))
        while not lease.unkeyed and lease.private and (len(lease.nodes) + 1) * size <= len(tokens):
            start = len(lease.nodes) * size
            if not self._name(lease, pack_tokens(tokens[start : start + size])):
                lease.unkeyed = True
                self.collisions += 1
        lease.reached = max(lease.reached, len(tokens))

    def adopt(self, lease: Lease, tokens: Sequence[int], use: Callable[[Node], None]) -> int:
        """See `Pager.adopt`. `use` pins a page for the lease."""
        size, before = lease.page_tokens, len(lease.nodes)
        while (len(lease.nodes) + 1) * size < len(tokens):
            start = len(lease.nodes) * size
            packed = pack_tokens(tokens[start : start + size])
            parent = lease.nodes[-1].key if lease.nodes else lease.root
            node = self._residency.index.get(page_key(parent, packed))
            if node is None or not node.readable or node.packed != packed or node.parent != parent:
                break
            use(node)
            lease.origins += [None] * (len(lease.nodes) - len(lease.origins))
            lease.origins.append(node.nearest)
            lease.nodes.append(node)
            if lease.private:
                self._residency.device.drop(lease.private.pop(0))
            lease.tail_tokens = 0  # what was copied of this page, or of none
            lease.changes += 1
        lease.reached = max(lease.reached, len(lease.nodes) * size)
        return len(lease.nodes) - before

    def give_slot(self, lease: Lease, page: int) -> None:
        """Gives the lease a free device slot, which there must be, to write a page to."""
        slot = self._residency.device.alloc(SlotState.PRIVATE)
        if slot is None:
            raise AssertionError("a slot that was free is not")
        if page >= len(lease.nodes):
            lease.private.append(slot)
            return
        node = lease.nodes[page]
        node.computer = lease
        self._promoter.loader.cancel(node)
        lease.filling[page] = slot

    def abandon(self, lease: Lease) -> None:
        """Gives back the slots of known pages that were being computed again: an older one has to come first."""
        for place, slot in lease.filling.items():
            lease.nodes[place].computer = None
            self._residency.device.drop(slot)
        lease.filling.clear()
        lease.changes += 1

    def shorten(self, lease: Lease) -> None:
        """Gives back the pages that have no key yet: they stand in the way of older ones. Their tokens are lost."""
        for slot in lease.private:
            self._residency.device.drop(slot)
        lease.private.clear()
        lease.tail_tokens = 0
        lease.reached = len(lease.nodes) * lease.page_tokens
        lease.changes += 1

    def let_go(self, lease: Lease, kept: int, seen: int) -> None:
        """Gives back the pages after the first `kept` ones and before page `seen`, which no later row sees.

        Known ones go together, once no row sees any of them: idle, a page could not leave while those after it are in
        use. What follows stays private from here on.
        """
        if len(lease.nodes) > kept:
            if seen < len(lease.nodes) or lease.absent or lease.tail is not None:
                return
            now_s = self._page_time()
            for node in lease.nodes[kept:]:
                node.last_use_s = now_s  # a page is never older than the pages after it
                self.keep(node)
            for node in reversed(lease.nodes[kept:]):
                self._residency.unpin(node)
            lease.dropped += len(lease.nodes) - kept
            del lease.nodes[kept:]
            lease.unkeyed = True
            lease.changes += 1
        while len(lease.nodes) == kept and lease.private and kept + lease.dropped < seen:
            self._residency.device.drop(lease.private.pop(0))
            lease.dropped += 1
            lease.unkeyed = True
            lease.changes += 1

    def thin(self, lease: Lease, kept: Set[int], most: int = THINNED_PAGES) -> int:
        """Gives back pages of a sequence, whose rows see none from here on but the `kept` ones, by number.
        Returns how many slots it waits for.

        Private ones go at once. Known ones go from the last on, since idle, a page could not leave while those after
        it are in use; where one of them is kept, a private page takes its place: a copy, as soon as it is in memory and
        there is a slot, but half of the device is left to others, and `most` of them at a time. The first page stays
        as it is. What follows stays private from here on.
        """
        if lease.absent or lease.tail is not None:
            return 0
        numbers, device, host = lease.numbers, self._residency.device, self._residency.host
        lease.kept = kept
        if any(number not in kept for number in numbers):
            pages = list(zip(numbers, lease.private, strict=True))
            for number, slot in pages:
                if number not in kept:
                    device.drop(slot)
            left = [(number, slot) for number, slot in pages if number in kept]
            lease.dropped += len(pages) - len(left)
            lease.sparse, lease.private = [number for number, _ in left], [slot for _, slot in left]
            lease.unkeyed = True
            lease.changes += 1
        copies = 0
        while len(lease.nodes) > 1:
            number, node = len(lease.nodes) - 1, lease.nodes[-1]
            if number in kept:
                if not node.readable or copies == most or 2 * device.counts[SlotState.PRIVATE] >= device.slots:
                    return 0
                copy = device.alloc(SlotState.PRIVATE)
                if copy is None:
                    return most - copies
                self._copy(device.row(copy), device.row(node.device) if node.device >= 0 else host.row(node.host))
                lease.sparse, lease.private = [number, *lease.numbers], [copy, *lease.private]
                copies += 1
            else:
                lease.sparse = lease.numbers
                lease.dropped += 1
            lease.unkeyed = True
            lease.changes += 1
            node.last_use_s = self._page_time()  # a page is never older than the pages after it
            self.keep(node)
            del lease.nodes[-1]
            self._residency.unpin(node)
        return 0

    def keep_tail(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Keeps the partial page of an ending lease as cache, unless a known page says the same."""
        rest = pack_tokens(tokens[len(lease.nodes) * lease.page_tokens :][: lease.page_tokens])
        if not rest or not lease.private or lease.unkeyed or lease.absent:
            return
        parent = lease.nodes[-1].key if lease.nodes else lease.root
        if self._residency.index.is_dominated(parent, rest):
            return
        slot = lease.private[0]
        node = self._know(parent, rest, slot)
        if node is not None and node.device == slot:
            del lease.private[0]
            if lease.share is not None:
                lease.share.take(node)
            for other in self._residency.index.dominated_by(node):
                self._residency.settle(other)

    def keep(self, node: Node) -> None:
        """Queues a page for write-behind, if it is not durable."""
        if not node.durable:
            self._writeback.add(node)

    def _name(self, lease: Lease, packed: bytes) -> bool:
        """Gives the first private page its key; False if the key stands for other tokens."""
        parent = lease.nodes[-1].key if lease.nodes else lease.root
        slot = lease.private[0]
        node = self._know(parent, packed, slot)
        if node is None:
            return False
        self._residency.pin(node)
        if lease.share is not None:
            lease.share.take(node)
        if node.device != slot:
            self._residency.device.drop(slot)
        del lease.private[0]
        lease.nodes.append(node)
        lease.changes += 1
        for other in self._residency.index.dominated_by(node):
            self._residency.settle(other)
        return True

    def _fill(self, lease: Lease, place: int, packed: bytes) -> None:
        """A known page was computed again: its slot becomes the copy, unless another one came meanwhile."""
        node, slot = lease.nodes[place], lease.filling.pop(place)
        node.computer = None
        if node.packed != packed:
            raise AssertionError(f"{node} was computed from other tokens")
        if node.readable:
            self._residency.device.drop(slot)
        else:
            self._residency.place(node, Tier.DEVICE, slot)
            self.keep(node)
        lease.absent.discard(place)
        if place < len(lease.origins):
            lease.origins[place] = None
        lease.changes += 1

    def _know(self, parent: PageKey, packed: bytes, slot: int) -> Node | None:
        """The node of this page, in memory: a new one or a known one, with `slot` if memory had no copy."""
        key = page_key(parent, packed)
        node = self._residency.index.get(key)
        if node is None:
            node = Node(key, parent, packed)
            self._residency.index.add(node)
        elif node.packed != packed or node.parent != parent:
            return None
        node.last_use_s = self._page_time()
        if not node.readable:
            self._residency.place(node, Tier.DEVICE, slot)
        self.keep(node)
        return node
