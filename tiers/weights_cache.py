"""Experts at hand: as many as there are places for, from below where a layer gets what it needs.

Which experts a layer needs is known when its router has spoken. What is at hand can be computed on at once; the
others are fetched meanwhile, and come one by one. Guesses for the next layer are fetched behind them, into places of
experts that are used less than what was guessed. `weights_policy` says who has to go. Where the places are, and how
they are filled, is up to `Fetches`: memory that the disk fills, or a card's that is filled over its link.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tierd.tiers.errors import WeightsLost
from tierd.tiers.mover import JobClass
from tierd.tiers.weights_fetches import Fetches
from tierd.tiers.weights_policy import ExpertPolicy


class CacheStats(NamedTuple):
    """What has been asked of a cache."""

    uses: int  # experts that layers needed
    hits: int  # of those, that were there then
    guesses: int  # experts that were guessed for a layer
    right: int  # of those, that it needed
    read_bytes: int
    waited_s: float  # that passes stood still
    retries: int
    lost: int


class ExpertCache:
    """Threading: the step thread alone calls it.

    Args:
        fetches: fills the places.
        experts: how many there are, by number.
        places: how many of them are at hand.
        overlap: fetch guesses, and several experts at once.
        clock: of the deadlines.
    """

    def __init__(
        self,
        fetches: Fetches,
        experts: int,
        places: int,
        *,
        overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if places < 1:
            raise ValueError(f"{places} places for {experts} experts")
        self._fetches = fetches
        self._overlap = overlap
        self._clock = clock
        self._places: dict[int, int] = {}  # of experts that are there or on their way
        self._held = np.full(places, -1)  # the other way round
        self._coming: list[int] = []  # places into which perhaps something is on its way
        self._policy = ExpertPolicy(experts)
        self._rows = 1
        self._guessed: set[int] = set()  # for the layer that comes next
        self._waited_s = 0.0
        self._right = self._guesses = 0
        self.uses = np.zeros(experts, np.int64)
        self.hits = np.zeros(experts, np.int64)

    def __repr__(self) -> str:
        return f"<ExpertCache: {len(self.uses)} experts, {len(self._held)} places>"

    def statistics(self) -> CacheStats:
        """Counters since the start."""
        reads = self._fetches.statistics()
        return CacheStats(
            int(self.uses.sum()), int(self.hits.sum()), self._guesses, self._right, reads.read_bytes, self._waited_s,
            reads.retries, reads.lost,
        )  # fmt: skip

    def begin(self, rows: int) -> None:
        """A pass of so many rows begins."""
        self._policy.next_pass()
        self._rows = max(1, rows)
        self._guessed = set()

    def bring(
        self, wanted: Mapping[int, int], guessed: Mapping[int, int], deadline_s: float,
        elsewhere: Callable[[Sequence[int], int], Collection[int]] | None = None,
    ) -> Iterator[list[tuple[int, int]]]:  # fmt: skip
        """Yields (expert, place) of some wanted experts, until all have been yielded; then others may come to places.

        `wanted` and `guessed` are experts to rows: those of this layer, and probable ones of the next. `elsewhere` is
        asked once, with what is missing and how many more are on their way: which of the missing ones somebody else
        computes. They are not brought, and when those that are there have been yielded, and others are on their way,
        an empty list says that it is time for them. Raises WeightsLost when one can't be read, is not what was
        imported, or has not come at `deadline_s`.
        """
        self._fetches.poll()
        there, coming, missing = self._look_up(wanted)
        away = set(elsewhere(tuple(missing), len(coming))) if elsewhere is not None and missing else set[int]()
        missing = [expert for expert in missing if expert not in away]
        needed = set(wanted) - away
        self._guessed = {expert for expert in guessed if expert not in needed}
        self._guesses += len(self._guessed)
        self._fill(missing, coming, needed)
        if self._overlap:
            self._fill_guesses(guessed, needed)
            # Those that others compute come, too, if they are worth it: the next pass may need them.
            self._fill_guesses({expert: wanted[expert] for expert in away}, needed)
        if there:
            yield [(expert, self._places[expert]) for expert in there]
            needed -= set(there)
        if away:
            yield []
        while coming or missing:
            self._fill(missing, coming, needed)
            if not coming:
                self._make_room(missing[0], deadline_s)
                continue
            start_s = self._clock()
            try:
                self._fetches.wait(self._places[coming[0]], deadline_s)
            except WeightsLost:
                self.forget(coming[0])  # what of it is still on its way will not make it whole
                raise
            finally:
                self._waited_s += self._clock() - start_s
            arrived = [coming[0], *(expert for expert in coming[1:] if self._is_there(expert))]
            coming = [expert for expert in coming if expert not in arrived]
            yield [(expert, self._places[expert]) for expert in arrived]
            needed -= set(arrived)

    def forget(self, expert: int) -> None:
        """It is not asked for any more, or has to come anew. Its place is free, once it is not busy."""
        place = self._places.pop(expert, None)
        if place is not None:
            self._fetches.abandon(place)
            self._held[place] = -1
            self._policy.gone(expert)

    def close(self) -> bool:
        """See `Fetches.close`."""
        return self._fetches.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _look_up(self, wanted: Mapping[int, int]) -> tuple[list[int], list[int], list[int]]:
        """Which of them are there, on their way, and neither. Those with most rows come first."""
        there, coming, missing = list[int](), list[int](), list[int]()
        for expert in sorted(wanted, key=lambda one: -wanted[one]):
            place = self._places.get(expert)
            is_there = self._is_there(expert)
            if place is not None and not is_there and not self._fetches.is_busy(place):
                self.forget(expert)  # a guess that could not be had
                place = None
            self._policy.use(expert, wanted[expert] / self._rows, was_there=is_there)
            self.uses[expert] += 1
            self.hits[expert] += is_there
            self._right += expert in self._guessed
            if is_there:
                there.append(expert)
            elif place is not None and self._fetches.hasten(place):
                coming.append(expert)
            else:
                self.forget(expert)
                missing.append(expert)
        return there, coming, missing

    def _is_there(self, expert: int) -> bool:
        place = self._places.get(expert)
        return place is not None and self._fetches.is_full(place)

    def _fill(self, missing: list[int], coming: list[int], needed: set[int]) -> None:
        """Have missing experts on their way, as long as there are places."""
        while missing and (self._overlap or not coming):
            place = self._room(needed | self._guessed)
            place = self._room(needed) if place is None else place
            if place is None or not self._start(missing[0], place, JobClass.NOW):
                return
            coming.append(missing.pop(0))

    def _fill_guesses(self, guessed: Mapping[int, int], needed: set[int]) -> None:
        """The same with guesses, those that more rows may need first; not in places of experts that are worth more."""
        for expert in sorted(guessed, key=lambda one: -guessed[one]):
            if expert in self._places:
                continue
            place = self._room(needed | self._guessed)
            if place is None:
                return
            if self._held[place] >= 0 and not self._policy.wants(expert, int(self._held[place])):
                return
            if not self._start(expert, place, JobClass.PREFETCH):
                return

    def _room(self, kept: set[int]) -> int | None:
        """A place that is empty, or whose expert is worth the least; None when all are kept, or being filled."""
        self._coming = [place for place in self._coming if self._fetches.is_busy(place)]
        free = np.ones(len(self._held), np.bool_)
        free[self._coming] = False
        empty = np.flatnonzero(free & (self._held < 0))
        if len(empty):
            return int(empty[0])
        free[[self._places[expert] for expert in kept if expert in self._places]] = False
        places = np.flatnonzero(free)
        return int(places[self._policy.worthless(self._held[places])]) if len(places) else None

    def _start(self, expert: int, place: int, klass: JobClass) -> bool:
        if self._held[place] >= 0:
            self.forget(int(self._held[place]))
        self._places[expert], self._held[place] = place, expert
        self._coming.append(place)
        if self._fetches.start(place, expert, klass):
            return True
        self.forget(expert)
        return False

    def _make_room(self, expert: int, deadline_s: float) -> None:
        """Wait for a place: guesses on their way, and reads that a pass has left, hold all of them."""
        for guess in [one for one in self._guessed if one in self._places and not self._is_there(one)]:
            self.forget(guess)
        busy = next((place for place in self._coming if self._fetches.is_busy(place)), None)
        if busy is None:
            if not self._fetches.wait_for_room(deadline_s - self._clock()):
                raise self._fetches.losing(expert, f"the queue of {self._fetches.source} is full")
        elif not self._fetches.wait_until_free(busy, deadline_s):
            raise self._fetches.losing(expert, f"{self._fetches.source} does not answer")
