"""Verbs about the daemon itself: serve, start, stop, status, logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tierd.daemon import paths
from tierd.daemon.cli_common import (
    card_shown,
    connect,
    connect_if_running,
    draft_shown,
    exclusive_shown,
    given_flags,
    json_option,
    leave,
    load_model,
    load_settings,
    lock_holder,
    note,
    print_json,
    print_table,
    settings_anyway,
    settings_options,
    shown,
    weights_shown,
    written_today,
)
from tierd.daemon.errors import AlreadyRunning, DaemonUnreachable, NotFound, TierdError
from tierd.daemon.models.catalog import nameless
from tierd.daemon.units import counted, human_bytes, human_seconds

ANSWER_S = 60.0  # for writing pages to the disk beyond the timeout, before we call it stuck


@click.command()
@settings_options()
def serve(flags: dict[str, Any]) -> None:
    """Run the daemon in the foreground."""
    settings = load_settings(flags)
    from tierd.daemon import log
    from tierd.daemon.lifecycle import serve as run_daemon  # asyncio and the server: only this verb needs them

    log.set_up(
        settings.log_level, settings.log_format, paths.log_file(), max_bytes=settings.log_bytes,
        kept_files=settings.log_files,
    )  # fmt: skip
    try:
        exit_code = run_daemon(settings)
    finally:
        log.tear_down()
    leave(exit_code)


@click.command()
@settings_options()
@click.option("--model", help="Load this model and wait until it is ready.")
def start(flags: dict[str, Any], model: str | None) -> None:
    """Start the daemon in the background; returns when its socket answers."""
    from tierd.daemon.cli_spawn import end, spawn

    settings = load_settings(flags)
    client = connect_if_running(settings)
    if client is not None:
        pid, is_ours = int(client.call("status").get("pid") or 0), False
    else:
        client, pid, is_ours = spawn(settings, given_flags(flags))
    if is_ours:
        print(f"tierd started, pid {pid}, socket {settings.socket}")
        for setting, name in nameless(settings):
            note(f"notice: {setting} names {name}, and no such model is here: `tierd list` shows what there is")
    elif arguments := given_flags({**flags, "socket": None}):
        client.close()
        raise AlreadyRunning(
            f"a daemon runs already (pid {pid}); {' '.join(arguments)} would change nothing",
            hint="`tierd stop` first",
        )
    else:
        print(f"tierd runs already, pid {pid}")
    with client:
        if model is None:
            return
        try:
            load_model(client, model)
        except TierdError:
            if is_ours:
                end(client, pid, settings.socket)
            raise
        print(f"{model} is ready")


@click.command()
@settings_options("socket")
@click.option("--timeout", type=click.FloatRange(0, 600), default=30.0, show_default=True, help="Seconds it may take.")
@click.option("--now", "timeout", flag_value=0.0, type=float, help="End running answers at once; pages are written.")
def stop(flags: dict[str, Any], timeout: float) -> None:
    """Stop the daemon: no new work, running answers end, pages are written, then it exits. Fine where none runs."""
    from tierd.daemon.cli_spawn import wait_until_gone

    settings = settings_anyway(flags)
    client = connect_if_running(settings)
    if client is None:
        print("no daemon runs")
        return
    with client:
        state = client.call("status")
        pid, live = state.get("pid"), (state.get("queue") or {}).get("live", 0)
        try:
            client.call("stop", timeout_s=timeout)
        except DaemonUnreachable:
            pass  # it was faster than its answer
    what = "the daemon" if not live else counted(live, "answer")
    at_once = "; `tierd stop --now` does not wait" if live and timeout else ""
    wait_until_gone(
        settings.socket, pid if isinstance(pid, int) else 0, timeout + ANSWER_S,
        on_wait=lambda: note(f"waiting for {what} to end (up to {timeout:g} s{at_once})"),
    )  # fmt: skip
    print("tierd stopped")


@click.command()
@settings_options("socket")
@json_option
def status(flags: dict[str, Any], as_json: bool) -> None:
    """Show the state of the daemon, its model and its tiers."""
    settings = settings_anyway(flags)
    try:
        client = connect(settings)
    except DaemonUnreachable as exc:
        if as_json:
            pid = lock_holder(settings.socket)
            state = "stopped" if pid is None else "unreachable"
            print_json({"state": state, "pid": pid, "model": None, "socket": str(settings.socket)})
            leave(exc.exit_code)
        raise
    with client:
        status = client.call("status")
    if as_json:
        print_json(status)
    else:
        _show_status(status, settings.socket)


def _show_status(state: dict[str, Any], socket: Path) -> None:
    rows: list[tuple[str, object]] = [
        ("state", state.get("state", "?")),
        ("pid", state.get("pid", "?")),
        ("version", state.get("version", "?")),
        ("up", human_seconds(state.get("uptime_s"))),
        ("model", state.get("model") or "none loaded"),
        ("socket", state.get("socket", socket)),
        ("http", state.get("http") or "off"),
    ]
    if text := exclusive_shown(state.get("exclusive")):
        rows.append(("batch", text))
    if text := card_shown(state.get("card")):
        rows.append(("card", text))
    engines = [engine for engine in state.get("engines") or [] if isinstance(engine, dict)]
    for engine in engines:
        rows += [("notice", shown(str(text))) for text in engine.get("notices") or []]
        if engine.get("writes"):
            kept = engine["writes"].get("bytes_per_token")
            each = f", {human_bytes(kept)} for a token kept" if kept else ""
            rows.append(("written", f"{written_today(engine['writes'])} today{each} ({engine.get('model', '?')})"))
        if weights := engine.get("weights"):
            rows.append(("weights", f"{weights_shown(weights)} ({engine.get('model', '?')})"))
        if draft := (engine.get("speculation") or {}).get("draft"):
            rows.append(("draft", f"{draft_shown(draft)} ({engine.get('model', '?')})"))
        rows += [("plan", f"{shown(str(why))} ({engine.get('model', '?')})") for why in _why(engine)]
        if engine.get("state") == "ready" and not engine.get("tiers"):
            rows.append(("engine", f"{engine.get('model', '?')} does not answer; its tiers are not known"))
    for name, value in rows:
        print(f"{name:<8} {value}")
    for engine in engines:
        if tiers := engine.get("tiers") or {}:
            print("" if len(engines) < 2 else f"\n{shown(str(engine.get('model', '?')))}")
            gauges = (_gauges(name, tier) for name, tier in tiers.items())
            print_table(("TIER", "TOTAL", "USED", "CACHED", "FREE"), gauges)


def _why(engine: dict[str, Any]) -> list[object]:
    """What was chosen for an engine that is not as usual."""
    chosen = engine.get("chosen")
    why = chosen.get("why") if isinstance(chosen, dict) else None
    return why if isinstance(why, list) else []


def _gauges(name: str, tier: object) -> tuple[str, ...]:
    if not isinstance(tier, dict):
        return (name, "-", "-", "-", "-")
    return (name, *(human_bytes(tier.get(f"{part}_bytes")) for part in ("total", "used", "cached", "free")))


@click.command()
@click.option("-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="How many of the last.")
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines.")
@click.option("--json", "as_json", is_flag=True, help="The lines as they are.")
def logs(lines: int, follow: bool, as_json: bool) -> None:
    """Show the log of the background daemon."""
    from tierd.daemon.cli_logs import follow_lines, last_lines, readable

    file = paths.log_file()
    if not file.exists():
        raise NotFound(f"no log at {file}", hint="the daemon writes there when it runs without a terminal")
    for line in last_lines(file, lines):
        print(line if as_json else readable(line))
    if follow:
        for line in follow_lines(file):
            print(line if as_json else readable(line), flush=True)
