"""The screen driven by keys and mouse: panels, filter, pause, themes, help, palette, a daemon that goes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from textual.command import CommandList
from textual.widgets import Input

from tests.tui.rig import NOW_S, FakeFeed, fake_feed, first, running, text_of, until
from tierd.tui.feed import ReplayFeed
from tierd.tui.layout import PANELS
from tierd.tui.palette import Look
from tierd.tui.record import Recording
from tierd.tui.snapshot import Phase, Standing
from tierd.tui.widgets.dialogs import Help
from tierd.tui.widgets.events import Events
from tierd.tui.widgets.prefixes import Prefixes
from tierd.tui.widgets.residency import Residency

SIZE = (120, 36)


async def test_a_key_for_each_panel(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        for key, name in enumerate(PANELS, 1):
            app.action_panel("residency")
            await pilot.press(str(key))
            assert app.focused_panel() == name
            if name == "chat":
                await pilot.press("escape")


async def test_one_panel_alone_and_back(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("6", "z")
        assert [name for name in PANELS if app.query_one(f"#{name}").display] == ["events"]
        await pilot.press("escape")
        assert app.query_one("#residency").display


async def test_a_filter_is_applied_while_it_is_written(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        prefixes = app.query_one(Prefixes)
        await pilot.press("5", "slash", *"ishmael")
        await pilot.pause()
        assert 0 < prefixes.count < 60
        await pilot.press("enter")
        assert app.focused is prefixes and prefixes.filter == "ishmael"
        await pilot.press("escape")
        assert prefixes.count == 60


async def test_escape_in_the_filter_drops_it(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("6", "slash", *"evict")
        await pilot.pause()
        assert app.query_one(Events).count == 1
        await pilot.press("escape")
        assert app.query_one(Events).count == 4
        assert not app.query_one("#prompt", Input).has_class("asking")


async def test_a_panel_without_rows_has_no_filter(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("1", "slash")
        assert not app.query_one("#prompt", Input).has_class("asking")


async def test_a_paused_screen_holds_its_picture_and_shows_that_the_daemon_went(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("space")
        await pilot.pause()
        assert "PAUSED" in text_of(app)
        assert busy_feed.show is not None
        gone = Standing(Phase.DISCONNECTED, NOW_S - 5.0, "it is gone")
        busy_feed.show(dataclasses.replace(busy_feed.snapshot, sequences=(), standing=gone))
        await pilot.pause()
        assert app.snapshot.sequences == busy_feed.snapshot.sequences
        assert "DISCONNECTED 5.0s: it is gone" in text_of(app)


async def test_the_newest_frame_wins(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        assert busy_feed.show is not None
        for number in range(100, 200):
            busy_feed.show(dataclasses.replace(busy_feed.snapshot, number=number))
        await pilot.pause()
        assert app.snapshot.number == 199


async def test_themes_and_characters_change_by_key(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("t")
        assert (app.view.look, app.theme) == (Look.LIGHT, "tierd-light")
        await pilot.press("a")
        await pilot.pause()
        assert text_of(app).isascii()


async def test_data_of_a_daemon_that_is_gone_step_back(recordings: dict[str, Path]) -> None:
    async with running(fake_feed(recordings["busy"], Phase.DISCONNECTED), SIZE) as (app, pilot):
        assert app.view.stale
        assert "DISCONNECTED 3.0s" in text_of(app)


async def test_help_is_about_the_focused_panel(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("5", "f1")
        await pilot.pause()
        assert isinstance(app.screen, Help)
        text = text_of(app)
        assert "5 prefixes" in text and "run of pages without a branch" in text
        await pilot.press("escape")
        assert not isinstance(app.screen, Help)


async def test_the_palette_lists_every_action(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        names = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Pause", "Theme", "Pin prefix", "Cancel request", "Unload the model", "Quit"} <= names


async def test_the_palette_runs_an_action(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("ctrl+p")
        await pilot.pause()
        await pilot.press(*"pause")
        options = app.screen.query_one(CommandList)
        await until(pilot, lambda: options.option_count and "Pause" in str(options.get_option_at_index(0).prompt))
        await pilot.press("enter")
        await until(pilot, lambda: app.paused)


async def test_keys_can_be_clicked(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        line = text_of(app).splitlines()[-1]
        await pilot.click("#keys", offset=(line.index("pause"), 0))
        await pilot.pause()
        assert app.paused


async def test_a_click_places_the_cursor_of_the_map(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        residency = app.query_one(Residency)
        await pilot.click("#residency", offset=(2 + 5, 1 + 1))
        assert residency.cursor == ("device", 5 * residency._sizes["device"])


async def test_a_click_on_a_prefix_chooses_it_and_a_second_one_folds_it(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("5", "z")
        await pilot.pause()
        prefixes = app.query_one(Prefixes)
        await pilot.click("#prefixes", offset=(20, 1 + 1 + 1))
        assert prefixes.cursor == 1
        await pilot.click("#prefixes", offset=(20, 1 + 1 + 0))
        await pilot.click("#prefixes", offset=(20, 1 + 1 + 0))
        assert prefixes.count < 60


async def test_an_event_of_a_page_leads_to_the_page(recordings: dict[str, Path]) -> None:
    async with running(fake_feed(recordings["corrupted"]), SIZE) as (app, pilot):
        await pilot.press("6", "end", "enter")
        await pilot.pause()
        assert app.focused_panel() == "residency"
        assert app.query_one(Residency).cursor == ("nvme", 2048)
        assert "damaged" in text_of(app)


@pytest.mark.parametrize("size", first(1, [(10, 3), (39, 12), (40, 11)]))
async def test_a_screen_that_is_too_small_says_so(busy_feed: FakeFeed, size: tuple[int, int]) -> None:
    async with running(busy_feed, size) as (app, pilot):
        assert "too" in text_of(app)
        await pilot.resize_terminal(100, 30)
        await pilot.pause()
        assert "residency" in text_of(app)


async def test_a_replay_is_scrubbed_by_keys(recordings: dict[str, Path]) -> None:
    feed = ReplayFeed(Recording(recordings["restoring"]), playing=False)
    async with running(feed, SIZE) as (app, pilot):
        await pilot.press("right_square_bracket", "right_square_bracket", "left_square_bracket")
        await pilot.pause()
        assert app.snapshot.standing.place == 1
        assert "REPLAY frame 2 of 24" in text_of(app)
        await pilot.press("right_curly_bracket")
        await pilot.pause()
        assert app.snapshot.standing.place == 21
        await pilot.press("space")
        assert feed.playing


async def test_a_broken_recording_ends_the_screen_with_its_error(recordings: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "broken"
    first = recordings["idle"].read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(first + b"{}}\n")
    async with running(ReplayFeed(Recording(path)), SIZE) as (app, pilot):
        await pilot.pause()
    assert "line 2" in str(app.fault)
    assert app.return_code == 1


async def test_a_screen_shows_nothing_that_takes_more_than_a_cell(busy_feed: FakeFeed) -> None:
    assert busy_feed.snapshot.prefixes is not None
    import msgspec

    rows = tuple(
        msgspec.structs.replace(row, text="漢字 \x1b[2J \u202e e\u0301") for row in busy_feed.snapshot.prefixes
    )
    busy_feed.snapshot = dataclasses.replace(busy_feed.snapshot, prefixes=rows)
    async with running(busy_feed, (160, 40)) as (app, pilot):
        lines = text_of(app).splitlines()
        assert any("?? " in line for line in lines)
        assert all(line.isprintable() and len(line) <= 160 for line in lines)
