"""The residency map: every page of every tier that the daemon reports, one cell for one or more pages."""

from __future__ import annotations

import re
from array import array
from typing import ClassVar, NamedTuple

from textual import events
from textual.binding import Binding, BindingType

from tierd.tui.format import amount
from tierd.tui.glyphs import TIER_NAMES, TIERS
from tierd.tui.messages import PageWanted
from tierd.tui.pages import Cells, Kind, Order, missing_for, pages_a_cell, places
from tierd.tui.snapshot import ArenaMap, Snapshot
from tierd.tui.view import Line, Span, View, joined, most, not_reported, width_of
from tierd.tui.widgets.page_detail import detail_lines
from tierd.tui.widgets.panel import Panel
from tierd.tui.wire import PageDetail

REORDER_S = 2.0  # pages stay where they are for so long, though they are used: an eye can follow them
REORDER_PAGES_PER_S = 10_000  # and those of a large tier for longer: sorting takes some us a page
MAX_DRAWN_ROWS = 2000
_RUNS = re.compile(rb"(.)\1*", re.DOTALL)  # of cells that look alike


class Row(NamedTuple):
    """A line of the map: cells of one tier, or (first < 0) its name."""

    tier: str
    first: int
    stop: int


class Sorted(NamedTuple):
    """The slots of a tier in an order, as they were at a time."""

    order: Order
    slots: int
    at_s: float
    given: array[int] | None


