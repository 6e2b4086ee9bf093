"""One engine process: started, spoken to, heard to its last word.

The process gets one end of a socketpair and its configuration in the environment; it speaks `daemon.protocol`. Its
standard error goes to the log line by line, and its tail is kept: the last words of an engine that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import logging
import os
import re
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierd.daemon.broadcast import Broadcast
from tierd.daemon.engine_config import ENGINE_CONFIG_VARIABLE
from tierd.daemon.errors import LOGS_HINT, EngineFailed, TierdError, TimedOut, from_wire
from tierd.daemon.inbox import Inbox
from tierd.daemon.protocol import (
    Event,
    FrameDecoder,
    Request,
    Submit,
    cancel_request,
    encode,
    generate_request,
    to_event,
)

log = logging.getLogger("tierd.engine")

WORKER = (sys.executable, "-m", "tierd.daemon.engine.worker")
READ_BYTES = 64 << 10
TAIL_LINES = 20
LINE_BYTES = 2048
SEND_TIMEOUT_S = 30.0
EXIT_GRACE_S = 5.0  # from closing its socket, or from promising to stop, to being killed
STOP_TIMEOUT_S = 2.0
_NO_USE = ("status", "flush", "stop", "pages", "top", "page")  # looking at it does not keep it loaded
_PRIVATE = ("TIERD_API_KEY", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")  # of the front alone


class EngineState(enum.StrEnum):
    """STARTING -> READY -> STOPPING -> ENDED; ENDED can follow each of them."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    ENDED = "ended"


