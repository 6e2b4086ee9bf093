"""One step from chunks of the plan to logits: pages for every row, one batch, one run, what it took.

Threading: step thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tierd.daemon.engine import batch, bounded, scheduler
from tierd.daemon.engine.bounded import bound_of, chooses, kept_places, wanted_by
from tierd.daemon.engine.guesses import Costs, Guesses, Wish
from tierd.daemon.engine.ladder import Ladders, Rungs, Span, before, blocks
from tierd.daemon.engine.request import Finish, Request, Totals
from tierd.daemon.engine.runner import GaveWay, Runner
from tierd.daemon.engine.sampler import BadLogits
from tierd.daemon.engine.scheduler import Chunk, Limits, Phase, Rates
from tierd.daemon.engine.selection import Lesson, Pick
from tierd.daemon.engine.speculate import MAX_DRAFT, Speculator
from tierd.kernels.rows import Bound
from tierd.tiers.errors import StagingLost
from tierd.tiers.lease import Lease
from tierd.tiers.page import PageKey
from tierd.tiers.pager import Pager
from tierd.tiers.policy import CostEstimator
from tierd.tiers.prefix import Node

log = logging.getLogger(__name__)

# Steps in a row whose streamed pages could not be read, not counting those that read none. Each time what was lost is
# computed again; a disk that loses pages as fast as they are computed is turned off.
MAX_LOST_STEPS = 5
# A step that is expected to take so long is computed layer by layer, so that it can give way; a card's takes less.
LONG_STEP_S = 0.05

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one sequence, and where its pages lie. `tokens` stand at `start` and up."""

    lease: Lease
    tokens: Sequence[int]
    start: int
    sample: int  # logits are wanted of so many of the last rows
    pages: batch.Addresses
    streamed: list[PageKey]
    bound: Bound = Bound()  # what the rows see; it says which pages are given
    wanted: Pick | Lesson | None = None  # the row chooses what it reads of its pages, or those after it will
    kept: batch.Addresses | None = None  # which of its lease's pages the rows see, if that is not for `bound` to say
    observed: int = 0  # it is to be told of so many of the last rows how much they look at each page
    exact: batch.Addresses | None = None  # copies of the pages


@dataclass(frozen=True, slots=True)
class Work:
    """A chunk that has its pages: one part, or one for each hypothesis of a beam search."""

    request: Request
    chunk: Chunk
    decodes: bool
    parts: list[Part]
    made_up: Sequence[Span] = ()  # tokens that are computed again, for their exact copies: the first of the parts

    @property
    def rows(self) -> int:
        """Of all parts."""
        return sum(len(part.tokens) for part in self.parts)


