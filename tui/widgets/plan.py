"""Weights by layer and expert, and what was planned beside what is measured."""

from __future__ import annotations

from tierd.tui.format import amount, percent, plain, size
from tierd.tui.glyphs import TIER_NAMES
from tierd.tui.snapshot import Snapshot
from tierd.tui.view import Line, not_reported, spread
from tierd.tui.widgets.panel import ListPanel
from tierd.tui.wire import PlanRow, WeightRow


def _figure(value: float | None, unit: str) -> str:
    if unit in ("bytes", "bytes/s"):
        return size(value) + ("/s" if unit == "bytes/s" else "")
    number = f"{value:.3g}" if value is not None and abs(value) < 1000 else amount(value)
    return f"{number} {unit}".strip()


def _plan_line(row: PlanRow, width: int) -> Line:
    figures: Line = [(_figure(row.planned, plain(row.unit)), "text"), (" planned  ", "dim")]
    if row.measured is None:
        figures.append(("not measured yet", "dim"))
    else:
        figures += [(_figure(row.measured, plain(row.unit)), "strong"), (" measured", "dim")]
    return spread([(plain(row.name), "text")], figures, width)


def _weight_line(row: WeightRow, width: int) -> Line:
    figures: Line = [(f"{size(row.bytes):>9}  ", "text"), (TIER_NAMES.get(row.tier, plain(row.tier)), _role(row.tier))]
    if row.uses:
        figures = [("hit ", "dim"), (f"{percent(row.hits or 0, row.uses):>4}  ", "text"), *figures]
    return spread([(plain(row.name), "text")], figures, width)


def _role(tier: str) -> str:
    return f"{tier}.3" if tier in TIER_NAMES else "text"


def lines(snapshot: Snapshot, width: int) -> list[Line]:
    """Every line of the panel."""
    out: list[Line] = []
    if snapshot.plan is not None:
        out += [_plan_line(row, width) for row in snapshot.plan]
    if snapshot.weights is not None:
        out += [_weight_line(row, width) for row in snapshot.weights]
    return out


class Plan(ListPanel):
    """Weights and plan."""

    NAME = "weights and plan"
    HELP = (
        "Where each layer or expert of the weights lies and how often a streamed one was there when it was needed; and "
        "the figures that the placement was planned with, beside those that were measured since."
    )

    @property
    def count(self) -> int:
        """Lines."""
        return len(self.snapshot.plan or ()) + len(self.snapshot.weights or ())

    def row(self, index: int, width: int) -> Line:
        """A plan row, or below them a weight row."""
        plan = self.snapshot.plan or ()
        if index < len(plan):
            return _plan_line(plan[index], width)
        return _weight_line((self.snapshot.weights or ())[index - len(plan)], width)

    def empty(self, width: int) -> list[Line]:
        """Nothing of it is told."""
        if self.snapshot.engine is None:
            return [[("no engine", "dim")]]
        return not_reported("weights by layer and the plan", width)
