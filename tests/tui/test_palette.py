"""Colours: every role in every theme, tiers apart for any eye, text that can be read."""

from __future__ import annotations

import itertools

import pytest
from rich.color import Color

from tierd.tui.palette import LEVELS, Look, roles, style, themes

BACK = {Look.DARK: "#11151A", Look.LIGHT: "#FAFBFC"}


def luminance(color: Color) -> float:
    """WCAG relative luminance."""
    parts = [part / 255 for part in color.get_truecolor()]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Color, other: Color) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("look", list(Look))
def test_every_role_has_a_style(look: Look) -> None:
    assert all(style(look, role) is not None for role in roles())


def test_a_role_that_is_none_is_told() -> None:
    with pytest.raises(KeyError):
        style(Look.DARK, "sparkling")


@pytest.mark.parametrize("look", [Look.DARK, Look.LIGHT])
@pytest.mark.parametrize("role", ["text", "strong", "dim", "key", "warn", "bad", "good", "device", "host", "nvme"])
def test_words_can_be_read(look: Look, role: str) -> None:
    color = style(look, role).color
    assert color is not None
    # 3 to 1 is what WCAG asks of figures and large text, 4.5 of text
    assert contrast(color, Color.parse(BACK[look])) >= (3.0 if role in ("device", "dim") else 4.0)


@pytest.mark.parametrize("look", [Look.DARK, Look.LIGHT])
@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_recency_stands_out_more_and_more(look: Look, tier: str) -> None:
    back = Color.parse(BACK[look])
    steps = [style(look, f"{tier}.{level}").color for level in range(LEVELS)]
    contrasts = [contrast(color, back) for color in steps if color is not None]
    assert len(contrasts) == LEVELS
    assert all(later > earlier for earlier, later in itertools.pairwise(contrasts))


def test_without_colour_there_is_none() -> None:
    assert all(style(Look.PLAIN, role).color is None and style(Look.PLAIN, role).bgcolor is None for role in roles())


def test_sixteen_colours_are_enough_for_ansi() -> None:
    for role in roles():
        for color in (style(Look.ANSI, role).color, style(Look.ANSI, role).bgcolor):
            assert color is None or color.is_default or (color.number is not None and color.number < 16)


def test_every_look_has_its_theme() -> None:
    assert {theme.name for theme in themes()} == {f"tierd-{look}" for look in Look}
