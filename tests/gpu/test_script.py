"""`make gpu`: its parts run on tiny sizes without a card, and without `--dry` it says that there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "gpu.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_without_a_card_it_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    result = run()
    assert result.returncode == 2 and "no card that tierd can use" in result.stderr and "Traceback" not in result.stderr


def dry(tmp_path: Path, *options: str) -> set[str]:
    """The parts that gave figures."""
    found = tmp_path / "found.json"
    result = run("--dry", "--json", str(found), "--nvme", str(tmp_path), *options)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    rows = json.loads(found.read_text())["rows"]
    assert all(row["what"] and row["value"] == row["value"] for row in rows)
    return {row["part"] for row in rows}


def test_the_parts_that_are_asked_for(tmp_path: Path) -> None:
    assert dry(tmp_path, "--only", "rates,copies") == {"rates", "copies"}


@pytest.mark.long
def test_all_parts(tmp_path: Path) -> None:
    parts = {"rates", "kernels", "attention", "matmul", "mixture", "experts", "copies", "trips", "weights", "model"}
    assert dry(tmp_path) == parts
