"""Fixtures for the tests of the tiers."""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiers.pages import open_store
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers.errors import StoreError
from tierd.tiers.pager import Pager
from tierd.tiers.store import Store
from tierd.tiers.store_io import OsIO


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


@pytest.fixture
def rigs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes what the test's module calls a `Rig`, in a directory; all of them are closed when the test ends."""
    made: list[Any] = []

    def make(*args: Any, **options: Any) -> Any:
        made.append(request.module.Rig(tmp_path, *args, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def broken_books() -> None:
    """For tests that break books on purpose: nobody looks at them afterwards."""


@pytest.fixture(autouse=True)
def books_balance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every pager that a test leaves behind, and every store when it is closed, must be in order.

    Stores on a disk that the test breaks are left alone: a look would be one more call of that disk.
    """
    if "broken_books" in request.fixturenames:
        yield
        return
    pagers: weakref.WeakSet[Pager] = weakref.WeakSet()
    findings: list[str] = []
    make_pager, close_pager, close_store = Pager.__init__, Pager.close, Store.close

    def make(self: Pager, *args: object, **more: object) -> None:
        make_pager(self, *args, **more)  # type: ignore[arg-type]
        pagers.add(self)

    def end(self: Pager) -> None:
        close_pager(self)
        pagers.discard(self)  # from here on another one may change its store
        with contextlib.suppress(StoreError):  # its store is closed
            findings.extend(self.check())

    def close(self: Store) -> None:
        if isinstance(self._parts.io, OsIO) and not self._closed:
            with contextlib.suppress(StoreError):  # it is off, or somebody removed its directory
                findings.extend(self.check())
        close_store(self)

    monkeypatch.setattr(Pager, "__init__", make)
    monkeypatch.setattr(Pager, "close", end)
    monkeypatch.setattr(Store, "close", close)
    yield
    for pager in pagers:
        with contextlib.suppress(StoreError):  # its store is closed
            # Tests take pages out of a `MemoryStore` behind its pager's back.
            own = not isinstance(pager.store, MemoryStore)
            findings += [line for line in pager.check() if own or not line.startswith("the store has")]
    assert findings == []
