"""The screen of `tierd top`: takes snapshots from a feed, hands them to the panels, asks before it acts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from textual import events, work
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input, Static

from tierd.daemon.errors import TierdError
from tierd.tui.acting import ActingApp
from tierd.tui.feed import Feed, ReplayFeed
from tierd.tui.keymap import key_of
from tierd.tui.layout import CSS, MIN_HEIGHT, MIN_WIDTH, PANELS, Width, arrange
from tierd.tui.messages import Arrived
from tierd.tui.palette import Look, themes
from tierd.tui.snapshot import Phase, Snapshot
from tierd.tui.view import View
from tierd.tui.widgets.chat import Chat
from tierd.tui.widgets.dialogs import Ask, Confirm, Help
from tierd.tui.widgets.events import Events, TimeOfDay
from tierd.tui.widgets.gauges import Gauges
from tierd.tui.widgets.header import SILENT_S, Header
from tierd.tui.widgets.keybar import KeyBar
from tierd.tui.widgets.links import Links
from tierd.tui.widgets.panel import ListPanel, Panel
from tierd.tui.widgets.plan import Plan
from tierd.tui.widgets.prefixes import Prefixes
from tierd.tui.widgets.residency import Residency
from tierd.tui.widgets.sequences import Sequences

MUTATING = frozenset({"on_prefix", "cancel", "unload", "verify", "resize"})


class TopApp(ActingApp):
    """`tierd top`.

    Args:
        feed: where snapshots come from; closed when the app ends.
        view: theme and characters to begin with.
        clock: the clock of the feed, for the time since it was lost.
        time_of_day: Unix time to local time, for the log.
        readonly: no action that changes anything exists.
        keymap: other keys, by the name of the action.
        silent_s: from this age on data are said to be old; longer than the time between two frames.
    """

    CSS = CSS
    TITLE = "tierd top"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit", id="app.quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True, id="app.interrupt"),
        Binding("f1,question_mark", "help", "help", id="app.help"),
        *(Binding(str(n + 1), f"panel('{name}')", name, show=False, id=f"app.{name}") for n, name in enumerate(PANELS)),
        Binding("z", "maximize_panel", "whole screen", id="app.maximize"),
        Binding("escape", "leave", "leave", show=False, id="app.leave"),
        Binding("slash", "filter", "filter", id="app.filter"),
        Binding("space", "pause", "pause", id="app.pause"),
        Binding("t", "next_theme", "theme", id="app.theme"),
        Binding("a", "ascii", "ASCII", show=False, id="app.ascii"),
        Binding("left_square_bracket", "scrub(-1)", "earlier frame", show=False, id="app.earlier"),
        Binding("right_square_bracket", "scrub(1)", "later frame", show=False, id="app.later"),
        Binding("left_curly_bracket", "scrub(-20)", "much earlier", show=False, id="app.much_earlier"),
        Binding("right_curly_bracket", "scrub(20)", "much later", show=False, id="app.much_later"),
        Binding("p", "on_prefix('pin')", "pin prefix", show=False, id="act.pin"),
        Binding("u", "on_prefix('unpin')", "unpin prefix", show=False, id="act.unpin"),
        Binding("d", "on_prefix('drop')", "drop prefix", show=False, id="act.drop"),
        Binding("w", "on_prefix('persist')", "persist prefix now", show=False, id="act.persist"),
        Binding("e", "on_prefix('evict')", "evict prefix", show=False, id="act.evict"),
        Binding("c", "cancel", "cancel request", show=False, id="act.cancel"),
        Binding("U", "unload", "unload the model", show=False, id="act.unload"),
        Binding("R", "resize('device')", "resize the device arena", show=False, id="act.resize_device"),
        Binding("H", "resize('host')", "resize the RAM arena", show=False, id="act.resize_host"),
        Binding("V", "verify", "verify pages on disk", show=False, id="act.verify"),
    ]

    def __init__(
        self,
        feed: Feed,
        view: View,
        *,
        clock: Callable[[], float],
        time_of_day: TimeOfDay,
        readonly: bool = False,
        keymap: Mapping[str, str] = MappingProxyType({}),
        silent_s: float = SILENT_S,
    ) -> None:
        super().__init__(feed, native_colours=view.look in (Look.ANSI, Look.PLAIN))
        self.keymap = keymap
        self.view = view
        self.readonly = readonly
        self.paused = False
        self.front = "residency"
        self.alone = False
        self.fault: Exception | None = None
        self._clock = clock
        self._arrangement = arrange(80, 24, self.front, alone=False)
        self._header = Header(view, clock, readonly=readonly, silent_s=silent_s)
        self._keybar = KeyBar(view)
        self._panes: dict[str, Panel | Chat] = {  # by hand, for frames still come while the screen is taken down
            "gauges": Gauges(view, id="gauges"),
            "links": Links(view, id="links"),
            "residency": Residency(view, id="residency"),
            "sequences": Sequences(view, id="sequences"),
            "prefixes": Prefixes(view, id="prefixes"),
            "events": Events(view, id="events", time_of_day=time_of_day),
            "plan": Plan(view, id="plan"),
            "chat": Chat(view, id="chat"),
        }
        for theme in themes():
            self.register_theme(theme)

    # -- building --------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """The panels; `arrange` says which are shown."""
        panes = self._panes
        yield self._header
        with Container(id="body"):
            with Container(id="left"):
                yield from (panes["gauges"], panes["links"], panes["events"])
            with Container(id="main"):
                with Container(id="middle"):
                    yield panes["residency"]
                with Container(id="right"):
                    yield from (panes["sequences"], panes["prefixes"], panes["plan"], panes["chat"])
        yield Static(f"The terminal is too small: tierd top needs {MIN_WIDTH} by {MIN_HEIGHT}.", id="too-small")
        yield Input(placeholder="show only what holds this text; Enter keeps it, Esc drops it", id="prompt")
        yield self._keybar

    def on_mount(self) -> None:
        """Theme, layout, feed."""
        self._extent = self.size
        self.set_keymap(self.keymap)
        self.theme = f"tierd-{self.view.look}"
        for number, name in enumerate(PANELS, 1):
            pane = self._panes[name]
            pane.add_class("panel")
            pane.border_title = f"{number} {pane.border_title}"
        self._arrange()
        self._panes[self.front].focus()
        self._follow()
        self.set_interval(1.0, self._tick)

    @work(exclusive=True, group="feed")
    async def _follow(self) -> None:
        """The feed's task. What it raises ends the app; `fault` holds it for whoever ran the app."""
        try:
            await self.feed.run(lambda snapshot: self.post_message(Arrived(snapshot)))
        except TierdError as exc:
            self.fault = exc
            self.exit(return_code=1)

    async def on_unmount(self) -> None:
        """Let go of the feed."""
        await self.feed.aclose()

    def _painted(self) -> list[Panel | Chat]:
        return [self._header, *self._panes.values(), self._keybar]

    # -- data ------------------------------------------------------------------------------------------------------

    def on_arrived(self, message: Arrived) -> None:
        """A frame: to the panels, unless the screen is paused. The connection always shows."""
        snapshot = message.snapshot
        if self.paused:
            snapshot = replace(self.snapshot, standing=snapshot.standing)
        self.snapshot = snapshot

    def watch_snapshot(self, snapshot: Snapshot) -> None:
        """Every panel draws what it shows of it."""
        stale = snapshot.standing.phase is Phase.DISCONNECTED
        if stale != self.view.stale:
            self._look(replace_view(self.view, stale=stale))
        for pane in self._painted():
            pane.show(snapshot)

    def _tick(self) -> None:
        """Time goes on while nothing arrives."""
        self._header.repaint()

    # -- looks -----------------------------------------------------------------------------------------------------

    def on_resize(self, event: events.Resize) -> None:
        """Another layout, perhaps."""
        self._extent = event.size
        self._arrange()

    def _arrange(self) -> None:
        columns, lines = self._extent
        arrangement = self._arrangement = arrange(columns, lines, self.front, alone=self.alone)
        screen = self.screen_stack[0]
        known = {"alone", "too-small", "single", "medium", "wide", "tall", "short"}
        known |= {f"{how}-{side}" for how in ("with", "only") for side in ("left", "middle", "right")}
        for name in known:
            screen.set_class(name in arrangement.classes, name)
        screen.set_class(self.view.ascii_only, "ascii")
        for name in PANELS:
            pane = self._panes[name]
            shown = name in arrangement.shown
            if shown and not pane.display:
                pane.display = True
                pane.show(self.snapshot)
            pane.display = shown
        focused = self.focused
        if focused is not None and not _displayed(focused) and arrangement.width is not Width.TOO_SMALL:
            self._panes[self.front].focus()

    def _look(self, view: View) -> None:
        self.view = view
        for pane in self._painted():
            pane.look(view)

    def action_next_theme(self) -> None:
        """The next theme."""
        looks = list(Look)
        look = looks[(looks.index(self.view.look) + 1) % len(looks)]
        self._look(View(look, self.view.ascii_only, self.view.stale))
        self.theme = f"tierd-{look}"

    def action_ascii(self) -> None:
        """ASCII characters alone, or all."""
        self._look(View(self.view.look, not self.view.ascii_only, self.view.stale))
        self._arrange()

    def action_panel(self, name: str) -> None:
        """Bring a panel to the front and give it the keys."""
        self.front = name
        self._arrange()
        pane = self._panes[name]
        if isinstance(pane, Chat):
            pane.query_one(Input).focus()
        else:
            pane.focus()

    def action_next_panel(self) -> None:
        """The next panel, for the mouse."""
        self.action_panel(PANELS[(PANELS.index(self.front) + 1) % len(PANELS)])

    def action_maximize_panel(self) -> None:
        """The focused panel alone, or all again."""
        focused = self.focused_panel()
        self.front = focused or self.front
        self.alone = not self.alone
        self._arrange()

    def focused_panel(self) -> str:
        """The panel that has the keys, empty when none has."""
        widget: Any = self.focused
        while widget is not None and widget.id not in PANELS:
            widget = widget.parent
        return widget.id if widget is not None else ""

    def action_leave(self) -> None:
        """Out of a filter, then out of a panel that stands alone, then out of the chat."""
        pane = self.focused
        if isinstance(pane, ListPanel) and pane.filter:
            pane.set_filter("")
        elif self.alone:
            self.action_maximize_panel()
        elif self.focused_panel() == "chat":
            if not self.workers.cancel_group(self, "chat"):
                self.action_panel("residency")

    def action_help(self) -> None:
        """F1: about the focused panel."""
        name = self.focused_panel() or self.front
        pane = self._panes[name]
        own = [b for b in getattr(type(pane), "BINDINGS", ()) if isinstance(b, Binding)]
        every = [*own, *(b for b in self.BINDINGS if isinstance(b, Binding) and self._offered(b.action))]
        shown = [(_key_names(key_of(binding, self.keymap)), binding.description) for binding in every]
        keys = [f"{key:>16}  {description}" for key, description in shown if description]
        self.push_screen(Help(str(pane.border_title), pane.HELP, "\n".join(keys)))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette: every action that has a key."""
        for binding in self.BINDINGS:
            if isinstance(binding, Binding) and self._offered(binding.action):
                key = _key_names(key_of(binding, self.keymap))
                title = binding.description[0].upper() + binding.description[1:]
                yield SystemCommand(title, f"key: {key}", lambda action=binding.action: self.run_later(action))

    def run_later(self, action: str) -> None:
        """Run an action once the palette is gone."""
        self.call_later(self.run_action, action)

    def _offered(self, action: str) -> bool:
        return not (self.readonly and action.partition("(")[0] in MUTATING)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Under `--readonly` actions that change something do not exist."""
        return self._offered(action)

    # -- pausing, filter -------------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """Hold the picture, or let it go on; a replay plays or stands."""
        if isinstance(self.feed, ReplayFeed):
            self.feed.toggle()
            return
        self.paused = not self.paused
        header = self._header
        header.paused = self.paused
        header.repaint()

    def action_scrub(self, frames: int) -> None:
        """Go through a replay."""
        if isinstance(self.feed, ReplayFeed):
            self.feed.playing = False
            self.feed.seek(self.feed.place + frames)

    def action_filter(self) -> None:
        """Ask for a text to filter the focused list by."""
        if not isinstance(self.focused, ListPanel):
            self.notify("this panel has no rows to filter", severity="warning")
            return
        prompt = self.query_one("#prompt", Input)
        prompt.value = self.focused.filter
        self._filtered = self.focused
        prompt.add_class("asking")
        prompt.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is written."""
        if event.input.id == "prompt" and event.input.has_class("asking"):
            self._filtered.set_filter(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter."""
        if event.input.id == "prompt":
            self._end_prompt()

    def on_key(self, event: events.Key) -> None:
        """Escape in the prompt drops the filter."""
        if event.key == "escape" and self.focused is not None and self.focused.id == "prompt":
            self._filtered.set_filter("")
            self._end_prompt()
            event.stop()

    def _end_prompt(self) -> None:
        self.query_one("#prompt", Input).remove_class("asking")
        self._filtered.focus()


def actions() -> dict[str, Binding]:
    """Every action that has keys, by its name."""
    classes = (TopApp, ListPanel, Gauges, Links, Residency, Sequences, Prefixes, Events, Plan, Chat, Confirm, Ask, Help)
    found = [binding for kind in classes for binding in kind.__dict__.get("BINDINGS", ())]
    return {binding.id: binding for binding in found if isinstance(binding, Binding) and binding.id}


def replace_view(view: View, *, stale: bool) -> View:
    """The same view of other data."""
    return View(view.look, view.ascii_only, stale)


def _displayed(widget: Widget) -> bool:
    return all(node.display for node in widget.ancestors_with_self if isinstance(node, Widget))


def _key_names(keys: str) -> str:
    names = {
        "question_mark": "?", "slash": "/", "left_square_bracket": "[", "right_square_bracket": "]",
        "left_curly_bracket": "{", "right_curly_bracket": "}", "plus": "+", "equals_sign": "=", "minus": "-",
    }  # fmt: skip
    return " ".join(names.get(key, key) for key in keys.split(",")[:2])
