"""Values of settings: from what a TOML file, a variable or a flag holds to what the code uses.

Each parser takes a native TOML value or a string and raises ValueError with a phrase that completes "X must be ...".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tierd.daemon.errors import BadRequest
from tierd.daemon.kv_mode import MAX_LADDER_TOKENS, up_to_step
from tierd.daemon.kv_mode import parse as parse_mode

MIN_CONTEXT_TOKENS = 16
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, _letter + "b": 1000**_power, _letter + "ib": 1024**_power}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def size_bytes(value: object) -> int:
    """Bytes: an integer, or a string such as `6GB` (10^9), `512MiB` (2^20), `0`."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62:
        return value
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())) and found[2].lower() in _UNITS:
        number = float(found[1]) if "." in found[1] else int(found[1])  # whole bytes stay exact beyond 2^53
        size = int(number * _UNITS[found[2].lower()])
        if size < 1 << 62:
            return size
    raise ValueError("a size such as 6GB, 512MiB or 0")


def log_size_bytes(value: object) -> int:
    """Bytes of a log file: enough for a traceback, and no more than a person wants to open."""
    try:
        size = size_bytes(value)
    except ValueError:
        size = -1
    if 64 << 10 <= size <= 1 << 30:
        return size
    raise ValueError("a size from 64KiB to 1GiB")


def size_or_auto(value: object) -> int | None:
    """Bytes, or None for `auto`."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    try:
        return size_bytes(value)
    except ValueError:
        raise ValueError("a size such as 6GB, 512MiB, 0 or auto") from None


def duration_s(value: object) -> float | None:
    """Seconds: a number, `90s`, `15m`, `1h`, `2d`; None for `never`."""
    if isinstance(value, str) and value.strip().lower() == "never":
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9:
        return float(value)
    if isinstance(value, str) and (found := _DURATION.fullmatch(value.strip().lower())):
        return float(found[1]) * _SECONDS[found[2]]
    raise ValueError("a time such as 90, 15m, 1h or never")


def count(low: int, high: int) -> Callable[[object], int]:
    """A parser of whole numbers from `low` to `high`."""

    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value.strip()):
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise ValueError(f"a whole number from {low} to {high}")

    return parse


def memory_mode(value: object) -> str:
    """A bounded memory mode as a request would name it; empty for the whole context."""
    if not isinstance(value, str):
        raise ValueError("a mode such as window=4096, sinks=4,window=2048, select=64, h2o=1024 or exact")
    try:
        return str(parse_mode(value) or "")
    except BadRequest as exc:
        modes = "window=4096, sinks=4,window=2048, select=64 or h2o=1024"
        raise ValueError(f"a mode such as {modes} ({exc.message})") from None


def exact_tokens(value: object) -> int:
    """Tokens that stay exact, up to whole steps of attention; 0: none."""
    return up_to_step(count(0, MAX_LADDER_TOKENS)(value))


def context_tokens(value: object) -> int:
    """A context length in tokens: a whole number, `32k` (1024 each), 0 for the model's own."""
    if isinstance(value, str) and (found := re.fullmatch(r"(\d{1,5})k", value.strip().lower())):
        value = int(found[1]) * 1024
    try:
        number = count(0, 1 << 24)(value)
    except ValueError:
        number = -1
    if number == 0 or number >= MIN_CONTEXT_TOKENS:
        return number
    raise ValueError(f"0 or a number of tokens from {MIN_CONTEXT_TOKENS} on, such as 8192 or 32k")


def choice(*allowed: str) -> Callable[[object], str]:
    """A parser of one of a few words."""

    def parse(value: object) -> str:
        if isinstance(value, str) and value.strip().lower() in allowed:
            return value.strip().lower()
        raise ValueError(f"one of {', '.join(allowed)}")

    return parse


def boolean(value: object) -> bool:
    """true or false; in variables also 1/0, yes/no, on/off."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and (word := value.strip().lower()) in _WORDS:
        return _WORDS[word]
    raise ValueError("true or false")


_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def text(value: object) -> str:
    """One line of text without control characters."""
    if isinstance(value, str) and (value == "" or value.isprintable()) and len(value) <= 4096:
        return value
    raise ValueError("one line of text")


def model_reference(value: object) -> str:
    """A model by name; what it means is for the catalog to say."""
    if isinstance(value, str) and _MODEL.fullmatch(value.strip().lower()):
        return value.strip()
    raise ValueError("the name of a model such as smollm2:135m")


def model_or_none(value: object) -> str:
    """A model by name, or empty for none."""
    if isinstance(value, str) and value.strip().lower() in ("", "off"):
        return ""
    try:
        return model_reference(value)
    except ValueError as exc:
        raise ValueError(f"{exc}, or empty") from None


def existing_or_new_dir(value: object) -> Path:
    """An absolute path that is a directory, or nothing yet."""
    path = _path(value)
    if path.exists() and not path.is_dir():
        raise ValueError("a directory")
    return path


def socket_file(value: object) -> Path:
    """An absolute path for a socket."""
    return _path(value)


def private_file(value: object) -> Path:
    """An absolute path for a file that is there or will be."""
    path = _path(value)
    if path.is_dir():
        raise ValueError("a file")
    return path


def _path(value: object) -> Path:
    if isinstance(value, str | Path) and str(value).strip() and "\0" not in str(value):
        return Path(value).expanduser().absolute()
    raise ValueError("a path")


def listen_address(value: object) -> str:
    """`host:port`, `[v6]:port`, or empty for no HTTP at all. Port 0 takes any free one."""
    if isinstance(value, str):
        value = value.strip()
        if value.lower() in ("", "off"):
            return ""
        found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[a-z0-9.-]+):(\d{1,5})", value, re.IGNORECASE)
        if found and int(found[2]) <= 65535:
            return value
    raise ValueError("host:port such as 127.0.0.1:8421, or empty")


_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9]([a-z0-9.-]*[a-z0-9])?)(:\d{1,5})?")
_MODEL = re.compile(r"[a-z0-9][a-z0-9._:@/-]*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9]([a-z0-9.-]*[a-z0-9])?)(:\d{1,5})?")
MAX_NAMES = 64


def host_names(value: object) -> tuple[str, ...]:
    """Host names, each with a port or without, in lower case: a list, or a string with commas."""
    return _names(value, _HOST, "host names such as tierd.example or tierd.example:8421, with commas between them")


def web_origins(value: object) -> tuple[str, ...]:
    """Origins of web pages, as a browser sends them: a list, or a string with commas."""
    return _names(value, _ORIGIN, "origins such as http://localhost:3000, with commas between them")


def model_references(value: object) -> tuple[str, ...]:
    """Models by name: a list, or a string with commas."""
    return _names(value, _MODEL, "names of models such as smollm2:135m, with commas between them")


def _names(value: object, pattern: re.Pattern[str], what: str) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else value
    if isinstance(words, list | tuple) and len(words) <= MAX_NAMES:
        names = [word.strip().lower() if isinstance(word, str) else "?" for word in words]
        names = [name for name in names if name]
        if all(len(name) <= 260 and pattern.fullmatch(name) for name in names):
            return tuple(names)
    raise ValueError(what)
