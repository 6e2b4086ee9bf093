"""ps, load, unload."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_rig import Cli

from tierd.daemon.errors import ModelNotFound


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, monkeypatch, capsys)


ENGINE = {
    "model": "alpha", "pid": 7, "state": "ready", "rss_bytes": 1_500_000_000, "idle_s": 3.0, "expires_in_s": 890.0,
    "running": 2, "waiting": 0,
}  # fmt: skip


def test_ps(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["ps"] = {"engines": [ENGINE]}
        table = cli("ps").out.splitlines()
        assert cli("ps", "--json").json == {"engines": [ENGINE]}
    assert table[0].split() == ["MODEL", "STATE", "PID", "MEMORY", "RUNNING", "WAITING", "UNLOADS", "IN"]
    assert table[1].split() == ["alpha", "ready", "7", "1.5", "GB", "2", "0", "15m"]


def test_names_from_outside_cannot_move_the_cursor(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["ps"] = {"engines": [{**ENGINE, "model": "a\x1b[2J\nb"}]}
        out = cli("ps").out
    assert "\x1b" not in out and len(out.splitlines()) == 2


def test_load_shows_progress(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["load"] = {"model": "alpha", "pid": 7}
        said = cli("load", "alpha")
        assert cli("load", "alpha", "--json").json == {"model": "alpha", "pid": 7}
    shown = ["weights 0% 0 of 10", "weights 50% 5 of 10", "weights 100% 10 of 10"]
    assert said.err.splitlines() == [*shown, "alpha is ready"]


def test_load_of_an_unknown_model(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["load"] = ModelNotFound("no such model", hint="tierd list")
        said = cli("load", "alpha")
    assert said.code == 1
    assert said.err.splitlines()[-2:] == ["error: no such model", "hint: tierd list"]


def test_unload(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["unload"] = {"unloaded": ["alpha"]}
        assert "unloaded alpha" in cli("unload", "alpha").err
        assert cli("unload", "--all", "--json").json == {"unloaded": ["alpha"]}
        front.answers["unload"] = {"unloaded": []}
        assert "alpha was not loaded" in cli("unload", "alpha").err
        assert "nothing was loaded" in cli("unload", "--all").err
    one, every = {"model": "alpha"}, {"all": True}
    assert [request.args for request in front.requests] == [one, every, one, every]
