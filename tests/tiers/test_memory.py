"""Blocks of memory, and a pager under which they run out."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.fakes import PAGE_TOKENS, RECORD_BYTES, Rig, open_store
from tierd.tiers import memory
from tierd.tiers.arena import Arena
from tierd.tiers.errors import TierError

SEQUENCES = [[number * 1000 + place for place in range(6 * PAGE_TOKENS + number)] for number in range(5)]


class Scarce:
    """`memory.block`, of which call k fails, or every one from k on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.fails: range | None = None
        self._real = memory.block
        monkeypatch.setattr(memory, "block", self)

    def __call__(self, size_bytes: int, *, reserve: bool = False, large_pages: bool = False) -> mmap.mmap:
        self.calls += 1
        if self.fails is not None and self.calls - 1 in self.fails:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return self._real(size_bytes, reserve=reserve, large_pages=large_pages)


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> Scarce:
    return Scarce(monkeypatch)


def workload(directory: Path, scarce: Scarce, fails: range) -> int:
    """Serves more than memory holds, with blocks that fail; how many were asked for. What comes back is right."""
    scarce.fails = None
    rig = Rig(device=8, host=4, store=open_store(directory, RECORD_BYTES, capacity=16))
    scarce.calls, scarce.fails = 0, fails
    try:
        for tokens in [*SEQUENCES, *SEQUENCES]:
            rig.serve(tokens)
            rig.settle()
        asked = scarce.calls
        scarce.fails = None
        for tokens in SEQUENCES:
            rig.serve(tokens)
        rig.settle()
        rig.check()
    finally:
        rig.close()
        assert rig.store is not None
        rig.store.close()
    return asked


def test_a_block_is_zeroed_and_on_a_page_boundary() -> None:
    found = np.frombuffer(memory.block(3 * mmap.PAGESIZE, large_pages=True), np.uint8)
    assert not found.any()
    assert int(found.ctypes.data) % mmap.PAGESIZE == 0


def test_more_than_an_address_holds_is_told_as_no_memory() -> None:
    with pytest.raises(OSError) as caught:
        memory.block(1 << 80)
    assert caught.value.errno == errno.ENOMEM


def test_an_arena_that_cannot_reserve_room_to_grow_takes_what_it_needs(scarce: Scarce) -> None:
    scarce.fails = range(1)
    assert Arena("device", 4, 4096, max_slots=100).max_slots == 4


def test_an_arena_without_memory_says_so(scarce: Scarce) -> None:
    scarce.fails = range(2)
    with pytest.raises(OSError):
        Arena("device", 4, 4096, max_slots=100)


@pytest.mark.parametrize("for_ever", [False, True])
def test_every_block_that_a_running_pager_asks_for_may_be_refused(
    ram_path: Path, scarce: Scarce, for_ever: bool
) -> None:
    asked = workload(ram_path / "whole", scarce, range(0))
    assert asked > 0
    for k in range(asked):
        try:
            workload(ram_path / f"{k}", scarce, range(k, 1 << 30) if for_ever else range(k, k + 1))
        except TierError as exc:
            raise AssertionError(f"call {k}") from exc


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems make memory when it is touched")
def test_memory_is_there_before_it_is_touched_and_keeps_what_it_holds() -> None:
    size = 16 << 20
    array = np.frombuffer(memory.block(size), dtype=np.uint8)
    array[5] = 7
    memory.populate(int(array.ctypes.data), size)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    array[:: mmap.PAGESIZE][1:] = 1
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert array[5] == 7
    assert faults < 100  # instead of 4,096
