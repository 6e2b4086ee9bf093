"""Glyphs: every state has its own, so that nothing depends on colour."""

from __future__ import annotations

import dataclasses

import pytest
from rich.cells import cell_len

from tierd.tui.glyphs import ASCII, TIERS, UNICODE, Glyphs

STATES = ("device", "device_idle", "host", "host_idle", "nvme", "private", "moving", "damaged", "kept", "free",
          "missing", "cursor")  # fmt: skip


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_no_two_states_look_alike(glyphs: Glyphs) -> None:
    assert len({getattr(glyphs, state) for state in STATES}) == len(STATES)


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_every_glyph_is_one_cell_wide(glyphs: Glyphs) -> None:
    values = dataclasses.asdict(glyphs)
    letters = "".join(value for name, value in values.items() if name != "border")
    assert cell_len(letters) == len(letters)


def test_ascii_is_ascii() -> None:
    assert all(str(value).isascii() for value in dataclasses.asdict(ASCII).values())


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_every_tier_has_a_glyph(glyphs: Glyphs) -> None:
    assert len({glyphs.tier(name) for name in [*TIERS, "moving", "elsewhere"]}) == 5
