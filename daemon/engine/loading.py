"""Load or recompute: whichever measured speeds say is sooner, or both at once. Pure: figures go in, a choice comes out.

Loads run from the last page to the first, so the engine can compute from the first on and meet them. While a disk is
much faster than the model, waiting for it is best: a step of the model that has begun can't be stopped. While it is
much slower, reading only takes memory bandwidth from the model. In between both work.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from tierd.daemon.engine.scheduler import SHARED_PREFILL_ROWS

# Loading is left alone while it is this much faster than computing what it brings.
FASTER = 4.0
# Loading is not worth it when it is this much slower: it would spare less than a tenth.
SLOWER = 10.0
# What a disk is taken for before it was measured: a slow SSD. A wrong guess is found out after `GRACE_S`.
UNMEASURED_BYTES_PER_S = 400e6
# Time that the first pages may take whatever the rate: queueing, threads that wake up.
GRACE_S = 0.05


class Choice(enum.Enum):
    """What to do about pages that are known and not in memory."""

    WAIT = "wait"  # load, and compute nothing yet
    BOTH = "both"  # load from the tail, compute from the head
    COMPUTE = "compute"  # start no more loads


@dataclass(frozen=True, slots=True)
class Progress:
    """The loads of one request."""

    absent_bytes: int  # still to come
    arrived_bytes: int  # since they began
    elapsed_s: float
    link_bytes_per_s: float  # measured rate of the disk, all readers together; 0: not measured
    compute_s: float  # to compute what is absent


def choose(progress: Progress) -> Choice:
    """The choice for now; it may be another one at the next step."""
    if not progress.absent_bytes:
        return Choice.WAIT
    load_s = progress.absent_bytes / _bytes_per_s(progress)
    if load_s * FASTER <= progress.compute_s:
        return Choice.WAIT
    return Choice.BOTH if load_s <= progress.compute_s * SLOWER else Choice.COMPUTE


def is_guess(progress: Progress) -> bool:
    """Whether only what these loads have shown so far speaks against waiting: they may just have begun slowly."""
    return choose(replace(progress, elapsed_s=0.0)) is Choice.WAIT


def rows_meanwhile(waited_s: float, row_s: float, page_tokens: int) -> int:
    """Rows that a step may compute while pages come from the other end.

    On a guess it takes no longer than was waited before: who guessed wrong loses that once more, and not the time of a
    long step; who guessed right is at long steps soon, for the time doubles.

    Args:
        waited_s: since the loads began.
        row_s: seconds of a row, when it is a guess; 0: it is known that computing helps.
    """
    if not row_s:
        return SHARED_PREFILL_ROWS
    rows = int(min(waited_s / row_s, SHARED_PREFILL_ROWS))
    return max(rows - rows % page_tokens, page_tokens)


def _bytes_per_s(progress: Progress) -> float:
    """The measured rate until these loads have shown their own."""
    expected = progress.link_bytes_per_s or UNMEASURED_BYTES_PER_S
    if progress.elapsed_s <= GRACE_S:
        return expected
    seen = progress.arrived_bytes / (progress.elapsed_s - GRACE_S / 2)
    if not progress.arrived_bytes:
        # Nothing yet: at best one byte less than all of it would have come by now.
        seen = progress.absent_bytes / (progress.elapsed_s * SLOWER)
    return min(expected, seen) if progress.elapsed_s < 4 * GRACE_S else seen
