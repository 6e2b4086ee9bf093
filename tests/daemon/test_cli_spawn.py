"""A daemon in the background: real processes, no engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_rig import Cli

from tierd.daemon.cli_common import load_settings
from tierd.daemon.cli_run import started
from tierd.daemon.cli_spawn import unwritable, wait_until_gone
from tierd.daemon.errors import BadConfig


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    # The child processes are no concern of the interpreter that started them: they outlive it.
    monkeypatch.setattr("subprocess.Popen.__del__", lambda *_: None)
    cli = Cli(tmp_path, monkeypatch, capsys)
    yield cli
    status = cli("status", "--json").json
    if status["pid"]:
        os.kill(status["pid"], signal.SIGKILL)


def test_start_status_logs_stop(cli: Cli) -> None:
    said = cli("start", "--max-queue", "7")
    assert said.code == 0, said.err
    status = cli("status", "--json").json
    assert status["state"] == "idle" and f"pid {status['pid']}" in said.out
    assert cli("ps", "--json").json == {"engines": [], "exclusive": None}
    assert "listening at" in cli("logs").out
    again = cli("serve")
    assert again.code == 1 and again.err.startswith("error: "), "a second daemon is refused"
    assert cli("stop").code == 0
    assert cli("status").code == 69
    assert not cli.socket.exists()


def test_two_starts_at_once_make_one_daemon(cli: Cli) -> None:
    command = [sys.executable, "-m", "tierd.daemon.cli", "start"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [one.communicate(timeout=30)[0] for one in both]
    pid = cli("status", "--json").json["pid"]
    assert [one.returncode for one in both] == [0, 0], said
    assert all(f"pid {pid}" in text for text in said)
    assert sorted(text[:13] for text in said) == ["tierd runs al", "tierd started"]


def test_of_two_starts_at_once_with_settings_one_is_refused(cli: Cli) -> None:
    command = [sys.executable, "-m", "tierd.daemon.cli", "start"]
    both = [
        subprocess.Popen([*command, f"--max-queue={size}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for size in (7, 8)
    ]
    ended = sorted((one.wait(30), *one.communicate()) for one in both)
    assert [code for code, _, _ in ended] == [0, 1]
    assert f"pid {cli('status', '--json').json['pid']}" in ended[0][1]
    assert "a daemon runs already" in ended[1][2] and "would change nothing" in ended[1][2]


def test_a_stale_socket_is_replaced(cli: Cli) -> None:
    assert cli("start").code == 0
    pid = cli("status", "--json").json["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(cli.socket, pid, 5)
    assert cli.socket.exists()
    said = cli("ps")
    assert said.code == 69 and "left over" in said.err
    assert cli("start").code == 0
    assert cli("ps").code == 0
    assert cli("stop").code == 0


def test_what_cannot_be_kept_is_told_at_the_start(cli: Cli) -> None:
    place = Path("/dev/null/cache")
    assert unwritable(place) == Path("/dev/null") and unwritable(cli.home / "new" / "place") is None
    # Whatever becomes of such a start: a read-only mount, which no test can make, lets the daemon up.
    assert "warning: /dev/null cannot be written to: neither pages nor" in cli("start", "--cache-dir", str(place)).err


def test_a_start_that_fails_tells_why(cli: Cli) -> None:
    cli.socket.mkdir()
    said = cli("start")
    assert said.code != 0
    assert said.err.startswith("error: ") and "Traceback" not in said.err


def test_a_start_that_can_not_load_its_model_leaves_no_daemon(cli: Cli) -> None:
    said = cli("start", "--model", "nope")
    assert said.code != 0 and "the daemon is stopped again" in said.err and "nope" in said.err
    assert cli("status").code == 69
    assert cli("start").code == 0
    assert "stopped again" not in cli("start", "--model", "nope").err  # it was there before
    assert cli("status").code == 0 and cli("stop").code == 0


def test_a_daemon_started_for_a_command_with_settings_that_can_not_work_ends_with_it(cli: Cli) -> None:
    settings = load_settings({})
    with pytest.raises(BadConfig), started(settings, {}):
        assert cli("status").code == 0
        raise BadConfig("a context of 100000 tokens")
    assert cli("status").code == 69
    assert cli("start").code == 0
    with pytest.raises(BadConfig), started(settings, {}):
        raise BadConfig("a context of 100000 tokens")
    assert cli("status").code == 0 and cli("stop").code == 0


def test_where_http_listens_is_known_as_soon_as_the_socket_answers(cli: Cli) -> None:
    assert cli("start", "--listen", "127.0.0.1:0").code == 0
    assert cli("status", "--json").json["http"].startswith("http://127.0.0.1:")
    assert cli("stop").code == 0
