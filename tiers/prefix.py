"""The prefix index: which pages are known, how they follow each other, and where their copies lie.

Pure bookkeeping: no bytes, no clock, no threads. Only `residency.py` changes where a node's copies lie.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from tierd.tiers.keys import TOKEN_BYTES, common_tokens, page_key
from tierd.tiers.page import PageKey, Tier

if TYPE_CHECKING:
    from tierd.tiers.lease import Lease, Load
    from tierd.tiers.shares import Share

# A popular prefix can have thousands of continuations. The newest of them are looked at for a partial match; beyond
# that a scan (0.1 us each) would cost more than it finds.
MAX_SIBLINGS_SCANNED = 256

NOWHERE = -1


class Leaving(enum.Enum):
    """What a device copy waits for before it goes."""

    NO = enum.auto()
    COPY = enum.auto()  # a copy to the host is in flight
    WRITE = enum.auto()  # it is (or will be) in a group written to the store


class Node:
    """One known page.

    Attributes:
        key, parent: its name, and that of the page before it (or of the root).
        packed: its tokens (`keys.pack_tokens`): those of a full page, or fewer (a partial tail, without children).
        depth: pages before it; 0 for the first, and for pages whose parent is not known.
        device, host: slot of the copy there, or NOWHERE.
        durable: whether the store holds a copy.
        pins: leases that need it. While there is one, the last copy that they can read stays.
        moves: copies in flight from or to it. While there is one, no copy is evicted.
        load: the copy in flight from the store to memory, shared by all who wait for it.
        computer: the lease that is computing it once more, because it was lost or comes later than that.
        kept: the user wants it kept: its last copy is not evicted.
        leaving: whether, and in which way, its device copy is about to go.
        writing: a write to the store is in flight.
        kids: known children that stay in each tier (by `Tier`). A page with such children is not evicted from there.
        last_use_s, hits: for the policy.
        share: what it counts for, when its tenant has a bound.
        queued: bits of the victim heaps that hold it.
        alive: it is in the index. A lease may still hold a node that is not.
    """

    __slots__ = (
        "alive", "computer", "depth", "device", "durable", "hits", "host", "kept", "key", "kids", "last_use_s",
        "leaving", "load", "moves", "packed", "parent", "pins", "queued", "share", "writing",
    )  # fmt: skip

    def __init__(self, key: PageKey, parent: PageKey, packed: bytes, depth: int = 0) -> None:
        self.key = key
        self.parent = parent
        self.packed = packed
        self.depth = depth
        self.device = NOWHERE
        self.host = NOWHERE
        self.durable = False
        self.pins = 0
        self.moves = 0
        self.load: Load | None = None
        self.computer: Lease | None = None
        self.kept = False
        self.leaving = Leaving.NO
        self.writing = False
        self.kids = [0, 0, 0]
        self.last_use_s = 0.0
        self.hits = 0
        self.share: Share | None = None
        self.queued = 0
        self.alive = False

    def __repr__(self) -> str:
        where = f"device={self.device} host={self.host} durable={self.durable}"
        return f"<Node {self.key.hex()[:8]}: {self.num_tokens} tokens, {where}, pins={self.pins}>"

    @property
    def num_tokens(self) -> int:
        """Tokens in the page."""
        return len(self.packed) // TOKEN_BYTES

    @property
    def has_copy(self) -> bool:
        """Whether any tier holds it."""
        return self.device >= 0 or self.host >= 0 or self.durable

    @property
    def readable(self) -> bool:
        """Whether a copy lies in memory, where attention reads it in place."""
        return self.device >= 0 or self.host >= 0

    def is_in(self, tier: Tier) -> bool:
        """Whether this tier holds a copy."""
        if tier is Tier.DEVICE:
            return self.device >= 0
        return self.host >= 0 if tier is Tier.HOST else self.durable

    def tiers(self) -> list[Tier]:
        """Where it has copies that are not on their way out."""
        found = [Tier.DEVICE] if self.device >= 0 and self.leaving is Leaving.NO else []
        if self.host >= 0:
            found.append(Tier.HOST)
        if self.durable:
            found.append(Tier.NVME)
        return found

    @property
    def nearest(self) -> Tier:
        """The best tier that holds it. Asked only of nodes that have a copy."""
        if self.device >= 0:
            return Tier.DEVICE
        return Tier.HOST if self.host >= 0 else Tier.NVME


class PrefixIndex:
    """Known pages by key and by parent.

    A page is found only through the pages before it, and only if its parent and its tokens are those asked for: a
    collision of keys is a miss, not wrong bytes. A page whose parent is gone is unreachable until the parent is known
    again.
    """

    def __init__(self, page_tokens: int) -> None:
        self.page_bytes = page_tokens * TOKEN_BYTES  # of a full page's packed tokens
        self.nodes: dict[PageKey, Node] = {}
        # A chain has one child per page, so the single child stands without a dictionary around it (230 bytes each).
        self._children: dict[PageKey, Node | dict[PageKey, Node]] = {}
        self.gaps: set[PageKey] = set()  # removed pages that still have children

    def __len__(self) -> int:
        return len(self.nodes)

    def get(self, key: PageKey) -> Node | None:
        """The node with this key, whatever it holds."""
        return self.nodes.get(key)

    def children(self, parent: PageKey) -> Collection[Node]:
        """Known pages right after `parent`, oldest first."""
        found = self._children.get(parent)
        if found is None:
            return ()
        return (found,) if isinstance(found, Node) else found.values()

    def first_pages(self) -> list[Node]:
        """Known pages that begin a sequence; those after a gap do not."""
        roots = self._children.keys() - self.nodes.keys() - self.gaps
        return [node for root in sorted(roots) for node in self.children(root)]

    def add(self, node: Node) -> None:
        """Makes a page known, with or without copies. Its key must not be in the index."""
        if node.key in self.nodes:
            raise AssertionError(f"{node} is known already")
        self.nodes[node.key] = node
        node.alive = True
        siblings = self._children.get(node.parent)
        if siblings is None:
            self._children[node.parent] = node
        elif isinstance(siblings, Node):
            self._children[node.parent] = {siblings.key: siblings, node.key: node}
        else:
            siblings[node.key] = node
        parent = self.nodes.get(node.parent)
        if parent is not None:
            node.depth = parent.depth + 1
            for tier in node.tiers():
                parent.kids[tier] += 1
        if node.key in self._children:  # it was a gap, or its children came first
            self.gaps.discard(node.key)
            for child in self.children(node.key):
                for tier in child.tiers():
                    node.kids[tier] += 1

    def remove(self, node: Node) -> None:
        """Forgets a page that has no copy any more. Its children stay, unreachable until it is known again."""
        if node.has_copy or self.nodes.get(node.key) is not node:
            raise AssertionError(f"{node} can't be forgotten")
        del self.nodes[node.key]
        node.alive = False
        if node.share is not None:
            node.share.lose(node)
        siblings = self._children[node.parent]
        if isinstance(siblings, Node):
            del self._children[node.parent]
            self.gaps.discard(node.parent)
        else:
            del siblings[node.key]
            if len(siblings) == 1:
                self._children[node.parent] = next(iter(siblings.values()))
        if node.key in self._children:
            self.gaps.add(node.key)

    def match(self, root: PageKey, packed: bytes) -> tuple[list[Node], Node | None, int]:
        """The longest known run at the start of `packed`.

        Returns the full pages in order, then a page that shares its first n tokens with what follows them, and n
        (None and 0 if there is none). Only pages with a copy count.
        """
        found: list[Node] = []
        parent, nodes, size = root, self.nodes, self.page_bytes
        position = 0
        while position + size <= len(packed):
            chunk = packed[position : position + size]
            key = page_key(parent, chunk)
            node = nodes.get(key)
            if node is None or node.packed != chunk or node.parent != parent or not node.has_copy:
                break
            found.append(node)
            parent = key
            position += size
        source, shared = self._closest(parent, packed[position : position + size])
        return found, source, shared

    def _closest(self, parent: PageKey, wanted: bytes) -> tuple[Node | None, int]:
        best: Node | None = None
        longest = 0
        head = wanted[:TOKEN_BYTES]
        if not head:
            return None, 0
        for node in self.newest_children(parent):
            if node.packed.startswith(head) and node.has_copy:
                shared = common_tokens(node.packed, wanted)
                nearer = best is not None and shared == longest and node.nearest < best.nearest
                if shared > longest or nearer:
                    best, longest = node, shared
        return best, longest

    def newest_children(self, parent: PageKey) -> Iterator[Node]:
        """The newest children first, at most `MAX_SIBLINGS_SCANNED`."""
        found = self._children.get(parent)
        if found is None:
            return iter(())
        if isinstance(found, Node):
            return iter((found,))
        return itertools.islice(reversed(found.values()), MAX_SIBLINGS_SCANNED)

    def is_dominated(self, parent: PageKey, packed: bytes) -> bool:
        """Whether a longer known page under the same parent starts with these tokens."""
        return any(
            len(node.packed) > len(packed) and node.packed.startswith(packed) and node.has_copy
            for node in self.newest_children(parent)
        )

    def dominated_by(self, node: Node) -> list[Node]:
        """Partial pages under the same parent that `node` begins with."""
        return [
            other
            for other in self.newest_children(node.parent)
            if len(other.packed) < len(node.packed) and node.packed.startswith(other.packed)
        ]

    def unreachable(self) -> list[Node]:
        """Pages below a gap, found by walking down from the gaps. Pages below a salted root are reachable."""
        found: list[Node] = []
        stack = list(self.gaps)
        while stack:
            for child in self.children(stack.pop()):
                found.append(child)
                stack.append(child.key)
        return found

    def settle_depths(self) -> None:
        """Recomputes every depth from the top: for a start, where children may come before their parents."""
        stack = [node for node in self.nodes.values() if node.parent not in self.nodes]
        for node in stack:
            node.depth = 0
        while stack:
            node = stack.pop()
            for child in self.children(node.key):
                child.depth = node.depth + 1
                stack.append(child)
