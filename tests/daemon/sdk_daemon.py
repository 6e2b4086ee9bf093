"""A daemon with fake engines as a process, for the clients that people really use."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from front_harness import Daemon, make_model

from tierd.clients.blocking import Client


class Served:
    """A running daemon: `url` of its HTTP, and calls through its socket."""

    def __init__(self, root: Path, daemon: Daemon) -> None:
        self.root, self._daemon = root, daemon
        deadline_s = time.monotonic() + 20
        while not (url := self.call("status")["http"]):  # HTTP comes up after the socket
            assert time.monotonic() < deadline_s
        self.url: str = url

    def call(self, op: str, **args: Any) -> dict[str, Any]:
        with Client(self._daemon.socket) as client:
            return dict(client.call(op, **args))

    def live(self) -> int:
        return int(self.call("status")["queue"]["live"])


def served(root: Path, **changes: Any) -> Iterator[Served]:
    """The body of a fixture: models `alpha` and `beta`."""
    for name in ("alpha", "beta"):
        make_model(root / "models", name)
    daemon = Daemon(root, **changes)
    try:
        daemon.wait()
        yield Served(root, daemon)
    finally:
        daemon.end()


@contextlib.contextmanager
def crowded(url: str, count: int) -> Iterator[Callable[[float], None]]:
    """So many requests that never end; the function that is given makes them leave after a time in seconds."""
    body = json.dumps({"model": "alpha", "prompt": "!hang", "stream": True})
    there = []
    for _ in range(count):
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        there.append((connection, response))
        assert response.status == 200, response.read()

    def leave() -> None:
        for connection, response in there:
            response.close()
            connection.close()

    timers: list[threading.Timer] = []

    def leave_after(seconds: float) -> None:
        timers.append(threading.Timer(seconds, leave))
        timers[-1].start()

    try:
        yield leave_after
    finally:
        for timer in timers:
            timer.join()
        leave()
