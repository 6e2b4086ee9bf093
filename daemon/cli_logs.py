"""Reading the log file: its last lines, new lines as they come, JSON lines as text."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tierd.daemon.cli_common import shown

BLOCK_BYTES = 1 << 16
POLL_S = 0.25


def last_lines(file: Path, count: int) -> list[str]:
    """The last lines, read from the end: the file may hold megabytes. Goes back into rotated files for more."""
    lines: list[str] = []
    place, number = file, 0
    while len(lines) < count and place.exists():
        lines = _last_of(place, count - len(lines)) + lines
        number += 1
        place = file.with_name(f"{file.name}.{number}")
    return lines


def _last_of(file: Path, count: int) -> list[str]:
    with file.open("rb") as stream:
        position = stream.seek(0, os.SEEK_END)
        data = b""
        while position > 0 and data.count(b"\n") <= count:
            step = min(BLOCK_BYTES, position)
            position -= step
            stream.seek(position)
            data = stream.read(step) + data
    return data.decode("utf-8", "replace").splitlines()[-count:]


def follow_lines(file: Path) -> Iterator[str]:
    """Lines that are added from now on; goes over to the new file when the log is rotated. Never ends by itself."""
    stream = file.open("rb")
    try:
        stream.seek(0, os.SEEK_END)
        rest = b""
        while True:
            data = stream.read(BLOCK_BYTES)
            if data:
                *whole, rest = (rest + data).split(b"\n")
                yield from (line.decode("utf-8", "replace") for line in whole)
                continue
            if _replaced(file, stream.fileno()):
                if data := stream.read():  # written between the last look and the rotation
                    *whole, rest = (rest + data).split(b"\n")
                    yield from (line.decode("utf-8", "replace") for line in whole)
                stream.close()
                stream, rest = file.open("rb"), b""
                continue
            time.sleep(POLL_S)
    finally:
        stream.close()


def _replaced(file: Path, fd: int) -> bool:
    try:
        there, ours = file.stat(), os.fstat(fd)
    except FileNotFoundError:  # between the two renames of a rotation
        return False
    return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)


def readable(line: str) -> str:
    """A JSON line of the log as `time level event key=value`; anything else as it is, without control characters."""
    try:
        fields = json.loads(line)
    except ValueError:
        return shown(line)
    if not isinstance(fields, dict):
        return shown(line)
    head = [str(fields.pop(key, "")) for key in ("time", "level", "event")]
    fields.pop("logger", None)
    exception = fields.pop("exception", None)
    tail = [f"{key}={value}" for key, value in fields.items()]
    text = shown(" ".join([head[0], f"{head[1]:<8}", head[2], *tail]))
    return f"{text}\n{exception}" if exception else text
