"""What is asked of the daemon: only after a yes, only what it can do, nothing under --readonly."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
from textual.pilot import Pilot

from tests.tui.rig import FakeFeed, first, running, text_of, until
from tierd.daemon.errors import NotFound, TooBusy
from tierd.daemon.protocol import Event
from tierd.tui.app import TopApp
from tierd.tui.widgets.dialogs import Confirm
from tierd.tui.widgets.prefixes import Prefixes
from tierd.tui.widgets.residency import Residency
from tierd.tui.wire import EventRow

SIZE = (120, 36)
LATER = partial(pytest.param, marks=pytest.mark.long)
MODEL = "smollm2-135m"


async def settle(pilot: Pilot[None]) -> None:
    await pilot.pause()
    await pilot.pause()


@pytest.mark.parametrize(
    ("key", "action"), [("p", "pin"), LATER("w", "persist"), ("e", "evict"), LATER("u", "unpin"), LATER("d", "drop")]
)
async def test_a_prefix_is_acted_on_after_a_yes(busy_feed: FakeFeed, key: str, action: str) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("5", "down", key)
        await settle(pilot)
        assert isinstance(app.screen, Confirm) and not busy_feed.asked
        await pilot.press("y")
        await settle(pilot)
        row = app.query_one(Prefixes).selected
    assert row is not None
    assert busy_feed.asked == [("prefix", {"model": MODEL, "action": action, "id": row.key.hex()})]


@pytest.mark.parametrize("key", first(1, ["enter", "n", "escape"]))
async def test_anything_but_a_yes_is_a_no(busy_feed: FakeFeed, key: str) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("5", "d")
        await settle(pilot)
        await pilot.press(key)
        await settle(pilot)
        assert not isinstance(app.screen, Confirm)
    assert not busy_feed.asked


async def test_the_answer_can_be_given_by_mouse(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("U")
        await settle(pilot)
        await pilot.click("#yes")
        await settle(pilot)
    assert busy_feed.asked == [("unload", {"model": MODEL})]


async def test_a_request_is_cancelled(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("4", "down", "c")
        await settle(pilot)
        await pilot.press("y")
        await settle(pilot)
    assert busy_feed.asked == [("cancel_request", {"model": MODEL, "request": 42})]


@pytest.mark.parametrize(("key", "name"), [("R", "device_bytes"), LATER("H", "host_bytes")])
async def test_an_arena_is_resized(busy_feed: FakeFeed, key: str, name: str) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press(key)
        await settle(pilot)
        await pilot.press(*"96MiB", "enter")
        await settle(pilot)
        await pilot.press("y")
        await settle(pilot)
    assert busy_feed.asked == [("resize", {"model": MODEL, name: 96 << 20})]


async def test_a_size_that_is_none_is_told(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("R")
        await settle(pilot)
        await pilot.press(*"lots", "enter")
        await settle(pilot)
        assert "a size must be" in text_of(app)
    assert not busy_feed.asked


async def test_findings_of_a_verification_are_told(busy_feed: FakeFeed) -> None:
    busy_feed.answers["cache"] = {"findings": ["page 7 has another checksum"]}
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("V")
        await settle(pilot)
        await pilot.press("y")
        await settle(pilot)
        assert "page 7 has another" in text_of(app)
    assert busy_feed.asked == [("cache", {"action": "verify", "model": MODEL})]


async def test_readonly_has_no_action_that_changes_anything(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE, readonly=True) as (app, pilot):
        for keys in (("5", "p", "u", "d", "w", "e"), ("4", "c"), ("U",), ("V",), ("R",), ("H",)):
            await pilot.press(*keys)
            assert len(app.screen_stack) == 1
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert not titles & {"Pin prefix", "Drop prefix", "Evict prefix", "Persist prefix now"}
        assert not titles & {"Cancel request", "Unload the model"}
        assert "readonly" in text_of(app)


async def test_what_the_daemon_cannot_do_is_told_and_not_asked(busy_feed: FakeFeed) -> None:
    busy_feed.snapshot = dataclasses.replace(busy_feed.snapshot, ops=frozenset({"status"}))
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("5", "p")
        await settle(pilot)
        assert not isinstance(app.screen, Confirm)
        assert "no operation 'prefix'" in text_of(app)


async def test_an_action_of_another_panel_says_where_to_choose(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("3", "d")
        await settle(pilot)
        assert "choose a prefix first" in text_of(app)


async def test_an_error_of_the_daemon_is_shown(busy_feed: FakeFeed) -> None:
    async def refuse(op: str, **args: Any) -> dict[str, Any]:
        raise TooBusy("a request uses it")

    busy_feed.call = refuse  # type: ignore[method-assign]
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("U")
        await settle(pilot)
        await pilot.press("y")
        await settle(pilot)
        assert "a request uses it" in text_of(app)


async def test_the_page_under_the_cursor_is_asked_about_once_it_rests(busy_feed: FakeFeed) -> None:
    busy_feed.answers["page"] = {"key": "0123abcd", "tokens": 16, "checksum": "good", "text": "Call me", "leases": 1}
    async with running(busy_feed, SIZE) as (app, pilot):
        for _ in range(4):
            app.query_one(Residency).action_step(1, 0)
        await until(pilot, lambda: "0123abcd" in text_of(app))
        text = text_of(app)
    assert "“Call me”" in text and "checksum good" in text
    assert len(busy_feed.asked) == 1


async def test_an_event_leads_to_where_its_page_lies_now(busy_feed: FakeFeed) -> None:
    row = EventRow(9, "evict", "1 page left the device", 0.0, "device", 3, b"\x01\x23")
    busy_feed.snapshot = dataclasses.replace(busy_feed.snapshot, events=(row,))
    busy_feed.answers["page"] = {"key": "0123", "places": {"host": 77, "nvme": 5}}
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("6", "enter")
        await until(pilot, lambda: app.query_one(Residency).cursor == ("host", 77))
    assert busy_feed.asked[0] == ("page", {"model": MODEL, "key": "0123"})


async def test_an_event_of_a_page_that_is_gone_leads_to_where_it_was(busy_feed: FakeFeed) -> None:
    row = EventRow(9, "evict", "1 page left the device", 0.0, "device", 3, b"\x01\x23")
    busy_feed.snapshot = dataclasses.replace(busy_feed.snapshot, events=(row,))

    async def unknown(op: str, **args: Any) -> dict[str, Any]:
        raise NotFound("no known page lies there")

    busy_feed.call = unknown  # type: ignore[method-assign]
    async with running(busy_feed, SIZE) as (app, pilot):
        await pilot.press("6", "enter")
        await until(pilot, lambda: app.query_one(Residency).cursor == ("device", 3))
        assert "not known any more" in text_of(app)


async def test_a_daemon_that_tells_nothing_of_pages_is_not_asked(busy_feed: FakeFeed) -> None:
    busy_feed.snapshot = dataclasses.replace(busy_feed.snapshot, ops=frozenset({"status"}))
    async with running(busy_feed, SIZE) as (app, pilot):
        app.query_one(Residency).action_step(1, 0)
        await until(pilot, lambda: "not reported by this daemon" in text_of(app))
    assert not busy_feed.asked


async def say(app: TopApp, pilot: Pilot[None], text: str) -> None:
    await pilot.press("8", *text, "enter")
    await settle(pilot)


async def test_a_chat_streams_and_tells_what_it_cost(busy_feed: FakeFeed) -> None:
    timings = {"ttft_ms": 41.2, "hit_device": 30, "hit_nvme": 160, "recomputed": 6, "decode_tokens_per_s": 14.6}
    busy_feed.events = [
        Event(1, "accepted", {"prompt_tokens": 196}), Event(1, "text", {"text": "Hello "}),
        Event(1, "text", {"text": "there."}), Event(1, "done", {"usage": {"prompt_tokens": 196}, "timings": timings}),
    ]  # fmt: skip
    async with running(busy_feed, SIZE) as (app, pilot):
        await say(app, pilot, "hi")
        text = " ".join(line.split("┃")[1].strip() for line in text_of(app).splitlines() if line.count("┃") == 2)
        assert "Hello there." in text
        assert "41 ms" in text and "30 device, 160 disk" in text and "6 computed" in text
        await say(app, pilot, "x")
    submits = [args["submit"] for op, args in busy_feed.asked if op == "generate"]
    assert [message.role for message in submits[1].messages] == ["user", "assistant", "user"]
    assert submits[0].model == MODEL


async def test_a_chat_that_is_refused_says_why(busy_feed: FakeFeed) -> None:
    async def refuse(submit: object) -> Any:
        raise TooBusy("512 requests wait already")
        yield

    busy_feed.generate = refuse  # type: ignore[method-assign]
    async with running(busy_feed, SIZE) as (app, pilot):
        await say(app, pilot, "hi")
        assert "512 requests wait already" in text_of(app)
