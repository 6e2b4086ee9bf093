"""The requests of an engine and what a step does to them: admit, fetch, compute, draw, commit, end.

Threading: step thread only. Events are collected and handed out once per turn, so that the io thread wakes once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from tierd.daemon.engine import bounded, fetch, scheduler, sharing
from tierd.daemon.engine.beams import MAX_RESTARTS, Beams
from tierd.daemon.engine.ladder import Ladders
from tierd.daemon.engine.outbox import Outbox
from tierd.daemon.engine.request import Finish, Request, Totals
from tierd.daemon.engine.runner import Runner
from tierd.daemon.engine.scheduler import Chunk, Limits, Phase, Rates, Snapshot
from tierd.daemon.engine.sharing import Following
from tierd.daemon.engine.speculate import Speculator
from tierd.daemon.engine.stepping import Logits, Steps, Work, spoiled_pages
from tierd.daemon.errors import EngineFailed, OutOfSpace, TierdError, to_wire
from tierd.daemon.protocol import Event
from tierd.tiers.errors import TierFull
from tierd.tiers.lease import Lease
from tierd.tiers.pager import Pager
from tierd.tiers.prefixes import Prefixes

log = logging.getLogger(__name__)

# A fetch that is not complete by then is given up and its pages are recomputed. Reading 2 GB/s, it covers 60 GB.
FETCH_TIMEOUT_S = 30.0
# Pages that eviction promised have to come within this time, even from a slow disk; then somebody gives up his.
STUCK_S = 30.0
STILL_S = 1.0  # the same where nothing is under way that could free a page


class Streams:
    """All live requests.

    Invariant, at the end of every method: a request is in the table exactly until its terminal event has been
    collected, and holds a lease exactly in FETCHING, PREFILL and DECODE.
    """

    def __init__(
        self, pager: Pager, runner: Runner, limits: Limits, clock: Callable[[], float],
        prefixes: Prefixes | None = None, speculator: Speculator | None = None, ladders: Ladders | None = None,
    ) -> None:  # fmt: skip
        self._pager = pager
        self._prefixes = prefixes if prefixes is not None else Prefixes(pager, None)
        self._runner = runner
        self._limits = limits
        self._clock = clock
        self._moved_s = self._still_s = clock()  # last work; last sign that there may be some
        self._requests: dict[int, Request] = {}
        self._outbox = Outbox()
        self._following: dict[int, Following] = {}  # as of the last snapshot
        self.totals = Totals()
        self.ladders = ladders
        self._steps = Steps(pager, runner, limits, clock, self.totals, speculator or Speculator(), ladders)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def rates(self) -> Rates:
        """What steps take, as measured."""
        return self._steps.rates

    @property
    def streaming(self) -> dict[str, int | float]:
        """What was read from the store by running steps."""
        return self._runner.streaming | {"lost_steps": self.totals.lost_steps}

    @property
    def speculation(self) -> dict[str, object]:
        """The setting, what was drafted, and what a drafted row costs, in steps."""
        drafted = {"drafted_tokens": self.totals.drafted_tokens, "right_drafts": self.totals.right_drafts}
        return self._steps.speculator.statistics() | drafted

    def count(self, *phases: Phase) -> int:
        """Requests in any of these phases."""
        return sum(request.phase in phases for request in self._requests.values())

    def take_events(self) -> list[Event]:
        """The events collected since the last call, in order."""
        return self._outbox.take()

    # -- from outside ----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request in. One that was resumed with nothing left to say ends at once."""
        self._requests[request.id] = request
        self.totals.requests += 1
        width = 1 if request.beams is None else request.beams.width
        if width > (most := min(self._limits.max_rows, self._pager.device.slots)):
            self.fail(request, OutOfSpace(f"a step has room for {most} beams, not for {width}", param="beam_width"))
        elif not bounded.fits(self._pager, request):
            self.fail(request, bounded.no_room(self._pager, request))
        elif (over := request.over) is not None:
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
        self._pager.distrust.add(spoiled_pages(request, exc))
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

    def turn(self, awaited: Callable[[], bool] = lambda: False) -> bool:
        """One step. True when another turn should follow at once; else what moves pages wakes the loop, or time does.

        `awaited`: whether somebody waits for the next turn by now. A long step that only computes prompts gives way.

        What goes wrong with one request ends that one. An exception comes out when the computation itself or the
        page table failed; `fail_all` is then the caller's next call.
        """
        now_s = self._clock()
        moved = self._pager.poll(now_s)
        self._prefixes.expire()
        self._arrive(now_s)
        self._steps.draft(self._requests.values())
        plan = scheduler.plan(self._snapshot(now_s), self._limits)
        for request_id in plan.preempt:
            self._preempt(self._requests[request_id])
        for request_id in plan.admit:
            self._admit(self._requests[request_id], now_s)
        chunks = plan.chunks
        if plan.admit or plan.preempt:
            # Who was just let in takes part in this very step: it must not wait for 512 rows of somebody else.
            chunks = scheduler.plan(self._snapshot(now_s), self._limits).chunks
        if fetch.is_joining(self._requests.values(), now_s):
            return moved  # the mover wakes the loop
        for request in self._requests.values():
            if request.lease is not None and request.id not in self._following:
                self._accept(request, request.lease)
        work = self._gather(chunks)
        if work:
            self._compute(work, lambda: awaited() and fetch.has_place(self._requests.values(), self._limits))
        self._outbox.due(self._requests.values(), self._clock())
        self._unstick(self._clock(), bool(work), moved)  # the step itself may have taken long
        # Not for whoever was let in and can't compute yet: it waits for pages.
        return bool(work or plan.preempt or moved)

    def _snapshot(self, now_s: float) -> Snapshot:
        streams, self._following = sharing.look(self._requests.values(), self._pager, self._limits, now_s)
        pager, reads_weights = self._pager, self._runner.reads_weights
        return Snapshot(streams, pager.memory_pages, pager.writable_pages, self.rates, reads_weights)

    def _admit(self, request: Request, now_s: float) -> None:
        """Pin what is known of its tokens and start moving it to memory."""
        if not self._pager.leases:
            self._moved_s = self._still_s = now_s  # nobody waited for pages, however long ago the last turn was
        try:
            lease = bounded.match(self._pager, request, self.ladders)
        except Exception as exc:
            self.fail(request, exc)
            return
        sharing.keys_of(request, self._pager)
        request.lease, request.phase = lease, Phase.FETCHING
        request.times.admitted_s = request.times.admitted_s or now_s
        request.fetched_s, request.settled = now_s, False
        try:
            unseen = bounded.unseen_pages(request, lease.num_tokens, self._limits)
            request.fetched_pages = sum(place >= unseen for place in lease.absent)
            self._pager.fetch(lease, now_s + FETCH_TIMEOUT_S, unseen)
        except Exception as exc:
            self.fail(request, exc)
        else:
            self._advance(request, lease, now_s)

    def _arrive(self, now_s: float) -> None:
        """Take in what became of the pages of all requests."""
        for request in list(self._requests.values()):
            if not bounded.fits(self._pager, request):  # any more: a tier was turned off, or memory taken away
                self.fail(request, bounded.no_room(self._pager, request))
            elif request.lease is not None:
                self._advance(request, request.lease, now_s)

    def _advance(self, request: Request, lease: Lease, now_s: float) -> None:
        """Where a request stands: past what is there, before what is to be computed or waited for."""
        if request.beams is not None and request.beams.forked:
            self._advance_beams(request, request.beams)
            return
        self._pager.tables.refresh(lease)
        if (lease.dropped or request.thinned) and lease.absent:
            self._preempt(request)  # a page is lost that rows still see: what would compute it anew is gone, too
            return
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
            if not request.private and (pages := self._pager.adopt(lease, request.findable)):
                size = self._limits.page_tokens
                self.totals.cached_tokens += request.spare(pages * size, len(lease.nodes) * size)
            request.computed = lease.skip(request.computed)
        bounded.thin(self._pager, request, lease)

    def _advance_beams(self, request: Request, beams: Beams) -> None:
        """Fork what is to be forked. A search that lost a page begins again: what it computed is known."""
        for lease in beams.leases:
            self._pager.tables.refresh(lease)
        if not beams.is_broken(request.computed):
            beams.settle(self._pager, request)
        elif beams.restarts < MAX_RESTARTS:
            beams.restarts += 1
            self._preempt(request)
        else:
            self.fail(request, EngineFailed("pages of a beam search were lost again and again"))

    def _accept(self, request: Request, lease: Lease) -> None:
        """Tell how much of the prompt was found, once everything that was found is there or was computed after all."""
        if request.settled or not lease.ready:
            return
        request.settled, before = True, request.cached_tokens
        request.covered(lease)
        bounded.promise(request, lease, self.ladders)
        self.totals.cached_tokens += request.cached_tokens - before
        if not request.accepted:
            request.accepted = True
            if request.fetched_pages:
                request.times.restored_s = self._clock()
            self.totals.prompt_tokens += request.prompt_tokens
            self._outbox.accepted(request)

    def _preempt(self, request: Request) -> None:
        """Give its pages back. It keeps its rank and its tokens and returns by match and fetch."""
        self.totals.preemptions += 1
        self._release(request)
        request.phase, request.keys = Phase.WAITING, []
        if request.beams is not None:
            del request.tokens[request.prompt_tokens :]

    def _gather(self, chunks: Iterable[Chunk]) -> list[Work]:
        """The chunks that have pages for all their rows now."""
        work, failed = self._steps.gather((self._requests[chunk.id], chunk) for chunk in chunks)
        capacity = self._pager.capacity_pages * self._limits.page_tokens
        for item, exc in failed:
            end = item.chunk.start + item.chunk.count
            if not isinstance(exc, TierFull):
                self.fail(item.request, exc)
            elif max(end, *(part.lease.reached for part in item.parts)) > capacity and item.request.keeps_all:
                self.fail(item.request, fetch.no_room(self._pager, end))
            else:
                self._preempt(item.request)  # its own newest page is in the way of an older one: begin again
        return work

    def _unstick(self, now_s: float, worked: bool, moved: bool) -> None:
        """Pages that the plan counted on do not come: no wait without a deadline, and none for nothing."""
        active = [request for request in self._requests.values() if request.phase in (Phase.PREFILL, Phase.DECODE)]
        if worked or not active:
            self._moved_s = self._still_s = now_s
        elif moved or self._pager.evictor.under_way or self._pager.writeback.paused:
            self._still_s = now_s  # what a pause holds up may go on when it is over
        if (waited_s := now_s - self._moved_s) > STUCK_S or now_s - self._still_s > STILL_S:
            self._moved_s = self._still_s = now_s
            if pages := self._prefixes.give_up():
                log.error("no pages for %.0f s: %d that were to be kept may go", waited_s, pages)
                return
            last = max(active, key=lambda request: request.rank)
            log.error("no pages for %.0f s: request %d gives way", waited_s, last.id)
            # Not preempted: it would come back and wait for the same pages.
            self.fail(last, fetch.stuck(self._pager, last.computed + 1))

    def _compute(self, work: list[Work], awaited: Callable[[], bool]) -> None:
        """Run the rows, then draw, commit and tell for each stream on its own."""
        found = self._steps.run(work, awaited)
        if found is None:
            return
        now_s = self._clock()
        for item, logits in zip(work, found, strict=True):
            try:
                self._absorb(item, logits, now_s)
            except Exception as exc:
                if item.request.phase is Phase.FINISHED:
                    raise  # it has ended; what failed is giving back its pages
                self.fail(item.request, exc)

    def _absorb(self, item: Work, logits: Logits, now_s: float) -> None:  # [wanted, vocab]
        """Book the rows of one stream and draw its next token if they were its last."""
        request, before = item.request, item.request.computed
        # What was computed for drafted tokens counts when they turn out right.
        request.computed = min(before + item.chunk.count, len(request.tokens))
        if request.beams is not None and (request.beams.forked or item.chunk.sample):
            self._search(request, request.beams, logits, now_s)
            return
        self._commit(request, item.parts[0].lease, before)
        if not len(logits):
            if request.embedding is not None and request.computed == len(request.tokens):
                self._finish(request, Finish.STOP)
            return
        if request.phase is Phase.PREFILL:
            self._keep(request, item.parts[0].lease)
        request.phase = Phase.DECODE
        known = request.computed
        over = self._steps.draw(request, logits, now_s)
        self._commit(request, item.parts[0].lease, known)
        if over is not None:
            self._finish(request, over)

    def _commit(self, request: Request, lease: Lease, before: int) -> None:
        """Name the pages that were filled since the request had computed `before` rows."""
        request.farthest = max(request.farthest, request.computed)
        lease.unseen = bounded.unseen_pages(request, request.computed, self._limits)
        size = self._limits.page_tokens
        if not request.private and request.computed // size > before // size:
            bounded.commit(self._pager, request, lease, self.ladders)
            self._accept(request, lease)

    def _keep(self, request: Request, lease: Lease) -> None:
        """Grant the wishes of a request whose prompt is computed, or found."""
        for tokens, ttl_s in request.keep:
            if 0 < (pages := tokens // self._limits.page_tokens) <= len(lease.nodes):
                self._prefixes.keep(lease.nodes[pages - 1], ttl_s)

    def _search(self, request: Request, beams: Beams, logits: Logits, now_s: float) -> None:
        """One token more for each hypothesis; at the end the best of them are told."""
        assert request.lease is not None
        if not beams.forked:
            self._pager.commit(request.lease, request.tokens[: request.computed])
            self._accept(request, request.lease)
        request.phase = Phase.DECODE
        beams.take(self._pager, request, logits)
        request.times.first_token_s = request.times.first_token_s or now_s
        request.times.last_token_s = now_s
        self.totals.generated_tokens += 1
        assert beams.search is not None
        if not beams.search.over:
            request.tokens[request.prompt_tokens :] = beams.search.running[0].tokens
            return
        request.tokens[request.prompt_tokens :] = beams.best()[0].tokens
        self._outbox.beams(request)
        self._leave(request)

    # -- ends ------------------------------------------------------------------------------------------------------

    def _finish(self, request: Request, finish: Finish) -> None:
        if request.remember is not None:
            request.remember(request)
        self._outbox.done(request, finish)  # raises before it tells anything: then the request fails as any other
        self._leave(request)

    def _end(self, request: Request, event: str, data: Mapping[str, object]) -> None:
        self._outbox.end(request, event, data)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """The one way out, after the terminal event: nothing but giving back its pages can fail any more."""
        assert request.phase is not Phase.FINISHED
        del self._requests[request.id]
        try:
            self._release(request)
        finally:
            request.phase = Phase.FINISHED
            if not self._requests:
                self._runner.rest()

    def _release(self, request: Request) -> None:
        """Give the lease back with every token that is complete in its pages: full ones and the tail stay known."""
        request.selection = request.heavy = None
        lease, request.lease = request.lease, None
        if request.beams is not None and request.beams.forked:
            request.computed = 0
            request.beams.release(self._pager, request)
        elif lease is not None:
            known = request.exact if request.phase is not Phase.FETCHING and not request.private else []
            request.computed = 0
            bounded.release(self._pager, request, lease, known, self.ladders)
