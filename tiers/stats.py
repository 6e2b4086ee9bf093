"""Frozen figures of the pager, for status, metrics and the screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierd.tiers.admit import WriteStats
from tierd.tiers.arena import Arena
from tierd.tiers.links import LinkStats
from tierd.tiers.page import Tier

if TYPE_CHECKING:
    from tierd.tiers.pager import Pager

MAP_PARTIAL = 0x08
MAP_IN_HOST = 0x10
MAP_DURABLE = 0x20
MAP_MOVING = 0x40


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier, in pages. At every rest `free + used + cached + in_flight = total`."""

    total_pages: int
    free_pages: int
    used_pages: int  # needed by a live lease
    cached_pages: int  # known and idle: what eviction may take
    in_flight_pages: int  # being filled, or waiting for the last reader
    page_bytes: int
    evictions: int  # copies dropped to make room

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots."""
        return self.total_pages * self.page_bytes

    @property
    def balanced(self) -> bool:
        """Whether the ledger adds up."""
        return self.free_pages + self.used_pages + self.cached_pages + self.in_flight_pages == self.total_pages


@dataclass(frozen=True, slots=True)
class PagerStats:
    """The pager at one moment. Counters count from the start of the process."""

    device: TierStats
    host: TierStats
    nvme: TierStats
    nvme_on: bool
    known_pages: int
    leases: int
    fetching: int  # leases that wait for pages
    lookups: int
    lookup_tokens: int  # asked for
    hit_device_tokens: int  # found, by where they lay
    hit_host_tokens: int
    hit_nvme_tokens: int
    loaded_pages: int  # brought from the store to memory
    demotions: int  # pages copied from the device to the host
    spills: int  # pages under leases that left the device
    written_pages: int  # made durable
    failed_writes: int
    dirty_pages: int  # waiting to be made durable
    writing_pages: int
    collisions: int  # keys that named other tokens than ours
    quota_pages: int  # forgotten because a tenant had more than its bound
    misses: dict[str, int]  # pages that were found and did not arrive, by reason
    links: dict[str, LinkStats]
    writes: WriteStats


def collect(pager: Pager) -> PagerStats:
    """The figures of a pager now, in time that does not grow with the pages."""
    residency, writeback, promoter = pager.residency, pager.writeback, pager.promoter
    return PagerStats(
        device=_arena_stats(pager.device, residency.evictions[Tier.DEVICE]),
        host=_arena_stats(pager.host, residency.evictions[Tier.HOST]),
        nvme=_store_stats(pager),
        nvme_on=writeback.on,
        known_pages=len(pager.index),
        leases=len(pager.leases),
        fetching=len(promoter.fetching),
        lookups=pager.lookups,
        lookup_tokens=pager.lookup_tokens,
        hit_device_tokens=pager.hit_tokens[Tier.DEVICE],
        hit_host_tokens=pager.hit_tokens[Tier.HOST],
        hit_nvme_tokens=pager.hit_tokens[Tier.NVME],
        loaded_pages=promoter.loader.loaded_pages,
        demotions=pager.evictor.demotions,
        spills=pager.evictor.spills,
        written_pages=writeback.written_pages,
        failed_writes=writeback.failed_pages,
        dirty_pages=len(residency.dirty),
        writing_pages=writeback.writing_pages,
        collisions=pager.committer.collisions,
        quota_pages=pager.shares.forgotten,
        misses=dict(promoter.misses),
        writes=writeback.admission.statistics(),
        links={str(link): stats for link, stats in pager.mover.statistics().items()},
    )


def page_map(pager: Pager) -> bytes:
    """One byte a device slot: bits 0-2 `SlotState`, then the `MAP_*` flags of the page in it."""
    cells = bytearray(pager.device.states)
    full = pager.index.page_bytes
    for node in pager.index.nodes.values():
        if node.device >= 0:
            cells[node.device] |= (
                MAP_PARTIAL * (len(node.packed) < full)
                | MAP_IN_HOST * (node.host >= 0)
                | MAP_DURABLE * node.durable
                | MAP_MOVING * (node.moves > 0)
            )
    return bytes(cells)


def _arena_stats(arena: Arena, evictions: int) -> TierStats:
    return TierStats(
        arena.total, arena.num_free, arena.used, arena.cached, arena.in_flight, arena.record_bytes, evictions
    )


def _store_stats(pager: Pager) -> TierStats:
    residency = pager.residency
    # Rows that are booked out and not deleted yet count as free: what is written next takes their place.
    durable, writing = residency.durable_pages, pager.writeback.writing_pages
    used = residency.durable_pinned
    total = max(residency.store_slots, durable + writing)
    evictions = residency.evictions[Tier.NVME]
    free = total - durable - writing
    return TierStats(total, free, used, durable - used, writing, residency.stored_bytes, evictions)
