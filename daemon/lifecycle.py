"""The life of the daemon: start in order, run, stop in reverse order within a deadline.

The unix socket answers first, a quarter of a second after the start; HTTP follows when its library is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

from tierd.daemon import keys
from tierd.daemon.card import ANSWER_S, LET_GO_S, CardError, CardReader, CardThread, Nvml
from tierd.daemon.card_watch import CardWatch
from tierd.daemon.child import WORKER
from tierd.daemon.config import Settings, split_listen
from tierd.daemon.door import Door
from tierd.daemon.errors import BadConfig, Conflict, Draining, TierdError
from tierd.daemon.exclusive import Exclusive
from tierd.daemon.heart import Heart
from tierd.daemon.metrics import Metrics
from tierd.daemon.models import catalog
from tierd.daemon.notify import notify
from tierd.daemon.prepare import Preparer
from tierd.daemon.server import Server
from tierd.daemon.service import Service
from tierd.daemon.supervisor import Supervisor

log = logging.getLogger("tierd.daemon")

MAX_FILES = 65536
BACKLOG = 1024
SEND_BUFFER_BYTES = 128 << 10
# What is left of the time for stopping when engines and clients had theirs is given to the answers that still run.
FAREWELL_S = 0.5  # the others are told, and clients read it
FLUSH_S = 3.0  # engines make pages durable
ENGINES_S = 4.5  # until engines are killed
DOOR_CHECK_S = 5.0  # between two looks whether the socket file is there; a look costs microseconds


def serve(
    settings: Settings, *, command: tuple[str, ...] = WORKER, open_card: Callable[[], CardReader] = Nvml
) -> int:
    """Run the daemon until a signal or a `stop`. Returns the exit code. `open_card`: for settings that watch one.

    Raises, before anything runs: AlreadyRunning, PermissionDenied, BadConfig (also for an address that other machines
    reach without a key, and for a card that is to be watched and can't), Conflict (the HTTP port is taken).
    """
    _allow_many_files()
    with contextlib.ExitStack() as stack:
        door = Door(settings.socket)  # first: a second daemon must learn of the first one, not of a taken port
        stack.callback(door.close)
        keys.check_reach(settings)
        card = _watched_card(settings, open_card)
        if card is not None:
            stack.callback(card.close, LET_GO_S)
        web_socket = _listen(settings.listen)
        if web_socket is not None:
            stack.callback(web_socket.close)
        return asyncio.run(_Daemon(settings, command, card).run(door, web_socket))


class _Daemon:
    """One run. Threading: for one event loop."""

    def __init__(self, settings: Settings, command: tuple[str, ...], card: CardThread | None) -> None:
        self._settings = settings
        metrics, prepare = Metrics(), Preparer(settings)
        self._supervisor = Supervisor(
            prepare,
            keep_alive_s=settings.keep_alive_s,
            max_loaded=settings.max_loaded,
            pinned=[catalog.parse_ref(ref) for ref in settings.pinned_models],
            command=command,
            on_death=lambda name: metrics.engine_deaths.update([name]),
            on_ready=prepare.note,
            on_end=prepare.give_back,
        )
        exclusive = Exclusive(self._supervisor, prepare.plan_block, prepare.give_block)
        self._card: CardWatch | None = None
        if card is not None:
            self._card = CardWatch(card, settings.yield_device_mem, self._supervisor, prepare)
        told = dict if self._card is None else self._card.told
        self._service = Service(settings, self._supervisor, metrics, prepare.resize, exclusive, told)
        self._server = Server(self._service)
        self._signals = 0

    async def run(self, door: Door, web_socket: socket.socket | None) -> int:
        """From accepting to the last engine's end."""
        loop = asyncio.get_running_loop()
        if web_socket is not None:  # it takes connections already, which wait until HTTP is up
            self._service.http_address = _address(web_socket)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        await self._server.start(door.socket)
        log.info("listening at %s", door.path)
        keep_alive = asyncio.create_task(self._supervisor.keep_alive(), name="keep-alive")
        watch = asyncio.create_task(self._watch(door), name="door")
        card = None if self._card is None else asyncio.create_task(self._card.run(), name="card")
        heart: asyncio.Task[None] | None = None
        web: Any = None
        code = 0
        try:
            if web_socket is not None:
                web = await self._start_web(web_socket)
            notify("READY=1\nSTATUS=ready")
            heart = asyncio.create_task(Heart(self._supervisor).run(), name="heart")
            stop = asyncio.create_task(self._service.stop_asked.wait(), name="stop")
            done, _ = await asyncio.wait([stop, keep_alive, heart], return_when=asyncio.FIRST_COMPLETED)
            for task in (keep_alive, heart):
                if task in done:
                    log.critical("the task %s died", task.get_name(), exc_info=task.exception())
                    code = 1
            stop.cancel()
        finally:
            for running in (keep_alive, watch, card, heart):
                if running is not None:
                    running.cancel()
            await self._stop(web)
        return code

    async def _watch(self, door: Door) -> None:
        """Put the socket file back when somebody cleaned it away. Connections that are open don't notice."""
        told, accepting = "", True
        while True:
            await asyncio.sleep(DOOR_CHECK_S)
            try:
                if door.restore():
                    accepting = False
                if accepting:
                    continue
                await self._server.start(door.socket)
                log.warning("%s was removed; listening there again", door.path)
                told, accepting = "", True
            except (TierdError, OSError) as exc:
                if told != str(exc):  # not again every few seconds
                    told = str(exc)
                    log.error("%s was removed and can't be put back: %s", door.path, exc)

    async def _start_web(self, web_socket: socket.socket) -> Any:
        # In a thread: the import takes 0.3 s, during which the unix socket answers.
        start = await asyncio.to_thread(_import_web)
        web = await start(self._service, web_socket)
        log.info("listening at %s", self._service.http_address)
        return web

    async def _stop(self, web: Any) -> None:
        log.info("stopping: %d requests are live", self._service.live)
        notify("STOPPING=1\nSTATUS=stopping")
        left = await self._drain()
        if left:
            log.warning("%d requests are ended by the stop", left)
            error = Draining()
            self._supervisor.closing = True
            self._supervisor.changed.notify()
            for engine in self._supervisor.engines.values():
                engine.fail_streams(error)
            await self._service.drain(FAREWELL_S)
        await asyncio.gather(self._close_doors(web), self._supervisor.close(FLUSH_S, ENGINES_S))
        log.info("stopped")

    async def _drain(self) -> int:
        """Wait for the live requests, until they end, the deadline passes, or a second signal or `stop --now` comes."""
        drain_s = max(0.0, self._service.stop_timeout_s - FAREWELL_S - ENGINES_S)
        drain = asyncio.create_task(self._service.drain(drain_s))
        while not drain.done() and self._signals < 2 and self._service.stop_timeout_s:
            await asyncio.wait([drain], timeout=0.1)
        drain.cancel()
        return self._service.live

    async def _close_doors(self, web: Any) -> None:
        await self._server.close()
        if web is not None:
            await web.cleanup()

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        log.info("got %s", signal.Signals(number).name)
        self._service.stop_asked.set()


def _watched_card(settings: Settings, open_card: Callable[[], CardReader]) -> CardThread | None:
    """The card whose memory pages are to give way for; None where they are not to. Raises BadConfig."""
    if not settings.yield_device_mem:
        return None
    if settings.card == "off":
        raise BadConfig(
            "yield_device_mem is set, and card is off: there is no memory of a card to give way in",
            hint="leave out --yield-device-mem or --card off",
            param="yield_device_mem",
        )
    try:
        return CardThread(open_card, ANSWER_S)
    except CardError as exc:
        raise BadConfig(
            f"yield_device_mem is set, and the card can't be watched: {exc}",
            hint="leave --yield-device-mem at 0: without a card nobody else takes what pages lie in",
            param="yield_device_mem",
        ) from None


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _import_web() -> Any:
    from tierd.daemon.api.web import start

    return start


def _listen(listen: str) -> socket.socket | None:
    """The TCP socket of HTTP, bound before anything runs, so that a taken port is told at once."""
    if not listen:
        return None
    host, port = split_listen(listen)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as exc:
        raise _cannot_listen(listen, exc) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it: a client that does not read holds so much of the kernel's memory, not megabytes.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as exc:
        sock.close()
        raise _cannot_listen(listen, exc) from None
    return sock


def _cannot_listen(listen: str, exc: OSError) -> Conflict:
    hint = "choose another address with --listen, or '' for none"
    return Conflict(f"cannot listen at {listen}: {exc.strerror}", hint=hint, param="listen")


def _allow_many_files() -> None:
    """A connection is a file; the usual soft limit of 1,024 is below what the doors are built for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(MAX_FILES, hard) if hard != resource.RLIM_INFINITY else MAX_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
