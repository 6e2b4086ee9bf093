"""The whole pager against a plain model, in every order of events that hypothesis finds.

The model: a sequence is its tokens, and the bytes of a token follow from the tokens up to it. Whatever the pager did
(shared, swapped, copied, evicted, wrote, reloaded, lost), the bytes under a ready lease are those.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.tiers.fakes import PAGE_TOKENS, Rig, gc, token_bytes
from tests.tiers.profiles import big, small
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers.errors import LostReason, PageLost, StoreFull, TierFull
from tierd.tiers.lease import Lease, LeaseState
from tierd.tiers.page import PageKey

TOKENS = st.integers(1, 2)
SALTS = st.sampled_from([b"", b"", b"tenant"])


@dataclass
class Sequence:
    lease: Lease
    tokens: list[int]
    salt: bytes
    computed: int = 0  # the next row to compute: every token before it has its bytes, holes of later losses apart


class PagerMachine(RuleBasedStateMachine):
    rig: Rig
    store: MemoryStore | None

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Sequence] = []
        self.history: dict[bytes, list[list[int]]] = {b"": [], b"tenant": []}

    @initialize(
        device=st.integers(1, 6), host=st.integers(0, 5), capacity=st.sampled_from([None, 0, 2, 5, 1000])
    )
    def build(self, device: int, host: int, capacity: int | None) -> None:
        self.device, self.host_slots = device, host
        self.store = None if capacity is None else MemoryStore(capacity)
        if self.store is not None:
            self.store.before_read = lambda dest: dest.fill(0xAA)
        self.rig = Rig(device=device, host=host, store=self.store)

    # The engine's side

    @precondition(lambda self: len(self.live) < 4)
    @rule(data=st.data(), salt=SALTS, more=st.lists(TOKENS, max_size=9), wait_s=st.sampled_from([0.0, 0.5, 1e6]))
    def start(self, data: st.DataObject, salt: bytes, more: list[int], wait_s: float) -> None:
        base: list[int] = []
        if self.history[salt]:
            base = data.draw(st.sampled_from(self.history[salt]))
            base = base[: data.draw(st.integers(0, len(base)))]
        tokens = base + more
        lease = self.rig.pager.match(tokens, salt)
        assert lease.num_tokens <= max(0, len(tokens) - 1)
        assert lease.num_tokens <= max((self._shared(tokens, known) for known in self.history[salt]), default=0)
        assert lease.hit_device + lease.hit_host + lease.hit_nvme == lease.num_tokens
        if data.draw(st.booleans()):
            self.rig.pager.fetch(lease, self.rig.now_s + wait_s)
        self.live.append(Sequence(lease, tokens, salt))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.lists(TOKENS, max_size=6), pages=st.integers(1, 4))
    def compute(self, data: st.DataObject, more: list[int], pages: int) -> None:
        """Some rows: from the first hole, or from where the sequence stands, as far as nothing has to be waited for."""
        sequence = data.draw(st.sampled_from(self.live))
        lease, pager = sequence.lease, self.rig.pager
        if lease.state is LeaseState.MATCHED:
            pager.fetch(lease, self.rig.now_s + 1)
            return
        start = self._advance(sequence)
        if start >= len(sequence.tokens):
            sequence.tokens = sequence.tokens + more
        end = min((start // PAGE_TOKENS + pages) * PAGE_TOKENS, lease.limit(start), len(sequence.tokens))
        if end <= start:
            return
        tokens = sequence.tokens[:end]
        try:
            if not pager.allocate(lease, start, end):
                return
        except TierFull:
            assert -(-end // PAGE_TOKENS) > pager.capacity_pages or pages > self.device
            return
        self.rig.write(lease, tokens, start, sequence.salt)
        pager.commit(lease, tokens)
        sequence.computed = end
        self.history[sequence.salt].append(list(tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self._end(sequence)

    @precondition(lambda self: self.live and len(self.live) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        if sequence.lease.state is LeaseState.MATCHED:
            return
        tokens = sequence.tokens[: self._advance(sequence)]
        if not sequence.lease.ready or len(tokens) < len(sequence.lease.nodes) * PAGE_TOKENS:
            return
        twin = self.rig.pager.fork(sequence.lease, tokens)
        assert twin.num_tokens <= len(tokens)
        self.live.append(Sequence(twin, list(tokens), sequence.salt))

    @precondition(lambda self: not self.live)
    @rule(data=st.data(), more=st.lists(TOKENS, min_size=1, max_size=12))
    def serve(self, data: st.DataObject, more: list[int]) -> None:
        base = data.draw(st.sampled_from(self.history[b""])) if self.history[b""] else []
        tokens = (base + more)[: self.device * PAGE_TOKENS]
        self.rig.serve(tokens)
        self.history[b""].append(tokens)

    # The world's side

    @rule(number=st.integers(0, 5))
    def run_a_job(self, number: int) -> None:
        if self.rig.manual.queued:
            self.rig.manual.run(number % self.rig.manual.queued)

    @rule()
    def poll(self) -> None:
        self.rig.poll()

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, 10.0]))
    def tick(self, seconds: float) -> None:
        self.rig.now_s += seconds

    @rule()
    def rest(self) -> None:
        self.rig.settle()

    @precondition(lambda self: self.store is not None)
    @rule(losses=st.integers(0, 3), reason=st.sampled_from(list(LostReason)[:-1]))
    def lose_pages(self, losses: int, reason: LostReason) -> None:
        left = [losses]

        def fail(_key: PageKey) -> Exception | None:
            left[0] -= 1
            return PageLost(reason) if left[0] >= 0 else None

        assert self.store is not None
        self.store.fail_read = fail

    @precondition(lambda self: self.store is not None)
    @rule(full=st.booleans())
    def fill_or_free_the_disk(self, full: bool) -> None:
        assert self.store is not None
        self.store.fail_write = StoreFull("the test's disk is full") if full else None

    @rule()
    def clear_or_collect(self) -> None:
        self.rig.pager.clear()

    @rule()
    def collect(self) -> None:
        gc(self.rig.pager, self.rig.now_s)

    @rule(flush=st.booleans(), finish=st.booleans())
    def restart(self, flush: bool, finish: bool) -> None:
        if finish:
            while self.live:
                self._end(self.live.pop())
        if flush:
            self.rig.pager.flush(self.rig.now_s + 1)
        self.rig.close()
        self.live.clear()  # without `finish` the engine died with its leases
        self.rig = Rig(device=self.device, host=self.host_slots, store=self.store)

    # What always holds

    @invariant()
    def books_balance(self) -> None:
        self.rig.check()

    @invariant()
    def bytes_are_right(self) -> None:
        for sequence in self.live:
            self._expect(sequence)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        while self.live:
            self._end(self.live.pop())
        self.rig.settle()
        self.rig.check()
        stats = self.rig.pager.statistics()
        assert stats.leases == stats.fetching == stats.device.used_pages == stats.device.in_flight_pages == 0
        assert stats.host.in_flight_pages == stats.host.used_pages == 0
        self.rig.pager.clear()
        self.rig.settle()
        assert self.rig.pager.statistics().known_pages == 0
        self.rig.check()
        self.rig.close()

    def _advance(self, sequence: Sequence) -> int:
        """Where the sequence goes on: at its first hole, or at its end."""
        lease = sequence.lease
        self.rig.pager.tables.refresh(lease)
        if lease.absent:
            lease.reached = max(lease.reached, sequence.computed)
            hole = min(lease.absent) * PAGE_TOKENS
            if hole < sequence.computed - sequence.computed % PAGE_TOKENS:
                sequence.computed = hole
        sequence.computed = min(lease.skip(sequence.computed), len(sequence.tokens))
        return sequence.computed

    def _expect(self, sequence: Sequence) -> None:
        """Every page that the lease can read now holds what its tokens say, holes before it or not."""
        lease, rig = sequence.lease, self.rig
        addresses = rig.pager.tables.addresses(lease, lease.num_pages)
        reached = max(lease.reached, sequence.computed) if lease.tail is None else len(lease.nodes) * PAGE_TOKENS
        wanted = token_bytes(sequence.tokens[:reached], sequence.salt)
        for place, address in enumerate(addresses.tolist()):
            if place in lease.absent or place in lease.filling:
                continue
            content = b"".join(wanted[place * PAGE_TOKENS : (place + 1) * PAGE_TOKENS])
            if address:
                found = rig.record_at(address)[: len(content)].tobytes()
            else:
                assert self.store is not None and lease.nodes[place].durable, f"page {place} is nowhere"
                row = self.store.rows.get(lease.nodes[place].key)  # it may be lost, and nobody has found out yet
                found = row[1][: len(content)] if row is not None else content
            assert found == content, f"page {place} of {lease} has wrong bytes"

    def _end(self, sequence: Sequence) -> None:
        done = self._advance(sequence) if sequence.lease.state is LeaseState.LIVE else 0
        self.rig.pager.release(sequence.lease, sequence.tokens[:done])

    @staticmethod
    def _shared(left: list[int], right: list[int]) -> int:
        pairs = enumerate(zip(left, right, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


TestPagerMachine = PagerMachine.TestCase
TestPagerMachine.settings = small(40, 50)


@pytest.mark.long
def test_pager_machine_at_length() -> None:
    run_state_machine_as_test(PagerMachine, settings=big(200, 150))
