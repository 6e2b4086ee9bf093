"""Pictures of the screen as text: characters and styles, compared exactly.

`TIERD_TEST_SNAPSHOTS=write` makes them anew: look at the difference before it is committed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tui.rig import FakeFeed, fake_feed, first, running, styles_of, text_of
from tierd.tui.feed import ReplayFeed
from tierd.tui.palette import Look
from tierd.tui.record import Recording
from tierd.tui.snapshot import Phase

SHOTS = Path(__file__).parent / "snapshots"
STATES = ("busy", "disconnected", "corrupted", "restoring", "idle", "full", "replay")


def sized(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def sizes(*every: tuple[int, int]) -> pytest.MarkDecorator:
    """The first size in each run, the others with the big counts."""
    later = [pytest.param(size, marks=pytest.mark.long) for size in every[1:]]
    return pytest.mark.parametrize("size", [every[0], *later], ids=[sized(size) for size in every])


def compare(name: str, picture: str) -> None:
    """The picture is the one that was looked at."""
    path = SHOTS / f"{name}.txt"
    if os.environ.get("TIERD_TEST_SNAPSHOTS") == "write":
        path.write_text(picture, "utf-8")
    assert path.exists(), f"{path} is not there: TIERD_TEST_SNAPSHOTS=write makes it"
    assert picture == path.read_text("utf-8"), f"{name} looks different"


def feed_of(state: str, recordings: dict[str, Path]) -> FakeFeed | ReplayFeed:
    path = recordings[{"disconnected": "busy", "replay": "restoring"}.get(state, state)]
    if state == "replay":
        feed = ReplayFeed(Recording(path), playing=False)
        feed.seek(11)
        return feed
    return fake_feed(path, Phase.DISCONNECTED if state == "disconnected" else Phase.LIVE)


@sizes((120, 36), (80, 24), (200, 50))
@pytest.mark.parametrize("state", first(4, STATES))
async def test_every_state_in_every_theme(state: str, size: tuple[int, int], recordings: dict[str, Path]) -> None:
    async with running(feed_of(state, recordings), size) as (app, pilot):
        for look in Look:
            assert app.view.look is look
            compare(f"{state}-{sized(size)}", text_of(app))  # colour adds to the text, it never replaces it
            compare(f"{state}-{sized(size)}-{look}", styles_of(app))
            app.action_next_theme()
            await pilot.pause()


@sizes((60, 20), (40, 12))
@pytest.mark.parametrize("state", first(3, STATES))
async def test_every_state_on_a_small_screen(state: str, size: tuple[int, int], recordings: dict[str, Path]) -> None:
    async with running(feed_of(state, recordings), size) as (app, pilot):
        compare(f"{state}-{sized(size)}", text_of(app))
        await pilot.press("a")
        await pilot.pause()
        assert text_of(app).isascii()
        compare(f"{state}-{sized(size)}-ascii", text_of(app))


@sizes((80, 24), (120, 36), (200, 50))
@pytest.mark.parametrize("scene", ["bare", "unloaded"])
async def test_what_is_not_reported(scene: str, size: tuple[int, int], recordings: dict[str, Path]) -> None:
    async with running(feed_of(scene, recordings), size) as (app, pilot):
        compare(f"{scene}-{sized(size)}", text_of(app))


@pytest.mark.long
@pytest.mark.parametrize("size", [(80, 24), (120, 36)], ids=sized)
async def test_each_panel_in_front_and_alone(size: tuple[int, int], recordings: dict[str, Path]) -> None:
    async with running(feed_of("busy", recordings), size) as (app, pilot):
        for key, name in enumerate(("gauges", "links", "residency", "sequences", "prefixes", "events", "plan"), 1):
            await pilot.press(str(key))
            await pilot.pause()
            compare(f"front-{name}-{sized(size)}", text_of(app))
            await pilot.press("z")
            await pilot.pause()
            compare(f"alone-{name}-{sized(size)}", text_of(app))
            await pilot.press("z")


@pytest.mark.parametrize("order", first(1, ["age", "address", "sequence", "prefix"]))
async def test_each_order_of_the_map(order: str, recordings: dict[str, Path]) -> None:
    async with running(feed_of("busy", recordings), (120, 36)) as (app, pilot):
        await pilot.press("z", *["o"] * ["address", "sequence", "age", "prefix"].index(order), "down", "right")
        await pilot.pause()
        compare(f"order-{order}", text_of(app))
        compare(f"order-{order}-dark", styles_of(app))
