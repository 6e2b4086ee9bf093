"""The asyncio client: many requests at once on one connection."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tierd.clients.bridge import Bridge
from tierd.clients.common import (
    CALL_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    EVENT_TIMEOUT_S,
    LISTED,
    RECEIVE_BYTES,
    RESIZE_TIMEOUT_S,
    Input,
    connect_error,
    frame_of,
    lost_error,
    parts_of,
    silence_error,
)
from tierd.daemon.errors import DaemonUnreachable, TierdError
from tierd.daemon.protocol import (
    TERMINAL,
    Event,
    FrameDecoder,
    Request,
    Submit,
    cancel_request,
    encode,
    error_of,
    generate_request,
    to_event,
)

INBOX_EVENTS = 256


class ClientStatistics(NamedTuple):
    """What a client holds at the moment."""

    requests: int  # without a terminal event yet
    waiting_events: int  # arrived, not read by their request yet
    merged_events: int  # joined into another one because their reader was slow, since the start


class _Inbox:
    """Events of one request that its reader has not taken yet.

    Bounded without ever blocking the reader task, which serves all requests: beyond `INBOX_EVENTS` a text joins the
    newest one of its answer and a progress replaces the one before it. What stays is the text of each answer at most.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._given = 0  # events taken out so far
        self._newest: dict[tuple[str, object], int] = {}  # place of the newest of a kind, counted from the first ever
        self._arrived = asyncio.Event()
        self._fault: TierdError | None = None
        self.merged = 0

    @property
    def waiting(self) -> int:
        """Events not read yet."""
        return len(self._events)

    def put(self, event: Event) -> None:
        kind = event.ev, event.data.get("choice")
        place = self._newest.get(kind, -1) - self._given
        if len(self._events) >= INBOX_EVENTS and place >= 0 and (joined := _joined(self._events[place], event)):
            self._events[place] = joined
            self.merged += 1
        else:
            self._newest[kind] = self._given + len(self._events)
            self._events.append(event)
        self._arrived.set()

    def fail(self, fault: TierdError) -> None:
        self._fault = fault
        self._arrived.set()

    async def get(self) -> Event:
        """The next event. What arrived before a fault is still given out, then the fault is raised."""
        while not self._events:
            if self._fault is not None:
                raise self._fault
            self._arrived.clear()
            await self._arrived.wait()
        self._given += 1
        return self._events.popleft()


def _joined(last: Event, event: Event) -> Event | None:
    if last.ev != event.ev:
        return None
    if event.ev == "progress":
        return event
    if event.ev == "text" and last.data.get("choice") == event.data.get("choice"):
        # All fields but the choice add up, whatever they are: text to text, token ids to token ids.
        data = dict(last.data)
        for key, value in event.data.items():
            data[key] = data[key] + value if key in data and key != "choice" else value
        return Event(id=event.id, ev="text", data=data)
    return None


