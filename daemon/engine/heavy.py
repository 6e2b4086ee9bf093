"""Sequences that keep the pages which their rows look at most, and the newest ones (`h2o=N`).

Rows are observed from `OBSERVED_TOKENS` before the first bounded one on: how much of its attention each gives to every
page, over all heads and layers. The masses of rows add up, and fade from page to page. When a row begins a page, and
there are more pages than may be kept, the lightest go: never the first one, nor the newest half. What a sequence keeps
follows from its text alone, for its rows are taken in order, each once.

Threading: step thread only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Masses = npt.NDArray[np.float64]  # [rows, pages or more]
Numbers = npt.NDArray[np.int64]

OBSERVED_TOKENS = 32  # before the first bounded row
FADING = 0.97  # of what was observed, with every page


class Heavy:
    """Of one sequence.

    Attributes:
        kept: the pages that the rows of the newest page see, itself among them, ascending.
        numbers: the same, to look one up.
        decided: the first token of which that is true.

    Args:
        pages: kept at most.
        recent: the newest of them that are never given up, the one that is being written among them.
        first: the first row that is observed.
        page_tokens: of a page.
    """

    def __init__(self, pages: int, recent: int, first: int, page_tokens: int) -> None:
        self.kept: Numbers = np.arange(0)
        self.numbers: frozenset[int] = frozenset()
        self.decided = 0
        self._pages = pages
        self._recent = recent
        self._next = first
        self._size = page_tokens
        self._masses = np.zeros(pages, np.float64)  # by number

    @property
    def thinned(self) -> bool:
        """Whether some page has been given up."""
        return bool(len(self.kept)) and int(self.kept[-1]) >= len(self.kept)

    def is_due(self, position: int) -> bool:
        """Whether what rows from `position` on keep, which is not before the first bounded one, is to be decided."""
        return position > self.decided and (not self.decided or position % self._size == 0)

    def observes(self, start: int, end: int) -> int:
        """How many of the rows from `start` to `end`, the last of them, are still to be observed."""
        return max(end - max(start, self._next), 0)

    def take(self, end: int, masses: Masses) -> None:
        """What the rows up to `end` that are to be observed have given to the pages that they saw."""
        if end - len(masses) != self._next:
            raise AssertionError(f"rows {end - len(masses)} to {end} are observed, row {self._next} is the next")
        for position, row in enumerate(masses, self._next):
            if position % self._size == 0:
                self._masses *= FADING
            pages = position // self._size + 1
            if pages > len(self._masses):
                self._masses = np.concatenate((self._masses, np.zeros(pages)))
            numbers = self.kept if self.decided else np.arange(pages)
            self._masses[numbers] += row[: len(numbers)]
        self._next = end

    def decide(self, position: int) -> Numbers:
        """What rows from `position` on, in the page of which it is the first bounded one, keep."""
        if position != self._next:
            raise AssertionError(f"row {position} decides, and rows up to {self._next} were observed")
        page = position // self._size
        before = self.kept[self.kept < page] if self.decided else np.arange(page)
        spare = len(before) + 1 - self._pages
        if spare > 0:
            may_go = before[(before > 0) & (before <= page - self._recent)]
            lightest = may_go[np.argsort(self._masses[may_go], kind="stable")[:spare]]
            before = np.setdiff1d(before, lightest)
        self.kept, self.decided = np.append(before, page), position
        self.numbers = frozenset(self.kept.tolist())
        return self.kept
