"""The systemd unit as text."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tierd.daemon.errors import TABLE, BadConfig, PermissionDenied
from tierd.daemon.service_unit import FINAL_EXIT_CODES, WATCHDOG_S, unit_text


def fields(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            found.setdefault(line.partition("=")[0], []).append(line.partition("=")[2])
    return found


def test_what_systemd_has_to_know() -> None:
    unit = fields(unit_text(["/usr/bin/python3", "-m", "tierd.daemon.cli", "serve"], {}))
    assert unit["Type"] == ["notify"] and unit["WatchdogSec"] == [str(WATCHDOG_S)]
    assert unit["KillMode"] == ["mixed"]  # else engines would be killed before they have flushed
    assert unit["ExecStart"] == ["/usr/bin/python3 -m tierd.daemon.cli serve"]
    assert unit["Restart"] == ["on-failure"] and "Environment" not in unit
    assert {TABLE[BadConfig].exit_code, TABLE[PermissionDenied].exit_code} <= set(FINAL_EXIT_CODES)


def test_words_that_systemd_would_read_otherwise() -> None:
    command = ["/py thon", "a%n", "$HOME", 'q"u', "b\\s", "", "x;y"]
    unit = fields(unit_text(command, {"TIERD_X": "100% of $it", "A": "b"}))
    assert unit["ExecStart"] == ['"/py thon" a%%n $$HOME "q\\"u" "b\\\\s" "" "x;y"']
    assert unit["Environment"] == ["A=b", '"TIERD_X=100%% of $it"']


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    unit = tmp_path / "tierd.service"
    unit.write_text(unit_text([sys.executable, "-m", "tierd.daemon.cli", "serve", "--ctx=8k"], {"TIERD_CTX": "8 k"}))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if "tierd" in line]
    assert complaints == []
