"""The store as its callers see it: what was written comes back, or is a miss."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.pages import (
    NAMESPACE,
    RECORD_BYTES,
    SLOT_BYTES,
    holds,
    key,
    meta,
    open_store,
    page,
    read,
    record,
    verify,
)
from tierd.tiers.errors import LostReason, PageLost, StoreBroken, StoreFull, StoreLocked
from tierd.tiers.page import PageKey
from tierd.tiers.store import PageMeta, Store
from tierd.tiers.store_io import aligned_block

pytestmark = pytest.mark.usefixtures("no_files_left")


def test_pages_come_back_after_reopening(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store:
        store.write([page(number) for number in range(10)])
        store.write([])
        assert all(holds(store, number) for number in range(10))
    with open_store(tmp_path / "kv") as store:
        assert store.notes in ([], [note for note in store.notes if "O_DIRECT" in note])
        assert sorted(store.pages(), key=lambda found: found.hits) == [meta(number) for number in range(10)]
        assert all(holds(store, number) for number in range(10))
        assert not holds(store, 10)
        assert verify(store, repair=False) == []
        assert (store.capacity_slots, store.free_slots) == (32, 22)
        figures = store.statistics()
        assert (figures.pages_read, figures.bytes_read) == (10, 10 * SLOT_BYTES)
        assert figures.used_slots == 10
    names = sorted(name for name in os.listdir(tmp_path / "kv"))
    assert names == ["index.sqlite", "lock", "slab-00000.pages", "slab-00001.pages"]
    for name in names:
        assert stat.S_IMODE((tmp_path / "kv" / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("record_bytes", [1, 100, 4096, 5000])
def test_records_of_any_size_and_alignment(tmp_path: Path, record_bytes: int) -> None:
    with open_store(tmp_path / "kv", record_bytes=record_bytes, capacity_bytes=1 << 20) as store:
        wanted = record(1, 0, record_bytes)
        shifted = aligned_block(8192)[1 : 1 + record_bytes]
        shifted[:] = wanted
        store.write([(meta(1), wanted), (meta(2), shifted), (meta(3), memoryview(wanted.tobytes()))])
        for number in (1, 2, 3):
            assert read(store, number, record_bytes) == wanted.tobytes()
            unaligned = aligned_block(8192)[1 : 1 + record_bytes]
            store.read_into(key(number), unaligned)
            assert unaligned.tobytes() == wanted.tobytes()


def test_rewriting_replaces(store: Store) -> None:
    store.write([page(1), page(2)])
    store.write([page(1, 5)])
    assert read(store, 1) == record(1, 5).tobytes()
    assert sorted(found.hits for found in store.pages()) == [0, 5]
    assert store.free_slots == 30


def test_removing_and_touching(store: Store) -> None:
    store.write([page(number) for number in range(4)])
    store.remove([key(1), key(99)])
    assert [holds(store, number) for number in range(4)] == [True, False, True, True]
    store.touch({key(2): (9, 12.5), key(98): (1, 1.0)})
    assert {(found.hits, found.last_use_s) for found in store.pages()} == {(0, 0.0), (9, 12.5)}


def test_clock_that_is_set_back(tmp_path: Path) -> None:
    """Times are the caller's, and only stored: an earlier one is as good, and no write is taken for an older one."""
    future = PageMeta(key(1), key(0), (1, 2), 3, 4e9)
    with open_store(tmp_path / "kv") as store:
        store.write([(future, record(1))])
        store.touch({key(1): (4, -5.0)})
        store.write([page(2)])
        assert {(found.key, found.last_use_s) for found in store.pages()} == {(key(1), -5.0), (key(2), 0.0)}
        assert holds(store, 1)
    os.utime(tmp_path / "kv" / "slab-00000.pages", (0, 0))
    os.utime(tmp_path / "kv" / "index.sqlite", (0, 0))
    with open_store(tmp_path / "kv") as store:
        store.write([(future, record(1, 7))])
        assert holds(store, 1, 7)
        assert holds(store, 2)
        assert store.check() == []


