"""`tierd batch --exclusive` with a real model: streamed weights, killed in the middle, the same answers as ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_home import Home
from tierd.clients.blocking import Client
from tierd.daemon.errors import Reserved
from tierd.daemon.protocol import Sampling, Submit

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(900)]

MODEL = "smollm2:135m"
REQUESTS = 24


@pytest.fixture
def home(tmp_path: Path, models_dir: Path) -> Iterator[Home]:
    """A daemon whose weights are all read from the disk."""
    daemon = Home(tmp_path, models_dir, device_mem="256MiB", host_mem="0", nvme_mem="0", weights_mem="24MiB")
    lines = []
    for number in range(REQUESTS):
        body = {"model": MODEL, "prompt": f"Count from {number}:", "max_tokens": 12, "temperature": 0.0}
        lines.append({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    daemon.start("--model", MODEL)
    yield daemon
    daemon.close()


def texts(path: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
    assert len(found) == len(lines)
    return found


def alone(home: Home, target: Path) -> list[str]:
    return [sys.executable, "-m", "tierd.daemon.cli", "batch", str(home.root / "in.jsonl"), "-o", str(target),
            "--exclusive", "--concurrency", "4"]  # fmt: skip


def until(condition: Any, deadline_s: float = 300.0) -> None:
    limit_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < limit_s, "it never came true"
        time.sleep(0.02)


def test_killed_it_gives_the_machine_back_and_goes_on(home: Home) -> None:
    usual, target = home.root / "usual.jsonl", home.root / "out.jsonl"
    home.command("batch", str(home.root / "in.jsonl"), "-o", str(usual))
    assert home.status()["engines"][0]["weights"]["pass_bytes"] > 0  # they are streamed
    process = subprocess.Popen(alone(home, target), env=home.environment, stderr=subprocess.PIPE, text=True)
    until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 4)
    (engine,) = home.status()["engines"]
    assert home.status()["exclusive"]["streams"] == 4 and engine["running"] <= 4
    with Client(home.socket) as client, pytest.raises(Reserved):
        list(client.generate(Submit(model=MODEL, prompt="x", sampling=Sampling(max_tokens=1))))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    until(lambda: home.status()["exclusive"] is None)
    kept = target.read_bytes()
    home.generate(Submit(model=MODEL, prompt="x", sampling=Sampling(max_tokens=1)))  # served as usual again
    done = subprocess.run(alone(home, target), env=home.environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "there already" in done.stdout, done.stderr
    assert target.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    assert texts(target) == texts(usual) and len(texts(target)) == REQUESTS
