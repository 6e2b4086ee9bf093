"""How the engines of one daemon share its memory: arenas under one cap, weights and workspace beside them; pure.

The arenas of all engines together stay as large as those that the first one got alone. One that comes later takes its
part of them from the others, which shrink; when an engine ends, the others get its part back.

On a card weights and pages have one memory, and pages get all that weights leave: there a newcomer's weights, too, come
out of the arenas of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Arenas(NamedTuple):
    """Memory for pages, in bytes."""

    device: int
    host: int


class Held(NamedTuple):
    """What an engine may use, in bytes. `weights`: those in memory. `apart`: all but the host's arena is a card's."""

    arenas: Arenas
    weights: int
    workspace: int
    apart: bool = False

    @property
    def total(self) -> int:
        """All of it in the memory that is shared: the computer's, or the card's."""
        arenas = self.arenas.device if self.apart else sum(self.arenas)
        return arenas + self.weights + self.workspace


class Division(NamedTuple):
    """Arenas of those that run, by name, once a newcomer has its own."""

    others: dict[str, Arenas]
    newcomer: Arenas

    def freed_bytes(self, held: Mapping[str, Held]) -> int:
        """What those that run give up for it."""
        now, then = total_of(one.arenas for one in held.values()), total_of(self.others.values())
        return now.device + now.host - then.device - then.host


def divide(
    usable_bytes: int, held: Mapping[str, Held], fixed_bytes: int, least_device_bytes: int, wish: Arenas | None = None
) -> Division | None:
    """Room for one more engine beside those that run; None when there is none.

    `usable_bytes` as for `left_beside`. `fixed_bytes`: the newcomer's weights and workspace. Every engine
    keeps at least `least_device_bytes` on the device. `wish`: arenas that the newcomer is to have, instead of an equal
    part: out of those of the others, or beside equal parts of them where these don't have as much.
    """
    total = total_of(one.arenas for one in held.values())
    free_bytes = left_beside(usable_bytes, held) - fixed_bytes
    count = len(held) + 1
    part = Arenas(total.device // count, total.host // count)
    if free_bytes < 0 or part.device < least_device_bytes:
        return None
    if wish is None:
        others = _at_most(held, part)
        return Division(others, left_of(total, others))
    left = left_of(total, {"": wish})
    if wish.host <= total.host and left.device >= least_device_bytes * len(held):
        part = Arenas(left.device // len(held), left.host // len(held))
    division = Division(_at_most(held, part), wish)
    return division if wish.device + wish.host - division.freed_bytes(held) <= free_bytes else None


def divide_apart(
    total: Arenas, held: Mapping[str, Held], least_device_bytes: int, wish: Arenas | None = None
) -> Division | None:
    """The same on a card. `total`: of the arenas of all, the newcomer's among them; neither memory makes up for the
    other."""
    part = Arenas(total.device // (len(held) + 1), total.host // (len(held) + 1))
    if part.device < least_device_bytes:
        return None
    if wish is None:
        others = _at_most(held, part)
        return Division(others, left_of(total, others))
    left = Arenas(total.device - wish.device, total.host - wish.host)
    if left.device < least_device_bytes * len(held) or left.host < 0:
        return None
    return Division(_at_most(held, Arenas(left.device // len(held), left.host // len(held))), wish)


def left_beside(usable_bytes: int, held: Mapping[str, Held]) -> int:
    """What these engines leave of the memory that all together may use; negative when they have more than that."""
    return usable_bytes - sum(one.total for one in held.values())


def left_of(total: Arenas, taken: Mapping[str, Arenas]) -> Arenas:
    """What is left of a cap."""
    device = total.device - sum(arenas.device for arenas in taken.values())
    host = total.host - sum(arenas.host for arenas in taken.values())
    return Arenas(max(device, 0), max(host, 0))


def regrown(cap: Arenas, held: Mapping[str, Held]) -> dict[str, Arenas]:
    """Arenas of those that stay when one has ended: equal parts of the cap, and no engine gets less than it has."""
    count = max(len(held), 1)
    spare = left_of(cap, {name: one.arenas for name, one in held.items()})
    grown: dict[str, Arenas] = {}
    for name, one in sorted(held.items(), key=lambda item: item[1].arenas):  # the smallest has the most to get
        device = min(max(cap.device // count - one.arenas.device, 0), spare.device)
        host = min(max(cap.host // count - one.arenas.host, 0), spare.host)
        spare = Arenas(spare.device - device, spare.host - host)
        grown[name] = Arenas(one.arenas.device + device, one.arenas.host + host)
    return grown


def total_of(arenas: Iterable[Arenas]) -> Arenas:
    """All of them together."""
    device, host = 0, 0
    for one in arenas:
        device, host = device + one.device, host + one.host
    return Arenas(device, host)


def _at_most(held: Mapping[str, Held], part: Arenas) -> dict[str, Arenas]:
    return {
        name: Arenas(min(one.arenas.device, part.device), min(one.arenas.host, part.host)) for name, one in held.items()
    }
