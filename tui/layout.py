"""Where the panels stand at which size: styles, and which of them are shown. Pure but for Textual's style language."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import assert_never

MIN_WIDTH, MIN_HEIGHT = 40, 12
NARROW, MEDIUM, WIDE = 60, 100, 160  # cells from which on
TALL = 30  # lines from which on gauges have room for their figures

PANELS = ("gauges", "links", "residency", "sequences", "prefixes", "events", "plan", "chat")
LEFT, RIGHT = ("gauges", "links", "events"), ("sequences", "prefixes", "plan", "chat")


class Width(Enum):
    """The layouts."""

    TOO_SMALL = auto()
    SMALL = auto()  # gauges and, if there is height, one panel
    NARROW = auto()  # the same, with figures
    MEDIUM = auto()  # two columns
    WIDE = auto()  # three columns


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Panels that are shown, and classes of the screen."""

    width: Width
    shown: frozenset[str]
    classes: frozenset[str]


def width_class(columns: int, lines: int) -> Width:
    """The layout for a size."""
    if columns < MIN_WIDTH or lines < MIN_HEIGHT:
        return Width.TOO_SMALL
    if columns < NARROW:
        return Width.SMALL
    if columns < MEDIUM:
        return Width.NARROW
    return Width.MEDIUM if columns < WIDE else Width.WIDE


def arrange(columns: int, lines: int, front: str, *, alone: bool) -> Arrangement:
    """What is shown. `front`: the panel that was chosen last; `alone`: it has the whole screen."""
    width = width_class(columns, lines)
    tall = "tall" if lines >= TALL else "short"
    if alone and width is not Width.TOO_SMALL:
        side = "left" if front in LEFT else "right" if front in RIGHT else "middle"
        return Arrangement(width, frozenset({front}), frozenset({"alone", f"only-{side}", tall}))
    match width:
        case Width.TOO_SMALL:
            return Arrangement(width, frozenset(), frozenset({"too-small"}))
        case Width.SMALL | Width.NARROW:
            front = "residency" if front == "gauges" else front
            side = "left" if front in LEFT else "right" if front in RIGHT else "middle"
            return Arrangement(width, frozenset({"gauges", front}), frozenset({"single", f"with-{side}", tall}))
        case Width.MEDIUM:
            second = front if front in RIGHT else "sequences"
            shown = frozenset({*LEFT, "residency", second})
            return Arrangement(width, shown, frozenset({"medium", tall}))
        case Width.WIDE:
            second = front if front in RIGHT[1:] else "prefixes"
            shown = frozenset({*LEFT, "residency", "sequences", second})
            return Arrangement(width, shown, frozenset({"wide", tall}))
        case _:
            assert_never(width)


CSS = """
Screen { background: $background; color: $foreground; layout: vertical; }
#header { height: 2; padding: 0 1; }
#keys { height: 1; padding: 0 1; }
#too-small { display: none; width: 1fr; height: 1fr; content-align: center middle; text-align: center; }
#body { height: 1fr; layout: vertical; }
#left, #main, #middle, #right { layout: vertical; width: 1fr; height: 1fr; }
#prompt { display: none; height: 1; border: none; padding: 0 1; }
#prompt.asking { display: block; }

.panel { border: round $panel; border-title-color: $foreground; border-title-align: left; padding: 0 1;
         border-subtitle-color: $primary; border-subtitle-align: right; width: 1fr; height: 1fr; min-height: 3; }
.panel:focus, .panel:focus-within { border: heavy $primary; border-title-color: $primary; border-title-style: bold; }
.ascii .panel { border: ascii $panel; }
.ascii .panel:focus, .ascii .panel:focus-within { border: ascii $primary; border-title-style: bold reverse; }

.wide #body, .medium #body { layout: horizontal; }
.wide #left, .medium #left { width: 46; }
.medium #left { width: 40; }
.wide #main { layout: horizontal; }
.wide #middle { width: 1fr; }
.wide #right { width: 1fr; max-width: 96; }
.medium #middle { height: 3fr; }
.medium #right { height: 2fr; }
.wide #sequences { height: 2fr; }
.wide #prefixes, .wide #plan, .wide #chat { height: 3fr; }
.tall #gauges { height: 10; }
.short #gauges { height: 5; }
.tall.medium #links, .tall.wide #links { height: 3fr; }
.tall.medium #events, .tall.wide #events { height: 2fr; }

.single #left { height: auto; }
.single #gauges { height: 5; }
.single.tall #gauges { height: 8; }
.single.with-middle #right, .single.with-right #middle { display: none; }
.single.with-left #left { height: 1fr; }
.single.with-left #main { display: none; }

.alone #gauges { height: 1fr; }
.only-left #main, .only-middle #left, .only-middle #right, .only-right #left, .only-right #middle { display: none; }

.too-small #header, .too-small #body, .too-small #keys { display: none; }
.too-small #too-small { display: block; }

#talk { height: 1fr; }
#say { border: none; height: 1; padding: 0; }
.dialog { width: auto; max-width: 72; height: auto; max-height: 90%; border: heavy $primary; background: $surface;
          padding: 0 1; }
.dialog.wide { width: 72; }
.dialog Static { width: auto; max-width: 64; margin: 0 0 1 0; }
.dialog Horizontal { width: auto; height: 1; }
.dialog Button { margin: 0 2 0 0; }
Ask, Confirm, Help { align: center middle; background: $background 60%; }
.ascii .dialog { border: ascii $primary; }
"""
