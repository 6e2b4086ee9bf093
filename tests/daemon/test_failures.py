"""Engines die; which models are tried again."""

from __future__ import annotations

import pytest

from tierd.daemon.errors import EngineFailed, OutOfSpace
from tierd.daemon.failures import CRASH_LIMIT, CRASH_WINDOW_S, MAX_BACK_OFF_S, Failures


def crash(failures: Failures, now_s: float, *, was_ready: bool = True, was_of_use: bool = False) -> None:
    failures.died("a", now_s, "signal 9", said=None, was_ready=was_ready, was_of_use=was_of_use)


def test_one_that_says_why_it_cannot_start_is_refused_at_once_and_for_longer_each_time() -> None:
    failures, now_s, seen = Failures(), 100.0, []
    for _ in range(7):
        failures.died("a", now_s, "", said=OutOfSpace("too big"), was_ready=False, was_of_use=False)
        with pytest.raises(OutOfSpace, match="too big"):
            failures.check("a", now_s)
        failures.check("b", now_s)
        seen.append(failures.refused["a"].back_off_s)
        now_s += seen[-1]
        failures.check("a", now_s)  # it may be tried again
    assert seen == [2.0, 4.0, 8.0, 16.0, 32.0, MAX_BACK_OFF_S, MAX_BACK_OFF_S]


@pytest.mark.parametrize("was_ready", [False, True])
def test_deaths_in_a_row_are_a_loop(was_ready: bool) -> None:
    failures = Failures()
    for number in range(CRASH_LIMIT):
        failures.check("a", float(number))
        crash(failures, float(number), was_ready=was_ready)
    with pytest.raises(EngineFailed, match="3 times within 60 s; signal 9") as caught:
        failures.check("a", float(CRASH_LIMIT))
    assert "asking again" in str(caught.value.hint)


def test_deaths_far_apart_or_of_engines_that_were_of_use_are_none() -> None:
    rare, useful = Failures(), Failures()
    for number in range(3 * CRASH_LIMIT):
        crash(rare, number * CRASH_WINDOW_S)
        crash(useful, float(number), was_of_use=True)
        rare.check("a", number * CRASH_WINDOW_S)
        useful.check("a", float(number))


def test_after_coming_up_a_failure_is_the_first_one_again() -> None:
    failures = Failures()
    for forgive in (lambda: crash(failures, 10.0), lambda: failures.forgive("a")):
        for _ in range(2):
            failures.died("a", 1.0, "", said=OutOfSpace("too big"), was_ready=False, was_of_use=False)
        assert failures.refused["a"].back_off_s == 4.0
        forgive()
        assert not failures.refused