def test_full_store_keeps_what_it_has(store: Store) -> None:
    store.write([page(number) for number in range(31)])
    with pytest.raises(StoreFull):
        store.write([page(40), page(41)])
    assert not holds(store, 40)
    assert all(holds(store, number) for number in range(31))
    store.write([page(40)])
    store.remove([key(0)])
    store.write([page(41)])
    assert store.free_slots == 0
    with open_store(store._parts.directory.parent / "none", capacity_bytes=100) as empty, pytest.raises(StoreFull):
        empty.write([page(1)])


@pytest.mark.parametrize(
    "bad",
    [
        (PageMeta(PageKey(b"short"), key(0), (1,), 0, 0.0), record(1)),
        (PageMeta(key(1), PageKey(b""), (1,), 0, 0.0), record(1)),
        (PageMeta(key(1), key(0), (), 0, 0.0), record(1)),
        (PageMeta(key(1), key(0), (1,) * 1025, 0, 0.0), record(1)),
        (PageMeta(key(1), key(0), (-1,), 0, 0.0), record(1)),
        (PageMeta(key(1), key(0), (1 << 32,), 0, 0.0), record(1)),
        (PageMeta(key(1), key(0), (1,), -1, 0.0), record(1)),
        (PageMeta(key(1), key(0), (1,), 0, float("nan")), record(1)),
        (meta(1), record(1)[:-1]),
        (meta(1), record(1)[::2]),
        (meta(2), record(2)),  # twice
    ],
)
def test_pages_that_are_none_are_refused(store: Store, bad: tuple[PageMeta, np.ndarray]) -> None:
    with pytest.raises(ValueError):
        store.write([page(2), bad])
    assert not holds(store, 2)
    for dest in (aligned_block(RECORD_BYTES - 1), record(1).reshape(2, -1), aligned_block(2 * RECORD_BYTES)[::2]):
        with pytest.raises(ValueError, match="dest"):
            store.read_into(key(2), dest)


def test_clear_and_gc_give_the_disk_back(store: Store) -> None:
    store.write([page(number) for number in range(20)])
    store.remove([key(number) for number in range(10, 20)])
    before = store.statistics().disk_bytes
    assert store.gc() == before - 10 * SLOT_BYTES
    assert store.gc() == 0
    assert all(holds(store, number) for number in range(10))
    needle = b"".join(token.to_bytes(4, "little") for token in meta(7).tokens)
    store.clear()
    assert store.statistics().disk_bytes == 0
    assert list(store.pages()) == []
    for name in os.listdir(store._parts.directory):
        assert needle not in (store._parts.directory / name).read_bytes(), name
    store.write([page(3)])
    assert holds(store, 3)


@pytest.mark.parametrize(
    "changes",
    [{"namespace": b"another model 1x"}, {"record_bytes": 4096}, {"file_bytes": 4 * SLOT_BYTES}],
)
def test_store_of_another_kind_is_set_aside(ram_path: Path, changes: dict[str, int]) -> None:
    for _ in range(2):
        with open_store(ram_path / "kv") as store:
            store.write([page(1)])
        with open_store(ram_path / "kv", **changes) as store:
            assert any("another" in note for note in store.notes)
            assert list(store.pages()) == []
    assert sorted(os.listdir(ram_path / "kv")) == ["index.sqlite", "index.sqlite.aside", "lock"]
    with open_store(ram_path / "kv") as store:
        store.gc()
    assert "index.sqlite.aside" not in os.listdir(ram_path / "kv")


def test_capacity_changes_between_openings(ram_path: Path) -> None:
    with open_store(ram_path / "kv") as store:
        store.write([page(number) for number in range(20)])
    with open_store(ram_path / "kv", capacity_bytes=10 * SLOT_BYTES) as store:
        assert [holds(store, number) for number in range(20)] == [True] * 10 + [False] * 10
        assert store.free_slots == 0
        assert store.check() == []
    with open_store(ram_path / "kv", capacity_bytes=100 * SLOT_BYTES) as store:
        store.write([page(number) for number in range(20, 110)])
        assert all(holds(store, number) for number in [*range(10), *range(20, 110)])
        assert store.check() == []


def test_second_owner_is_refused(store: Store) -> None:
    with pytest.raises(StoreLocked) as caught:
        open_store(store._parts.directory)
    assert caught.value.pid == os.getpid()