class EngineProcess:
    """An engine, from before its start until after its end.

    Threading: for one event loop. The task that runs `live` owns the process and ends with it.
    """

    def __init__(
        self,
        model: str,
        changed: Broadcast,
        command: Sequence[str] = WORKER,
        on_ready: Callable[[EngineProcess], None] = lambda engine: None,
        on_notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.model = model
        self.state = EngineState.STARTING
        self.progress: dict[str, Any] = {}
        self.upkeep: dict[str, Any] = {}  # how far it is with its store; empty when it is not at it
        self.info: dict[str, Any] = {}  # what `ready` said
        self.notices: deque[str] = deque(maxlen=TAIL_LINES)
        self.pid: int | None = None
        self.started_s = time.monotonic()
        self.last_use_s = self.started_s
        self.heard_s = self.started_s  # its last news
        self.error: TierdError | None = None  # what it said before it gave up
        self.stop_asked = False
        self.retiring = False  # it ends as soon as nothing uses it
        self.was_ready = False
        self.completed = 0  # generations that it brought to `done`
        self.resizes = 0  # how often its memory was to be changed
        self.keep_alive: tuple[float | None] | None = None  # seconds, None in it: for ever; None: as the settings say
        self.status: dict[str, Any] = {}  # its last answer to `status`
        self.chosen: dict[str, Any] = {}  # what was planned for it, and why
        self._command = command
        self._changed = changed
        self._on_ready = on_ready
        self._on_notice = on_notice
        self._ids = itertools.count(1)
        self._inboxes: dict[int, Inbox] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._using_calls = 0
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None

    # -- what others see -------------------------------------------------------------------------------------------

    @property
    def busy(self) -> int:
        """Streams and calls that wait for it; looking at it and ending it are no use of it."""
        return len(self._inboxes) + self._using_calls

    @property
    def streams(self) -> int:
        """Streams that run or wait on it."""
        return len(self._inboxes)

    def notice(self, text: str) -> None:
        """What its user should know, said by the engine or about it."""
        self.notices.append(text)
        self._on_notice(text)
        log.warning("engine of %s: %s", self.model, text)

    def last_words(self) -> str:
        """How it ended, and the last line it wrote to standard error, fit for a client."""
        code = self._process.returncode if self._process else None
        ending = "not started" if code is None else f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"{ending}: {_without_internals(self._tail[-1])}" if self._tail else ending

    async def generate(self, submit: Submit) -> tuple[int, Inbox]:
        """Submit; the events come into the inbox. The caller closes it with `forget`."""
        stream_id, inbox = next(self._ids), Inbox()
        self._inboxes[stream_id] = inbox
        try:
            await self._send(generate_request(stream_id, submit))
        except BaseException:
            self.forget(stream_id)
            self.cancel(stream_id)
            raise
        return stream_id, inbox

    def forget(self, stream_id: int) -> None:
        """The stream is over for the front; what the engine still says of it is dropped."""
        if self._inboxes.pop(stream_id, None) is not None:
            self.last_use_s = time.monotonic()
            self._changed.notify()

    def cancel(self, stream_id: int) -> bool:
        """Ask the engine to end a stream; it answers into the inbox. False if there is none any more."""
        if self._writer is not None and not self._writer.is_closing():
            # Not awaited: a client that is gone must not wait for a full pipe, and the frame is 40 bytes.
            self._writer.write(encode(cancel_request(next(self._ids), stream_id)))
        return stream_id in self._inboxes

    async def call(self, op: str, args: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """A simple operation. Raises what the engine answers, EngineFailed when it dies, TimedOut."""
        call_id = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        is_use = op not in _NO_USE and not (op == "prefix" and args.get("action") == "ls")
        self._using_calls += is_use
        self.resizes += op == "resize"
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(Request(call_id, op, dict(args)))
                return await future
        except TimeoutError:
            what = f"the engine of {self.model} did not answer {op!r} within {timeout_s:g} s"
            raise TimedOut(what, hint="see `tierd status` and `tierd logs`") from None
        finally:
            if op in ("embed", "cache") and (future.cancelled() or not future.done()):
                self.cancel(call_id)  # nobody waits any more for what takes the longest of all calls
            if op == "cache":
                self.upkeep = {}
            del self._calls[call_id]
            if is_use:
                self._using_calls -= 1
                self.last_use_s = time.monotonic()
                self._changed.notify()

    # -- the process -----------------------------------------------------------------------------------------------

    async def live(self, config_json: str) -> None:
        """Run the process to its end. Never raises but when cancelled, and then the process is gone too."""
        ours, theirs = socket.socketpair()
        pump: asyncio.Task[None] | None = None
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    "--fd",
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    env={**_public_environment(), ENGINE_CONFIG_VARIABLE: config_json},
                    pass_fds=(theirs.fileno(),),
                    # Ctrl-C in a terminal goes to the whole group; the front alone decides when an engine ends.
                    start_new_session=True,
                )
            self.pid = self._process.pid
            if self.stop_asked:  # meanwhile
                self.kill()
            log.info("engine of %s started, pid %d", self.model, self.pid)
            pump = asyncio.create_task(self._pump_stderr(self._process), name=f"stderr of {self.model}")
            reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=READ_BYTES)
            await self._read(reader)
        except OSError as exc:
            self.error = self.error or EngineFailed(f"the engine could not be started: {exc.strerror}", hint=LOGS_HINT)
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            if self._writer is None:
                ours.close()
            await self._reap(pump)

    def kill(self) -> None:
        """End it without asking."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self, flush_s: float) -> None:
        """Ask it to make its pages durable and to end; kill it when it does not. `live` returns when it is gone."""
        self.state = EngineState.STOPPING
        self.stop_asked = True
        self._changed.notify()
        try:
            await self.call("flush", {"timeout_s": flush_s}, flush_s + 1.0)
        except TierdError as exc:
            log.warning("flush of %s: %s", self.model, exc)
        try:
            await self.call("stop", {"timeout_s": STOP_TIMEOUT_S / 2}, STOP_TIMEOUT_S)
            await self._until_ended(EXIT_GRACE_S)
        except TierdError as exc:
            log.warning("stop of %s: %s", self.model, exc)
        self.kill()

    async def _until_ended(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.state is not EngineState.ENDED and (left_s := deadline_s - time.monotonic()) > 0:
            await self._changed.wait(left_s)

    def fail_streams(self, error: TierdError) -> None:
        """End every stream with an error of the daemon, and let the engine stop working on them."""
        for stream_id, inbox in self._inboxes.items():
            inbox.fail(error)
            self.cancel(stream_id)

    async def _reap(self, pump: asyncio.Task[None] | None) -> None:
        # Its socket is closed, so nothing can be asked of it any more, though it is not gone yet.
        self.state = EngineState.STOPPING
        self._changed.notify()
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            try:
                async with asyncio.timeout(EXIT_GRACE_S):
                    await self._process.wait()
            except (TimeoutError, asyncio.CancelledError):
                self.kill()
                await self._process.wait()
        if pump is not None:
            # A grandchild could hold the pipe open for ever.
            await asyncio.wait([pump], timeout=1.0)
            pump.cancel()
        # Only now: its store is unlocked when the process is gone, and the next engine needs it.
        self.state = EngineState.ENDED
        for inbox in self._inboxes.values():
            inbox.lose()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineFailed(f"the engine of {self.model} ended: {self.last_words()}"))
        self._changed.notify()

    async def _send(self, request: Request) -> None:
        if self._writer is None or self.state is EngineState.ENDED:
            raise EngineFailed(f"the engine of {self.model} is not there")
        if self._writer.is_closing():
            # Its end was seen by a write, and `live` will see it in a moment. Nobody may take it for ready until then:
            # a stream would be submitted over and over.
            self.state = EngineState.STOPPING
            raise EngineFailed(f"the engine of {self.model} ended")
        self._writer.write(encode(request))
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._writer.drain()
        except ConnectionError:
            raise EngineFailed(f"the engine of {self.model} ended") from None
        except TimeoutError:
            self.kill()  # it has not read for half a minute: its io thread is gone
            raise EngineFailed(f"the engine of {self.model} does not read") from None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = FrameDecoder()
        try:
            while data := await reader.read(READ_BYTES):
                for message in decoder.feed(data):
                    self._handle(to_event(message))
        except ConnectionError:
            return
        except (TierdError, KeyError, TypeError) as exc:
            log.error("the engine of %s broke the protocol: %s", self.model, exc)
            self.kill()

    def _handle(self, event: Event) -> None:
        if event.id == 0:
            self._handle_news(event)
        elif (inbox := self._inboxes.get(event.id)) is not None:
            if not inbox.put(event):
                self.cancel(event.id)  # at once: whoever writes to the client may find out in a minute only
            self.completed += event.ev == "done"
        elif (future := self._calls.get(event.id)) is not None and not future.done():
            if event.ev == "result":
                future.set_result(event.data)
            elif event.ev == "progress":
                self.upkeep = event.data
            else:
                future.set_exception(from_wire(event.data))

    def _handle_news(self, event: Event) -> None:
        self.heard_s = time.monotonic()
        match event.ev:
            case "progress":
                self.progress = event.data
            case "ready":
                self.info = event.data
                self.progress = {}
                self.was_ready = True
                if self.state is EngineState.STARTING:
                    self.state = EngineState.READY
                self.last_use_s = time.monotonic()
                self._on_ready(self)
                log.info("engine of %s is ready after %.1f s", self.model, self.last_use_s - self.started_s)
            case "notice":
                self.notice(str(event.data.get("text", "")))
            case "notice_over":
                with contextlib.suppress(ValueError):  # newer ones may have pushed it out
                    self.notices.remove(str(event.data.get("text", "")))
            case "failed":
                self.error = from_wire(event.data)
            case _:
                log.debug("engine of %s says %s", self.model, event.ev)
        self._changed.notify()

    async def _pump_stderr(self, process: asyncio.subprocess.Process) -> None:
        if process.stderr is None:
            return
        rest = b""
        while data := await process.stderr.read(READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._keep(line)
            if len(rest) > LINE_BYTES:
                self._keep(rest)
                rest = b""
        if rest:
            self._keep(rest)

    def _keep(self, line: bytes) -> None:
        text = line[:LINE_BYTES].decode("utf-8", "replace").rstrip()
        if text:
            self._tail.append(text)
            log.info("[%s] %s", self.model, text)


_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_PATH = re.compile(r"(?:/[^\s/'\":]+)+/(?=[^\s/])")


def _without_internals(line: str) -> str:
    """A line of an engine's standard error without addresses and directories."""
    return _PATH.sub("", _ADDRESS.sub("0x...", line))[:300]


def _public_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _PRIVATE}
