"""Copies with a card: their order against kernels and one another, and rows of the card that the store fills."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest

from tests.counts import counted
from tests.tiers.fake_gpu import FakeGpu, bytes_at, put
from tests.tiers.fakes import Rig, live_at_random
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers.blocks import HostBlock
from tierd.tiers.cuda_copies import CudaCopies
from tierd.tiers.cuda_memory import DeviceBlock, PinnedBlock, pinned_array
from tierd.tiers.gpu import DeviceRow, GpuError, HostRow, Stream
from tierd.tiers.links import Link
from tierd.tiers.mover import Completion, Disturbance, JobClass, Mover

RECORD = 4096


class Bench:
    """A card with a few records, and CPU memory for as many."""

    def __init__(self, seed: int = 0, records: int = 8) -> None:
        self.gpu = FakeGpu(seed)
        self.compute = self.gpu.new_stream()
        self.block = DeviceBlock(self.gpu, records * RECORD, records * RECORD)
        self.copies = CudaCopies(self.gpu, self.compute, bounce_bytes=2 * RECORD)
        self.host = pinned_array(self.gpu, records * RECORD).reshape(records, RECORD)

    def device(self, number: int) -> DeviceRow:
        row = self.block.row(number * RECORD, RECORD)
        assert isinstance(row, DeviceRow)
        return row

    def holds(self, number: int) -> set[int]:
        return set(bytes_at(self.device(number).address, RECORD))


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_comes_after_the_kernels_before_it(seed: int) -> None:
    bench = Bench(seed)
    gpu, copies, seen = bench.gpu, bench.copies, []
    put(bench.device(0).address, b"\1" * RECORD)
    bench.host[0] = 5
    # A kernel still reads record 0, which was freed meanwhile and is filled anew; another one writes record 1.
    gpu.launch(bench.compute, *[lambda: seen.append(bench.holds(0))] * 3)
    gpu.launch(bench.compute, lambda: None, lambda: put(bench.device(1).address, b"\2" * RECORD))
    copies.copy(bench.device(0), bench.host[0])
    copies.copy(bench.host[1], bench.device(1))
    assert seen == [{1}] * 3 and bench.holds(0) == {5} and set(bench.host[1].tolist()) == {2}
    copies.copy(bench.device(2), bench.device(1))
    assert bench.holds(2) == {2}


def test_without_the_wait_for_kernels_a_copy_is_seen_to_be_wrong() -> None:
    class Hasty(FakeGpu):
        def wait(self, stream: Stream, event: int) -> None:
            """As if nobody waited."""

    wrong = 0
    for seed in range(20):
        bench = Bench()
        bench.gpu.__class__ = Hasty
        bench.gpu._random.seed(seed)
        bench.gpu.launch(bench.compute, lambda: None, lambda b=bench: put(b.device(1).address, b"\2" * RECORD))
        bench.copies.copy(bench.host[1], bench.device(1))
        wrong += set(bench.host[1].tolist()) != {2}
    assert wrong > 0


def test_the_store_fills_rows_of_the_card_and_of_the_cpu() -> None:
    bench, calls = Bench(), []

    def read(which: slice, arrays: Sequence[HostRow]) -> list[int]:
        calls.append((which.start, which.stop))
        for number, array in zip(range(which.start, which.stop), arrays, strict=True):
            assert array.shape == (RECORD,)
            array[:] = number + 1
        return list(range(which.start, which.stop))

    rows = [bench.device(0), bench.device(1), bench.device(2), bench.host[0], bench.host[1], bench.device(3)]
    assert bench.copies.fill(rows, read) == [0, 1, 2, 3, 4, 5]
    assert calls == [(0, 2), (2, 3), (3, 5), (5, 6)]  # no more than the buffer holds, and the CPU's rows as they are
    assert [bench.holds(number) for number in range(4)] == [{1}, {2}, {3}, {6}]
    assert bench.host[:2, 0].tolist() == [4, 5]


def test_the_store_is_lent_rows_of_the_card_in_one_group() -> None:
    bench, written = Bench(), []
    for number in range(3):
        put(bench.device(number).address, bytes([number + 1]) * RECORD)
    bench.host[0] = 9
    bench.copies.lend(
        [bench.device(0), bench.host[0], bench.device(2)],
        lambda arrays: written.append([set(array.tolist()) for array in arrays]),
    )
    bench.copies.lend([bench.host[0]], lambda arrays: written.append([set(array.tolist()) for array in arrays]))
    assert written == [[{1}, {9}, {3}], [{9}]]


def test_a_buffer_whose_copy_may_still_run_is_used_by_nobody_else() -> None:
    bench, lent = Bench(), []
    wait = bench.gpu.synchronize
    bench.gpu.synchronize = lambda event: (_ for _ in ()).throw(GpuError(5, "lost"))
    with pytest.raises(GpuError, match="lost"):
        bench.copies.lend([bench.device(0)], lent.append)
    bench.gpu.synchronize = wait
    assert not lent and len(bench.gpu.registered) == 2  # the memory of the test, and the buffer
    bench.copies.lend([bench.device(0)], lambda arrays: lent.append(len(arrays)))
    with pytest.raises(ZeroDivisionError):  # the store's own errors leave nothing behind
        bench.copies.lend([bench.device(0)], lambda arrays: lent.append(1 // 0))
    bench.copies.lend([bench.device(0)], lambda arrays: lent.append(len(arrays)))
    assert lent == [1, 1] and len(bench.gpu.registered) == 3


def test_close_leaves_nothing() -> None:
    bench = Bench()
    bench.copies.copy(bench.host[0], bench.device(0))
    bench.copies.fill([bench.device(0)], lambda which, arrays: [0])
    bench.copies.close()
    bench.copies.close()
    bench.block.close()
    assert len(bench.gpu.lanes) == 1 and not bench.gpu.events  # the compute stream is not ours
    assert len(bench.gpu.registered) == 1  # nor is the memory of the test


def test_many_round_trips_through_a_mover_that_disturbs_them() -> None:
    bench = Bench(records=16)
    trips, rng = counted(5000, 200), random.Random(0)
    before = Disturbance(1, 0.0002, fill=bench.copies.poison)
    mover = Mover(3, copy=bench.copies.copy, crossing=bench.copies, before=before)
    contents = [0] * 16
    left = trips

    def send_up(number: int) -> None:
        contents[number] = rng.randrange(1, 255)
        bench.host[number] = contents[number]
        arrived = partial(come_back, number)
        job = mover.copy_job(bench.device(number), bench.host[number], Link.HOST_TO_DEVICE, arrived)
        assert mover.submit(job, JobClass.NOW)

    def come_back(number: int, done: Completion) -> None:
        assert done.error is None
        bench.host[number] = 0
        job = mover.copy_job(bench.host[number], bench.device(number), Link.DEVICE_TO_HOST, partial(check, number))
        assert mover.submit(job, JobClass.NEXT)

    def check(number: int, done: Completion) -> None:
        nonlocal left
        assert done.error is None and set(bench.host[number].tolist()) == {contents[number]}
        left -= 1
        if left >= 16:
            send_up(number)

    try:
        for number in range(16):
            send_up(number)
        while mover.outstanding:
            assert mover.wait(30)
            for done in mover.drain():
                done.job.on_done(done)
    finally:
        mover.close()
    assert left == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_pager_whose_device_is_a_card(seed: int) -> None:
    gpu, record = FakeGpu(seed), 4096
    copies = CudaCopies(gpu, gpu.new_stream(), bounce_bytes=2 * record)
    blocks: list[PinnedBlock] = []

    def on_host(size_bytes: int, max_bytes: int) -> PinnedBlock:
        blocks.append(PinnedBlock(gpu, size_bytes, max_bytes, record, chunk_bytes=2 * record))
        return blocks[0]

    before = Disturbance(seed, fill=copies.poison)
    mover = Mover(3, copy=copies.copy, crossing=copies, before=before)
    make_blocks = (partial(DeviceBlock, gpu, chunk_bytes=2 * record), on_host)
    rig = Rig(
        device=6, host=4, store=MemoryStore(12), mover=mover, record_bytes=record, max_slots=8, make_blocks=make_blocks
    )
    blocks[0].wait(10)
    rng = random.Random(seed)
    live_at_random(rig, rng, counted(60, 20))
    assert rig.pager.writeback.written_pages and rig.pager.promoter.loader.loaded_pages
    rig.check()
    rig.close()


def test_shrinking_a_cards_arena_frees_memory_of_the_card_under_a_lease() -> None:
    gpu, record, tokens = FakeGpu(), 4096, list(range(1, 13))
    copies = CudaCopies(gpu, gpu.new_stream(), bounce_bytes=2 * record)
    mover = Mover(2, copy=copies.copy, crossing=copies)
    make_blocks = (partial(DeviceBlock, gpu, chunk_bytes=2 * record), HostBlock)
    rig = Rig(device=16, host=0, mover=mover, record_bytes=record, max_slots=16, make_blocks=make_blocks)
    rig.serve(list(range(100, 150)))  # so that the lease gets high slots too
    rig.pager.clear()
    rig.serve(tokens)
    lease = rig.start([*tokens, 1])
    assert sum(gpu.mapped.values()) == 16 * record
    said: list[str] = []
    rig.pager.resizer.start(5, None, rig.now_s + 60, said.append)
    for _ in range(1000):
        if said:
            break
        rig.now_s += 0.03
        rig.work()
    assert said == [""] and sum(gpu.mapped.values()) == 6 * record  # whole chunks of two
    rig.expect(lease, tokens)
    rig.pager.release(lease, tokens)
    rig.pager.resizer.start(16, None, rig.now_s + 60, said.append)
    assert said == ["", ""] and sum(gpu.mapped.values()) == 16 * record
    rig.check()
    rig.close()
