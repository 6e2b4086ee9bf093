"""What an operator does to a simulated engine while it runs."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

from tests.sim.clock import Clock
from tests.sim.engine import Engine
from tierd.tiers.errand import Errand
from tierd.tiers.errors import PrefixInUse, PrefixNotDurable, PrefixUnknown, StoreError, TierFull
from tierd.tiers.upkeep import Collection
from tierd.tiers.verify import Verification


class Operated:
    """Part of a `Simulation`. Each of its actions is one of an operator, who is told what can't be."""

    engine: Engine
    rng: random.Random
    clock: Clock
    _kept: set[bytes]
    _resizing: bool
    _errands: list[Errand]
    _note: Callable[[str], None]

    def _operate(self) -> None:
        """What an operator may ask for at any time."""
        pager, deadline_s = self.engine.pager, self.clock() + 0.5
        self._kept = set()  # what follows may forget pages
        actions: list[Callable[[], object]] = [
            pager.clear,
            lambda: self._errands.append(Collection(pager, deadline_s)),
            lambda: self._errands.append(Verification(pager, True, deadline_s)),
            lambda: self._errands.append(Verification(pager, False, deadline_s)),
            lambda: pager.flush(deadline_s),
            pager.page_map,
        ]
        with contextlib.suppress(StoreError):  # the operator is told
            self.rng.choice(actions)()

    def _advance_errands(self) -> None:
        """A slice each, between two turns; those of an engine that is gone went with it."""
        running = [errand for errand in self._errands if errand._pager is self.engine.pager]
        self._errands = [errand for errand in running if not errand.advance()]

    def _resize(self) -> None:
        """The operator gives the arenas other sizes, now and then impossible ones."""
        engine, rng = self.engine, self.rng
        sizes = [
            rng.choice([None, rng.randint(0, arena.slots), rng.randint(0, arena.max_slots)])
            for arena in (engine.device, engine.host)
        ]
        deadline_s, self._resizing = self.clock() + rng.choice([0.0, 0.05, 2.0]), True
        with contextlib.suppress(TierFull):  # the operator is told
            engine.pager.resizer.start(
                None if sizes[0] is None else max(sizes[0], 1), sizes[1], deadline_s,
                lambda reason: self._note(f"resized: {reason or sizes}"),
            )  # fmt: skip

    def _pin(self) -> None:
        """The operator wants a prefix kept, on disk or out of memory, or lets go of one, or forgets it."""
        prefixes = self.engine.prefixes
        found, _ = prefixes.listing(100)
        if not found:
            return
        chosen = self.rng.choice(found).id
        verbs: list[Callable[[str], object]] = [
            prefixes.pin,
            prefixes.pin,
            prefixes.unpin,
            prefixes.drop,
            prefixes.evict,
            lambda prefix: prefixes.persist(prefixes.way(prefix)),
        ]
        with contextlib.suppress(PrefixUnknown, PrefixInUse, PrefixNotDurable, TierFull):  # the operator is told
            self.rng.choice(verbs)(chosen)
        self._kept = {node.key for node in self.engine.pager.index.nodes.values() if node.kept}
