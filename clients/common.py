"""What both clients share: how a failed connection is told, and how an event becomes an error. No I/O."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec

from tierd.daemon.errors import DaemonUnreachable, PermissionDenied, TierdError, TimedOut, from_wire
from tierd.daemon.protocol import TERMINAL, Event, Request, Submit

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


def error_of(event: Event) -> TierdError | None:
    """The typed error of a `refused` or `failed` event, None for all others."""
    return from_wire(event.data) if event.ev in ("refused", "failed") else None


def is_terminal(event: Event) -> bool:
    """Whether this is the last event of its request."""
    return event.ev in TERMINAL


def generate_request(request_id: int, submit: Submit) -> Request:
    """The frame that starts a generation."""
    return Request(id=request_id, op="generate", args=msgspec.to_builtins(submit))


def cancel_request(request_id: int, target: int) -> Request:
    """The frame that stops the request `target` of this connection."""
    return Request(id=request_id, op="cancel", args={"target": target})
