"""When pages give memory of a card to other programs, how much, and when they take it back: over a card made up."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counts import counted
from tierd.daemon.plan.cards import GRAIN_BYTES
from tierd.daemon.yielding import Card, Decision, DeviceArena, Rule, decide

GIB = 1 << 30
RULE = Rule.of(2 * GIB)
ARENA = DeviceArena(8 * GIB, 8 * GIB, GIB)


class World:
    """A card of 24 GiB, 4 of them for weights, and arenas that do what is decided, as well as an engine can."""

    def __init__(
        self, arenas: Mapping[str, DeviceArena], rule: Rule = RULE, record_bytes: int = 1 << 20, others: int = 0
    ) -> None:
        self.arenas = {name: self._whole(arena, record_bytes) for name, arena in arenas.items()}
        self.rule, self.record_bytes, self.others = rule, record_bytes, others
        self.now_s, self.calm_since_s = 0.0, None
        self.total_bytes = 24 * GIB
        self.changes = 0

    @staticmethod
    def _whole(arena: DeviceArena, record_bytes: int) -> DeviceArena:
        return arena._replace(current_bytes=arena.current_bytes // record_bytes * record_bytes)

    @property
    def card(self) -> Card:
        mapped = sum(math.ceil(arena.current_bytes / GRAIN_BYTES) * GRAIN_BYTES for arena in self.arenas.values())
        return Card(max(self.total_bytes - 4 * GIB - mapped - self.others, 0), self.others)

    def look(self, seconds: float = 2.0) -> Decision:
        self.now_s += seconds
        decision = decide(self.rule, self.card, self.arenas, self.calm_since_s, self.now_s)
        self.calm_since_s = decision.calm_since_s
        for name, size in decision.sizes.items():
            arena = self.arenas[name]
            assert min(arena.needed_bytes, arena.current_bytes) <= size <= arena.configured_bytes
            self.arenas[name] = self._whole(arena._replace(current_bytes=size), self.record_bytes)
            self.changes += 1
        return decision

    def settle(self, seconds: float = 120.0) -> int:
        """Looks for so long; returns the changes in the second half of that time."""
        for _half in range(2):
            before = self.changes
            for _ in range(int(seconds / 4)):
                self.look()
        return self.changes - before

    def size(self, name: str = "a") -> int:
        return self.arenas[name].current_bytes


def test_nothing_happens_while_enough_is_free() -> None:
    world = World({"a": ARENA})
    assert world.settle() == 0 and world.changes == 0


def test_memory_is_given_in_steps_until_the_reserve_is_free() -> None:
    world = World({"a": ARENA}, others=11 * GIB)  # 1 GiB is free
    assert world.look().sizes == {"a": ARENA.configured_bytes - RULE.step_bytes}
    assert world.settle() == 0
    assert RULE.reserve_bytes <= world.card.free_bytes < RULE.reserve_bytes + GRAIN_BYTES


def test_what_running_requests_need_is_kept() -> None:
    world = World({"a": ARENA._replace(needed_bytes=7 * GIB)}, others=12 * GIB)
    assert world.settle() == 0 and world.size() == 7 * GIB


def test_others_get_no_more_than_they_hold() -> None:
    arena = DeviceArena(19 * GIB, 19 * GIB, GIB)  # of all that is there: the reserve was never free
    world = World({"a": arena}, others=GIB // 2)
    assert world.settle() == 0 and world.size() == 19 * GIB - GIB // 2
    assert World({"a": arena}).look().sizes == {}


def test_it_comes_back_when_it_has_been_free_for_a_while() -> None:
    world = World({"a": ARENA}, others=11 * GIB)
    world.settle()
    world.others = 2 * GIB
    assert not any(world.look().sizes for _ in range(int(RULE.calm_s / 2)))
    assert world.look().sizes == {"a": ARENA.configured_bytes}
    assert world.settle() == 0


def test_a_moment_without_the_other_program_brings_nothing_back() -> None:
    world = World({"a": ARENA}, others=11 * GIB)
    world.settle()
    before = world.changes
    for _ in range(20):
        world.others = 2 * GIB
        world.look(10.0)
        world.look(10.0)
        world.others = 11 * GIB
        world.look(10.0)
    assert world.changes == before


def test_a_little_more_room_than_the_reserve_brings_nothing_back() -> None:
    world = World({"a": ARENA}, others=11 * GIB)
    world.settle()
    world.others -= RULE.band_bytes // 2
    before = world.changes
    world.settle(400.0)
    assert world.changes == before
    world.others -= RULE.band_bytes
    world.settle(400.0)
    assert world.size() > ARENA.configured_bytes - GIB and world.card.free_bytes >= RULE.reserve_bytes


def test_those_give_that_have_most_to_spare() -> None:
    arenas = {"busy": DeviceArena(4 * GIB, 4 * GIB, 4 * GIB), "idle": DeviceArena(4 * GIB, 4 * GIB, GIB)}
    world = World(arenas, others=11 * GIB)
    world.settle()
    assert world.size("busy") == 4 * GIB and world.size("idle") == 3 * GIB


SIZES = st.integers(0, 20 * GIB)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    arenas = {}
    for name in draw(st.sampled_from(["a", "ab", "abc"])):
        configured = draw(st.integers(1 << 20, 6 * GIB))
        current = draw(st.integers(1 << 20, configured))
        arenas[name] = DeviceArena(configured, current, draw(st.integers(0, configured)))
    rule = Rule.of(draw(st.integers(1, 20 * GIB)))
    return World(arenas, rule, draw(st.integers(1 << 10, 8 << 20)), draw(SIZES))


@settings(max_examples=counted(2000, 25), deadline=None)
@given(worlds(), st.lists(SIZES, max_size=3))
def test_sizes_stay_within_bounds_and_come_to_rest(world: World, others: list[int]) -> None:
    """`World.look` checks the bounds. What others hold changes, and then never again."""
    for held in others:
        world.others = held
        for _ in range(10):
            world.look()
    world.settle(200.0)
    assert world.settle(200.0) == 0
    given_up = any(arena.given for arena in world.arenas.values())
    could = any(arena.most > arena.given for arena in world.arenas.values())
    if world.card.free_bytes < world.rule.reserve_bytes - GRAIN_BYTES and could:
        missing = sum(arena.configured_bytes - arena.current_bytes for arena in world.arenas.values())
        assert missing + len(world.arenas) * GRAIN_BYTES >= world.others, "more could be given, and others hold more"
    elif given_up:
        spare = len(world.arenas) * (GRAIN_BYTES + world.record_bytes)
        kept = world.rule.reserve_bytes + world.rule.band_bytes + GRAIN_BYTES + spare
        assert world.card.free_bytes < kept, "it is free and does not come back"


@settings(max_examples=counted(2000, 25), deadline=None)
@given(worlds(), st.floats(0, 1e6), st.none() | st.floats(0, 1e6))
def test_one_figure_decides_one_way(world: World, now_s: float, calm_since_s: float | None) -> None:
    decision = decide(world.rule, world.card, world.arenas, calm_since_s, now_s)
    assert decision == decide(world.rule, world.card, world.arenas, calm_since_s, now_s)
    grows = {size > world.arenas[name].current_bytes for name, size in decision.sizes.items()}
    assert len(grows) <= 1, "one gives while another takes"
