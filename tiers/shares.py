"""How much of the cache each tenant may keep: a bound on the known pages under a tenant's roots, in all tiers together.

A page counts from the moment it is known. While a request runs its pages stay, whatever their number: they are bounded
by the memory, and by how many requests a tenant may have. What is over the bound is forgotten as soon as no lease needs
it: pages that were used the longest ago first, and of one sequence the last ones first. Pages that the user pinned
count, and stay.

Which roots are a tenant's is kept in a file beside the store: its requests may have had salts that never come back.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from tierd.tiers import roots_file
from tierd.tiers.lease import Lease
from tierd.tiers.page import PageKey
from tierd.tiers.prefix import Node
from tierd.tiers.residency import Residency

MAX_ROOTS = 1024  # of a tenant that are remembered as looked through
MAX_OWNED = 65_536  # roots of all tenants whose owner is remembered: 9 MB of file


class Share:
    """The pages of one tenant. `quota_pages`: how many they may be."""

    __slots__ = ("arriving", "nodes", "quota_pages", "roots", "stuck")

    def __init__(self, quota_pages: int) -> None:
        self.quota_pages = quota_pages
        self.nodes: dict[PageKey, Node] = {}  # those that may go first come first
        self.roots: dict[PageKey, None] = {}  # below these every page is in `nodes`
        self.stuck = False  # over the bound, and a walk over all pages has found none that may go
        self.arriving: dict[PageKey, Node] = {}  # pages that would have gone, were no copy from or to them in flight

    def take(self, node: Node) -> None:
        """Counts the page, and has it go last of all."""
        self.nodes.pop(node.key, None)
        self.nodes[node.key] = node
        node.share = self

    def lose(self, node: Node) -> None:
        """The page is not known any more."""
        self.nodes.pop(node.key, None)
        node.share = None


class Shares:
    """Not thread-safe: only the pager's thread calls it. Tenants without a bound cost nothing.

    Args:
        residency: where pages are booked.
        leases: the live ones; their roots are not forgotten.
    """

    def __init__(self, residency: Residency, leases: Collection[Lease] = ()) -> None:
        self.forgotten = 0  # pages that went because of a bound
        self._residency = residency
        self._leases = leases
        self._shares: dict[bytes, Share] = {}
        self._owners: dict[PageKey, bytes] = {}  # of roots, tenants with a bound only; the last used last, see `_note`
        self._file: Path | None = None

    def remember(self, file: Path) -> None:
        """Reads whose pages of the store are whose, and notes there from now on what is new."""
        self._file = file
        self._owners = roots_file.read(file, MAX_OWNED) | self._owners
        self._forget_roots(MAX_OWNED)

    def of(self, tenant: bytes, quota_pages: int, root: PageKey) -> Share | None:
        """The share of a tenant who asks for pages below `root`; None without a bound.

        Pages that are there from before (an engine finds those of the store at its start) are counted now.
        """
        if quota_pages <= 0:
            if (share := self._shares.pop(tenant, None)) is not None:
                share.quota_pages = sys.maxsize  # leases that began before may still hold it
                for node in list(share.nodes.values()):
                    share.lose(node)
            return None
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = Share(quota_pages)
            for owned in [known for known, owner in self._owners.items() if owner == tenant]:
                self._count(share, owned)
        share.quota_pages = quota_pages
        if root not in share.roots:
            self._count(share, root)
        self._note(tenant, root)
        return share

    def _count(self, share: Share, root: PageKey) -> None:
        """Counts the pages below a root that are there already."""
        self._adopt(share, root)
        while len(share.roots) >= MAX_ROOTS:
            del share.roots[next(iter(share.roots))]
        share.roots[root] = None

    def _note(self, tenant: bytes, root: PageKey) -> None:
        # A root that is known moves here, and not in the file: that would be a line for each request. After a restart
        # the order is that in which roots were noted, or had when the file was last written anew.
        known = self._owners.pop(root, None) is not None
        if len(self._owners) >= MAX_OWNED:
            self._forget_roots(MAX_OWNED // 2)  # not one at a time: it takes a look at all
        self._owners[root] = tenant
        if self._file is not None and not known:
            roots_file.append(self._file, root, tenant)

    def _forget_roots(self, most: int) -> None:
        """Those that nobody uses and that have no page go; should more than `most` be left, those used the longest ago
        as well."""
        children, in_use = self._residency.index.children, {lease.root for lease in self._leases}
        owners = {root: owner for root, owner in self._owners.items() if root in in_use or children(root)}
        spare = max(len(owners) - most, 0)
        for root in itertools.islice([root for root in owners if root not in in_use], spare):
            del owners[root]
        if self._file is not None and len(owners) < len(self._owners):
            roots_file.write(self._file, owners)
        self._owners = owners

    def used(self, share: Share | None, nodes: Sequence[Node]) -> None:
        """A lease on these pages, in the order of their tokens, has begun or has ended."""
        if share is not None:
            for node in reversed(nodes):
                if node.alive:
                    share.take(node)

    def trim(self, share: Share | None) -> int:
        """Forgets what is over the bound and idle; how many pages went."""
        if share is None:
            return 0
        share.arriving, share.stuck = {}, False
        if len(share.nodes) <= share.quota_pages:
            return 0
        # In this order a page comes after those that follow it, so one walk takes a sequence from its end.
        gone = self._take(share, list(share.nodes.values()))
        share.stuck = len(share.nodes) > share.quota_pages
        return gone

    def settle(self) -> bool:
        """Goes on with what `trim` could not do, when copies in flight have arrived. True if pages went.

        It looks at those pages, and at those before them. What leases and pins hold waits for the end of a lease: until
        then a walk over all pages of a tenant, in every turn of the loop, would find nothing again.
        """
        gone = 0
        for share in self._shares.values():
            if not share.stuck or len(share.nodes) <= share.quota_pages:
                gone += self.trim(share)  # it may have grown
                continue
            arriving, share.arriving = share.arriving, {}
            for node in arriving.values():
                known: Node | None = node
                while known is not None and (not known.alive or self._take(share, [known])):
                    gone += 1
                    known = self._residency.index.get(known.parent)
                    if known is not None and known.share is not share:
                        break
        return gone > 0

    def _take(self, share: Share, nodes: Sequence[Node]) -> int:
        """Forgets those of some pages that may go, in this order, until the bound is kept; how many went."""
        index, residency, gone = self._residency.index, self._residency, 0
        for node in nodes:
            if len(share.nodes) <= share.quota_pages:
                break
            if node.kept or node.pins or not node.alive:
                continue
            if not residency.is_idle(node):
                share.arriving[node.key] = node
            elif not index.children(node.key):
                residency.forget(node)
                gone += 1
        self.forgotten += gone
        return gone

    def _adopt(self, share: Share, root: PageKey) -> None:
        found: list[Node] = []
        stack = [root]
        while stack:
            for child in self._residency.index.children(stack.pop()):
                found.append(child)
                stack.append(child.key)
        for node in sorted(found, key=lambda node: (node.last_use_s, -node.depth)):
            share.take(node)
