"""team: every item is done once, whoever comes; launches in a row; late, idle and stopping workers."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from numba import njit

from tierd.kernels.cpu.team import (
    PHASE_BYTES,
    PHASE_WORDS,
    Team,
    atomic_add,
    await_launch,
    close_launch,
    enter,
    finish,
    leave,
    open_launch,
    take,
    wait_for,
)

PHASES, ITEMS = 20, 50


@njit(nogil=True, cache=True)
def _run(words, phases, worker):
    """`PHASES` phases: item i of phase p counts itself, and how many items of the phase before it were not done yet."""
    for p in range(PHASES):
        phase = phases + p * PHASE_BYTES
        item = take(phase, 1)
        while item < ITEMS:
            before = np.int64(0)
            for i in range(ITEMS if p > 0 else 0):
                before += atomic_add(words + 8 * ((p - 1) * ITEMS + i), 0) == 0
            atomic_add(words + 8 * (p * ITEMS + item), 1)
            atomic_add(words + 8 * PHASES * ITEMS, before)
            atomic_add(words + 8 * (PHASES * ITEMS + 1 + worker), 1)
            finish(phase, 1)
            item = take(phase, 1)
        wait_for(phase, ITEMS)


@njit(nogil=True, cache=True)
def _work(words, phases, control, worker):
    if worker == 0:
        open_launch(control)
        _run(words, phases, worker)
        close_launch(control)
        return
    seen = 0
    while True:
        seen = await_launch(control, seen)
        if seen < 0:
            return
        if enter(control):
            _run(words, phases, worker)
            leave(control)


class Launches:
    """A team whose work counts what it does."""

    def __init__(self, threads: int) -> None:
        self.words = np.zeros(PHASES * ITEMS + 1 + threads, np.int64)
        self.phases = np.zeros(PHASES * PHASE_WORDS + 8, np.int64)
        self.address = -(-self.phases.ctypes.data // 64) * 64
        self.arguments = (self.words.ctypes.data, self.address)
        self.team = Team(threads, _work, self.arguments)

    def run(self) -> None:
        self.phases[:] = 0
        self.words[: PHASES * ITEMS] = 0
        _work(*self.arguments, self.team.address, 0)
        assert (self.words[: PHASES * ITEMS] == 1).all()  # each item once
        assert self.words[PHASES * ITEMS] == 0  # none before the phase ahead of it was over


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_launches_do_every_item_once_and_in_order(threads: int) -> None:
    launches = Launches(threads)
    for _ in range(200):
        launches.run()
    assert launches.words[PHASES * ITEMS + 1 :].sum() == 200 * PHASES * ITEMS
    launches.team.close()


def test_sleeping_workers_wake_up() -> None:
    launches = Launches(3)
    for _ in range(40):
        time.sleep(0.002)  # far beyond the spinning
        launches.run()
    launches.team.close()


def test_sleeping_workers_use_no_processor_time() -> None:
    launches = Launches(3)
    launches.run()
    time.sleep(0.05)
    start = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - start < 0.1
    launches.team.close()


def test_close_stops_sleeping_and_spinning_workers_and_is_idempotent() -> None:
    before = threading.active_count()
    for pause_s in (0, 0.01):
        launches = Launches(4)
        launches.run()
        time.sleep(pause_s)
        launches.team.close()
        launches.team.close()
        assert threading.active_count() == before


def test_a_team_that_never_launched_can_be_closed() -> None:
    Launches(3).team.close()


def test_a_team_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="threads must be at least 1"):
        Team(0, _work, ())
