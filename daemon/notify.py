"""Telling systemd how far the daemon is, and that it lives: datagrams, as sd_notify(3) describes.

Without systemd nothing happens.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def notify(message: str, env: Mapping[str, str] = os.environ) -> bool:
    """Send `READY=1`, `WATCHDOG=1`, `STOPPING=1`, `STATUS=...`. Whether somebody was there to be told."""
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


def watchdog_s(env: Mapping[str, str] = os.environ) -> float | None:
    """Within how many seconds systemd wants the next `WATCHDOG=1`; None if it does not watch this process."""
    period, pid = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", "")
    if not period.isdigit() or int(period) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(period) / 1e6
