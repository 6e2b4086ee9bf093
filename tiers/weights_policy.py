"""Which expert has to make room for another. Pure: the clock is the number of the pass.

Passes go through the layers in a circle. So the experts that were used last are those that are needed last, and least
recently used, as a rule, evicts just what comes next. What says something is how often an expert was used: its *weight*
is the sum over its uses of the share of the pass's rows that went through it, halved every `half_life` passes, so that
it follows what the text is about. A newcomer has a low weight and goes first, if it isn't used again.

Two experts that are used alike would go on evicting each other. So one that was used since it came counts for
`HYSTERESIS` times its weight: whoever is there stays, until another is clearly wanted more.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

HALF_LIFE_PASSES = 16.0
HYSTERESIS = 1.25
_MAX_EXPONENT = 512.0  # of two: then all weights are scaled down


class ExpertPolicy:
    """Weights of `count` experts, and which of them are worth a place. Threading: one owner."""

    def __init__(self, count: int, half_life: float = HALF_LIFE_PASSES, hysteresis: float = HYSTERESIS) -> None:
        # Weights grow from pass to pass instead of shrinking: that is the same order, and costs nothing.
        self._weights = np.zeros(count)
        self._proven = np.ones(count)
        self._half_life = half_life
        self._hysteresis = hysteresis
        self._passes = 0
        self._base = 0

    def next_pass(self) -> None:
        """A pass begins."""
        self._passes += 1
        exponent = (self._passes - self._base) / self._half_life
        if exponent > _MAX_EXPONENT:
            self._weights *= 2.0**-exponent
            self._base = self._passes

    def use(self, expert: int, share: float, *, was_there: bool) -> None:
        """A share of the pass's rows goes through an expert, which was in memory or has to come."""
        self._weights[expert] += share * 2.0 ** ((self._passes - self._base) / self._half_life)
        if was_there:
            self._proven[expert] = self._hysteresis

    def worthless(self, held: npt.NDArray[np.int64]) -> int:
        """Which of these experts has to go: its place among them. The first of equal ones. [experts]"""
        return int(np.argmin(self._worth(held)))

    def gone(self, expert: int) -> None:
        """It has left memory: when it comes again it has to prove itself again."""
        self._proven[expert] = 1.0

    def wants(self, guessed: int, victim: int) -> bool:
        """Whether a guess that an expert is needed is worth the place of another: not of one that is used more."""
        return bool(self._weights[guessed] >= self._worth(victim))

    def _worth(self, held: int | npt.NDArray[np.int64]) -> np.float64 | npt.NDArray[np.float64]:
        """What experts that are in memory are worth; to be compared only."""
        found: np.float64 | npt.NDArray[np.float64] = self._weights[held] * self._proven[held]
        return found
