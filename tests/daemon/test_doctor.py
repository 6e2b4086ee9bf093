"""Findings: what is looked at, how bad it is, and that each bad one has a remedy."""

from __future__ import annotations

import dataclasses
import os
import resource
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from front_harness import make_model, make_settings
from made_up_card import MadeUpCard

from tests.daemon.plan.scenes import MEASURED
from tierd.daemon import doctor
from tierd.daemon.card import CardError
from tierd.daemon.doctor import State
from tierd.daemon.errors import DaemonUnreachable
from tierd.daemon.machine import Machine, total_memory_bytes
from tierd.daemon.plan import rates

GB = 10**9
INFINITY = resource.RLIM_INFINITY


def test_everything_is_looked_at_and_what_is_bad_has_a_remedy(tmp_path: Path) -> None:
    found = list(doctor.examine(make_settings(tmp_path), lambda: "1.0", "1.0"))
    names = [finding.name for finding in found]
    assert names == [
        "config", "python", "cpu", "memory", "gpu", "memlock", "open files", "models", "prepared", "named models",
        "cache", "disk space", "O_DIRECT", "disk speed", "kernels", "socket", "daemon", "measured",
    ]  # fmt: skip
    assert all(finding.remedy for finding in found if finding.state in (State.WARNING, State.PROBLEM))
    assert not [finding for finding in found if finding.state is State.PROBLEM]
    assert not [path for path in tmp_path.rglob("*") if "doctor" in path.name]


@pytest.mark.parametrize(
    ("finding", "state"),
    [
        (doctor.python_finding((3, 10)), State.PROBLEM),
        (doctor.python_finding((3, 11)), State.OK),
        (doctor.cpu_finding("x86_64", frozenset({"avx2", "fma"}), 2), State.OK),
        (doctor.cpu_finding("x86_64", frozenset({"avx"}), 2), State.WARNING),
        (doctor.cpu_finding("riscv64", frozenset(), 2), State.NOTE),
        (doctor.memory_finding(Machine(24 * GB, 20 * GB, 0)), State.OK),
        (doctor.memory_finding(Machine(24 * GB, GB, 0)), State.WARNING),
        (doctor.gpu_finding(lambda: None), State.NOTE),
        (doctor.gpu_finding(lambda: "NVIDIA GeForce RTX 4090, 24564 MiB, 560.35"), State.NOTE),
        (doctor.memlock_finding(INFINITY), State.OK),
        (doctor.memlock_finding(8 << 20), State.NOTE),
        (doctor.files_finding(4096, 4096), State.OK),
        (doctor.files_finding(INFINITY, INFINITY), State.OK),
        (doctor.files_finding(4095, 65536), State.WARNING),
        (doctor.daemon_finding(lambda: None, "1"), State.NOTE),
        (doctor.daemon_finding(lambda: "1", "1"), State.OK),
        (doctor.daemon_finding(lambda: "0.9", "1"), State.WARNING),
    ],
)
def test_states(finding: doctor.Finding, state: State) -> None:
    assert finding.state is state
    assert finding.remedy or state in (State.OK, State.NOTE)


def test_a_limit_that_only_the_administrator_can_raise() -> None:
    assert "ulimit" in doctor.files_finding(1024, 4096).remedy
    assert "limits.conf" in doctor.files_finding(1024, 1024).remedy


def test_a_daemon_that_does_not_answer_is_a_problem() -> None:
    def silent() -> str:
        raise DaemonUnreachable("a daemon (pid 7) runs, but its socket is gone", hint="`kill 7` ends it")

    finding = doctor.daemon_finding(silent, "1")
    assert finding.state is State.PROBLEM and finding.remedy == "`kill 7` ends it"


