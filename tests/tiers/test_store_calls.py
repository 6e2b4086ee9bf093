"""Every single call of a 500-page workload fails, in every way: what a store acknowledged is there, nothing is wrong.

The workload is a number of lives of one store, each with its opening, writes, rewrites, removals, touches, reads and
its end. Each run starts from the disk as it was before the life that is hit, so that 500 pages cost no more than one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.counts import counted
from tests.sim.disk import SimDisk
from tests.tiers.faults import failure
from tests.tiers.pages import NAMESPACE, key, meta, record
from tierd.tiers.errors import PageLost, TierError
from tierd.tiers.page import PageKey
from tierd.tiers.slot import SlotGeometry
from tierd.tiers.store import Store
from tierd.tiers.store_io import aligned_block

SECTIONS, SECTION_BYTES = 3, 160
RECORD_BYTES = 512  # three sections and a rest
SLOT_BYTES = SlotGeometry(RECORD_BYTES, sections=SECTIONS, section_bytes=SECTION_BYTES).slot_bytes
LIVES = 16
GROUPS, GROUP_PAGES = 2, 16  # of a life
PAGES = LIVES * GROUPS * GROUP_PAGES  # 512
CLOSERS = ("close", "sql close")

Pages = dict[int, int]  # number -> version
Read = Callable[[Store, PageKey], bytes | None]


def open_store(disk: SimDisk) -> Store:
    return Store.open(
        Path("/calls"),
        record_bytes=RECORD_BYTES,
        namespace=NAMESPACE,
        capacity_bytes=(PAGES + 64) * SLOT_BYTES,
        io=disk.as_io(),
        file_bytes=64 * SLOT_BYTES,
        step_bytes=24 * SLOT_BYTES,
        sections=SECTIONS,
        section_bytes=SECTION_BYTES,
    )


class Oracle:
    """What each page may hold after a fault: versions, and None where it may be missing."""

    def __init__(self, pages: Pages) -> None:
        self.allowed: dict[int, set[int | None]] = {number: {version} for number, version in pages.items()}

    def write(self, store: Store, pages: Pages) -> None:
        for number, version in pages.items():
            self.allowed.setdefault(number, {None}).add(version)
        store.write([(meta(number, v), record(number, v, RECORD_BYTES)) for number, v in pages.items()])
        for number, version in pages.items():
            self.allowed[number] = {version}

    def remove(self, store: Store, numbers: list[int]) -> None:
        for number in numbers:
            self.allowed[number].add(None)
        store.remove([key(number) for number in numbers])
        for number in numbers:
            self.allowed[number] = {None}

    def look(self, store: Store, number: int, read: Read) -> str:
        """Reads a page; what is wrong with it, or nothing."""
        versions = self.allowed.get(number, {None})
        found = read(store, key(number))
        if found is None:
            return "" if None in versions else f"page {number} was acknowledged and is lost"
        if any(version is not None and _bytes(number, version) == found for version in versions):
            return ""
        return f"page {number} has bytes that nobody wrote, or that were removed"

    def excuse(self, number: int) -> None:
        """Reading it met the fault: the store gives it up."""
        self.allowed.setdefault(number, {None}).add(None)

    def judge(self, store: Store, numbers: list[int]) -> list[str]:
        listed = {found.key for found in store.pages()}
        missing = [
            number for number, versions in self.allowed.items() if None not in versions and key(number) not in listed
        ]
        strange = [
            number for number, versions in self.allowed.items() if versions == {None} and key(number) in listed
        ]
        reads = [(number, read) for place, number in enumerate(numbers) for read in READS[: 1 + (place % 8 == 0)]]
        findings = store.check() + [found for number, read in reads if (found := self.look(store, number, read))]
        if missing or strange:
            findings.append(f"not listed: {missing[:5]}; listed although removed: {strange[:5]}")
        return findings


def read_whole(store: Store, page: PageKey) -> bytes | None:
    dest = np.empty(RECORD_BYTES, np.uint8)
    try:
        store.read_into(page, dest)
    except PageLost:
        return None
    return dest.tobytes()


def read_sections(store: Store, page: PageKey) -> bytes | None:
    """The sections, each read alone, and the rest of the record as a whole read says, for sections don't cover it."""
    rest, dest = read_whole(store, page), aligned_block(store.span_bytes(1))
    pieces = []
    try:
        located = store.locate(page)
        if located is None or rest is None:
            return None
        for section in range(SECTIONS):
            start = store.read_section(located, section, dest)
            pieces.append(dest[start : start + SECTION_BYTES].tobytes())
    except PageLost:
        return None
    return b"".join(pieces) + rest[SECTIONS * SECTION_BYTES :]


