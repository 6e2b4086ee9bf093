"""Step loops that stand still, and what systemd is told."""

from __future__ import annotations

import asyncio
import socket

import pytest
from front_harness import Front, make_settings, running, set_options, text, until

from tierd.daemon import heart
from tierd.daemon.heart import HANG_S, STEPS_OF_PATIENCE, UNKNOWN_HANG_S, Heart, Pulse

BUSY = {"uptime_s": 5.0, "steps": 9, "step_ms": 20.0, "running": 1, "waiting": 0}


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
    slow = {**BUSY, "step_ms": 20_000.0}
    pulse.feel(slow, 1, 0.0)
    pulse.feel(slow, 1, 150.0)
    assert not pulse.hangs(150.0) and pulse.hangs(20.0 * STEPS_OF_PATIENCE + 1)


@pytest.mark.parametrize("status", [{}, {**BUSY, "step_ms": 0.0}, {**BUSY, "running": 0}])
def test_a_loop_that_is_not_known_to_work_gets_the_most(status):
    pulse = Pulse(0.0)
    pulse.feel(status, 1, 0.0)
    pulse.feel(status, 1, UNKNOWN_HANG_S)
    assert not pulse.hangs(UNKNOWN_HANG_S) and pulse.hangs(UNKNOWN_HANG_S + 1)


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
