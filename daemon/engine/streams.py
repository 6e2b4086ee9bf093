"""The requests of an engine and what a step does to them: admit, fetch, compute, draw, commit, end.

Threading: step thread only. Events are collected and handed out once per turn, so that the io thread wakes once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierd.daemon.engine import batch, scheduler
from tierd.daemon.engine.request import Finish, Request
from tierd.daemon.engine.runner import Runner
from tierd.daemon.engine.scheduler import Chunk, Limits, Phase, Rates, Snapshot, Stream
from tierd.daemon.errors import OutOfSpace, TierdError, to_wire
from tierd.daemon.protocol import Event
from tierd.tiers.errors import TierFull
from tierd.tiers.lease import Lease
from tierd.tiers.pager import Pager

log = logging.getLogger(__name__)

# A fetch that is not complete by then is given up and its pages are recomputed. Reading 2 GB/s, it covers 60 GB.
FETCH_TIMEOUT_S = 30.0
# Pages that eviction promised have to come within this time, even from a slow disk; then somebody gives up his.
STUCK_S = 30.0
# An event costs io thread, front and client a millisecond together, a tenth of a decode step on two cores that have to
# compute as well. 20 pieces of text a second look as smooth as 100.
TELL_EVERY_S = 0.05


@dataclass(slots=True)
class Totals:
    """Counters since the engine started."""

    requests: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_rows: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    failures: int = 0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Work:
    """A chunk that has its pages."""

    request: Request
    lease: Lease
    chunk: Chunk
    decodes: bool


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
        self.rates = Rates()
        self.totals = Totals()

    def __len__(self) -> int:
        return len(self._requests)

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
        """One step. True when something was done, so that another turn can follow at once.

        What goes wrong with one request ends that one. An exception comes out when the computation itself or the
        page table failed; `fail_all` is then the caller's next call.
        """
        now_s = self._clock()
        moved = self._pager.poll(now_s)
        self._arrive()
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
        self._unstick(now_s, bool(work))
        return bool(work or plan.admit or plan.preempt or moved)

    def _snapshot(self, now_s: float) -> Snapshot:
        device = self._pager.device
        streams = tuple(self._seen(request, now_s) for request in self._requests.values())
        return Snapshot(streams, device.num_free + device.cached, self.rates)

    def _admit(self, request: Request, now_s: float) -> None:
        """Pin what is known of its tokens and start moving it to the device."""
        try:
            lease = self._pager.match(request.tokens, request.salt)
        except Exception as exc:
            self.fail(request, exc)
            return
        request.lease, request.phase = lease, Phase.FETCHING
        request.times.admitted_s = request.times.admitted_s or now_s
        try:
            self._pager.fetch(lease, now_s + FETCH_TIMEOUT_S)
        except Exception as exc:
            self.fail(request, exc)
        else:
            self._arrive()

    def _arrive(self) -> None:
        """Fetched requests go on to prefill. What a lost page held is computed: the lease says how far it reaches."""
        for request in self._requests.values():
            lease = request.lease
            if request.phase is not Phase.FETCHING or lease is None or not lease.ready:
                continue
            request.phase, request.computed = Phase.PREFILL, lease.num_tokens
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
        request.phase = Phase.WAITING

    def _gather(self, chunks: Iterable[Chunk]) -> list[_Work]:
        """The chunks that have pages for all their rows now."""
        work = []
        for chunk in chunks:
            request = self._requests[chunk.id]
            lease = request.lease
            assert lease is not None  # the plan has chunks only for requests in PREFILL and DECODE
            try:
                if self._has_pages(lease, chunk):
                    work.append(_Work(request, lease, chunk, request.phase is Phase.DECODE))
            except Exception as exc:
                self.fail(request, exc)
        return work

    def _has_pages(self, lease: Lease, chunk: Chunk) -> bool:
        end = chunk.start + chunk.count
        missing = scheduler.pages_for(end, self._limits.page_tokens) - len(lease.slots)
        if missing <= 0:
            return True
        try:
            return self._pager.allocate(lease, missing) is not None
        except TierFull as exc:
            raise self._no_room(end) from exc

    def _no_room(self, tokens: int) -> OutOfSpace:
        return OutOfSpace(
            f"{tokens} tokens do not fit the {self._pager.device.slots} pages of the device",
            hint="give tierd more memory with --device-mem",
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
                item.lease.slots,
                item.chunk.sample,
            )
            for item in work
        ]
        started_s = self._clock()
        for item in work:
            item.request.times.started_s = item.request.times.started_s or started_s
        logits = self._runner.run(batch.build(rows, self._limits.page_tokens))
        now_s = self._clock()
        decode_rows = sum(item.decodes for item in work)
        prefill_rows = sum(item.chunk.count for item in work if not item.decodes)
        self.rates = self.rates.after(now_s - started_s, decode_rows, prefill_rows)
        self.totals.steps += 1
        self.totals.step_s += now_s - started_s
        self.totals.prefill_rows += prefill_rows
        drawn = iter(logits)
        for item in work:
            row = next(drawn) if item.chunk.sample else None
            try:
                self._absorb(item, row, now_s)
            except Exception as exc:
                if item.request.phase is Phase.FINISHED:
                    raise  # it has ended; what failed is giving back its pages
                self.fail(item.request, exc)

    def _absorb(self, item: _Work, logits: npt.NDArray[np.float32] | None, now_s: float) -> None:
        """Book the rows of one stream and draw its next token if they were its last."""
        request, before = item.request, item.request.computed
        request.computed += item.chunk.count
        if request.computed // self._limits.page_tokens > before // self._limits.page_tokens:
            self._pager.commit(item.lease, request.tokens[: request.computed])
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
            computed = request.computed if request.phase is not Phase.FETCHING else lease.num_tokens
            request.computed = 0
            self._pager.release(lease, request.tokens[:computed])

    def _seen(self, request: Request, now_s: float) -> Stream:
        """What the scheduler sees of a request."""
        lease, pages, computed = request.lease, 0, request.computed
        if lease is not None and request.phase is Phase.FETCHING:
            computed = lease.num_tokens
            pages = scheduler.pages_for(computed, self._limits.page_tokens)
        elif lease is not None:
            pages = len(lease.slots)
        return Stream(
            id=request.id,
            rank=request.rank,
            phase=request.phase,
            known_tokens=len(request.tokens),
            computed_tokens=computed,
            pages=pages,
            waited_s=now_s - request.times.arrived_s,
        )
