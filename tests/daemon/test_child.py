"""One engine process and what is heard of it."""

from __future__ import annotations

import asyncio
import sys

import pytest
from front_harness import set_options, until

from tierd.daemon.broadcast import Broadcast
from tierd.daemon.child import EngineProcess, EngineState, _without_internals
from tierd.daemon.errors import EngineFailed, TimedOut, Unsupported
from tierd.daemon.protocol import Event, Submit


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("MemoryError: no 5 bytes", "MemoryError: no 5 bytes"),
        ("bad object at 0x7f00dead in /home/joe/.cache/x.py", "bad object at 0x... in x.py"),
        ("open('/var/lib/tierd/weights.bin')", "open('weights.bin')"),
        ("a/b is a ratio", "a/b is a ratio"),
    ],
)
def test_last_words_hold_no_internals(line, shown):
    assert _without_internals(line) == shown


def python(code):
    return (sys.executable, "-c", code)


async def test_the_tail_of_standard_error_is_kept_and_bounded():
    code = "import sys\ne = sys.stderr\nfor n in range(500): print(n, file=e)\nprint('x' * 100000, file=e); sys.exit(3)"
    engine = EngineProcess("m", Broadcast(), python(code))
    await engine.live("{}")
    assert engine.state is EngineState.ENDED and len(engine._tail) == 20
    assert engine.last_words().startswith("exit code 3: ") and len(engine.last_words()) < 400


async def test_a_command_that_is_not_there():
    engine = EngineProcess("m", Broadcast(), ("/nowhere/python",))
    await engine.live("{}")
    assert isinstance(engine.error, EngineFailed) and engine.state is EngineState.ENDED
    with pytest.raises(EngineFailed):
        await engine.generate(Submit("m", prompt="x"))
    assert engine.busy == 0


async def test_a_process_that_closes_its_socket_but_stays_is_killed(monkeypatch):
    monkeypatch.setattr("tierd.daemon.child.EXIT_GRACE_S", 0.2)
    code = "import os, sys, time; os.close(int(sys.argv[2])); time.sleep(60)"
    engine = EngineProcess("m", Broadcast(), python(code))
    await engine.live("{}")
    assert "signal 9" in engine.last_words()


async def test_calls_get_answers_errors_and_deadlines(front):
    await front.service.load("alpha")
    engine = front.engine()
    assert (await engine.call("tokenize", {"text": "x"}, 5))["tokens"]
    with pytest.raises(Unsupported):
        await engine.call("nonsense", {}, 5)
    set_options(front.settings.models_dir / "alpha", flush_s=0.5)
    engine.kill()
    with pytest.raises(EngineFailed):
        await engine.call("tokenize", {"text": "x"}, 5)
    await until(lambda: not front.supervisor.engines)
    await front.service.load("alpha")
    with pytest.raises(TimedOut, match="flush"):
        await front.engine().call("flush", {}, 0.05)
    assert front.engine().busy == 0


@pytest.mark.parametrize(
    ("op", "args", "is_use"),
    [
        ("top", {}, False), ("pages", {}, False), ("page", {}, False), ("status", {}, False),
        ("prefix", {"action": "ls"}, False), ("prefix", {"action": "pin"}, True), ("tokenize", {"text": "x"}, True),
    ],
)  # fmt: skip
async def test_looking_at_it_is_no_use_of_it(front, op, args, is_use):
    await front.service.load("alpha")
    engine = front.engine()
    engine.last_use_s = -1.0
    call = asyncio.create_task(engine.call(op, args, 5))
    await asyncio.sleep(0)
    assert engine.busy == is_use
    await call
    assert (engine.last_use_s > 0) == is_use


async def test_a_cancelled_owner_leaves_no_process():
    engine = EngineProcess("m", Broadcast(), python("import time; time.sleep(60)"))
    task = asyncio.create_task(engine.live("{}"))
    await until(lambda: engine.pid)
    task.cancel()
    await asyncio.wait([task])
    assert engine._process.returncode == -9


async def test_an_engine_that_promises_to_stop_and_stays_is_killed(front, monkeypatch):
    monkeypatch.setattr("tierd.daemon.child.EXIT_GRACE_S", 0.2)
    set_options(front.settings.models_dir / "alpha", stays=True)
    await front.service.load("alpha")
    assert await front.service.unload("alpha") == {"unloaded": ["alpha"]}


async def test_an_end_seen_by_a_write_first_is_no_endless_loop(front):
    await front.service.load("alpha")
    front.engine()._writer.close()
    with pytest.raises(EngineFailed):
        await front.engine().generate(Submit("alpha", prompt="x"))
    assert front.engine().state is EngineState.STOPPING
    wire = await front.connect()
    wire.generate(1, "x", max_tokens=2)
    assert (await wire.until_end(1))[-1].ev == "done"


async def test_secrets_of_the_front_are_not_handed_on(monkeypatch):
    monkeypatch.setenv("TIERD_API_KEY", "geheim")
    code = "import os, sys; print('TIERD_API_KEY' in os.environ, 'PATH' in os.environ, file=sys.stderr)"
    engine = EngineProcess("m", Broadcast(), python(code))
    await engine.live("{}")
    assert engine.last_words() == "exit code 0: False True"


def test_a_notice_goes_when_it_is_true_no_more():
    engine = EngineProcess("m", Broadcast())
    for text in ("full", "slow"):
        engine._handle_news(Event(0, "notice", {"text": text}))
    for text in ("full", "never said"):
        engine._handle_news(Event(0, "notice_over", {"text": text}))
    assert list(engine.notices) == ["slow"]
