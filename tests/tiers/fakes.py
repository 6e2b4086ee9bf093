"""A pager for tests, whose pages tell their content, and what may become of it."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.tiers.stand_ins import ManualMover, MemoryStore
from tierd.tiers.arena import Arena
from tierd.tiers.blocks import Block, HostBlock
from tierd.tiers.errand import Errand
from tierd.tiers.errors import LostReason, PageLost, StagingLost
from tierd.tiers.gpu import DeviceRow, Row
from tierd.tiers.keys import root_key
from tierd.tiers.lease import Lease
from tierd.tiers.mover import Mover
from tierd.tiers.page import PageKey
from tierd.tiers.pager import Pager
from tierd.tiers.store import Store
from tierd.tiers.upkeep import Collection
from tierd.tiers.verify import Verification

PAGE_TOKENS = 4
RECORD_BYTES = 64  # 16 bytes a token
ROOT = root_key("test")
FAR_S = 1e9


def token_bytes(tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
    """What the cache of each token holds: 16 bytes that depend on every token up to it, as keys and values do."""
    digest = blake2b(salt, digest_size=16).digest()
    found = []
    for token in tokens:
        digest = blake2b(digest + token.to_bytes(4, "little"), digest_size=16).digest()
        found.append(digest)
    return found


def viewed(row: Row) -> npt.NDArray[np.uint8]:
    """A row as an array, also one of a card that is made of CPU memory."""
    if isinstance(row, DeviceRow):
        return np.ctypeslib.as_array((ctypes.c_uint8 * row.nbytes).from_address(row.address))
    return row


class Rig:
    """A pager with everything around it, and an engine that writes the bytes of `token_bytes`."""

    def __init__(
        self,
        *,
        device: int = 8,
        host: int = 8,
        store: Store | None = None,
        mover: Mover | None = None,
        record_bytes: int = RECORD_BYTES,
        max_slots: int | None = None,
        make_blocks: tuple[Callable[[int, int], Block], Callable[[int, int], Block]] = (HostBlock, HostBlock),
    ) -> None:
        self.now_s = 100.0
        self.notices: list[str] = []
        self.mover = mover if mover is not None else ManualMover(1)
        of_device, of_host = make_blocks
        self.device = Arena("device", device, record_bytes, max_slots=max_slots, poison=True, make_block=of_device)
        self.host = Arena("host", host, record_bytes, max_slots=max_slots, poison=True, make_block=of_host)
        self.store = store
        self.pager = Pager(
            layout_record_bytes=record_bytes,
            page_tokens=PAGE_TOKENS,
            root=ROOT,
            device=self.device,
            host=self.host if host or max_slots else None,
            store=store,
            mover=self.mover,
            clock=lambda: self.now_s,
            events=lambda name, fields: self.notices.append(f"{name}: {fields['text']}"),
        )

    @property
    def manual(self) -> ManualMover:
        assert isinstance(self.mover, ManualMover)
        return self.mover

    def poll(self) -> bool:
        return self.pager.poll(self.now_s)

    def settle(self) -> None:
        """Lets everything in flight finish, and the write-behind that is due."""
        for _ in range(1000):
            if isinstance(self.mover, ManualMover):
                self.mover.run_all()
            else:
                self.mover.wait(0.05)
            self.now_s += 0.06  # longer than a write group waits
            if not self.poll() and not self.mover.outstanding:
                return
        raise AssertionError("the pager does not come to rest")

    def work(self) -> None:
        """Lets what is in flight go on, and takes it in."""
        if isinstance(self.mover, ManualMover):
            self.mover.run_all()
        else:
            self.mover.wait(0.05)
        self.poll()

    def start(self, tokens: Sequence[int], salt: bytes = b"") -> Lease:
        """A lease on what is known of `tokens`; holes that nothing will fill are computed."""
        lease = self.pager.match(tokens, salt)
        self.pager.fetch(lease, FAR_S)
        for _ in range(1000):
            if lease.ready:
                return lease
            if lease.absent and not self.pager.promoter.loader.in_flight and not self.mover.outstanding:
                self.mend(lease, tokens, salt)
            self.work()
        raise AssertionError("the lease never becomes ready")

    def mend(self, lease: Lease, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Computes the first absent page of a lease."""
        start = lease.skip(0)
        end = min(lease.limit(start), start + PAGE_TOKENS)
        assert start % PAGE_TOKENS == 0 and end == start + PAGE_TOKENS
        self.allocate(lease, start, end)
        self.write(lease, tokens[:end], start, salt)
        self.pager.commit(lease, tokens[:end])

    def record_at(self, address: int) -> npt.NDArray[np.uint8]:
        """The record at an address in one of the arenas. uint8[record_bytes]"""
        for arena in (self.device, self.host):
            slot, rest = divmod(address - arena.address(0), arena.record_bytes) if arena.states else (-1, 0)
            if 0 <= slot < len(arena.states) and rest == 0:
                return viewed(arena.row(slot))
        raise AssertionError(f"{address:#x} is in no arena")

    def place(self, lease: Lease, position: int) -> npt.NDArray[np.uint8]:
        """The bytes of one token where the lease reads them. uint8[record_bytes / PAGE_TOKENS]"""
        pages = -(-(position + 1) // PAGE_TOKENS)
        address = int(self.pager.tables.addresses(lease, pages)[-1])
        stride = self.device.record_bytes // PAGE_TOKENS
        for arena in (self.device, self.host):
            slot, rest = divmod(address - arena.address(0), arena.record_bytes) if arena.states else (-1, 0)
            if 0 <= slot < len(arena.states) and rest == 0:
                record = viewed(arena.row(slot))
                break
        else:
            assert address == 0 and self.store is not None, f"position {position} is nowhere"
            record = np.empty(self.device.record_bytes, np.uint8)
            key = lease.nodes[pages - 1].key
            try:
                self.store.read_into(key, record)
            except PageLost as lost:
                raise StagingLost([key], str(lost), {key: lost}) from None
        offset = position % PAGE_TOKENS * stride
        return record[offset : offset + stride]

    def write(self, lease: Lease, tokens: Sequence[int], start: int, salt: bytes = b"") -> None:
        """Computes tokens[start:] into the lease's slots."""
        stride = self.device.record_bytes // PAGE_TOKENS
        for position, digest in list(enumerate(token_bytes(tokens, salt)))[start:]:
            assert lease.has_slot(position // PAGE_TOKENS)
            self.place(lease, position)[:] = np.frombuffer((digest * (stride // 16 + 1))[:stride], np.uint8)

    def read(self, lease: Lease, count: int) -> list[bytes]:
        """The first `count` tokens' bytes as a step of the lease reads them."""
        return [bytes(self.place(lease, position)) for position in range(count)]

    def expect(self, lease: Lease, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Every covered byte is what the chain of tokens says."""
        stride = self.device.record_bytes // PAGE_TOKENS
        wanted = [(digest * (stride // 16 + 1))[:stride] for digest in token_bytes(tokens, salt)]
        assert self.read(lease, len(tokens)) == wanted

    def allocate(self, lease: Lease, start: int, end: int) -> None:
        """Slots for rows, waiting for evictions."""
        for _ in range(1000):
            if self.pager.allocate(lease, start, end):
                return
            self.work()
        raise AssertionError("no room on the device")

    def grow(self, lease: Lease, tokens: Sequence[int], start: int, salt: bytes = b"") -> None:
        """Allocates, computes and commits tokens[start:] and every hole, at most the device at once."""
        for _ in range(1000):
            self.pager.tables.refresh(lease)
            if lease.absent:
                lease.reached = max(lease.reached, start)
                start = min(start, min(lease.absent) * PAGE_TOKENS)
            start = lease.skip(start)
            if start >= len(tokens):
                return
            end = min((start // PAGE_TOKENS + self.device.slots) * PAGE_TOKENS, lease.limit(start), len(tokens))
            if self.pager.allocate(lease, start, end):
                self.write(lease, tokens[:end], start, salt)
                self.pager.commit(lease, tokens[:end])
                start = end
            else:
                self.work()
        raise AssertionError("no room on the device")

    def serve(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """A whole request: match, fetch, check, compute the rest, release. Returns the tokens that were cached."""
        lease = self.start(tokens, salt)
        cached, covered = lease.num_tokens, lease.skip(0)
        self.expect_mended(lease, tokens[:covered], salt)
        self.grow(lease, tokens, covered, salt)
        self.expect_mended(lease, tokens, salt)
        self.pager.release(lease, tokens)
        return cached

    def expect_mended(self, lease: Lease, tokens: Sequence[int], salt: bytes = b"") -> None:
        """As `expect`; streamed pages that can't be read are computed again, as by the engine."""
        for _ in range(100):
            try:
                self.expect(lease, tokens, salt)
                return
            except StagingLost as lost:
                self.pager.tables.lose(lost, self.pager.leases)
                self.grow(lease, tokens, len(tokens), salt)
        raise AssertionError("the pages are lost again and again")

    def check(self) -> None:
        findings = self.pager.check()
        assert not findings, findings
        stats = self.pager.statistics()
        assert stats.device.balanced
        assert stats.host.balanced
        assert stats.nvme.balanced

    def close(self) -> None:
        self.pager.close()


def live_at_random(rig: Rig, rng: random.Random, rounds: int) -> None:
    """Sequences of a few prompts, which share prefixes, come and go; every byte that one reads is right."""
    prompts = [[rng.randint(1, 2) for _ in range(rng.randint(4, 16))] for _ in range(10)]
    for _ in range(rounds):
        first, second = rng.choice(prompts), rng.choice(prompts)
        lease = rig.start(first)
        cached = lease.num_tokens
        rig.expect(lease, first[:cached])
        if len(first) + len(second) < 20:
            rig.serve(second)
        rig.grow(lease, first, cached)
        rig.expect(lease, first)
        rig.pager.release(lease, first)
        rig.now_s += 0.05
        rig.poll()
        rig.check()
    rig.settle()


def stored(
    *sequences: Sequence[int], device: int = 8, host: int = 0, capacity: int = 1024, mover: Mover | None = None
) -> tuple[Rig, MemoryStore]:
    """A fresh pager over a store that holds these sequences."""
    store = MemoryStore()
    rig = Rig(device=40, host=0, store=store)
    for tokens in sequences:
        rig.serve(tokens)
    rig.pager.flush(rig.now_s + 1)
    rig.close()
    store.reads.clear()
    return Rig(device=device, host=host, store=store, mover=mover or ManualMover(1, capacity=capacity)), store


def damaged(keys: Sequence[PageKey]) -> StagingLost:
    """What a step hears when these pages fail their check."""
    return StagingLost(keys, "the test says so", dict.fromkeys(keys, PageLost(LostReason.PAYLOAD)))


def lost_key(*keys: PageKey) -> Callable[[PageKey], Exception | None]:
    """For `MemoryStore.fail_read`: these pages are damaged."""
    return lambda key: PageLost(LostReason.PAYLOAD) if key in keys else None


def delayed_copy(seed: int) -> Callable[[Any, Any], None]:
    """A copy that first ruins its destination, then takes its time."""
    rng = random.Random(seed)
    lock = threading.Lock()

    def copy(dest: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
        dest[:] = 0xAA
        with lock:
            pause_s = rng.random() * 0.002
        threading.Event().wait(pause_s)
        np.copyto(dest, source)

    return copy


def open_store(directory: Path, record_bytes: int, capacity: int = 64) -> Store:
    """The real store, small."""
    return Store.open(
        directory,
        record_bytes=record_bytes,
        namespace=ROOT,
        capacity_bytes=capacity * (record_bytes + 4096),
        step_bytes=1 << 20,
        file_bytes=8 << 20,
    )


def run(pager: Pager, errand: Errand) -> None:
    """Advances an errand to its end, and does nothing else."""
    while not errand.advance():
        if errand.waits or pager.mover.outstanding:
            pager.mover.wait(0.05)
        pager.poll(pager.clock())


def verify(pager: Pager, repair: bool, deadline_s: float = FAR_S) -> list[str]:
    """Findings of a verification that nothing else goes on beside."""
    verification = Verification(pager, repair, deadline_s)
    run(pager, verification)
    if verification.error is not None:
        raise verification.error
    return verification.findings


def gc(pager: Pager, deadline_s: float) -> int:
    """Pages that a collection forgets, which nothing else goes on beside."""
    collection = Collection(pager, deadline_s)
    run(pager, collection)
    if collection.error is not None:
        raise collection.error
    return collection.removed_pages
