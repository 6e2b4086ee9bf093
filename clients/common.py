"""What both clients share: their limits, the frames they send, how a connection that fails is told. No I/O."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tierd.daemon.errors import BadRequest, DaemonUnreachable, PermissionDenied, TierdError, TimedOut
from tierd.daemon.protocol import Request, encode

RECEIVE_BYTES = 1 << 16
CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 60.0  # without any answer; each progress event starts it anew
EVENT_TIMEOUT_S = 900.0  # between two events of a generation: a long queue and a cold model come before the first one
EMBED_INPUTS = 64  # in one call: an answer comes before anybody takes the daemon for dead
LISTED = 50  # prefixes, unless told otherwise
RESIZE_TIMEOUT_S = 30.0  # for slots to become free

Input = str | Sequence[int]  # what a vector is wanted of: a text, or token ids

_INTEGERS = range(-(1 << 63), 1 << 64)  # what msgpack can hold


def frame_of(request: Request) -> bytes:
    """The frame of a request. Raises BadRequest that names the value which no frame can hold."""
    try:
        return encode(request)
    except (OverflowError, UnicodeEncodeError):
        name, what = _misfit(msgspec.to_builtins(request.args), "") or ("", "holds a value that cannot be sent")
        raise BadRequest(f"{name or request.op} {what}", param=name or None) from None


def _misfit(value: object, name: str) -> tuple[str, str] | None:
    """Where a value cannot be sent, the way a user writes it (`sampling.seed`), and what is wrong with it."""
    match value:
        case int() if value not in _INTEGERS:
            return name, "is a number beyond 64 bits"
        case str() if not _is_text(value):
            return name, "is not valid text (UTF-8)"
        case dict():
            for key, part in value.items():
                if isinstance(key, str) and not _is_text(key):
                    return name, "has a name that is not valid text (UTF-8)"
                if isinstance(key, int) and key not in _INTEGERS:
                    return name, "has a number beyond 64 bits as a name"
                if found := _misfit(part, f"{name}.{key}" if name else str(key)):
                    return found
        case list() | tuple():
            for index, part in enumerate(value):
                if found := _misfit(part, f"{name}[{index}]"):
                    return found
    return None


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parts_of(inputs: Sequence[Input]) -> Iterator[Sequence[Input]]:
    """Inputs of embeddings in pieces that one call takes."""
    for start in range(0, len(inputs), EMBED_INPUTS):
        yield inputs[start : start + EMBED_INPUTS]


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
    # A daemon that stops by itself says so first: this one was killed, or the system took it.
    return DaemonUnreachable(
        f"the daemon at {path} ended without a word",
        hint="run the command again: what was computed is kept; `tierd logs` shows what it did before",
    )


def silence_error(what: str, timeout_s: float) -> TimedOut:
    """The error of an answer that did not come."""
    return TimedOut(f"no answer to {what!r} within {timeout_s:g} s", hint="see `tierd status` and `tierd logs`")
