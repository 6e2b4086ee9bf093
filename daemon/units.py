"""Figures as words: sizes, times and counted nouns, one way for everything that a person reads."""

from __future__ import annotations


def human_bytes(count: float | None) -> str:
    """`1.2 GB` (decimal units, as in the settings); `-` for what is not known."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:  # from there on it would round to 1000
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(seconds: float | None) -> str:
    """`5s`, `12m`, `3h`, `2d`; `-` for what is not known or never comes."""
    if seconds is None:
        return "-"
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "m"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 page`, `2,530 pages`. `plural`: where it is not the noun with an `s`."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
