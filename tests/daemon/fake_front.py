"""A front without a daemon behind it: a real unix socket, canned answers, generations by the words of their prompt.

Prompts: `echo WORDS` answers with the words; `slow` goes on until it is cancelled; `refuse`, `fail` end so; `drop`
closes the connection after one text; `garbage` sends bytes that are no frame; `noise` sends events nobody knows;
`silent` sends nothing; `flood N` sends N texts at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tierd.daemon.errors import BadRequest, ContextLengthExceeded, EngineFailed, TierdError, to_wire
from tierd.daemon.protocol import Event, FrameDecoder, Message, Request, Submit, encode, to_request, to_submit

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 5}
TIMINGS = {"ttft_ms": 12.5, "decode_tokens_per_s": 50.0, "hit_nvme": 5}


class FakeFront:
    """`with FakeFront(path) as front:` serves until the block ends. Its loop runs in a thread of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests: list[Request] = []
        self.submits: list[Submit] = []
        self.cancelled: list[int] = []
        self.answers: dict[str, dict[str, Any] | TierdError] = {
            "hello": {"version": "0", "pid": 4242},
            "status": {"pid": 4242, "state": "idle", "model": None, "tiers": {}},
            "ps": {"engines": []},
            "load": {"model": "alpha"},
            "stop": {},
        }
        self.connections = 0
        self._changed = threading.Condition()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="fake-front")

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(5):
            raise TimeoutError("the fake front did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(RuntimeError):  # a `stop` has ended the loop already
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def wait_for_cancel(self, timeout_s: float = 5.0) -> list[int]:
        """The targets that were cancelled, once there is one."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.cancelled, timeout_s):
                raise TimeoutError("nothing was cancelled")
        return self.cancelled

    def wait_for_submit(self, timeout_s: float = 5.0) -> None:
        """Return when a generation has been asked for."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.submits, timeout_s):
                raise TimeoutError("no generation was asked for")

    async def _main(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_unix_server(self._accept, str(self.path))
        self._ready.set()
        await self._end.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.path.unlink(missing_ok=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        decoder = FrameDecoder()
        running: dict[int, asyncio.Task[None]] = {}
        try:
            while data := await reader.read(65536):
                for message in decoder.feed(data):
                    request = to_request(message)
                    self.requests.append(request)
                    if request.op == "generate":
                        run = self._loop.create_task(self._generate(request, writer))
                        running[request.id] = run
                        self._tasks.add(run)
                        run.add_done_callback(self._tasks.discard)
                    else:
                        await self._answer(request, writer, running)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for run in running.values():
                run.cancel()
            writer.close()

    async def _answer(
        self, request: Request, writer: asyncio.StreamWriter, running: dict[int, asyncio.Task[None]]
    ) -> None:
        if request.op == "cancel":
            target = request.args["target"]
            running[target].cancel()
            writer.write(encode(Event(target, "aborted", {"usage": USAGE})) + encode(Event(request.id, "result")))
            with self._changed:
                self.cancelled.append(target)
                self._changed.notify_all()
            return
        if request.op == "load":
            for done in (0, 5, 10):
                writer.write(encode(Event(request.id, "progress", {"stage": "weights", "done": done, "total": 10})))
        answer = self.answers.get(request.op, BadRequest(f"unknown operation {request.op}"))
        event = Event(request.id, "refused", dict(to_wire(answer))) if isinstance(answer, TierdError) else (
            Event(request.id, "result", answer)
        )  # fmt: skip
        writer.write(encode(event))
        await writer.drain()
        if request.op == "stop":
            self._end.set()

    async def _generate(self, request: Request, writer: asyncio.StreamWriter) -> None:
        submit = to_submit(request.args, from_client=True)
        with self._changed:
            self.submits.append(submit)
            self._changed.notify_all()
        prompt = submit.prompt or (submit.messages or (Message("", ""),))[-1].content
        kind, _, rest = prompt.partition(" ")

        def send(ev: str, data: dict[str, Any] | None = None) -> None:
            writer.write(encode(Event(request.id, ev, data or {})))

        match kind:
            case "silent":
                return
            case "refuse":
                return send("refused", dict(to_wire(ContextLengthExceeded("9000 tokens, 8192 are allowed"))))
            case "garbage":
                writer.write(b"\x00\x00\x00\x02\xc1\xc1")
                return None
        send("accepted", {"prompt_tokens": 7, "cached_tokens": 5})
        match kind:
            case "slow":
                while True:
                    send("text", {"text": "tick ", "tokens": [1]})
                    await asyncio.sleep(0.01)
            case "fail":
                return send("failed", dict(to_wire(EngineFailed("the engine died"))))
            case "drop":
                send("text", {"text": "half", "tokens": [1]})
                await writer.drain()
                return writer.close()
            case "noise":
                send("weather", {"sky": "blue"})
            case "flood":
                for number in range(int(rest)):
                    send("text", {"text": f"{number} ", "tokens": [number]})
        if kind != "flood":
            for word in rest.split():
                send("text", {"text": word + " ", "tokens": [1]})
                await asyncio.sleep(0)
        send("done", {"finish": "stop", "usage": USAGE, "timings": TIMINGS})
        await writer.drain()
