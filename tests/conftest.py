"""Fixtures for every test: leak checks by default, and the real default model for those that ask for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierd.kernels.cpu.cache import cache_directory

REPOSITORY = Path(__file__).resolve().parent.parent
# Before anything imports numba: compiled kernels are shared by all test runs, and by the daemons that tests start.
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_directory(REPOSITORY / ".cache" / "numba")))

MODEL = "smollm2-135m"
LONGEST = ("test_apart", "test_apart_long")  # minutes, in a process of their own
# The first process starts with these, the second one with the kernels: it has compiled them when others need them.
WITHOUT_KERNELS, KERNELS = ("test_layers.py", "clients", "sim"), "kernels"
GRACE_S = 2.0  # threads that were told to stop get this long to be gone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: of several processes none is left alone with one of them at the end. Nor do all of them wait
    for the kernels to be compiled at once."""

    def place(item: pytest.Item) -> int:
        room = item.path.relative_to(REPOSITORY / "tests").parts[0]
        if item.name in LONGEST:
            return 0
        return 1 if room in WITHOUT_KERNELS else 2 if room == KERNELS else 3

    items.sort(key=place)


def open_files() -> set[str]:
    """Files, sockets and pipes this process holds, by what they point to."""
    held: set[str] = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            held.add(f"{entry} -> {os.readlink(f'/proc/self/fd/{entry}')}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return held


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Every thread a test starts must be gone when it ends."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + GRACE_S
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        for thread in left:
            thread.join(0.05)
    # A default executor of asyncio.to_thread lives as long as its loop; pytest-asyncio closes it after this fixture.
    left = {thread for thread in left if not thread.name.startswith("asyncio_")}
    assert not left, f"threads left: {sorted(thread.name for thread in left)}"


@pytest.fixture
def no_files_left() -> Iterator[None]:
    """For tests that open files or sockets: the same descriptors afterwards as before."""
    before = open_files()
    yield
    left = open_files() - before
    assert not left, f"descriptors left: {sorted(left)}"


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """Directory with the default model prepared; fetched once when it is not there."""
    root = Path(os.environ.get("TIERD_TEST_MODELS", REPOSITORY / ".cache" / "test-models"))
    if not (root / MODEL / "manifest.json").exists():
        from tierd.daemon.models.pull import pull

        pull("smollm2:135m", root, progress=lambda _stage, _done, _total: None)
    return root


@pytest.fixture(scope="session")
def model_dir(models_dir: Path) -> Path:
    """The prepared SmolLM2-135M-Instruct."""
    return models_dir / MODEL
