"""The requests of an engine and what a step does to them: admit, fetch, compute, draw, commit, end.

Threading: step thread only. Events are collected and handed out once per turn, so that the io thread wakes once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tierd.daemon.engine import batch, fetch, scheduler
from tierd.daemon.engine.request import Finish, Request, Totals
from tierd.daemon.engine.runner import Runner
from tierd.daemon.engine.scheduler import Chunk, Limits, Phase, Rates, Snapshot
from tierd.daemon.errors import OutOfSpace, TierdError, to_wire
from tierd.daemon.protocol import Event
from tierd.tiers.errors import StagingLost, TierFull
from tierd.tiers.lease import Lease
from tierd.tiers.page import PageKey
from tierd.tiers.pager import Pager
from tierd.tiers.policy import CostEstimator

log = logging.getLogger(__name__)

# A fetch that is not complete by then is given up and its pages are recomputed. Reading 2 GB/s, it covers 60 GB.
FETCH_TIMEOUT_S = 30.0
# Pages that eviction promised have to come within this time, even from a slow disk; then somebody gives up his.
STUCK_S = 30.0
# Steps in a row whose streamed pages could not be read. Each time what was lost is computed again; a disk that loses
# pages as fast as they are computed is turned off.
MAX_LOST_STEPS = 5
# An event costs io thread, front and client a millisecond together, a tenth of a decode step on two cores that have to
# compute as well. 20 pieces of text a second look as smooth as 100.
TELL_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class _Work:
    """A chunk that has its pages."""

    request: Request
    lease: Lease
    chunk: Chunk
    decodes: bool
    pages: batch.Addresses
    streamed: list[PageKey]


class Streams:
    """All live requests.

    Invariant, at the end of every method: a request is in the table exactly until its terminal event has been
    collected, and holds a lease exactly in FETCHING, PREFILL and DECODE.
    """

    def __init__(self, pager: Pager, runner: Runner, limits: Limits, clock: Callable[[], float]) -> None:
        self._pager = pager
        self._runner = runner
        self._limits = limits
        self._clock = clock
        self._moved_s = clock()
        self._requests: dict[int, Request] = {}
        self._events: list[Event] = []
        self._estimator = CostEstimator()
        self._lost_steps = 0  # in a row
        self.rates = Rates()
        self.totals = Totals()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def streaming(self) -> dict[str, int | float]:
        """What was read from the store by running steps."""
        return self._runner.streaming | {"lost_steps": self.totals.lost_steps}

    def count(self, *phases: Phase) -> int:
        """Requests in any of these phases."""
        return sum(request.phase in phases for request in self._requests.values())

    def take_events(self) -> list[Event]:
        """The events collected since the last call, in order."""
        events, self._events = self._events, []
        return events

    # -- from outside ----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request in. One that was resumed with nothing left to say ends at once."""
        self._requests[request.id] = request
        self.totals.requests += 1
        if (over := request.over) is not None:
            self._finish(request, over)

    def cancel(self, request_id: int) -> None:
        """End a request with `aborted`, if it is still there. Its complete pages stay known."""
        if (request := self._requests.get(request_id)) is not None:
            self._end(request, "aborted", {"usage": request.usage()})

    def fail(self, request: Request, exc: BaseException) -> None:
        """End a request with `failed`."""
        self.totals.failures += 1
        if not isinstance(exc, TierdError):
            log.error("request %d failed", request.id, exc_info=exc)
        self._end(request, "failed", to_wire(exc))

    def fail_all(self, exc: BaseException) -> None:
        """End every request with the same error, even when giving back its pages fails as well."""
        for request in list(self._requests.values()):
            try:
                self.fail(request, exc)
            except Exception:
                log.exception("pages of request %d could not be given back", request.id)

    def abort_all(self) -> None:
        """End every request with `aborted`."""
        for request_id in list(self._requests):
            self.cancel(request_id)

    # -- one turn --------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """One step. True when another turn should follow at once; else what moves pages wakes the loop, or time does.

        What goes wrong with one request ends that one. An exception comes out when the computation itself or the
        page table failed; `fail_all` is then the caller's next call.
        """
        now_s = self._clock()
        moved = self._pager.poll(now_s)
        self._arrive(now_s)
        plan = scheduler.plan(self._snapshot(now_s), self._limits)
        for request_id in plan.preempt:
            self._preempt(self._requests[request_id])
        for request_id in plan.admit:
            self._admit(self._requests[request_id], now_s)
        chunks = plan.chunks
        if plan.admit or plan.preempt:
            # Who was just let in takes part in this very step: it must not wait for 512 rows of somebody else.
            chunks = scheduler.plan(self._snapshot(now_s), self._limits).chunks
        work = self._gather(chunks)
        if work:
            self._compute(work)
        self._tell()
        self._unstick(self._clock(), bool(work))  # the step itself may have taken long
        # Not for whoever was let in and can't compute yet: it waits for pages.
        return bool(work or plan.preempt or moved)

    def _snapshot(self, now_s: float) -> Snapshot:
        streams = tuple(request.seen(now_s, self._shared(request)) for request in self._requests.values())
        return Snapshot(streams, self._pager.memory_pages, self._pager.writable_pages, self.rates)

    def _shared(self, request: Request) -> int:
        """Pages of a waiting request that cost no memory, for live ones need them anyway."""
        if request.phase is not Phase.WAITING or not 0 < len(self._pager.leases) < self._limits.max_streams:
            return 0  # nothing is shared, or nobody is let in
        if not request.keys:
            request.keys = self._pager.chain(request.tokens, request.salt)
        return self._pager.leased_pages(request.keys)

    def _admit(self, request: Request, now_s: float) -> None:
        """Pin what is known of its tokens and start moving it to memory."""
        if not self._pager.leases:
            self._moved_s = now_s  # nobody waited for pages until now, however long ago the last turn was
        try:
            again = request.times.admitted_s > 0.0 or request.resumed > 0
            lease = self._pager.match(request.tokens, request.salt, again=again)
        except Exception as exc:
            self.fail(request, exc)
            return
        request.lease, request.phase = lease, Phase.FETCHING
        request.times.admitted_s = request.times.admitted_s or now_s
        request.fetched_s, request.fetched_pages, request.settled = now_s, len(lease.absent), False
        try:
            self._pager.fetch(lease, now_s + FETCH_TIMEOUT_S)
        except Exception as exc:
            self.fail(request, exc)
        else:
            self._advance(request, lease, now_s)

    def _arrive(self, now_s: float) -> None:
        """Take in what became of the pages of all requests."""
        capacity = self._pager.capacity_pages * self._limits.page_tokens  # less than it was, if a tier was turned off
        for request in list(self._requests.values()):
            if len(request.tokens) > capacity:
                self.fail(request, self._no_room(len(request.tokens)))
            elif request.lease is not None:
                self._advance(request, request.lease, now_s)

    def _advance(self, request: Request, lease: Lease, now_s: float) -> None:
        """Where a request stands: past what is there, before what is to be computed or waited for."""
        self._pager.tables.refresh(lease)
        if request.phase is Phase.FETCHING:
            if not fetch.may_compute(self._pager, request, lease, now_s):
                return
            request.phase, request.computed = Phase.PREFILL, 0
        elif lease.absent:
            lease.reached = max(lease.reached, request.computed)
            hole = min(lease.absent) * self._limits.page_tokens
            if hole < request.computed - request.computed % self._limits.page_tokens:
                request.phase, request.computed, request.settled = Phase.PREFILL, hole, False
                self._pager.committer.abandon(lease)
            if lease.private and not self._pager.writable_pages:
                self._pager.committer.shorten(lease)
        if request.phase is Phase.PREFILL:
            request.computed = lease.skip(request.computed)
        self._accept(request, lease)

    def _accept(self, request: Request, lease: Lease) -> None:
        """Tell how much of the prompt was found, once everything that was found is there or was computed after all."""
        if request.settled or not lease.ready:
            return
        request.settled = True
        request.covered(lease)
        if not request.accepted:
            request.accepted = True
            self.totals.prompt_tokens += request.prompt_tokens
            self.totals.cached_tokens += request.cached_tokens
            data = {"prompt_tokens": request.prompt_tokens, "cached_tokens": request.cached_tokens}
            self._events.append(Event(request.id, "accepted", data))

    def _preempt(self, request: Request) -> None:
        """Give its pages back. It keeps its rank and its tokens and returns by match and fetch."""
        self.totals.preemptions += 1
        self._release(request)
        request.phase, request.keys = Phase.WAITING, []

    def _gather(self, chunks: Iterable[Chunk]) -> list[_Work]:
        """The chunks that have pages for all their rows now."""
        work = []
        for chunk in chunks:
            request = self._requests[chunk.id]
            lease = request.lease
            assert lease is not None  # the plan has chunks only for requests in PREFILL and DECODE
            end = chunk.start + chunk.count
            try:
                if not self._pager.allocate(lease, chunk.start, end):
                    continue
                pages = self._pager.tables.addresses(lease, scheduler.pages_for(end, self._limits.page_tokens))
            except TierFull:
                if max(end, lease.reached) > self._pager.capacity_pages * self._limits.page_tokens:
                    self.fail(request, self._no_room(end))
                else:
                    self._preempt(request)  # its own newest page is in the way of an older one: begin again
            except Exception as exc:
                self.fail(request, exc)
            else:
                work.append(_Work(request, lease, chunk, request.phase is Phase.DECODE, pages, []))
        # Slots for one chunk may have cost another one a page in memory: look again, now that all have theirs.
        return [found for item in work if (found := self._located(item)) is not None]

    def _located(self, item: _Work) -> _Work | None:
        """The chunk with its pages as they lie now; None when one of them is nowhere any more."""
        tables = self._pager.tables
        pages = tables.addresses(item.lease, len(item.pages))
        if any(place < len(pages) and place not in item.lease.filling for place in item.lease.absent):
            return None
        return replace(item, pages=pages, streamed=tables.streamed(item.lease, pages))

    def _no_room(self, tokens: int) -> OutOfSpace:
        return OutOfSpace(
            f"{tokens} tokens do not fit the {self._pager.capacity_pages} pages that all tiers hold together",
            hint="give tierd more memory with --device-mem, --host-mem or --nvme-mem",
        )

    def _unstick(self, now_s: float, worked: bool) -> None:
        """Pages that the plan counted on do not come: no wait without a deadline."""
        active = [request for request in self._requests.values() if request.phase in (Phase.PREFILL, Phase.DECODE)]
        if worked or not active:
            self._moved_s = now_s
        elif now_s - self._moved_s > STUCK_S:
            self._moved_s = now_s
            last = max(active, key=lambda request: request.rank)
            log.error("no pages for %.0f s: request %d gives way", STUCK_S, last.id)
            # Not preempted: it would come back and wait for the same pages.
            self.fail(last, self._no_room(last.computed + 1))

    def _compute(self, work: list[_Work]) -> None:
        """Run the rows, then draw, commit and tell for each stream on its own."""
        rows = [
            batch.Rows(
                item.request.tokens[item.chunk.start : item.chunk.start + item.chunk.count],
                item.chunk.start,
                item.pages,
                item.chunk.sample,
            )
            for item in work
        ]
        started_s = self._clock()
        for item in work:
            item.request.times.started_s = item.request.times.started_s or started_s
        try:
            logits = self._runner.run(
                batch.build(rows, self._limits.page_tokens), [key for item in work for key in item.streamed]
            )
        except StagingLost as lost:
            self._lose(lost)
            return
        if any(item.streamed for item in work):
            self._lost_steps = 0
        now_s = self._clock()
        decode_rows = sum(item.decodes for item in work)
        prefill_rows = sum(item.chunk.count for item in work if not item.decodes)
        self.rates = self.rates.after(now_s - started_s, decode_rows, prefill_rows)
        self.totals.steps += 1
        self.totals.step_s += now_s - started_s
        self.totals.prefill_rows += prefill_rows
        if prefill_rows and not decode_rows and not any(item.streamed for item in work):
            positions = sum(item.chunk.count * (item.chunk.start + item.chunk.count / 2) for item in work)
            self._estimator.add(prefill_rows, positions / prefill_rows, now_s - started_s)
            self._pager.residency.cost = self._estimator.cost
        drawn = iter(logits)
        for item in work:
            row = next(drawn) if item.chunk.sample else None
            try:
                self._absorb(item, row, now_s)
            except Exception as exc:
                if item.request.phase is Phase.FINISHED:
                    raise  # it has ended; what failed is giving back its pages
                self.fail(item.request, exc)

    def _lose(self, lost: StagingLost) -> None:
        """A step could not be computed: its requests compute what was lost once more."""
        self.totals.lost_steps += 1
        self._lost_steps += 1
        log.warning("a step found %d streamed pages missing: %s", len(lost.keys), lost)
        self._pager.tables.lose(lost, self._pager.leases)
        if self._lost_steps >= MAX_LOST_STEPS:
            self._pager.writeback.turn_off(f"{self._lost_steps} steps in a row could not read their pages: {lost}")

    def _absorb(self, item: _Work, logits: npt.NDArray[np.float32] | None, now_s: float) -> None:
        """Book the rows of one stream and draw its next token if they were its last."""
        request, before = item.request, item.request.computed
        request.computed += item.chunk.count
        if request.computed // self._limits.page_tokens > before // self._limits.page_tokens:
            self._pager.commit(item.lease, request.tokens[: request.computed])
            self._accept(request, item.lease)
        if logits is None:
            return
        request.phase = Phase.DECODE
        token = request.sampler.sample(logits, len(request.tokens))
        text, over = request.append(token, now_s)
        self.totals.generated_tokens += 1
        request.unsent_text += text
        if over is not None:
            self._finish(request, over)

    def _tell(self) -> None:
        """Hand out text: the first of a stream at once, more of it when it had none for a while."""
        now_s = self._clock()
        for request in self._requests.values():
            if request.unsent_text and now_s - request.told_s >= TELL_EVERY_S:
                request.told_s = now_s
                self._tell_one(request)

    def _tell_one(self, request: Request) -> None:
        # Tokens travel with the text they made, so that whoever resumes holds exactly the tokens of its text.
        self._events.append(Event(request.id, "text", {"text": request.unsent_text, "tokens": request.unsent}))
        request.unsent, request.unsent_text = [], ""

    # -- ends ------------------------------------------------------------------------------------------------------

    def _finish(self, request: Request, finish: Finish) -> None:
        if request.unsent and not request.unsent_text:
            self._tell_one(request)  # no text, but the client gets all tokens of a complete answer
        data = {"finish": finish.value, "usage": request.usage(), "timings": request.timings()}
        self._end(request, "done", data)

    def _end(self, request: Request, event: str, data: Mapping[str, object]) -> None:
        """The one way out: the terminal event is collected even when giving back the pages fails."""
        assert request.phase is not Phase.FINISHED
        del self._requests[request.id]
        if not self._requests:
            self._runner.rest()
        if request.unsent_text:
            self._tell_one(request)
        self._events.append(Event(request.id, event, dict(data)))
        try:
            self._release(request)
        finally:
            request.phase = Phase.FINISHED

    def _release(self, request: Request) -> None:
        """Give the lease back with every token that is complete in its pages: full ones and the tail stay known."""
        lease, request.lease = request.lease, None
        if lease is not None:
            computed = request.computed if request.phase is not Phase.FETCHING else 0
            request.computed = 0
            self._pager.release(lease, request.tokens[:computed])
