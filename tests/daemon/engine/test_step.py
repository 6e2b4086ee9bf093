"""The loop on its thread: every waiter hears, every request ends once, whatever fails."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.daemon.engine.fakes import expected
from tests.daemon.engine.rig import PromptMover, Rig, fail
from tierd.daemon.engine import step, stepping
from tierd.daemon.engine.step import StepLoop
from tierd.daemon.errors import EngineFailed, TooBusy
from tierd.daemon.protocol import TERMINAL, Event, Sampling, Submit

PROMPT = [5, 9, 2, 7, 1, 1, 8, 3, 30, 31]


class Running(Rig):
    """The rig with its loop on a thread."""

    def __init__(self, **more: Any) -> None:
        super().__init__(mover=PromptMover(1), **more)
        self.clock = time.monotonic  # type: ignore[assignment]
        self.streams._clock = time.monotonic
        self.streams._moved_s = time.monotonic()
        self.changed = threading.Condition()
        self.deaths: list[BaseException | None] = []
        self.published = 0
        self.loop = StepLoop(
            self.streams,
            self.pager,  # type: ignore[arg-type]
            emit=self.note,
            published=self.publish,
            died=self.deaths.append,
            clock=time.monotonic,
            max_requests=20,
        )

    def publish(self) -> None:
        self.published += 1

    def note(self, events: list[Event]) -> None:
        with self.changed:
            self.events += events
            self.changed.notify_all()

    def put(self, number: int, tokens: list[int], max_tokens: int = 8, **more: Any) -> None:
        sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        submit = Submit("m", tokens=tuple(tokens), sampling=sampling, **more)
        self.loop.submit(self.intake.request(number, submit, time.monotonic()))

    def wait(self, *numbers: int) -> None:
        """Until each of these has ended."""
        with self.changed:
            done = lambda: set(numbers) <= {event.id for event in self.events if event.ev in TERMINAL}  # noqa: E731
            assert self.changed.wait_for(done, 20.0), self.events[-3:]

    def check_quiet(self) -> None:
        assert not self.pager.leases and self.pager.check() == []


@pytest.fixture
def rig() -> Iterator[Running]:
    rig = Running()
    rig.loop.start()
    yield rig
    rig.loop.stop()
    assert rig.loop.join(10.0) and len(rig.deaths) == 1


def test_requests_of_many_threads(rig: Running) -> None:
    def ask(first: int) -> None:
        for number in range(first, first + 3):
            rig.put(number, [number] * 7, 6)

    threads = [threading.Thread(target=ask, args=(first,)) for first in (1, 4, 7, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rig.wait(*range(1, 13))
    for number in range(1, 13):
        assert rig.tokens(number) == expected([number] * 7, 6) and rig.terminal(number) == ["done"]
    rig.check_quiet()
    assert rig.published > 0


def test_an_idle_loop_sleeps(rig: Running) -> None:
    rig.put(1, PROMPT)
    rig.wait(1)
    time.sleep(0.05)
    before = rig.published
    time.sleep(0.2)
    assert rig.published - before <= 1


def test_cancel_follows_its_request(rig: Running) -> None:
    for number in range(1, 40):
        rig.put(number, PROMPT, 150)
        rig.loop.cancel(number)
        rig.wait(number)
        assert rig.terminal(number) == ["aborted"]
    rig.loop.cancel(12345)
    rig.put(50, PROMPT)
    rig.wait(50)
    rig.check_quiet()


def test_a_newcomer_ends_a_long_step_and_one_in_the_background_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "LONG_STEP_S", 0.0)
    rig = Running(max_rows=64)
    long, start = [1 + place % 50 for place in range(190)], rig.decoder.start
    arrived: list[int] = []

    def start_and_meet(tokens: Any, *rest: Any) -> None:
        start(tokens, *rest)
        if len(tokens) == 64 and len(arrived) < 2:
            arrived.append(2 + len(arrived))
            rig.put(arrived[-1], PROMPT, priority=2 - len(arrived))  # first one of the background

    rig.decoder.start = start_and_meet
    rig.put(1, long)
    rig.loop.start()
    rig.wait(1, 2, 3)
    rig.loop.stop()
    assert rig.loop.join(10.0)
    assert rig.streams.totals.dropped_steps == 1
    assert rig.tokens(1) == expected(long, 8) and rig.tokens(2) == rig.tokens(3) == expected(PROMPT, 8)


def test_calls_run_between_steps(rig: Running) -> None:
    rig.put(1, PROMPT, 100)
    assert rig.loop.call(lambda: threading.current_thread().name).result(5) == "step"
    with pytest.raises(ZeroDivisionError):
        rig.loop.call(lambda: 1 // 0).result(5)
    assert rig.loop.flush(5.0).result(5) == 0
    rig.wait(1)


def test_a_flush_has_a_deadline(rig: Running) -> None:
    rig.pager.flush = lambda _deadline_s: 3  # type: ignore[method-assign]
    started_s = time.monotonic()
    assert rig.loop.flush(0.1).result(5) == 3
    assert 0.1 <= time.monotonic() - started_s < 2


@pytest.mark.parametrize("left", [0, 3])
def test_a_waiter_that_gave_up_does_not_end_the_loop(rig: Running, left: int) -> None:
    done = threading.Event()
    rig.pager.flush = lambda _deadline_s: left if done.is_set() else 3  # type: ignore[method-assign]
    given_up = rig.loop.flush(60.0 if left == 0 else 0.1)
    assert given_up.cancel()
    done.set()
    rig.put(1, PROMPT)
    rig.wait(1)
    assert rig.loop.flush(0.1).result(5) == left and rig.terminal(1) == ["done"]


def test_a_loop_that_ends_answers_those_who_still_wait() -> None:
    rig = Running()
    rig.pager.flush = lambda _deadline_s: 3  # type: ignore[method-assign]
    rig.loop.start()
    flushes = [rig.loop.flush(60.0) for _ in range(2)]
    assert flushes[0].cancel()
    rig.loop.call(int).result(5)  # the flushes have begun
    rig.loop.stop()
    assert rig.loop.join(10.0) and rig.deaths == [None]
    with pytest.raises(EngineFailed):
        flushes[1].result(5)


def test_a_loop_that_ends_answers_what_it_has_not_taken_in() -> None:
    rig = Running()
    waiting: list[Future[Any]] = [rig.loop.flush(60.0), rig.loop.call(int), rig.loop.flush(60.0), rig.loop.call(int)]
    assert waiting[0].cancel() and waiting[1].cancel()
    rig.loop.stop()
    rig.loop.start()
    assert rig.loop.join(10.0) and rig.deaths == [None]
    for future in waiting[2:]:
        with pytest.raises(EngineFailed):
            future.result(5)


def test_the_queue_has_an_end(rig: Running) -> None:
    gate = threading.Event()
    # Requests come while the loop is in a call that it took out of the inbox, and before it takes out the next.
    rig.loop.call(lambda: time.sleep(0.05))
    held = rig.loop.call(lambda: gate.wait(20.0))
    accepted: list[int] = []
    try:
        with pytest.raises(TooBusy):
            for number in range(1, 30):
                rig.put(number, PROMPT)
                accepted.append(number)
    finally:
        gate.set()
    held.result(5)
    assert 17 <= len(accepted) <= 21  # calls that wait count as well; the one in hand does not
    rig.wait(*accepted)


def test_a_failed_step_ends_what_ran_and_the_loop_goes_on(rig: Running) -> None:
    gate = threading.Event()
    held = rig.loop.call(gate.wait)
    rig.put(1, PROMPT, 100)
    rig.decoder.fail_with = RuntimeError("kernel says prompt text")
    gate.set()
    held.result(5)
    rig.wait(1)
    rig.decoder.fail_with = None
    assert rig.terminal(1) == ["failed"]
    (failed,) = rig.of(1, "failed")
    assert failed["code"] == "engine_failed" and "prompt text" not in str(failed)
    rig.put(2, PROMPT)
    rig.wait(2)
    assert rig.tokens(2) == expected(PROMPT, 8)
    rig.check_quiet()


def dead_loop(rig: Running) -> None:
    """Fail steps until the loop gives up."""
    rig.decoder.fail_with = RuntimeError("kernel")
    for number in range(1, step.MAX_FAILURES + 1):
        rig.put(number, PROMPT)
        rig.wait(number)
    assert rig.loop.join(5.0)


def test_several_failed_steps_end_the_loop_and_everybody_hears() -> None:
    rig = Running()
    rig.loop.start()
    dead_loop(rig)
    assert [type(death) for death in rig.deaths] == [EngineFailed]
    with pytest.raises(EngineFailed):
        rig.put(9, PROMPT)
    with pytest.raises(EngineFailed):
        rig.loop.call(int)
    with pytest.raises(EngineFailed):
        rig.loop.flush(1.0)
    rig.loop.cancel(1)
    assert all(rig.terminal(number) == ["failed"] for number in range(1, step.MAX_FAILURES + 1))


def test_a_broken_page_table_ends_the_loop() -> None:
    rig = Running()
    rig.loop.start()
    gate = threading.Event()
    held = rig.loop.call(gate.wait)
    later: list[Future[Any]] = []
    rig.put(1, PROMPT, 100)
    rig.put(2, PROMPT, 100)
    fail(rig.pager, "release", RuntimeError("books"))
    rig.pager.check = lambda: ["books do not add up"]  # type: ignore[method-assign]
    rig.loop.cancel(1)
    later.append(rig.loop.call(int))
    gate.set()
    held.result(5)
    assert rig.loop.join(5.0)
    # Their answers may have been whole already when their pages could not be given back.
    assert rig.terminal(1) in (["aborted"], ["failed"], ["done"])
    assert rig.terminal(2) in (["failed"], ["done"])
    assert len(rig.deaths) == 1 and rig.deaths[0] is not None
    assert later[0].done()


def test_stop_aborts_what_runs() -> None:
    rig = Running()
    rig.loop.start()
    rig.put(1, PROMPT, 150)
    rig.loop.stop()
    assert rig.loop.join(5.0)
    assert rig.terminal(1) in (["aborted"], ["failed"]) and rig.deaths == [None]
    rig.check_quiet()


def test_findings_at_idle_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "CHECK_EVERY_S", 0.0)
    rig = Running()
    rig.pager.check = lambda: ["slot 3 is lost"]  # type: ignore[method-assign]
    rig.loop.start()
    with rig.changed:
        assert rig.changed.wait_for(lambda: rig.events, 5.0)
    rig.loop.stop()
    assert rig.loop.join(5.0)
    assert rig.events[0].ev == "notice" and rig.events[0].id == 0 and "slot 3" in rig.events[0].data["text"]


@pytest.mark.parametrize("seed", range(4))
def test_random_aborts_end_everything_once(seed: int) -> None:
    chance = random.Random(seed)
    rig = Running(slots=16, host=8, max_streams=3)
    rig.loop.start()
    prompts = {n: [chance.choice((1, 2)) for _ in range(chance.randint(1, 25))] for n in range(1, 40)}
    aborted: set[int] = set()
    for number, prompt in prompts.items():
        while True:
            try:
                rig.put(number, prompt, chance.randint(1, 30), priority=chance.randint(0, 2))
                break
            except TooBusy:
                time.sleep(0.001)
        if chance.random() < 0.5:
            aborted.add(chance.randint(1, number))
            rig.loop.cancel(max(aborted))
            aborted.add(max(aborted))
    rig.wait(*prompts)
    for number in prompts:
        assert len(rig.terminal(number)) == 1
        if number not in aborted:
            assert rig.terminal(number) == ["done"]
            assert rig.tokens(number) == expected(prompts[number], len(rig.tokens(number)))
    rig.loop.stop()
    assert rig.loop.join(5.0)
    rig.check_quiet()
