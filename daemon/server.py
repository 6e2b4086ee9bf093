"""The unix socket: frames to calls of `Service`, answers to frames.

A connection carries many requests at once. Each runs in a task of the connection's group: when the connection ends,
whatever the reason, they end with it, and the engine stops their generations at its next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from tierd.daemon import ops
from tierd.daemon.door import peer_uid
from tierd.daemon.errors import BadRequest, InternalError, ProtocolError, TierdError, TooBusy
from tierd.daemon.inbox import SlowReader
from tierd.daemon.protocol import Event, FrameDecoder, Request, encode, to_request, to_submit
from tierd.daemon.service import Generation, Service, failure

log = logging.getLogger("tierd.server")

MAX_CONNECTIONS = 2048
MAX_REQUESTS = 256  # at once on one connection
READ_BYTES = 64 << 10
HIGH_WATER_BYTES = 64 << 10
WRITE_TIMEOUT_S = 60.0  # for the client to take what was written
PROGRESS_S = 0.5
HEARTBEAT_S = 10.0  # clients give up after a minute without any event
LAST_WORDS_S = 1.0
_CLOSE_HINT = "try again when some have ended"


class Server:
    """Accepts on a listening socket until it is closed. Threading: for one event loop."""

    def __init__(self, service: Service, allowed_uids: frozenset[int] = frozenset({os.getuid(), 0})) -> None:
        self._service = service
        self._allowed_uids = allowed_uids
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, sock: socket.socket) -> None:
        """Begin to accept, here instead of at the socket of an earlier call. The socket stays the caller's."""
        # A full backlog of a unix socket does not make clients wait: asyncio's connect reports success and fails later.
        server = await asyncio.start_unix_server(
            self._accept, sock=sock.dup(), limit=READ_BYTES, backlog=MAX_CONNECTIONS
        )
        # The one before goes with the next: its backlog may hold clients that came before its file was removed.
        for old in self._servers[:-1]:
            old.close()
        self._servers = [*self._servers[-1:], server]

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._tasks)

    async def close(self) -> None:
        """Accept nothing more, end every connection and its requests."""
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        connection = _Connection(self._service, writer)
        try:
            uid = peer_uid(writer.get_extra_info("socket"))
            if uid not in self._allowed_uids:
                log.warning("refused a connection of uid %d", uid)
                return
            if len(self._tasks) > MAX_CONNECTIONS:
                full = TooBusy(f"{MAX_CONNECTIONS} connections are open already", hint=_CLOSE_HINT)
                await connection.last_words(full)
                return
            connection.tenant = "" if uid == os.getuid() else f"uid:{uid}"
            await connection.serve(reader)
        except asyncio.CancelledError:
            pass  # `close` ends us; a task that ends cancelled would be logged by asyncio as an error
        except (OSError, SlowReader) as exc:
            log.debug("connection ended: %r", exc)
        except Exception:
            log.exception("connection failed")
        finally:
            self._service.exclusive.release(connection)
            # Not closed politely: what a client did not read by now would keep the buffer alive for ever.
            writer.transport.abort()
            if task is not None:
                self._tasks.discard(task)


class _Connection:
    """One client."""

    def __init__(self, service: Service, writer: asyncio.StreamWriter) -> None:
        self.tenant = ""
        self._service = service
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._streams: dict[int, Generation] = {}
        self._open: set[int] = set()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the client closes, breaks the protocol or does not read."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._read(reader, group)
                raise _Ended
        except* _Ended:
            pass
        except* SlowReader:
            log.warning("cut a client that does not read")
        except* OSError:
            pass  # it went away while it was written to

    async def last_words(self, exc: TierdError) -> None:
        """Tell why the connection ends; a client that does not read them loses them."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                self._writer.write(encode(failure(0, exc, accepted=False)))
                self._writer.transport.set_write_buffer_limits(high=0)  # drained means sent from here on
                await self._writer.drain()

    async def _read(self, reader: asyncio.StreamReader, group: asyncio.TaskGroup) -> None:
        decoder = FrameDecoder()
        while data := await reader.read(READ_BYTES):
            try:
                messages, fault = decoder.feed(data), None
            except ProtocolError as exc:
                messages, fault = decoder.salvaged, exc
            for message in messages:
                await self._begin(message, group)
            if fault is not None:
                await self.last_words(fault)
                return

    async def _begin(self, message: Mapping[str, Any], group: asyncio.TaskGroup) -> None:
        raw_id = message.get("id")
        answer_id = raw_id if isinstance(raw_id, int) and 0 <= raw_id < 1 << 63 else 0
        try:
            request = to_request(message)
            if request.id in self._open:
                # Not under its id: that belongs to the request that runs.
                answer_id = 0
                raise BadRequest(f"request id {request.id} is in use on this connection", param="id")
            if len(self._open) >= MAX_REQUESTS:
                raise TooBusy(f"{MAX_REQUESTS} requests run on this connection already", hint=_CLOSE_HINT)
        except TierdError as exc:
            await self._send(failure(answer_id, exc, accepted=False))
            return
        self._open.add(request.id)
        if request.op == "cancel":
            await self._cancel(request)  # at once and in order: the target was sent before
            return
        group.create_task(self._answer(request), name=f"{request.op} {request.id}")

    async def _cancel(self, request: Request) -> None:
        target = request.args.get("target")
        if stream := self._streams.get(target) if isinstance(target, int) else None:
            stream.cancel()
        self._open.discard(request.id)
        # A target that has ended meanwhile is no error: its terminal event is on its way.
        await self._send(Event(request.id, "result", {"cancelled": stream is not None}))

    async def _answer(self, request: Request) -> None:
        try:
            if request.op == "generate":
                await self._generate(request)
            else:
                await self._call(request)
        finally:
            self._open.discard(request.id)

    async def _generate(self, request: Request) -> None:
        try:
            stream = self._service.submit(to_submit(request.args, from_client=True), self.tenant, holder=self)
        except TierdError as exc:
            await self._send(failure(request.id, exc, accepted=False))
            return
        self._streams[request.id] = stream
        try:
            async with contextlib.aclosing(self._service.run(stream, "unix")) as events:
                async for event in events:
                    await self._send(Event(request.id, event.ev, event.data))
        finally:
            self._service.release(stream)  # also one that was never run
            del self._streams[request.id]

    async def _call(self, request: Request) -> None:
        work = asyncio.create_task(ops.answer(self._service, request.op, request.args, self.tenant, self))
        said: dict[str, Any] = {}
        said_s = time.monotonic()
        try:
            while not (await asyncio.wait([work], timeout=PROGRESS_S))[0]:
                progress = ops.progress(self._service, request.op, request.args)
                if progress != said or time.monotonic() - said_s > HEARTBEAT_S:
                    said, said_s = progress, time.monotonic()
                    await self._send(Event(request.id, "progress", progress))
            event = Event(request.id, "result", work.result())
        except TierdError as exc:
            event = failure(request.id, exc, accepted=False)
        except (OSError, SlowReader, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("operation %r failed", request.op)
            event = failure(request.id, InternalError(), accepted=False)
        finally:
            work.cancel()
        await self._send(event)

    async def _send(self, event: Event) -> None:
        """Write one event. Raises SlowReader when the client does not take it, OSError when it is gone."""
        self._writer.write(encode(event))
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._writer.drain()
        except TimeoutError:
            raise SlowReader from None


class _Ended(Exception):
    """The client ended the connection: leaves the task group and cancels what still runs."""
