"""Operations on an engine made of fakes, without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tests.daemon.engine.fakes import VOCAB, expected
from tests.daemon.engine.rig import PromptMover, Rig
from tierd.daemon.engine.ops import Ops
from tierd.daemon.engine.step import StepLoop
from tierd.daemon.protocol import TERMINAL, Event, Request, Submit
from tierd.tiers.prefixes import Prefixes

PROMPT = [5, 9, 2, 7, 1, 1, 8, 3, 30, 31]


class Desk:
    """The operations, what they sent, and the engine behind them."""

    def __init__(self, max_requests: int = 20) -> None:
        self.rig = Rig(mover=PromptMover(1), store=64)
        self.rig.streams._clock = time.monotonic
        self.rig.streams._moved_s = time.monotonic()
        self.sent: list[Event] = []
        self.stopped = 0
        self.changed = asyncio.Event()
        self.event_loop = asyncio.get_running_loop()
        self.ops = Ops(self.note, self.stop, ThreadPoolExecutor(1, thread_name_prefix="tokenizer"), max_requests)
        self.loop = StepLoop(
            self.rig.streams, self.rig.pager, emit=self.emit, published=lambda: None, died=lambda _cause: None,
            clock=time.monotonic, max_requests=max_requests,
        )  # fmt: skip
        self.rig.pager.page_map = lambda: b"\x00\x02"
        self.rig.pager.clear = lambda: 5
        board = SimpleNamespace(state="ready", told=lambda: {"state": "ready"})
        self.engine: Any = SimpleNamespace(
            intake=self.rig.intake, loop=self.loop, pager=self.rig.pager, board=board, model="m", notes=("a note",),
            prefixes=Prefixes(self.rig.pager, None),
        )

    def stop(self) -> None:
        self.stopped += 1

    def note(self, event: Event) -> None:
        self.sent.append(event)
        self.changed.set()

    def emit(self, events: list[Event]) -> None:
        for event in events:
            self.event_loop.call_soon_threadsafe(self.note, event)
        self.ops.ended(events)

    def ask(self, number: int, op: str, **args: Any) -> None:
        self.ops.handle(Request(number, op, args))

    def generate(self, number: int, **more: Any) -> None:
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8} | more.pop("sampling", {})
        self.ask(number, "generate", **{"model": "m", "tokens": PROMPT, "sampling": sampling} | more)

    async def begun(self, number: int) -> None:
        await self._wait(number, "accepted")

    async def end(self, number: int) -> Event:
        return await self._wait(number, *TERMINAL)

    async def _wait(self, number: int, *kinds: str) -> Event:
        async with asyncio.timeout(20):
            while True:
                for event in self.sent:
                    if event.id == number and event.ev in kinds:
                        return event
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def desk(*, up: bool = True, **more: Any) -> AsyncIterator[Desk]:
    one = Desk(**more)
    one.loop.start()
    if up:
        one.ops.attach(one.engine)
    try:
        yield one
    finally:
        one.ops.close()
        one.loop.stop()
        assert await asyncio.to_thread(one.loop.join, 5.0)
    terminal = [event.id for event in one.sent if event.ev in TERMINAL]
    assert len(terminal) == len(set(terminal))


async def test_generate() -> None:
    async with desk() as one:
        one.generate(3)
        end = await one.end(3)
        assert end.ev == "done" and [event.ev for event in one.sent if event.id == 3][0] == "accepted"
        assert [t for e in one.sent if e.ev == "text" for t in e.data["tokens"]] == expected(PROMPT, 8)
        one.generate(4, resume=expected(PROMPT, 5))
        end = await one.end(4)
        assert end.data["usage"].completion_tokens == 8


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tokens": [1] * 500}, "context_length_exceeded"),
        ({"tokens": []}, "bad_request"),
        ({"surprise": 1}, "unsupported_parameter"),
        ({"sampling": {"temperature": "hot"}}, "bad_request"),
        ({"tokens": None, "messages": [{"role": "user", "content": "x"}]}, "unsupported_parameter"),
    ],
    ids=str,
)
async def test_refusals(change: dict[str, Any], code: str) -> None:
    async with desk() as one:
        one.generate(3, **change)
        end = await one.end(3)
        assert (end.ev, end.data["code"]) == ("refused", code)
        one.generate(4)
        assert (await one.end(4)).ev == "done"


async def test_vectors_are_a_result_and_their_prompts_are_told_to_nobody() -> None:
    async with desk() as one:
        one.ask(3, "embed", inputs=["a page", PROMPT], tenant="key:a")
        done = await one.end(3)
        assert done.ev == "result" and done.data["usage"]["prompt_tokens"] == len(PROMPT) + 6
        assert [len(vector) for vector in done.data["vectors"]] == [4 * VOCAB] * 2
        one.ask(4, "embed", inputs=["a", ""], first=64)
        refused = await one.end(4)
        assert refused.ev == "refused" and "input[65]" in refused.data["message"]
        one.ask(5, "embed", inputs=[PROMPT], colour=1)
        assert (await one.end(5)).data["code"] == "bad_request"


async def test_vectors_that_nobody_wants_any_more() -> None:
    async with desk() as one:
        one.ask(3, "embed", inputs=[PROMPT] * 64)
        one.ask(4, "cancel", target=3)
        assert (await one.end(3)).ev == "aborted" and (await one.end(4)).ev == "result"
        one.ask(5, "embed", inputs=[PROMPT])
        assert (await one.end(5)).ev == "result"
        assert [event.ev for event in one.sent if event.id == 3] == ["aborted"]


async def test_before_the_model_is_up() -> None:
    async with desk(up=False) as one:
        one.generate(3)
        assert (await one.end(3)).data["code"] == "loading"
        one.ask(4, "flush", timeout_s=1.0)
        assert (await one.end(4)).data["code"] == "loading"
        one.ask(5, "status")
        assert (await one.end(5)).data["state"] == "loading"
        one.ask(6, "stop", timeout_s=1.0)
        assert (await one.end(6)).ev == "result" and one.stopped == 1


async def test_cancel_while_it_is_prepared_and_while_it_runs() -> None:
    async with desk() as one:
        one.generate(3, sampling={"max_tokens": 150})
        one.ask(4, "cancel", target=3)
        assert (await one.end(3)).ev == "aborted" and (await one.end(4)).ev == "result"
        one.generate(5, sampling={"max_tokens": 150})
        await one.begun(5)
        one.ask(6, "cancel", target=5)
        assert (await one.end(5)).ev == "aborted"
        one.ask(7, "cancel", target=99)
        assert (await one.end(7)).ev == "result"


class Slow:
    """Compiles grammars one after the other, each until it is told to end."""

    def __init__(self, intake: Any) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Semaphore(0)
        self._compiler = intake.guides.compiler
        intake.compile = self._compile

    def _compile(self, submit: Submit) -> None:
        assert submit.format is not None
        self.begun.append(submit.format.source)
        assert self.go_on.acquire(timeout=20)


async def test_requests_cancelled_before_their_turn_take_no_place_and_no_work() -> None:
    async with desk(max_requests=3) as one:
        slow = Slow(one.rig.intake)
        try:
            for number in range(1, 200, 2):  # a client that sends grammars and hangs up, again and again
                one.generate(number, format={"kind": "grammar", "source": str(number)})
                await asyncio.sleep(0)
                one.ask(number + 1, "cancel", target=number)
            for number in range(1, 200, 2):
                assert (await one.end(number)).ev == "aborted"  # while the first of them is still compiled
            one.generate(201)  # another client
            assert (await one.end(201)).ev == "done"
            assert one.rig.intake.guides.compiler._work_queue.qsize() <= 1
            one.generate(203, format={"kind": "grammar", "source": 'start: "a"'})
        finally:
            slow.go_on.release(3)
        await one.end(203)
        assert slow.begun == ["1", 'start: "a"']
        one.rig.intake.close()


async def test_a_cancelled_request_is_not_tokenized() -> None:
    async with desk() as one:
        asked: list[int] = []
        made, gate = one.rig.intake.request, threading.Event()

        def request(request_id: int, *rest: Any) -> Any:
            asked.append(request_id)
            assert gate.wait(20)
            return made(request_id, *rest)

        one.rig.intake.request = request  # type: ignore[method-assign]
        for number in (1, 3, 5):
            one.generate(number)
        for _ in range(3):
            await asyncio.sleep(0)  # the first is on the tokenizer's thread
        for number in (1, 3):
            one.ask(number + 1, "cancel", target=number)
        gate.set()
        assert [(await one.end(number)).ev for number in (1, 3, 5)] == ["aborted", "aborted", "done"]
        assert asked == [1, 5]


async def test_a_stop_ends_what_is_still_prepared() -> None:
    async with desk() as one:
        slow = Slow(one.rig.intake)
        one.generate(1, format={"kind": "json_object", "source": ""})
        one.generate(3, format={"kind": "json_object", "source": ""})
        one.ask(5, "stop", timeout_s=0.0)
        try:
            assert [(await one.end(number)).ev for number in (1, 3, 5)] == ["aborted", "aborted", "result"]
        finally:
            slow.go_on.release(2)
        one.rig.intake.close()


async def test_too_many() -> None:
    async with desk(max_requests=3) as one:
        for number in range(1, 6):
            one.generate(number)
        ends = [(await one.end(number)) for number in range(1, 6)]
        assert [end.ev for end in ends] == ["done"] * 3 + ["refused"] * 2
        assert ends[4].data["code"] == "overloaded"


async def test_verify_of_a_store_that_is_off_has_read_nothing() -> None:
    async with desk() as one:
        one.rig.pager.writeback.turn_off("its directory was removed")
        one.ask(1, "cache", action="verify")
        found = (await one.end(1)).data
        assert found["pages"] == 0 and "its directory was removed" in found["findings"][0]


async def test_verify_says_why_there_is_no_store() -> None:
    async with desk() as one:
        one.rig.pager.store = None
        one.ask(1, "cache", action="verify")
        assert (await one.end(1)).data == {"findings": ["a note"], "pages": 0}


async def test_simple_operations() -> None:
    async with desk() as one:
        for number, (op, args) in enumerate(
            [("tokenize", {"text": "hi"}), ("cache", {"action": "verify", "repair": True}), ("cache", {"action": "gc"}),
             ("cache", {"action": "clear"}), ("flush", {"timeout_s": 5}), ("pages", {}), ("status", {})], start=1,
        ):  # fmt: skip
            one.ask(number, op, **args)
        answers = [(await one.end(number)).data for number in range(1, 8)]
        assert answers == [
            {"tokens": [104, 105]}, {"findings": [], "pages": 0},
            {"removed_pages": 0, "freed_bytes": 0}, {"removed_pages": 5, "removed_pins": 0}, {"left": 0},
            {"map": b"\x00\x02"}, {"state": "ready"},
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "args", "code"),
    [
        ("dance", {}, "unsupported_parameter"),
        ("cache", {"action": "sell"}, "unsupported_parameter"),
        ("flush", {"timeout_s": "soon"}, "bad_request"),
        ("tokenize", {"text": 5}, "bad_request"),
        ("tokenize", {}, "bad_request"),
    ],
)
async def test_operations_that_are_refused(op: str, args: dict[str, Any], code: str) -> None:
    async with desk() as one:
        one.ask(1, op, **args)
        end = await one.end(1)
        assert (end.ev, end.data["code"]) == ("refused", code)


async def test_stop_lets_answers_end_and_takes_no_new_ones() -> None:
    async with desk() as one:
        one.generate(1, sampling={"max_tokens": 30})
        one.ask(2, "stop", timeout_s=10.0)
        await asyncio.sleep(0)
        one.generate(3)
        assert (await one.end(3)).data["code"] == "draining"
        assert (await one.end(1)).ev == "done" and (await one.end(2)).ev == "result"
        assert one.stopped == 1


async def test_a_stop_without_time_aborts() -> None:
    async with desk() as one:
        one.generate(1, sampling={"max_tokens": 180})
        await one.begun(1)
        one.ask(2, "stop", timeout_s=0.0)
        assert (await one.end(2)).ev == "result"
        assert (await one.end(1)).ev in ("aborted", "done")


async def test_what_top_asks_goes_to_its_board() -> None:
    async with desk() as one:
        async def told(engine: Any, tokenizer: ThreadPoolExecutor, args: dict[str, Any]) -> dict[str, Any]:
            return {"model": engine.model, "args": args}

        one.engine.top = SimpleNamespace(answer=told, detail=told)
        one.ask(1, "top", prefixes=3)
        one.ask(2, "page", tier="host", slot=4)
        assert (await one.end(1)).data == {"model": "m", "args": {"prefixes": 3}}
        assert (await one.end(2)).data == {"model": "m", "args": {"tier": "host", "slot": 4}}