READS = (read_whole, read_sections)


def _bytes(number: int, version: int) -> bytes:
    return record(number, version, RECORD_BYTES).tobytes()


def numbers_of(life: int) -> list[int]:
    """The pages that a life writes, and some that earlier ones wrote."""
    first = life * GROUPS * GROUP_PAGES
    return [*range(first, first + GROUPS * GROUP_PAGES), *range(first % 100, first, 100)]


def live(disk: SimDisk, life: int, oracle: Oracle) -> None:
    """One life. Errors of the tiers are what a caller expects; anything else is a bug."""
    first = life * GROUPS * GROUP_PAGES
    with contextlib.suppress(TierError), open_store(disk) as store:
        for start in range(first, first + GROUPS * GROUP_PAGES, GROUP_PAGES):
            with contextlib.suppress(TierError):
                oracle.write(store, dict.fromkeys(range(start, start + GROUP_PAGES), life))
        with contextlib.suppress(TierError):
            oracle.write(store, {first + 2: life + 100, max(0, first - 100): life})  # rewrites
        with contextlib.suppress(TierError):
            store.touch({key(first): (life, 1.0)})
            oracle.remove(store, [first + 1])
        for number, read in ((first, read_whole), (first + 1, read_whole), (first + 2, read_sections)):
            if wrong := oracle.look(store, number, read):
                assert "nobody" not in wrong, wrong
                oracle.excuse(number)
        for action in (store.gc, store.check):
            with contextlib.suppress(TierError):
                action()


@functools.cache
def history() -> tuple[list[SimDisk], list[Pages], list[list[str]]]:
    """The disk and its pages before each life, and the names of the calls that each life makes."""
    disk, disks, pages, calls = SimDisk(random.Random(0)), [], [], []
    held: Pages = {}
    for life in range(LIVES):
        disks.append(disk.clone())
        pages.append(dict(held))
        names: list[str] = []
        disk.on_call = names.append
        oracle = Oracle(held)
        live(disk, life, oracle)
        disk.on_call = None
        calls.append(names)
        held = {number: version for number, (version,) in oracle.allowed.items() if version is not None}
    return disks, pages, calls


class Fault:
    """Call k (from 0) goes wrong, or every call from k on."""

    def __init__(self, disk: SimDisk, k: int, code: int, *, forever: bool = False, short: bool = False) -> None:
        self._disk = disk
        self._left = k
        self._code = code
        self._forever = forever
        self._short = short
        self.fired = 0

    def __call__(self, name: str) -> None:
        self._left -= 1
        hit = self._left == -1 or (self._forever and self._left < 0)
        self._disk.faults.short = float(hit and self._short)
        if not hit:
            return
        self.fired += 1
        if not self._short and name not in CLOSERS:
            raise failure(name, self._code)


KINDS: dict[str, dict[str, Any]] = {
    "io error once": {"code": errno.EIO},
    "io error for ever": {"code": errno.EIO, "forever": True},
    "no space once": {"code": errno.ENOSPC},
    "no space for ever": {"code": errno.ENOSPC, "forever": True},
    "interrupted once": {"code": errno.EINTR},
    "short once": {"code": 0, "short": True},
}
TRANSFERS_ONLY = ("interrupted once", "short once")


def run(kind: str, life: int, k: int) -> None:
    disks, pages, calls = history()
    disk = disks[life].clone()
    oracle = Oracle(pages[life])
    fault = disk.on_call = Fault(disk, k, **KINDS[kind])
    live(disk, life, oracle)
    where = f"{kind}, life {life}, call {k} ({calls[life][k]})"
    assert fault.fired, where
    disk.on_call = None
    disk.faults.short = 0.0
    assert not disk.open_files, f"{where}: {disk.open_files} files left open"
    with open_store(disk) as store:
        assert oracle.judge(store, numbers_of(life)) == [], where
        oracle.write(store, {PAGES + 1: 7})  # as good as new
        assert oracle.look(store, PAGES + 1, read_whole) == "", where
    disk.close_all()


