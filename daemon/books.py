"""The books of memory: what the engines of one daemon have of it, and what is left for one more. Nothing here waits.

All engines that run share one memory: the computer's, or a card's (`on_card`). Below a card the computer's memory has
the pages that the card has no room for, which they share as well.

**How much of a card there is** no single figure tells. NVML says what is free now, which counts what engines have taken
and not what they may still take: their workspace comes with the first long prompt. The books say what engines may take,
and not what other programs do meanwhile. So free memory and what is booked make up together all that engines can have,
but for workspaces that have not been taken: these count only as far as the last look vouches for them. An engine that
starts or ends is somewhere between nothing and what is booked for it: nobody plans with a card then.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from tierd.daemon import room
from tierd.daemon.card_memory import CardMemory
from tierd.daemon.config import Settings
from tierd.daemon.errors import OutOfSpace
from tierd.daemon.need import Need
from tierd.daemon.plan.auto import LEAST_ARENA_BYTES
from tierd.daemon.room import Arenas, Division, Held
from tierd.daemon.units import human_bytes


@dataclass(slots=True)
class Books:
    """Threading: for one event loop.

    Attributes:
        held: what engines may use, by model; `needs` the same models' needs.
        yielded: those that have less on the device than is booked, and how much.
        auto_cap: of all arenas together, as the daemon chose it; `cap` with what was resized by hand.
        usable_bytes: of the memory that they share.
        card_bytes: all that a card has; 0 without one.
    """

    settings: Settings
    held: dict[str, Held] = field(default_factory=dict)
    needs: dict[str, Need] = field(default_factory=dict)
    yielded: dict[str, int] = field(default_factory=dict)
    auto_cap: Arenas = Arenas(0, 0)
    cap: Arenas = Arenas(0, 0)
    usable_bytes: int = 0
    card_bytes: int = 0

    def keep(self, names: AbstractSet[str]) -> None:
        """Forget what all other engines had."""
        self.held = {name: held for name, held in self.held.items() if name in names}
        self.needs = {name: need for name, need in self.needs.items() if name in names}
        self.yielded = {name: size for name, size in self.yielded.items() if name in names}

    @property
    def on_card(self) -> bool:
        """Whether the memory that is shared is a card's."""
        return any(one.apart for one in self.held.values())

    @property
    def others_bytes(self) -> int:
        """Of a card, that other programs hold."""
        return max(self.card_bytes - self.usable_bytes, 0)

    @property
    def least_device_bytes(self) -> int:
        """What every engine keeps for pages."""
        asked = self.settings.device_mem
        return LEAST_ARENA_BYTES if asked is None else min(asked // 4, LEAST_ARENA_BYTES)

    def of_card(self, card: CardMemory) -> int:
        """Bytes of a card that all engines together may have, see above; none of them starts or ends."""
        spared = sum(max(self.held[name].arenas.device - size, 0) for name, size in self.yielded.items())
        taken = sum(one.total for one in self.held.values()) - spared
        seen = card.free_bytes + taken
        sure = seen - sum(one.workspace for one in self.held.values())
        return min(seen, max(self.usable_bytes, sure), card.total_bytes)

    def look(self, card: CardMemory | None) -> None:
        """What there is of a card now; it may have gone."""
        if card is not None:
            self.usable_bytes = self.of_card(card)
            self.card_bytes = card.total_bytes

    def arenas_beside(self, fixed_bytes: int) -> Arenas:
        """For the arenas of all together, beside weights and workspace of all and `fixed_bytes` more. On a card they
        get what these leave, but no more than somebody asked for, and what is to stay free for other programs does."""
        if not self.on_card:
            return self.cap
        fixed_bytes += min(self.settings.yield_device_mem, self.others_bytes)
        left = self.usable_bytes - fixed_bytes - sum(one.weights + one.workspace for one in self.held.values())
        if self.settings.device_mem is not None:
            left = min(left, max(self.settings.device_mem, sum(one.arenas.device for one in self.held.values())))
        return Arenas(max(left, 0), self.cap.host)

    def left_for(self, division: Division, fixed_bytes: int) -> Arenas:
        """What the others have left for the arenas of a newcomer: some of them may have kept what they had."""
        kept = room.total_of(one.arenas for one in self.held.values())
        if self.on_card:
            return room.left_of(self.arenas_beside(fixed_bytes), {"": kept})
        wanted = room.total_of((*division.others.values(), division.newcomer))
        cap = Arenas(max(self.cap.device, wanted.device), max(self.cap.host, wanted.host))
        return room.left_of(cap, {"": kept})

    def regrown(self) -> dict[str, Arenas]:
        """Arenas of those that stay when one has ended."""
        return room.regrown(self.arenas_beside(0), self.held)

    def restored(self, before: Mapping[str, Held]) -> dict[str, Arenas]:
        """Arenas of those that made room for nobody: at least as before, unless that is not there any more."""
        all_of_it = self.arenas_beside(0)
        is_there = room.total_of(one.arenas for one in before.values()).device <= all_of_it.device
        return room.regrown(all_of_it, before if is_there or not self.on_card else self.held)

    def divide(self, fixed_bytes: int, wish: Mapping[str, int]) -> tuple[Division | None, bool]:
        """Room for one more engine, and whether it has what somebody once gave it by hand: it does where that fits."""

        def divided(wished: Arenas | None) -> Division | None:
            if self.on_card:
                total = self.arenas_beside(fixed_bytes)
                return room.divide_apart(total, self.held, self.least_device_bytes, wished)
            return room.divide(self.usable_bytes, self.held, fixed_bytes, self.least_device_bytes, wished)

        part = divided(None)
        if part is None or not wish.keys() & {"device_bytes", "host_bytes"}:
            return part, False
        device, host = part.newcomer
        found = divided(Arenas(wish.get("device_bytes", device), wish.get("host_bytes", host)))
        return found or part, found is not None

    def weights_to_try(self, need: Need, wish: Mapping[str, int]) -> list[int]:
        """Bytes of weights for one more engine: as somebody once gave it by hand, then as the settings say if less."""
        asked = self.settings.weights_mem
        unasked_bytes = need.weights_bytes if asked is None else min(asked, need.weights_bytes)
        wished_bytes = min(wish.get("weights_bytes", unasked_bytes), need.weights_bytes)
        return [wished_bytes] if wished_bytes <= unasked_bytes else [wished_bytes, unasked_bytes]

    def auto_bytes(self, name: str, size: str) -> int:
        """One of the sizes of a running engine as the daemon would choose it, beside the others that run."""
        if size == "weights_bytes":
            return self.needs[name].sizes.weights_bytes
        if self.on_card and size == "device_bytes":  # it depends on weights
            part = self.arenas_beside(0).device // len(self.held)
            return part if len(self.held) > 1 else min(part, self.needs[name].sizes.device_bytes)
        part = self.auto_cap.device if size == "device_bytes" else self.auto_cap.host
        return part // max(len(self.held), 1)

    def most_bytes(self, name: str) -> int:
        """What a model may have: what the others leave, and alone as much as it gets unasked."""
        others = {model: held for model, held in self.held.items() if model != name}
        left_bytes = room.left_beside(self.usable_bytes, others)
        need = self.needs[name]
        return left_bytes if others else max(left_bytes, need.held(need.sizes).total)

    def check_fits(self, name: str, held: Held, wanted: Mapping[str, Any]) -> None:
        """Raises OutOfSpace for a model that is to have more than it has and than what is left beside all else."""
        whole = self.needs[name].weights_bytes
        now = {"device": held.arenas.device, "host": held.arenas.host, "weights": held.weights}
        named = {tier: size for tier in now if (size := wanted.get(f"{tier}_bytes")) is not None}
        if "weights" in named:
            named["weights"] = min(named["weights"], whole)
        then, most_bytes = now | named, max(self.most_bytes(name), held.total)
        if held.apart:  # the engine knows how much of the computer's memory there is
            named.pop("host", None)
            del then["host"]
        if not named or sum(then.values()) + held.workspace <= most_bytes:
            return
        tier = max(named, key=lambda each: then[each] - now[each])
        size = then[tier]
        left_bytes = max(most_bytes - held.workspace - sum(then.values()) + size, 0)
        beside, less = ("pages", "--device-mem") if tier == "weights" else ("weights", "--weights-mem")
        flags = " ".join(f"--{each}-mem {size // 10**6}MB" for each, size in (named | {tier: left_bytes}).items())
        does = f"`tierd resize {name} {flags}` does; " if left_bytes else ""
        raise OutOfSpace(
            f"{human_bytes(size)} of {tier} memory do not fit: {beside}, workspace and other models leave "
            f"{human_bytes(left_bytes)} of {human_bytes(self.usable_bytes)} for it",
            hint=f"{does}less {less} leaves more",
            param=f"{tier}_bytes",
        )

    def book(self, name: str, need: Need, held: Held, later_device_bytes: int) -> None:
        """One more engine. `later_device_bytes`: for its pages on a card when other programs have left it: what these
        hold now is the pages' then, where somebody watches for that."""
        self.needs[name], self.held[name] = need, held
        if len(self.held) == 1:
            self.cap = held.arenas
        taken = room.total_of(one.arenas for one in self.held.values())
        self.cap = Arenas(max(self.cap.device, taken.device), max(self.cap.host, taken.host))
        device = held.arenas.device
        if self.settings.yield_device_mem and len(self.held) == 1 and device == need.sizes.device_bytes:
            if device < later_device_bytes:
                self.held[name] = held._replace(arenas=held.arenas._replace(device=later_device_bytes))
                self.yielded[name] = device

    def resized(self, name: str, arenas: Arenas, weights_bytes: int) -> None:
        """An engine has these by the hand of somebody: the cap is another by as much."""
        held = self.held[name]
        device, host = held.arenas
        self.cap = Arenas(self.cap.device + arenas.device - device, self.cap.host + arenas.host - host)
        self.held[name] = held._replace(arenas=arenas, weights=weights_bytes)
