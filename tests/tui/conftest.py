"""Recordings that many tests look at, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tui.rig import FakeFeed, fake_feed
from tests.tui.scenes import SCENES, record


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Scene -> file."""
    root = tmp_path_factory.mktemp("recordings")
    return {scene: record(scene, root / scene) for scene in SCENES}


@pytest.fixture
def busy_feed(recordings: dict[str, Path]) -> FakeFeed:
    """A daemon at work, as it looks after the last frame."""
    return fake_feed(recordings["busy"])