def points(kind: str, step: int, first: int = 0) -> list[tuple[int, int]]:
    """(life, call) of every step-th call that can go wrong in this way."""
    places = [
        (life, k)
        for life, names in enumerate(history()[2])
        for k, name in enumerate(names)
        if kind not in TRANSFERS_ONLY or name in ("preadv", "pwritev")
    ]
    return places[first::step]


def test_the_workload_is_one() -> None:
    names = [name for life in history()[2] for name in life]
    assert len(names) > 2000
    assert {"pwritev", "preadv", "fdatasync", "fallocate", "sql COMMIT", "sql VACUUM", "unlink", "fsync"} <= set(names)
    assert PAGES >= 500


@pytest.mark.parametrize(("first", "kind"), list(enumerate(KINDS)))
def test_some_calls_fail(first: int, kind: str) -> None:
    for life, k in points(kind, 307, first):
        run(kind, life, k)


WHOLE = ("io error once", "no space for ever", "io error for ever", "no space once")


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("turn", range(counted(4, 1)))
def test_every_call_fails(turn: int, part: int) -> None:
    # The lives make the same calls at the same places but one or two, so that over four lives each place sees each
    # kind. With all counts each call does.
    for life, k in points("io error once", 4, part):
        run(WHOLE[(k + life + turn) % 4], life, k)


@pytest.mark.long
@pytest.mark.parametrize("kind", TRANSFERS_ONLY)
def test_every_transfer_is_cut_short(kind: str) -> None:
    for life, k in points(kind, 1):
        run(kind, life, k)


def cut(life: int, k: int, keep: float, seed: int) -> None:
    """The power goes at call k; each sector that was not synced is kept with this chance."""
    disks, pages, calls = history()
    disk = disks[life].clone()
    disk.rng.seed(seed)
    oracle = Oracle(pages[life])
    disk.calls_left = k
    with contextlib.suppress(BaseException):
        live(disk, life, oracle)
    disk.crash(keep)
    with open_store(disk) as store:
        where = f"power cut at call {k} of life {life} ({calls[life][k]}), {keep} kept, seed {seed}"
        assert oracle.judge(store, numbers_of(life)) == [], where
    disk.close_all()


KEEPS = {"kept": 1.0, "lost": 0.0, "torn": 0.5}


@pytest.mark.parametrize(("first", "keep"), list(enumerate(KEEPS)))
def test_power_cuts(first: int, keep: str) -> None:
    for life, k in points("io error once", 307, first):
        cut(life, k, KEEPS[keep], k)


@pytest.mark.long
@pytest.mark.parametrize(("first", "keep"), list(enumerate(KEEPS)))
def test_power_cut_at_every_third_call(first: int, keep: str) -> None:
    """Each call of the workload is cut once in one of the three ways."""
    for life, k in points("io error once", 3, first):
        cut(life, k, KEEPS[keep], k)


@pytest.mark.parametrize("illness", ["flip", "misdirected", "dropped"])
def test_writes_that_went_elsewhere_are_misses(illness: str) -> None:
    """The disk says that all is well: bits flip, writes land in another slot or nowhere. Never wrong bytes."""
    disks, pages, _ = history()
    disk = disks[4].clone()
    setattr(disk.faults, illness, 0.3)
    with open_store(disk) as store:
        for life in (4, 5):
            numbers = range(life * 32, life * 32 + 16)
            store.write([(meta(number, 9), record(number, 9, RECORD_BYTES)) for number in numbers])
        found = {number: read_whole(store, key(number)) for number in range(6 * 32)}
        lost = 0
        for number, content in found.items():
            right = {_bytes(number, version) for version in (pages[4].get(number, 9), 9)}
            assert content is None or content in right, f"page {number} has wrong bytes"
            lost += content is None
        assert any(illness in kind for kind in disk.fired)
        assert lost > 3
        assert store.check() == []
    disk.close_all()


def test_the_oracle_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that takes a failed sync for a success, over a power cut."""
    disks, pages, _ = history()
    disk = disks[0].clone()
    oracle = Oracle(pages[0])
    monkeypatch.setattr(SimDisk, "fdatasync", lambda *_: None)
    live(disk, 0, oracle)
    disk.crash(0.0)
    monkeypatch.undo()
    with open_store(disk) as store:
        findings = oracle.judge(store, numbers_of(0))
    assert any("acknowledged" in line or "not listed" in line for line in findings)
    disk.close_all()
