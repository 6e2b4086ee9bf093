"""Step loops that stand still, and what systemd is told."""

from __future__ import annotations

import asyncio
import dataclasses
import socket

import pytest
from front_harness import Front, make_settings, running, set_options, text, until

from tests.daemon.engine.rig import Rig
from tierd.daemon import heart
from tierd.daemon.engine.status import StatusBoard
from tierd.daemon.errors import EngineFailed
from tierd.daemon.heart import BEAT_S, HANG_S, PAUSE_S, STEPS_OF_PATIENCE, UNKNOWN_HANG_S, UNKNOWN_ROW_S, Heart, Pulse

BUSY = {"uptime_s": 5.0, "steps": 9, "running": 1, "waiting": 0, "step": {"rows": 1, "for_s": 0.0, "expected_s": 0.02}}


def stand_still(pulse: Pulse, status: dict[str, object], start_s: float, until_s: float) -> None:
    """The same news at each beat, the last time at `until_s`."""
    now_s = start_s
    while now_s < until_s:
        pulse.feel(status, 1, now_s)
        now_s += BEAT_S
    pulse.feel(status, 1, until_s)


def test_a_loop_that_publishes_lives():
    pulse = Pulse(0.0)
    for second in range(1000):
        pulse.feel({**BUSY, "uptime_s": float(second)}, 1, float(second))
        assert not pulse.hangs(float(second))


def test_a_loop_that_stands_still_with_work_hangs_in_time():
    pulse = Pulse(0.0)
    pulse.feel(BUSY, 1, 0.0)
    for second in range(1, 60):
        pulse.feel(BUSY, 1, float(second))
        assert pulse.hangs(float(second)) == (second > HANG_S)
    assert HANG_S + heart.BEAT_S + heart.ANSWER_S < 45


def test_a_loop_without_streams_need_not_publish():
    pulse = Pulse(0.0)
    for second in range(0, 10_000, 5):
        pulse.feel(BUSY, 0, float(second))
        assert not pulse.hangs(float(second))


def test_long_steps_get_more_time():
    pulse = Pulse(0.0)
    slow = {**BUSY, "step": {"rows": 512, "for_s": 1.0, "expected_s": 20.0}}
    stand_still(pulse, slow, 0.0, 150.0)
    assert not pulse.hangs(150.0) and pulse.hangs(20.0 * STEPS_OF_PATIENCE + 1)


@pytest.mark.parametrize("status", [{}, {**BUSY, "steps": 0, "step": {}}, {**BUSY, "running": 0, "step": {}}])
def test_a_loop_that_is_not_known_to_work_gets_the_most(status):
    pulse = Pulse(0.0)
    stand_still(pulse, status, 0.0, UNKNOWN_HANG_S)
    assert not pulse.hangs(UNKNOWN_HANG_S) and pulse.hangs(UNKNOWN_HANG_S + 1)


def test_a_first_step_gets_time_for_its_rows():
    pulse = Pulse(0.0)
    first = {**BUSY, "steps": 0, "running": 0, "step": {"rows": 512, "for_s": 1.0, "expected_s": 0.0}}
    limit_s = UNKNOWN_HANG_S + 512 * UNKNOWN_ROW_S
    stand_still(pulse, first, 0.0, limit_s)
    assert limit_s > 1000 and not pulse.hangs(limit_s) and pulse.hangs(limit_s + 1)


def test_a_loop_that_stands_still_between_two_steps_hangs_in_time():
    pulse = Pulse(0.0)
    stand_still(pulse, {**BUSY, "step": {"rows": 512, "for_s": 1.0, "expected_s": 60.0}}, 0.0, 55.0)
    after = {**BUSY, "uptime_s": 60.0, "steps": 10, "step": {}}
    stand_still(pulse, after, 60.0, 90.0)
    assert not pulse.hangs(90.0) and pulse.hangs(91.0)


def test_a_pause_of_the_front_is_no_hang():
    pulse = Pulse(0.0)
    stand_still(pulse, BUSY, 0.0, 20.0)
    awake_s = 20.0 + 3600.0
    pulse.feel(BUSY, 1, awake_s)  # the engine was stopped as well, and has had no time to beat
    assert not pulse.hangs(awake_s)


def test_a_hang_after_a_pause_of_the_front_is_found_after_a_whole_period():
    pulse = Pulse(0.0)
    stand_still(pulse, BUSY, 0.0, 20.0)
    stand_still(pulse, BUSY, 3620.0, 3620.0 + HANG_S)
    assert not pulse.hangs(3620.0 + HANG_S)
    pulse.feel(BUSY, 1, 3620.0 + HANG_S + 1)
    assert pulse.hangs(3620.0 + HANG_S + 1)


