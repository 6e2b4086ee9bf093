"""The whole pager against a plain model, in every order of events that hypothesis finds.

The model: a sequence is its tokens, and the bytes of a token follow from the tokens up to it. Whatever the pager did
(shared, swapped, copied, evicted, wrote, reloaded, lost), the bytes under a ready lease are those.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.tiers.fakes import PAGE_TOKENS, ManualMover, MemoryStore, Rig
from tierd.tiers.errors import LostReason, PageLost, StoreFull, TierFull
from tierd.tiers.lease import Lease
from tierd.tiers.page import PageKey

TOKENS = st.integers(1, 2)
SALTS = st.sampled_from([b"", b"", b"tenant"])


@dataclass
class Sequence:
    lease: Lease
    tokens: list[int]
    salt: bytes
    computed: int = -1  # tokens whose bytes are in the pages; -1: the lease was not ready yet
    forks: int = field(default=0)


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
    @rule(data=st.data(), more=st.lists(TOKENS, max_size=6))
    def compute(self, data: st.DataObject, more: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        lease = sequence.lease
        if not lease.ready:
            self.rig.pager.fetch(lease, self.rig.now_s + 1)
            return
        self._see_ready(sequence)
        tokens = sequence.tokens + (more if sequence.computed == len(sequence.tokens) else [])
        need = -(-len(tokens) // PAGE_TOKENS) - len(lease.slots)
        if need > 0:
            try:
                if self.rig.pager.allocate(lease, need) is None:
                    return
            except TierFull:
                assert len(lease.slots) + need > self.device
                return
        sequence.tokens = tokens
        self.rig.write(lease, tokens, sequence.computed, sequence.salt)
        sequence.computed = len(tokens)
        self.rig.pager.commit(lease, tokens)
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
        if sequence.computed < 0:
            return
        tokens = sequence.tokens[: sequence.computed]
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
        self.rig.pager.gc(self.rig.now_s)

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
            if sequence.lease.ready:
                self._see_ready(sequence)
                self.rig.expect(sequence.lease, sequence.tokens[: sequence.computed], sequence.salt)

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

    def _see_ready(self, sequence: Sequence) -> None:
        if sequence.computed < 0:
            sequence.computed = sequence.lease.num_tokens

    def _end(self, sequence: Sequence) -> None:
        self.rig.pager.release(sequence.lease, sequence.tokens[: max(0, sequence.computed)])

    @staticmethod
    def _shared(left: list[int], right: list[int]) -> int:
        pairs = enumerate(zip(left, right, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


TestPagerMachine = PagerMachine.TestCase
TestPagerMachine.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.generate],  # shrinking a failure takes minutes; the simulator below has seeds
)


class Simulator:
    """The same model driven by a seed, with the odds of a busy daemon: most of it is eviction and reload."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.device = self.rng.randint(2, 12)
        self.host = self.rng.choice([0, 1, 3, 8, 20])
        capacity = self.rng.choice([None, 3, 10, 40, 1000])
        self.store = None if capacity is None else MemoryStore(capacity)
        if self.store is not None:
            self.store.before_read = lambda dest: dest.fill(0xAA)
            self.store.fail_read = self._fail_read
        self.loss_rate = self.rng.choice([0, 0, 0.05, 0.3])
        self.queue = self.rng.choice([2, 6, 1000])
        self.rig = self._build()
        self.live: list[Sequence] = []
        self.history: list[list[int]] = [[]]

    def run(self, steps: int) -> None:
        actions = [self.start] * 3 + [self.compute] * 6 + [self.end] * 3 + [self.fork] + [self.work] * 8 + [self.tick]
        for step in range(steps):
            self.rng.choice(actions)()
            if self.rng.random() < 0.004:
                self.restart()
            if self.rng.random() < 0.02:
                self.fill_disk()
            if step % 10 == 0:
                self.rig.check()
            for sequence in self.live:
                if sequence.lease.ready:
                    self.rig.expect(sequence.lease, sequence.tokens[: max(0, sequence.computed)])
        while self.live:
            self.end()
        self.rig.settle()
        self.rig.check()
        assert self.rig.pager.statistics().device.used_pages == 0
        lease = self.rig.pager.match([])
        everything = [9] * (self.device * PAGE_TOKENS)
        self.rig.grow(lease, everything, 0)  # whatever is cached, the whole device can be had
        self.rig.expect(lease, everything)
        self.rig.pager.release(lease, everything)
        self.rig.settle()
        self.rig.check()

    def start(self) -> None:
        if len(self.live) >= 3:
            return
        base = self.rng.choice(self.history[-30:])
        base = base[: self.rng.randint(0, len(base))] if self.rng.random() < 0.3 else base
        more = [self.rng.randint(1, 3) for _ in range(self.rng.randint(1, 10))]
        tokens = (base + more)[-self.device * PAGE_TOKENS :]
        lease = self.rig.pager.match(tokens)
        self.rig.pager.fetch(lease, self.rig.now_s + self.rng.choice([0.02, 1.0, 1e6]))
        self.live.append(Sequence(lease, tokens, b""))

    def compute(self) -> None:
        if not self.live:
            return
        sequence = self.rng.choice(self.live)
        lease = sequence.lease
        if not lease.ready:
            return
        if sequence.computed < 0:
            sequence.computed = lease.num_tokens
            self.rig.expect(lease, sequence.tokens[: sequence.computed])
        end = min(sequence.computed + self.rng.randint(1, 6), self.device * PAGE_TOKENS)
        while len(sequence.tokens) < end:
            sequence.tokens.append(self.rng.randint(1, 3))
        need = -(-end // PAGE_TOKENS) - len(lease.slots)
        if need > 0 and self.rig.pager.allocate(lease, need) is None:
            if self.rng.random() < 0.2:  # preempted
                self.live.remove(sequence)
                self._release(sequence)
            return
        tokens = sequence.tokens[:end]
        self.rig.write(lease, tokens, sequence.computed)
        sequence.computed = max(end, sequence.computed)
        self.rig.pager.commit(lease, sequence.tokens[: sequence.computed])

    def end(self) -> None:
        if self.live:
            self._release(self.live.pop(self.rng.randrange(len(self.live))))

    def fork(self) -> None:
        ready = [sequence for sequence in self.live if sequence.computed >= 0]
        if ready and len(self.live) < 4:
            sequence = self.rng.choice(ready)
            tokens = sequence.tokens[: sequence.computed]
            self.live.append(Sequence(self.rig.pager.fork(sequence.lease, tokens), list(tokens), b""))

    def work(self) -> None:
        for _ in range(self.rng.randint(0, 3)):
            if self.rig.manual.queued:
                self.rig.manual.run(self.rng.randrange(self.rig.manual.queued))
        if self.rng.random() < 0.7:
            self.rig.poll()

    def tick(self) -> None:
        self.rig.now_s += self.rng.choice([0.01, 0.1, 6.0, 300.0])

    def fill_disk(self) -> None:
        if self.store is not None:
            self.store.fail_write = StoreFull("full") if self.rng.random() < 0.3 else None

    def restart(self) -> None:
        if self.rng.random() < 0.5:
            while self.live:
                self.end()
            self.rig.pager.flush(self.rig.now_s + 1)
        self.live.clear()
        self.rig.close()
        self.rig = self._build()

    def _build(self) -> Rig:
        mover = ManualMover(1, capacity=self.queue)
        return Rig(device=self.device, host=self.host, store=self.store, mover=mover)

    def _release(self, sequence: Sequence) -> None:
        tokens = sequence.tokens[: max(0, sequence.computed)]
        self.rig.pager.release(sequence.lease, tokens)
        if tokens:
            self.history.append(tokens)

    def _fail_read(self, _key: PageKey) -> Exception | None:
        return PageLost(LostReason.PAYLOAD) if self.rng.random() < self.loss_rate else None


@pytest.mark.parametrize("seed", range(40))
def test_simulation(seed: int) -> None:
    Simulator(seed).run(400)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_many_simulations(seed: int) -> None:
    Simulator(seed).run(2000)
