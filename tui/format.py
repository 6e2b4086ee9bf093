"""Figures as short text. Pure; widths are bounded, units are always there, and what is not known is a dash."""

from __future__ import annotations

import unicodedata

from tierd.daemon.units import human_bytes

UNKNOWN = "–"


def size(count: float | None) -> str:
    """Bytes as everywhere in tierd, in decimal units: `812 B`, `1.5 GB`."""
    return UNKNOWN if count is None else human_bytes(count)


def amount(count: float | None) -> str:
    """A count: `940`, `12.3k`, `4.0M`."""
    if count is None:
        return UNKNOWN
    if abs(count) < 10_000:
        return f"{count:.0f}"
    for unit in ("k", "M", "G"):
        count /= 1000
        if abs(count) < 1000 or unit == "G":
            return f"{count:.1f}{unit}" if abs(count) < 100 else f"{count:.0f}{unit}"
    raise AssertionError("unreachable")


def rate(per_s: float | None) -> str:
    """Tokens per second: `0`, `7.4`, `812`."""
    if per_s is None:
        return UNKNOWN
    return f"{per_s:.1f}" if 0 < per_s < 100 else amount(per_s)


def bandwidth(bytes_per_s: float | None) -> str:
    """`1.2 GB/s`."""
    return UNKNOWN if bytes_per_s is None else f"{size(bytes_per_s)}/s"


def percent(part: float, whole: float) -> str:
    """`37%`; a share that is not nothing never reads 0%, one that is not all never 100%."""
    if whole <= 0:
        return UNKNOWN
    share = 100 * part / whole
    if 0 < share < 1:
        return "<1%"
    return f"{min(share, 99) if part < whole else share:.0f}%"


def duration(seconds: float | None) -> str:
    """`0.4s`, `12s`, `3m04s`, `2h10m`, `5d`."""
    if seconds is None:
        return UNKNOWN
    seconds = max(seconds, 0.0)
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 172800:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d"


def plain(text: str) -> str:
    """Text from outside on one line: no control characters, and none that take no cell or two.

    One character is one cell on every screen then; a wide letter is shown as `?`.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_cell(letter) for letter in text)


def _cell(letter: str) -> str:
    if letter in "\n\r\t":
        return " "
    if not letter.isprintable() or unicodedata.combining(letter):
        return "?"
    return "?" if unicodedata.east_asian_width(letter) in "WF" else letter


def clip(text: str, width: int, mark: str = "…") -> str:
    """At most `width` cells, with a mark where something was left out."""
    if len(text) <= width:
        return text
    return text[: max(width - len(mark), 0)] + mark[:width]
