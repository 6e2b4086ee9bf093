"""The process that pulls for a client."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from tierd.daemon import pull_process
from tierd.daemon.errors import DownloadFailed
from tierd.daemon.machine import Machine
from tierd.daemon.plan.known import known_shape


@pytest.fixture
def order(tmp_path):
    return pull_process.Order("smollm2:135m", str(tmp_path / "models"), str(tmp_path / "cache"))


def said(capfd):
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_progress_is_told_but_not_every_tensor(order, monkeypatch, capfd):
    def pull(ref, models_dir, *, progress, **options):
        for done in range(1, 1001):
            progress("import", done, 1000)
        return type("Manifest", (), {"name": "smollm2-135m"})

    monkeypatch.setattr(pull_process, "pull", pull)
    assert pull_process.main(order) == 0
    lines = said(capfd)
    assert lines[0]["done"] == 1 and lines[-2]["done"] == 1000 and lines[-1] == {"name": "smollm2-135m"}
    assert len(lines) < 20


@pytest.mark.parametrize(
    ("error", "code"),
    [(DownloadFailed("no network", hint="plug it in"), "download_failed"), (ValueError("/secret"), "internal_error")],
)
def test_failures_are_a_line_without_internals(order, monkeypatch, capfd, error, code):
    def pull(*_, **options):
        raise error

    monkeypatch.setattr(pull_process, "pull", pull)
    assert pull_process.main(order) == 1
    (line,) = said(capfd)
    assert line["error"]["code"] == code and "/secret" not in str(line)


def test_a_weight_format_is_chosen_by_the_settings_of_the_daemon(order, monkeypatch, capfd):
    spec, chosen = known_shape("llama-3-8b").spec, []

    def pull(*_, choose, **options):
        chosen.append(choose(spec, "bf16", 16 * 10**9))
        return type("Manifest", (), {"name": "x"})

    monkeypatch.setattr(pull_process, "pull", pull)
    monkeypatch.setattr(pull_process, "probe_machine", lambda cache_dir: Machine(64 << 30, 64 << 30, 100 << 30))
    for weights_mem in (None, 9 * 10**9):
        settings = {"weights_mem": weights_mem, "ctx": 2048, "threads": 2}
        assert pull_process.main(msgspec.structs.replace(order, settings=settings)) == 0
    assert chosen == [None, "int8-g32"]
    _, told, _ = said(capfd)
    assert told["stage"] == "format" and "they become int8-g32" in told["text"]


def test_as_a_process(tmp_path):
    order = {"ref": "nothing-like-it", "models_dir": str(tmp_path), "cache_dir": str(tmp_path)}
    command = [sys.executable, "-m", "tierd.daemon.pull_process", json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and json.loads(done.stdout)["error"]["code"] == "bad_request" and not done.stderr
