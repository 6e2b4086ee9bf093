"""The engine process: `python -m tierd.daemon.engine.worker --fd N`, started by the front.

N is one end of a socketpair; `EngineConfig` comes as JSON in `TIERD_ENGINE_CONFIG`. Main thread: asyncio (frames).
Others: a loader until the engine is up, the step loop, the tokenizer's, the mover's, the kernels'. The process ends
when the front closes its end, on SIGTERM, after `stop`, or when the step loop dies. SIGINT is the front's business.
Exit codes: 0 asked to, 1 the engine failed, 2 it was started wrongly, 78 the configuration cannot work.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tierd.daemon.engine_config import ENGINE_CONFIG_VARIABLE, EngineConfig
from tierd.daemon.errors import EngineFailed, InternalError, ProtocolError, TierdError, to_wire
from tierd.daemon.protocol import Event
from tierd.kernels.cpu.cache import cache_directory

if TYPE_CHECKING:
    from tierd.daemon.engine.assemble import Engine
    from tierd.daemon.engine.link import Link
    from tierd.daemon.engine.ops import Ops

log = logging.getLogger("tierd.engine")

GOODBYE_S = 2.0  # to flush pages and to write the last events when nobody asked for the end


def main(argv: list[str] | None = None) -> int:
    """Run an engine until its end; returns the exit code."""
    started_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="tierd-engine", description="The engine process of tierd, started by it.")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of a connected unix socket")
    arguments = parser.parse_args(argv)
    try:
        config = msgspec.json.decode(os.environ.pop(ENGINE_CONFIG_VARIABLE, ""), type=EngineConfig)
    except msgspec.DecodeError as exc:
        sys.stderr.write(f"{ENGINE_CONFIG_VARIABLE}: {exc}\n")
        return 2
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threads = config.threads or len(os.sched_getaffinity(0))
    _set_environment(config, threads)
    try:
        sock = socket.socket(fileno=arguments.fd)
    except OSError as exc:
        sys.stderr.write(f"--fd {arguments.fd}: {exc.strerror}\n")
        return 2
    return asyncio.run(_Worker(config, threads, started_s).run(sock))


def _set_environment(config: EngineConfig, threads: int) -> None:
    """Before anything imports numba or numpy: both read these once."""
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_directory(Path(config.cache_dir).parent / "numba")))
    os.environ["NUMBA_NUM_THREADS"] = str(threads)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # the kernels have threads of their own; numpy's would only take memory
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def keep_heap_apart() -> None:
    """Take what was loaded out of the garbage collector's sight: it lives as long as the process.

    Vocabulary, modules and compiled kernels are some 160,000 objects. A collection of the oldest generation walks all
    of them with the interpreter's lock held, 250 ms measured, and falls due in the middle of an answer: the step
    thread stands still meanwhile.
    """
    gc.collect()
    gc.freeze()


class _Worker:
    """One engine process. Threading: the event loop's, but for `_load`, `_emit` and `_died`."""

    def __init__(self, config: EngineConfig, threads: int, started_s: float) -> None:
        self._config = config
        self._threads = threads
        self._started_s = started_s
        self._engine: Engine | None = None
        self._exit_code = 0

    async def run(self, sock: socket.socket) -> int:
        """Serve until the end."""
        from tierd.daemon.engine.link import Link

        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        self._link: Link = Link(reader, writer)
        self._ops: Ops | None = None
        self._loop.add_signal_handler(signal.SIGTERM, self._end, 0)
        loader = threading.Thread(target=self._load, name="loader", daemon=True)
        serving = asyncio.create_task(self._serve(), name="frames")
        loader.start()
        await self._done.wait()
        serving.cancel()
        await asyncio.wait([serving])
        await self._shut_down()
        return self._exit_code

    def _end(self, code: int) -> None:
        """The first reason to end wins."""
        if not self._done.is_set():
            self._exit_code = code
            self._done.set()

    def _tell(self, event: Event) -> None:
        """Send from any thread."""
        self._loop.call_soon_threadsafe(self._link.send, event)

    # -- loading ---------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Loader thread: the imports alone take longer than a socket may wait."""
        try:
            from tierd.daemon.engine.assemble import Hooks, build

            hooks = Hooks(self._progress, self._emit, self._died)
            engine = build(self._config, hooks, threads=self._threads, max_requests=self._config.max_requests)
        except TierdError as exc:
            self._give_up(exc)
        except Exception:
            log.exception("loading failed")
            self._give_up(InternalError("the engine could not be loaded", hint="`tierd logs` shows the details"))
        else:
            keep_heap_apart()
            self._loop.call_soon_threadsafe(self._ready, engine)

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._tell(Event(0, "progress", {"stage": stage, "done": done, "total": total}))

    def _give_up(self, exc: TierdError) -> None:
        log.error("%s", exc)
        self._tell(Event(0, "failed", dict(to_wire(exc))))
        self._loop.call_soon_threadsafe(self._end, exc.exit_code if exc.exit_code == 78 else 1)

    def _ready(self, engine: Engine) -> None:
        self._engine = engine
        if self._done.is_set():
            return  # asked to end while it loaded
        for note in engine.notes:
            self._link.send(Event(0, "notice", {"text": note}))
        engine.loop.start()
        self._operations().attach(engine)
        data = {
            "model": engine.model,
            "context": engine.context,
            "namespace": engine.namespace,
            "on_card": engine.on_card,
            "start_ms": round((time.monotonic() - self._started_s) * 1000.0, 1),
        }
        self._link.send(Event(0, "ready", data))

    # -- serving ---------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            async for request in self._link.requests():
                if isinstance(request, Event):
                    self._link.send(request)
                else:
                    self._operations().handle(request)
        except ProtocolError as exc:
            log.error("the front broke the protocol: %s", exc)
            self._end(1)
        except ConnectionError:
            pass
        self._end(0)

    def _operations(self) -> Ops:
        if self._ops is None:
            from tierd.daemon.engine.ops import Ops

            # One thread: the tokenizer is not to be used by two at once, and the io thread must not wait for it.
            tokenizer = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
            places = max(self._config.max_streams // 2, 1)
            self._ops = Ops(self._link.send, lambda: self._end(0), tokenizer, self._config.max_requests, places)
        return self._ops

    def _emit(self, events: list[Event]) -> None:
        """Step thread: events of a turn. Waits while the front is behind."""
        self._link.send_waiting([event for event in events if event.id >= 0])  # the others are for `Embedder`
        if self._ops is not None:
            self._ops.ended(events)

    def _died(self, cause: BaseException | None) -> None:
        """Step thread, at its end. The process ends too: the front starts a fresh one and resumes the streams."""
        if cause is not None:
            error = cause if isinstance(cause, TierdError) else EngineFailed("the step loop ended")
            self._tell(Event(0, "failed", dict(to_wire(error))))
            self._loop.call_soon_threadsafe(self._end, 1)

    # -- the end ---------------------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        """Flush what can be flushed quickly, end the threads, write the last events."""
        if self._engine is not None and self._engine.loop.alive:
            if self._exit_code == 0:
                try:
                    async with asyncio.timeout(2 * GOODBYE_S):  # a step may be in progress
                        await asyncio.wrap_future(self._engine.loop.flush(GOODBYE_S))
                except (TierdError, TimeoutError) as exc:
                    log.warning("pages were not flushed: %s", exc or "a step took too long")
            self._engine.loop.stop()
            await asyncio.to_thread(self._engine.loop.join, GOODBYE_S)
        if self._ops is not None:
            self._ops.close()
        await self._link.close(GOODBYE_S)
        if self._engine is not None and not self._engine.loop.alive:
            self._engine.close()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # A thread that is still in a kernel, a compiler or a read of a stuck disk must not hold the process.
    os._exit(code)
