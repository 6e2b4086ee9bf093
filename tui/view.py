"""How things are drawn at the moment, and lines of text with roles: what panels paint and terminals show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from tierd.tui.glyphs import ASCII, UNICODE, Glyphs
from tierd.tui.palette import Look, style

Span = tuple[str, str]  # text, role
Line = list[Span]

_TO_ASCII = str.maketrans({"…": "~", "–": "-", "·": "-", "→": ">", "×": "x", "—": "-", "“": '"', "”": '"', "’": "'"})


@dataclass(frozen=True, slots=True)
class View:
    """Theme and characters. `stale`: the data are of a daemon that is gone, and all of them step back."""

    look: Look = Look.DARK
    ascii_only: bool = False
    stale: bool = False
    glyphs: Glyphs = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "glyphs", ASCII if self.ascii_only else UNICODE)

    def style(self, role: str) -> Style:
        """The style of a role."""
        if self.stale and role not in ("alert", "cursor", "faint", "free"):
            role = "faint" if role.endswith((".0", ".1")) else "dim"
        return style(self.look, role)

    def text(self, text: str) -> str:
        """The same text in characters that this terminal has."""
        if not self.ascii_only or text.isascii():
            return text
        return text.translate(_TO_ASCII).encode("ascii", "replace").decode()

    def strip(self, line: Line, width: int) -> Strip:
        """A painted line, exactly `width` cells wide."""
        return self.strip_on(line, width, self.style, None)

    def strip_on(self, line: Line, width: int, style_of: Callable[[str], Style], back: Style | None) -> Strip:
        """The same on a background: `style_of` gives the style of a role there."""
        if self.ascii_only:
            line = [(self.text(text), role) for text, role in line]
        segments = [Segment(text, style_of(role)) for text, role in line if text]
        return Strip(segments, width_of(line)).adjust_cell_length(width, back)


def width_of(line: Iterable[Span]) -> int:
    """Cells of a line. Painters write one cell a character (`format.plain`)."""
    return sum(len(text) for text, _ in line)


def fit(line: Sequence[Span], width: int) -> Line:
    """The line cut to `width` cells."""
    out: Line = []
    for text, role in line:
        if width <= 0:
            break
        out.append((text[:width], role))
        width -= len(text)
    return out


def spread(left: Line, right: Line, width: int) -> Line:
    """`left` at the left, `right` at the right; when both do not fit, the left one is cut."""
    room = width - width_of(right)
    if not right:
        return fit(left, width)
    if room < 1:
        return fit(right, width)
    kept = fit(left, room - 2)
    return [*kept, (" " * (room - width_of(kept)), "text"), *right]


def joined(parts: Sequence[Line], separator: str = "  ") -> Line:
    """Parts with a separator between them; empty parts are left out."""
    out: Line = []
    for part in parts:
        if part:
            if out:
                out.append((separator, "faint"))
            out += part
    return out


def most(parts: Sequence[Line], width: int, separator: str = "  ") -> Line:
    """As many whole parts, in their order of importance, as fit."""
    kept: list[Line] = []
    for part in parts:
        if width_of(joined([*kept, part], separator)) <= width:
            kept.append(part)
    return joined(kept, separator)


def wrapped(text: str, width: int) -> list[str]:
    """Words in lines of at most `width` cells."""
    lines: list[str] = []
    for word in text.split():
        while len(word) > width:
            lines.append(word[:width])
            word = word[width:]
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def not_reported(what: str, width: int) -> list[Line]:
    """The honest sentence of a panel that has no data."""
    return [[(line, "dim")] for line in wrapped(f"{what}: not reported by this daemon", max(width, 8))]
