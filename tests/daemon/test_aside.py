"""Calls that may never come back, and nobody who waits for them."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from tierd.daemon.aside import WAITING, Aside, within


def test_calls_are_made_in_order_and_their_results_and_errors_told() -> None:
    seen: list[str] = []
    aside = Aside("test")
    futures = [aside.begin(lambda word=word: seen.append(word)) for word in ("one", "two")]
    broken = aside.begin(lambda: int("three"))
    with pytest.raises(ValueError, match="three"):
        broken.result(20)
    assert seen == ["one", "two"] and all(future.done() for future in futures)
    aside.close(20)
    aside.close(20)
    assert "test" not in {thread.name for thread in threading.enumerate()}


def test_behind_a_call_that_hangs_there_is_a_bound() -> None:
    aside, begun, let_go = Aside("test"), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        let_go.wait(20)

    aside.begin(hang)
    assert begun.wait(20)
    waiting: list[Future[object]] = [aside.begin(object) for _ in range(WAITING)]
    with pytest.raises(TimeoutError, match="does not come back"):
        aside.begin(object)
    let_go.set()
    assert waiting[-1].result(20) is not None
    aside.close(20)


def test_one_call_within_its_time() -> None:
    let_go = threading.Event()
    assert within(lambda: 7, 20) == 7
    with pytest.raises(TimeoutError):
        within(lambda: let_go.wait(20), 0.01)
    let_go.set()


def test_the_process_ends_while_a_call_hangs() -> None:
    code = (
        "import threading\n"
        "from tierd.daemon.aside import Aside\n"
        "begun = threading.Event()\n"
        "aside = Aside('test')\n"
        "aside.begin(lambda: (begun.set(), threading.Event().wait(600)))\n"
        "assert begun.wait(20)\n"
        "aside.close()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
