"""Calls that may never come back, into a driver for one: made on a thread that nobody has to wait for.

Threads of an executor are joined when the interpreter ends, so a call that hangs in one keeps the process from exiting.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

WAITING = 4  # calls behind one that does not come back

T = TypeVar("T")


class Aside:
    """Does one thing after another on a daemon thread.

    Threading: `begin` from any thread; `close` from the owner's.
    """

    def __init__(self, name: str) -> None:
        self._inbox: queue.Queue[tuple[Future[Any], Callable[[], Any]] | None] = queue.Queue(WAITING)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Its result, or what it raises. Raises TimeoutError when too much waits behind a call that hangs."""
        future: Future[T] = Future()
        try:
            self._inbox.put_nowait((future, work))
        except queue.Full:
            raise TimeoutError(f"{WAITING} calls wait for one that does not come back") from None
        return future

    def close(self, wait_s: float = 0.0) -> None:
        """Begin nothing more; the thread ends with what has begun, for which `wait_s` are waited. Idempotent."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(queue.Full):
                self._inbox.put_nowait(None)
        self._thread.join(wait_s)

    def _run(self) -> None:
        while (job := self._inbox.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as exc:  # whoever waits for it hears of it
                future.set_exception(exc)
            else:
                future.set_result(result)


def within(work: Callable[[], T], limit_s: float) -> T:
    """What a call gives, or raises. Raises TimeoutError when it takes longer; it may go on then."""
    aside = Aside("aside")
    future = aside.begin(work)
    aside.close()
    return future.result(limit_s)
