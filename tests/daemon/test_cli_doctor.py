"""tierd doctor."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from cli_rig import Cli

from tests.daemon.plan.scenes import MEASURED
from tierd.daemon import cli_doctor, doctor
from tierd.daemon.plan import rates


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    return Cli(tmp_path, monkeypatch, capsys)


def test_findings_for_people_and_for_programs(cli):
    said = cli("doctor")
    assert said.code == 0 and "python" in said.out and "`tierd start`" in said.out
    found = cli("doctor", "--json").json["findings"]
    assert {"name": "daemon", "state": "note", "text": "none runs", "remedy": "`tierd start`"} in found


def test_a_broken_config_file_is_a_finding_and_the_rest_goes_on(cli):
    file = cli.home / "config" / "tierd" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("max_queu = 3\n")
    said = cli("doctor", "--json")
    assert said.code == 1
    first, *others = said.json["findings"]
    assert (first["name"], first["state"]) == ("config", "problem") and str(file) in first["text"] and first["remedy"]
    assert {"python", "daemon"} <= {finding["name"] for finding in others}


def test_a_problem_ends_with_1(cli, monkeypatch):
    bad = doctor.Finding("disk", doctor.State.PROBLEM, "it burns", "buy another")
    monkeypatch.setattr(doctor, "examine", lambda *_: iter([bad]))
    said = cli("doctor")
    assert said.code == 1 and "it burns" in said.out and "buy another" in said.out
    assert cli("doctor", "--json").code == 1


def test_measuring_keeps_what_a_process_found(cli, monkeypatch):
    asked: list[Any] = []
    printing = "import sys; sys.stdin.buffer.read(); sys.stdout.buffer.write(bytes.fromhex(sys.argv[1]))"
    popen = subprocess.Popen

    def start(command: list[str], **pipes: Any) -> Any:
        asked.append(command)
        return popen([sys.executable, "-c", printing, msgspec.json.encode(MEASURED).hex()], **pipes)

    monkeypatch.setattr(cli_doctor.subprocess, "Popen", start)
    said = cli("doctor", "--measure")
    assert said.code == 0 and "20.0 GB/s" in said.out and rates.FILE_NAME in said.err
    assert asked == [[sys.executable, "-m", "tierd.daemon.engine.measure"]]
    assert rates.load(cli.home / "cache", MEASURED.fingerprint) == MEASURED
    assert cli("doctor", "--measure", "--json").json["memory_bytes_per_s"] == 20e9


def test_measuring_that_fails_keeps_nothing(cli, monkeypatch):
    popen = subprocess.Popen
    monkeypatch.setattr(
        cli_doctor.subprocess, "Popen", lambda command, **pipes: popen([sys.executable, "-c", "exit(3)"], **pipes)
    )
    assert cli("doctor", "--measure").hinted
    assert not (cli.home / "cache" / rates.FILE_NAME).exists()


def test_a_model_that_is_not_there(cli):
    said = cli("doctor", "--measure", "--model", "absent")
    assert said.hinted and "absent" in said.err
