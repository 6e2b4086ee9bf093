"""What the next step does. Pure: a snapshot goes in, a plan comes out; no clock, no threads, no arrays.

- Every decoding stream gets its one row in every step (continuous batching).
- Prompt rows fill the rest. With nobody decoding they keep the step near `Limits.prompt_step_s`: whoever comes next
  does not wait for longer, and more rows would hardly be faster. Otherwise as many as keep the step near
  `Limits.target_step_s` or twice a decode step, whichever is longer, by measured rates. So a long prompt slows running
  streams at most by that much and never stops them.
- Among prompts the oldest has a third of the rows for sure (nothing starves it) and the shortest have the others (a
  long one does not make short ones wait). A step in which a short prompt can end is a short step.
- Of prompts that go on with the same pages the first in rank computes them, and the others wait for that and give it
  their rows (`sharing`). Its chunk ends where the first of them goes another way.
- Rows that a request has to compute once more, for what memory has lost of its beginning, are prompt rows that take no
  pages; they come before its own.
- Pages: a stream is admitted when its prompt fits into memory, device and host together, beside what the active ones
  still need. When memory runs out all the same, the last in rank gives its pages back and waits. Rank never changes, so
  the first in rank always goes on, and no two preempt each other in turn. While one gets no page, nobody is let in
  behind it. Alone, a stream may outgrow memory: then its pages spill to the store and are streamed from there.
- What runs in the background (`tierd batch`, `/v1/batches`) takes every place that is free and gives one back as soon
  as somebody in the foreground waits for it. Its tokens stay, and its full pages, so it goes on where it was; one that
  keeps no pages (`embed`) stays once it has begun.
- Rows are written on the device: a chunk takes no more pages than can be had there.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

MIN_PREFILL_ROWS = 4  # even on a slow machine two for the oldest and two for the shortest
UNMEASURED_PREFILL_ROWS = 16
SHARED_PREFILL_ROWS = 128  # where nobody decodes, as long as nothing is measured
MIN_PROMPT_ROWS = 48  # where nobody decodes: measured, 90% of the speed of any more (8 rows: 60%)
MIN_ENDING_ROWS = 8  # in a step that ends a short prompt
OLDEST_SHARE = 3  # one row of so many is for the oldest prompt, whatever the others need
SMOOTHING = 0.2  # weight of the newest step in the measured rates
PATIENCE_S = 10.0  # later requests may pass one that waits for pages this long, then no more


class Phase(enum.Enum):
    """Where a request stands; see `request`."""

    WAITING = "waiting"  # holds no pages
    FETCHING = "fetching"  # pages leased, on their way to memory; nothing is computed yet
    PREFILL = "prefill"  # has rows to compute before its next token
    DECODE = "decode"
    FINISHED = "finished"


ACTIVE = (Phase.FETCHING, Phase.PREFILL, Phase.DECODE)  # they hold leases


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may use. Raises ValueError when they contradict each other."""

    max_rows: int
    max_streams: int
    page_tokens: int
    target_step_s: float = 0.05  # 20 tokens a second and stream: faster than anybody reads
    prompt_step_s: float = 0.5  # of a step in which nobody decodes
    throughput: bool = False  # nobody looks on: prompts take all the rows that a step may have
    window: int = 0  # tokens that a row sees in any layer, where all of them were trained with one; 0: all before it

    def __post_init__(self) -> None:
        if self.max_streams < 1 or self.page_tokens < 1:
            raise ValueError("max_streams and page_tokens must be positive")
        if self.max_rows < self.max_streams + MIN_PREFILL_ROWS:
            raise ValueError(f"max_rows ({self.max_rows}) must be at least max_streams + {MIN_PREFILL_ROWS}")


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured seconds: of a step that only decodes, and of one prompt row beside it. 0: not measured."""

    decode_s: float = 0.0
    row_s: float = 0.0
    mixed: bool = False  # whether row_s comes from steps that also decoded

    def after(self, step_s: float, decode_rows: int, prefill_rows: int) -> Rates:
        """The rates with one more step in them."""
        if not prefill_rows:
            return replace(self, decode_s=_smooth(self.decode_s, step_s)) if decode_rows else self
        if decode_rows:
            if not self.decode_s:
                return self
            marginal_s = max(step_s - self.decode_s, 1e-6) / prefill_rows
            return replace(self, row_s=_smooth(self.row_s if self.mixed else 0.0, marginal_s), mixed=True)
        if self.mixed:
            return self
        return replace(self, row_s=_smooth(self.row_s, step_s / prefill_rows))


@dataclass(frozen=True, slots=True)
class Stream:
    """What the scheduler knows of one request."""

    id: int
    rank: tuple[float, int]
    phase: Phase
    known_tokens: int  # prompt and generated
    computed_tokens: int = 0
    pages: int = 0  # pages in memory that its lease holds
    held_until: int = 0  # rows before this position have device pages to be written to
    limit: int = 1 << 62  # rows may go this far now: what follows is there already, or comes by itself
    shared: int = 0  # pages it needs that live requests hold already, or compute for it
    leader: int | None = None  # computes its next pages: it waits for them
    shared_until: int = 0  # the token up to which that one computes pages for it
    width: int = 1  # sequences of equal length that it decodes at once
    missing: int = 0  # of several sequences: pages that they have to get for their next row
    drafted: int = 0  # rows beyond its known tokens that it would like to have when it decodes
    most_pages: int = 1 << 62  # that it has at once
    waited_s: float = 0.0  # in the queue
    background: bool = False  # it gives its place to those in the foreground that rank before it
    restarts: bool = False  # what it has computed is lost when it gives its pages back
    again: int = 0  # rows that it has to compute once more before its next one, and that take no pages

    @property
    def remaining(self) -> int:
        """Rows that can be computed now before the next token can be drawn, or the next known page begins."""
        return self.again + min(self.known_tokens, self.limit) - self.computed_tokens

    @property
    def sequences(self) -> int:
        """Sequences that a row of it stands for: a prompt is one, whatever becomes of it."""
        return self.width if self.phase is Phase.DECODE else 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All requests, and the pages that are free or could be made free."""

    streams: tuple[Stream, ...]
    free_pages: int  # of memory, without touching those of live requests
    device_pages: int  # that can be written to, if need be after those of live requests have spilled
    rates: Rates = Rates()
    reads_weights: bool = False  # a step takes as long for one row as for many


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `start` to `start + count` of one stream. `sample`: a token is drawn after the last of them. `again`: rows
    before `start` that are computed once more, ahead of them; without all of those there are none of its own."""

    id: int
    start: int
    count: int
    sample: bool
    again: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Ids to preempt first, ids to admit then, and the rows to compute."""

    preempt: tuple[int, ...]
    admit: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def plan(snapshot: Snapshot, limits: Limits) -> Plan:
    """The next step. Streams appear in it in order of rank."""
    streams = sorted(snapshot.streams, key=lambda stream: stream.rank)
    decoding = _decoding(streams, limits)
    prefilling = [stream for stream in streams if stream.phase is Phase.PREFILL]
    soon = prefilling + [stream for stream in streams if stream.phase is Phase.FETCHING]
    left = limits.max_rows - sum(stream.width for stream in decoding)
    rates, any_rows = snapshot.rates, snapshot.reads_weights
    budget = min(prefill_rows(limits, rates, len(decoding), soon, any_rows), left)
    rows = {stream.id: 1 for stream in decoding} | share(budget, prefilling)
    drafts = 0 if prefilling else left  # rows of prompts are sure to be of use

    free, device = snapshot.free_pages, snapshot.device_pages
    active = [stream for stream in streams if stream.phase in ACTIVE]
    preempt: list[int] = []
    chunks: list[Chunk] = []
    starved: Stream | None = None  # the first that gets no row for want of pages
    for stream in streams:
        count = rows.get(stream.id, 0)
        if not count or stream.id in preempt:
            continue
        again = min(count, stream.again) if stream.phase is Phase.PREFILL else 0
        wanted = count - again
        count, needed = _fit(stream, wanted, min(free, device), limits.page_tokens)
        if count < wanted:
            last = victim(streams, stream, preempt)
            if last is None and stream is active[0]:
                # Nobody after it has pages to give: it may outgrow memory.
                count, needed = _fit(stream, wanted, device, limits.page_tokens)
            elif last is not None and not count:
                # What the victim frees may be shared with others, so the pages count from the next snapshot on.
                preempt.append(last)
        if wanted and not count:
            starved = starved or stream
        if not (count or again):
            continue
        if drafts and stream.drafted and stream.phase is Phase.DECODE:
            more, pages = _fit(stream, 1 + min(stream.drafted, drafts), min(free, device), limits.page_tokens)
            if more > count:
                count, needed, drafts = more, pages, drafts - more + 1
        free -= needed
        device -= needed
        end = stream.computed_tokens + count
        samples = count > 0 and end >= stream.known_tokens
        chunks.append(Chunk(stream.id, stream.computed_tokens, count, samples, again))
    if starved is not None:
        # It would take the pages of whoever is let in after it, at once, and so on in turn.
        streams = [stream for stream in streams if stream.phase in ACTIVE or stream.rank < starved.rank]
    if not preempt and (last := _makes_place(streams, limits)) is not None:
        preempt.append(last)
    admit = () if preempt else _admit(streams, free, limits)
    return Plan(tuple(preempt), admit, tuple(chunks))


