"""What is known of one page: from its byte in the map, and from the daemon when it tells more."""

from __future__ import annotations

from tierd.tui.format import clip, duration, plain
from tierd.tui.glyphs import TIER_NAMES
from tierd.tui.snapshot import ArenaMap, Snapshot
from tierd.tui.view import Line, most
from tierd.tui.wire import (
    CELL_DURABLE,
    CELL_IN_HOST,
    CELL_KEPT,
    CELL_MOVING,
    CELL_PARTIAL,
    CELL_STATE,
    PageDetail,
)

_STATES = ("free", "being written", "live", "cached", "filling", "draining", "damaged", "unknown")


def detail_lines(
    snapshot: Snapshot, found: ArenaMap, slot: int, detail: PageDetail | None, note: str, width: int
) -> list[Line]:
    """Three lines: what the map says, what the daemon says, the text."""
    return [_of_map(snapshot, found, slot, width), *_of_daemon(snapshot, detail, note, width)]


def _of_map(snapshot: Snapshot, found: ArenaMap, slot: int, width: int) -> Line:
    cell = found.cells[slot]
    parts: list[Line] = [
        [(f"{TIER_NAMES[found.tier]} page {slot}", "strong")],
        [(_STATES[cell & CELL_STATE], "bad" if cell & CELL_STATE == 6 else "text")],
    ]
    if found.owners and (owner := found.owners[slot]):
        rows = snapshot.sequences or ()
        name = f"request {rows[owner - 1].id}" if owner <= len(rows) else "a request"
        parts.append([(name, "text")])
    if found.used and (used := found.used[slot]) and snapshot.clock_s is not None:
        parts.append([("used ", "dim"), (f"{duration(snapshot.clock_s - used)} ago", "text")])
    parts += [
        [(text, "text")]
        for flag, text in (
            (CELL_KEPT, "pinned"), (CELL_PARTIAL, "not full"), (CELL_IN_HOST, "also in RAM"),
            (CELL_DURABLE, "also on disk"), (CELL_MOVING, "a copy is in flight"),
        )
        if cell & flag and not (flag == CELL_DURABLE and found.tier == "nvme")
    ]  # fmt: skip
    return most(parts, width)


def _of_daemon(snapshot: Snapshot, detail: PageDetail | None, note: str, width: int) -> list[Line]:
    if detail is None:
        return [[(clip(plain(note), width), "dim")]] if note else []
    facts: list[Line] = []
    if detail.key:
        facts.append([("key ", "dim"), (plain(detail.key[:16]), "text")])
    if detail.tokens is not None:
        place = f" from {detail.first_token}" if detail.first_token is not None else ""
        facts.append([(f"{detail.tokens} tokens{place}", "text")])
    if detail.leases is not None:
        facts.append([("requests ", "dim"), (str(detail.leases), "text")])
    if detail.hits is not None:
        facts.append([("hits ", "dim"), (str(detail.hits), "text")])
    if detail.checksum:
        facts.append([("checksum ", "dim"), (plain(detail.checksum), "bad" if detail.checksum == "bad" else "text")])
    if detail.format:
        facts.append([(plain(detail.format), "text")])
    if detail.copies is not None:
        copies = " + ".join(TIER_NAMES.get(tier, plain(tier)) for tier in detail.copies)
        facts.append([("copies ", "dim"), (copies or "none", "text")])
    if detail.victim_rank is not None:
        rank = "next to be evicted" if detail.victim_rank == 0 else f"victim {detail.victim_rank + 1}"
        facts.append([(rank, "warn" if detail.victim_rank == 0 else "text")])
    lines = [most(facts, width)]
    if detail.text is not None:
        lines.append([("“", "dim"), (clip(plain(detail.text), max(width - 2, 1)), "text"), ("”", "dim")])
    return lines
