"""Which pages may enter the store: those worth a write, in the order they came, within the day's budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tierd.tiers.budget import WriteBudget
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.policy import WRITE_GROUP_PAGES, worth_writing
from tierd.tiers.prefix import Leaving, Node
from tierd.tiers.residency import Residency


@dataclass(frozen=True, slots=True)
class WriteStats:
    """What write-behind did since the start, and what it may still do today."""

    written_bytes: int  # of records; headers and index come on top, under 2% where a record has 256 KB and more
    written_tokens: int  # in these pages; a page that was evicted and written again counts again
    bytes_per_token: float  # written for each token kept; 0 before the first
    skipped_pages: int  # not worth a write
    refused_pages: int  # on their way out of memory when the day's writes were used up: dropped
    today_bytes: int  # by all engines
    daily_bytes: int  # 0: no bound
    exhausted: bool


class Admission:
    """Decides, and writes nothing. Not thread-safe: only the pager's thread calls it.

    A page is not written when it is worth less than all that it would have to displace; when less than half of the
    day's writes are left and nobody asked for it twice; and when the page before it is not written either, for no
    look-up would reach it.

    Args:
        residency: which pages are where, and which wait to be written.
        taken: slots of the store that no page can have now, beside those with rows.
    """

    def __init__(self, residency: Residency, taken: Callable[[], int]) -> None:
        self.budget = WriteBudget()
        self.written_bytes = self.written_tokens = 0
        self.skipped_pages = self.refused_pages = 0
        self.asked: set[PageKey] = set()  # pages that somebody wants written, whatever they are worth
        self._residency = residency
        self._taken = taken

    @property
    def allowed(self) -> int:
        """Pages that may be written today."""
        return self.budget.allows(self._residency.stored_bytes)

    def statistics(self) -> WriteStats:
        """Figures of now."""
        each = self.written_bytes / self.written_tokens if self.written_tokens else 0.0
        return WriteStats(
            self.written_bytes, self.written_tokens, each, self.skipped_pages, self.refused_pages,
            self.budget.spent_bytes, self.budget.daily_bytes, not self.allowed,
        )  # fmt: skip

    def written(self, nodes: Sequence[Node]) -> None:
        """Pages became durable."""
        self.written_bytes += len(nodes) * self._residency.stored_bytes
        self.written_tokens += sum(node.num_tokens for node in nodes)
        self.asked.difference_update(node.key for node in nodes)

    def may_hurry(self, node: Node) -> bool:
        """Whether a page on its way out of memory is to be written first. One under a lease always is, if it can be."""
        if not self.allowed:
            self.refused_pages += 1
            return False
        if not node.pins and not (self._is_worth_it(node) and self._has_room(node)):
            self.skipped_pages += 1
            return False
        return True

    def take(self) -> list[Node]:
        """The next group of the queue, without what is not worth it."""
        nodes: dict[PageKey, Node] = {}
        dirty = self._residency.dirty
        while dirty and len(nodes) < WRITE_GROUP_PAGES:
            _, node = dirty.popitem(last=False)
            if not node.alive or node.durable or (node.device < 0 and node.host < 0):
                continue
            if node.leaving is Leaving.WRITE or (self._has_way(node, nodes) and self._is_worth_it(node)):
                nodes[node.key] = node
            else:
                self.skipped_pages += 1
        return list(nodes.values())

    def make_room(self, nodes: Sequence[Node]) -> tuple[list[Node], list[Node]]:
        """Evicts rows, each for a page that is worth more than it.

        Returns the pages that fit then, and those to ask about again: all rows are in use at the moment. What is worth
        less than the rows is given up.
        """
        residency = self._residency
        fitting: list[Node] = []
        given_up: set[PageKey] = set()
        free = self._free
        for place, node in enumerate(nodes):
            if free <= 0 or node.parent in given_up:
                victim = residency.victim(Tier.NVME)
                if victim is None:
                    return fitting, list(nodes[place:])
                useless = node.parent in given_up or not self._displaces(node, victim)
                if node.leaving is not Leaving.WRITE and useless:
                    self.skipped_pages += 1
                    given_up.add(node.key)
                    residency.offer(victim)
                    continue
                # It may have a copy higher up. It is not queued again before it is used again: where the store is
                # smaller than memory, two pages would else push each other out for ever.
                residency.evict(victim, Tier.NVME)
                free += 1
            free -= 1
            fitting.append(node)
        return fitting, []

    @property
    def _free(self) -> int:
        return self._residency.store_slots - self._residency.durable_pages - self._taken()

    def _has_room(self, node: Node) -> bool:
        if self._free > 0:
            return True
        victim = self._residency.heaps[Tier.NVME].peek()
        return victim is None or self._displaces(node, victim)  # None: the store says that it is full

    def _has_way(self, node: Node, group: Mapping[PageKey, Node]) -> bool:
        """Whether the page before it is in the store, or will be."""
        parent = self._residency.index.get(node.parent)
        return (
            parent is None  # it is the first, or comes after a gap
            or parent.durable
            or parent.writing
            or parent.key in group
            or parent.key in self._residency.dirty
        )

    def _is_worth_it(self, node: Node) -> bool:
        is_full = len(node.packed) == self._residency.index.page_bytes
        wanted = node.kept or node.key in self.asked
        return wanted or worth_writing(node.hits, is_full, self.budget.left_share)

    def _displaces(self, node: Node, victim: Node) -> bool:
        if victim.key == node.parent:
            return False  # nothing would find it without the page before it
        if node.kept or node.key in self.asked or node.kids[Tier.NVME]:
            return True  # its children are there and need it
        return self._residency.value(Tier.NVME, victim) <= self._residency.value(Tier.NVME, node)