def _decoding(streams: Iterable[Stream], limits: Limits) -> list[Stream]:
    """Who decodes in this step: all of them, unless beams are more than the rows that a step can have."""
    found: list[Stream] = []
    left = limits.max_rows
    for stream in streams:
        if stream.phase is Phase.DECODE and stream.width <= left:
            found.append(stream)
            left -= stream.width
    return found


def prefill_rows(
    limits: Limits, rates: Rates, decoding: int, prefilling: Iterable[Stream] = (), any_rows: bool = False
) -> int:
    """Prompt rows a step may hold beside `decoding` streams. `prefilling`: who needs some, now or soon. `any_rows`: a
    step takes about as long for any number of them."""
    if limits.throughput:
        return limits.max_rows
    if not decoding:
        rows = limits.max_rows
        if not any_rows:
            rows = SHARED_PREFILL_ROWS
            if rates.row_s:
                rows = int(min(limits.prompt_step_s / rates.row_s, limits.max_rows))
            rows = min(max(rows, MIN_PROMPT_ROWS), limits.max_rows)
        remaining = [stream.remaining for stream in prefilling]
        if len(remaining) < 2:
            return rows
        # What the shortest gets is enough to end it, and what else is in the step does not hold it up long.
        shortest = min(remaining)
        return min(max(shortest + -(-shortest // (OLDEST_SHARE - 1)), MIN_ENDING_ROWS), rows)
    if not (rates.row_s and rates.decode_s):
        return UNMEASURED_PREFILL_ROWS
    spare_s = max(2.0 * rates.decode_s, limits.target_step_s) - rates.decode_s
    return max(int(min(spare_s / rates.row_s, limits.max_rows)), MIN_PREFILL_ROWS)


def share(budget: int, prefilling: Iterable[Stream]) -> dict[int, int]:
    """Rows by stream id: a part for the first in rank, the rest to the shortest, or to whom that one waits for."""
    by_rank = sorted(prefilling, key=lambda stream: stream.rank)
    rows: dict[int, int] = {}
    if not by_rank or budget <= 0:
        return rows
    most = {stream.id: stream.remaining for stream in by_rank if stream.leader is None}
    starts = {stream.id: stream.computed_tokens - stream.again for stream in by_rank}
    for stream in by_rank:
        if stream.leader is not None:
            until = stream.shared_until - starts[stream.leader]
            most[stream.leader] = min(most[stream.leader], until)
    oldest = by_rank[0]  # it waits for nobody
    rows[oldest.id] = min(most[oldest.id], -(-budget // OLDEST_SHARE))
    left = budget - rows[oldest.id]
    for stream in sorted(by_rank, key=lambda stream: (stream.remaining, stream.rank)):
        worker = stream.id if stream.leader is None else stream.leader
        count = min(most[worker] - rows.get(worker, 0), left)
        if count > 0:
            rows[worker] = rows.get(worker, 0) + count
            left -= count
    return rows


def victim(streams: Iterable[Stream], needy: Stream, spared: Iterable[int] = ()) -> int | None:
    """Whose pages `needy` may take: the last in rank that holds any and comes after it. None: it has to wait."""
    holders = [
        stream
        for stream in streams
        if stream.phase in ACTIVE
        and stream.pages
        and stream.rank > needy.rank
        and stream.id not in spared
    ]
    return max(holders, key=lambda stream: stream.rank).id if holders else None


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_tokens)


def _fit(stream: Stream, count: int, free: int, page_tokens: int) -> tuple[int, int]:
    """(rows, new pages): as many of `count` rows as the pages of the stream and `free` more can hold."""
    if stream.sequences > 1:
        return (1, stream.missing) if stream.missing <= free else (0, 0)
    held_pages = pages_for(stream.held_until, page_tokens)
    room = (held_pages + max(free, 0)) * page_tokens - stream.computed_tokens
    count = max(min(count, room), 0)
    return count, max(pages_for(stream.computed_tokens + count, page_tokens) - held_pages, 0)


def _makes_place(streams: list[Stream], limits: Limits) -> int | None:
    """Whose place the first of the foreground that waits for one gets: that of the last of the background, if any."""
    active = [stream for stream in streams if stream.phase in ACTIVE]
    first = next((stream for stream in streams if stream.phase is Phase.WAITING and not stream.background), None)
    if first is None or len(active) < limits.max_streams:
        return None
    behind = [
        stream
        for stream in active
        if stream.background
        and stream.rank > first.rank
        and not (stream.restarts and stream.computed_tokens)  # it might never end
    ]
    return max(behind, key=lambda stream: stream.rank).id if behind else None


def _admit(streams: list[Stream], free: int, limits: Limits) -> tuple[int, ...]:
    """Waiting streams that may begin, in rank order."""
    active = [stream for stream in streams if stream.phase in ACTIVE]
    places = limits.max_streams - len(active)
    is_urgent = False  # whether somebody in the foreground waits for pages
    free -= sum(_needed(stream, limits.page_tokens) for stream in active)
    admitted: list[int] = []
    for stream in streams:
        if stream.phase is not Phase.WAITING or (is_urgent and stream.background):
            continue
        if not places:
            break
        needed = min(pages_for(stream.known_tokens + 1, limits.page_tokens), stream.most_pages)
        needed += stream.width - 1 - stream.shared
        if needed <= free or not (active or admitted):
            admitted.append(stream.id)
            free -= needed
            places -= 1
        elif stream.waited_s >= PATIENCE_S:
            break  # nobody passes it any more
        else:
            is_urgent = is_urgent or not stream.background
    return tuple(admitted)


def _needed(stream: Stream, page_tokens: int) -> int:
    """Pages that an active one still needs for its known tokens, and one for each of its sequences to go on."""
    if stream.sequences > 1:
        return stream.width
    needed = min(pages_for(stream.known_tokens, page_tokens) + stream.width, stream.most_pages)
    return max(needed - stream.pages - stream.shared, 0)


def _smooth(old: float, new: float) -> float:
    return new if not old else old + SMOOTHING * (new - old)
