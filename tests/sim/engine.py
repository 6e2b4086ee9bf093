"""Scheduler, streams, pager and store as the engine puts them together, on simulated memory, links and disk.

The one place that knows how the parts of the engine fit: when their interfaces change, the simulator changes here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.daemon.engine.vocabularies import byte_level
from tests.sim.clock import Clock
from tests.sim.decoder import LAYER_BYTES, LAYERS, LAYOUT, PAGE_TOKENS, RECORD_BYTES, VOCAB, HashDecoder
from tests.sim.disk import SimDisk
from tests.sim.mover import SimMover
from tierd.daemon.engine.intake import Facts, Intake
from tierd.daemon.engine.runner import Runner
from tierd.daemon.engine.scheduler import Limits
from tierd.daemon.engine.streams import Streams
from tierd.tiers.arena import Arena
from tierd.tiers.errors import StoreError
from tierd.tiers.keys import root_key
from tierd.tiers.links import Link
from tierd.tiers.pager import Pager
from tierd.tiers.prefixes import Prefixes
from tierd.tiers.slot import SlotGeometry
from tierd.tiers.staging import Staging
from tierd.tiers.store import Store

ROOT = root_key("simulated")
SLOT_BYTES = SlotGeometry(RECORD_BYTES, sections=LAYERS, section_bytes=LAYER_BYTES).slot_bytes
END_TOKEN = VOCAB - 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes and speeds of a simulated machine."""

    device_pages: int
    host_pages: int
    store_pages: int | None  # None: no NVMe tier
    context: int
    max_streams: int
    max_rows: int
    mover_width: int
    mover_capacity: int
    memory_bytes_per_s: float
    disk_bytes_per_s: float
    memory_latency_s: float
    disk_latency_s: float
    step_s: float
    row_s: float
    read_bytes: int  # of one streamed page at a time
    overlap: bool  # of streaming and computing

    @property
    def limit(self) -> int:
        """Tokens that the engine lets one sequence have."""
        return min(self.context, (self.device_pages + self.host_pages + (self.store_pages or 0)) * PAGE_TOKENS)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that clients ask for: most of them can be served to the end."""
        pages = self.device_pages + self.host_pages + (self.store_pages or 0) // 2
        return min(self.context, pages * PAGE_TOKENS)

    @classmethod
    def draw(cls, rng: random.Random) -> Geometry:
        """A random machine; most of them far too small for their work."""
        device = rng.choice([1, 2, 3, 5, 8, 8, 9, 10, 12, 16, 24, 32, 64])
        streams = rng.choice([1, 2, 3, 4, 8])
        return cls(
            device_pages=device,
            host_pages=rng.choice([0, 0, 1, 4, 8, 16, 32, 64]),
            store_pages=rng.choice([None, 4, 16, 48, 48, 400, 400]),
            context=min(rng.choice([2 * device, 4 * device, 80]) * PAGE_TOKENS, 320),
            max_streams=streams,
            max_rows=streams + rng.choice([4, 8, 16, 64]),
            mover_width=rng.choice([1, 2, 2, 4]),
            mover_capacity=rng.choice([16, 64, 1024, 1024]),
            memory_bytes_per_s=10 ** rng.uniform(3.5, 7),
            disk_bytes_per_s=10 ** rng.uniform(5, 7.5),  # reads of streamed pages count whole blocks
            memory_latency_s=rng.choice([1e-6, 1e-4, 5e-3]),
            disk_latency_s=rng.choice([1e-5, 1e-3, 3e-2]),
            step_s=rng.choice([1e-3, 1e-2]),
            row_s=rng.choice([1e-5, 1e-3]),
            read_bytes=rng.choice([LAYER_BYTES, 2 * LAYER_BYTES, 1 << 20]),
            overlap=rng.random() < 0.8,
        )


class Engine:
    """One life of the process. The disk outlives it."""

    def __init__(
        self,
        geometry: Geometry,
        clock: Clock,
        rng: random.Random,
        disk: SimDisk,
        notice: Callable[[str], None],
    ) -> None:
        self.clock = clock
        self.store = self._open_store(geometry, disk, notice) if geometry.store_pages is not None else None
        memory, slow = geometry.memory_bytes_per_s, geometry.disk_bytes_per_s
        on_disk = (Link.DISK_READ, Link.DISK_WRITE)
        self.mover = SimMover(
            clock,
            rng,
            speeds={link: slow if link in on_disk else memory for link in Link},
            latency_s={
                link: geometry.disk_latency_s if link in on_disk else geometry.memory_latency_s for link in Link
            },
            width=geometry.mover_width,
            capacity=geometry.mover_capacity,
        )
        most = 2 * (geometry.device_pages + geometry.host_pages)
        self.device = Arena("device", geometry.device_pages, RECORD_BYTES, max_slots=most, poison=True)
        self.host = Arena("host", geometry.host_pages, RECORD_BYTES, max_slots=most, poison=True)
        self.pager = Pager(
            layout_record_bytes=RECORD_BYTES,
            page_tokens=PAGE_TOKENS,
            root=ROOT,
            device=self.device,
            host=self.host,
            store=self.store,
            mover=self.mover,
            clock=clock,
            events=lambda _kind, data: notice(str(data["text"])),
        )
        self.decoder = HashDecoder(clock, step_s=geometry.step_s, row_s=geometry.row_s)
        staging = None
        if self.store is not None:
            staging = Staging(
                self.store, self.mover, LAYERS, LAYER_BYTES, read_bytes=geometry.read_bytes, clock=clock
            )
        memories = (self.device.array, self.host.array)
        runner = Runner(self.decoder, LAYOUT, memories, staging, overlap=geometry.overlap, clock=clock)
        limits = Limits(geometry.max_rows, geometry.max_streams, PAGE_TOKENS)
        self.prefixes = Prefixes(self.pager, None, wall=clock)
        self.streams = Streams(self.pager, runner, limits, clock, self.prefixes)
        capacity = self.pager.capacity_pages * PAGE_TOKENS
        facts = Facts(VOCAB, geometry.context, capacity, frozenset({END_TOKEN}), None, add_bos=False, sampling={})
        self.intake = Intake(facts, byte_level(), None)

    @staticmethod
    def _open_store(geometry: Geometry, disk: SimDisk, notice: Callable[[str], None]) -> Store | None:
        assert geometry.store_pages is not None
        try:
            return Store.open(
                Path("/simulated"),
                record_bytes=RECORD_BYTES,
                namespace=ROOT,
                capacity_bytes=geometry.store_pages * SLOT_BYTES,
                io=disk.as_io(),
                file_bytes=16 * SLOT_BYTES,
                step_bytes=4 * SLOT_BYTES,
                sections=LAYERS,
                section_bytes=LAYER_BYTES,
            )
        except StoreError as exc:
            notice(f"the store can't be opened: {exc}")
            return None

    def promises(self, pages: int) -> bool:
        """Whether a sequence of so many pages must be served to its end, come what may."""
        if self.mover.dead:
            return False  # nothing spills any more: whoever fits may have to go for one that does not
        memory = self.device.slots + self.host.slots
        writeback = self.pager.writeback
        if pages <= memory or not writeback.on or writeback.paused:
            return pages <= memory
        # Pages of other streams are in the store as well, and can't go while these run.
        return 2 * pages <= self.pager.residency.store_slots

    def has_room_for_beams(self, width: int) -> bool:
        """Whether the pages that beams write, which can't spill, are few beside those of all others."""
        writers = len(self.streams) + 1
        return self.device.slots > 2 * width * writers

    def findings(self) -> list[str]:
        """What is wrong with the books; empty when all is right."""
        stats = self.pager.statistics()
        found = self.pager.check()
        for name, tier in (("device", stats.device), ("host", stats.host), ("nvme", stats.nvme)):
            if not tier.balanced:
                found.append(f"the ledger of {name} does not balance: {tier}")
        return found

    def leaks(self) -> list[str]:
        """What is held although no request lives and nothing moves."""
        stats = self.pager.statistics()
        held = {
            "leases": stats.leases,
            "fetching": stats.fetching,
            "device pages used": stats.device.used_pages,
            "device pages in flight": stats.device.in_flight_pages,
            "host pages used": stats.host.used_pages,
            "host pages in flight": stats.host.in_flight_pages,
            "jobs": self.mover.outstanding,
            "requests": len(self.streams),
            "resizes": int(self.pager.resizer.active),
        }
        return [f"{count} {what}" for what, count in held.items() if count]

    def close(self) -> None:
        """An orderly end."""
        self.pager.close()
        if self.store is not None:
            self.store.close()
