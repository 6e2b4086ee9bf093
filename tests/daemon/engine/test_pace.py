from __future__ import annotations

import pytest

from tierd.daemon.engine.pace import Pace


class Clock:
    def __init__(self) -> None:
        self.now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def took(pace: Pace, rows: int, seconds: float) -> None:
    clock = Clock()
    with pace.step(rows, clock):
        clock.now_s += seconds


def test_the_step_under_way_is_told() -> None:
    pace, clock = Pace(), Clock()
    assert pace.current(clock.now_s) == {}
    with pace.step(512, clock):
        clock.now_s += 5.0
        assert pace.current(clock.now_s) == {"rows": 512, "for_s": 5.0, "expected_s": 0.0}
    assert pace.current(clock.now_s) == {} and pace.expected_s(512) == 5.0


def test_more_rows_than_were_measured_take_in_proportion() -> None:
    pace = Pace()
    took(pace, 2, 0.5)
    assert pace.expected_s(512) == pytest.approx(128.0) and pace.expected_s(1) == pytest.approx(0.5)
    took(pace, 400, 40.0)
    took(pace, 400, 30.0)  # the longest counts
    assert pace.expected_s(500) == pytest.approx(50.0) and pace.expected_s(300) == pytest.approx(40.0)
    assert pace.expected_s(2) == pytest.approx(0.5)


def test_fewer_rows_never_make_more_seem_faster() -> None:
    pace = Pace()
    took(pace, 1, 9.0)
    took(pace, 512, 8.0)
    assert pace.expected_s(512) == pytest.approx(9.0)


def test_a_step_that_fails_measures_nothing() -> None:
    pace, clock = Pace(), Clock()
    with pytest.raises(ZeroDivisionError), pace.step(4, clock):
        clock.now_s += 100.0
        raise ZeroDivisionError
    assert pace.expected_s(4) == 0.0 and pace.current(0.0) == {}
