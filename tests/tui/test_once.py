"""One frame as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tui.rig import NOW_S, last_snapshot
from tests.tui.scenes import SCENES
from tierd.tui.once import coloured, json_frame, text_frame
from tierd.tui.palette import Look
from tierd.tui.view import View, width_of


def text_at(path: Path, width: int, view: View, *, colour: bool = False) -> str:
    out: list[str] = []
    coloured(text_frame(last_snapshot(path), view, width, now_s=NOW_S), view, width, out.append, colour=colour)
    return "".join(out)


@pytest.mark.parametrize("scene", list(SCENES))
@pytest.mark.parametrize("width", [40, 100])
def test_text_stays_within_its_width(recordings: dict[str, Path], scene: str, width: int) -> None:
    lines = text_frame(last_snapshot(recordings[scene]), View(), width, now_s=NOW_S)
    assert all(width_of(line) <= width for line in lines)


def test_text_holds_every_panel(recordings: dict[str, Path]) -> None:
    text = text_at(recordings["busy"], 100, View())
    for title in ("tiers", "links", "residency", "requests", "prefixes"):
        assert f"\n{title}\n" in text
    assert "\x1b" not in text


def test_ascii_text_is_ascii(recordings: dict[str, Path]) -> None:
    assert text_at(recordings["full"], 80, View(Look.PLAIN, ascii_only=True)).isascii()


def test_a_terminal_gets_colours(recordings: dict[str, Path]) -> None:
    assert "\x1b[" in text_at(recordings["busy"], 80, View(), colour=True)


@pytest.mark.parametrize("scene", list(SCENES))
def test_json_is_json(recordings: dict[str, Path], scene: str) -> None:
    frame = json_frame(last_snapshot(recordings[scene]))
    assert json.loads(json.dumps(frame, allow_nan=False)).keys() == frame.keys()
    assert frame["daemon"]["version"] == "0.1.0"


def test_json_counts_every_page_once(recordings: dict[str, Path]) -> None:
    snapshot = last_snapshot(recordings["corrupted"])
    for tier, counts in json_frame(snapshot)["maps"].items():
        found = snapshot.map_of(tier)
        assert found is not None
        assert sum(count for kind, count in counts.items() if kind != "slots") == counts["slots"] == found.slots
        assert counts["damaged"] == 3


def test_json_says_null_for_what_is_not_reported(recordings: dict[str, Path]) -> None:
    frame = json_frame(last_snapshot(recordings["bare"]))
    assert frame["sequences"] is None and frame["prefixes"] is None and frame["weights"] is None
    assert frame["events"] is None
