"""Weights and plan: figures with their units, and the difference between zero and not measured."""

from __future__ import annotations

from tierd.tui.snapshot import Snapshot
from tierd.tui.view import View
from tierd.tui.widgets.plan import Plan
from tierd.tui.wire import EngineReport, PlanRow, WeightRow

ENGINE = EngineReport(model="m", state="ready")


def text(snapshot: Snapshot) -> list[str]:
    found = Plan(View(), id="plan")
    found.snapshot = snapshot
    return [" ".join("".join(part for part, _ in line).split()) for line in found.paint(70, 9)]


def test_what_was_planned_stands_beside_what_is() -> None:
    plan = (PlanRow("restore", "ms", 0.84, 1.25), PlanRow("read", "bytes/s", 2e9), PlanRow("wait", "s", 1.0, 0.0))
    note = "planned from rates measured on this model"
    assert text(Snapshot(engine=ENGINE, plan=plan, plan_note=note)) == [
        "restore 0.84 ms planned 1.25 ms measured", "read 2.0 GB/s planned not measured yet",
        "wait 1 s planned 0 s measured", note, "weights by layer: not reported by this daemon",
    ]  # fmt: skip


def test_an_expert_tells_how_often_it_was_there() -> None:
    weights = (WeightRow("layer 3 expert 7", 7 << 20, "host", 3, 4), WeightRow("layer 4", 1 << 20, "device"))
    assert text(Snapshot(engine=ENGINE, weights=weights))[2:] == [
        "layer 3 expert 7 there 75% 7.3 MB RAM", "layer 4 1.0 MB device"
    ]  # fmt: skip


def test_records_are_summed_up_by_tier_and_what_is_read_in_every_pass_is_called_so() -> None:
    weights = (WeightRow("layer.0", 4 << 20, "device"), *(WeightRow(f"layer.{n}", 2 << 20, "nvme") for n in (1, 2)))
    told = text(Snapshot(engine=ENGINE, weights=weights, plan=(), plan_note="there is no plan: it does not fit"))
    assert told[:2] == [
        "there is no plan: it does not fit", "weights 1 in device 4.2 MB 2 streamed from disk 4.2 MB"
    ]  # fmt: skip
    assert told[2:] == ["layer 0 4.2 MB device", "layer 1 2.1 MB disk", "layer 2 2.1 MB disk"]


def test_without_a_plan_it_says_so() -> None:
    weights = (WeightRow("layer.0", 4 << 20, "device"),)
    assert text(Snapshot(engine=ENGINE, weights=weights))[0] == "no plan: not reported by this daemon"


def test_nothing_of_it_is_reported() -> None:
    assert text(Snapshot(engine=ENGINE)) == ["weights by layer and the plan: not reported by this daemon"]
