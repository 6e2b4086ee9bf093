"""What both clients share: their limits, and how a connection that fails is told. No I/O."""

from __future__ import annotations

import errno
from pathlib import Path

from tierd.daemon.errors import DaemonUnreachable, PermissionDenied, TierdError, TimedOut

RECEIVE_BYTES = 1 << 16
CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 60.0  # without any answer; each progress event starts it anew
EVENT_TIMEOUT_S = 900.0  # between two events of a generation: a long queue and a cold model come before the first one


def connect_error(path: Path, exc: OSError) -> TierdError:
    """The error of a `connect` that failed, with the next step."""
    match exc.errno:
        case errno.ENOENT:
            return DaemonUnreachable(f"no daemon runs at {path}", hint="start one with `tierd start`")
        case errno.ECONNREFUSED:
            return DaemonUnreachable(
                f"the socket {path} is left over from a daemon that is gone", hint="`tierd start` replaces it"
            )
        case errno.EACCES | errno.EPERM:
            return PermissionDenied(f"no permission for the socket {path}", hint="the daemon serves only its own user")
        case _:
            return DaemonUnreachable(f"cannot connect to {path}: {exc.strerror or exc}", hint="see `tierd status`")


def lost_error(path: Path) -> DaemonUnreachable:
    """The error of a connection that ended before its answers did."""
    return DaemonUnreachable(f"the daemon at {path} closed the connection", hint="`tierd logs` tells why")


def silence_error(what: str, timeout_s: float) -> TimedOut:
    """The error of an answer that did not come."""
    return TimedOut(f"no answer to {what!r} within {timeout_s:g} s", hint="see `tierd status` and `tierd logs`")
