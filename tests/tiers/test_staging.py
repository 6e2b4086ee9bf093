"""The staging ring: right bytes at the right addresses, whatever the order of things, or a named loss."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiers.faults import HookedIO
from tests.tiers.pages import key, meta, open_store, record
from tests.tiers.stand_ins import ManualMover
from tierd.tiers.errors import StagingLost
from tierd.tiers.links import Link
from tierd.tiers.mover import Disturbance, Job, JobClass, Mover
from tierd.tiers.staging import GROUP_PAGES, Flow, Staging
from tierd.tiers.store import Store

pytestmark = pytest.mark.usefixtures("no_files_left")

SECTIONS = 7
SECTION_BYTES = 3000  # no multiple of a block: sections start anywhere
RECORD_BYTES = 24576
FAR_S = float("inf")
PAGES = 40


def make_store(directory: Path, **changes: Any) -> Store:
    shape = {"record_bytes": RECORD_BYTES, "sections": SECTIONS, "section_bytes": SECTION_BYTES}
    store = open_store(directory / "kv", capacity_bytes=4 << 20, file_bytes=16 << 20, **shape, **changes)
    store.write([(meta(number), record(number, 0, RECORD_BYTES)) for number in range(PAGES)])
    return store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with make_store(tmp_path) as opened:
        yield opened


@pytest.fixture
def mover() -> Iterator[Mover]:
    mover = Mover(1, disk_threads=4)
    yield mover
    mover.close()


def staged(flow: Flow, addresses: np.ndarray) -> list[bytes]:
    """The bytes at the addresses, each of which must lie in the flow's memories."""
    ranges = [(part.ctypes.data, part.ctypes.data + part.nbytes) for part in flow.memories]
    for address in addresses.tolist():
        assert any(first <= address and address + SECTION_BYTES <= end for first, end in ranges)
    return [ctypes.string_at(address, SECTION_BYTES) for address in addresses.tolist()]


def wanted(numbers: list[int], section: int) -> list[bytes]:
    start = section * SECTION_BYTES
    return [record(number, 0, RECORD_BYTES)[start : start + SECTION_BYTES].tobytes() for number in numbers]


def run(staging: Staging, numbers: list[int], overlap: bool) -> None:
    """A whole flow; every byte is looked at."""
    with staging.open([key(number) for number in numbers], overlap) as flow:
        for section in range(SECTIONS):
            assert staged(flow, flow.section(section, FAR_S)) == wanted(numbers, section)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("read_bytes", [1, 2 * SECTION_BYTES, 1 << 20])
def test_sections_of_all_pages_in_order(store: Store, read_bytes: int, stages: int, overlap: bool) -> None:
    mover = Mover(1, disk_threads=3, before=Disturbance(read_bytes + stages, max_delay_s=0.001))
    staging = Staging(store, mover, SECTIONS, SECTION_BYTES, read_bytes=read_bytes, stages=stages)
    run(staging, [*range(PAGES), 3, 3], overlap)  # a page may be asked for twice
    run(staging, [5], overlap)
    run(staging, [], overlap)
    figures = staging.statistics()
    assert figures.flows == 3
    assert figures.ring_bytes == figures.peak_bytes == staging.bytes_for(PAGES + 2)
    assert figures.read_bytes == staging.num_stages * (PAGES + 3) * staging.span_bytes
    staging.release()
    assert staging.ring_bytes == 0
    mover.close()


def test_the_ring_bounds_the_memory(store: Store, mover: Mover) -> None:
    staging = Staging(store, mover, SECTIONS, SECTION_BYTES, read_bytes=SECTION_BYTES)
    assert (staging.num_stages, staging.span_bytes) == (7, 8192)
    assert staging.bytes_for(100) == 2 * 100 * 8192
    whole = Staging(store, mover, SECTIONS, SECTION_BYTES, read_bytes=1 << 20, stages=3)
    assert whole.bytes_for(1) == whole.span_bytes == store.span_bytes(SECTIONS)  # one stage needs no ring


