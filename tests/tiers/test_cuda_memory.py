"""Memory of the card in chunks, and CPU memory that is registered in chunks; on a card that is made of CPU memory."""

from __future__ import annotations

import errno
from functools import partial

import pytest

from tests.tiers.fake_gpu import FakeGpu, bytes_at, put
from tierd.tiers.arena import POISON, Arena, SlotState
from tierd.tiers.cuda_memory import DeviceBlock, PinnedBlock, pinned_array
from tierd.tiers.gpu import DeviceRow, GpuError

RECORD = 8192
CHUNK = 3 * RECORD


def on_card(gpu: FakeGpu, slots: int, max_slots: int, *, poison: bool = False) -> Arena:
    make = partial(DeviceBlock, gpu, chunk_bytes=CHUNK)
    return Arena("device", slots, RECORD, max_slots=max_slots, make_block=make, poison=poison)


def pinned(gpu: FakeGpu, slots: int, max_slots: int) -> tuple[Arena, PinnedBlock]:
    blocks: list[PinnedBlock] = []

    def make(size_bytes: int, max_bytes: int) -> PinnedBlock:
        blocks.append(PinnedBlock(gpu, size_bytes, max_bytes, RECORD, chunk_bytes=CHUNK))
        return blocks[0]

    return Arena("host", slots, RECORD, max_slots=max_slots, make_block=make), blocks[0]


def test_an_arena_on_the_card_is_the_same_class() -> None:
    gpu = FakeGpu()
    arena = on_card(gpu, 4, 10)
    slots = [arena.alloc(SlotState.PRIVATE) for _ in range(4)]
    assert None not in slots and arena.alloc(SlotState.PRIVATE) is None
    row = arena.row(2)
    assert row == DeviceRow(arena.address(2), RECORD) and arena.address(2) - arena.address(0) == 2 * RECORD
    assert arena.check() == [] and sum(gpu.mapped.values()) == 2 * CHUNK  # whole chunks


def test_a_card_arena_takes_memory_as_it_grows_and_gives_it_back() -> None:
    gpu = FakeGpu()
    arena = on_card(gpu, 3, 10)
    base = arena.address(0)
    arena.grow(10)
    assert sum(gpu.mapped.values()) == 4 * CHUNK and arena.address(0) == base
    arena.retire(4)
    assert arena.shrunk and sum(gpu.mapped.values()) == 2 * CHUNK
    arena.grow(7)
    assert arena.num_free == 7 and arena.check() == []


def test_memory_that_the_card_lacks_changes_nothing() -> None:
    gpu = FakeGpu(limit_bytes=2 * CHUNK)
    arena = on_card(gpu, 3, 10)
    with pytest.raises(OSError, match="out of memory") as caught:
        arena.grow(9)
    assert caught.value.errno == errno.ENOMEM
    assert arena.slots == 3 and sum(gpu.mapped.values()) == CHUNK and arena.check() == []
    with pytest.raises(GpuError):
        on_card(gpu, 9, 9)
    assert len(gpu.lanes) == 1 and sum(gpu.mapped.values()) == CHUNK  # those of the first arena


def test_a_freed_slot_of_the_card_is_poisoned() -> None:
    gpu = FakeGpu()
    arena = on_card(gpu, 2, 2, poison=True)
    slot = arena.alloc(SlotState.PRIVATE)
    assert slot is not None
    put(arena.address(slot), b"x" * RECORD)
    arena.drop(slot)
    assert bytes_at(arena.address(slot), RECORD) == bytes([POISON]) * RECORD


def test_a_block_of_the_card_leaves_nothing() -> None:
    gpu = FakeGpu()
    block = DeviceBlock(gpu, 5 * RECORD, 9 * RECORD, chunk_bytes=CHUNK)
    block.close()
    block.close()
    assert not gpu.mapped and not gpu.lanes and not gpu.events and not gpu._spaces


def test_cpu_memory_is_registered_in_chunks_of_whole_records() -> None:
    gpu = FakeGpu()
    arena, block = pinned(gpu, 7, 20)
    assert block.wait(10) == 3 * CHUNK and block.refusal() == ""
    assert all(size % RECORD == 0 for size in gpu.registered.values()) and len(gpu.registered) == 3
    assert block.pinned_bytes == 3 * CHUNK
    arena.grow(20)
    assert block.pinned_bytes == 20 * RECORD  # the last chunk ends where the memory ends
    arena.retire(4)
    assert block.pinned_bytes == 2 * CHUNK  # the chunk with the last slot stays locked, and is not given back
    block.close()
    assert not gpu.registered


def test_a_slot_beside_memory_that_goes_back_keeps_its_bytes() -> None:
    gpu = FakeGpu()
    arena, block = pinned(gpu, 7, 7)
    block.wait(10)
    for _ in range(7):
        slot = arena.alloc(SlotState.PRIVATE)
        assert slot is not None
        arena.array[slot] = slot + 1
    for slot in range(4, 7):
        arena.drop(slot)
    arena.retire(4)
    assert [int(arena.array[slot, 0]) for slot in range(5)] == [1, 2, 3, 4, 5]  # slot 4 lies in the chunk that stays
    assert int(arena.array[6, 0]) == 0


def test_fewer_bytes_than_wanted_can_be_registered() -> None:
    gpu = FakeGpu()
    gpu.unregistrable_from = CHUNK
    arena, block = pinned(gpu, 7, 20)
    assert block.wait(10) == CHUNK and "no more pages" in block.refusal()
    arena.retire(block.pinned_bytes // RECORD)
    assert arena.slots == 3 and arena.shrunk
    with pytest.raises(OSError, match="no more pages"):
        arena.grow(4)
    assert arena.slots == 3


def test_records_that_share_a_page_of_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="records of 100 bytes"):
        PinnedBlock(FakeGpu(), 1000, 1000, 100)


def test_a_buffer_is_registered_as_long_as_it_is_used() -> None:
    gpu = FakeGpu()
    array = pinned_array(gpu, 10_000)
    part = array[100:200]
    del array
    assert sum(gpu.registered.values()) == 12288
    part[:] = 3
    del part
    assert not gpu.registered
