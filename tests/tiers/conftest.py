"""Fixtures for the tests of the tiers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.pages import open_store
from tierd.tiers.store import Store


@pytest.fixture
def ram_path(tmp_path: Path) -> Iterator[Path]:
    """A directory where syncs cost nothing: for loops that look at what is written, not at the disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="tierd-test-") as directory:
        yield Path(directory)


@pytest.fixture
def store(ram_path: Path) -> Iterator[Store]:
    """A small store that must be in order when the test ends, unless it is off."""
    with open_store(ram_path / "kv") as opened:
        yield opened
        if not opened.statistics().failure:
            assert opened.check() == []
