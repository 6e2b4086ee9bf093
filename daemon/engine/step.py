"""The step loop: one thread that owns pages, runner and requests, and an inbox that others put things into.

The loop turns while there is work, naps while pages are on their way, and blocks on its inbox when there is nothing to
do. A failed computation ends the requests that were running; after several in a row, or when the page table is
broken, the loop ends, every waiter hears of it, and so does the owner, who ends the process: a fresh one is the cure.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, assert_never

from tierd.daemon.engine.request import Request
from tierd.daemon.engine.scheduler import Phase
from tierd.daemon.engine.streams import Streams
from tierd.daemon.errors import EngineFailed, TooBusy
from tierd.daemon.protocol import Event
from tierd.tiers.errors import WeightsLost
from tierd.tiers.pager import Pager

log = logging.getLogger(__name__)

FETCH_NAP_S = 0.05  # the mover wakes the loop when a page has arrived; deadlines of fetches need no more
WRITE_NAP_S = 0.02  # groups of write-behind fall due without anybody waking the loop
IDLE_NAP_S = 5.0  # the store learns now and then which pages were used
CHECK_EVERY_S = 60.0  # looks at the ledger when nothing happens
FLUSH_SLICE_S = 0.02  # of a flush, between two steps of running streams
MAX_FAILURES = 3  # failed steps in a row
CONTROL_PLACES = 64  # in the inbox, beside one for each request


@dataclass(frozen=True, slots=True)
class Call:
    """A function for the step thread, and who waits for its result."""

    function: Callable[[], Any]
    future: Future[Any]


@dataclass(slots=True)
class _Flush:
    """A flush in progress."""

    deadline_s: float
    future: Future[int]


class StepLoop:
    """Threading: `submit`, `cancel`, `call`, `flush`, `stop` from any thread; everything else on the loop's own.

    `emit` gets the events of each turn, `published` is called after each turn and before its events, `died` once when
    the thread ends (with None after `stop`); all three on the loop's thread.
    """

    def __init__(
        self,
        streams: Streams,
        pager: Pager,
        *,
        emit: Callable[[list[Event]], None],
        published: Callable[[], None],
        died: Callable[[BaseException | None], None],
        clock: Callable[[], float],
        max_requests: int,
    ) -> None:
        self._streams = streams
        self._pager = pager
        self._emit = emit
        self._published = published
        self._died = died
        self._clock = clock
        self._max_requests = max_requests
        self._inbox: queue.Queue[Request | Call | None] = queue.Queue(maxsize=max_requests + CONTROL_PLACES)
        self._lock = threading.Lock()
        self._cancelled: set[int] = set()  # bounded by the requests that live: the io side asks for no others
        self._flushes: list[_Flush] = []  # bounded by the inbox
        self._arrived = self._taken = 0  # requests of the foreground, put into the inbox and taken out
        self._closed = False
        self._stopping = False
        self._failures = 0
        self._checked_s = clock()
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end; True when it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- from other threads ----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises TooBusy when the queue is full, EngineFailed when the loop has ended."""
        if len(self._streams) + self._inbox.qsize() >= self._max_requests:
            raise TooBusy(f"{self._max_requests} requests wait already", hint="try again in a moment")
        self._put(request)

    def cancel(self, request_id: int) -> None:
        """End a request within one step. Nothing happens when it has ended already."""
        with self._lock:
            self._cancelled.add(request_id)
        self.wake()

    def wake(self) -> None:
        """End the loop's nap: something may have to be taken in."""
        if self._inbox.empty():
            # A full inbox, or one with anything in it, has woken the loop already.
            with contextlib.suppress(queue.Full):
                self._inbox.put_nowait(None)

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function between two steps. The future fails when the loop has ended."""
        future: Future[Any] = Future()
        self._put(Call(function, future))
        return future

    def flush(self, timeout_s: float) -> Future[int]:
        """Make all pages durable while streams go on; the result is how many are not, at the deadline."""
        done: Future[int] = Future()

        def queued(call: Future[Any]) -> None:
            if (reason := call.exception()) is not None:
                _fail(done, reason)

        self.call(lambda: self._flushes.append(_Flush(self._clock() + timeout_s, done))).add_done_callback(queued)
        return done

    def stop(self) -> None:
        """Abort what still runs and end the thread."""
        self._stopping = True
        self.wake()

    def _put(self, item: Request | Call) -> None:
        with self._lock:
            if self._closed:
                raise EngineFailed("the engine has stopped")
            try:
                self._inbox.put_nowait(item)
            except queue.Full:
                raise TooBusy("the engine's queue is full", hint="try again in a moment") from None
            if isinstance(item, Request) and item.priority <= 0:
                self._arrived += 1

    # -- the loop's own thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while not self._stopping:
                self._cycle()
            self._streams.abort_all()
        except BaseException as exc:
            log.critical("the step loop ended", exc_info=exc)
            cause = exc
        try:
            self._close(EngineFailed("the engine stopped"))
        finally:
            self._died(cause)

    def _cycle(self) -> None:
        worked = self._turn()
        self._published()  # first: who hears the end of a request may ask for figures at once
        self._tell()
        self._work_on_flushes()
        self._receive(0.0 if worked else self._nap_s())

    def _turn(self) -> bool:
        """One turn; a failure ends the running requests, the last one in a row ends the loop."""
        steps = self._streams.totals.steps
        try:
            worked = self._streams.turn(lambda: self._arrived > self._taken)
        except WeightsLost as lost:
            # A fresh process would read the same disk: this one goes on, and the next request tries again.
            log.error("a step could not be computed: %s", lost)
            self._streams.fail_all(
                EngineFailed(f"the model can't be read from its disk: {lost}", hint="`tierd show --verify` checks it")
            )
            return True
        except Exception as exc:
            self._failures += 1
            log.exception("a step failed")
            self._streams.fail_all(EngineFailed("a step could not be computed", hint="`tierd logs` shows why"))
            findings = self._findings()
            if self._failures >= MAX_FAILURES or findings:
                raise EngineFailed(f"giving up after a failed step: {'; '.join(findings[:3]) or 'too many'}") from exc
            return True
        if self._streams.totals.steps > steps:
            self._failures = 0
        return worked

    def _findings(self) -> list[str]:
        ladders = self._streams.ladders
        return self._pager.check() + ([] if ladders is None else ladders.pages.check())

    def _tell(self) -> None:
        if events := self._streams.take_events():
            self._emit(events)

    def _nap_s(self) -> float:
        """How long there is nothing to do unless somebody asks."""
        if self._flushes or self._streams.count(Phase.FETCHING, Phase.PREFILL, Phase.DECODE):
            return FETCH_NAP_S
        writeback = self._pager.writeback
        if not writeback.quiet or (self._pager.residency.dirty and writeback.on and not writeback.paused):
            return WRITE_NAP_S
        now_s = self._clock()
        if now_s - self._checked_s >= CHECK_EVERY_S and not len(self._streams):
            self._checked_s = now_s
            for finding in self._findings():
                log.error("page table: %s", finding)
                self._emit([Event(0, "notice", {"text": f"page table: {finding}"})])
        return IDLE_NAP_S

    def _receive(self, timeout_s: float) -> None:
        """Take in all that waits; sleep for at most `timeout_s` when nothing does."""
        if timeout_s > 0.0 and not self._cancelled:
            try:
                with self._pager.mover.idle() if len(self._streams) else contextlib.nullcontext():
                    item = self._inbox.get(timeout=timeout_s)
                self._accept(item)
            except queue.Empty:
                return
        # The set first, then the inbox: the request that a cancel means was put there before, so it is found.
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
        # One by one: what is still in the inbox counts as waiting, whatever the one in hand takes.
        for _ in range(self._inbox.qsize()):
            self._accept(self._inbox.get_nowait())
        for request_id in cancelled:
            self._streams.cancel(request_id)

    def _accept(self, item: Request | Call | None) -> None:
        match item:
            case Request():
                self._taken += item.priority <= 0
                self._streams.add(item)
            case Call():
                _answer(item)
            case None:
                pass
            case _:
                assert_never(item)

    def _work_on_flushes(self) -> None:
        if not self._flushes:
            return
        now_s = self._clock()
        left = self._pager.flush(now_s + FLUSH_SLICE_S)
        for flush in list(self._flushes):
            if left == 0 or self._clock() >= flush.deadline_s:
                self._flushes.remove(flush)
                if flush.future.set_running_or_notify_cancel():  # whoever waited may have given up
                    flush.future.set_result(left)

    def _close(self, reason: EngineFailed) -> None:
        """No more work: everything that waits gets the same answer, and so does everything that comes later."""
        with self._lock:
            self._closed = True
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            match item:
                case Request():
                    self._streams.add(item)
                case Call():
                    _fail(item.future, reason)
                case None:
                    pass
        for flush in self._flushes:
            _fail(flush.future, reason)
        self._flushes.clear()
        self._streams.fail_all(reason)
        self._tell()


def _fail(future: Future[Any], reason: BaseException) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(reason)


def _answer(call: Call) -> None:
    if not call.future.set_running_or_notify_cancel():
        return
    try:
        call.future.set_result(call.function())
    except Exception as exc:
        call.future.set_exception(exc)
