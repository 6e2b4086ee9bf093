"""A front with fake engines; what the fixtures are made of stands in `front_harness`."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The import mode of the suite puts no test directory on the path, and the helpers are no package.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from front_harness import Daemon, Front, make_model, make_settings, running
from memory_rig import GB

from tierd.daemon.machine import Machine


@pytest.fixture
def fake_models(tmp_path: Path) -> Path:
    """A models directory with `alpha` and `beta`."""
    for name in ("alpha", "beta"):
        make_model(tmp_path / "models", name)
    return tmp_path / "models"


@pytest.fixture
def machine() -> Machine:
    """16 GB: device 4, host 2.4, and 8 for weights."""
    return Machine(16 * GB, 16 * GB, 100 * GB)


@pytest.fixture
async def front(fake_models: Path, tmp_path: Path) -> AsyncIterator[Front]:
    async with running(make_settings(tmp_path)) as front:
        yield front


@pytest.fixture
def daemon(fake_models: Path, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons; ends them with the test."""
    started: list[Daemon] = []

    def start(**changes: Any) -> Daemon:
        started.append(Daemon(tmp_path, **changes))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGKILL)
        one.process.communicate()


