"""The prefix tree: what is remembered, how often it was of use, and in which tiers it lies."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import ClassVar

from textual.binding import Binding, BindingType

from tierd.tui.format import amount, duration, plain, size
from tierd.tui.snapshot import Snapshot
from tierd.tui.view import Line, View, not_reported
from tierd.tui.widgets.panel import ListPanel
from tierd.tui.wire import PrefixRow

LARGE = 1000  # rows from which on the tree is made anew every `REBUILD_S` at the most: 10,000 rows take 50 ms
REBUILD_S = 4.0
_WORTHS: dict[str, Callable[[PrefixRow], float]] = {  # the best first
    "recent": attrgetter("used_s"),
    "hits": attrgetter("hits"),
    "tokens": attrgetter("tokens"),
    "bytes": lambda row: row.device_bytes + row.host_bytes + row.nvme_bytes,
}
SORTS = tuple(_WORTHS)
_FIGURES_FROM = 64  # cells


class Tree:
    """The rows as they are shown: children below their parent, the best first; folded ones hide what is below them.

    Costs a pass over all rows, so it is made when rows, sort, filter or folds change, not for each frame.
    """

    def __init__(self, rows: tuple[PrefixRow, ...], sort: str, wanted: str, folded: frozenset[bytes]) -> None:
        self.rows = rows
        worth = _WORTHS[sort]
        best = [worth(row) for row in rows]
        parents = [row.parent for row in rows]
        for index in range(len(rows) - 1, -1, -1):  # a parent is worth what its best child is: they stand together
            parent = parents[index]
            if parent >= 0 and best[parent] < best[index]:
                best[parent] = best[index]
        shown = self._matching(wanted) if wanted else range(len(rows))
        self.children: dict[int, list[int]] = {}  # the worst first, for the stack
        children = self.children
        for index in sorted(shown, key=best.__getitem__):
            if (kids := children.get(parents[index])) is None:
                children[parents[index]] = [index]
            else:
                kids.append(index)
        self.order: list[int] = []  # rows as they are shown
        stack, order = list(children.get(-1, ())), self.order
        while stack:
            index = stack.pop()
            order.append(index)
            if index in children and not (folded and rows[index].key in folded):
                stack += children[index]

    def lasts(self, index: int) -> str:
        """For each ancestor of a row and itself, the first one first: `l` for the last of its siblings, else `m`."""
        found = ""
        while index >= 0:
            parent = self.rows[index].parent
            found += "l" if self.children[parent][0] == index else "m"
            index = parent
        return found[::-1]

    def _matching(self, wanted: str) -> set[int]:
        found: set[int] = set()
        for index, row in enumerate(self.rows):
            if wanted in row.text.casefold() or wanted in row.tenant.casefold() or wanted in row.key.hex():
                while index >= 0 and index not in found:
                    found.add(index)
                    index = self.rows[index].parent
        return found


class Prefixes(ListPanel):
    """The tree."""

    NAME = "prefixes"
    HELP = (
        "A row is a run of pages without a branch; its children continue it. Figures: tokens of the run, how often it "
        "was found, bytes in each tier, age of the last use. ◆ is pinned by you. Enter or a click on the row folds, "
        "s sorts (recent, hits, tokens, bytes), / filters by text, tenant or key. "
        "p pins, u unpins, d drops."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "sort", show=False, id="prefixes.sort"),
    ]

    def __init__(self, view: View, *, id: str) -> None:
        super().__init__(view, id=id)
        self.sort = SORTS[0]
        self._folded: set[bytes] = set()
        self._made_s = 0.0
        self._tree = Tree((), self.sort, "", frozenset())
        self._tree_of: tuple[str, str, frozenset[bytes]] = ("", "", frozenset())

    @property
    def selected(self) -> PrefixRow | None:
        """The row under the cursor."""
        order = self._tree.order
        return self._tree.rows[order[self.cursor]] if self.cursor < len(order) else None

    @property
    def count(self) -> int:
        """Rows that are shown."""
        return len(self._tree.order)

    def prepare(self) -> None:
        """Make the tree anew when something of it changed; the cursor stays on its prefix."""
        rows = self.snapshot.prefixes or ()
        if len(rows) > LARGE and self._tree.rows and 0 <= self.snapshot.at_s - self._made_s < REBUILD_S:
            rows = self._tree.rows
        made_of = (self.sort, self.filter, frozenset(self._folded))
        if self._tree.rows is rows and made_of == self._tree_of:
            return
        at = self.selected
        self._tree = Tree(rows, *made_of)
        self._tree_of, self._made_s = made_of, self.snapshot.at_s
        if at is not None:
            places = (place for place, index in enumerate(self._tree.order) if rows[index].key == at.key)
            self.cursor = next(places, self.cursor)

    def above(self, width: int) -> list[Line]:
        """The names of the columns."""
        if not self.count:
            return []
        total = self.snapshot.prefixes_total or len(self._tree.rows)
        title = f"{amount(self.count)} of {amount(total)}, {self.sort} first"
        figures = self._columns(width, "tokens", "hits", "device", "RAM", "disk", "age")
        return [[(title.ljust(width - len(figures))[: width - len(figures)], "dim"), (figures, "dim")]]

    @staticmethod
    def _columns(width: int, tokens: str, hits: str, device: str, host: str, nvme: str, age: str) -> str:
        if width >= _FIGURES_FROM:
            return f" {tokens:>7} {hits:>6} {device:>8} {host:>8} {nvme:>8} {age:>6}"
        return f" {tokens:>7} {hits:>6}"

    def row(self, index: int, width: int) -> Line:
        """The branch, the text, the figures."""
        place = self._tree.order[index]
        lasts = self._tree.lasts(place)
        row, g = self._tree.rows[place], self.view.glyphs
        clock_s = self.snapshot.clock_s
        device, host, nvme = (size(n) if n else g.free for n in (row.device_bytes, row.host_bytes, row.nvme_bytes))
        age = duration(clock_s - row.used_s if clock_s is not None else None)
        figures = self._columns(width, amount(row.tokens), amount(row.hits), device, host, nvme, age)
        stem = "".join("  " if last == "l" else g.trunk for last in lasts[1:-1])
        if len(lasts) > 1:
            stem += g.last_branch if lasts[-1] == "l" else g.branch
        fold = " "
        if self._tree.children.get(place):
            fold = g.folded if row.key in self._folded else g.unfolded
        tier = "device.3" if row.device_bytes else "host.3" if row.host_bytes else "nvme.3"
        glyph = g.device if row.device_bytes else g.host if row.host_bytes else g.nvme
        tenant = f"[{plain(row.tenant)}] " if row.tenant else ""
        head: Line = [(stem, "faint"), (fold, "dim"), (g.kept if row.kept else " ", "kept"), (glyph + " ", tier)]
        room = width - len(figures) - sum(len(text) for text, _ in head)
        text = plain(row.text)
        shown = (tenant + text)[: max(room, 0)]
        if len(tenant + text) > room > 1:
            shown = shown[:-1] + g.ellipsis
        return [*head, (shown.ljust(max(room, 0)), "text"), (figures, "dim")]

    def action_open(self) -> None:
        """Fold or unfold the row."""
        row = self.selected
        if row is not None:
            self._folded ^= {row.key}
            self.repaint()

    def action_sort(self) -> None:
        """The next sort."""
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        self.repaint()

    def empty(self, width: int) -> list[Line]:
        """No prefixes, or none that are told of."""
        if self.snapshot.engine is None:
            return [[("no engine", "dim")]]
        if self.snapshot.prefixes is None:
            return [*counted(self.snapshot), *not_reported("prefix rows", width)]
        if self.snapshot.prefixes_pending:
            return [*counted(self.snapshot), [("the tree is being gathered", "dim")]]
        return [[("no prefix matches" if self.filter else "nothing is remembered yet", "dim")]]


def counted(snapshot: Snapshot) -> list[Line]:
    """What the counters tell all the same, while there are no rows."""
    lines: list[Line] = []
    pager = snapshot.engine.pager if snapshot.engine else None
    if pager is not None:
        lines.append([(f"{amount(pager.known_pages)} pages known, {amount(pager.lookups)} look-ups", "text")])
        hits: Line = [("tokens found: ", "dim")]
        for role, name, count in (
            ("device.3", "device", pager.hit_device_tokens), ("host.3", "RAM", pager.hit_host_tokens),
            ("nvme.3", "disk", pager.hit_nvme_tokens),
        ):  # fmt: skip
            hits += [(f"{name} ", role), (f"{amount(count)}  ", "text")]
        lines.append(hits)
        if pager.lookup_tokens:
            lines.append([(f"of {amount(pager.lookup_tokens)} asked for", "dim")])
    return lines
