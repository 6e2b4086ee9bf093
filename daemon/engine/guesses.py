"""Decides when a draft model guesses what comes next, for whom, and how far.

A pass of the draft model costs time in which the main one stands still, and a guess that is wrong is a row for nothing.
Both are measured, and so is how often guesses are right: a guess is made where that gains. What nobody can know
beforehand is bounded: seconds that guessing costs come out of a purse, into which go 1.5% of all steps and what right
guesses have saved. When it is empty nobody guesses. So text that can't be guessed is hardly written slower.

Left to itself it guesses only while steps read weights: then one costs nearly the same for one row as for eight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tierd.daemon.engine.speculate import LENGTH_IF_ON, MAX_DRAFT, MIN_GAIN, Draft, Pace, Speculate

log = logging.getLogger(__name__)

UNSEEN_CHANCE = 0.6  # of the next guess to be right, before there was one
CALM = 0.1  # weight of the newest figure where it is that of all requests
UNMEASURED_PASS_SHARE = 0.1
INVEST = 0.015  # of every step, for guesses that may be wrong
START_STEPS = 3.0  # in the purse at first
MOST_STEPS = 4.0  # in the purse at most
LEAST_STEPS = -4.0  # a pass that other processes held up is forgiven
LEAST_CHANCE = 0.25  # that a guess is drawn, as the draft model sees it; one that is less likely is not computed
PROBE_STEPS = 32  # after so many without a guess a request has one of one token: its text may be another by now
PLAIN_STEPS = 64  # after so many with drafts comes one without: what that costs has to be known

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Wish:
    """A request whose next tokens may be guessed, up to `most` of them."""

    owner: int  # nobody else that lives has this number
    tokens: Sequence[int]
    draft: Draft
    most: int
    # From logits and an index of its context to the token that is drawn there, and how likely that is.
    pick: Callable[[Floats, int], tuple[int, float]]


class Guess(NamedTuple):
    """Tokens that may come next. The first `sure` are likely enough to be computed; what the others are worth is
    learned all the same."""

    tokens: list[int]
    sure: int


class Guesser(Protocol):
    """What there is to know of a draft model: see `draft.DraftModel`."""

    @property
    def name(self) -> str: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def on_card(self) -> bool: ...

    @property
    def pass_s(self) -> float: ...

    def guess(self, wishes: Sequence[Wish], counts: Sequence[int]) -> list[Guess]: ...

    def keep(self, owners: Iterable[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Costs:
    """What guesses are weighed against: `plain_s` of a step without drafts (0: not known), cost of a drafted row in
    such steps, and whether steps read weights."""

    plain_s: float
    row_share: float
    reads_weights: bool


class Guesses:
    """Threading: step thread only. A draft model that fails is turned off, and serving goes on: `off` says why."""

    def __init__(self, model: Guesser, mode: Speculate, clock: Callable[[], float]) -> None:
        self.off = ""
        self._model = model
        self._mode = mode
        self._clock = clock
        self._pace = Pace(UNSEEN_CHANCE, CALM)  # of all requests together
        self._purse_s: float | None = None  # None until it is known how long a step takes
        self._costs = Costs(0.0, 0.0, False)
        self._streams = 1
        self._drafted_steps = 0  # in a row
        self._drafted_tokens = self._right_tokens = 0
        self._spent_s = 0.0

    def statistics(self) -> dict[str, int | float | str]:
        """How it does. `chance`: of a guess to be right; `pass_share`: cost of a guessed token, in steps."""
        return {
            "model": self._model.name,
            "off": self.off,
            "memory_bytes": self._model.memory_bytes,
            "on": "card" if self._model.on_card else "processors",
            "drafted_tokens": self._drafted_tokens,
            "right_drafts": self._right_tokens,
            "spent_s": round(self._spent_s, 3),
            "chance": round(self._pace.chance, 3),
            "pass_share": round(self._pass_share(), 4),
        }

    @property
    def wants_plain_step(self) -> bool:
        """Whether nobody should draft in the next step, look-ups included: what that costs has to be known again."""
        return self._mode is Speculate.AUTO and self._costs.reads_weights and self._drafted_steps >= PLAIN_STEPS

    def draft(self, wishes: Sequence[Wish], costs: Costs) -> list[int]:
        """Guesses: how many tokens of its draft each of those that decode should compute."""
        if self.off:
            return [0] * len(wishes)
        self._costs, self._streams = costs, max(len(wishes), 1)
        if self._purse_s is None and costs.plain_s:
            self._purse_s = START_STEPS * costs.plain_s
        self._model.keep(wish.owner for wish in wishes)
        counts = self._counts(wishes)
        found = [Guess([], 0) for _ in wishes]
        if any(counts):
            begun_s = self._clock()
            try:
                found = self._model.guess(wishes, counts)
            except Exception as exc:
                log.exception("the draft model failed and is off")
                self.off = f"it failed: {exc}"
                self._model.keep(())
                return [0] * len(wishes)
            self._book(-(self._clock() - begun_s))
            self._spent_s += self._clock() - begun_s
        for wish, guess in zip(wishes, found, strict=True):
            wish.draft.quiet = 0 if guess.tokens else wish.draft.quiet + 1
            if guess.tokens:
                wish.draft.tokens, wish.draft.guessed = guess.tokens, True
        return [guess.sure for guess in found]

    def learn(self, draft: Draft, drawn: Sequence[int], computed: int) -> None:
        """A step drew these tokens where `draft.tokens` were guessed and `computed` of them computed."""
        if draft.guess_pace is None:
            draft.guess_pace = Pace(self._pace.chance)
        draft.guess_pace.learn(draft.tokens, drawn)
        self._pace.learn(draft.tokens, drawn)
        right = len(drawn) - 1
        self._drafted_tokens += computed
        self._right_tokens += right
        self._book((right / self._streams - computed * self._costs.row_share) * self._costs.plain_s)

    def ran(self, step_s: float, drafted_rows: int) -> None:
        """A step is over."""
        self._drafted_steps = self._drafted_steps + 1 if drafted_rows else 0
        self._book(INVEST * step_s)

    def _book(self, seconds: float) -> None:
        if self._purse_s is not None:
            plain_s = self._costs.plain_s
            self._purse_s = min(max(self._purse_s + seconds, LEAST_STEPS * plain_s), MOST_STEPS * plain_s)

    def _pass_share(self) -> float:
        plain_s, pass_s = self._costs.plain_s, self._model.pass_s
        return pass_s / plain_s if plain_s and pass_s else UNMEASURED_PASS_SHARE

    def _counts(self, wishes: Sequence[Wish]) -> list[int]:
        """How many tokens to guess for each."""
        if self._mode is Speculate.ON:
            return [min(max(wish.most, 0), LENGTH_IF_ON) for wish in wishes]
        counts = [0] * len(wishes)
        costs = self._costs
        if not (costs.reads_weights and costs.plain_s and self._purse_s is not None and self._purse_s > 0.0):
            return counts
        if self.wants_plain_step:
            return counts
        able = [place for place, wish in enumerate(wishes) if wish.most > 0]
        able.sort(key=lambda place: -self._chance(wishes[place].draft))
        chances = [self._chance(wishes[place].draft) for place in able]
        chosen, length = best_lengths(chances, costs.row_share, self._pass_share(), self._streams)
        for place in able[:chosen]:
            counts[place] = min(wishes[place].most, length)
        for place in able[chosen:]:
            if wishes[place].draft.quiet >= PROBE_STEPS:
                counts[place] = 1
        return counts

    def _chance(self, draft: Draft) -> float:
        return self._pace.chance if draft.guess_pace is None else draft.guess_pace.chance


def best_lengths(chances: Sequence[float], row_share: float, pass_share: float, streams: int) -> tuple[int, int]:
    """For how many of those with these chances, the best first, to guess how many tokens; 0, 0 if few would be gained.

    Token n of a guess is drawn with chance ** n. A pass of the draft model guesses one token of each, and takes
    `pass_share` of a step; each row makes the step longer. All of it for all of its `streams`.
    """
    best, best_gain = (0, 0), MIN_GAIN
    drawn = [0.0] * MAX_DRAFT  # of token n of all guesses, how many
    for chosen, chance in enumerate(chances, 1):
        more, reached = 0.0, 1.0
        for place in range(MAX_DRAFT):
            reached *= chance
            drawn[place] += reached
            more += drawn[place]
            length = place + 1
            gain = (1.0 + more / streams) / (1.0 + (row_share * chosen + pass_share) * length)
            if gain > best_gain:
                best, best_gain = (chosen, length), gain
    return best
