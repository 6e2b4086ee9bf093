"""What stands over the panels for a moment: a question, the help."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static


class Confirm(ModalScreen[bool]):
    """A question. Yes has to be meant: the answer that Enter gives at first is no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes", id="confirm.yes"),
        Binding("n,escape", "answer(False)", "no", id="confirm.no"),
        Binding("left,right", "app.focus_next", "other", show=False),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """The question and two buttons."""
        with Vertical(classes="dialog"):
            yield Static(self._question, markup=False)
            with Horizontal():
                yield Button("no (n)", id="no", compact=True)
                yield Button("yes (y)", id="yes", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Answer by mouse or Enter."""
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        """Answer by key."""
        self.dismiss(yes)


class Ask(ModalScreen[str | None]):
    """A question that is answered with a text. None: never mind."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "leave", id="ask.leave")]

    def __init__(self, question: str, example: str) -> None:
        super().__init__()
        self._question, self._example = question, example

    def compose(self) -> ComposeResult:
        """The question and a line."""
        with Vertical(classes="dialog wide"):
            yield Static(self._question, markup=False)
            yield Input(placeholder=self._example, compact=True, id="answer")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Answer."""
        self.dismiss(event.value.strip() or None)

    def action_leave(self) -> None:
        """No answer."""
        self.dismiss(None)


class Help(ModalScreen[None]):
    """What the focused panel shows, and the keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1,q,question_mark,enter", "close", "close", id="help.close"),
    ]

    def __init__(self, title: str, text: str, keys: str) -> None:
        super().__init__()
        self._title, self._text, self._keys = title, text, keys

    def compose(self) -> ComposeResult:
        """Title, text, keys."""
        with VerticalScroll(classes="dialog wide") as box:
            box.border_title = self._title
            yield Static(self._text, markup=False)
            yield Static(self._keys, markup=False)

    def action_close(self) -> None:
        """Back to the panels."""
        self.dismiss(None)

    def on_click(self) -> None:
        """Back to the panels."""
        self.dismiss(None)
