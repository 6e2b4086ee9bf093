"""The verb `proxy`: standard input and output as a connection to the daemon, for `tierd top --connect "ssh HOST"`."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path
from typing import Any

import click

from tierd.clients.common import CONNECT_TIMEOUT_S, RECEIVE_BYTES, connect_error
from tierd.daemon.cli_common import load_settings, settings_options


@click.command()
@settings_options("socket")
def proxy(flags: dict[str, Any]) -> None:
    """Connect standard input and output to the daemon's socket.

    Meant for another machine: `tierd top --connect "ssh HOST"` runs `tierd proxy` there.
    """
    path = load_settings(flags).socket
    with _connected(path) as sock:
        bridge(0, 1, sock)


def bridge(source: int, dest: int, sock: socket.socket) -> None:
    """Carry bytes both ways until the socket ends. The end of `source` is told to the other side, not waited for.

    One piece at a time: who does not read is not read from, so nothing piles up here.
    """
    sources: list[int] = [source, sock.fileno()]
    while True:
        for ready in select.select(sources, [], [])[0]:
            if ready == source:
                if data := os.read(source, RECEIVE_BYTES):
                    sock.sendall(data)
                else:
                    sources.remove(source)
                    sock.shutdown(socket.SHUT_WR)
            else:
                data = sock.recv(RECEIVE_BYTES)
                if not data:
                    return
                while data:
                    data = data[os.write(dest, data) :]


def _connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_TIMEOUT_S)
        sock.connect(str(path))
        sock.settimeout(None)
    except OSError as exc:
        sock.close()
        raise connect_error(path, exc) from None
    return sock
