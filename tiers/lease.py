"""A lease: the pages one sequence uses, pinned for as long as it lives."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tierd.tiers.page import PageKey, Tier
from tierd.tiers.prefix import NOWHERE, Node


class LeaseState(enum.Enum):
    """Life of a lease. MATCHED -> FETCHING -> READY -> ENDED; all on the device already: READY at once."""

    MATCHED = enum.auto()
    FETCHING = enum.auto()
    READY = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True, eq=False)
class Load:
    """A page on its way to the device, for all leases that wait for it."""

    slot: int
    waiters: list[Lease] = field(default_factory=list)


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
    """Pages of one sequence: known ones first (`nodes`), then private ones that the sequence is writing.

    The engine reads the public attributes; `Pager` alone changes them.

    Attributes:
        num_tokens: prompt tokens covered by what was found. Falls when a page is lost or comes too late; grows no more.
        slots: device slots in the order of the sequence: known pages, then private ones. Valid once `ready`.
        lost: something that was found did not arrive.
    """

    __slots__ = (
        "__weakref__", "deadline_s", "missing", "next", "nodes", "num_tokens", "origins", "page_tokens", "private",
        "root", "slots", "state", "tail", "tail_origin", "tail_tokens", "unkeyed", "lost",
    )  # fmt: skip

    def __init__(self, root: PageKey, page_tokens: int) -> None:
        self.root = root
        self.page_tokens = page_tokens
        self.num_tokens = 0
        self.slots: list[int] = []
        self.lost = False
        self.state = LeaseState.MATCHED
        self.nodes: list[Node] = []
        self.origins: list[Tier] = []  # where each matched page lay when it was found
        self.private: list[int] = []  # device slots of pages without a key, after the nodes
        self.tail: TailCopy | None = None  # in flight or not started; once arrived it is the first private page
        self.tail_tokens = 0
        self.tail_origin = Tier.DEVICE
        self.unkeyed = False  # a key collided: the rest of this sequence stays private
        self.next = 0  # nodes before this one are on the device or on their way
        self.missing = 0  # nodes on their way
        self.deadline_s = 0.0

    def __repr__(self) -> str:
        return f"<Lease {self.state.name}: {self.num_tokens} tokens, {len(self.nodes)}+{len(self.private)} pages>"

    @property
    def ready(self) -> bool:
        """Whether every page is on the device."""
        return self.state is LeaseState.READY

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

    def recount(self) -> None:
        """Sets `num_tokens` from what is left of the match."""
        self.num_tokens = len(self.origins) * self.page_tokens + self.tail_tokens

    def arrive(self) -> None:
        """Everything is on the device: the slots are known from here on."""
        self.slots = [node.device for node in self.nodes] + self.private
        self.state = LeaseState.READY

    def _hits(self, tier: Tier) -> int:
        pages = self.origins.count(tier)
        return pages * self.page_tokens + (self.tail_tokens if self.tail_origin is tier else 0)
