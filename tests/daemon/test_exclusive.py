"""The machine given to one batch: through a real front with fake engines."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from front_harness import Front, Wire, make_settings, running, set_options, text, until

from tierd.daemon import exclusive, server
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.machine import Sizes
from tierd.daemon.plan.block import Block, Extent
from tierd.daemon.protocol import TERMINAL
from tierd.daemon.supervisor import Model

SIZES = Sizes(1 << 28, 0, 1 << 26, 0, 1 << 30)
BLOCK = Block(48, 1024, SIZES, 3 << 26, 100.0, ("48 sequences at once",))
WISH = {"model": "alpha", "requests": 10, "prompt_tokens": 20, "answer_tokens": 30, "longest_tokens": 80}


class Planner:
    """Says what a batch gets, and keeps what it was asked."""

    def __init__(self, block: Block | None = BLOCK) -> None:
        self.block = block
        self.asked: list[tuple[str, Extent, int | None]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self, model: Model, extent: Extent, streams: int | None) -> Block | None:
        self.asked.append((model.name, extent, streams))
        assert self.may_answer.wait(20)
        return self.block


@pytest.fixture
def planner() -> Planner:
    return Planner()


@pytest.fixture
async def front(fake_models: Path, tmp_path: Path, planner: Planner) -> AsyncIterator[Front]:
    async with running(make_settings(tmp_path, pinned_models=("beta",)), max_loaded=0, plan_block=planner) as front:
        yield front


async def ask(wire: Wire, op: str, **args: Any) -> Any:
    """The last event of a call."""
    wire.send(7, op, **args)
    return (await wire.until_end(7))[-1]


async def ends(wire: Wire, *ids: int) -> dict[int, Any]:
    """The terminal events of these calls, in whatever order they come."""
    found: dict[int, Any] = {}
    while len(found) < len(ids):
        event = await wire.next()
        if event.ev in TERMINAL:
            found[event.id] = event
    return found


async def test_others_are_told_and_the_holder_is_served(front: Front, planner: Planner) -> None:
    batch, other = await front.connect(), await front.connect()
    told = await batch.call("reserve", **WISH, streams=48)
    assert planner.asked == [("alpha", Extent(10, 20, 30, 80), 48)]
    assert told["streams"] == 48 and told["why"] == ["48 sequences at once"] and told["stage"] == "running"
    await batch.call("reserved", done=4, left_s=90.0)
    other.generate(1, "hello")
    (refused,) = await other.until_end(1)
    assert refused.ev == "refused" and refused.data["code"] == "reserved"
    assert "4 of 10 requests done" in refused.data["message"] and "left" in refused.data["message"]
    for op, args in (("load", {"model": "beta"}), ("embed", {"model": "alpha", "inputs": ["x"]}),
                     ("tokenize", {"model": "beta", "text": "x"})):  # fmt: skip
        assert (await ask(other, op, **args)).data["code"] == "reserved", op
    assert (await ask(other, "tokenize", model="alpha", text="x")).ev == "result"  # it costs the batch nothing
    batch.generate(1, "hello")
    assert text(await batch.until_end(1))
    assert (await batch.call("embed", model="alpha", inputs=["x"]))["vectors"]
    for op in ("ps", "status"):
        seen = (await other.call(op))["exclusive"]
        assert (seen["model"], seen["done"], seen["total"], seen["left_s"]) == ("alpha", 4, 10, 90.0)
    await batch.call("release")
    other.generate(2, "hello")
    assert text(await other.until_end(2))
    assert (await other.call("ps"))["exclusive"] is None


async def test_its_engine_is_raised_and_lowered(front: Front) -> None:
    usual = await config_of(front)
    batch = await front.connect()
    await batch.call("reserve", **WISH)
    raised = await config_of(front)
    assert (raised.max_streams, raised.max_batch_rows, raised.throughput) == (48, 1024, True)
    assert (raised.device_bytes, raised.weights_bytes) == (SIZES.device_bytes, SIZES.weights_bytes)
    engine = front.engine()
    await batch.call("release")
    await until(lambda: "alpha" not in front.supervisor.engines)  # with all that it had
    assert engine.state == "ended" and (await config_of(front)).max_streams == usual.max_streams == 16


async def test_what_its_engine_takes_is_counted(front: Front) -> None:
    batch = await front.connect()
    await batch.call("reserve", **WISH)
    held = front.prepare.books.held["alpha"]
    assert held.arenas == (SIZES.device_bytes, SIZES.host_bytes) and held.workspace == BLOCK.workspace_bytes


async def test_running_answers_end_first_and_every_model_goes(front: Front) -> None:
    other, batch = await front.connect(), await front.connect()
    await other.call("load", model="beta")  # pinned: it goes all the same
    other.generate(1, "!still")
    await until(lambda: front.service.live == 1 and "alpha" in front.supervisor.engines)
    batch.send(7, "reserve", **WISH)
    await until(lambda: front.service.exclusive.told())
    late = await front.connect()
    late.generate(1, "hello")
    assert (await late.until_end(1))[-1].data["code"] == "reserved"  # from the moment of asking on
    assert front.service.exclusive.stage == "waiting for 1 request" and len(front.supervisor.engines) == 2
    other.send(2, "cancel", target=1)
    (answer,) = await batch.until_end(7)
    assert answer.ev == "result" and list(front.supervisor.engines) == ["alpha"]


@pytest.mark.parametrize("pinned", ["alpha", "beta"])  # the one of the batch, and another
async def test_models_that_had_to_go_come_back_pinned_first(fake_models: Path, tmp_path: Path, pinned: str) -> None:
    settings = make_settings(tmp_path, pinned_models=(pinned,))
    async with running(settings, max_loaded=0, plan_block=Planner()) as front:
        batch, other = await front.connect(), await front.connect()
        await batch.call("load", model="alpha")
        await batch.call("load", model="beta")
        assert (await batch.call("reserve", **WISH))["unloaded"] == ["alpha", "beta"]
        await batch.call("release")
        await until(lambda: [e.state for e in front.supervisor.engines.values()] == ["ready", "ready"])
        engine = front.engine(pinned)
        assert next(iter(front.supervisor.engines.values())) is engine
        assert not engine.retiring and engine.chosen["max_streams"] == 16
        other.generate(1, "!hang", model=pinned)  # one that does not get the machine brings them back, too
        await until(lambda: engine.streams)
        batch.send(7, "reserve", **WISH)
        await until(lambda: front.service.exclusive.told())
        batch.send(8, "release")
        assert (await ends(batch, 7, 8))[7].data["code"] == "conflict"
        assert front.engine(pinned) is engine and not engine.stop_asked
        other.send(2, "cancel", target=1)
        await other.until_end(1)


async def test_models_come_back_when_the_batch_does_not_fit(front: Front, planner: Planner) -> None:
    planner.block = None
    batch = await front.connect()
    await batch.call("load", model="beta")
    await batch.call("load", model="alpha")
    gone = [front.engine("beta"), front.engine("alpha")]
    assert (await ask(batch, "reserve", **WISH)).data["code"] == "out_of_space"
    await until(lambda: [e.state for e in front.supervisor.engines.values()] == ["ready", "ready"])
    assert not set(front.supervisor.engines.values()) & set(gone)


async def test_a_pinned_model_that_does_not_come_back_is_left(front: Front, fake_models: Path) -> None:
    batch, other = await front.connect(), await front.connect()
    await batch.call("load", model="beta")
    await batch.call("reserve", **WISH)
    set_options(fake_models / "beta", fail={"code": "out_of_space", "message": "too big"})
    await batch.call("release")
    await until(lambda: front.metrics.engine_deaths["beta"])
    await until(lambda: not front.supervisor.is_wanted)
    other.generate(1, "hello")
    assert text(await other.until_end(1))


async def test_who_waits_for_an_engine_gets_it_first(front: Front, fake_models: Path) -> None:
    set_options(fake_models / "alpha", start_s=0.3)
    other, batch = await front.connect(), await front.connect()
    other.send(1, "load", model="alpha")
    other.send(2, "prefix", model="alpha", action="pin", id="ab")
    await until(lambda: len(front.supervisor._waiters) == 2)
    batch.send(7, "reserve", **WISH)
    await until(lambda: front.service.exclusive.stage == "waiting for the loading of a model")
    assert (await other.until_end(1))[-1].ev == (await other.until_end(2))[-1].ev == "result"
    assert (await batch.until_end(7))[-1].data["streams"] == 48


async def test_small_questions_do_not_bring_up_the_usual_engine(front: Front, planner: Planner) -> None:
    batch, other = await front.connect(), await front.connect()
    planner.may_answer.clear()
    batch.send(7, "reserve", **WISH)
    await until(lambda: front.service.exclusive.stage == "planning")
    assert (await ask(other, "tokenize", model="alpha", text="x")).data["code"] == "reserved"
    planner.may_answer.set()
    assert (await batch.until_end(7))[-1].ev == "result"
    assert front.engine().chosen["max_streams"] == 48


async def test_a_call_that_an_engine_is_at_is_waited_for_and_named(
    front: Front, fake_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_options(fake_models / "alpha", cache_stands=True)
    monkeypatch.setattr(server, "PROGRESS_S", 0.01)
    other, batch = await front.connect(), await front.connect()
    await other.call("load", model="alpha")
    other.send(1, "cache", model="alpha", action="verify")
    await until(lambda: front.engine().busy)
    batch.send(7, "reserve", **WISH)
    while (event := await batch.next()).ev != "progress":
        pass
    assert event.data["text"] == "waiting for what runs on alpha"
    assert list(front.supervisor.engines) == ["alpha"] and front.service.live == 0
    batch.send(8, "release")
    await ends(batch, 7, 8)
    monkeypatch.setattr(exclusive, "DRAIN_S", 0.05)
    refused = await ask(batch, "reserve", **WISH)
    assert refused.data["code"] == "overloaded" and "what runs on alpha did not end" in refused.data["message"]
    assert not front.service.history.since(1)  # but that it was loaded


async def test_both_ends_are_told_in_the_history(front: Front) -> None:
    batch = await front.connect()
    await batch.call("reserve", **WISH)
    await batch.call("release")
    told = [entry["text"] for entry in front.service.history.since(0) if entry["kind"] == "batch"]
    assert told == ["a batch has the machine for itself: 48 sequences at once", "the machine is given back"]


async def test_a_lost_connection_gives_the_machine_back(front: Front) -> None:
    batch, other = await front.connect(), await front.connect()
    await batch.call("reserve", **WISH)
    batch.generate(1, "!hang")
    await until(lambda: front.service.live == 1)
    batch.writer.transport.abort()  # as when the command is killed
    await until(lambda: front.service.exclusive.told() is None)
    await until(lambda: "alpha" not in front.supervisor.engines)
    other.generate(1, "hello")
    assert text(await other.until_end(1))


async def test_one_that_is_lost_while_it_waits_leaves_nothing(front: Front) -> None:
    other, batch = await front.connect(), await front.connect()
    other.generate(1, "!hang")
    await until(lambda: front.service.live == 1)
    batch.send(7, "reserve", **WISH)
    await until(lambda: front.service.exclusive.told())
    batch.writer.transport.abort()
    await until(lambda: front.service.exclusive.told() is None)
    late = await front.connect()
    late.generate(1, "hello")
    assert text(await late.until_end(1))
    other.send(2, "cancel", target=1)
    await other.until_end(1)


async def config_of(front: Front, name: str = "alpha") -> EngineConfig:
    """What the next engine of a model would get."""
    made = await front.prepare(Model(name, front.settings.models_dir / name), {})
    return msgspec.json.decode(made, type=EngineConfig)


@pytest.mark.parametrize("stage", ["waiting for 1 request", "planning", "loading alpha"])
async def test_one_that_gives_it_back_while_it_waits_leaves_nothing(
    front: Front, fake_models: Path, planner: Planner, stage: str
) -> None:
    other, batch = await front.connect(), await front.connect()
    usual = await config_of(front)
    if stage == "waiting for 1 request":
        other.generate(1, "!hang")
        await until(lambda: front.service.live == 1)
    elif stage == "planning":
        planner.may_answer.clear()
    else:
        set_options(fake_models / "alpha", start_s=0.5)
    batch.send(7, "reserve", **WISH)
    await until(lambda: front.service.exclusive.stage == stage and (front.supervisor.engines or stage == "planning"))
    batch.send(8, "release")
    await until(lambda: front.service.exclusive.told() is None)
    planner.may_answer.set()
    other.send(2, "cancel", target=1)
    refused = (await ends(batch, 7, 8))[7]
    assert refused.data["code"] == "conflict" and "given back before" in refused.data["message"]
    assert (await config_of(front)).max_streams == usual.max_streams  # also of the next engine
    late = await front.connect()
    late.generate(1, "hello")
    assert text(await late.until_end(1))
    assert not any(entry["kind"] == "batch" for entry in front.service.history.since(0))


async def test_one_that_gives_it_back_and_asks_again_has_it_once(front: Front, planner: Planner) -> None:
    batch = await front.connect()
    planner.may_answer.clear()
    batch.send(7, "reserve", **WISH)
    await until(lambda: front.service.exclusive.stage == "planning")
    batch.send(8, "release")
    batch.send(9, "reserve", **WISH | {"requests": 11})
    await until(lambda: (front.service.exclusive.told() or {}).get("total") == 11)
    planner.may_answer.set()
    found = await ends(batch, 7, 8, 9)
    assert (found[7].data["code"], found[9].data["total"]) == ("conflict", 11)
    assert front.service.exclusive.stage == "running" and list(front.supervisor.engines) == ["alpha"]


async def test_only_one_batch_has_the_machine(front: Front) -> None:
    batch, other = await front.connect(), await front.connect()
    await batch.call("reserve", **WISH)
    assert (await ask(other, "reserve", **WISH)).data["code"] == "conflict"
    assert (await ask(other, "reserved", done=1)).data["code"] == "conflict"
    await other.call("release")  # it has nothing to give back
    assert front.service.exclusive.told()


async def test_what_never_fits_is_refused_with_the_next_step(front: Front, planner: Planner) -> None:
    planner.block = None
    batch = await front.connect()
    refused = await ask(batch, "reserve", **WISH)
    assert refused.data["code"] == "out_of_space" and "50 tokens" in refused.data["message"]
    assert "tierd plan alpha" in refused.data["hint"]
    assert front.service.exclusive.told() is None


async def test_answers_that_do_not_end_are_not_waited_for_for_ever(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exclusive, "DRAIN_S", 0.05)
    other, batch = await front.connect(), await front.connect()
    other.generate(1, "!hang")
    await until(lambda: front.service.live == 1)
    refused = await ask(batch, "reserve", **WISH)
    assert refused.data["code"] == "overloaded" and "1 request did not end" in refused.data["message"]
    assert front.service.exclusive.told() is None
    other.send(2, "cancel", target=1)
    await other.until_end(1)


async def test_an_engine_that_dies_comes_back_as_it_was(front: Front) -> None:
    batch = await front.connect()
    await batch.call("reserve", **WISH)
    before = front.engine()
    batch.generate(1, "!crash=2", max_tokens=4)
    assert len(text(await batch.until_end(1)).split()) == 4  # resumed on the next engine
    assert front.engine() is not before and front.service.exclusive.told()


@pytest.mark.parametrize("changes", [{"requests": 0}, {"streams": 0}, {"answer_tokens": -1}])
async def test_nonsense_is_refused(front: Front, changes: dict[str, int]) -> None:
    batch = await front.connect()
    assert (await ask(batch, "reserve", **WISH | changes)).data["code"] == "bad_request"
    assert front.service.exclusive.told() is None
