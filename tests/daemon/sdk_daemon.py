"""A daemon with fake engines as a process, for the clients that people really use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
