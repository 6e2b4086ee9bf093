"""The log: it follows, it can be held, it leads to pages."""

from __future__ import annotations

import time

from textual.message import Message

from tierd.tui.messages import JumpToPage
from tierd.tui.snapshot import Snapshot
from tierd.tui.view import View
from tierd.tui.widgets.events import Events
from tierd.tui.wire import EventRow


def panel(count: int) -> Events:
    found = Events(View(), id="events", time_of_day=time.gmtime)
    found.snapshot = log(count)
    return found


def log(count: int) -> Snapshot:
    return Snapshot(events=tuple(EventRow(n, "evict", f"event {n}", 3600.0 + n, "nvme", n) for n in range(count)))


def text(found: Events, height: int = 5) -> list[str]:
    return ["".join(part for part, _ in line) for line in found.paint(60, height)]


def test_the_newest_is_in_sight() -> None:
    assert text(panel(50))[-1] == "01:00:49 evict    event 49  [disk page 49]"


def test_moved_up_it_stays_and_at_the_end_it_follows_again() -> None:
    found = panel(20)
    found.paint(60, 5)
    found.action_move(-10)
    found.show(log(30))
    assert found.cursor == 9
    found.paint(60, 5)
    found.action_move(100)
    found.show(log(40))
    assert text(found)[-1].endswith("page 39]")


def test_the_filter_knows_kinds_and_texts() -> None:
    found = panel(20)
    found.filter = "event 1"
    assert len(text(found, 50)) == 11
    found.filter = "restore"
    assert text(found) == ["no event matches"]


def test_enter_leads_to_the_page() -> None:
    found, sent = panel(3), list[Message]()
    found.post_message = lambda message: bool(sent.append(message)) or True  # type: ignore[method-assign]
    found.paint(60, 5)
    found.action_open()
    assert [(message.tier, message.slot) for message in sent if isinstance(message, JumpToPage)] == [("nvme", 2)]


def test_nothing_happened_yet() -> None:
    assert text(panel(0)) == ["nothing happened yet"]
