from __future__ import annotations

import random

import pytest

from tests.tiers.fakes import Rig
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers.arena import SlotState
from tierd.tiers.errors import TierFull

A = list(range(1, 41))  # ten pages
B = list(range(101, 141))
MAX_SLOTS = 64


def rig_of(device: int = 20, host: int = 8, store: MemoryStore | None = None) -> Rig:
    rig = Rig(device=device, host=host, store=store, max_slots=MAX_SLOTS)
    rig.poll()
    return rig


def resize(rig: Rig, device: int | None = None, host: int | None = None, seconds: float = 9.0) -> list[str]:
    """Starts one; what was said when it ended comes into the list."""
    said: list[str] = []
    rig.pager.resizer.start(device, host, rig.now_s + seconds, said.append)
    return said


def finish(rig: Rig, said: list[str]) -> str:
    for _ in range(500):
        rig.manual.run_all()
        rig.now_s += 0.03
        rig.poll()
        rig.check()
        if said:
            return said[0]
    raise AssertionError("the resize never ends")


def test_growing_is_done_at_once() -> None:
    rig = rig_of(device=3, host=0)
    assert resize(rig, 10, 5) == [""]
    assert (rig.device.slots, rig.pager.host.slots) == (10, 5)
    rig.serve(A)
    rig.check()
    rig.close()


def test_free_slots_go_at_once() -> None:
    rig = rig_of()
    assert resize(rig, 5, 2) == [""]
    assert (rig.device.total, rig.host.total) == (5, 2)
    rig.close()


def test_idle_pages_move_to_slots_that_stay() -> None:
    rig = rig_of(device=20, host=0)
    rig.serve(B)
    rig.serve(A)
    rig.pager.clear()
    rig.serve(A)  # in any slots
    said = resize(rig, 10)
    assert finish(rig, said) == ""
    assert rig.device.total == 10
    lease = rig.start([*A, 1])
    assert lease.hit_device == len(A)
    rig.expect(lease, A)
    rig.pager.release(lease, A)
    rig.check()
    rig.close()


def test_idle_pages_without_room_are_evicted_and_the_most_valuable_stay() -> None:
    rig = rig_of(device=30, host=0)
    rig.serve(A)
    rig.serve([*A, 7])
    rig.serve(B)
    said = resize(rig, 13)
    assert finish(rig, said) == ""
    lease = rig.start([*A, 1])
    assert lease.hit_device == len(A)
    rig.expect(lease, A)
    rig.pager.release(lease, A)
    rig.close()


def test_pages_of_a_live_lease_move_and_stay_right() -> None:
    rig = rig_of(device=20, host=0)
    rig.serve(B)
    lease = rig.start(A)
    rig.grow(lease, A, 0)
    more = [*A, 77, 78]
    rig.grow(lease, more, len(A))  # a page that is being written
    assert any(slot >= 11 for slot in [*lease.private, *(node.device for node in lease.nodes)])
    said = resize(rig, 11)
    for _ in range(50):
        rig.expect(lease, more)  # a step could run at any time
        if said:
            break
        rig.manual.run()
        rig.now_s += 0.03
        rig.poll()
    assert said == [""]
    rig.expect(lease, more)
    rig.grow(lease, [*more, 79], len(more))
    rig.expect(lease, [*more, 79])
    rig.pager.release(lease, [*more, 79])
    rig.check()
    rig.close()


def test_pages_of_a_live_lease_spill_to_cpu_memory() -> None:
    rig = rig_of(device=20, host=8)
    lease = rig.start(A)
    rig.grow(lease, A, 0)
    said = resize(rig, 4)
    assert finish(rig, said) == ""
    assert rig.device.total == 4
    rig.expect(lease, A)
    rig.pager.release(lease, A)
    rig.check()
    rig.close()


def test_what_leases_read_in_cpu_memory_moves_there() -> None:
    rig = rig_of(device=20, host=12)
    lease = rig.start(A)
    rig.grow(lease, A, 0)
    assert finish(rig, resize(rig, 2)) == ""
    rig.settle()
    used = rig.host.used
    assert used >= 8
    assert finish(rig, resize(rig, None, used)) == ""
    rig.expect(lease, A)
    rig.pager.release(lease, A)
    rig.check()
    rig.close()


