"""Small stand-ins: a decoder whose logits are a function of what the pages say, and a simple page table."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from tierd.tiers.errors import TierFull

PAGE = 4
VOCAB = 64
RECORD = PAGE * 8  # token and position of each place, int32


class FakeDecoder:
    """Writes (token, position) into the pages; a row's logits depend on all it reads back at its positions and before.

    So a wrong page, a stale page or a wrong slot gives other tokens, as in a real model.
    """

    def __init__(self) -> None:
        self.fail_with: Exception | None = None
        self.rows = 0
        self.batches: list[int] = []

    def forward(self, arena, tokens, positions, row_seq, page_table, page_offsets, logit_rows):
        if self.fail_with is not None:
            raise self.fail_with
        self.rows += len(tokens)
        self.batches.append(len(tokens))
        view = arena.view(np.int32).reshape(arena.shape[0], PAGE, 2)
        for row, token in enumerate(tokens):
            pages = page_table[page_offsets[row_seq[row]] : page_offsets[row_seq[row] + 1]]
            view[pages[positions[row] // PAGE], positions[row] % PAGE] = (token, positions[row])
        out = np.empty((len(logit_rows), VOCAB), dtype=np.float32)
        for place, row in enumerate(logit_rows):
            pages = page_table[page_offsets[row_seq[row]] : page_offsets[row_seq[row] + 1]]
            history = view[pages].reshape(-1, 2)[: positions[row] + 1]
            out[place] = logits_for(history[:, 0], history[:, 1])
        return out


def logits_for(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    digest = hashlib.blake2b(tokens.astype(np.int32).tobytes() + positions.astype(np.int32).tobytes()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little")).standard_normal(VOCAB).astype(np.float32) * 3


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """The greedy answer of the fake decoder."""
    tokens = list(prompt)
    for _ in range(count):
        history = np.array(tokens, dtype=np.int32)
        tokens.append(int(np.argmax(logits_for(history, np.arange(len(tokens), dtype=np.int32)))))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class FakeLease:
    salt: bytes
    places: list[tuple] = field(default_factory=list)  # (key, slot or None)
    num_tokens: int = 0
    hit_device: int = 0
    hit_host: int = 0
    hit_nvme: int = 0
    ready: bool = False
    slots: list[int] = field(default_factory=list)
    countdown: int = 0


@dataclass
class FakeDevice:
    """The counts of the real arena."""

    pager: FakePager

    @property
    def slots(self) -> int:
        return self.pager.arena.shape[0]

    @property
    def num_free(self) -> int:
        return len(self.pager.free)

    @property
    def cached(self) -> int:
        return sum(slot not in self.pager.pins for slot in self.pager.known.values())


class FakePager:
    """Device slots, a cache of full pages by their tokens, and a lower tier that takes `delay` polls to read."""

    def __init__(self, slots: int, delay: int = 0) -> None:
        self.arena = np.zeros((slots, RECORD), dtype=np.uint8)
        self.delay = delay
        self.free = list(range(slots))
        self.pins: dict[int, int] = {}  # slot -> leases
        self.known: dict[tuple, int] = {}  # (salt, *tokens) -> slot
        self.lower: dict[tuple, bytes] = {}
        self.leases: list[FakeLease] = []
        self.fail_on: dict[str, Exception] = {}
        self.flushed = 0
        self.device = FakeDevice(self)
        self.residency = SimpleNamespace(dirty={})
        self.writeback = SimpleNamespace(quiet=True)

    def _maybe_fail(self, name: str) -> None:
        if name in self.fail_on:
            raise self.fail_on[name]

    def match(self, tokens, salt=b""):
        self._maybe_fail("match")
        lease = FakeLease(salt)
        for end in range(PAGE, len(tokens), PAGE):
            key = (salt, *tokens[:end])
            slot = self.known.get(key)
            if slot is not None:
                self._pin(slot)
                lease.hit_device += PAGE
            elif key in self.lower:
                lease.hit_host += PAGE
            else:
                break
            lease.places.append((key, slot))
        lease.num_tokens = len(lease.places) * PAGE
        self.leases.append(lease)
        return lease

    def fetch(self, lease, deadline_s):
        self._maybe_fail("fetch")
        lease.countdown = self.delay if lease.hit_host else 0
        self._try_fetch(lease)

    def _try_fetch(self, lease) -> None:
        if lease.countdown > 0:
            lease.countdown -= 1
            return
        for place, (key, slot) in enumerate(lease.places):
            if slot is not None:
                continue
            slot = self.known.get(key)
            if slot is None:
                slot = self._take()
                if slot is None:
                    return
                self.arena[slot] = np.frombuffer(self.lower[key], dtype=np.uint8)
                self.known[key] = slot
            self._pin(slot)
            lease.places[place] = (key, slot)
        lease.slots = [slot for _key, slot in lease.places]
        lease.ready = True

    def _pin(self, slot) -> None:
        self.pins[slot] = self.pins.get(slot, 0) + 1

    def _unpin(self, slot) -> None:
        self.pins[slot] -= 1
        if not self.pins[slot]:
            del self.pins[slot]

    def _take(self):
        if self.free:
            return self.free.pop(0)
        for key, slot in self.known.items():
            if slot not in self.pins:
                self.lower[key] = self.arena[slot].tobytes()
                del self.known[key]
                self.arena[slot] = 0xAA
                return slot
        return None

    def allocate(self, lease, count):
        self._maybe_fail("allocate")
        if len(lease.slots) + count > self.arena.shape[0]:
            raise TierFull("no slots")
        if self.device.num_free + self.device.cached < count:
            return None
        got = [self._take() for _ in range(count)]
        for slot in got:
            self._pin(slot)
        lease.slots.extend(got)
        return got

    def commit(self, lease, tokens):
        self._maybe_fail("commit")
        for place in range(len(tokens) // PAGE):
            key = (lease.salt, *tokens[: (place + 1) * PAGE])
            other = self.known.get(key)
            if other is None:
                self.known[key] = lease.slots[place]
            elif other != lease.slots[place]:
                self._unpin(lease.slots[place])
                self.free.append(lease.slots[place])
                self._pin(other)
                lease.slots[place] = other

    def release(self, lease, tokens):
        self._maybe_fail("release")
        self.leases.remove(lease)
        if not lease.ready:
            for _key, slot in lease.places:
                if slot is not None:
                    self._unpin(slot)
            return
        self.commit(lease, tokens)
        named = set(self.known.values())
        for slot in lease.slots:
            self._unpin(slot)
            if slot not in named:
                self.free.append(slot)

    def poll(self, now_s):
        waiting = [lease for lease in self.leases if not lease.ready]
        for lease in waiting:
            self._try_fetch(lease)
        return bool(waiting)

    def flush(self, deadline_s):
        self.flushed += 1
        return 0

    def check(self) -> list[str]:
        named = set(self.known.values())
        slots = len(self.free) + len(named | set(self.pins))
        findings = []
        if slots != self.arena.shape[0] or set(self.free) & (named | set(self.pins)):
            findings.append(f"ledger: {slots} of {self.arena.shape[0]}")
        return findings
