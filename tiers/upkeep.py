"""What the pager does at the edges of its life: load what is durable, flush, clear, collect, verify."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tierd.tiers import memory
from tierd.tiers.errors import StoreBroken
from tierd.tiers.gpu import DeviceRow
from tierd.tiers.keys import pack_tokens
from tierd.tiers.links import Link
from tierd.tiers.mover import Job, JobClass
from tierd.tiers.page import PageKey, Tier
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


def gc(pager: Pager, deadline_s: float) -> int:
    """See `Pager.gc`."""
    count = _forget(pager, pager.index.unreachable())
    if pager.store is not None and pager.writeback.on and _settle_store(pager, deadline_s):
        try:
            pager.store.gc()
        except StoreBroken as exc:
            pager.writeback.turn_off(str(exc))
    return count


def verify(pager: Pager, repair: bool, deadline_s: float) -> list[str]:
    """See `Pager.verify`."""
    findings = pager.check()
    if pager.store is None:
        return findings
    if not pager.writeback.on:
        return [*findings, _off(pager)]
    if not _settle_store(pager, deadline_s):
        return [*findings, "the store is busy: its pages were not verified"]
    if not pager.writeback.on:  # one of the jobs that were waited for failed
        return [*findings, _off(pager)]
    try:
        findings += pager.store.verify(repair)
        rows = {meta.key for meta in pager.store.pages()} if repair else set()
    except StoreBroken as exc:
        pager.writeback.turn_off(str(exc))
        return [*findings, _off(pager)]
    if repair:
        for node in list(pager.index.nodes.values()):
            if node.durable and node.key not in rows and not node.moves:
                pager.residency.take(node, Tier.NVME)
                pager.residency.settle(node)
        strange = [key for key in rows if (known := pager.index.get(key)) is None or not known.durable]
        if strange:
            pager.store.remove(strange)
    return findings


def _off(pager: Pager) -> str:
    return f"the disk tier is off, no page of it was read: {pager.writeback.off_reason}"


def _forget(pager: Pager, nodes: list[Node]) -> int:
    residency, count = pager.residency, 0
    for node in reversed(nodes):  # as a rule children were added after their parents
        if node.alive and residency.is_idle(node):
            residency.forget(node)
            count += 1
    return count


def _settle_store(pager: Pager, deadline_s: float) -> bool:
    """Waits until no job of the store is queued or running; False if that takes too long."""
    while not pager.writeback.quiet:
        if pager.clock() >= deadline_s:
            return False
        pager.mover.wait(_WAIT_S)
        pager.poll(pager.clock())
    return True