def test_less_than_live_leases_need_is_refused_with_the_number() -> None:
    rig = rig_of(device=20, host=0)
    lease = rig.start(A)
    rig.grow(lease, A, 0)
    with pytest.raises(TierFull, match="6 pages of device memory are fewer than the 10 that running requests need"):
        resize(rig, 6)
    assert rig.device.slots == 20
    assert finish(rig, resize(rig, 10)) == ""
    rig.expect(lease, A)
    rig.pager.release(lease, A)
    rig.close()


def test_more_than_can_be_grown_to_is_refused_with_the_number() -> None:
    rig = rig_of()
    with pytest.raises(TierFull, match=f"{MAX_SLOTS}"):
        resize(rig, MAX_SLOTS + 1)
    assert rig.device.slots == 20
    rig.close()


def test_one_at_a_time() -> None:
    rig = rig_of(device=4, host=0)
    slots = [rig.device.alloc(SlotState.FILLING) for _ in range(4)]
    said = resize(rig, 3)
    with pytest.raises(TierFull, match="another resize"):
        resize(rig, 2)
    for slot in slots:
        assert slot is not None
        rig.device.drop(slot)
    rig.poll()
    assert said == [""]
    assert resize(rig, 4) == [""]
    rig.close()


def test_what_can_not_be_emptied_in_time_is_undone_and_told() -> None:
    rig = rig_of(device=4, host=0)
    slots = [rig.device.alloc(SlotState.FILLING) for _ in range(4)]  # copies that never arrive
    said = resize(rig, 2, seconds=1.0)
    rig.poll()
    assert said == []
    assert (rig.device.slots, rig.device.total) == (2, 4)
    rig.now_s += 1.0
    rig.poll()
    assert said == ["2 pages of device memory beyond 2 are still in use"]
    assert (rig.device.slots, rig.device.total, rig.pager.resizer.active) == (4, 4, False)
    for slot in slots:
        assert slot is not None
        rig.device.drop(slot)
    rig.check()
    rig.close()


def test_cpu_memory_can_be_turned_off_and_its_pages_are_written_first() -> None:
    store = MemoryStore()
    rig = rig_of(device=10, host=12, store=store)
    rig.serve(A)
    rig.serve(B)
    said = resize(rig, None, 0)
    assert finish(rig, said) == ""
    assert rig.host.total == 0
    rig.settle()
    lease = rig.start([*A, 1])
    assert lease.num_tokens == len(A)
    rig.expect(lease, A)
    rig.pager.release(lease, A)
    rig.check()
    rig.close()


@pytest.mark.parametrize("seed", range(6))
def test_sizes_that_change_all_the_time_change_no_byte(seed: int) -> None:
    rng = random.Random(seed)
    rig = rig_of(device=12, host=6, store=MemoryStore(60) if seed % 2 else None)
    said: list[str] = []
    prompts = [[rng.randint(1, 2) for _ in range(rng.randint(4, 24))] for _ in range(8)]
    for _ in range(120):
        prompt = rng.choice(prompts)
        lease = rig.start(prompt)
        cached = lease.num_tokens
        rig.expect(lease, prompt[:cached])
        if not rig.pager.resizer.active and rng.random() < 0.5:
            try:
                said = resize(rig, rng.randint(6, 20), rng.randint(0, 12), seconds=3.0)
            except TierFull:
                assert not rig.pager.resizer.active
        rig.grow(lease, prompt, cached)
        rig.expect(lease, prompt)
        for _ in range(rng.randint(0, 3)):
            rig.manual.run()
        rig.poll()
        rig.expect(lease, prompt)
        rig.pager.release(lease, prompt)
        rig.now_s += 0.05
        rig.poll()
        rig.check()
    if rig.pager.resizer.active:
        finish(rig, said)
    rig.settle()
    rig.check()
    assert rig.device.total == rig.device.slots
    rig.close()