def test_reads_run_ahead_while_the_step_computes(store: Store) -> None:
    mover = ManualMover(1)
    staging = Staging(store, mover, SECTIONS, SECTION_BYTES, read_bytes=1)
    with staging.open([key(1)]) as flow:
        assert mover.queued == 2  # sections 0 and 1: the ring is full
        flow.section(0, FAR_S)
        assert mover.queued == 0
        flow.section(1, FAR_S)  # now 0 is no longer looked at: its place takes section 2
        mover.run_all()
        assert flow._started == 3
    with staging.open([key(1)], overlap=False) as flow:
        assert mover.queued == 0
        flow.section(0, FAR_S)
        assert flow._started == 1


def test_a_section_stays_while_the_next_ones_are_read(store: Store) -> None:
    """What the step looks at is not overwritten by what is read ahead."""
    mover = ManualMover(1)
    staging = Staging(store, mover, SECTIONS, SECTION_BYTES, read_bytes=2 * SECTION_BYTES)
    with staging.open([key(1), key(2)]) as flow:
        for section in range(SECTIONS):
            addresses = flow.section(section, FAR_S)
            mover.run_all()
            assert staged(flow, addresses) == wanted([1, 2], section)


def test_every_lost_page_is_named(store: Store, mover: Mover) -> None:
    with open(store._parts.directory / "slab-00000.pages", "r+b") as file:
        for slot, at in ((4, 4096 + 100), (30, 10), (7, 4096 + 6 * SECTION_BYTES)):
            file.seek(slot * (4096 + RECORD_BYTES) + at)
            file.write(b"wrong")
    staging = Staging(store, mover, SECTIONS, SECTION_BYTES, read_bytes=1)
    numbers = [*range(PAGES), 77]
    flow = staging.open([key(number) for number in numbers])
    with pytest.raises(StagingLost) as caught:
        flow.section(0, FAR_S)
    assert caught.value.keys == (key(4), key(30), key(77))
    flow.close()
    numbers = [number for number in range(PAGES) if number not in (4, 30)]
    with staging.open([key(number) for number in numbers]) as flow:
        for section in range(6):
            assert staged(flow, flow.section(section, FAR_S)) == wanted(numbers, section)
        with pytest.raises(StagingLost, match="checksum of section 6") as caught:
            flow.section(6, FAR_S)
        assert caught.value.keys == (key(7),)
    run(staging, [number for number in numbers if number != 7], overlap=True)


def test_pages_are_looked_up_once(store: Store, mover: Mover) -> None:
    staging = Staging(store, mover, SECTIONS, SECTION_BYTES)
    run(staging, [1, 2, 3], overlap=True)
    before = store.statistics().bytes_read
    run(staging, [3, 2, 9], overlap=True)
    headers = store.statistics().bytes_read - before - staging.statistics().read_bytes // 2
    assert headers == 4096
    assert set(staging.known) == {key(3), key(2), key(9)}
    staging.release()
    assert staging.known == {}


def test_pages_that_moved_since_the_last_flow(store: Store, mover: Mover) -> None:
    """One written anew elsewhere is found again, one that is gone is lost, and no slot is blamed."""
    staging = Staging(store, mover, SECTIONS, SECTION_BYTES)
    run(staging, [1, 2, 3], overlap=True)
    store.remove([key(1), key(2)])
    store.write([(meta(number), record(number, 0, RECORD_BYTES)) for number in (50, 51, 2)])  # in their slots and a new
    run(staging, [3, 2, 50], overlap=True)
    run(staging, [2], overlap=False)
    run(staging, [1 + 2], overlap=False)
    store.remove([key(3)])
    store.write([(meta(60), record(60, 0, RECORD_BYTES))])
    with staging.open([key(2), key(3)]) as flow, pytest.raises(StagingLost) as caught:
        flow.section(0, FAR_S)
    assert caught.value.keys == (key(3),)
    assert store.statistics().quarantined_slots == 0