def test_directories(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert doctor.directory_finding("x", tmp_path / "a" / "b").state is State.OK
    assert doctor.directory_finding("x", tmp_path / "file").state is State.PROBLEM


def test_a_directory_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert doctor.directory_finding("x", tmp_path).state is State.PROBLEM


def test_the_socket_and_who_can_reach_it(tmp_path: Path) -> None:
    assert doctor.socket_finding(tmp_path / "none" / "s").state is State.OK
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    assert doctor.socket_finding(directory / "s").state is State.OK
    directory.chmod(0o755)
    finding = doctor.socket_finding(directory / "s")
    assert finding.state is State.WARNING and finding.remedy == f"`chmod 700 {directory}`"
    (tmp_path / "link").symlink_to(directory)
    assert doctor.socket_finding(tmp_path / "link" / "s").state is State.PROBLEM
    assert doctor.socket_finding(tmp_path / ("x" * 200)).state is State.PROBLEM


def test_models_that_are_broken_are_named(tmp_path: Path) -> None:
    make_model(tmp_path, "alpha")
    assert doctor.models_finding(tmp_path).text == "alpha"
    (tmp_path / "beta").mkdir()
    (tmp_path / "beta" / "manifest.json").write_text("{")
    assert doctor.models_finding(tmp_path).state is State.WARNING
    assert doctor.models_finding(tmp_path / "none").remedy == "`tierd pull smollm2:135m`"


def test_models_that_settings_name_and_that_are_not_there_are_told(tmp_path: Path) -> None:
    make_model(tmp_path / "models", "alpha")
    settings = make_settings(tmp_path, models_dir=tmp_path / "models", default_model="alpha")
    assert list(doctor.named_findings(settings)) == []
    pinned = ("alpha", "no/where", "smollm2:135m")  # the last one is fetched when it is asked for
    settings = dataclasses.replace(settings, default_model="nope", pinned_models=pinned)
    found = list(doctor.named_findings(settings))
    assert [one.text.split(",")[0] for one in found] == ["default_model names nope", "pinned_models names no/where"]
    assert {one.state for one in found} == {State.WARNING}


@pytest.mark.parametrize(
    ("free", "asked", "state"),
    [(100 * GB, None, State.OK), (100 << 20, None, State.WARNING), (100 * GB, 0, State.NOTE), (GB, 2 * GB, State.NOTE)],
)
def test_disk_space(tmp_path: Path, free: int, asked: int | None, state: State) -> None:
    settings = make_settings(tmp_path, nvme_mem=asked)
    assert doctor.space_finding(settings, Machine(8 * GB, 8 * GB, free)).state is state


def test_a_disk_without_o_direct_and_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    states = {finding.name: finding.state for finding in doctor.disk_findings(tmp_path)}
    assert states == {"O_DIRECT": State.WARNING, "disk speed": State.OK}

    def full(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    (finding,) = doctor.disk_findings(tmp_path)
    assert finding.state is State.PROBLEM and "No space left" in finding.text
    assert list(tmp_path.iterdir()) == []


def test_measured_or_not(tmp_path: Path) -> None:
    assert doctor.measured_finding(tmp_path, 2).state is State.NOTE
    fingerprint = rates.fingerprint(tmp_path, 2, total_memory_bytes())
    import msgspec

    rates.save(tmp_path, msgspec.structs.replace(MEASURED, fingerprint=fingerprint))
    assert doctor.measured_finding(tmp_path, 2).state is State.OK
    assert doctor.measured_finding(tmp_path, 3).state is State.NOTE


def test_a_program_that_hangs_is_no_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "GPU_WAIT_S", 0.2)
    assert doctor._nvidia_smi() is None
    program.write_text("#!/bin/sh\necho 'NVIDIA GeForce RTX 4090, 24564 MiB, 560.35'\n")
    monkeypatch.setattr(doctor, "GPU_WAIT_S", 10.0)
    assert "4090" in (doctor._nvidia_smi() or "")


def test_an_address_that_another_program_has_is_found(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = make_settings(tmp_path, listen=f"127.0.0.1:{other.getsockname()[1]}")
        (taken,) = doctor.listen_findings(settings, lambda: None)
        assert taken.state is doctor.State.PROBLEM and "cannot listen" in taken.text and "--listen" in taken.remedy
        assert list(doctor.listen_findings(settings, lambda: "1.0")) == []  # a daemon has it
    (free,) = doctor.listen_findings(settings, lambda: None)
    assert free.state is doctor.State.OK
    assert list(doctor.listen_findings(make_settings(tmp_path, listen=""), lambda: None)) == []


def test_a_card_that_is_to_be_watched(tmp_path: Path) -> None:
    def refuse() -> Any:
        raise CardError("NVML: Driver Not Loaded")

    assert list(doctor.card_findings(make_settings(tmp_path))) == []
    watched = make_settings(tmp_path, yield_device_mem=GB)
    (bad,) = doctor.card_findings(watched, refuse)
    assert bad.state is State.PROBLEM and "Not Loaded" in bad.text and bad.remedy
    (good,) = doctor.card_findings(watched, lambda: MadeUpCard(dict))
    assert good.state is State.OK and "1.0 GB" in good.text


def test_a_driver_that_hangs_is_told(tmp_path: Path) -> None:
    let_go, late = threading.Event(), MadeUpCard(dict)

    def hang() -> MadeUpCard:
        let_go.wait(20)
        return late

    (bad,) = doctor.card_findings(make_settings(tmp_path, yield_device_mem=GB), hang, 0.05)
    assert bad.state is State.PROBLEM and "did not answer within 0.05 s" in bad.text
    let_go.set()
