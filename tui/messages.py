"""What the feed and the panels tell the app."""

from __future__ import annotations

from textual.message import Message

from tierd.tui.snapshot import Snapshot


class Arrived(Message):
    """A new snapshot. A newer one takes the place of one that nobody has looked at yet."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        super().__init__()

    def can_replace(self, message: Message) -> bool:
        """Newest frame wins."""
        return isinstance(message, Arrived)


class JumpToPage(Message):
    """Show this page in the map."""

    def __init__(self, tier: str, slot: int, key: bytes = b"") -> None:
        """With a `key` it is shown where it lies by now; the slot is where it was."""
        self.tier = tier
        self.slot = slot
        self.key = key
        super().__init__()


class PageWanted(Message):
    """The cursor of the map rests on a page whose details are not known."""

    def __init__(self, tier: str, slot: int) -> None:
        self.tier = tier
        self.slot = slot
        super().__init__()
