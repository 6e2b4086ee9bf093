"""One row a request, its tokens from left to right: at one look, what lies where and what is still on its way."""

from __future__ import annotations

from tierd.tui.format import amount, duration, percent, plain, rate
from tierd.tui.snapshot import Snapshot
from tierd.tui.view import Line, View, not_reported
from tierd.tui.widgets.panel import ListPanel
from tierd.tui.wire import SequenceRow

_ROLES = {"device": "device.3", "host": "host.3", "nvme": "nvme.3", "moving": "moving", "dropped": "free"}
_WIDE = 60  # cells from which on the row has its figures as well


def axis(row: SequenceRow, view: View, cells: int, longest: int) -> Line:
    """The token axis: `longest` tokens are `cells` wide, so that rows can be compared. The rest stays empty."""
    out: Line = []
    done = drawn = 0
    scale = cells / max(longest, 1)
    for where, tokens in row.runs:
        done += tokens
        stop = min(max(round(done * scale), drawn + (tokens > 0)), cells)
        out.append((view.glyphs.tier(where) * (stop - drawn), _ROLES.get(where, "missing")))
        drawn = stop
    return [*out, (" " * (cells - drawn), "text")]


def tokens_of(row: SequenceRow) -> int:
    """Tokens of the row, wherever they are."""
    return sum(tokens for _, tokens in row.runs)


class Sequences(ListPanel):
    """The requests."""

    NAME = "requests"
    HELP = (
        "A row is a request that runs or waits. Its tokens stand from left to right on one scale for all rows: the "
        "glyph says in which tier they lie, ◐ that they are on their way, ○ that they are still to be computed, · that "
        "they were given up by a bounded mode. "
        "c cancels the request under the cursor, / filters by phase or number."
    )

    def __init__(self, view: View, *, id: str) -> None:
        super().__init__(view, id=id)
        self._shown: list[SequenceRow] = []
        self._longest = 0

    @property
    def selected(self) -> SequenceRow | None:
        """The row under the cursor."""
        return self._shown[self.cursor] if self.cursor < len(self._shown) else None

    @property
    def count(self) -> int:
        """Rows after the filter."""
        return len(self._shown)

    def prepare(self) -> None:
        """Apply the filter."""
        rows = self.snapshot.sequences or ()
        self._shown = [row for row in rows if self.filter in f"{row.id} {row.phase} {row.tenant}".casefold()]
        self._longest = max(map(tokens_of, self._shown), default=0)

    def above(self, width: int) -> list[Line]:
        """The names of the columns."""
        if not self._shown:
            return []
        if width < _WIDE:
            return [[(f"{'id':>5} tokens", "dim")]]
        return [[(f"{'id':>5} {'phase':<8} {'tokens':>7} {'tok/s':>6} {'age':>6} ", "dim")]]

    def row(self, index: int, width: int) -> Line:
        """Figures, then the axis."""
        row = self._shown[index]
        total = tokens_of(row)
        role = {"decode": "good", "prefill": "text", "fetching": "moving"}.get(row.phase, "warn")
        line: Line = [(f"{row.id:>5} ", "strong")]
        if width < _WIDE:
            line.append((f"{amount(total):>6} ", "text"))
        else:
            line += [
                (f"{plain(row.phase)[:8]:<8} ", role), (f"{amount(total):>7} ", "text"),
                (f"{rate(row.tokens_per_s):>6} {duration(row.age_s):>6} ", "dim"),
            ]  # fmt: skip
        note = ""
        if row.restore_total and row.restore_done is not None and row.restore_done < row.restore_total:
            note = f" {percent(row.restore_done, row.restore_total)} restored"
        room = width - sum(len(text) for text, _ in line) - len(note)
        return [*line, *axis(row, self.view, max(room, 1), self._longest), (note, "moving")]

    def empty(self, width: int) -> list[Line]:
        """No requests, or none that are told of."""
        if self.snapshot.engine is None:
            return [[("no engine", "dim")]]
        if self.snapshot.sequences is None:
            return unreported(self.snapshot, width)
        return [[("no request matches" if self.filter else "no request runs", "dim")]]


def unreported(snapshot: Snapshot, width: int) -> list[Line]:
    """What is known all the same: how many requests there are."""
    engine = snapshot.engine
    assert engine is not None
    counts: Line = [(f"{engine.running} running, {engine.waiting} waiting", "text")]
    return [counts, *not_reported("rows of requests", width)]
