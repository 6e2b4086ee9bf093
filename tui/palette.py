"""Colours by role. Okabe-Ito hues, which people with any colour vision can tell apart; recency is lightness.

A role is what a text means (`device`, `warn`); a theme says how that looks. Roles `device.0` to `device.3` are a tier
by recency, 3 the newest. Themes: dark, light, ansi (16 colours of the terminal), plain (none: bold, dim, reverse).
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from functools import cache

from rich.style import Style
from textual.theme import BUILTIN_THEMES, Theme


class Look(StrEnum):
    """The themes of `top`."""

    DARK = "dark"
    LIGHT = "light"
    ANSI = "ansi"
    PLAIN = "plain"


LEVELS = 4  # of recency

_HUES = {
    # role: dark, light, ansi
    "device": ("#E69F00", "#A86E00", "yellow"),
    "host": ("#56B4E9", "#1F78B4", "bright_cyan"),
    "nvme": ("#009E73", "#007A58", "green"),
    "moving": ("#F0E442", "#857A00", "bright_yellow"),
    "private": ("#FFD37A", "#7A4E00", "bright_yellow"),
    "damaged": ("#FF7A33", "#B84A00", "bright_red"),
    "kept": ("#E8A6CB", "#A03F78", "bright_magenta"),
    "weights": ("#CC79A7", "#A4497E", "magenta"),
    "good": ("#2FBF94", "#00724F", "green"),
    "warn": ("#F0E442", "#7A7000", "bright_yellow"),
    "bad": ("#FF7A33", "#B84A00", "bright_red"),
    "text": ("#D8DEE4", "#24292F", "default"),
    "strong": ("#FFFFFF", "#000000", "default"),
    "dim": ("#7F8A94", "#66707A", "bright_black"),
    "faint": ("#4A535C", "#A9B1B9", "bright_black"),
    "key": ("#56B4E9", "#0072B2", "bright_cyan"),
    "free": ("#4A535C", "#B4BBC2", "bright_black"),
    "missing": ("#999999", "#777777", "white"),
}
_BACK = {Look.DARK: "#11151A", Look.LIGHT: "#FAFBFC"}
_SHARE = (0.50, 0.66, 0.83, 1.0)  # of the hue, the rest is background: oldest to newest
_BOLD = frozenset({"strong", "bad", "damaged", "key", "kept"})


def roles() -> list[str]:
    """Every role."""
    ramps = [f"{tier}.{level}" for tier in ("device", "host", "nvme") for level in range(LEVELS)]
    return [*_HUES, *ramps, "cursor", "alert"]


@cache
def style(look: Look, role: str) -> Style:
    """How a role looks. Raises KeyError for a role that is none."""
    if role in ("cursor", "alert"):
        return _block(look, role)
    base, _, level = role.partition(".")
    hues = _HUES[base]
    match look:
        case Look.PLAIN:
            faded = base in ("dim", "faint", "free") or level in ("0", "1")
            return Style(bold=base in _BOLD or level == "3", dim=faded)
        case Look.ANSI:
            if level:
                return Style(color=hues[2], bold=level == "3", dim=level == "0")
            return Style(color=hues[2], bold=base in _BOLD)
        case Look.DARK | Look.LIGHT:
            hue = hues[0 if look is Look.DARK else 1]
            if level:
                hue = _blend(_BACK[look], hue, _SHARE[int(level)])
            return Style(color=hue, bold=base in _BOLD)


def _block(look: Look, role: str) -> Style:
    """A reversed block: the cursor, or a bar that nobody may miss."""
    match look:
        case Look.PLAIN:
            return Style(reverse=True, bold=True)
        case Look.ANSI:
            return Style(color="black", bgcolor="white" if role == "cursor" else "bright_red", bold=True)
        case Look.DARK:
            return Style(color="#11151A", bgcolor="#F0F4F8" if role == "cursor" else "#FF7A33", bold=True)
        case Look.LIGHT:
            return Style(color="#FFFFFF", bgcolor="#24292F" if role == "cursor" else "#B84A00", bold=True)


def _blend(back: str, front: str, share: float) -> str:
    parts = [(int(back[i : i + 2], 16), int(front[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(low + (high - low) * share):02X}" for low, high in parts)


def themes() -> list[Theme]:
    """The frame around it all, for Textual: `tierd-dark`, `tierd-light`, `tierd-ansi`, `tierd-plain`."""
    ansi = BUILTIN_THEMES["ansi-dark"]  # uses the terminal's own background, so it is right on a light one as well
    return [
        Theme(
            "tierd-dark", primary="#56B4E9", secondary="#0072B2", warning="#F0E442", error="#FF7A33",
            success="#2FBF94", accent="#E69F00", foreground="#D8DEE4", background="#11151A", surface="#171C22",
            panel="#3A444E",
        ),
        Theme(
            "tierd-light", primary="#0072B2", secondary="#56B4E9", warning="#7A7000", error="#B84A00",
            success="#00724F", accent="#A86E00", foreground="#24292F", background="#FAFBFC", surface="#F1F3F5",
            panel="#C3CAD1", dark=False,
        ),
        replace(
            ansi, name="tierd-ansi", primary="ansi_cyan", accent="ansi_bright_cyan", error="ansi_bright_red",
            panel="ansi_bright_black",
        ),
        replace(
            ansi, name="tierd-plain", primary="ansi_default", secondary="ansi_default", accent="ansi_default",
            error="ansi_default", warning="ansi_default", success="ansi_default",
        ),
    ]  # fmt: skip
