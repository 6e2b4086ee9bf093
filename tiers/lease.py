"""A lease: the pages one sequence uses, pinned for as long as it lives.

The pages of a lease follow each other: known ones (`nodes`), then private ones that the sequence is writing; between
and among these those are missing that a sequence with a bounded memory mode has `dropped`. A known page is *readable*
when a copy lies in memory. One that is not is either *absent*, on its way or to be computed again, or *streamed*: read
from the store layer by layer in every step, because there is no room for it in memory.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tierd.tiers.mover import Job
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.prefix import NOWHERE, Node

if TYPE_CHECKING:
    from tierd.tiers.shares import Share

Addresses = npt.NDArray[np.int64]

END = 1 << 62  # beyond every position


class LeaseState(enum.Enum):
    """Life of a lease. MATCHED -> LIVE -> ENDED; with nothing to fetch: LIVE at once."""

    MATCHED = enum.auto()
    LIVE = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True, eq=False)
class Load:
    """A page on its way from the store to a slot of an arena, for all leases that wait for it.

    Attributes:
        tier, slot: where to; the slot belongs to the load.
        job: what reads it, once it was sent off.
        pages: all that this job reads.
    """

    tier: Tier
    slot: int
    job: Job | None = None
    pages: Sequence[Node] = ()


@dataclass(slots=True, eq=False)
class TailCopy:
    """The first tokens of a known page, on their way into a private page (copy on write).

    Attributes:
        source: the page copied from, pinned meanwhile; None when it is a private page of another lease.
        slot: the private page, owned by this copy until it has arrived; NOWHERE before there is one.
        started: the copy is in flight.
        cancelled: nobody wants it any more; its completion only gives back what the copy held.
    """

    source: Node | None
    slot: int = NOWHERE
    started: bool = False
    cancelled: bool = False


class Lease:
    """Pages of one sequence.

    The engine reads the public attributes; `Pager` and what it is made of alone change them.

    Attributes:
        nodes: known pages. Those found come first, then those that the sequence computed and committed.
        origins: where each page that was found lay then; None for one that had to be computed after all.
        private: device slots of pages without a key, after the nodes.
        filling: device slots of known pages that are being computed again, by place.
        absent: places of known pages that can't be read yet.
        reached: tokens that were found or computed, without regard to absent pages before them.
        tail: a partial page in flight or not started; once arrived it is the first private page.
        tail_of: the known page whose first tokens the tail is.
        share: what its pages count for, when its tenant has a bound.
        unkeyed: a key collided: the rest of this sequence stays private.
        lost: something that was found did not arrive.
        next_load: places above this one are loaded, on their way or given up.
        loading: whether absent pages may be loaded.
        deadline_s: when loading is given up.
        unseen: so many first pages no row sees: they may be in memory or not.
        dropped: pages after the known ones that were given back: no later row of the sequence sees them.
        sparse: which pages of the sequence its first private ones are, where not all that follow each other; those
            after them do, up to the newest.
        kept: which pages of the sequence rows see, where it is being thinned; None: no matter.
        changes: grows when slots of private or filling pages change.
        table: addresses of all pages, as of `table_version`; 0 for those that no memory holds.
        streamed: how many of those are read from the store.
    """

    __slots__ = (
        "__weakref__", "absent", "changes", "deadline_s", "dropped", "filling", "kept", "loading", "lost", "next_load",
        "nodes", "origins", "page_tokens", "private", "reached", "root", "share", "sparse", "state", "streamed",
        "table", "table_version", "tail", "tail_of", "tail_origin", "tail_tokens", "unkeyed", "unseen",
    )  # fmt: skip

    def __init__(self, root: PageKey, page_tokens: int) -> None:
        self.root = root
        self.share: Share | None = None
        self.page_tokens = page_tokens
        self.state = LeaseState.MATCHED
        self.nodes: list[Node] = []
        self.origins: list[Tier | None] = []
        self.private: list[int] = []
        self.filling: dict[int, int] = {}
        self.absent: set[int] = set()
        self.reached = 0
        self.tail: TailCopy | None = None
        self.tail_tokens = 0
        self.tail_of: Node | None = None
        self.tail_origin = Tier.DEVICE
        self.unkeyed = False
        self.lost = False
        self.next_load = NOWHERE
        self.loading = True
        self.deadline_s = 0.0
        self.unseen = 0
        self.dropped = 0
        self.sparse: list[int] = []
        self.kept: Set[int] | None = None
        self.changes = 0
        self.table: Addresses = np.empty(0, np.int64)
        self.table_version = (-1, -1)
        self.streamed = 0

    def __repr__(self) -> str:
        return f"<Lease {self.state.name}: {self.num_tokens} tokens, {len(self.nodes)}+{len(self.private)} pages>"

    @property
    def ready(self) -> bool:
        """Whether nothing that was found is still to come."""
        return self.state is LeaseState.LIVE and not self.absent and self.tail is None

    @property
    def num_tokens(self) -> int:
        """Tokens found that were not computed (until the lease is ready: not yet)."""
        return sum(origin is not None for origin in self.origins) * self.page_tokens + self.tail_tokens

    @property
    def num_pages(self) -> int:
        """Pages that it has, whether they can be read or not."""
        return len(self.nodes) + len(self.private)

    @property
    def hit_device(self) -> int:
        """Tokens of `num_tokens` that were found on the device."""
        return self._hits(Tier.DEVICE)

    @property
    def hit_host(self) -> int:
        """Tokens of `num_tokens` that were found in CPU memory."""
        return self._hits(Tier.HOST)

    @property
    def hit_nvme(self) -> int:
        """Tokens of `num_tokens` that were found in the store."""
        return self._hits(Tier.NVME)

    @property
    def numbers(self) -> list[int]:
        """Which page of the sequence each private one is."""
        first, known = len(self.nodes) + self.dropped, len(self.sparse)
        return [*self.sparse, *range(first + known, first + len(self.private))]

    def skip(self, position: int) -> int:
        """The first token at or after `position` that is to be computed or waited for."""
        if position % self.page_tokens == 0:
            page = position // self.page_tokens
            if self.absent:
                while page < len(self.nodes) and page not in self.absent:
                    page += 1
            else:
                page = max(page, len(self.nodes))
            if page < len(self.nodes):
                return page * self.page_tokens
            position = max(position, len(self.nodes) * self.page_tokens)
        elif position < len(self.nodes) * self.page_tokens:
            return position  # within a page that is being computed again
        return position if self.tail is not None else max(position, self.reached)

    def limit(self, position: int) -> int:
        """How far rows from `position` on may go: to the next page that is there, or has to be waited for."""
        if not self.absent and self.tail is None:
            return END
        page = position // self.page_tokens + 1
        while page < len(self.nodes) and page in self.absent:
            page += 1
        known = len(self.nodes) * self.page_tokens
        if page < len(self.nodes):
            return page * self.page_tokens
        if self.tail is not None:
            return max(known, position)
        return known if position < known < self.reached else END

    def has_slot(self, page: int) -> bool:
        """Whether rows can be written into this page."""
        return page in self.filling or 0 <= page - len(self.nodes) - self.dropped < len(self.private)

    def held_until(self, position: int) -> int:
        """The first token at or after `position` whose page has no slot to write to."""
        page = position // self.page_tokens
        while self.has_slot(page):
            page += 1
        return max(page * self.page_tokens, position)

    def _hits(self, tier: Tier) -> int:
        pages = self.origins.count(tier)
        return pages * self.page_tokens + (self.tail_tokens if self.tail_origin is tier else 0)