def test_closed_store(ram_path: Path) -> None:
    store = open_store(ram_path / "kv")
    store.write([page(1)])
    store.close()
    store.close()
    assert isinstance(lost := read(store, 1), PageLost)
    assert lost.reason is LostReason.STORE_OFF
    with pytest.raises(StoreBroken, match="closed"):
        store.write([page(1)])


@pytest.mark.parametrize("change", ["remove", "rewrite"])
def test_page_that_changes_under_a_read(store: Store, change: str) -> None:
    """The row was looked up, then the owner removes or rewrites the page and reuses its slot, then the read happens."""
    store.write([page(1)])
    lookup = store._index.lookup
    turns: list[Callable[[], None]] = [
        lambda: store.remove([key(1)]) if change == "remove" else store.write([page(1, 1)]),
    ]

    def lookup_and_change(wanted: bytes) -> object:
        row = lookup(wanted)
        if turns:
            turns.pop()()
            store.write([page(number) for number in range(10, 20)])  # one of them in the slot that became free
        return row

    store._index.lookup = lookup_and_change  # type: ignore[method-assign,assignment]
    found = read(store, 1)
    if change == "remove":
        assert isinstance(found, PageLost)
        assert found.reason is LostReason.ABSENT
    else:
        assert found == record(1, 1).tobytes()
    assert store.statistics().quarantined_slots == 0
    assert all(holds(store, number) for number in range(10, 20))


def test_page_that_is_rewritten_under_every_look(store: Store) -> None:
    """However often the owner rewrites it, a stored page is no miss."""
    store.write([page(1)])
    lookup = store._index.lookup
    writers: list[threading.Thread] = []

    def rewrite() -> None:
        store.write([page(1, 1)])
        store.write([page(number) for number in range(10, 20)])

    def lookup_and_rewrite(wanted: bytes) -> object:
        row = lookup(wanted)
        writers.append(threading.Thread(target=rewrite))
        writers[-1].start()
        writers[-1].join(0.5)  # the last one has to wait for us
        return row

    store._index.lookup = lookup_and_rewrite  # type: ignore[method-assign,assignment]
    assert read(store, 1) == record(1, 1).tobytes()
    assert len(writers) == 2
    for writer in writers:
        writer.join()


def test_reads_in_threads_while_the_owner_writes(store: Store) -> None:
    store.write([page(number) for number in range(8)])
    stop = threading.Event()
    wrong: list[str] = []

    def reader(seed: int) -> None:
        rng = np.random.default_rng(seed)
        wanted = {(n, v): record(n, v).tobytes() for n in range(16) for v in range(2)}
        while not stop.is_set():
            number = int(rng.integers(16))
            found = read(store, number)
            if isinstance(found, bytes) and found not in (wanted[number, 0], wanted[number, 1]):
                wrong.append(f"page {number}")
            elif isinstance(found, PageLost) and (number < 8 or found.reason is not LostReason.ABSENT):
                wrong.append(f"page {number}: {found}")

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(60):
        store.write([page(number, turn % 2) for number in range(4)])
        store.write([page(number) for number in range(8, 16)])
        store.remove([key(number) for number in range(8, 16)])
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.statistics().quarantined_slots == 0


def test_store_needs_no_torch_and_starts_fast() -> None:
    code = (
        "import sys, time, sqlite3, numpy; start = time.perf_counter(); import tierd.tiers.store;"
        "took = time.perf_counter() - start;"
        "assert not {'torch', 'transformers', 'numba'} & set(sys.modules); assert took < 1.0, took"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_bad_arguments(tmp_path: Path) -> None:
    for changes, told in (
        ({"namespace": NAMESPACE[:15]}, "16 bytes"),
        ({"record_bytes": 0}, "record of 0"),
        ({"sections": 3, "section_bytes": 4096}, "no parts"),
        ({"sections": 2}, "no parts"),
        ({"sections": 0, "section_bytes": 1}, "no parts"),
    ):
        with pytest.raises(ValueError, match=told):
            open_store(tmp_path / "kv", **changes)
    assert not (tmp_path / "kv").exists()
