"""The tiers as gauges: who uses how much of each memory, how full it ever was, where eviction starts."""

from __future__ import annotations

from tierd.tui.format import amount, percent, size
from tierd.tui.glyphs import TIER_NAMES, TIERS
from tierd.tui.snapshot import Snapshot
from tierd.tui.view import Line, View, most
from tierd.tui.widgets.panel import Panel
from tierd.tui.wire import TierReport

MIN_BAR = 8


def paint(snapshot: Snapshot, view: View, width: int, height: int) -> list[Line]:
    """One line a tier, or two when there is room for what the parts are."""
    engine = snapshot.engine
    if engine is None:
        told = "no model is loaded" if snapshot.daemon.version else "nothing is known yet"
        return [[(told, "dim")]]
    if not engine.tiers:
        return [[("the engine is starting" if engine.state != "ready" else "tiers: not reported", "dim")]]
    high = dict(snapshot.high_water)
    blocks: list[list[Line]] = []
    for name in [*(t for t in TIERS if t in engine.tiers), *(t for t in engine.tiers if t not in TIERS)]:
        tier = engine.tiers[name]
        blocks.append([_bar_line(name, tier, view, width, high.get(name)), *_details(name, tier, view, width)])
    most_lines = max(height // len(blocks), 1)
    gap = height >= sum(len(block) + 1 for block in blocks) - 1
    out: list[Line] = []
    for block in blocks:
        out += block[:most_lines]
        if gap:
            out.append([])
    return out[:-1] if gap else out


def _bar_line(name: str, tier: TierReport, view: View, width: int, high: int | None) -> Line:
    label: Line = [(f"{TIER_NAMES.get(name, name):<7}", name if name in TIERS else "text")]
    if not tier.total_pages:
        return [*label, ("off", "dim")]
    weights = tier.weights_bytes or 0
    whole = tier.total_pages * tier.page_bytes + weights + (tier.reserved_bytes or 0)
    used = (tier.total_pages - tier.free_pages) * tier.page_bytes + weights
    right: Line = [(f" {percent(used, whole):>4}", "strong")]
    if width >= 44:
        right = [(f" {size(used):>9}", "strong"), (f" of {size(whole):<9}", "dim"), *right]
    room = width - len(label[0][0]) - sum(len(text) for text, _ in right)
    if room < MIN_BAR:
        return [*label, *right]
    return [*label, *bar(name, tier, view, room, high), *right]


def bar(name: str, tier: TierReport, view: View, cells: int, high: int | None) -> Line:
    """The gauge itself: weights, live, cached, moving, free, reserved, from left to right."""
    g = view.glyphs
    base = name if name in TIERS else "host"
    page = max(tier.page_bytes, 1)
    parts = [
        (tier.weights_bytes or 0, g.weights, "weights"),
        *((count * page, g.tier(base, live=live), f"{base}.{shade}") for count, live, shade in _held(name, tier)),
        (tier.in_flight_pages * page, g.moving, "moving"),
        (tier.free_pages * page, g.free, "free"),
        (tier.reserved_bytes or 0, g.reserved, "faint"),
    ]
    out = _shares(parts, cells)
    whole = sum(part for part, _, _ in parts)
    offset = tier.weights_bytes or 0
    if tier.evict_at_pages is not None:
        _mark(out, (offset + tier.evict_at_pages * page) / whole, g.gate, "warn")
    if high:
        _mark(out, (offset + high * page) / whole, g.mark, "strong")
    return out


def _held(name: str, tier: TierReport) -> list[tuple[int, bool, int]]:
    """Pages, whether they are live, shade. On disk nothing tells live pages from cached ones but a lease elsewhere."""
    if name == "nvme":
        return [(tier.used_pages + tier.cached_pages, True, 3)]
    return [(tier.used_pages, True, 3), (tier.cached_pages, False, 1)]


def _shares(parts: list[tuple[int, str, str]], cells: int) -> Line:
    """Cells by size; what is there at all gets a cell, as long as there are cells."""
    whole = sum(part for part, _, _ in parts)
    wanted = [cells * part / whole for part, _, _ in parts]
    counts = [max(int(share), 1) if share > 0 else 0 for share in wanted]
    while sum(counts) > cells:
        counts[max(range(len(counts)), key=lambda i: (counts[i] > 1, counts[i] - wanted[i]))] -= 1
    while sum(counts) < cells:
        counts[max(range(len(counts)), key=lambda i: wanted[i] - counts[i])] += 1
    return [(glyph, role) for (_, glyph, role), count in zip(parts, counts, strict=True) for _ in range(count)]


def _mark(line: Line, share: float, glyph: str, role: str) -> None:
    place = min(int(share * len(line)), len(line) - 1)
    line[place] = (glyph, role)


def _details(name: str, tier: TierReport, view: View, width: int) -> list[Line]:
    """The figures of the parts; those that matter most first, as many as fit."""
    if not tier.total_pages:
        return [[]]
    g = view.glyphs
    base = name if name in TIERS else "host"
    page = tier.page_bytes
    names = ("live ", "cached ") if name != "nvme" else ("pages ",)
    parts: list[Line] = [
        [(f"{g.tier(base, live=live)} ", f"{base}.{shade}"), (label, "dim"), (size(count * page), "text")]
        for label, (count, live, shade) in zip(names, _held(name, tier), strict=True)
    ]
    parts.append([(f"{g.free} ", "free"), ("free ", "dim"), (size(tier.free_pages * page), "text")])
    if tier.weights_bytes is not None:
        text = size(tier.weights_bytes)
        parts.insert(0, [(f"{g.weights} ", "weights"), ("weights ", "dim"), (text, "text")])
    if tier.in_flight_pages:
        parts.append([(f"{g.moving} ", "moving"), ("moving ", "dim"), (amount(tier.in_flight_pages), "text")])
    if tier.evictions:
        parts.append([("evicted ", "dim"), (amount(tier.evictions), "text")])
    if tier.reserved_bytes:
        parts.append([(f"{g.reserved} ", "faint"), ("reserved ", "dim"), (size(tier.reserved_bytes), "text")])
    return [[("  ", "text"), *most(parts, width - 2)]]


class Gauges(Panel):
    """The tier gauges."""

    NAME = "tiers"
    HELP = (
        "One gauge a tier. From left to right: weights, pages that live requests need, cached pages, pages in flight, "
        "free, reserved. The bar across marks the most that was ever in use while somebody looked (or since the start, "
        "when the daemon reports it); the dotted one where eviction starts."
    )

    def paint(self, width: int, height: int) -> list[Line]:
        """The gauges."""
        return paint(self.snapshot, self.view, width, height)
