"""What both doors share."""

from __future__ import annotations

import contextlib

import pytest
from front_harness import make_model, until

from tierd.daemon.errors import BadRequest, Draining, EngineFailed, ModelNotFound, NotFound, TooBusy
from tierd.daemon.protocol import Message, Submit
from tierd.daemon.service import failure


@pytest.mark.parametrize(
    ("exc", "accepted", "ev"),
    [
        (BadRequest("x"), False, "refused"), (ModelNotFound("x"), False, "refused"), (TooBusy("x"), False, "refused"),
        (EngineFailed("x"), False, "failed"), (Draining("x"), True, "failed"), (BadRequest("x"), True, "failed"),
    ],
)  # fmt: skip
def test_what_was_accepted_is_not_refused(exc, accepted, ev):
    assert failure(3, exc, accepted=accepted).ev == ev


async def run(front, submit):
    async with contextlib.aclosing(front.service.run(front.service.submit(submit), "test")) as events:
        return [event async for event in events]


async def test_an_unforeseen_error_is_one_terminal_event(front, monkeypatch):
    def boom(self, model):
        raise RuntimeError("secret")

    monkeypatch.setattr("tierd.daemon.supervisor.Supervisor.waiting", boom)
    events = await run(front, Submit("alpha", prompt="x"))
    assert [event.ev for event in events] == ["failed"] and "secret" not in str(events[0].data)
    assert front.service.live == 0


async def test_the_default_model_and_aliases(front):
    assert (await run(front, Submit("", prompt="x")))[-1].ev == "done"
    make_model(front.settings.models_dir, "some-7b")
    assert (await run(front, Submit("Some:7b", prompt="x")))[-1].ev == "done"


async def test_a_model_that_is_removed_is_noticed(front):
    front.service.release(front.service.submit(Submit("alpha", prompt="x")))
    (front.settings.models_dir / "alpha" / "manifest.json").unlink()
    with pytest.raises(Exception, match="alpha"):
        front.service.submit(Submit("alpha", prompt="x"))


async def test_status_does_not_wait_for_an_engine_that_stands_still(front):
    await front.service.load("alpha")
    import os
    import signal
    import time

    os.kill(front.engine().pid, signal.SIGSTOP)
    started_s = time.perf_counter()
    status = await front.service.status()
    assert time.perf_counter() - started_s < 1.0 and status["engines"][0]["state"] == "ready"
    os.kill(front.engine().pid, signal.SIGCONT)


async def test_clear_removes_closed_stores(front):
    store = front.settings.cache_dir / "kv" / ("b" * 32)
    store.mkdir(parents=True)
    answer = await front.service.cache("clear", None, repair=False)
    assert [n["name"] for n in answer["closed"]] == ["b" * 32] and not store.exists()


async def test_live_requests_are_counted(front):
    stream = front.service.submit(Submit("alpha", prompt="!hang"))
    assert front.service.live == 1  # from its admission on
    events = front.service.run(stream, "test")
    await anext(events)
    assert front.service.live == 1 and await front.service.drain(0.05) == 1
    await events.aclose()
    await until(lambda: front.service.live == 0)


async def test_a_place_is_given_back_also_when_nothing_ever_ran(front):
    with pytest.raises(ZeroDivisionError):
        async with front.service.answering(Submit("alpha", prompt="!hang"), "test"):
            raise ZeroDivisionError
    assert front.service.live == 0
    stream = front.service.submit(Submit("alpha", prompt="x"))
    front.service.release(stream)
    front.service.release(stream)  # twice is fine
    assert front.service.live == 0


async def test_counting_loading_and_answering_are_admitted_alike(front):
    service, submit = front.service, Submit("alpha", prompt="x")
    message = Submit("alpha", messages=(Message("user", "one two"),))
    assert await service.count(message) > 0
    with pytest.raises(BadRequest, match="role"):
        await service.count(Submit("alpha", messages=(Message("nobody", "x"),)))
    bound = front.settings.max_streams + front.settings.max_queue
    waiting = [service.submit(submit) for _ in range(bound)]
    calls = (
        lambda: service.count(message), lambda: service.load("alpha"),
        lambda: service.embed("alpha", ["x"], "", "t"), lambda: service.tokenize("alpha", {"text": "x"}),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(TooBusy):
            await call()
    for stream in waiting:
        service.release(stream)
    service.draining = True
    for call in calls:
        with pytest.raises(Draining):
            await call()


async def test_looking_loads_no_model(front):
    for op in ("top", "pages", "page"):
        with pytest.raises(NotFound, match="alpha is not loaded"):
            await front.service.look(op, "alpha", {})
    assert not front.supervisor.engines
    await front.service.load("alpha")
    assert (await front.service.look("top", "alpha", {"prefixes": 3}))["args"] == {"prefixes": 3}


async def test_a_request_is_cancelled_by_its_number_in_the_engine(front):
    stream = front.service.submit(Submit("alpha", prompt="!hang"))
    events = front.service.run(stream, "test")
    while (await anext(events)).ev != "accepted":
        pass
    with pytest.raises(NotFound, match="no request 999"):
        front.service.cancel_request("alpha", 999)
    front.service.cancel_request("alpha", stream._running.id)
    assert (await anext(events)).ev == "aborted"
    await events.aclose()


async def test_prefixes_of_the_model_used_last_or_of_one_that_is_named(front):
    with pytest.raises(NotFound, match="no model is loaded"):
        await front.service.prefix(None, {"action": "ls"})
    with pytest.raises(NotFound, match="alpha is not loaded"):
        await front.service.prefix("alpha", {"action": "ls"})
    assert (await front.service.prefix("alpha", {"action": "pin"})) == {"model": "alpha", "args": {"action": "pin"}}
    assert (await front.service.prefix("alpha", {"action": "ls"})) == {"model": "alpha", "args": {"action": "ls"}}
    await run(front, Submit("beta", prompt="x"))
    assert (await front.service.prefix(None, {"action": "ls"}))["model"] == "beta"


async def test_only_an_engine_that_runs_has_a_size(front):
    with pytest.raises(NotFound, match="no model is loaded"):
        await front.service.resize(None, {"device_bytes": 9})
    with pytest.raises(NotFound, match="alpha is not loaded"):
        await front.service.resize("alpha", {"device_bytes": 9})
    with pytest.raises(ModelNotFound):
        await front.service.resize("nothing", {"device_bytes": 9})
    await run(front, Submit("alpha", prompt="x"))
    answer = await front.service.resize(None, {"device_bytes": 9, "timeout_s": 1.0})
    args = {"device_bytes": 9, "timeout_s": 1.0}
    assert answer == {"model": "alpha", "args": args} | args
