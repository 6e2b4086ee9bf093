"""The simulated time: it moves only when somebody computes, sleeps or waits."""

from __future__ import annotations


class Clock:
    """Seconds, never going back."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def go_to(self, time_s: float) -> None:
        """Moves on to a moment; one that has passed already changes nothing."""
        self.now_s = max(self.now_s, time_s)
