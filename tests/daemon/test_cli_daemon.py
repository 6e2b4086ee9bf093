"""start, stop, status against the fake front; `serve` and real processes stand in test_cli_spawn.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_rig import Cli

from tierd.daemon import cli_spawn


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, monkeypatch, capsys)


STATUS = {
    "pid": 4242, "state": "ready", "model": "alpha", "version": "0.1", "uptime_s": 300.0, "socket": "/s", "http": "",
    "tiers": {
        "device": {"total_bytes": 2_000_000_000, "used_bytes": 1_000_000, "cached_bytes": 0, "free_bytes": 5},
        "host": None,
    },
}  # fmt: skip


def test_status(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["status"] = STATUS
        assert cli("status", "--json").json == STATUS
        lines = [line.split() for line in cli("status").out.splitlines()]
    assert ["state", "ready"] in lines and ["pid", "4242"] in lines and ["model", "alpha"] in lines
    assert ["http", "off"] in lines
    assert ["device", "2.0", "GB", "1.0", "MB", "0", "B", "5", "B"] in lines
    assert ["host", "-", "-", "-", "-"] in lines


def test_status_of_a_stopped_daemon(cli: Cli) -> None:
    said = cli("status", "--json")
    assert said.code == 69
    assert said.json == {"state": "stopped", "pid": None, "model": None, "socket": str(cli.socket)}


def test_stop_waits_until_it_is_gone(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["status"] = {"pid": 0}
        assert "tierd stopped" in cli("stop", "--timeout", "3").err
        assert front.requests[-1].args == {"timeout_s": 3.0}


def test_start_of_a_running_daemon(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["load"] = {"model": "alpha"}
        said = cli("start")
        assert said.code == 0 and "runs already, pid 4242" in said.err
        assert "alpha is ready" in cli("start", "--model", "alpha").err
        said = cli("start", "--threads", "2")
    assert said.code == 1 and said.hinted and "--threads=2 would change nothing" in said.err


def test_wait_until_gone_has_a_deadline(tmp_path: Path) -> None:
    import os

    with pytest.raises(Exception, match="did not end"):
        cli_spawn.wait_until_gone(tmp_path / "s", os.getpid(), 0.1)
