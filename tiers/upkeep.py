"""What the pager does at the edges of its life: load what is durable, flush, clear, collect."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tierd.tiers import memory
from tierd.tiers.errand import Errand, Slices
from tierd.tiers.errors import StoreBroken
from tierd.tiers.gpu import DeviceRow
from tierd.tiers.keys import pack_tokens
from tierd.tiers.links import Link
from tierd.tiers.mover import Job, JobClass
from tierd.tiers.page import PageKey
from tierd.tiers.prefix import Node
from tierd.tiers.promote import MAX_LOADS
from tierd.tiers.store import Store

if TYPE_CHECKING:
    from tierd.tiers.pager import Pager

_WAIT_S = 0.05  # one wait for the mover inside a call that has a deadline


def load_index(pager: Pager, store: Store) -> float:
    """Makes the durable pages known without reading them; returns what to add to the clock to get page time.

    A page may come before its parent, or without it: then no look-up reaches it, and it is evicted in its turn.
    """
    nodes: dict[PageKey, Node] = {}
    for meta in store.pages():
        if not 0 < len(meta.tokens) <= pager.page_tokens:
            continue  # not a page of this layout; `verify` with repair drops the row
        nodes[meta.key] = node = Node(meta.key, meta.parent, pack_tokens(meta.tokens))
        node.hits = meta.hits
        node.last_use_s = meta.last_use_s
    pager.residency.load(list(nodes.values()))
    return max((node.last_use_s for node in nodes.values()), default=pager.clock()) - pager.clock()


def warm(pager: Pager) -> None:
    """Has the memory made, behind the work, that the first loads will fill; nothing where there is nothing to load.

    The system makes memory when it is touched first: a virtual machine 1 GB/s of it, half of what its disk brings.
    The first load after a start took four times as long as the next ones, and looked like one of a slow disk.
    """
    device = pager.device
    pages = min(pager.residency.durable_pages, device.slots, MAX_LOADS)
    rows = device.block.row(0, pages * device.record_bytes)
    if pages and not isinstance(rows, DeviceRow):  # a card's memory is there from the start
        call = partial(memory.populate, device.block.address, rows.nbytes)
        pager.mover.submit(Job(call, Link.DEVICE_TO_DEVICE, 0, awaited=True), JobClass.PREFETCH)


def flush(pager: Pager, deadline_s: float) -> int:
    """See `Pager.flush`."""
    writeback, dirty = pager.writeback, pager.residency.dirty
    while writeback.on:
        changed = pager.poll(pager.clock())
        changed |= writeback.poll(pager.clock(), force=True)
        pending = writeback.jobs or dirty or pager.residency.dropped_rows
        if not pending or pager.clock() >= deadline_s:
            break
        if not pager.mover.wait(_WAIT_S) and not changed and not writeback.jobs:
            break  # nothing runs and nothing can be started: the store is full
    return len(dirty) + writeback.writing_pages


def clear(pager: Pager) -> int:
    """See `Pager.clear`."""
    count = _forget(pager, list(pager.index.nodes.values()))
    pager.writeback.wipe()  # if pages under leases stay, the rows of the others go one by one
    return count


class Collection(Errand):
    """Forgets what no look-up can reach, and has the store give back the space that nothing uses.

    Attributes:
        removed_pages: that were forgotten.
        freed_bytes: of the store's files, when it has ended.
    """

    def __init__(self, pager: Pager, deadline_s: float) -> None:
        super().__init__(pager, deadline_s)
        self.removed_pages = self.freed_bytes = 0

    def _slices(self) -> Slices:
        pager, store = self._pager, self._pager.store
        nodes = pager.index.unreachable()
        self.removed_pages = _forget(pager, nodes)
        dropped_rows = pager.residency.dropped_rows
        while any(node.key in dropped_rows for node in nodes):
            yield False
        if store is not None and pager.writeback.on:
            try:
                self.freed_bytes = yield from self._by_mover(Link.DISK_WRITE, store.gc)
            except StoreBroken as exc:
                pager.writeback.turn_off(str(exc))


def _forget(pager: Pager, nodes: list[Node]) -> int:
    residency, count = pager.residency, 0
    for node in reversed(nodes):  # as a rule children were added after their parents
        if node.alive and residency.is_idle(node):
            residency.forget(node)
            count += 1
    return count
