"""An app on a recorded feed with a frozen clock, and its screen as text."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from rich.style import Style
from textual.pilot import Pilot

from tierd.daemon.protocol import Event, Submit
from tierd.tui.app import TopApp
from tierd.tui.feed import ReplayFeed, Show
from tierd.tui.palette import Look
from tierd.tui.record import Recording
from tierd.tui.snapshot import Phase, Snapshot, Standing
from tierd.tui.view import View

NOW_S = 1010.0
DEADLINE_S = 30.0


def first(count: int, values: Sequence[Any]) -> list[Any]:
    """Parameters of a test: the first ones for each run, the others with the big counts."""
    return [*values[:count], *(pytest.param(value, marks=pytest.mark.long) for value in values[count:])]


class FakeFeed:
    """Shows the last frame of a recording as if it came from a daemon, and remembers what is asked of it."""

    def __init__(self, snapshot: Snapshot, standing: Standing) -> None:
        import dataclasses

        self.snapshot = dataclasses.replace(snapshot, standing=standing, at_s=NOW_S)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, dict[str, Any]] = {}
        self.events: list[Event] = []
        self.show: Show | None = None

    async def run(self, show: Show) -> None:
        self.show = show
        show(self.snapshot)

    async def call(self, op: str, **args: Any) -> dict[str, Any]:
        self.asked.append((op, args))
        return self.answers.get(op, {})

    async def generate(self, submit: Submit) -> Any:
        self.asked.append(("generate", {"submit": submit}))
        for event in self.events:
            yield event

    async def aclose(self) -> None:
        pass


def last_snapshot(path: Path) -> Snapshot:
    """What the end of a recording shows."""
    recording = Recording(path)
    feed = ReplayFeed(recording, playing=False)
    feed.seek(len(recording) - 1)
    try:
        return feed.snapshot()
    finally:
        recording.close()


def fake_feed(path: Path, phase: Phase = Phase.LIVE) -> FakeFeed:
    standing = Standing(Phase.LIVE, 900.0)
    if phase is Phase.DISCONNECTED:
        reason = "the daemon at /run/user/1000/tierd/tierd.sock closed the connection"
        standing = Standing(phase, NOW_S - 3.0, reason, "`tierd logs` tells why")
    return FakeFeed(last_snapshot(path), standing)


@contextlib.asynccontextmanager
async def running(
    feed: FakeFeed | ReplayFeed, size: tuple[int, int], *, look: Look = Look.DARK, ascii_only: bool = False,
    readonly: bool = False, keymap: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:  # fmt: skip
    """The app on a screen of this size, after its first frame was drawn."""
    app = TopApp(
        feed, View(look, ascii_only), clock=lambda: NOW_S, time_of_day=time.gmtime, readonly=readonly, keymap=keymap
    )
    async with app.run_test(size=size, notifications=True) as pilot:
        await pilot.pause()
        await pilot.pause()
        yield app, pilot


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Waits for what the screen will show. However busy the machine, it does not wait for a time."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await pilot.pause(0.02)


def text_of(app: TopApp) -> str:
    """The characters on the screen."""
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips) + "\n"


def styles_of(app: TopApp) -> str:
    """For each line its styles (a letter and for how many cells), then what the letters mean."""
    names: dict[Style | None, str] = {}
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ!#$%&*+-/<=>?@^_|~"
    rows = []
    for strip in app.screen._compositor.render_strips():
        row, run, last = "", 0, ""
        for segment in strip:
            name = names.setdefault(segment.style, letters[len(names)])
            if name != last and run:
                row += f"{last}{run}"
                run = 0
            last, run = name, run + segment.cell_length
        rows.append(f"{row}{last}{run}")
    meanings = [f"{name} {_said(style)}" for style, name in names.items()]
    return "\n".join(rows) + "\n\n" + "\n".join(meanings) + "\n"


def _said(style: Style | None) -> str:
    if style is None:
        return "none"
    parts = [name for name in ("bold", "dim", "italic", "underline", "reverse") if getattr(style, name)]
    if style.color is not None:
        parts.append(style.color.get_truecolor().hex if style.color.triplet else style.color.name)
    if style.bgcolor is not None:
        parts.append("on " + (style.bgcolor.get_truecolor().hex if style.bgcolor.triplet else style.bgcolor.name))
    return " ".join(parts) or "plain"