class Residency(Panel):
    """The map."""

    NAME = "residency"
    HELP = (
        "A cell is one page or, zoomed out, as many as the heading says; it then shows what most of them are, and a "
        "damaged page always. The glyph says where and what, the brightness how recently it was used. "
        "+ and - zoom, 0 fits everything on the screen, o changes the order (address, sequence, age, prefix). "
        "Arrow keys or a click move the cursor; what is known of the page under it stands below the map."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,equals_sign", "zoom(-1)", "zoom in", show=False, id="map.zoom_in"),
        Binding("minus", "zoom(1)", "zoom out", show=False, id="map.zoom_out"),
        Binding("0", "fit", "fit", show=False, id="map.fit"),
        Binding("o", "order", "order", show=False, id="map.order"),
        Binding("left,h", "step(-1, 0)", "left", show=False, id="map.left"),
        Binding("right,l", "step(1, 0)", "right", show=False, id="map.right"),
        Binding("up,k", "step(0, -1)", "up", show=False, id="map.up"),
        Binding("down,j", "step(0, 1)", "down", show=False, id="map.down"),
        Binding("pageup", "step(0, -8)", "page up", show=False, id="map.page_up"),
        Binding("pagedown", "step(0, 8)", "page down", show=False, id="map.page_down"),
    ]

    def __init__(self, view: View, *, id: str) -> None:
        super().__init__(view, id=id)
        self.order = Order.ADDRESS
        self.zoom: int | None = None  # pages a cell; None: as many as it takes
        self.cursor: tuple[str, int] | None = None  # tier and slot
        self.detail: PageDetail | None = None  # of the page under the cursor
        self.detail_note = ""
        self._cells: dict[str, Cells] = {}
        self._sorted: dict[str, Sorted] = {}
        self._rows: list[Row] = []
        self._first = 0
        self._sizes: dict[str, int] = {}  # pages a cell
        self._width = 1
        self._drawn: dict[tuple[str, int], tuple[bytes, Line]] = {}  # by tier and first cell: looks, and their line
        self._spans: dict[str, list[Span]] = {}  # by tier: how each look is drawn

    # -- data ------------------------------------------------------------------------------------------------------

    def show(self, snapshot: Snapshot) -> None:
        """Take in new data; the cursor stays on its page."""
        self.snapshot = snapshot
        if self.cursor is not None:
            found = snapshot.map_of(self.cursor[0])
            if found is None or self.cursor[1] >= found.slots:
                self.cursor = None
        self.repaint()

    def look(self, view: View) -> None:
        """Draw in another way from now on."""
        self._drawn.clear()
        self._spans.clear()
        super().look(view)

    def cells(self, tier: str) -> Cells:
        """The cells of a tier, of the newest map in the order that is wanted."""
        found, size = self.snapshot.map_of(tier), self._sizes.get(tier, 1)
        assert found is not None
        given, held, clock_s = self._in_order(found), self._cells.get(tier), self.snapshot.clock_s
        if held is None or held.given is not given or held.size != size or not held.follow(found, clock_s):
            held = self._cells[tier] = Cells(found, given, size, clock_s)
        return held

    def _in_order(self, found: ArenaMap) -> array[int] | None:
        """The slots in the order that is wanted, sorted now or a moment ago."""
        held, now_s = self._sorted.get(found.tier), self.snapshot.at_s
        stays_s = max(REORDER_S, found.slots / REORDER_PAGES_PER_S)
        if held is None or held[:2] != (self.order, found.slots) or not 0 <= now_s - held.at_s < stays_s:
            held = self._sorted[found.tier] = Sorted(self.order, found.slots, now_s, places(self.order, found))
        return held.given

    # -- painting --------------------------------------------------------------------------------------------------

    def paint(self, width: int, height: int) -> list[Line]:
        """The maps, then the legend and what is known of the page under the cursor."""
        maps = [found for tier in TIERS if (found := self.snapshot.map_of(tier)) and found.slots]
        self._rows, self._width = [], width
        if not maps:
            if self.snapshot.engine is None:
                return [[("no engine, no pages", "dim")]]
            return not_reported("page map", width)
        below = self._below(width, height)
        room = max(height - len(below), 2)
        fitting = pages_a_cell([found.slots for found in maps], width, room)
        self._sizes = {found.tier: self.zoom or size for found, size in zip(maps, fitting, strict=True)}
        for found in maps:
            size = self._sizes[found.tier]
            cells = -(-found.slots // size)
            self._rows.append(Row(found.tier, -1, -1))
            starts = range(0, cells, width)
            self._rows += [Row(found.tier, start, min(start + width, cells)) for start in starts]
        self._scroll(room)
        if len(self._drawn) > MAX_DRAWN_ROWS:
            self._drawn.clear()
        lines = [self._line(row) for row in self._rows[self._first : self._first + room]]
        lines += [[] for _ in range(room - len(lines))]
        return [*lines, *below]

    def _below(self, width: int, height: int) -> list[Line]:
        if height < 6:
            return []
        legend = self._legend(width, 1 if height < 16 else 2)
        # Room for details is always there, so that cells stay where they are when a page is chosen.
        room = 0 if height < 10 else 1 if height < 16 else 3
        detail: list[Line] = []
        if self.cursor is not None:
            found = self.snapshot.map_of(self.cursor[0])
            assert found is not None
            detail = detail_lines(self.snapshot, found, self.cursor[1], self.detail, self.detail_note, width)[:room]
        return [*legend, *detail, *([] for _ in range(room - len(detail)))]

    def _legend(self, width: int, lines: int) -> list[Line]:
        g = self.view.glyphs
        parts: list[list[Span]] = []
        for tier in TIERS:
            if (found := self.snapshot.map_of(tier)) and found.slots:
                name = TIER_NAMES[tier]
                parts.append([(g.tier(tier), f"{tier}.3"), (f" {name} live" if tier != "nvme" else f" {name}", "dim")])
                if tier != "nvme":
                    parts.append([(g.tier(tier, live=False), f"{tier}.2"), (" cached", "dim")])
        for glyph, role, name in (
            (g.free, "free", "free"), (g.moving, "moving", "moving"), (g.private, "private", "written"),
            (g.kept, "kept", "pinned"), (g.damaged, "damaged", "damaged"),
        ):  # fmt: skip
            parts.append([(glyph, role), (f" {name}", "dim")])
        if lines == 1 or width_of(joined(parts)) <= width:
            return [most(parts, width)]
        half = next(n for n in range(len(parts), 0, -1) if width_of(joined(parts[:n])) <= width)
        return [joined(parts[:half]), most(parts[half:], width)]

    def _line(self, row: Row) -> Line:
        found = self.snapshot.map_of(row.tier)
        assert found is not None
        if row.first < 0:
            lacks = missing_for(self.order, found)
            by = f"by {self.order}" if not lacks else f"by address ({lacks} not reported)"
            size = self._sizes[row.tier]
            parts: list[Line] = [
                [(TIER_NAMES[row.tier], f"{row.tier}.3")], [(f"{found.slots:,} pages", "dim")],
                [(f"{amount(size)} a cell" if size > 1 else "a cell is a page", "dim")], [(by, "dim")],
                [] if found.used else [("recency not reported", "faint")],
            ]  # fmt: skip
            return most(parts, self._width)
        line = self._cells_line(row)
        if self.cursor is not None and self.cursor[0] == row.tier:
            at = self.cells(row.tier).place(self.cursor[1]) // self._sizes[row.tier]
            if row.first <= at < row.stop:
                line = _with_cursor(line, at - row.first, self.view.glyphs.cursor)
        return line

    def _cells_line(self, row: Row) -> Line:
        """The cells of a line, drawn anew only when one of them looks different."""
        looks = bytes(self.cells(row.tier).looks[row.first : row.stop])
        drawn = self._drawn.get((row.tier, row.first))
        if drawn is not None and drawn[0] == looks:
            return drawn[1]
        if (spans := self._spans.get(row.tier)) is None:
            spans = [self._span(row.tier, Kind(look // 4), look % 4) for look in range(4 * len(Kind))]
            self._spans[row.tier] = spans
        line: Line = []
        for run in _RUNS.finditer(looks):
            start, stop = run.span()
            glyph, role = spans[looks[start]]
            if line and line[-1][1] == role:
                line[-1] = (line[-1][0] + glyph * (stop - start), role)
            else:
                line.append((glyph * (stop - start), role))
        self._drawn[row.tier, row.first] = (looks, line)
        return line

    def _span(self, tier: str, kind: Kind, recent: int) -> Span:
        g = self.view.glyphs
        match kind:
            case Kind.LIVE | Kind.IDLE:
                return g.tier(tier, live=kind is Kind.LIVE), f"{tier}.{recent}"
            case Kind.FREE:
                return g.free, "free"
            case Kind.PRIVATE:
                return g.private, "private"
            case Kind.MOVING:
                return g.moving, "moving"
            case Kind.DAMAGED:
                return g.damaged, "damaged"
            case Kind.KEPT:
                return g.kept, "kept"
            case Kind.UNKNOWN:
                return "?", "warn"

    # -- the cursor ------------------------------------------------------------------------------------------------

    def _at(self) -> tuple[int, int] | None:
        """Row and column of the cursor."""
        if self.cursor is None:
            return None
        tier, slot = self.cursor
        cell = self.cells(tier).place(slot) // self._sizes[tier]
        for y, row in enumerate(self._rows):
            if row.tier == tier and row.first <= cell < row.stop and row.first >= 0:
                return y, cell - row.first
        return None

    def _scroll(self, room: int) -> None:
        last = max(len(self._rows) - room, 0)
        if at := self._at():
            self._first = min(max(self._first, at[0] - room + 1), max(at[0] - 1, 0))
        self._first = min(self._first, last)

    def _put(self, y: int, x: int) -> None:
        """Place the cursor on a cell of the map."""
        row = self._rows[y]
        cells = self.cells(row.tier)
        place = (row.first + min(x, row.stop - row.first - 1)) * self._sizes[row.tier]
        self.jump(row.tier, cells.slot(min(place, cells.found.slots - 1)))

    def jump(self, tier: str, slot: int) -> None:
        """Place the cursor on a page; does nothing when the daemon does not report it."""
        found = self.snapshot.map_of(tier)
        if found is None or not 0 <= slot < found.slots:
            return
        self.cursor, self.detail, self.detail_note = (tier, slot), None, ""
        self.repaint()
        self.post_message(PageWanted(tier, slot))

    def action_step(self, dx: int, dy: int) -> None:
        """Move the cursor by cells."""
        if not self._rows:
            return
        at = self._at()
        if at is None:
            self._put(1, 0)
            return
        y, x = at
        if dx:
            tier, _ = self.cursor or ("", 0)
            cells = self.cells(tier)
            row = self._rows[y]
            place = (row.first + x + dx) * self._sizes[tier]
            if 0 <= place < cells.found.slots:
                self.jump(tier, cells.slot(place))
            return
        target = min(max(y + dy, 0), len(self._rows) - 1)
        while 0 <= target < len(self._rows) and self._rows[target].first < 0:
            target += 1 if dy > 0 else -1
        if 0 <= target < len(self._rows):
            self._put(target, x)

    def action_zoom(self, step: int) -> None:
        """Fewer or more pages a cell."""
        sizes = self._sizes.values()
        if sizes:
            self.zoom = min(max(sizes) * 2, 1 << 20) if step > 0 else max(max(sizes) // 2, 1)
        self.repaint()

    def action_fit(self) -> None:
        """As many pages a cell as it takes to see them all."""
        self.zoom = None
        self.repaint()

    def action_order(self) -> None:
        """The next order."""
        every = list(Order)
        self.order = every[(every.index(self.order) + 1) % len(every)]
        self.repaint()

    def on_click(self, event: events.Click) -> None:
        """A click moves the cursor."""
        y = self._first + event.y - self.gutter.top
        if 0 <= y < len(self._rows) and self._rows[y].first >= 0:
            self._put(y, max(event.x - self.gutter.left, 0))

    def on_mouse_scroll_up(self) -> None:
        """The wheel moves the cursor."""
        self.action_step(0, -2)

    def on_mouse_scroll_down(self) -> None:
        """The wheel moves the cursor."""
        self.action_step(0, 2)


def _with_cursor(line: Line, x: int, glyph: str) -> Line:
    out: Line = []
    for text, role in line:
        if 0 <= x < len(text):
            out += [(text[:x], role), (glyph, "cursor"), (text[x + 1 :], role)]
        else:
            out.append((text, role))
        x -= len(text)
    return [span for span in out if span[0]]
