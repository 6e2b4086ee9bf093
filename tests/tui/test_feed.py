"""The feed: frames from a daemon, deltas, a daemon that goes and comes back; and recordings that play."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.tui.fake_daemon import serving
from tests.tui.scenes import FRAMES, OPS, bare, busy, record
from tierd.daemon.errors import BadRequest, DaemonUnreachable, ModelNotFound, ProtocolError, Unsupported
from tierd.tui.feed import LiveFeed, ReplayFeed, page_detail
from tierd.tui.record import Recorder, Recording
from tierd.tui.snapshot import Phase, Snapshot
from tierd.tui.wire import IDLE

DEADLINE_S = 10.0


class Seen:
    """Collects snapshots; `until` waits for one that a test wants."""

    def __init__(self) -> None:
        self.all: list[Snapshot] = []
        self._news = asyncio.Event()

    def __call__(self, snapshot: Snapshot) -> None:
        self.all.append(snapshot)
        self._news.set()

    async def until(self, wanted: Callable[[Snapshot], bool]) -> Snapshot:
        async with asyncio.timeout(DEADLINE_S):
            while not (self.all and wanted(self.all[-1])):
                self._news.clear()
                await self._news.wait()
        return self.all[-1]


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "s"


def live(socket: Path, **more: Any) -> LiveFeed:
    times = iter(range(1_000_000))
    return LiveFeed(socket, interval_s=0.01, clock=lambda: next(times) * 0.25, wall=lambda: 1.79e9, **more)


@contextlib.asynccontextmanager
async def followed(feed: LiveFeed | ReplayFeed) -> AsyncIterator[Seen]:
    seen = Seen()
    task = asyncio.create_task(feed.run(seen))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])
        await feed.aclose()


async def test_a_frame_holds_what_the_daemon_said(socket: Path) -> None:
    async with serving(socket), followed(live(socket)) as seen:
        snapshot = await seen.until(lambda s: s.standing.phase is Phase.LIVE)
    said = busy(3)
    assert snapshot.daemon == said.daemon
    assert snapshot.engine == said.daemon.engines[0]
    assert said.top is not None and snapshot.sequences == said.top.sequences
    assert [part.cells for part in snapshot.maps] == [part.cells for part in said.top.maps]
    assert snapshot.prefixes is not None and len(snapshot.prefixes) == 60


async def test_later_frames_ask_for_news_alone(socket: Path) -> None:
    async with serving(socket) as daemon, followed(live(socket)) as seen:
        await seen.until(lambda s: s.number >= 2)
        asked = [args for op, args in daemon.asked if op == "top"]
    assert asked[0] == {"model": "smollm2-135m"}
    assert asked[1]["maps"] == {"device": 1, "host": 1, "nvme": 1}
    assert asked[1]["prefixes"] == 1
    assert asked[1]["events_after"] == 3


async def test_a_delta_changes_the_slots_it_names(socket: Path) -> None:
    async with serving(socket) as daemon, followed(live(socket)) as seen:
        whole = await seen.until(lambda s: s.number >= 1)
        held = daemon.answers["top"]({})
        slots = len(held["maps"][0]["cells"])
        place, used = (9).to_bytes(4, "little"), (77).to_bytes(4, "little")
        news = {"tier": "device", "version": 2, "base": 1, "slots": slots, "changed": place, "cells": bytes([IDLE]),
                "used": used, "owners": b"\0\0", "prefixes": b"\3\0"}  # fmt: skip
        daemon.answers["top"] = lambda args: held | {"maps": [news if args.get("maps") else held["maps"][0]]}
        snapshot = await seen.until(lambda s: bool(s.maps) and s.maps[0].version == 2)
    before, after = whole.maps[0], snapshot.maps[0]
    assert (after.cells[9], after.used[9], after.prefixes[9]) == (IDLE, 77, 3)
    assert after.cells[:9] == before.cells[:9] and after.cells[10:] == before.cells[10:]


async def test_a_delta_to_something_else_is_asked_for_again_whole(socket: Path) -> None:
    async with serving(socket) as daemon, followed(live(socket)) as seen:
        await seen.until(lambda s: s.number >= 1)
        held = daemon.answers["top"]({})
        wrong = {"tier": "device", "version": 9, "base": 7, "slots": 512}
        daemon.answers["top"] = lambda args: held | {"maps": [wrong] if "maps" in args else held["maps"]}
        number = seen.all[-1].number
        await seen.until(lambda s: s.number >= number + 3)
        assert seen.all[-1].standing.phase is Phase.LIVE
        assert seen.all[-1].maps[0].slots == 512


async def test_a_daemon_without_top_is_asked_for_its_page_map(socket: Path) -> None:
    async with serving(socket, bare(3), ("hello", "pages", "status")) as daemon:
        daemon.answers["pages"] = lambda args: {"map": bytes([IDLE, 0])}
        async with followed(live(socket)) as seen:
            snapshot = await seen.until(lambda s: bool(s.maps))
    assert snapshot.maps[0].cells == bytes([IDLE, 0])
    assert snapshot.sequences is None and snapshot.prefixes is None and not snapshot.events_reported
    assert not [op for op, _ in daemon.asked if op == "top"]


async def test_a_daemon_without_top_lists_its_prefixes(socket: Path) -> None:
    listed = [
        {"id": "0b", "parent": "0a", "own_tokens": 16, "device": 1, "host": 3, "nvme": 3, "hits": 2, "idle_s": 1.0,
         "text": "second"},
        {"id": "0a", "parent": "", "own_tokens": 32, "device": 1, "host": 2, "nvme": 2, "hits": 5, "pinned": True},
        {"id": "0d", "parent": "0c", "own_tokens": 16},
    ]  # fmt: skip
    async with serving(socket, bare(3), ("hello", "prefix", "status")) as daemon:
        daemon.answers["prefix"] = lambda args: {"prefixes": listed, "total": 9, "model": args["model"]}
        async with followed(live(socket)) as seen:
            snapshot = await seen.until(lambda s: bool(s.prefixes))
            await seen.until(lambda s: s.number >= 4)
            asked = [args for op, args in daemon.asked if op == "prefix"]
    assert snapshot.prefixes is not None
    assert [(row.key, row.parent, row.tokens) for row in snapshot.prefixes] == [(b"\n", -1, 32), (b"\x0b", 0, 16)]
    first, second = snapshot.prefixes
    assert (first.kept, first.nvme_bytes, second.device_bytes, second.host_bytes) == (True, 2 << 20, 0, 1 << 20)
    assert asked[0] == {"action": "ls", "model": "smollm2-135m", "limit": 500}


async def test_an_engine_that_is_not_ready_is_not_asked(socket: Path) -> None:
    said = busy(0)
    starting = msgspec.structs.replace(said.daemon.engines[0], state="starting")
    frame = msgspec.structs.replace(said, daemon=msgspec.structs.replace(said.daemon, engines=(starting,)))
    async with serving(socket, frame) as daemon, followed(live(socket)) as seen:
        await seen.until(lambda s: s.number >= 2)
    assert {op for op, _ in daemon.asked} == {"hello", "status"}


async def test_an_engine_that_ends_between_two_questions_is_no_lost_daemon(socket: Path) -> None:
    async with serving(socket) as daemon:
        del daemon.answers["top"]  # refused from here on
        feed = live(socket)
        await feed.connect()
        snapshot = await feed.frame()
        assert snapshot.standing.phase is Phase.LIVE and snapshot.maps == () and snapshot.engine is not None
        await feed.aclose()


async def test_a_daemon_that_goes_is_a_state_and_its_data_stay(socket: Path) -> None:
    async with serving(socket) as daemon, followed(live(socket)) as seen:
        await seen.until(lambda s: s.number >= 1)
        await daemon.stop()
        gone = await seen.until(lambda s: s.standing.phase is Phase.DISCONNECTED)
        assert gone.engine is not None and gone.maps
        assert gone.events[-1].text.startswith("disconnected: ")
        await daemon.start()
        back = await seen.until(lambda s: s.standing.phase is Phase.LIVE)
        assert back.events[-1].text == "connected again" or back.events_reported


async def test_the_time_since_it_went_does_not_start_anew_with_each_attempt(socket: Path) -> None:
    async with followed(live(socket)) as seen:
        first = await seen.until(lambda s: s.standing.phase is Phase.DISCONNECTED)
        later = await seen.until(lambda s: len(seen.all) >= 3)
    assert later.standing.since_s == first.standing.since_s
    assert "no daemon runs" in later.standing.reason


async def test_a_socket_without_permission_is_told(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(asyncio, "open_unix_connection", refuse)
    async with followed(live(socket)) as seen:
        snapshot = await seen.until(lambda s: s.standing.phase is Phase.DISCONNECTED)
    assert "no permission" in snapshot.standing.reason


async def test_a_daemon_that_answers_something_else_is_told(socket: Path) -> None:
    async with serving(socket) as daemon, followed(live(socket)) as seen:
        daemon.answers["status"] = lambda args: {"engines": "many"}
        snapshot = await seen.until(lambda s: s.standing.phase is Phase.DISCONNECTED)
    assert "DaemonReport as the daemon sent it" in snapshot.standing.reason


async def test_a_daemon_of_another_protocol_is_told(socket: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        body = msgspec.msgpack.encode({"v": 99, "id": 1, "ev": "result"})
        writer.write(len(body).to_bytes(4, "big") + body)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_unix_server(serve, str(socket))
    async with server, followed(live(socket)) as seen:
        snapshot = await seen.until(lambda s: s.standing.phase is Phase.DISCONNECTED)
    assert "protocol version 99" in snapshot.standing.reason


async def test_what_the_daemon_cannot_do_is_not_asked_of_it(socket: Path) -> None:
    async with serving(socket, ops=("hello", "status")) as daemon:
        feed = live(socket)
        async with followed(feed) as seen:
            with pytest.raises(DaemonUnreachable):
                await feed.call("prefix")
            await seen.until(lambda s: s.number >= 1)
            with pytest.raises(Unsupported, match="no operation 'prefix'"):
                await feed.call("prefix")
    assert not [op for op, _ in daemon.asked if op == "prefix"]


async def test_the_details_of_a_page(socket: Path) -> None:
    async with serving(socket) as daemon:
        daemon.answers["page"] = lambda args: {"key": "ab12", "text": f"slot {args['slot']}", "victim_rank": 0}
        feed = live(socket)
        async with followed(feed) as seen:
            await seen.until(lambda s: s.number >= 1)
            detail = await page_detail(feed, "smollm2-135m", "device", 5)
    assert (detail.key, detail.text, detail.victim_rank, detail.checksum) == ("ab12", "slot 5", 0, None)


async def test_a_recorded_feed_plays_the_same_snapshots(socket: Path, tmp_path: Path) -> None:
    file = tmp_path / "recording"
    async with serving(socket), followed(live(socket, recorder=Recorder(file))) as seen:
        await seen.until(lambda s: s.number >= 3)
    recording = Recording(file)
    player = ReplayFeed(recording, playing=False)
    for place, was in enumerate(s for s in seen.all[: len(recording)] if s.number):
        player.seek(place)
        now = player.snapshot()
        for field in ("at_s", "daemon", "ops", "engine", "maps", "sequences", "prefixes", "clock_s", "plan"):
            assert getattr(now, field) == getattr(was, field), field
    recording.close()


async def test_a_replay_plays_to_its_end_and_stands(tmp_path: Path) -> None:
    feed = ReplayFeed(Recording(record("idle", tmp_path / "r", 3)))
    async with followed(feed) as seen:
        last = await seen.until(lambda s: s.standing.place == 2)
        await asyncio.sleep(0)
    assert [s.standing.place for s in seen.all] == [0, 1, 2]
    assert last.standing.places == 3 and not feed.playing


async def test_scrubbing_shows_what_playing_would(tmp_path: Path) -> None:
    recording = Recording(record("busy", tmp_path / "r"))
    played, jumped = ReplayFeed(recording, playing=False), ReplayFeed(recording, playing=False)
    for place in range(FRAMES):
        played.seek(place)
        walked = played.snapshot()
    jumped.seek(10 * FRAMES)
    there = jumped.snapshot()
    assert there.links == walked.links and there.standing == walked.standing
    jumped.seek(-5)
    assert jumped.snapshot().standing.place == 0
    recording.close()


async def test_a_recording_cannot_be_acted_on(tmp_path: Path) -> None:
    feed = ReplayFeed(Recording(record("idle", tmp_path / "r", 1)))
    with pytest.raises(Unsupported):
        await feed.call("unload")
    await feed.aclose()


async def test_a_broken_frame_ends_the_replay_with_its_line(tmp_path: Path) -> None:
    path = record("idle", tmp_path / "r", 2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + b"{broken}\n")
    feed = ReplayFeed(Recording(path), playing=False)
    feed.seek(1)
    with pytest.raises(BadRequest, match="line 3"):
        feed.snapshot()
    await feed.aclose()


async def test_status_is_what_a_daemon_must_have(socket: Path) -> None:
    async with serving(socket, ops=("hello",)):
        feed = live(socket)
        await feed.connect()
        with pytest.raises(ProtocolError, match="'status'"):
            await feed.frame()
        await feed.aclose()


async def test_a_name_that_no_model_has_ends_the_feed(socket: Path) -> None:
    async with serving(socket, ops=(*OPS, "show")) as daemon:
        daemon.answers["show"] = lambda args: {"name": "smollm2-135m"}
        async with followed(live(socket, model="smollm2:135m")) as seen:
            snapshot = await seen.until(lambda s: s.standing.phase is Phase.LIVE)
            assert snapshot.engine is not None and snapshot.engine.model == "smollm2-135m"
        del daemon.answers["show"]
        daemon.errors["show"] = "model_not_found"
        feed = live(socket, model="nobody")
        with pytest.raises(ModelNotFound):
            await feed.run(lambda snapshot: None)
        await feed.aclose()