class SlowIO(HookedIO):
    """Reads wait until the test lets them go."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Semaphore(0)

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name in ("preadv", "preadv_batch") and not self.gate.is_set():
            self.waiting.release()
            self.gate.wait(10)
        return call(*args)


def test_what_is_late_is_named_and_closing_waits_for_it(tmp_path: Path) -> None:
    io, mover = SlowIO(), Mover(1, disk_threads=1)
    with make_store(tmp_path, io=io.as_io()) as store:
        staging = Staging(store, mover, SECTIONS, SECTION_BYTES)
        io.gate.clear()
        flow = staging.open([key(number) for number in range(PAGES)])
        assert io.waiting.acquire(timeout=5)
        with pytest.raises(StagingLost, match="not in time") as caught:
            flow.section(0, time.monotonic() + 0.02)
        assert caught.value.keys == tuple(key(number) for number in range(PAGES))
        timer = threading.Timer(0.1, io.gate.set)
        timer.start()
        flow.close()
        assert io.gate.is_set()  # it waited for the read that ran
        timer.join()
        stats = mover.statistics()[Link.DISK_READ]
        assert stats.queued == 0
        assert stats.cancelled == -(-PAGES // GROUP_PAGES) - 1 + (staging.num_stages > 1) * -(-PAGES // GROUP_PAGES)
        run(staging, [1, 2, 3], overlap=True)
        mover.close()


def test_a_deadline_that_has_passed_takes_what_is_there(store: Store, mover: Mover) -> None:
    staging = Staging(store, mover, SECTIONS, SECTION_BYTES, read_bytes=1 << 20)
    with staging.open([key(1)]) as flow:
        flow.section(0, FAR_S)
        for section in range(1, SECTIONS):
            assert staged(flow, flow.section(section, 0.0)) == wanted([1], section)


def test_staged_reads_go_before_reads_that_have_time(store: Store) -> None:
    mover, ran = ManualMover(1), []
    mover.submit(Job(lambda: ran.append("load"), Link.DISK_READ, 0), JobClass.NOW)
    staging = Staging(store, mover, SECTIONS, SECTION_BYTES, read_bytes=1 << 20)
    with staging.open([key(1)]) as flow:
        mover.run()
        assert ran == []
        flow.section(0, FAR_S)


def test_a_dead_mover_loses_the_pages(store: Store) -> None:
    mover = Mover(1, disk_threads=1)
    mover.close()
    staging = Staging(store, mover, SECTIONS, SECTION_BYTES)
    with staging.open([key(1), key(2)]) as flow, pytest.raises(StagingLost, match="closed") as caught:
        flow.section(0, FAR_S)
    assert caught.value.keys == (key(1), key(2))


def test_a_full_queue_loses_the_pages(store: Store) -> None:
    mover = ManualMover(1, capacity=1)
    staging = Staging(store, mover, SECTIONS, SECTION_BYTES, read_bytes=1)
    with staging.open([key(number) for number in range(PAGES)]) as flow, pytest.raises(StagingLost, match="full"):
        flow.section(0, FAR_S)
    assert mover.queued == 0


def test_misuse_is_refused(store: Store, mover: Mover) -> None:
    with pytest.raises(ValueError, match="the store has 7 of 3000"):
        Staging(store, mover, 6, SECTION_BYTES)
    with pytest.raises(ValueError, match="read ahead"):
        Staging(store, mover, SECTIONS, SECTION_BYTES, stages=1)
    staging = Staging(store, mover, SECTIONS, SECTION_BYTES)
    flow = staging.open([key(1)])
    with pytest.raises(ValueError, match="one flow"):
        staging.open([key(2)])
    with pytest.raises(ValueError, match="open"):
        staging.release()
    with pytest.raises(ValueError, match="0 of 7 is next"):
        flow.section(1, FAR_S)
    for section in range(SECTIONS):
        flow.section(section, FAR_S)
    with pytest.raises(ValueError, match="7 of 7"):
        flow.section(7, FAR_S)
    flow.close()
    flow.close()
    staging.release()
