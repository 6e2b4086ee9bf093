"""Which panels stand where: breakpoints, panels that come to the front, a screen that is too small."""

from __future__ import annotations

import itertools

import pytest

from tierd.tui.layout import PANELS, Width, arrange, width_class


@pytest.mark.parametrize(
    ("size", "width"),
    [((39, 50), Width.TOO_SMALL), ((200, 11), Width.TOO_SMALL), ((10, 3), Width.TOO_SMALL), ((40, 12), Width.SMALL),
     ((60, 12), Width.NARROW), ((99, 24), Width.NARROW), ((100, 24), Width.MEDIUM), ((159, 24), Width.MEDIUM),
     ((160, 24), Width.WIDE)],
)  # fmt: skip
def test_breakpoints(size: tuple[int, int], width: Width) -> None:
    assert width_class(*size) is width


PLACES = [(40, 12), (60, 20), (100, 30), (200, 50)]


@pytest.mark.parametrize(("size", "panel"), list(itertools.product(PLACES, PANELS)))
def test_a_panel_that_was_chosen_is_shown(size: tuple[int, int], panel: str) -> None:
    assert panel in arrange(*size, panel, alone=False).shown
    assert arrange(*size, panel, alone=True).shown == {panel}


def test_on_a_screen_that_is_too_small_nothing_is_shown() -> None:
    assert not arrange(30, 8, "residency", alone=True).shown


def test_the_map_stays_whatever_is_chosen_once_there_are_columns() -> None:
    assert all("residency" in arrange(120, 30, panel, alone=False).shown for panel in PANELS)
