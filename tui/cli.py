"""The verb `top`."""

from __future__ import annotations

import asyncio
import json
import locale
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierd.daemon.config import load
from tierd.daemon.errors import BadRequest
from tierd.daemon.paths import config_file

if TYPE_CHECKING:
    from tierd.tui.app import TopApp
    from tierd.tui.feed import Feed, LiveFeed
    from tierd.tui.palette import Look
    from tierd.tui.snapshot import Snapshot

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 60.0
THEMES = ("auto", "dark", "light", "ansi", "plain")


@click.command()
@click.argument("model", required=False, default="")
@click.option("--socket", "--connect", metavar="PATH", help="Unix socket of the daemon, or \"ssh HOST\".")
@click.option("--interval", "interval_s", type=float, default=0.25, show_default=True, help="Seconds between frames.")
@click.option("--once", is_flag=True, help="Print one frame as text and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one frame as JSON and end.")
@click.option("--record", type=click.Path(path_type=Path), metavar="FILE", help="Keep every frame in a new file.")
@click.option("--replay", type=click.Path(path_type=Path), metavar="FILE", help="Show a recorded file.")
@click.option("--readonly", is_flag=True, help="No action that changes anything.")
@click.option("--theme", type=click.Choice(THEMES), default="auto", help="Colours; auto looks at the terminal.")
@click.option("--ascii/--unicode", "ascii_only", default=None, help="ASCII characters alone, or all.")
@click.option("--keys", is_flag=True, help="List the actions and their keys, and end.")
def top(
    model: str, socket: str | None, interval_s: float, once: bool, as_json: bool, record: Path | None,
    replay: Path | None, readonly: bool, theme: str, ascii_only: bool | None, keys: bool,
) -> None:  # fmt: skip
    """Watch the tiers: every page, every request, every prefix.

    MODEL: which engine to look at; without it the one used last.
    """
    if keys:
        _print_keys()
        return
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise BadRequest(f"--interval must be from {MIN_INTERVAL_S} to {MAX_INTERVAL_S:.0f} s", param="interval")
    if replay is not None and record is not None:
        raise BadRequest("--record and --replay exclude each other", param="record")
    if (once or as_json) and record is not None:
        raise BadRequest("--record needs the screen: leave out --once and --json", param="record")
    look, ascii_only = choose(theme, ascii_only, os.environ, sys.stdout.encoding or "")
    if once or as_json:
        _print_frame(model, socket, interval_s, replay, look, ascii_only=ascii_only, as_json=as_json)
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):  # Textual draws on the last one
        raise BadRequest("top needs a terminal", hint="--once or --json print one frame", param="once")
    _run_screen(model, socket, interval_s, record, replay, look, readonly=readonly, ascii_only=ascii_only)


def choose(theme: str, ascii_only: bool | None, env: Mapping[str, str], encoding: str) -> tuple[Look, bool]:
    """Theme and characters for a terminal, unless they were asked for."""
    from tierd.tui.palette import Look

    term = env.get("TERM", "")
    if ascii_only is None:
        ascii_only = term in ("linux", "dumb") or "utf" not in encoding.lower()
    if theme != "auto":
        return Look(theme), ascii_only
    if "NO_COLOR" in env or term == "dumb":
        return Look.PLAIN, ascii_only
    many = env.get("COLORTERM", "") in ("truecolor", "24bit") or "256" in term
    return (Look.DARK if many else Look.ANSI), ascii_only


def _live(model: str, socket: str | None, interval_s: float, record: Path | None) -> LiveFeed:
    from tierd.tui.feed import LiveFeed
    from tierd.tui.record import Recorder

    command = bridge_command(socket or "")
    path = Path(socket) if command and socket else load({"socket": socket}).settings.socket
    recorder = Recorder(record) if record is not None else None
    return LiveFeed(
        path, interval_s=interval_s, clock=time.monotonic, wall=time.time, model=model, recorder=recorder,
        command=command,
    )  # fmt: skip


def bridge_command(address: str) -> tuple[str, ...]:
    """What to run to reach the daemon of another machine: `ssh HOST`, with `tierd proxy` there unless one is given.

    Empty for the path of a socket. Raises BadRequest for one that names no host.
    """
    if not address.startswith("ssh "):
        return ()
    try:
        words = shlex.split(address)
    except ValueError as exc:
        raise BadRequest(f"--connect: {exc}", param="connect") from None
    if len(words) < 2:
        raise BadRequest("--connect \"ssh HOST\" needs a host", param="connect")
    return (*words, *(() if "proxy" in words else ("tierd", "proxy")))


def _run_screen(
    model: str, socket: str | None, interval_s: float, record: Path | None, replay: Path | None, look: Look,
    *, readonly: bool, ascii_only: bool,
) -> None:  # fmt: skip
    from tierd.tui import keymap
    from tierd.tui.app import TopApp, actions
    from tierd.tui.feed import ReplayFeed
    from tierd.tui.record import Recording
    from tierd.tui.view import View
    from tierd.tui.widgets.header import SILENT_S

    locale.setlocale(locale.LC_TIME, "")
    feed: Feed = ReplayFeed(Recording(replay)) if replay is not None else _live(model, socket, interval_s, record)
    app = TopApp(
        feed, View(look, ascii_only), clock=time.monotonic, time_of_day=time.localtime,
        readonly=readonly or replay is not None, keymap=keymap.load(_keymap_file(), actions()),
        silent_s=max(SILENT_S, 2 * interval_s),
    )  # fmt: skip
    asyncio.run(_until_ended(app))
    if app.fault is not None:
        raise app.fault


def _keymap_file() -> Path:
    return config_file().with_name("top.toml")


def _print_keys() -> None:
    """A line for each action: its name, its keys, what it does."""
    from tierd.tui import keymap
    from tierd.tui.app import actions

    known = actions()
    mine = keymap.load(_keymap_file(), known)
    for name, binding in sorted(known.items()):
        sys.stdout.write(f"{name:<24} {keymap.key_of(binding, mine):<28} {binding.description}\n")


async def _until_ended(app: TopApp) -> None:
    """Run the screen; SIGTERM and SIGHUP end it like `q` does, so that the terminal is given back as it was."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, app.exit)
    try:
        await app.run_async()
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _print_frame(
    model: str, socket: str | None, interval_s: float, replay: Path | None, look: Look,
    *, ascii_only: bool, as_json: bool,
) -> None:  # fmt: skip
    from tierd.tui.feed import ReplayFeed
    from tierd.tui.once import coloured, json_frame, text_frame
    from tierd.tui.record import Recording
    from tierd.tui.view import View

    if replay is not None:
        recording = Recording(replay)
        player = ReplayFeed(recording, playing=False)
        player.seek(len(recording) - 1)
        try:
            snapshot = player.snapshot()
        finally:
            recording.close()
    else:
        snapshot = asyncio.run(_one_live(_live(model, socket, interval_s, None)))
    if as_json:
        sys.stdout.write(json.dumps(json_frame(snapshot), ensure_ascii=False, indent=2) + "\n")
        return
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 40), 160)
    view = View(look, ascii_only)
    lines = text_frame(snapshot, view, width, now_s=time.monotonic())
    coloured(lines, view, width, sys.stdout.write, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)


async def _one_live(feed: LiveFeed) -> Snapshot:
    try:
        await feed.connect()
        await feed.frame()
        await asyncio.sleep(feed.interval_s)  # rates of links are differences of two frames
        return await feed.frame()
    finally:
        await feed.aclose()