def test_slow_rounds_are_no_pause():
    pulse = Pulse(0.0)
    for round_ in range(4):
        pulse.feel(BUSY, 1, round_ * PAUSE_S)
    assert pulse.hangs(3 * PAUSE_S)


class Asked:
    """What the front learns of an engine's own board, once a second while the decoder computes."""

    def __init__(self, row_s: float) -> None:
        self.rig = Rig(slots=256, max_rows=600, context=900)
        streams = self.rig.streams
        streams._limits = dataclasses.replace(streams._limits, throughput=True)  # steps as long as can be
        self.board = StatusBoard("m", 900, self.rig.streams, self.rig.pager, self.rig.clock)
        self.pulse = Pulse(self.rig.clock.now_s)
        self.killed = False
        self._row_s = row_s
        plain = self.rig.decoder.start
        self.rig.decoder.start = lambda tokens, *rest: (self._compute(len(tokens)), plain(tokens, *rest))

    def _compute(self, rows: int) -> None:
        end_s = self.rig.clock.now_s + rows * self._row_s
        while self.rig.clock.now_s < end_s:
            self.rig.clock.now_s = min(self.rig.clock.now_s + 1.0, end_s)
            self.pulse.feel(self.board.told(), 1, self.rig.clock.now_s)
            self.killed |= self.pulse.hangs(self.rig.clock.now_s)

    def turn(self) -> None:
        self.rig.turn()
        self.board.publish(now=True)


@pytest.mark.parametrize("row_s", [0.11, 1.5])  # of 8 billion weights on some cores; of far more from a disk
def test_a_lone_prompt_after_short_steps_is_not_taken_for_a_hang(row_s):
    one = Asked(row_s)
    one.rig.submit(1, [number % 60 for number in range(12)], max_tokens=12)
    for _ in range(20):
        one.turn()
    one.rig.submit(2, [number % 50 for number in range(540)], max_tokens=2)
    while not one.rig.of(2, "done"):
        one.turn()
    assert not one.killed and max(one.rig.decoder.batches) > 500


def test_a_first_prompt_of_many_rows_is_not_taken_for_a_hang():
    one = Asked(1.5)
    one.rig.submit(1, [number % 50 for number in range(540)], max_tokens=2)
    one.board.publish(now=True)
    while not one.rig.streams.totals.steps:
        one.turn()
    assert not one.killed and one.rig.clock.now_s > 800


async def test_an_engine_that_stands_still_is_replaced_and_its_streams_go_on(front: Front, fake_models, monkeypatch):
    monkeypatch.setattr(heart, "HANG_S", 0.3)
    set_options(fake_models / "alpha", status=BUSY)
    wire = await front.connect()
    wire.generate(1, "!still hello", max_tokens=8)
    await until(lambda: front.supervisor.engines and front.engine().streams == 1)
    engine = front.engine()
    set_options(fake_models / "alpha")
    told = []
    beats = Heart(front.supervisor, told.append)
    async with asyncio.timeout(20):
        while front.supervisor.engines.get("alpha") is engine:
            await beats.beat()
            await asyncio.sleep(0.05)
        events = await wire.until_end(1)
    assert events[-1].ev == "done" and text(events)
    assert told and all(line.startswith("WATCHDOG=1\nSTATUS=") for line in told)


async def test_an_engine_that_hangs_with_nothing_but_embeddings_is_ended(front: Front, fake_models, monkeypatch):
    monkeypatch.setattr(heart, "HANG_S", 0.3)
    set_options(fake_models / "alpha", status=BUSY)
    await front.service.load("alpha")
    engine, beats = front.engine(), Heart(front.supervisor, lambda told: None)
    call = asyncio.create_task(engine.call("embed", {"inputs": ["!hang"]}, 60.0))
    async with asyncio.timeout(20):
        while front.supervisor.engines.get("alpha") is engine:
            await beats.beat()
            await asyncio.sleep(0.05)
    with pytest.raises(EngineFailed):
        await call


async def test_systemd_is_told_after_each_round(fake_models, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "300000")
        async with running(make_settings(tmp_path)) as front:
            task = asyncio.create_task(Heart(front.supervisor).run())
            async with asyncio.timeout(10):
                for _ in range(3):
                    said = await asyncio.get_running_loop().sock_recv(listener, 4096)
                    assert said == b"WATCHDOG=1\nSTATUS=ready, no model is loaded"
            task.cancel()
            await asyncio.wait([task])
