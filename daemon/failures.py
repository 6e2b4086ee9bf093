"""Models whose engines die: which of them may be started again at once, and which are not tried for a while; pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tierd.daemon.errors import LOGS_HINT, EngineFailed, TierdError

CRASH_LIMIT = 3
CRASH_WINDOW_S = 60.0
FIRST_BACK_OFF_S = 2.0
MAX_BACK_OFF_S = 60.0


@dataclass(slots=True)
class Refusal:
    """Why a model does not come up, and until when it is not tried again."""

    error: TierdError
    until_s: float
    back_off_s: float


class Failures:
    """What is known of the engines that died, by model. Times are those of one clock that does not go back."""

    def __init__(self) -> None:
        self.refused: dict[str, Refusal] = {}
        self._deaths: dict[str, deque[float]] = {}

    def check(self, name: str, now_s: float) -> None:
        """Raises why a model is not tried now."""
        if (refusal := self.refused.get(name)) is not None and now_s < refusal.until_s:
            raise refusal.error

    def died(
        self, name: str, now_s: float, last_words: str, *, said: TierdError | None, was_ready: bool, was_of_use: bool
    ) -> None:
        """An engine ended unasked. `said`: what it gave as its reason."""
        deaths = self._deaths.setdefault(name, deque(maxlen=CRASH_LIMIT))
        if was_of_use:
            deaths.clear()  # whatever ended it, the model does come up and work
        else:
            deaths.append(now_s)
        if said is not None and not was_ready:
            # It said why it cannot start, and would say the same again.
            self._refuse(name, said, now_s)
        elif len(deaths) == CRASH_LIMIT and now_s - deaths[0] < CRASH_WINDOW_S:
            error = EngineFailed(
                f"the engine of {name} died {CRASH_LIMIT} times within {CRASH_WINDOW_S:.0f} s; {last_words}",
                hint=f"asking again after a moment starts it anew; {LOGS_HINT}",
            )
            self._refuse(name, error, now_s)
        elif was_ready:
            self.forgive(name)

    def forgive(self, name: str) -> None:
        """A model came up: the next failure is its first one again."""
        self.refused.pop(name, None)

    def _refuse(self, name: str, error: TierdError, now_s: float) -> None:
        last = self.refused.get(name)
        back_off_s = min(last.back_off_s * 2, MAX_BACK_OFF_S) if last else FIRST_BACK_OFF_S
        self.refused[name] = Refusal(error, now_s + back_off_s, back_off_s)
        self._deaths.pop(name, None)
