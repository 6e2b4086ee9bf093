"""How the engines of one daemon share its memory: arenas under one cap, weights and workspace beside them; pure.

The arenas of all engines together stay as large as those that the first one got alone. One that comes later takes its
part of them from the others, which shrink; when an engine ends, the others get its part back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Arenas(NamedTuple):
    """Memory for pages, in bytes."""

    device: int
    host: int


class Held(NamedTuple):
    """What an engine may use, in bytes. `fixed`: its weights in memory, and its workspace."""

    arenas: Arenas
    fixed: int


class Division(NamedTuple):
    """Arenas of those that run, by name, once a newcomer has its own."""

    others: dict[str, Arenas]
    newcomer: Arenas


def divide(usable_bytes: int, held: Mapping[str, Held], fixed_bytes: int, least_device_bytes: int) -> Division | None:
    """Room for one more engine beside those that run; None when there is none.

    `usable_bytes`: what all engines together may use. `fixed_bytes`: the newcomer's weights and workspace. Every engine
    keeps at least `least_device_bytes` on the device.
    """
    total = _total(held)
    if total.device + total.host + sum(one.fixed for one in held.values()) + fixed_bytes > usable_bytes:
        return None
    count = len(held) + 1
    part = Arenas(total.device // count, total.host // count)
    if part.device < least_device_bytes:
        return None
    others = {
        name: Arenas(min(one.arenas.device, part.device), min(one.arenas.host, part.host)) for name, one in held.items()
    }
    return Division(others, left_of(total, others))


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


def _total(held: Mapping[str, Held]) -> Arenas:
    return Arenas(sum(one.arenas.device for one in held.values()), sum(one.arenas.host for one in held.values()))
