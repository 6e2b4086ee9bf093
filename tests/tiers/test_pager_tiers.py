"""The pager over several tiers: what goes down is found again, and a tier that fails costs only itself."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from tests.tiers.fakes import Rig, delayed_copy, live_at_random, open_store, verify
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers.errors import LostReason, PageLost, StoreBroken, StoreFull
from tierd.tiers.mover import Mover
from tierd.tiers.page import PageKey

A = list(range(1, 13))  # three full pages
B = list(range(101, 113))
C = list(range(201, 213))


def test_pages_that_went_down_to_the_host_are_found_there() -> None:
    rig = Rig(device=3, host=9)
    for tokens in (A, B, C):
        assert rig.serve(tokens) == 0
    rig.settle()
    lease = rig.pager.match([*A, 1])
    assert (lease.num_tokens, lease.hit_host, lease.hit_nvme) == (12, 12, 0)
    assert lease.ready
    rig.expect(lease, A)
    rig.pager.release(lease, [])
    for tokens in (A, B, C):
        assert rig.serve([*tokens]) >= 8
        rig.settle()
        rig.check()
    assert rig.pager.statistics().demotions > 0
    rig.close()


def test_a_page_in_transit_is_still_found_and_followed_by_its_lease() -> None:
    rig = Rig(device=3, host=3)
    rig.serve(A)
    other = rig.pager.match(B)
    assert not rig.pager.allocate(other, 0, 12)  # the copies down are queued, nothing is free yet
    lease = rig.pager.match([*A, 1])
    assert lease.ready
    rig.expect(lease, A)
    rig.manual.run_all()
    rig.poll()
    assert rig.pager.allocate(other, 0, 12)
    rig.write(other, B, 0)
    rig.expect(lease, A)  # where the copies are now
    rig.expect(other, B)
    rig.check()
    rig.pager.release(lease, A)
    rig.pager.release(other, [])
    rig.settle()
    rig.check()
    rig.close()


def test_a_restart_finds_everything_that_was_written() -> None:
    store = MemoryStore()
    rig = Rig(store=store)
    rig.serve([*A, 50, 51])
    assert rig.pager.flush(rig.now_s + 1) == 0
    rig.check()
    rig.close()
    again = Rig(store=store)
    assert again.store is store
    assert not store.reads  # opening reads no page
    lease = again.pager.match([*A, 50, 51, 52])
    assert (lease.num_tokens, lease.hit_nvme) == (14, 14)
    again.pager.release(lease, [])
    assert again.serve([*A, 50, 51, 52]) == 14
    again.settle()
    again.check()
    again.close()


@pytest.mark.usefixtures("no_files_left")
def test_the_real_store_and_the_real_mover(tmp_path: Path) -> None:
    for expected in (0, 11, 11):
        store = open_store(tmp_path / "kv", 4096)
        rig = Rig(device=4, host=2, store=store, mover=Mover(2), record_bytes=4096)
        assert rig.serve(A) == expected
        assert rig.serve(B) == expected
        assert rig.serve(C) == expected
        rig.now_s += 1
        assert rig.pager.flush(rig.now_s + 60) == 0
        rig.settle()
        assert verify(rig.pager, repair=True) == []
        rig.check()
        rig.close()
        store.close()


def test_pages_written_are_not_written_again() -> None:
    store = MemoryStore()
    rig = Rig(store=store)
    for _ in range(3):
        rig.serve([*A, 1])
        rig.pager.flush(rig.now_s + 1)
    assert sum(store.groups) == 4
    rig.close()


@pytest.mark.parametrize(("host", "with_store"), [(0, False), (0, True), (4, False), (4, True)])
def test_every_mix_of_tiers_serves(host: int, with_store: bool) -> None:
    rng = random.Random(3)
    rig = Rig(device=4, host=host, store=MemoryStore(6) if with_store else None)
    prompts = [[rng.randint(1, 3) for _ in range(rng.randint(1, 14))] for _ in range(12)]
    for _ in range(150):
        rig.serve(rng.choice(prompts))
        rig.now_s += 0.03
        rig.poll()
        rig.check()
    rig.settle()
    rig.check()
    rig.close()


def test_turning_a_tier_on_never_lowers_a_hit() -> None:
    rng = random.Random(5)
    prompts = [[rng.randint(1, 2) for _ in range(12)] for _ in range(8)]
    order = [rng.choice(prompts) for _ in range(100)]
    cached = []
    for host, store in ((0, None), (8, None), (8, MemoryStore())):
        rig = Rig(device=4, host=host, store=store)
        total = 0
        for tokens in order:
            total += rig.serve(tokens)
            rig.settle()
        cached.append(total)
        rig.close()
    assert cached == sorted(cached)
    assert cached[2] > cached[0]


@pytest.mark.parametrize("error", [StoreBroken("the disk failed"), OSError(5, "I/O error"), RuntimeError("a bug")])
def test_a_broken_store_is_turned_off_once_and_serving_goes_on(error: Exception) -> None:
    store = MemoryStore()
    rig = Rig(device=4, host=3, store=store)
    rig.serve(A)
    rig.pager.flush(rig.now_s + 1)
    store.fail_write = error
    for tokens in (B, C, [*A, 1], [*B, 1]):
        rig.serve(tokens)
        rig.now_s += 1
        rig.settle()
        rig.check()
    assert len(rig.notices) == 1
    assert "the NVMe tier is off" in rig.notices[0]
    assert not rig.pager.statistics().nvme_on
    assert rig.pager.flush(rig.now_s + 1) == 0
    rig.close()


def test_a_store_that_breaks_while_pages_load_costs_only_those_pages() -> None:
    store = MemoryStore()
    rig = Rig(store=store)
    rig.serve(A)
    rig.pager.flush(rig.now_s + 1)
    rig.close()
    rig = Rig(store=store)
    store.fail_read = lambda _key: StoreBroken("gone")
    assert rig.serve([*A, 1]) == 0
    rig.settle()
    assert len(rig.notices) == 1
    rig.check()
    store.fail_read = lambda _key: None
    assert rig.serve([*A, 1, 2]) == 13
    rig.close()


def test_a_full_store_makes_room_tails_first() -> None:
    store = MemoryStore(4)
    rig = Rig(device=8, host=0, store=store)
    rig.serve(A)
    rig.pager.flush(rig.now_s + 1)
    rig.now_s += 100
    rig.serve(B[:8])
    rig.pager.flush(rig.now_s + 1)
    kept = {meta.tokens for meta in store.pages()}
    assert kept == {tuple(A[:4]), tuple(A[4:8]), tuple(B[:4]), tuple(B[4:8])}
    rig.check()
    rig.close()


def test_a_disk_that_refuses_pages_is_named_once_and_tried_again_later() -> None:
    store = MemoryStore()
    rig = Rig(device=4, host=0, store=store)
    store.fail_write = StoreFull("no space left on device")
    for tokens in (A, B, C):
        rig.serve(tokens)
        rig.now_s += 1
        rig.settle()
        rig.check()
    assert len(rig.notices) == 1
    assert "full" in rig.notices[0]
    store.fail_write = None
    rig.now_s += 10
    assert rig.pager.flush(rig.now_s + 1) == 0
    assert store.rows
    rig.check()
    rig.close()


def test_a_dead_mover_is_named_and_the_device_serves_on() -> None:
    rig = Rig(device=3, host=3, store=MemoryStore(), mover=Mover(1))
    rig.serve(A)
    rig.settle()

    def die(_dest: object, _source: object) -> None:
        raise SystemExit("killed by the test")

    rig.mover._copy = die
    rig.serve(B)  # needs room: its copies kill the mover
    rig.settle()
    assert any("can't be moved any more" in notice and "killed by the test" in notice for notice in rig.notices)
    assert len(rig.notices) == 2
    assert rig.serve(C) == 0
    assert rig.serve([*C, 1][:12]) >= 8
    assert rig.pager.check() == []
    rig.close()


@pytest.mark.parametrize("seed", range(3))
def test_no_reader_sees_a_copy_that_has_not_arrived(seed: int) -> None:
    # Real threads; every destination is ruined first, then filled after a random time.
    rng = random.Random(seed)
    store = MemoryStore(12)
    lock = threading.Lock()

    def ruin(dest: object) -> None:
        dest[:] = 0xAA  # type: ignore[index]
        with lock:
            pause_s = rng.random() * 0.002
        threading.Event().wait(pause_s)

    store.before_read = ruin
    rig = Rig(device=6, host=4, store=store, mover=Mover(3, copy=delayed_copy(seed)))
    live_at_random(rig, rng, 60)
    rig.check()
    rig.close()


def test_a_streamed_page_that_is_lost_while_it_is_read_is_computed_again() -> None:
    store = MemoryStore()
    rig = Rig(device=2, host=0, store=store)
    tokens = list(range(1, 17))  # four pages, of which memory holds two
    rig.serve(tokens)
    rig.settle()
    left = [2]  # the page is lost when it is read as it is streamed, not when it is loaded

    def fail(_key: PageKey) -> Exception | None:
        left[0] -= 1
        return PageLost(LostReason.KEY) if left[0] == 0 else None

    store.fail_read = fail
    rig.serve(tokens)
    assert left[0] < 1
    rig.settle()
    rig.check()
    assert rig.pager.statistics().leases == 0
    rig.close()
