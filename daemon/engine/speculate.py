"""Speculation: several tokens in one step, where the text repeats what stands in it already.

What followed the last occurrence of the newest tokens is drafted, and computed behind the newest token in the same
step. Where nothing is found, a draft model may guess (`guesses`). From the logits of each row the token is drawn as
ever: draws are keyed by (seed, position) and rows do not depend on what else is in a step, so the tokens are those that
would have come one by one, at every temperature. The first that differs from the draft is the last of the step; what
was computed behind it is written over.

How much is drafted follows from how often drafts were right (`Pace`), which shows without computing any, and from what
a drafted row costs beside a step, which is measured. Where weights or pages are streamed it costs next to nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierd.daemon.engine.guesses import Guesses

MAX_DRAFT = 15
LENGTH_IF_ON = 8
MAX_INDEXED = 16_384  # of the newest tokens; each takes 300 bytes
INDEXED_AT_ONCE = 1024  # a millisecond
# The longest that was found counts. Two tokens are often enough in code; one is a guess.
GRAM_TOKENS = (3, 2)
# Of what it should gain at least, for figures are rough and a draft that is wrong costs those who wait.
MIN_GAIN = 1.05
SMOOTHING = 0.2  # weight of the newest figure
UNSEEN_CHANCE = 0.2  # not tried before a few drafts were right
# Cost of a row beside a step of one row: on two cores with the default model 2 ms of 11.
UNMEASURED_SHARE = 0.2
FORGETTING = 0.01  # a measured cost that forbids drafts is never measured again: it fades


class Speculate(enum.StrEnum):
    """The setting."""

    AUTO = "auto"  # where it gains
    ON = "on"  # wherever there is something to draft
    OFF = "off"


@dataclass(slots=True)
class Lookup:
    """Where in a sequence, which only grows, short runs of tokens were followed by what."""

    _next: dict[tuple[int, ...], int] = field(default_factory=dict)  # place behind the last occurrence
    _seen: int = 0

    def find(self, tokens: Sequence[int], most: int) -> list[int]:
        """What may come after `tokens`; up to `most`, or none."""
        self._seen = max(self._seen, min(GRAM_TOKENS), len(tokens) - MAX_INDEXED)
        known = min(len(tokens), self._seen + INDEXED_AT_ONCE)
        for end in range(self._seen, known):
            for size in GRAM_TOKENS:
                if end >= size:
                    self._next[tuple(tokens[end - size : end])] = end
        self._seen = max(self._seen, known)
        for size in GRAM_TOKENS:
            start = self._next.get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if start is not None:
                # What repeats itself goes on beyond its end.
                period = len(tokens) - start
                return [tokens[start + place % period] for place in range(most)]
        return []


@dataclass(slots=True)
class Pace:
    """How often the next token of a draft was right, given that those before it were."""

    chance: float = UNSEEN_CHANCE
    smoothing: float = SMOOTHING

    def learn(self, draft: Sequence[int], drawn: Sequence[int]) -> int:
        """Compare; how many of the drafted tokens were drawn. Also of drafts that were not computed."""
        right = 0
        for guess, token in zip(draft, drawn, strict=False):
            self.chance += self.smoothing * ((guess == token) - self.chance)
            if guess != token:
                break
            right += 1
        return right


@dataclass(slots=True)
class Draft:
    """Of one request. `tokens`: what may come next; how many of them are computed is the step's affair."""

    lookup: Lookup = field(default_factory=Lookup)
    pace: Pace = field(default_factory=Pace)
    tokens: list[int] = field(default_factory=list)
    looked: list[int] = field(default_factory=list)  # what the look-up found: `tokens`, unless those are guessed
    guessed: bool = False  # `tokens` are those of the draft model
    guess_pace: Pace | None = None  # how often those were right; None: as for all requests
    quiet: int = 0  # steps since the draft model had guessed, when it was not asked
    drafted_tokens: int = 0  # computed since the beginning
    right_tokens: int = 0  # of those, drawn

    def learn(self, drawn: Sequence[int]) -> None:
        """After a step that drew these tokens."""
        self.pace.learn(self.looked, drawn)
        self.tokens, self.looked, self.guessed = [], [], False


class Speculator:
    """Decides how much is drafted. `guesses`: those of a draft model. Threading: step thread only."""

    def __init__(self, mode: Speculate = Speculate.AUTO, guesses: Guesses | None = None) -> None:
        self.mode = mode
        self.guesses = guesses
        self.row_share = UNMEASURED_SHARE  # cost of a drafted row, in steps without any

    def statistics(self) -> dict[str, Any]:
        """The setting, what a drafted row costs, in steps, and how the draft model does."""
        found = {"mode": self.mode.value, "row_share": round(self.row_share, 3)}
        return found | ({"draft": self.guesses.statistics()} if self.guesses is not None else {})

    def propose(self, draft: Draft, tokens: Sequence[int], most: int, streams: int) -> int:
        """Looks the draft of a sequence up; how many of its tokens should be computed. `streams` share the step."""
        draft.tokens, draft.looked, draft.guessed = [], [], False
        if self.mode is Speculate.OFF or most <= 0:
            return 0
        draft.tokens = draft.looked = draft.lookup.find(tokens, min(most, MAX_DRAFT))
        if not draft.tokens:
            return 0
        if self.mode is Speculate.ON:
            return min(len(draft.tokens), LENGTH_IF_ON)
        length = best_length(draft.pace.chance, len(draft.tokens), self.row_share, streams)
        if not length:
            self._forget()
        return length

    def learn(self, draft: Draft, drawn: Sequence[int], computed: int) -> None:
        """A step drew these tokens of a request, `computed` tokens of its draft among what it computed."""
        draft.drafted_tokens += computed
        draft.right_tokens += len(drawn) - 1  # the last one is no token of the draft, or not the one that it has there
        if draft.guessed and self.guesses is not None:
            self.guesses.learn(draft, drawn, computed)
        draft.learn(drawn)

    def measure(self, step_s: float, plain_s: float, rows: int) -> None:
        """A step with so many drafted rows took `step_s`; one without would have taken `plain_s`."""
        if self.guesses is not None:
            self.guesses.ran(step_s, rows)
            if not rows:
                self._forget()
        if rows and plain_s > 0.0:
            share = max(step_s - plain_s, 0.0) / rows / plain_s
            # One step that another process held up says little.
            share = min(share, 2.0 * self.row_share + UNMEASURED_SHARE)
            self.row_share += SMOOTHING * (share - self.row_share)

    def _forget(self) -> None:
        self.row_share += FORGETTING * min(UNMEASURED_SHARE - self.row_share, 0.0)


def best_length(chance: float, most: int, row_share: float, streams: int) -> int:
    """Drafted tokens with which a step of so many streams gives the most tokens a second; 0 if few would be gained.

    Token n of a draft is drawn with chance ** n; the rows make the step longer for all of its streams.
    """
    best, best_gain, more = 0, MIN_GAIN, 0.0
    for length in range(1, most + 1):
        more += chance**length
        gain = (1.0 + more / streams) / (1.0 + row_share * length)
        if gain > best_gain:
            best, best_gain = length, gain
    return best
