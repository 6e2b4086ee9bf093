"""The counters of a store, and its door for readers."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import msgspec
import pytest

from tests.tiers.pages import SLOT_BYTES, key, open_store, page, read
from tierd.tiers.store_stats import StoreTally

pytestmark = pytest.mark.usefixtures("no_files_left")


@pytest.fixture
def tally(ram_path: Path) -> StoreTally:
    with open_store(ram_path / "kv") as store:
        return StoreTally(store._slabs)


def test_figures_of_a_store(ram_path: Path) -> None:
    with open_store(ram_path / "kv") as store:
        store.write([page(1), page(2)])
        store.remove([key(2)])
        read(store, 1)
        figures = store.statistics()
    assert (figures.pages_written, figures.bytes_written, figures.bytes_read) == (2, 2 * SLOT_BYTES, SLOT_BYTES)
    assert (figures.commits, figures.lost_pages, figures.lost_by_reason, figures.failure) == (2, 0, {}, "")
    # The status sends them as they are.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(figures)) == dataclasses.asdict(figures)


def test_threads_lose_no_count(tally: StoreTally) -> None:
    def work() -> None:
        for _ in range(2000):
            assert tally.enter()
            tally.leave(3, pages=1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tally.pages_read, tally.bytes_read) == (8000, 24000)
    assert tally.close(0.0) == 0


def test_closing_waits_for_who_is_inside(tally: StoreTally) -> None:
    assert tally.enter()
    assert tally.close(0.01) == 1
    assert tally.enter()  # it stays open then
    tally.leave()
    timer = threading.Timer(0.05, tally.leave)
    timer.start()
    start_s = time.monotonic()
    assert tally.close(5.0) == 0
    assert time.monotonic() - start_s < 4
    timer.join()
    assert not tally.enter()
