"""The document that the daemon serves, held against the daemon: whatever it allows or forbids is sent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sdk_daemon import Served, served

from tests.counts import counted

RUN = Path(__file__).resolve().parents[1] / "run_schemathesis.py"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served(tmp_path_factory.mktemp("daemon"), log="ERROR")


def findings(daemon: Served, phases: str, examples: int) -> tuple[Counter[str], dict[str, str]]:
    """How often which status came, and one example of each kind of finding."""
    command = [sys.executable, str(RUN), daemon.url, phases, str(examples)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout)
    return Counter(told["seen"]), told["found"]


def test_each_operation_once(daemon: Served) -> None:
    seen, found = findings(daemon, "fuzzing", 1)
    assert not found, found
    assert seen["200"] and seen["400"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_kind_of_value(daemon: Served) -> None:
    seen, found = findings(daemon, "examples,coverage,fuzzing", counted(200, 10))
    assert not found, found
    assert seen["200"] > 100 and seen["400"] > 500
    assert daemon.live() == 0
