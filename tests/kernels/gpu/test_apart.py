"""The tests of this directory in a process of their own, for where Triton is imported already (see conftest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).parent


def run_apart(marks: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marks, str(DIRECTORY)]
    result = subprocess.run(
        command, env=environment, cwd=DIRECTORY.parents[2], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


@pytest.mark.timeout(600)
def test_apart() -> None:
    run_apart("not long")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_apart_long() -> None:
    run_apart("long")
