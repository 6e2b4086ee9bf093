"""Every error tierd tells a user about: one tree, one table.

    TierdError
    ├── BadRequest                  the request is wrong; sending it again changes nothing
    │   ├── ContextLengthExceeded   prompt (and answer) need more tokens than the context holds
    │   ├── Unsupported             an option or operation tierd does not have
    │   └── ProtocolError           bytes that are no frame of ours
    ├── NotFound                    a thing that was named does not exist
    │   └── ModelNotFound
    ├── Unauthorized                no API key, or a wrong one
    ├── PermissionDenied            not this user's socket, directory or operation
    ├── Conflict                    the state of the daemon forbids it
    │   └── AlreadyRunning          a second daemon, a store that is already open
    ├── TryLater                    the same request can succeed in a while
    │   ├── TooBusy                 the queue is full
    │   ├── QuotaExceeded           this tenant has as much as it may
    │   ├── Loading                 the model is not up yet
    │   ├── Reserved                a batch has the machine for itself
    │   └── Draining                the daemon is stopping
    ├── ModelInvalid                model files that are broken, unsafe or of an unknown kind
    ├── DownloadFailed              a reference could not be fetched
    ├── OutOfSpace                  it does not fit: memory or disk
    ├── EngineFailed                the engine process died or gave up
    ├── DaemonUnreachable           nobody answers at the socket
    ├── BadConfig                   a setting is unknown or wrong
    ├── TimedOut                    a deadline passed
    ├── Aborted                     stopped by the user
    └── InternalError               our fault; the text holds no internals

On the wire an error is a map `{code, message, hint?, param?}`. `hint` is the next step: what to type or to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

LOGS_HINT = "`tierd logs` shows the details"


class TierdError(Exception):
    """Base of all errors for users.

    `message` says what is wrong, `hint` what to do next, `param` which field or option is meant. None of them may hold
    prompt text, tracebacks or addresses: they travel to clients as they are.
    """

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param

    def __str__(self) -> str:
        return self.message

    @property
    def code(self) -> str:
        """The name on the wire, stable between versions."""
        return _row(type(self)).code

    @property
    def status(self) -> int:
        """The HTTP status."""
        return _row(type(self)).status

    @property
    def exit_code(self) -> int:
        """The exit code of the command line."""
        return _row(type(self)).exit_code


class BadRequest(TierdError):
    """The request is wrong; sending it again changes nothing."""


class ContextLengthExceeded(BadRequest):
    """The prompt needs more tokens than the context holds. The message tells used and allowed."""


class Unsupported(BadRequest):
    """An option or operation that tierd does not have. `param` names it."""


class ProtocolError(BadRequest):
    """Bytes that are no frame of ours. The connection they came on is closed."""


class NotFound(TierdError):
    """A thing that was named does not exist."""


class ModelNotFound(NotFound):
    """No such model here."""


class Unauthorized(TierdError):
    """No API key, or a wrong one."""


class PermissionDenied(TierdError):
    """Not this user's socket, directory or operation."""


class Conflict(TierdError):
    """The state of the daemon forbids it."""


class AlreadyRunning(Conflict):
    """A second daemon on one socket, or a store that another process has open."""


class TryLater(TierdError):
    """The same request can succeed in a while."""


class TooBusy(TryLater):
    """The queue is full."""


class QuotaExceeded(TryLater):
    """This tenant has as much as it may; others are served."""


class Loading(TryLater):
    """The model is not up yet."""


class Reserved(TryLater):
    """A batch has the machine for itself. The message tells how far it is."""


class Draining(TryLater):
    """The daemon is stopping and takes no new work."""

    def __init__(
        self,
        message: str = "the daemon is stopping",
        *,
        hint: str | None = "ask again when it is back",
        param: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, param=param)


class ModelInvalid(TierdError):
    """Model files that are broken, unsafe or of an unknown kind."""


class DownloadFailed(TierdError):
    """A reference could not be fetched."""


class OutOfSpace(TierdError):
    """It does not fit: memory or disk."""


class EngineFailed(TierdError):
    """The engine process died or gave up."""


class DaemonUnreachable(TierdError):
    """Nobody answers at the socket."""


class BadConfig(TierdError):
    """A setting is unknown or wrong. The message names the file, variable or flag."""


