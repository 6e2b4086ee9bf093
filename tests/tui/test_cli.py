"""The verb `top`: choices of theme and characters, what it refuses, frames without a screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tierd.daemon.errors import BadRequest, DaemonUnreachable
from tierd.tui.cli import bridge_command, choose, top
from tierd.tui.palette import Look


def run(*words: str) -> Result:
    return CliRunner().invoke(top, list(words))


@pytest.mark.parametrize(
    ("env", "encoding", "wanted"),
    [
        ({"TERM": "xterm-256color"}, "utf-8", (Look.DARK, False)),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, "UTF-8", (Look.DARK, False)),
        ({"TERM": "linux"}, "utf-8", (Look.ANSI, True)),
        ({"TERM": "screen"}, "utf-8", (Look.ANSI, False)),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, "utf-8", (Look.PLAIN, False)),
        ({"TERM": "dumb"}, "utf-8", (Look.PLAIN, True)),
        ({"TERM": "xterm-256color"}, "ascii", (Look.DARK, True)),
        ({}, "utf-8", (Look.ANSI, False)),
    ],
)
def test_the_terminal_chooses(env: dict[str, str], encoding: str, wanted: tuple[Look, bool]) -> None:
    assert choose("auto", None, env, encoding) == wanted


def test_what_was_asked_for_wins() -> None:
    assert choose("light", False, {"TERM": "linux", "NO_COLOR": "1"}, "ascii") == (Look.LIGHT, False)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--interval", "0"), "--interval"), (("--interval", "nan"), "--interval"),
        (("--interval", "99"), "--interval"),
        (("--record", "a", "--replay", "b"), "exclude"), (("--record", "a", "--once"), "--record"),
        ((), "needs a terminal"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(words: tuple[str, ...], named: str) -> None:
    outcome = run(*words)
    assert isinstance(outcome.exception, BadRequest) and named in outcome.exception.message


def test_without_a_daemon_a_frame_is_an_error(tmp_path: Path) -> None:
    assert isinstance(run("--once", "--socket", str(tmp_path / "s")).exception, DaemonUnreachable)


def test_a_recording_is_printed(recordings: dict[str, Path]) -> None:
    outcome = run("--once", "--replay", str(recordings["busy"]))
    assert outcome.exit_code == 0
    assert "REPLAY frame 24 of 24" in outcome.output and "residency" in outcome.output


def test_a_recording_is_printed_as_json(recordings: dict[str, Path]) -> None:
    outcome = run("--json", "--replay", str(recordings["busy"]))
    assert json.loads(outcome.output)["model"] == "smollm2-135m"


def test_what_is_no_recording_is_told(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("x")
    assert isinstance(run("--once", "--replay", str(tmp_path / "r")).exception, BadRequest)


def test_an_address_of_another_machine_is_a_command() -> None:
    assert bridge_command("/run/tierd.sock") == ()
    assert bridge_command("ssh me@there") == ("ssh", "me@there", "tierd", "proxy")
    assert bridge_command("ssh -p 22 there .venv/bin/tierd proxy")[-2:] == (".venv/bin/tierd", "proxy")


@pytest.mark.parametrize("address", ["ssh ", "ssh 'there"])
def test_an_address_without_a_host_is_refused(address: str) -> None:
    with pytest.raises(BadRequest):
        bridge_command(address)


def test_the_keys_are_listed() -> None:
    lines = run("--keys").output.splitlines()
    assert any(line.split() == ["act.pin", "p", "pin", "prefix"] for line in lines)
