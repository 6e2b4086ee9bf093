"""Small text files beside a store, that are worth keeping and no error to lose: written whole, or by a line."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


def read_lines(file: Path) -> list[bytes]:
    """The lines of a file, without the end of one that was torn; none when there is no such file."""
    with contextlib.suppress(OSError), os.fdopen(os.open(file, os.O_RDONLY | _FLAGS), "rb") as opened:
        return opened.read().split(b"\n")[:-1]
    return []


def replace(file: Path, text: str) -> None:
    """Puts a new file in the place of the old one. Where that can't be done the old one stays."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _FLAGS, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(text)
        os.replace(temporary, file)
    except OSError:
        with contextlib.suppress(OSError):  # nothing is left behind of what a full disk cut short
            temporary.unlink()


def append_line(file: Path, line: str) -> None:
    """Adds a line, on its own even when the last one was torn. Where that can't be done nothing happens."""
    with contextlib.suppress(OSError):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | _FLAGS, 0o600)
        with os.fdopen(descriptor, "r+b", buffering=0) as opened:
            size = opened.seek(0, os.SEEK_END)
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            opened.write(b"\n" * torn + f"{line}\n".encode())
