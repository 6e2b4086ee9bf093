"""The event log: what the daemon tells, or what its counters show when it tells nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from tierd.tui.format import clip, plain
from tierd.tui.glyphs import TIER_NAMES
from tierd.tui.messages import JumpToPage
from tierd.tui.view import Line, View
from tierd.tui.widgets.panel import ListPanel
from tierd.tui.wire import EventRow

_ROLES = {
    "damage": "bad", "failure": "bad", "disk": "bad", "client": "warn", "evict": "warn", "preempt": "warn",
    "notice": "warn", "promote": "host.3", "restore": "nvme.3", "demote": "host.2", "persist": "nvme.2",
    "crash": "bad", "load": "good", "unload": "text", "spill": "warn", "prefix": "key", "resize": "key",
}  # fmt: skip

TimeOfDay = Callable[[float], time.struct_time]


class Events(ListPanel):
    """The log, newest last. It follows what comes unless the cursor was moved up."""

    NAME = "events"
    HELP = (
        "What happened, newest last; / filters by kind or text. Enter on an event of a page shows the page in the map. "
        "A daemon that reports no events is read from its counters: then a line sums up one frame."
    )

    def __init__(self, view: View, *, id: str, time_of_day: TimeOfDay = time.localtime) -> None:
        super().__init__(view, id=id)
        self._time_of_day = time_of_day
        self._shown: list[EventRow] = []
        self._follow = True

    @property
    def count(self) -> int:
        """Events after the filter."""
        return len(self._shown)

    def prepare(self) -> None:
        """Apply the filter, stay at the end."""
        events = self.snapshot.events
        if self.filter:
            self._shown = [row for row in events if self.filter in f"{row.kind} {row.text}".casefold()]
        else:
            self._shown = list(events)
        if self._follow:
            self.cursor = max(len(self._shown) - 1, 0)

    def row(self, index: int, width: int) -> Line:
        """Time, kind, text."""
        row = self._shown[index]
        line: Line = []
        if row.at_s is not None and width >= 34:
            line.append((time.strftime("%H:%M:%S ", self._time_of_day(row.at_s)), "dim"))
        line.append((f"{plain(row.kind)[:8]:<8} ", _ROLES.get(row.kind, "text")))
        room = width - sum(len(part) for part, _ in line)
        text = plain(row.text)
        line.append((clip(text, room), "text"))
        if row.slot >= 0:
            place = f"  [{TIER_NAMES.get(row.tier, plain(row.tier))} page {row.slot}]"
            if len(text) + len(place) <= room:
                line.append((place, "dim"))
        return line

    def action_move(self, rows: int) -> None:
        """Move the cursor; at the end the log follows again."""
        self._follow = self.cursor + rows >= self.count - 1
        super().action_move(rows)

    def action_open(self) -> None:
        """Jump to the page of the event."""
        if self.cursor < self.count:
            row = self._shown[self.cursor]
            if row.slot >= 0 or row.key:
                self.post_message(JumpToPage(row.tier, row.slot, row.key))

    def empty(self, width: int) -> list[Line]:
        """Nothing happened."""
        return [[("no event matches" if self.filter else "nothing happened yet", "dim")]]
