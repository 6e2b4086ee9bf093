"""The line of keys at the bottom; each can be clicked."""

from __future__ import annotations

from textual import events

from tierd.tui.view import Line, View
from tierd.tui.widgets.panel import Panel

KEYS = (
    # key, label, action of the app
    ("F1", "help", "help"),
    ("1-8", "panels", "next_panel"),
    ("/", "filter", "filter"),
    ("space", "pause", "pause"),
    ("z", "zoom", "maximize_panel"),
    ("t", "theme", "next_theme"),
    ("^p", "all", "command_palette"),
    ("q", "quit", "quit"),
)


class KeyBar(Panel, can_focus=False):
    """Keys and what they do. The last ones stay when there is little room: how to get out matters most."""

    HELP = "The keys that are used most; ^p lists every action."

    def __init__(self, view: View) -> None:
        super().__init__(view, id="keys")
        self._spans: list[tuple[int, int, str]] = []

    def paint(self, width: int, height: int) -> list[Line]:
        """One line."""
        kept = list(KEYS)
        while sum(len(key) + len(label) + 3 for key, label, _ in kept) > width and len(kept) > 2:
            del kept[-3 if len(kept) > 3 else 1]
        line: Line = []
        self._spans, x = [], 0
        for key, label, action in kept:
            line += [(key, "key"), (f" {label}  ", "dim")]
            stop = x + len(key) + len(label) + 3
            self._spans.append((x, stop, action))
            x = stop
        return [line]

    async def on_click(self, event: events.Click) -> None:
        """Do what the key does."""
        for start, stop, action in self._spans:
            if start <= event.x < stop:
                await self.app.run_action(action)
