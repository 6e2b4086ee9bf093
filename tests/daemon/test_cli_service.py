"""service install, status, uninstall, with a systemctl that writes down what it is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_rig import Cli

from tierd.daemon.service_unit import NAME

FAKE = """#!/bin/sh
echo "$*" >> "$FAKE_LOG"
case "$3" in
  show) printf 'MainPID=0\\nActiveState=active\\nSubState=running\\nUnitFileState=enabled\\nNRestarts=2\\n' ;;
  "$FAKE_FAIL") echo "Job for tierd.service failed." >&2; exit 1 ;;
esac
"""


class Systemd:
    """What was asked of systemctl."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = tmp_path / "systemctl.log"
        self.unit = tmp_path / "config" / "systemd" / "user" / NAME
        program = tmp_path / "bin" / "systemctl"
        program.parent.mkdir()
        program.write_text(FAKE)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        monkeypatch.setenv("FAKE_LOG", str(self.log))
        monkeypatch.setenv("FAKE_FAIL", "none")

    @property
    def verbs(self) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [" ".join(line.split()[2:]) for line in lines if line.split()[2] not in ("show-environment", "show")]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, monkeypatch, capsys)


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    return Systemd(tmp_path, monkeypatch)


def test_the_service_finds_what_this_shells_commands_find(
    cli: Cli, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert "Environment=XDG_DATA_HOME=/data" in cli("service", "install", "--print").out


def test_install_status_uninstall(cli: Cli, systemd: Systemd) -> None:
    said = cli("service", "install", "--ctx", "8k")
    assert said.code == 0 and "enable-linger" in said.err
    assert systemd.verbs == ["daemon-reload", f"enable {NAME}", f"restart {NAME}"]
    unit = systemd.unit.read_text()
    assert "serve --ctx=8k" in unit and f"Environment=TIERD_CACHE_DIR={cli.home}/cache" in unit
    assert cli("service", "status", "--json").json["NRestarts"] == "2"
    assert "ActiveState    active" in cli("service", "status").out
    assert cli("service", "uninstall").code == 0
    assert systemd.verbs[-2:] == [f"disable --now {NAME}", "daemon-reload"] and not systemd.unit.exists()
    assert cli("service", "status").hinted


def test_without_systemd_the_unit_is_printed_and_nothing_installed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cli.home / "nothing"))
    said = cli("service", "install")
    assert said.code == 1 and said.hinted and "no systemd" in said.err and "[Service]" in said.out
    assert not (cli.home / "config" / "systemd").exists()
    for verb in ("status", "uninstall"):
        assert cli("service", verb).hinted


def test_without_a_user_manager_nothing_is_installed(
    cli: Cli, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAIL", "show-environment")
    said = cli("service", "install")
    assert said.code == 1 and "does not answer" in said.err and "[Service]" in said.out
    assert not systemd.unit.exists() and systemd.verbs == []


def test_print_changes_nothing(cli: Cli, systemd: Systemd) -> None:
    said = cli("service", "install", "--print", "--cache-dir", "here")
    assert said.code == 0 and f"--cache-dir={Path.cwd()}/here" in said.out  # a service starts somewhere else
    assert not systemd.log.exists() and not systemd.unit.exists()


def test_a_start_with_the_next_login(cli: Cli, systemd: Systemd) -> None:
    assert cli("service", "install", "--no-start").code == 0
    assert systemd.verbs == ["daemon-reload", f"enable {NAME}"]


def test_what_systemd_refuses_is_told(cli: Cli, systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAIL", "restart")
    said = cli("service", "install")
    assert said.code == 1 and said.err.splitlines()[-2] == (
        f"error: systemctl --user restart {NAME}: Job for tierd.service failed."
    )
    assert "journalctl" in said.err


def test_settings_that_can_not_work_are_not_installed(cli: Cli, systemd: Systemd) -> None:
    said = cli("service", "install", "--listen", "0.0.0.0:1")
    assert said.code == 78 and not systemd.unit.exists() and systemd.verbs == []


def test_a_secret_is_not_written_into_the_unit(
    cli: Cli, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERD_API_KEY", "geheim")
    said = cli("service", "install")
    assert said.code == 0 and "TIERD_API_KEY is not written" in said.err
    assert "geheim" not in systemd.unit.read_text()


@pytest.mark.parametrize("more", [[], ["--print"], ["--no-start"]], ids=str)
def test_a_key_from_a_flag_is_refused_and_not_left_out(cli: Cli, systemd: Systemd, more: list[str]) -> None:
    said = cli("service", "install", "--api-key", "geheim", *more)
    assert said.code == 2 and "--api-key is not written into a unit" in said.err and "tierd key add" in said.err
    assert "geheim" not in said.out + said.err and not systemd.unit.exists() and systemd.verbs == []


def test_a_daemon_that_runs_by_itself_is_in_the_way(
    cli: Cli, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierd.daemon.cli_service.lock_holder", lambda socket: 4711)
    said = cli("service", "install")
    assert said.code == 1 and "4711" in said.err and "tierd stop" in said.err and not systemd.unit.exists()
    assert cli("service", "install", "--no-start").code == 0


def test_json_is_json(cli: Cli, systemd: Systemd) -> None:
    cli("service", "install")
    assert json.loads(cli("service", "status", "--json").out)["unit"] == str(systemd.unit)
