"""What is sooner for experts that a card misses: to fetch them, or to have the processors compute their rows.

Both go on at once. A fetch takes the same time for any number of rows, and leaves an expert that later passes find;
the processors take the longer the more rows there are. So those with the fewest rows are computed, as many as it takes
for both sides to end early, and none where the link alone is as soon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from tierd.kernels.cpu.expert_rows import ExpertRows
from tierd.kernels.cpu.weights import Floats

MAX_COMPUTED_ROWS = 128  # of a layer, all its experts together: with more of them fetching is sooner anywhere
LINK_START_BYTES_PER_S = 12e9  # until anything has crossed it: half of PCIe 4.0 x16
_PROBED_ROWS = (1, 8, 64)
_MEMORY = 0.2  # weight of the newest measurement
_MAX_RATIO = 4.0  # of what was measured to what was expected, in one step: a preempted thread says nothing


class ComputeCost:
    """Seconds that the processors take for rows through one expert, by their number: learned as it goes.

    Args:
        seconds: at some numbers of rows, to begin with.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        if not seconds or min(seconds) < 1 or min(seconds.values()) <= 0:
            raise ValueError(f"costs at numbers of rows: {seconds}")
        self._rows = np.array(sorted(seconds))
        self._seconds = np.array([seconds[int(rows)] for rows in self._rows])

    def of(self, rows: int) -> float:
        """Straight lines between what is known, and beyond it in proportion."""
        last = int(self._rows[-1])
        if rows > last:
            return float(self._seconds[-1]) * rows / last
        return float(np.interp(rows, self._rows, self._seconds))

    def learn(self, rows: Sequence[int], seconds: float) -> None:
        """Experts with so many rows each, one behind the other, took so long together."""
        expected = sum(map(self.of, rows))
        ratio = min(max(seconds / expected, 1 / _MAX_RATIO), _MAX_RATIO)
        near = {int(np.argmin(np.abs(np.log(self._rows / count)))) for count in rows}
        self._seconds[sorted(near)] *= ratio**_MEMORY


def computed_elsewhere(
    missing: Sequence[tuple[int, int]], can_compute: Collection[int], ahead: int, fetch_s: float,
    compute_s: Callable[[int], float], max_rows: int = MAX_COMPUTED_ROWS,
) -> list[int]:  # fmt: skip
    """Which of the missing experts, (number, rows), the processors compute while the others are fetched.

    Args:
        can_compute: those that they can.
        ahead: how many others are on their way already.
        fetch_s: of one.
        compute_s: of an expert with so many rows.
    """
    order = sorted((rows, number) for number, rows in missing if number in can_compute)
    best_s, best = (ahead + len(missing)) * fetch_s, 0
    computed_s, taken = 0.0, 0
    for count, (rows, _) in enumerate(order, 1):
        computed_s, taken = computed_s + compute_s(rows), taken + rows
        if taken > max_rows:
            break
        end_s = max(computed_s, (ahead + len(missing) - count) * fetch_s)
        if end_s < best_s:
            best_s, best = end_s, count
    return [number for _, number in order[:best]]


class Processors:
    """Compute rows through experts that lie in CPU memory, and know how long it takes.

    Threading: the step thread's.

    Args:
        rows: see `ExpertRows`.
    """

    def __init__(self, rows: ExpertRows, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rows = rows
        self._clock = clock
        self.cost: ComputeCost | None = None  # until some expert was there to be measured with
        self.computed = 0  # experts, since the start

    def probe(self, layer: int, expert: int, hidden: int) -> None:
        """Measures with an expert that was handed in, unless that was done before."""
        if self.cost is not None:
            return
        seconds: dict[int, float] = {}
        for count in (count for count in _PROBED_ROWS if count <= self.rows.max_rows):
            x = np.zeros((count, hidden), np.float32)
            for _ in range(2):  # the first time touches memory, and compiles
                start_s = self._clock()
                self.rows.compute(layer, {expert: x})
                seconds[count] = max(self._clock() - start_s, 1e-9)
        self.cost = ComputeCost(seconds)

    def compute(self, layer: int, rows: Mapping[int, Floats]) -> dict[int, Floats]:
        """See `ExpertRows.compute`."""
        start_s = self._clock()
        found = self.rows.compute(layer, rows)
        if self.cost is not None:
            self.cost.learn([len(one) for one in rows.values()], self._clock() - start_s)
        self.computed += len(rows)
        return found
