"""SIGKILL in the middle of a pull that quantizes: nothing half is shown, and the same pull makes the same model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.counts import counted
from tierd.daemon.models import catalog
from tierd.daemon.models.digests import verify
from tierd.daemon.models.pull import pull

# Tells each step of a pull and waits for a word before it goes on.
CHILD = """
import sys
from pathlib import Path
from tierd.daemon.models.pull import pull

def step(stage, done, total):
    print(stage, done, total, flush=True)
    sys.stdin.readline()

source, models_dir = sys.argv[1:]
pull(source, Path(models_dir), name="m", weights="int4-g32", progress=step, cache_dir=Path(models_dir) / "../cache",
     force=True)
"""


def killed_after(steps: int, source: Path, models_dir: Path) -> str:
    """Pulls in a process that is killed at its nth step; that step, empty when it ended before."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(source), str(models_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as child:  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        said = ""
        for number in range(steps):
            said = child.stdout.readline()
            if number < steps - 1 and said:
                child.stdin.write("\n")
                child.stdin.flush()
        child.kill()
    return said


@pytest.mark.parametrize("steps", counted(range(1, 40), [2, 8]))
def test_the_same_pull_goes_on_after_a_kill(tmp_path: Path, make_gguf, quiet, steps: int) -> None:
    make_gguf(tmp_path / "m.gguf")
    models_dir = tmp_path / "models"
    wanted = pull(str(tmp_path / "m.gguf"), tmp_path / "whole", name="m", weights="int4-g32", progress=quiet)
    old = pull(str(tmp_path / "m.gguf"), models_dir, name="m", progress=quiet)  # as it is, until the new one is whole
    reached = killed_after(steps, tmp_path / "m.gguf", models_dir)
    found = catalog.find(models_dir, "m")[1]
    assert found.digest in (old.digest, wanted.digest) and [m.name for m in catalog.list_models(models_dir)] == ["m"]
    assert not reached.startswith("import") or found == old, reached
    assert verify(models_dir / "m", found, quiet) == []
    again = pull(str(tmp_path / "m.gguf"), models_dir, name="m", weights="int4-g32", progress=quiet)
    assert again.digest == wanted.digest and verify(models_dir / "m", again, quiet) == []
    assert sorted(path.name for path in models_dir.iterdir()) == [".lock", "m"]
