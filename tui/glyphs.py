"""Which character stands for what. Colour only adds to these: every state has a glyph of its own."""

from __future__ import annotations

from dataclasses import dataclass

TIERS = ("device", "host", "nvme")
TIER_NAMES = {"device": "device", "host": "RAM", "nvme": "disk"}


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One set of characters, each a single cell wide."""

    device: str
    device_idle: str
    host: str
    host_idle: str
    nvme: str
    private: str
    moving: str
    damaged: str
    kept: str
    free: str
    missing: str
    weights: str
    reserved: str
    mark: str  # the high-water mark on a gauge
    gate: str  # where eviction starts
    cursor: str  # in place of the glyph under it: what that was stands below the map
    bars: str  # of a sparkline, lowest first
    wait: str  # compute waited here
    dot: str  # between two figures
    ellipsis: str
    branch: str
    last_branch: str
    trunk: str
    folded: str
    unfolded: str
    up: str
    down: str
    alert: str
    border: str  # name of the border in CSS

    def tier(self, name: str, *, live: bool = True) -> str:
        """The glyph of a page in a tier. The disk knows no live pages."""
        match name:
            case "device":
                return self.device if live else self.device_idle
            case "host":
                return self.host if live else self.host_idle
            case "nvme":
                return self.nvme
            case "moving":
                return self.moving
            case "dropped":
                return self.free
            case _:
                return self.missing


UNICODE = Glyphs(
    device="█", device_idle="▆", host="▓", host_idle="▒", nvme="░", private="▞", moving="◐", damaged="✗", kept="◆",
    free="·", missing="○", weights="▚", reserved="╱", mark="│", gate="┊", cursor="◉", bars="▁▂▃▄▅▆▇█", wait="▲",
    dot="·", ellipsis="…", branch="├─", last_branch="└─", trunk="│ ", folded="▸", unfolded="▾", up="↑", down="↓",
    alert="●", border="round",
)  # fmt: skip

ASCII = Glyphs(
    device="#", device_idle="=", host="+", host_idle=":", nvme="-", private="w", moving="~", damaged="X", kept="P",
    free=".", missing="o", weights="%", reserved="/", mark="|", gate="!", cursor="@", bars="_.,-~=*#", wait="^",
    dot="-", ellipsis="~", branch="|-", last_branch="`-", trunk="| ", folded=">", unfolded="v", up="^", down="v",
    alert="!", border="ascii",
)  # fmt: skip


def glyphs(*, ascii_only: bool) -> Glyphs:
    """The set to use."""
    return ASCII if ascii_only else UNICODE
