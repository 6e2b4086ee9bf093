"""How much of a card's memory the pages of all engines give to other programs, and when they take it back; pure.

A reserve of the card is to stay free for others. What is missing of it is given by the device arenas, but no more than
others hold, for they can't be the reason for more, and never what running requests need. It comes back when others have
left so much that the reserve and a band above it stay free, for a while without a break: so neither a figure that
wavers nor the memory that was just given moves anything back and forth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tierd.daemon.plan.cards import GRAIN_BYTES


class Rule(NamedTuple):
    """What the user wants, and how hastily.

    Attributes:
        reserve_bytes: of the card, to stay free for others.
        band_bytes: free beyond the reserve before memory is taken back; some grains at least.
        step_bytes: given at once at most: an arena frees its memory when all that lay there has moved, so a few smaller
            steps help sooner than a large one.
        calm_s: how long there must be room before memory is taken back.
    """

    reserve_bytes: int
    band_bytes: int
    step_bytes: int = 512 << 20
    calm_s: float = 30.0

    @classmethod
    def of(cls, reserve_bytes: int) -> Rule:
        """The rule for a reserve."""
        return cls(reserve_bytes, max(4 * GRAIN_BYTES, reserve_bytes // 8))


class Card(NamedTuple):
    """Memory of the card. `others_bytes`: what programs other than our engines hold; of these none counts, neither one
    that starts nor one that is silent."""

    free_bytes: int
    others_bytes: int


class DeviceArena(NamedTuple):
    """Pages of one engine on the card: what it may have, has, and can't do without now."""

    configured_bytes: int
    current_bytes: int
    needed_bytes: int

    @property
    def given(self) -> int:
        """Grains that it has less than it may."""
        return max(self.configured_bytes - self.current_bytes, 0) // GRAIN_BYTES

    @property
    def most(self) -> int:
        """Grains that it could give altogether; what it has given, at least."""
        floor_bytes = min(self.needed_bytes, self.current_bytes)
        return max((self.configured_bytes - floor_bytes) // GRAIN_BYTES, self.given)


class Decision(NamedTuple):
    """`sizes`: those that change, in bytes. `calm_since_s`: to be handed in with the next figures."""

    sizes: dict[str, int]
    calm_since_s: float | None


def decide(
    rule: Rule, card: Card, arenas: Mapping[str, DeviceArena], calm_since_s: float | None, now_s: float
) -> Decision:
    """The sizes of the arenas from now on. `calm_since_s`: of the last decision; None at first."""
    given = {name: arena.given for name, arena in arenas.items()}
    now = sum(given.values())
    goal = _goal(card, arenas, rule.reserve_bytes)
    if card.free_bytes < rule.reserve_bytes and goal > now:
        goal = min(goal, now + max(rule.step_bytes // GRAIN_BYTES, 1))
        return Decision(_sizes(arenas, given, goal), None)
    goal = _goal(card, arenas, rule.reserve_bytes + rule.band_bytes)
    if goal >= now:
        return Decision({}, None)
    since_s = now_s if calm_since_s is None else calm_since_s
    if now_s - since_s < rule.calm_s:
        return Decision({}, since_s)
    return Decision(_sizes(arenas, given, goal), None)


def _goal(card: Card, arenas: Mapping[str, DeviceArena], free_bytes: int) -> int:
    """Grains that all arenas together have to give for so much to be free."""
    missing = sum(max(arena.configured_bytes - arena.current_bytes, 0) for arena in arenas.values())
    wanted = -(-min(missing + free_bytes - card.free_bytes, card.others_bytes) // GRAIN_BYTES)
    return max(0, min(wanted, sum(arena.most for arena in arenas.values())))


def _sizes(arenas: Mapping[str, DeviceArena], given: dict[str, int], goal: int) -> dict[str, int]:
    """The sizes with so many grains given: by those that have the most to spare, and back to those that miss most."""
    then = {name: given[name] for name in sorted(given)}
    spare = {name: arenas[name].most - count for name, count in then.items()}
    for _ in range(goal - sum(given.values())):
        name = max(spare, key=spare.__getitem__)
        then[name] += 1
        spare[name] -= 1
    for _ in range(sum(given.values()) - goal):
        name = max(then, key=then.__getitem__)
        then[name] -= 1
    return {
        name: arenas[name].configured_bytes - count * GRAIN_BYTES
        for name, count in then.items()
        if count != given[name]
    }
