"""One frame without a screen: as text, for a terminal or a log, or as JSON, for a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from tierd.tui.glyphs import TIERS
from tierd.tui.pages import Kind, kind_of
from tierd.tui.snapshot import Snapshot
from tierd.tui.view import Line, View, fit
from tierd.tui.widgets import gauges, header, links
from tierd.tui.widgets.prefixes import Prefixes
from tierd.tui.widgets.residency import Residency
from tierd.tui.widgets.sequences import Sequences

ROWS = 12  # of each list
MAP_LINES = 16


def text_frame(snapshot: Snapshot, view: View, width: int, *, now_s: float) -> list[Line]:
    """The header and the panels one below the other."""
    lines = header.paint(snapshot, view, width, now_s=now_s, paused=False, readonly=False)
    lines += [*_title("tiers"), *gauges.paint(snapshot, view, width, 6)]
    lines += [*_title("links"), *links.paint(snapshot, view, width, len(snapshot.links))]
    residency = Residency(view, id="residency")
    residency.snapshot = snapshot
    lines += [*_title(residency.NAME), *(line for line in residency.paint(width, MAP_LINES) if line)]
    for rows in (Sequences(view, id="sequences"), Prefixes(view, id="prefixes")):
        rows.snapshot = snapshot
        lines += [*_title(rows.NAME), *rows.paint(width, ROWS)]
        if (left := rows.count - ROWS + 1) > 0:
            lines.append([(f"{left} more", "dim")])
    return [fit(line, width) for line in lines]


def _title(name: str) -> list[Line]:
    return [[], [(name, "key")]]


def coloured(lines: list[Line], view: View, width: int, write: Callable[[str], object], *, colour: bool) -> None:
    """Write lines, with colours when the reader is a terminal."""
    from rich.console import Console

    console = Console(force_terminal=colour, width=width) if colour else None
    for line in lines:
        strip = view.strip(line, width)
        write((strip.render(console) if console is not None else strip.text).rstrip() + "\n")


def json_frame(snapshot: Snapshot) -> dict[str, Any]:
    """The same as plain values. Maps are counted by what their pages are; None: not reported."""
    maps = {}
    for tier in TIERS:
        if (found := snapshot.map_of(tier)) is not None:
            counts = dict.fromkeys((kind.name.lower() for kind in Kind), 0)
            for cell in set(found.cells):
                counts[kind_of(cell).name.lower()] += found.cells.count(cell)
            maps[tier] = {"slots": found.slots, **counts}
    return {
        "standing": dataclasses.asdict(snapshot.standing),
        "daemon": msgspec.to_builtins(snapshot.daemon),
        "model": snapshot.engine.model if snapshot.engine else None,
        "clock_s": snapshot.clock_s,
        "page_tokens": snapshot.page_tokens,
        "page_format": snapshot.page_format or None,
        "maps": maps or None,
        "sequences": msgspec.to_builtins(snapshot.sequences),
        "prefixes": None
        if snapshot.prefixes is None
        else [
            {name: getattr(row, name) for name in row.__struct_fields__} | {"key": row.key.hex()}
            for row in snapshot.prefixes
        ],
        "weights": msgspec.to_builtins(snapshot.weights),
        "plan": msgspec.to_builtins(snapshot.plan),
        "events": msgspec.to_builtins(snapshot.events) if snapshot.events_reported else None,
    }
