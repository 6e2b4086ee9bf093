"""Lines: never wider than they may be, and ASCII when nothing else is there."""

from __future__ import annotations

import pytest

from tierd.tui.palette import Look
from tierd.tui.view import View, fit, joined, most, not_reported, spread, width_of, wrapped

LEFT, RIGHT = [("left side", "text")], [("right", "dim")]


@pytest.mark.parametrize("width", range(24))
def test_two_sides_share_a_line(width: int) -> None:
    line = spread(LEFT, RIGHT, width)
    assert width_of(line) <= width
    if width >= 16:
        text = "".join(text for text, _ in line)
        assert text.startswith("left side") and text.endswith("right") and len(text) == width


def test_a_line_is_cut_in_the_middle_of_a_span() -> None:
    assert fit([("abc", "text"), ("def", "dim")], 4) == [("abc", "text"), ("d", "dim")]


def test_parts_are_shown_whole_or_not_at_all() -> None:
    parts = [[("first", "text")], [("a second part", "text")], [("last", "text")]]
    assert "".join(text for text, _ in most(parts, 12)) == "first  last"


def test_empty_parts_leave_no_gap() -> None:
    assert joined([[], [("a", "text")], [], [("b", "text")]], "-") == [("a", "text"), ("-", "faint"), ("b", "text")]


@pytest.mark.parametrize("width", [1, 5, 10, 80])
def test_wrapped_words_stay_within_their_width(width: int) -> None:
    text = "a word and averyveryverylongone"
    lines = wrapped(text, width)
    assert all(len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_a_strip_is_as_wide_as_it_was_asked_to_be() -> None:
    view = View()
    assert view.strip([("abcdef", "text")], 4).text == "abcd"
    assert view.strip([("ab", "text")], 4).text == "ab  "


def test_ascii_replaces_each_letter_by_one() -> None:
    view = View(Look.DARK, ascii_only=True)
    for text in ("a…b–c·d→e", "“ü”", "█◐"):
        assert view.text(text).isascii() and len(view.text(text)) == len(text)


def test_stale_data_step_back_and_the_alert_does_not() -> None:
    fresh, stale = View(), View(stale=True)
    assert stale.style("device.3") == fresh.style("dim")
    assert stale.style("device.0") == fresh.style("faint")
    assert stale.style("alert") == fresh.style("alert")


def test_what_is_not_reported_is_said() -> None:
    assert "".join(text for line in not_reported("rows", 80) for text, _ in line) == (
        "rows: not reported by this daemon"
    )
