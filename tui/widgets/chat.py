"""Talk to the model beside the map. Each answer says what it cost and how much of its prompt was not computed."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input

from tierd.daemon.protocol import TERMINAL, Event
from tierd.daemon.protocol import Message as Turn
from tierd.tui.format import amount, plain, rate
from tierd.tui.snapshot import Snapshot
from tierd.tui.view import Line, View, wrapped
from tierd.tui.widgets.panel import Panel

MAX_LINES = 2000  # of the conversation that are kept on the screen


def figures(done: dict[str, Any]) -> str:
    """One line of what the daemon said of an answer."""
    usage, timings = done.get("usage", {}), done.get("timings", {})
    parts = []
    if "ttft_ms" in timings:
        parts.append(f"first token after {timings['ttft_ms']:.0f} ms")
    if "prompt_tokens" in usage:
        parts.append(f"{amount(usage['prompt_tokens'])} prompt tokens")
    hits = [
        f"{amount(timings[name])} {where}"
        for name, where in (("hit_device", "device"), ("hit_host", "RAM"), ("hit_nvme", "disk"))
        if timings.get(name)
    ]
    if hits:
        parts.append("from " + ", ".join(hits))
    if "recomputed" in timings:
        parts.append(f"{amount(timings['recomputed'])} computed")
    if timings.get("decode_tokens_per_s"):
        parts.append(f"{rate(timings['decode_tokens_per_s'])} tok/s")
    return " · ".join(parts)


class Talk(Panel, can_focus=False):
    """What was said."""

    def __init__(self, view: View) -> None:
        super().__init__(view, id="talk")
        self.said: list[tuple[str, str]] = []  # role, text

    def paint(self, width: int, height: int) -> list[Line]:
        """The last lines of the conversation."""
        lines: list[Line] = []
        for role, text in self.said:
            for paragraph in text.split("\n"):
                lines += [[(line, role)] for line in wrapped(plain(paragraph), max(width, 8))]
        if not lines:
            return [[("write below, Enter sends; Esc stops an answer", "dim")]]
        return lines[-height:]


class Chat(Vertical):
    """The pane: the conversation and a line to write in."""

    NAME: ClassVar[str] = "chat"
    HELP: ClassVar[str] = (
        "Write, Enter sends. The answer streams in, and its pages appear in the map meanwhile. Below it stand the time "
        "to the first token and where the tokens of the prompt came from. Esc stops an answer, or leaves the pane."
    )

    class Sent(Message):
        """Something was written. `messages`: the whole conversation."""

        def __init__(self, chat: Chat, messages: tuple[Turn, ...]) -> None:
            self.chat = chat
            self.messages = messages
            super().__init__()

    def __init__(self, view: View, *, id: str) -> None:
        super().__init__(id=id)
        self.talk = Talk(view)
        self.busy = False
        self._turns: list[Turn] = []
        self.border_title = self.NAME

    def compose(self) -> ComposeResult:
        """Conversation, then the line."""
        yield self.talk
        yield Input(placeholder="say something", id="say", compact=True)

    def show(self, snapshot: Snapshot) -> None:
        """The chat does not depend on the data."""

    def look(self, view: View) -> None:
        """Draw in another way from now on."""
        self.talk.look(view)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Send what was written."""
        text = event.value.strip()
        event.stop()
        if not text or self.busy:
            return
        event.input.value = ""
        self._turns.append(Turn("user", text))
        self.talk.said += [("key", text), ("text", "")]
        self.busy = True
        self.talk.repaint()
        self.post_message(self.Sent(self, tuple(self._turns)))

    def take(self, event: Event) -> None:
        """One event of the answer."""
        role, text = self.talk.said[-1]
        if event.ev == "text":
            self.talk.said[-1] = (role, text + str(event.data.get("text", "")))
        elif event.ev in TERMINAL:
            self._turns.append(Turn("assistant", text))
            self.end(figures(event.data) if event.ev == "done" else "stopped")
        self.talk.repaint()

    def end(self, note: str) -> None:
        """The answer is over."""
        self.busy = False
        self.talk.said.append(("dim", note))
        del self.talk.said[:-MAX_LINES]
        self.talk.repaint()
