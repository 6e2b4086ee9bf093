"""The screen on a real daemon: what it shows is what the daemon holds, and it outlives the daemon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from tests.daemon_home import Home
from tests.tui.rig import text_of
from tierd.clients.blocking import Client
from tierd.tui.app import TopApp
from tierd.tui.feed import LiveFeed
from tierd.tui.snapshot import Phase, Snapshot
from tierd.tui.view import View
from tierd.tui.wire import CELL_STATE

pytestmark = [pytest.mark.model, pytest.mark.long]
SIZE = (160, 45)
DEADLINE_S = 60.0


@pytest.fixture
def home(tmp_path: Path, models_dir: Path) -> Iterator[Home]:
    found = Home(tmp_path, models_dir, device_mem="96MiB", host_mem="64MiB", nvme_mem="256MiB")
    found.start()
    yield found
    found.close()


def app_on(home: Home) -> TopApp:
    feed = LiveFeed(home.socket, interval_s=0.1, clock=time.monotonic, wall=time.time)
    return TopApp(feed, View(), clock=time.monotonic, time_of_day=time.gmtime)


async def until(app: TopApp, pilot: Pilot[None], wanted: Callable[[Snapshot], bool]) -> Snapshot:
    async with asyncio.timeout(DEADLINE_S):
        while not wanted(app.snapshot):
            await pilot.pause(0.05)
    return app.snapshot


async def test_the_screen_shows_what_the_daemon_holds(home: Home) -> None:
    app = app_on(home)
    async with app.run_test(size=SIZE) as pilot:
        await until(app, pilot, lambda s: s.standing.phase is Phase.LIVE)
        assert "no model loaded" in text_of(app)
        await asyncio.to_thread(home.ask, "Tell me about the sea. " * 20, max_tokens=8)
        snapshot = await until(
            app, pilot, lambda s: bool(s.maps and s.engine and s.engine.tiers) and s.engine is not None
            and s.engine.running == 0 and s.engine.tiers["device"].cached_pages > 0,
        )  # fmt: skip
        assert snapshot.engine is not None
        with Client(home.socket) as client:
            told = client.call("status")["tiers"]["device"]
            cells = client.call("pages", model=snapshot.engine.model)["map"]
            found = client.call("prefix", action="ls", model=snapshot.engine.model, limit=500)["prefixes"]
        seen = snapshot.engine.tiers["device"]
        assert (seen.total_pages, seen.free_pages, seen.cached_pages) == (
            told["total_pages"], told["free_pages"], told["cached_pages"]
        )  # fmt: skip
        shown = snapshot.map_of("device")
        assert shown is not None
        assert [cell & CELL_STATE for cell in shown.cells] == [cell & CELL_STATE for cell in cells]
        wanted = {row["id"] for row in found}  # the list is read anew every few seconds
        await until(app, pilot, lambda s: {row.key.hex() for row in s.prefixes or ()} == wanted)
        screen = text_of(app)
        assert "smollm2-135m" in screen and "ready" in screen


async def test_a_prefix_is_pinned_and_dropped_from_the_screen(home: Home) -> None:
    app = app_on(home)
    async with app.run_test(size=SIZE) as pilot:
        await asyncio.to_thread(home.ask, "Tell me about the sea. " * 20, max_tokens=4)
        await until(app, pilot, lambda s: bool(s.prefixes))
        await pilot.press("5", "p")
        await pilot.pause(0.2)
        await pilot.press("y")
        await until(app, pilot, lambda s: any(row.kept for row in s.prefixes or ()))
        await pilot.press("u")
        await pilot.pause(0.2)
        await pilot.press("y")
        await until(app, pilot, lambda s: not any(row.kept for row in s.prefixes or ()))
        await pilot.press("d")
        await pilot.pause(0.2)
        await pilot.press("y")
        await until(app, pilot, lambda s: s.prefixes == ())


async def test_the_screen_outlives_the_daemon(home: Home) -> None:
    app = app_on(home)
    async with app.run_test(size=SIZE) as pilot:
        await until(app, pilot, lambda s: s.standing.phase is Phase.LIVE)
        await asyncio.to_thread(home.kill)
        await until(app, pilot, lambda s: s.standing.phase is Phase.DISCONNECTED)
        await pilot.pause(0.2)
        assert "DISCONNECTED" in text_of(app)
        await asyncio.to_thread(home.start)
        await until(app, pilot, lambda s: s.standing.phase is Phase.LIVE)
        await pilot.pause(0.2)
        assert "DISCONNECTED" not in text_of(app)
