"""Logging: pretty lines on a terminal, JSON lines to a rotating file otherwise.

Built on the standard library alone: structlog costs 0.2 s of import, and the socket has to answer within 0.5 s of the
start. Code logs with `logging.getLogger(__name__)` and gives fields as `extra={"model": name}`; they become keys of the
JSON line, or `model=name` behind the pretty one. Prompt and answer text belongs to `debug` and nowhere else.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
import time
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from tierd.daemon.errors import PermissionDenied
from tierd.daemon.paths import make_private_dir

MAX_FILE_BYTES = 8 << 20  # the defaults of the settings
KEPT_FILES = 4
ROOT = "tierd"

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_COLOURS = {logging.DEBUG: "2", logging.INFO: "36", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, RFC 3339), level, logger, event, then the fields of the call."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a line end."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        for key, value in _fields(record).items():
            line.setdefault(key, value)  # a field cannot pose as the level or the time
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class PrettyFormatter(logging.Formatter):
    """`12:34:56 info    the model is ready  model=smollm2-135m`, with colour if the terminal wants it."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the traceback below it if there is one."""
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = f"{record.levelname.lower():<8}"
        if self._colour:
            level = f"\x1b[{_COLOURS.get(record.levelno, '0')}m{level}\x1b[0m"
        tail = "".join(f"  {key}={_printable(value)}" for key, value in _fields(record).items())
        line = f"{moment} {level} {_printable(record.getMessage())}{tail}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


def _printable(value: object) -> str:
    """Text on one line: nothing that came from outside can forge a second line or move the cursor."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """Rotates, and makes each file with its mode: the umask decides nothing."""

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return open(os.open(self.baseFilename, flags, 0o600), "a", encoding=self.encoding)


def set_up(
    level: str,
    style: str,
    file: Path | None,
    stream: TextIO | None = None,
    *,
    max_bytes: int = MAX_FILE_BYTES,
    kept_files: int = KEPT_FILES,
) -> logging.Logger:
    """Send the records of all `tierd.*` loggers to one place; returns their common parent.

    `style`: pretty, json or auto (pretty when the stream is a terminal). With `auto` or `json` and no terminal the
    lines go as JSON to `file` (mode 0600), or to the stream when `file` is None. A file that has `max_bytes` becomes
    `.1`, and that `.2`, up to `kept_files`.
    A second call replaces the first one's handler. Raises PermissionDenied when the file cannot be written.
    """
    stream = stream if stream is not None else sys.stderr
    on_terminal = stream.isatty()
    handler: logging.Handler
    if style == "pretty" or (style == "auto" and on_terminal):
        handler = logging.StreamHandler(stream)
        handler.setFormatter(PrettyFormatter(colour=on_terminal and not os.environ.get("NO_COLOR")))
    else:
        if file is not None and not on_terminal:
            handler = _file_handler(file, max_bytes, kept_files)
        else:
            handler = logging.StreamHandler(stream)
        handler.setFormatter(JsonFormatter())
    logger = logging.getLogger(ROOT)
    tear_down(logger)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger


def tear_down(logger: logging.Logger | None = None) -> None:
    """Close and remove the handlers that `set_up` made."""
    logger = logger or logging.getLogger(ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def _file_handler(file: Path, max_bytes: int, kept_files: int) -> logging.Handler:
    make_private_dir(file.parent)
    try:
        return _PrivateFile(file, maxBytes=max_bytes, backupCount=kept_files, encoding="utf-8")
    except OSError as exc:
        hint = "set TIERD_STATE_DIR to another directory"
        raise PermissionDenied(f"cannot write the log {file}: {exc.strerror}", hint=hint) from exc