class AsyncClient:
    """A connection to the daemon.

        async with AsyncClient(path) as client:
            async with contextlib.aclosing(client.generate(submit)) as events:
                async for event in events:
                    ...

    One task owned by the client reads the socket; when it ends, every waiter and every later request gets the same
    error. Threading: one event loop.
    """

    def __init__(self, path: Path | str, command: Sequence[str] = ()) -> None:
        """`command`: instead of opening a socket, talk to a process that bridges to one: `ssh HOST tierd proxy`.

        `path` is then only a name, for messages.
        """
        self.path = Path(path)
        self._command = tuple(command)
        self._bridge: Bridge | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self._inboxes: dict[int, _Inbox] = {}
        self._last_id = 0
        self._fault: TierdError | None = None
        self._merged = 0

    async def connect(self) -> Self:
        """Open the connection. Raises DaemonUnreachable or PermissionDenied, each with a next step."""
        await self.aclose()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader = await (self._spawn() if self._command else self._open_socket())
        except TimeoutError:
            raise silence_error("connect", CONNECT_TIMEOUT_S) from None
        except OSError as exc:
            if self._command:
                raise DaemonUnreachable(f"cannot run {self._command[0]}: {exc.strerror or exc}") from None
            raise connect_error(self.path, exc) from None
        self._fault = None
        self._reader_task = asyncio.create_task(self._read(reader), name="tierd-client-reader")
        return self

    async def _open_socket(self) -> asyncio.StreamReader:
        reader, self._writer = await asyncio.open_unix_connection(str(self.path))
        return reader

    async def _spawn(self) -> asyncio.StreamReader:
        self._bridge = bridge = await Bridge.start(self._command)
        self._writer = bridge.writer
        return bridge.reader

    async def aclose(self) -> None:
        """Close the connection; the daemon stops what still runs on it. Closing twice is fine."""
        writer, task, bridge = self._writer, self._reader_task, self._bridge
        self._writer = self._reader_task = self._bridge = None
        if writer is not None:
            writer.close()  # before anything is waited for: a cancel must not leave it open
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if writer is not None:
            try:
                await writer.wait_closed()
            except OSError:
                pass  # the other side was faster
        if bridge is not None:
            await bridge.aclose()

    async def __aenter__(self) -> Self:
        return self if self._writer is not None else await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def statistics(self) -> ClientStatistics:
        """Open requests and waiting events."""
        inboxes = self._inboxes.values()
        merged = self._merged + sum(inbox.merged for inbox in inboxes)
        return ClientStatistics(len(inboxes), sum(inbox.waiting for inbox in inboxes), merged)

    async def call(
        self,
        op: str,
        *,
        on_progress: Callable[[Event], None] | None = None,
        wait_s: float = CALL_TIMEOUT_S,
        **args: Any,
    ) -> dict[str, Any]:
        """A simple request: the map of its `result`.

        `wait_s` bounds each wait for an answer; progress events go to `on_progress` and start it anew.
        Raises the daemon's error, DaemonUnreachable, TimedOut.
        """
        request = Request(id=self._next_id(), op=op, args=args)
        inbox = await self._open(request)
        try:
            while True:
                event = await self._next(inbox, op, wait_s)
                if error := error_of(event):
                    raise error
                if event.ev in TERMINAL:
                    return event.data
                if event.ev == "progress" and on_progress is not None:
                    on_progress(event)
        finally:
            self._close(request.id)

    async def prefixes(self, model: str | None = None, limit: int = LISTED) -> list[dict[str, Any]]:
        """Known prefixes, the one used last first: `id`, `text`, `tokens`, `pages`, by tier `device`, `host`, `nvme`,
        `hits`, `idle_s`, `pinned` (`wished`: by a request, not by hand), `in_use`, `parent`. Of the model used last,
        unless one is named."""
        answer = await self.call("prefix", action="ls", model=model, limit=limit, wait_s=EVENT_TIMEOUT_S)
        return list(answer["prefixes"])

    async def pin(self, prefix_id: str, model: str | None = None) -> int:
        """Keep a prefix: its pages are not evicted. Returns how many. `prefix_id` may be shortened, as in all three."""
        return await self._on_prefix("pin", prefix_id, model)

    async def unpin(self, prefix_id: str, model: str | None = None) -> int:
        """Let a prefix be evicted again, and those that go on from it. Returns how many pages."""
        return await self._on_prefix("unpin", prefix_id, model)

    async def drop(self, prefix_id: str, model: str | None = None) -> int:
        """Forget a prefix, and what goes on from it, in all tiers. Returns how many pages. Raises Conflict."""
        return await self._on_prefix("drop", prefix_id, model)

    async def embed(
        self, model: str, inputs: Sequence[Input], *, dimensions: int | None = None, wait_s: float = EVENT_TIMEOUT_S
    ) -> list[array[float]]:
        """A vector of unit length for each text, or list of token ids: float32, as many values as the model is wide.

        `dimensions`: only so many of them, of unit length again. Raises BadRequest that names the input.
        """
        vectors: list[array[float]] = []
        for part in parts_of(inputs):
            answer = await self.call("embed", model=model, inputs=part, dimensions=dimensions, wait_s=wait_s)
            vectors += [array("f", one) for one in answer["vectors"]]
        return vectors

    async def resize(
        self,
        model: str | None = None,
        *,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        timeout_s: float = RESIZE_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Change the memory of a loaded model while it works; the sizes then. Raises OutOfSpace that says what fits."""
        return await self.call(
            "resize",
            wait_s=timeout_s + CALL_TIMEOUT_S,
            model=model,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            timeout_s=timeout_s,
        )

    async def _on_prefix(self, action: str, prefix_id: str, model: str | None) -> int:
        answer = await self.call("prefix", action=action, id=prefix_id, model=model, wait_s=EVENT_TIMEOUT_S)
        return int(answer["pages"])

    async def generate(self, submit: Submit, *, wait_s: float = EVENT_TIMEOUT_S) -> AsyncGenerator[Event, None]:
        """The events of one generation; the last one is `done` or `aborted`.

        `refused` and `failed` are raised as their error. Closing the iterator early, or cancelling the task that reads
        it, cancels the generation. A loop that may `break` should hold it in `contextlib.aclosing`.
        """
        request = generate_request(self._next_id(), submit)
        ended = True  # what was never sent needs no cancel
        try:
            inbox = await self._open(request)
            ended = False
            while not ended:
                event = await self._next(inbox, "generate", wait_s)
                ended = event.ev in TERMINAL
                if error := error_of(event):
                    raise error
                yield event
        finally:
            self._close(request.id)
            if not ended and self._writer is not None and self._fault is None:
                # Nobody waits for the answer: events without an inbox are dropped.
                self._writer.write(encode(cancel_request(self._next_id(), request.id)))

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    async def _open(self, request: Request) -> _Inbox:
        if self._writer is None:
            await self.connect()
        assert self._writer is not None
        if self._fault is not None:
            raise self._fault
        frame = frame_of(request)
        inbox = self._inboxes[request.id] = _Inbox()
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except OSError:
            self._close(request.id)
            raise lost_error(self.path) from None
        except asyncio.CancelledError:
            # The frame is on its way. Whoever asked is gone before it could say so itself.
            self._close(request.id)
            self._writer.write(encode(cancel_request(self._next_id(), request.id)))
            raise
        return inbox

    def _close(self, request_id: int) -> None:
        if inbox := self._inboxes.pop(request_id, None):
            self._merged += inbox.merged

    async def _next(self, inbox: _Inbox, op: str, wait_s: float) -> Event:
        try:
            async with asyncio.timeout(wait_s):
                return await inbox.get()
        except TimeoutError:
            raise silence_error(op, wait_s) from None

    async def _last_words(self) -> TierdError | None:
        """Why a bridge ended, in its own words."""
        words = await self._bridge.last_words() if self._bridge is not None else None
        if words is None:
            return None
        return DaemonUnreachable(
            f"`{' '.join(self._command)}` ended: {words[:200]}", hint="does it work when you type it in a shell?"
        )

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Sort events into inboxes until the connection ends; then tell everyone."""
        fault: TierdError = lost_error(self.path)
        decoder = FrameDecoder()
        try:
            while data := await reader.read(RECEIVE_BYTES):
                for message in decoder.feed(data):
                    event = to_event(message)
                    if inbox := self._inboxes.get(event.id):
                        inbox.put(event)
                    elif event.id == 0 and (said := error_of(event)):  # about the connection, not about a request
                        fault = said
            fault = await self._last_words() or fault
        except OSError:
            pass  # told as a lost connection, like an end of file
        except TierdError as exc:  # bytes that are no frame of ours
            fault = exc
        finally:
            self._fault = fault
            for inbox in self._inboxes.values():
                inbox.fail(fault)
