"""Figures as text: units, bounds, nothing that moves the cursor."""

from __future__ import annotations

import pytest

from tierd.tui.format import UNKNOWN, amount, bandwidth, clip, duration, percent, plain, rate, size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_500_000_000, "1.5 GB"), (300_000_000_000, "300 GB"),
     (None, UNKNOWN)],
)  # fmt: skip
def test_sizes(count: int | None, text: str) -> None:
    assert size(count) == text


def test_a_bandwidth_names_its_time() -> None:
    assert bandwidth(2e9) == "2.0 GB/s" and bandwidth(None) == UNKNOWN


@pytest.mark.parametrize(("count", "text"), [(9999, "9999"), (12_340, "12.3k"), (4_000_000, "4.0M"), (None, UNKNOWN)])
def test_amounts(count: int | None, text: str) -> None:
    assert amount(count) == text


@pytest.mark.parametrize(("part", "whole", "text"), [(0, 9, "0%"), (1, 9999, "<1%"), (9998, 9999, "99%"),
                                                     (9, 9, "100%"), (1, 0, UNKNOWN)])  # fmt: skip
def test_something_is_never_nothing_and_never_all(part: int, whole: int, text: str) -> None:
    assert percent(part, whole) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.44, "0.4s"), (59.9, "59s"), (184, "3m04s"), (7800, "2h10m"),
                                               (432000, "5d"), (-3, "0.0s"), (None, UNKNOWN)])  # fmt: skip
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_slow_rate_keeps_a_digit() -> None:
    assert (rate(7.44), rate(0.0), rate(812.3)) == ("7.4", "0", "812")


@pytest.mark.parametrize("text", ["a\x1b[31mb", "wide 漢字", "e\u0301", "\u200bzero", "a\nb\tc", "\udcff"])
def test_text_from_outside_takes_one_cell_a_letter(text: str) -> None:
    from rich.cells import cell_len

    shown = plain(text)
    assert len(shown) == len(text) == cell_len(shown)
    assert shown.isprintable()


def test_what_was_left_out_is_marked() -> None:
    assert clip("abcdef", 4) == "abc…" and clip("abcd", 4) == "abcd" and clip("abc", 0) == ""
