"""How long steps take by their rows, and which one is under way: whether a loop hangs or computes is judged by it.

A snapshot is made between two steps, and a step may take a minute: a large model's prompt on the processors does. So
the step itself is told of while it runs, with how long one of so many rows may take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pace:
    """Threading: `step` on the step thread, `current` on any."""

    def __init__(self) -> None:
        # The longest step by the number of bits of its rows: (rows, seconds). The front is patient for several times
        # as long; what it must not do is to take a long prompt for a short one.
        self._longest: dict[int, tuple[int, float]] = {}
        self._running: tuple[int, float] | None = None  # rows, and since when

    @contextmanager
    def step(self, rows: int, clock: Callable[[], float]) -> Iterator[None]:
        """A step of so many rows is computed. One that fails says nothing of how long they take."""
        started_s = clock()
        self._running = (rows, started_s)
        try:
            yield
            took_s, size = clock() - started_s, rows.bit_length()
            if took_s > self._longest.get(size, (0, 0.0))[1]:
                self._longest[size] = (rows, took_s)
        finally:
            self._running = None

    def expected_s(self, rows: int) -> float:
        """Seconds that a step of so many rows takes at most, by those that were measured; 0 if none was.

        In proportion to the rows where only smaller ones are known: more than it will be, for a part is always there.
        """
        size = rows.bit_length()
        known = list(self._longest.items())  # the step thread may add to it
        smaller = sorted(entry for entry in known if entry[0] <= size)
        if not smaller:
            return min(known)[1][1] if known else 0.0
        nearest_rows, seconds = smaller[-1][1]
        return max(seconds * max(rows / nearest_rows, 1.0), *(longest[1] for _, longest in smaller))

    def current(self, now_s: float) -> dict[str, float]:
        """The step under way: `rows`, `for_s` so far, `expected_s`. Empty between two."""
        if (running := self._running) is None:
            return {}
        rows, started_s = running
        expected_s = self.expected_s(rows)
        return {"rows": rows, "for_s": round(max(now_s - started_s, 0.0), 3), "expected_s": round(expected_s, 3)}
