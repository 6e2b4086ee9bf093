"""What there is to say about the weights of an engine, and the rate at which passes read them."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

_KEPT = 0.8  # of what earlier passes say about the rate, with each further pass
WEIGHTS_TIMEOUT_S = 60.0  # for one layer to come, or the rows of an embedding


class NotMoved(Exception):
    """Weights stay where they are, for now: there is no memory, or something does not end. The text says what, with
    numbers. Passes go on.
    """


class WeightsStatus(msgspec.Struct, frozen=True):
    """Where the weights of an engine lie, and what passes read. On the CPU the device's memory is the computer's; with
    a card rates are those of the slower way to it."""

    budget_bytes: int | None  # for all that `memory_bytes` counts; None without a bound
    memory_bytes: int  # held: resident records, the ring, rows of the embedding
    device_records: int
    device_bytes: int
    nvme_records: int
    nvme_bytes: int
    ring_bytes: int
    rows_bytes: int
    pass_bytes: int  # read in every pass
    read_bytes: int  # since the start, and so are the five below
    waited_s: float  # that passes stood still for weights
    retries: int
    lost: int  # reads that failed for good
    uses: int  # of streamed pieces, by passes
    hits: int  # of those, where the piece had come by then
    bytes_per_s: float  # of the last passes
    peak_bytes_per_s: float  # the best that the disk gave
    peak_share: float  # `bytes_per_s` of that
    experts_bytes: int = 0  # slots of experts; `uses` and `hits` count these, too
    guesses: int = 0  # experts that were expected to be needed
    right_guesses: int = 0  # of those, that were
    host_records: int = 0  # where a card computes: in the computer's memory; the device's is the card's
    host_bytes: int = 0
    copied_bytes: int = 0  # to the card since the start
    computed: int = 0  # of `uses`, experts whose rows the processors computed, which was sooner than fetching them


class Counted(NamedTuple):
    """Since the start: seconds waited, bytes read, and pieces: reads repeated and lost, uses and hits, guesses of
    experts and those that were right."""

    waited_s: float = 0.0
    read_bytes: int = 0
    retries: int = 0
    lost: int = 0
    uses: int = 0
    hits: int = 0
    guesses: int = 0
    right: int = 0

    def plus(self, other: Counted) -> Counted:
        """Both together."""
        counts = (mine + theirs for mine, theirs in zip(self[1:], other[1:], strict=True))
        return Counted(self.waited_s + other.waited_s, *counts)


class WeightRow(NamedTuple):
    """A record of weights. `hits` of `uses`: how often a streamed layer was in memory when a pass needed it."""

    name: str
    bytes: int
    tier: str  # device; host: every pass copies it to the card; or nvme: every pass reads it
    hits: int = 0
    uses: int = 0


class PassMeter:
    """Bytes per second of the last passes, and the best of the link. Threading: one owner."""

    def __init__(self) -> None:
        self._begun_s = 0.0
        self._seen_bytes = 0
        self._bytes = self._seconds = self._peak = 0.0

    def begin(self, now_s: float) -> None:
        """A pass begins."""
        self._begun_s = now_s

    def end(self, now_s: float, read_bytes: int, link_bytes_per_s: float) -> None:
        """It is over: what was read since the start, and what the link gives lately."""
        self._bytes = _KEPT * self._bytes + read_bytes - self._seen_bytes
        self._seconds = _KEPT * self._seconds + now_s - self._begun_s
        self._seen_bytes = read_bytes
        self._peak = max(self._peak, link_bytes_per_s)

    @property
    def bytes_per_s(self) -> float:
        """Of the last passes; 0 before the first."""
        return self._bytes / self._seconds if self._seconds > 0 else 0.0

    @property
    def peak_bytes_per_s(self) -> float:
        """The best that the link gave, to a pass or at all."""
        return max(self._peak, self.bytes_per_s)