class Steps:
    """Gathers, runs and measures steps. `rates` and the cost of a page are learned from them."""

    def __init__(
        self, pager: Pager, runner: Runner, limits: Limits, clock: Callable[[], float], totals: Totals,
        speculator: Speculator, ladders: Ladders | None = None,
    ) -> None:  # fmt: skip
        self.speculator = speculator
        self._pager = pager
        self._runner = runner
        self._limits = limits
        self._clock = clock
        self._totals = totals
        self._ladders = ladders
        self._estimator = CostEstimator()
        self._lost_steps = 0  # in a row
        self._gave_way = False  # the last step
        self.rates = Rates()

    def draft(self, requests: Collection[Request]) -> None:
        """Look up what the next tokens of those that decode may be."""
        decoding = [
            request
            for request in requests
            if request.phase is Phase.DECODE and request.beams is None and request.mode is None
        ]
        for request in decoding:
            most = request.max_total_tokens - len(request.tokens) - 1
            request.drafted = self.speculator.propose(request.draft, request.tokens, most, len(decoding))
        if (guesses := self.speculator.guesses) is not None and not guesses.off:
            self._guess(decoding, guesses)
            if guesses.wants_plain_step:
                for request in decoding:
                    request.drafted = 0

    def _guess(self, decoding: list[Request], guesses: Guesses) -> None:
        """Let the draft model guess where the look-up says nothing, or nothing that is worth a row."""
        wishes = [
            Wish(request.id, request.tokens, request.draft,
                 0 if request.drafted else min(request.max_total_tokens - len(request.tokens) - 1, MAX_DRAFT),
                 request.sampler.guess)
            for request in decoding
        ]  # fmt: skip
        costs = Costs(self.rates.decode_s, self.speculator.row_share, self._runner.reads_weights)
        for request, guessed in zip(decoding, guesses.draft(wishes, costs), strict=True):
            request.drafted = request.drafted or guessed

    def gather(self, wanted: Iterable[tuple[Request, Chunk]]) -> tuple[list[Work], list[tuple[Work, Exception]]]:
        """The chunks that have pages for all their rows now; and those that failed, with why."""
        work: list[Work] = []
        failed: list[tuple[Work, Exception]] = []
        for request, chunk in wanted:
            item = Work(request, chunk, request.phase is Phase.DECODE, [])
            try:
                bounded.begin(request, self._runner.new_selection, self._limits.page_tokens)
                item = replace(item, parts=_parts(request, chunk, self._limits))
                # Ask for all of them, even when one has to wait: what they get they keep.
                granted = [
                    not part.tokens or self._pager.allocate(part.lease, part.start, _end(part)) for part in item.parts
                ]
                if all(granted):
                    work.append(replace(item, parts=[self._addressed(part) for part in item.parts]))
            except Exception as exc:
                failed.append((item, exc))
        # Slots for one chunk may have cost another one a page in memory: look again, now that all have theirs.
        return self._with_copies([found for item in work if (found := self._located(item)) is not None]), failed

    def _with_copies(self, work: list[Work]) -> list[Work]:
        """The same with the exact copies of those that have some: first nobody holds more than it needs."""
        ladders = self._ladders
        if ladders is None:
            return work
        for item in work:
            if (rungs := item.request.rungs) is not None:
                ladders.prepare(rungs, lease_of(item), item.chunk.start)
                self._totals.cached_tokens += item.request.recount()
        found = [
            item if item.request.rungs is None else self._under_ladder(item, ladders, item.request.rungs)
            for item in work
        ]
        return [item for item in found if item.rows]

    def _under_ladder(self, item: Work, ladders: Ladders, rungs: Rungs) -> Work:
        """A chunk with its copies. Rows that are to be made up come first, in the place of its own where the plan did
        not know of them."""
        request, chunk, lease = item.request, item.chunk, lease_of(item)
        if rungs.lacks and item.decodes:
            request.phase, request.drafted = Phase.PREFILL, 0  # so that the next plan has rows for them
            item = replace(item, decodes=False)
        spans = before(rungs.missing, chunk.again + chunk.count)
        tokens, tables = request.tokens, self._pager.tables
        made = [
            Part(lease, tokens[start:end], start, 0, pages, tables.streamed(lease, pages), exact=exact)
            for start, end, pages, exact in ladders.make_up(rungs, lease, spans)
        ]
        if rungs.lacks > chunk.again or not chunk.count:
            return replace(item, chunk=replace(chunk, count=0, sample=False), parts=made or item.parts, made_up=spans)
        ladders.cover(rungs, chunk.start, chunk.start + chunk.count)
        for part in item.parts:
            pages, exact = ladders.table(rungs, part.pages, part.start, part.start // self._limits.page_tokens)
            made.append(replace(part, pages=pages, exact=exact, streamed=tables.streamed(lease, pages)))
        return replace(item, parts=made, made_up=spans)

    def _addressed(self, part: Part) -> Part:
        pages, wanted = bounded.pages_of(self._pager, part.lease, _end(part), part.bound, part.wanted, part.kept)
        return replace(part, pages=pages, wanted=wanted)

    def _located(self, item: Work) -> Work | None:
        """The chunk with its pages as they lie now; None when one of them is nowhere any more."""
        tables = self._pager.tables
        parts = []
        for part in map(self._addressed, item.parts):
            lease, lead, first = part.lease, part.bound.lead, part.bound.base // self._limits.page_tokens
            needed = {*range(lead), *range(first, first + len(part.pages) - lead)} if lease.absent else set()
            if lease.absent and (isinstance(part.wanted, Pick) or part.kept is not None):
                return None  # any page may be chosen
            if part.kept is not None:
                parts.append(replace(part, streamed=tables.streamed_at(lease, part.kept)))
                continue
            if (lease.absent - lease.filling.keys()) & needed:
                return None
            parts.append(replace(part, streamed=tables.streamed(lease, part.pages, first, lead)))
        return replace(item, parts=parts)

    def run(self, work: list[Work], awaited: Callable[[], bool]) -> list[Logits] | None:
        """Computes all rows; for each chunk the logits that it wants. None: streamed pages were lost, or the step gave
        way to somebody who is `awaited`: it counts for nothing.

        Raises whatever the computation raises.
        """
        parts = [part for item in work for part in item.parts]
        rows = [
            batch.Rows(part.tokens, part.start, part.pages, part.sample, part.bound, part.observed, part.exact)
            for part in parts
        ]
        for item in work:
            item.request.times.started_s = item.request.times.started_s or self._clock()
        streamed = [key for part in parts for key in part.streamed]
        try:
            started_s, picked_bytes = self._clock(), self._runner.picked_bytes
            with self._totals.pace.step(sum(item.rows for item in work), self._clock):
                built = batch.build(rows, self._limits.page_tokens)
                wanted = [(place, part.wanted) for place, part in enumerate(parts) if part.wanted is not None]
                gives_way = awaited if self._may_give_way(work) else None
                logits = self._runner.run(built, streamed, gives_way, wanted)
        except StagingLost as lost:
            self._lose(lost)
            self._void(work)
            return None
        except GaveWay:
            self._gave_way = True
            self._void(work)
            self._totals.dropped_steps += 1
            return None
        except BaseException:
            self._void(work)
            raise
        self._gave_way = False
        for item in work:
            if self._ladders is not None and (rungs := item.request.rungs) is not None:
                self._ladders.made_up(rungs, item.made_up)
                for part in item.parts:
                    rungs.computed[part.start : _end(part)] = True
        self._pool(work)
        self._observe(work)
        self._measure(work, started_s, self._clock(), bool(streamed) or self._runner.picked_bytes > picked_bytes)
        ends = np.cumsum([sum(part.sample for part in item.parts) for item in work])
        return np.split(logits, ends[:-1])

    def _void(self, work: list[Work]) -> None:
        """A step counts for nothing: the copies that it was to write go back."""
        for item in work:
            if self._ladders is not None and (rungs := item.request.rungs) is not None:
                self._ladders.trust(rungs, item.chunk.start, item.made_up)
                self._ladders.settle(rungs, lease_of(item), item.chunk.start)

    def _may_give_way(self, work: list[Work]) -> bool:
        """Whether this step is one for which a newcomer would wait for long: prompts alone, and many rows of them.

        Never two in a row, so that newcomers take no more than half of what is computed.
        """
        rows, row_s = sum(item.rows for item in work), self.rates.row_s
        is_long = rows >= scheduler.MIN_PROMPT_ROWS and (not row_s or rows * row_s >= LONG_STEP_S)
        return is_long and not self._gave_way and not any(item.decodes for item in work)

    def _pool(self, work: list[Work]) -> None:
        """Hand the states of the rows that were just computed to the vectors that are made of them."""
        first = 0
        for item in work:
            if (embedding := item.request.embedding) is not None:
                chunk = item.chunk
                wanted = embedding.wanted(chunk.start, chunk.count, chunk.sample)
                if len(wanted):
                    rows = np.arange(first + wanted.start, first + wanted.stop, dtype=np.int32)
                    embedding.take(self._runner.hidden(rows))
            first += item.rows

    def _observe(self, work: list[Work]) -> None:
        """Tell sequences that thin out their pages how much the rows just computed looked at them."""
        told = [(item.request.heavy, part) for item in work for part in item.parts if part.observed]
        if not told:
            return
        masses, first = self._runner.masses(), 0
        for heavy, part in told:
            assert heavy is not None  # nobody else is observed
            heavy.take(_end(part), masses[first : first + part.observed])
            first += part.observed

    def draw(self, request: Request, logits: Logits, now_s: float) -> Finish | None:  # [1 + drafted, vocab]
        """Draw the next token, and those after it as long as the draft was right; why it is over, if it is."""
        drawn: list[int] = []
        over: Finish | None = None
        for place, row in enumerate(logits):
            token = request.sampler.sample(row, len(request.tokens))
            if request.logprobs is not None:
                request.logprobs.add(row, token)
            said, over = request.append(token, now_s)
            request.said.add(said)
            self._totals.generated_tokens += 1
            drawn.append(token)
            if over is not None or place + 1 == len(logits) or token != request.draft.tokens[place]:
                break
            request.computed += 1
            self._totals.right_drafts += 1
        self.speculator.learn(request.draft, drawn, len(logits) - 1)
        if self._ladders is not None and request.rungs is not None:
            self._ladders.trust(request.rungs, request.computed)
        return over

    def _measure(self, work: list[Work], started_s: float, now_s: float, was_read: bool) -> None:
        if was_read:  # pages of the store were
            self._lost_steps = 0
        decode_rows = sum(item.rows for item in work if item.decodes)
        prefill_rows = sum(item.rows for item in work if not item.decodes)
        drafted_rows = sum(item.chunk.count - 1 for item in work if item.decodes)
        self.speculator.measure(now_s - started_s, self.rates.decode_s, drafted_rows)
        if drafted_rows:
            self._totals.drafted_tokens += drafted_rows
        else:
            self.rates = self.rates.after(now_s - started_s, decode_rows, prefill_rows)
        self._totals.steps += 1
        self._totals.step_s += now_s - started_s
        self._totals.prefill_rows += prefill_rows
        is_bounded = any(item.request.mode is not None for item in work)
        if prefill_rows and not decode_rows and not was_read and not is_bounded:
            parts = [part for item in work for part in item.parts]
            positions = sum(len(part.tokens) * (part.start + len(part.tokens) / 2) for part in parts)
            self._estimator.add(prefill_rows, positions / prefill_rows, now_s - started_s)
            self._pager.residency.cost = self._estimator.cost

    def _lose(self, lost: StagingLost) -> None:
        """A step could not be computed: its requests compute what was lost once more."""
        self._totals.lost_steps += 1
        self._lost_steps += 1
        log.warning("a step found %d streamed pages missing: %s", len(lost.keys), lost)
        self._pager.tables.lose(lost, self._pager.leases)
        if self._lost_steps >= MAX_LOST_STEPS:
            self._pager.writeback.turn_off(f"{self._lost_steps} steps in a row could not read their pages: {lost}")


def spoiled_pages(request: Request, exc: BaseException) -> list[Node]:
    """The known pages of a request whose model gave no numbers. What else it computed does not become known."""
    if request.lease is None or not isinstance(exc, BadLogits):
        return []
    request.computed = 0
    return [*request.lease.nodes, *([request.lease.tail_of] if request.lease.tail_of is not None else [])]


def _parts(request: Request, chunk: Chunk, limits: Limits) -> list[Part]:
    """The rows of a chunk, without their pages."""
    beams, start, lease = request.beams, chunk.start, request.lease
    assert lease is not None  # the plan has chunks only for requests in PREFILL and DECODE
    nowhere = lease.table[:0]
    if beams is not None and beams.forked:
        newest = zip(beams.leases, beams.newest, strict=True)
        return [Part(branch, [token], start, 1, nowhere, []) for branch, token in newest]
    known = request.tokens[start : start + chunk.count]
    if chooses(request, start):  # each on its own: they read different pages
        last = chunk.count - 1
        return [
            Part(lease, [token], start + row, int(chunk.sample and row == last), nowhere, [],
                 bound_of(request, start + row, limits.page_tokens),
                 wanted_by(request, lease, start + row, start + row + 1, limits.page_tokens))
            for row, token in enumerate(known)
        ]  # fmt: skip
    drafted = request.draft.tokens[: chunk.count - len(known)]
    sample = 1 + len(drafted) if chunk.sample and request.embedding is None else 0
    if not chunk.count:  # nothing but copies is made up
        return [Part(lease, [], start, 0, nowhere, [])]
    if request.rungs is not None:  # block by block: each sees other tokens exact
        rows, stop = [*known, *drafted], start + chunk.count
        return [
            Part(lease, rows[first - start : end - start], first, max(0, min(sample - (stop - end), end - first)),
                 nowhere, [])
            for first, end in blocks(request.rungs.ladder, start, stop, chunk.count)
        ]  # fmt: skip
    bound, end = bound_of(request, start, limits.page_tokens, limits.window), start + len(known)
    wanted, kept = wanted_by(request, lease, start, end, limits.page_tokens), kept_places(request, lease, start)
    observed = request.heavy.observes(start, end) if request.heavy is not None else 0
    return [Part(lease, [*known, *drafted], start, sample, nowhere, [], bound, wanted, kept, observed)]


def lease_of(item: Work) -> Lease:
    """That of its request, which is no beam search."""
    return item.parts[0].lease


def _end(part: Part) -> int:
    return part.start + len(part.tokens)
