"""The engine's end of the socketpair: frames in, frames out, with a bound on what waits to be read by the front."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

from tierd.daemon.errors import BadRequest, EngineFailed, ProtocolError
from tierd.daemon.protocol import Event, FrameDecoder, Request, encode, to_request

READ_BYTES = 64 << 10
HIGH_BYTES = 1 << 20  # above this the step thread waits for the front
STALLED_S = 30.0  # a front that reads nothing for so long is gone


class Link:
    """Threading: made and read on the event loop's thread; `send` from any, `send_waiting` from any other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._pending: list[bytes] = []
        self._pending_bytes = 0  # not yet taken over by the kernel
        self._closed = False
        self._wanted = asyncio.Event()
        self._empty = asyncio.Event()  # nothing is pending, or nothing can be written any more
        self._empty.set()
        self._pump = asyncio.create_task(self._write(), name="link writer")

    async def requests(self) -> AsyncIterator[Request | Event]:
        """Requests until the front closes its end; for one that cannot be understood, the answer to it.

        Raises ProtocolError when the bytes are no frames: the connection is of no more use.
        """
        decoder = FrameDecoder()
        while data := await self._reader.read(READ_BYTES):
            for message in decoder.feed(data):
                try:
                    yield to_request(message)
                except BadRequest as exc:
                    number = message.get("id")
                    if type(number) is not int:
                        raise ProtocolError("a request without an id") from exc
                    yield Event(number, "refused", {"code": exc.code, "message": exc.message})

    def send(self, *events: Event) -> None:
        """Queue events. Never waits: answers are bounded by the requests that ask for them."""
        self._queue(b"".join([encode(event) for event in events]))

    def send_waiting(self, events: list[Event]) -> None:
        """Queue events from another thread; wait while the front is behind.

        Raises EngineFailed when it reads nothing for `STALLED_S`. When it is gone the events are dropped.
        """
        data = b"".join([encode(event) for event in events])
        with self._room:
            while self._pending_bytes > HIGH_BYTES and not self._closed:
                before = self._pending_bytes
                if not self._room.wait(STALLED_S) and self._pending_bytes >= before:
                    raise EngineFailed("the front does not read")
        self._queue(data)

    async def close(self, timeout_s: float) -> None:
        """Write what is queued, for at most `timeout_s`, then close."""
        deadline_s = self._loop.time() + timeout_s
        if self._pending_bytes:  # queued from another thread perhaps, and the loop has not heard of it yet
            self._empty.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        self._shut()
        self._pump.cancel()
        await asyncio.wait([self._pump])
        self._writer.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(max(deadline_s - self._loop.time(), 0.1)):
                await self._writer.wait_closed()  # the transport has bytes of its own to write

    def _queue(self, data: bytes) -> None:
        with self._lock:
            if self._closed:
                return
            self._pending.append(data)
            self._pending_bytes += len(data)
        self._loop.call_soon_threadsafe(self._go)

    def _go(self) -> None:
        self._wanted.set()
        if not self._closed:
            self._empty.clear()

    async def _write(self) -> None:
        try:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                with self._lock:
                    data, self._pending = b"".join(self._pending), []
                self._writer.write(data)
                await self._writer.drain()
                with self._room:
                    self._pending_bytes -= len(data)
                    self._room.notify_all()
                if not self._pending_bytes:
                    self._empty.set()
        except ConnectionError:
            pass  # the reader sees the same end, and the process with it
        finally:
            self._shut()

    def _shut(self) -> None:
        with self._room:
            self._closed = True
            self._pending.clear()
            self._pending_bytes = 0
            self._room.notify_all()
        self._empty.set()
