"""Telling systemd how far the daemon is: one datagram, as sd_notify(3) describes. Without systemd nothing happens."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def notify(message: str, env: Mapping[str, str] = os.environ) -> bool:
    """Send `READY=1`, `STOPPING=1`, `STATUS=...`. Whether somebody was there to be told."""
    address = env.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # a name without a file
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(1.0)
            sock.connect(address)
            sock.sendall(message.encode())
    except OSError:
        return False
    return True
