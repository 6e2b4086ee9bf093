"""The pager's books against each other: every invariant, recomputed from scratch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tierd.tiers.arena import Arena, SlotState
from tierd.tiers.errors import StoreBroken, StoreFull
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.prefix import Leaving, Node

if TYPE_CHECKING:
    from tierd.tiers.pager import Pager


def check(pager: Pager) -> list[str]:
    """Findings, empty when all is right. Costs a walk over all pages."""
    return [*check_ledgers(pager), *check_pages(pager, pager.index.nodes.values()), *_check_store(pager)]


def check_ledgers(pager: Pager) -> list[str]:
    """The part that has to be looked at all at once. A quick walk over all pages."""
    findings = pager.device.check() + pager.host.check()
    findings += _check_leases(pager)
    findings += _check_index(pager)
    findings += _check_slots(pager, pager.device, Tier.DEVICE)
    findings += _check_slots(pager, pager.host, Tier.HOST)
    findings += _check_durable(pager)
    return findings


def check_pages(pager: Pager, nodes: Iterable[Node]) -> list[str]:
    """The part that can be looked at page by page: of some pages that the index holds now."""
    findings = []
    for node in nodes:
        findings += _check_node(pager, node)
        findings += _check_kids(pager, node)
        findings += [
            f"{node}: evictable from {tier.name}, and no candidate there"
            for tier in Tier
            if pager.residency.evictable(node, tier) and not node.queued & (1 << tier)
        ]  # whatever may be evicted must be found by eviction
    return findings


def _check_leases(pager: Pager) -> list[str]:
    """Pins are exactly the leases' pages, and a lease's pages follow each other from its root."""
    findings = []
    pins: Counter[int] = Counter()
    pinned: dict[int, Node] = {}
    for lease in pager.leases:
        held = lease.nodes + ([lease.tail.source] if lease.tail is not None and lease.tail.source is not None else [])
        for node in held:
            pins[id(node)] += 1
            pinned[id(node)] = node
        parent = lease.root
        for node in lease.nodes:
            if node.parent != parent:
                findings.append(f"{lease}: {node} does not follow the page before it")
            parent = node.key
        if not lease.absent <= set(range(len(lease.nodes))) or not lease.filling.keys() <= lease.absent:
            findings.append(f"{lease}: absent are {sorted(lease.absent)}, being computed {sorted(lease.filling)}")
        if any(lease.nodes[place].computer is not lease for place in lease.filling):
            findings.append(f"{lease}: it computes a page that another lease computes")
    known = {id(node): node for node in pager.index.nodes.values()}
    for identity, node in (known | pinned).items():
        if node.pins != pins[identity]:
            findings.append(f"{node}: {node.pins} pins, {pins[identity]} leases")
    return findings


def _check_node(pager: Pager, node: Node) -> list[str]:
    """No page without a copy, unless it is in flight; flags agree with what is going on."""
    findings = []
    if not node.has_copy and not node.moves and not node.pins:
        findings.append(f"{node}: no tier holds it")
    if not 0 < len(node.packed) <= pager.index.page_bytes:
        findings.append(f"{node}: {node.num_tokens} tokens")
    if (node.load is not None or node.writing or node.leaving is Leaving.COPY) and not node.moves:
        findings.append(f"{node}: a copy is in flight and not counted")
    return findings


def _check_kids(pager: Pager, node: Node) -> list[str]:
    """The counts of children by tier."""
    findings = []
    children = pager.index.children(node.key)
    if children and len(node.packed) < pager.index.page_bytes:
        findings.append(f"{node}: a partial page has children")
    counted = [0] * len(Tier)
    for child in children:
        for tier in child.tiers():
            counted[tier] += 1
    if counted != node.kids:
        findings.append(f"{node}: children by tier are {counted}, its counts say {node.kids}")
    if not node.pins and any(child.pins for child in children):
        findings.append(f"{node}: a child is under a lease, it is not")
    return findings


def _check_index(pager: Pager) -> list[str]:
    """Keys, parents, gaps, and how many pages are leaving."""
    findings = []
    index = pager.index
    leaving = 0
    linked: set[PageKey] = set()
    for key, node in index.nodes.items():
        if node.key != key or not node.alive:
            findings.append(f"{node}: the index holds it as {key.hex()[:8]}")
        leaving += node.leaving is not Leaving.NO
    for parent in {node.parent for node in index.nodes.values()}:
        linked.update(child.key for child in index.children(parent) if child.parent == parent)
    if linked != set(index.nodes):
        findings.append(f"{len(linked ^ set(index.nodes))} pages are not linked to their parents")
    if leaving != pager.evictor.in_motion:
        findings.append(f"{leaving} pages are leaving the device, the evictor counts {pager.evictor.in_motion}")
    gaps = [gap for gap in index.gaps if gap in index.nodes or not index.children(gap)]
    return findings + [f"{gap.hex()[:8]} is a gap that is none" for gap in gaps]


def _check_slots(pager: Pager, arena: Arena, tier: Tier) -> list[str]:
    """Every slot has one owner, and its state says which."""
    findings = []
    owners: dict[int, SlotState] = {}

    def own(slot: int, state: SlotState, owner: object) -> None:
        if slot in owners:
            findings.append(f"{arena.name}: slot {slot} belongs to {owner} and to another")
        owners[slot] = state
        if not 0 <= slot < len(arena.states):
            findings.append(f"{arena.name}: there is no slot {slot}, {owner} has it")
        elif arena.state(slot) is not state:
            findings.append(f"{arena.name}: slot {slot} of {owner} is {arena.state(slot).name}, not {state.name}")

    for node in pager.index.nodes.values():
        slot = node.device if tier is Tier.DEVICE else node.host
        if slot >= 0:
            own(slot, SlotState.PINNED if node.pins else SlotState.IDLE, node)
        if node.load is not None and node.load.tier is tier:
            own(node.load.slot, SlotState.FILLING, node)
    if tier is Tier.DEVICE:
        for lease in pager.leases:
            for slot in [*lease.private, *lease.filling.values()]:
                own(slot, SlotState.PRIVATE, lease)
            if lease.tail is not None and lease.tail.slot >= 0:
                own(lease.tail.slot, SlotState.FILLING, lease)
    filling = pager.resizer.moving[tier]
    if tier is Tier.HOST:  # a copy down owns its slot by itself
        filling = arena.counts[SlotState.FILLING] - sum(state is SlotState.FILLING for state in owners.values())
    draining = arena.counts[SlotState.DRAINING]
    if len(owners) + filling + draining + arena.num_free != arena.total:
        findings.append(f"{arena.name}: {arena.total} slots, {len(owners)} owned, {arena.num_free} free: some leaked")
    if (draining or filling) and not pager.mover.outstanding:
        findings.append(f"{arena.name}: {draining + filling} slots wait for copies, and none is in flight")
    return findings


def _check_durable(pager: Pager) -> list[str]:
    """The ledger of durable pages, and the queue of those to be written."""
    findings = []
    residency = pager.residency
    durable = sum(node.durable for node in pager.index.nodes.values())
    if durable != residency.durable_pages:
        findings.append(f"{durable} pages are durable, the ledger says {residency.durable_pages}")
    pinned = sum(node.durable and node.pins > 0 for node in pager.index.nodes.values())
    if pinned != residency.durable_pinned:
        findings.append(f"{pinned} durable pages are under leases, the ledger says {residency.durable_pinned}")
    for key, node in residency.dirty.items():
        if pager.index.get(key) is not node or node.durable or node.writing:
            findings.append(f"{node}: queued to be written, and need not be")
    return findings


def _check_store(pager: Pager) -> list[str]:
    """The pages booked as durable are the rows of the store, whenever no change of it is on its way."""
    writeback = pager.writeback
    if pager.store is None or not writeback.on or not writeback.quiet or pager.mover.outstanding:
        return []
    durable = {key for key, node in pager.index.nodes.items() if node.durable}
    try:
        rows = {meta.key for meta in pager.store.pages()}
    except StoreFull:  # even looking writes a little; there is nothing to compare with then
        return []
    except StoreBroken as exc:  # the disk is at fault, not the books
        writeback.turn_off(str(exc))
        return []
    if rows == durable:
        return []
    return [f"the store has {len(rows - durable)} rows too many and {len(durable - rows)} too few"]
