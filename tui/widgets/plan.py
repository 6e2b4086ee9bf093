"""Weights by layer and expert, and what was planned beside what is measured."""

from __future__ import annotations

from collections.abc import Sequence

from tierd.tui.format import amount, clip, percent, plain, size
from tierd.tui.glyphs import TIER_NAMES
from tierd.tui.snapshot import Snapshot
from tierd.tui.view import Line, View, most, not_reported, spread
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
    where: Line = [(f"{TIER_NAMES.get(row.tier, plain(row.tier)):<6}", _role(row.tier))]
    figures: Line = [(f"{size(row.bytes):>9}  ", "text"), *where]
    if row.uses:
        figures = [("there ", "dim"), (f"{percent(row.hits or 0, row.uses):>4}  ", "text"), *figures]
    return spread([(plain(row.name).replace(".", " "), "text")], figures, width)


def _role(tier: str) -> str:
    return f"{tier}.3" if tier in TIER_NAMES else "text"


def _sum_line(rows: Sequence[WeightRow], width: int) -> Line:
    """Records and bytes by tier; what lies on disk is read in every pass."""
    parts: list[Line] = []
    for tier in sorted({row.tier for row in rows}, key=list(TIER_NAMES).index):
        here = [row for row in rows if row.tier == tier]
        how = "streamed from" if tier == "nvme" else "in"
        told: Line = [(f"{len(here)} ", "strong"), (f"{how} ", "dim"), (TIER_NAMES[tier], _role(tier))]
        parts.append([*told, (f" {size(sum(row.bytes for row in here))}", "text")])
    return [("weights  ", "key"), *most(parts, max(width - 9, 1))]


def lines(snapshot: Snapshot, width: int) -> list[Line]:
    """Every line of the panel."""
    out: list[Line] = []
    if snapshot.plan:
        out += [_plan_line(row, width) for row in snapshot.plan]
    if snapshot.plan_note or snapshot.plan is None:
        out.append([(clip(plain(snapshot.plan_note) or "no plan: not reported by this daemon", width), "dim")])
    if snapshot.weights is None:
        return [*out, [("weights by layer: not reported by this daemon", "dim")]]
    known = [row for row in snapshot.weights if row.tier in TIER_NAMES]
    return [*out, _sum_line(known, width), *(_weight_line(row, width) for row in snapshot.weights)]


class Plan(ListPanel):
    """Weights and plan."""

    NAME = "weights and plan"
    HELP = (
        "The figures that `tierd plan` gives for the load of the moment, beside those that were measured of it, and "
        "what they rest on. Below, where each record of the weights lies; of streamed layers, how often they were in "
        "memory when a step needed them."
    )

    def __init__(self, view: View, *, id: str) -> None:
        super().__init__(view, id=id)
        self._told: list[Line] = []
        self._told_of: tuple[Snapshot, int] | None = None

    @property
    def count(self) -> int:
        """Lines."""
        shown = self.snapshot
        if shown.engine is None or (shown.plan is None and shown.weights is None):
            return 0
        return len(self._laid(self._told_of[1] if self._told_of else 80))

    def _laid(self, width: int) -> list[Line]:
        if self._told_of is None or self._told_of[0] is not self.snapshot or self._told_of[1] != width:
            self._told_of, self._told = (self.snapshot, width), lines(self.snapshot, width)
        return self._told

    def row(self, index: int, width: int) -> Line:
        """A plan row, what they rest on, or a weight row."""
        return self._laid(width)[index]

    def empty(self, width: int) -> list[Line]:
        """Nothing of it is told."""
        if self.snapshot.engine is None:
            return [[("no engine", "dim")]]
        return not_reported("weights by layer and the plan", width)
