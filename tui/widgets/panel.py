"""The panel: a widget that paints lines and repaints only those that changed; and the panel that is a list."""

from __future__ import annotations

from typing import ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from tierd.tui.snapshot import Snapshot
from tierd.tui.view import Line, View, fit


class Panel(Widget, can_focus=True):
    """Shows one aspect of a snapshot.

    A subclass says in `paint` what each line reads; `HELP` is shown by F1. Painting happens at once for what is on
    the screen, later for what is hidden.
    """

    NAME: ClassVar[str] = ""
    HELP: ClassVar[str] = ""

    def __init__(self, view: View, *, id: str) -> None:
        super().__init__(id=id)
        self.view = view
        self.snapshot = Snapshot()
        self._lines: list[Line] | None = None
        self._painted_for = (0, 0)
        self._back: Style | None = None  # the background, which costs half a millisecond to find out
        self._styles: dict[str, Style] = {}  # of roles, on that background
        self._strips: dict[int, Strip] = {}
        self.border_title = self.NAME

    def paint(self, width: int, height: int) -> list[Line]:
        """At most `height` lines of at most `width` cells."""
        raise NotImplementedError

    def show(self, snapshot: Snapshot) -> None:
        """Take in new data."""
        self.snapshot = snapshot
        self.repaint()

    def look(self, view: View) -> None:
        """Draw in another way from now on."""
        self.view = view
        self._lines = None
        self._styles.clear()
        self._strips.clear()
        self.refresh()

    def repaint(self) -> None:
        """Bring the lines up to date; only those that read differently are drawn again."""
        width, height = self.size
        if not width or not height or not self.display:
            self._lines = None
            return
        before = self._lines if self._painted_for == (width, height) else None
        self._lines = self._painted(width, height)
        if before is None or len(before) != len(self._lines):
            self._strips.clear()
            self.refresh()
            return
        changed = [y for y, (old, new) in enumerate(zip(before, self._lines, strict=True)) if old != new]
        for y in changed:
            self._strips.pop(y, None)
        if changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def render_line(self, y: int) -> Strip:
        """The line as Textual wants it."""
        width, height = self.size
        if self._lines is None or self._painted_for != (width, height):
            self._lines = self._painted(width, height)
            self._strips.clear()
        if y >= len(self._lines):
            return Strip.blank(width, self.rich_style)
        strip = self._strips.get(y)
        if strip is None or strip.cell_length != width:
            if self._back is None:
                self._back = Style(bgcolor=self.rich_style.bgcolor)
            strip = self._strips[y] = self.view.strip_on(self._lines[y], width, self._style, self._back)
        return strip

    def _style(self, role: str) -> Style:
        if (found := self._styles.get(role)) is None:
            assert self._back is not None
            found = self._styles[role] = self._back + self.view.style(role)
        return found

    def notify_style_update(self) -> None:
        """The theme changed, or the focus."""
        super().notify_style_update()
        self._back = None
        self._styles.clear()
        self._strips.clear()

    def _painted(self, width: int, height: int) -> list[Line]:
        self._painted_for = (width, height)
        return self.paint(width, height)[:height]  # a line that is too wide is cut when it becomes a strip


class ListPanel(Panel):
    """A panel of rows, with a cursor that stays in sight and a filter.

    A subclass gives `count`, `row`, and the lines above and below the rows.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False, id="list.up"),
        Binding("down,j", "move(1)", "down", show=False, id="list.down"),
        Binding("pageup", "move(-10)", "page up", show=False, id="list.page_up"),
        Binding("pagedown", "move(10)", "page down", show=False, id="list.page_down"),
        Binding("home,g", "move(-1000000000)", "first", show=False, id="list.first"),
        Binding("end,G", "move(1000000000)", "last", show=False, id="list.last"),
        Binding("enter", "open", "open", show=False, id="list.open"),
    ]

    def __init__(self, view: View, *, id: str) -> None:
        super().__init__(view, id=id)
        self.cursor = 0
        self.first = 0
        self.filter = ""

    @property
    def count(self) -> int:
        """Rows there are, after the filter."""
        raise NotImplementedError

    def row(self, index: int, width: int) -> Line:
        """One row."""
        raise NotImplementedError

    def above(self, width: int) -> list[Line]:
        """Lines over the rows; they do not move."""
        return []

    def empty(self, width: int) -> list[Line]:
        """What is said when there are no rows."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Called before rows are painted."""

    def paint(self, width: int, height: int) -> list[Line]:
        """The head, then as many rows as there is room for."""
        self.prepare()
        head = self.above(width)
        if not self.count:
            return [*head, *self.empty(width)]
        room = max(height - len(head), 1)
        self.cursor = min(max(self.cursor, 0), self.count - 1)
        self.first = min(max(self.first, self.cursor - room + 1), self.cursor, max(self.count - room, 0))
        rows = range(self.first, min(self.first + room, self.count))
        return [*head, *(self._marked(index, width) for index in rows)]

    def _marked(self, index: int, width: int) -> Line:
        line = fit(self.row(index, width), width)
        if index == self.cursor and self.has_focus:
            text = "".join(text for text, _ in line)
            return [(text.ljust(width), "cursor")]
        return line

    def action_move(self, rows: int) -> None:
        """Move the cursor."""
        self.cursor = min(max(self.cursor + rows, 0), max(self.count - 1, 0))
        self.repaint()

    def action_open(self) -> None:
        """Enter on a row."""

    def set_filter(self, text: str) -> None:
        """Show only rows that hold this text, in any case of letters."""
        self.filter = text.casefold()
        self.cursor = 0
        self.border_subtitle = f"/{text}" if text else ""
        self.repaint()

    def on_click(self, event: events.Click) -> None:
        """A click moves the cursor; one on the cursor opens."""
        index = self.first + event.y - self.gutter.top - len(self.above(self.size.width))
        if 0 <= index < self.count:
            again = index == self.cursor
            self.cursor = index
            self.repaint()
            if again or event.chain > 1:
                self.action_open()

    def on_mouse_scroll_up(self) -> None:
        """The wheel moves the cursor."""
        self.action_move(-3)

    def on_mouse_scroll_down(self) -> None:
        """The wheel moves the cursor."""
        self.action_move(3)

    def on_focus(self) -> None:
        """The cursor shows."""
        self.repaint()

    def on_blur(self) -> None:
        """The cursor goes."""
        self.repaint()
