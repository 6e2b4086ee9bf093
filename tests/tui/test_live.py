"""The screen on a real daemon: what it shows is what the daemon holds, and it outlives the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.screen import ModalScreen

from tests.daemon_home import Home
from tests.tui import rig
from tests.tui.rig import text_of
from tierd.clients.blocking import Client
from tierd.daemon.protocol import Message, Sampling, Submit
from tierd.tui import wire
from tierd.tui.app import TopApp
from tierd.tui.feed import LiveFeed
from tierd.tui.snapshot import Phase, Snapshot
from tierd.tui.view import View
from tierd.tui.widgets.residency import Residency
from tierd.tui.wire import CELL_KEPT

pytestmark = [pytest.mark.model, pytest.mark.long]
SIZE = (160, 45)
DEADLINE_S = 60.0
PINNED = "The pinned one is about whales. " * 5


def app_on(home: Home) -> TopApp:
    feed = LiveFeed(home.socket, interval_s=0.1, clock=time.monotonic, wall=time.time)
    return TopApp(feed, View(), clock=time.monotonic, time_of_day=time.gmtime)


@contextlib.contextmanager
def started(root: Path, models_dir: Path, **settings: str) -> Iterator[Home]:
    found = Home(root, models_dir, **settings)
    found.start()
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def home(tmp_path: Path, models_dir: Path) -> Iterator[Home]:
    with started(tmp_path, models_dir, device_mem="96MiB", host_mem="64MiB", nvme_mem="256MiB") as found:
        yield found


async def act(pilot: Pilot[None], *keys: str) -> None:
    """Keys that ask for an action, and the yes to its question."""
    await pilot.press(*keys)
    async with asyncio.timeout(DEADLINE_S):
        while not isinstance(pilot.app.screen, ModalScreen):
            await pilot.pause(0.05)
    await pilot.press("y")


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
            app, pilot, lambda s: s.engine is not None and s.engine.pager is not None and s.engine.running == 0
            and s.engine.tiers["device"].cached_pages > 0 and not s.engine.pager.dirty_pages
            and not s.engine.pager.writing_pages,
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
        wanted = {row["id"] for row in found}
        at_rest = await until(
            app, pilot, lambda s: {row.key.hex() for row in s.prefixes or ()} == wanted
            and s.sequences == () and bool(s.maps) and s.maps[0].cells == cells,
        )  # fmt: skip
        rows, page_bytes = at_rest.prefixes or (), seen.page_bytes
        assert sum(row.device_bytes for row in rows) == seen.cached_pages * page_bytes
        assert sum(row.nvme_bytes for row in rows) == at_rest.daemon.engines[0].tiers["nvme"].cached_pages * page_bytes
        screen = text_of(app)
        assert "smollm2-135m" in screen and "ready" in screen


async def test_a_prefix_is_pinned_and_dropped_from_the_screen(home: Home) -> None:
    app = app_on(home)
    async with app.run_test(size=SIZE) as pilot:
        await asyncio.to_thread(home.ask, "Tell me about the sea. " * 20, max_tokens=4)
        await until(app, pilot, lambda s: bool(s.prefixes))
        await act(pilot, "5", "p")
        await until(app, pilot, lambda s: any(row.kept for row in s.prefixes or ()))
        await act(pilot, "u")
        await until(app, pilot, lambda s: not any(row.kept for row in s.prefixes or ()))
        await act(pilot, "d")
        await until(app, pilot, lambda s: s.prefixes == ())


async def test_a_prefix_is_persisted_and_evicted_from_the_screen(home: Home) -> None:
    app = app_on(home)
    async with app.run_test(size=SIZE) as pilot:
        await asyncio.to_thread(home.ask, "Tell me about the sea. " * 20, max_tokens=4)
        await until(app, pilot, lambda s: bool(s.prefixes))
        await act(pilot, "5", "w")
        await until(app, pilot, lambda s: any(e.kind == "persist" for e in s.events))
        whole = await until(app, pilot, lambda s: all(r.nvme_bytes == r.device_bytes > 0 for r in s.prefixes or ()))
        await act(pilot, "e")
        gone = await until(app, pilot, lambda s: not any(r.device_bytes + r.host_bytes for r in s.prefixes or ()))
        assert [r.nvme_bytes for r in gone.prefixes or ()] == [r.nvme_bytes for r in whole.prefixes or ()]
        told = await until(app, pilot, lambda s: any("evicted from memory" in e.text for e in s.events))
        assert any(e.kind == "load" and "smollm2-135m is loaded" in e.text for e in told.events)
        event = next(e for e in told.events if "evicted from memory" in e.text)
        await pilot.press("6", "end", *["up"] * (len(told.events) - 1 - told.events.index(event)), "enter")
        await rig.until(pilot, lambda: app.query_one(Residency).cursor == ("nvme", event.slot))


async def test_under_load_every_frame_agrees_with_itself_and_the_daemon_with_its_books(home: Home) -> None:
    """Map and gauges of a frame are of one moment; the books are right at the end, and the screen shows them."""
    app = app_on(home)
    frames: list[Snapshot] = []
    async with app.run_test(size=SIZE) as pilot:
        texts = [f"Document {n}. " + f"Line {n} says {n * 7}. " * 40 for n in range(6)]
        asking = [asyncio.create_task(asyncio.to_thread(home.ask, text, max_tokens=24)) for text in texts]
        while not all(task.done() for task in asking):
            if not frames or app.snapshot is not frames[-1]:
                frames.append(app.snapshot)
            await pilot.pause(0.05)
        await asyncio.gather(*asking)
        seen = [found for found in frames if found.maps and found.engine is not None]
        assert len(seen) > 5
        for found in seen:
            agrees(found)
        rest = await until(app, pilot, lambda s: s.sequences == () and not s.engine.pager.dirty_pages)  # type: ignore[union-attr]
        agrees(rest)
        with Client(home.socket) as client:
            assert client.call("cache", action="verify", model="smollm2:135m", wait_s=DEADLINE_S)["engines"][
                "smollm2-135m"
            ]["findings"] == []
        page_bytes = rest.engine.tiers["device"].page_bytes if rest.engine else 0
        settled = await until(app, pilot, lambda s: sum(r.device_bytes for r in s.prefixes or ())
                              == s.engine.tiers["device"].cached_pages * page_bytes)  # type: ignore[union-attr]  # fmt: skip
        agrees(settled)


def agrees(found: Snapshot) -> None:
    """The pages of the map by their states are the figures of the gauges."""
    assert found.engine is not None
    for held in found.maps:
        states = Counter(cell & 7 for cell in held.cells)
        tier = found.engine.tiers[held.tier]
        assert tier.total_pages == held.slots
        assert (tier.free_pages, tier.cached_pages) == (states[wire.FREE], states[wire.IDLE])
        assert tier.used_pages == states[wire.PRIVATE] + states[wire.PINNED]
        assert tier.in_flight_pages == states[wire.FILLING] + states[wire.DRAINING]


async def test_a_pinned_prefix_stays_while_the_tiers_fill_and_goes_when_it_is_dropped(
    tmp_path: Path, models_dir: Path
) -> None:
    with started(tmp_path, models_dir, device_mem="12MiB", host_mem="0", nvme_mem="16MiB") as home:
        app = app_on(home)
        async with app.run_test(size=SIZE) as pilot:
            await asyncio.to_thread(home.ask, PINNED, max_tokens=4)
            await until(app, pilot, lambda s: bool(s.prefixes))
            await act(pilot, "5", "p")
            kept = await until(app, pilot, lambda s: any(row.kept for row in s.prefixes or ()))
            pinned = {row.key for row in kept.prefixes or () if row.kept}
            await asyncio.to_thread(home.ask, "Another one is about the desert. " * 5, max_tokens=4)
            await until(app, pilot, lambda s: _tokens(s, "desert") > 30)
            before, whole = _tokens(app.snapshot, "desert"), _tokens(app.snapshot, "whales")
            for number in range(10):  # several times what all tiers hold
                text = f"Document {number}. " + f"Line {number} says {number * 7}. " * 15
                await asyncio.to_thread(home.ask, text, max_tokens=2)
            full = await until(app, pilot, lambda s: _tokens(s, "desert") < before and _tokens(s, "Document 9") > 0)
            assert _tokens(full, "whales") == whole
            assert pinned <= {row.key for row in full.prefixes or () if row.kept}
            assert all(row.nvme_bytes for row in full.prefixes or () if row.kept)
            await asyncio.to_thread(home.ask, PINNED, max_tokens=4)
            # Now its pages are in memory for certain: a pin keeps the last copy, wherever that is. So few may have been
            # computed again rather than loaded, when the disk is busy.
            await until(app, pilot, lambda s: any(cell & CELL_KEPT for cell in s.maps[0].cells))
            await act(pilot, "5", "home", "u")
            await until(app, pilot, lambda s: not any(row.kept for row in s.prefixes or ()))
            await act(pilot, "home", "d")
            await until(app, pilot, lambda s: s.prefixes == ())


def _tokens(snapshot: Snapshot, word: str) -> int:
    """Of the prefixes whose text has this word."""
    return sum(row.tokens for row in snapshot.prefixes or () if word in row.text)


async def test_a_stream_is_cancelled_from_the_screen(home: Home) -> None:
    app = app_on(home)
    submit = Submit("smollm2:135m", messages=(Message("user", "Count."),), sampling=Sampling(ignore_eos=True))

    def talk() -> str:
        with Client(home.socket) as client:
            return list(client.generate(submit))[-1].ev

    async with app.run_test(size=SIZE) as pilot:
        talking = asyncio.create_task(asyncio.to_thread(talk))
        await until(app, pilot, lambda s: any(row.phase == "decode" for row in s.sequences or ()))
        await act(pilot, "4", "c")
        assert await asyncio.wait_for(talking, DEADLINE_S) == "aborted"
        await until(app, pilot, lambda s: s.sequences == ())


async def test_the_death_of_an_engine_is_seen_and_so_is_the_next_one(home: Home) -> None:
    app = app_on(home)
    async with app.run_test(size=SIZE) as pilot:
        await asyncio.to_thread(home.ask, "Hello.", max_tokens=2)
        first = await until(app, pilot, lambda s: bool(s.engine and s.maps))
        assert first.engine is not None and first.engine.pid is not None
        os.kill(first.engine.pid, signal.SIGKILL)
        await until(app, pilot, lambda s: s.engine is None or s.engine.state != "ready")
        assert app.snapshot.standing.phase is Phase.LIVE and "DISCONNECTED" not in text_of(app)
        await until(app, pilot, lambda s: s.engine is None)
        await rig.until(pilot, lambda: "no model loaded" in text_of(app))
        await asyncio.to_thread(home.ask, "Hello again.", max_tokens=2)
        again = await until(app, pilot, lambda s: bool(s.engine and s.maps))
        assert again.engine is not None and again.engine.pid != first.engine.pid


async def test_a_screen_does_not_keep_an_idle_engine_loaded(tmp_path: Path, models_dir: Path) -> None:
    sizes = {"device_mem": "24MiB", "host_mem": "0", "nvme_mem": "32MiB"}
    with started(tmp_path, models_dir, keep_alive="2s", **sizes) as home:
        app = app_on(home)
        async with app.run_test(size=SIZE) as pilot:
            await asyncio.to_thread(home.ask, "Hello.", max_tokens=2)
            await until(app, pilot, lambda s: bool(s.engine and s.maps and s.prefixes))
            await until(app, pilot, lambda s: s.engine is None)
            assert app.snapshot.standing.phase is Phase.LIVE
            await pilot.pause(1.0)
            assert app.snapshot.engine is None  # and looking on does not load it


async def test_the_screen_outlives_the_daemon(home: Home) -> None:
    app = app_on(home)
    async with app.run_test(size=SIZE) as pilot:
        await until(app, pilot, lambda s: s.standing.phase is Phase.LIVE)
        await asyncio.to_thread(home.kill)
        await until(app, pilot, lambda s: s.standing.phase is Phase.DISCONNECTED)
        await rig.until(pilot, lambda: "DISCONNECTED" in text_of(app))
        await asyncio.to_thread(home.start)
        await until(app, pilot, lambda s: s.standing.phase is Phase.LIVE)
        await rig.until(pilot, lambda: "DISCONNECTED" not in text_of(app))