class TimedOut(TierdError):
    """A deadline passed."""


class Aborted(TierdError):
    """Stopped by the user."""


class InternalError(TierdError):
    """Our fault. The details are in the log and nowhere else."""

    def __init__(
        self,
        message: str = "something inside tierd failed",
        *,
        hint: str | None = LOGS_HINT,
        param: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, param=param)


class Row(NamedTuple):
    """One line of the table: code on the wire, HTTP status, exit code of the command line."""

    code: str
    status: int
    exit_code: int


TABLE: Mapping[type[TierdError], Row] = {
    TierdError: Row("error", 500, 1),
    BadRequest: Row("bad_request", 400, 2),
    ContextLengthExceeded: Row("context_length_exceeded", 400, 1),
    Unsupported: Row("unsupported_parameter", 400, 2),
    ProtocolError: Row("protocol_error", 400, 1),
    NotFound: Row("not_found", 404, 1),
    ModelNotFound: Row("model_not_found", 404, 1),
    Unauthorized: Row("unauthorized", 401, 77),
    PermissionDenied: Row("permission_denied", 403, 77),
    Conflict: Row("conflict", 409, 1),
    AlreadyRunning: Row("already_running", 409, 1),
    TryLater: Row("try_later", 503, 75),
    TooBusy: Row("overloaded", 503, 75),
    QuotaExceeded: Row("quota_exceeded", 429, 75),
    Loading: Row("loading", 503, 75),
    Reserved: Row("reserved", 503, 75),
    Draining: Row("draining", 503, 75),
    ModelInvalid: Row("invalid_model", 422, 1),
    DownloadFailed: Row("download_failed", 502, 1),
    OutOfSpace: Row("out_of_space", 507, 1),
    EngineFailed: Row("engine_failed", 500, 1),
    DaemonUnreachable: Row("daemon_unreachable", 503, 69),
    BadConfig: Row("bad_config", 500, 78),
    TimedOut: Row("timed_out", 504, 1),
    Aborted: Row("aborted", 499, 130),
    InternalError: Row("internal_error", 500, 1),
}

_BY_CODE = {row.code: cls for cls, row in TABLE.items()}


def to_wire(exc: BaseException) -> dict[str, str]:
    """The map `{code, message, hint?, param?}` for any exception.

    What is not a `TierdError` becomes `internal_error`: its text, which may hold paths or prompts, stays out.
    """
    if not isinstance(exc, TierdError):
        exc = InternalError()
    wire = {"code": exc.code, "message": exc.message}
    if exc.hint:
        wire["hint"] = exc.hint
    if exc.param:
        wire["param"] = exc.param
    return wire


def from_wire(data: Mapping[str, object]) -> TierdError:
    """The exception for a map made by `to_wire`. A code of a newer daemon becomes a plain `TierdError`."""
    cls = _BY_CODE.get(str(data.get("code")), TierdError)
    hint, param = data.get("hint"), data.get("param")
    return cls(
        str(data.get("message") or "no message was given"),
        hint=hint if isinstance(hint, str) else None,
        param=param if isinstance(param, str) else None,
    )


def sentence(exc: TierdError) -> str:
    """An error in one line: what is wrong, and what to do."""
    return f"{exc.message}; {exc.hint}" if exc.hint else exc.message


def should_retry(exc: TierdError) -> bool:
    """Whether the same request can succeed later. SDKs retry every 409, 429 and 5xx unless they are told not to."""
    return isinstance(exc, TryLater | EngineFailed)


def suggest(word: str, known: list[str], prefix: str = "") -> str | None:
    """A did-you-mean sentence for a mistyped word, or None when nothing known is near. All begin with the prefix."""
    import difflib  # 5 ms that only a typo pays

    rests = [name.removeprefix(prefix) for name in known]
    near = difflib.get_close_matches(word.removeprefix(prefix), rests, n=1, cutoff=0.6)
    return f"did you mean {prefix + near[0]!r}?" if near else None


def _row(cls: type[TierdError]) -> Row:
    """The line of a class, or of its nearest listed parent."""
    for parent in cls.__mro__:
        if row := TABLE.get(parent):
            return row
    raise AssertionError("TierdError itself is in the table")
