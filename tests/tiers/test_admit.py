from __future__ import annotations

from tests.tiers.fakes import PAGE_TOKENS, RECORD_BYTES, Rig
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers.budget import WriteBudget

A = list(range(1, 13))  # three pages


def limited(rig: Rig, pages: int) -> WriteBudget:
    budget = WriteBudget(pages * RECORD_BYTES, None, lambda: 20_000 * 86_400.0)
    rig.pager.writeback.admission.budget = budget
    return budget


def stored(store: MemoryStore) -> list[tuple[int, ...]]:
    return sorted(meta.tokens for meta, _ in store.rows.values())


def test_what_is_written_is_counted() -> None:
    rig = Rig(store=MemoryStore())
    rig.serve([*A, 99])
    rig.settle()
    stats = rig.pager.writeback.admission.statistics()
    assert (stats.written_bytes, stats.written_tokens) == (4 * RECORD_BYTES, 13)
    assert stats.bytes_per_token == 4 * RECORD_BYTES / 13
    assert stats.today_bytes == 4 * RECORD_BYTES
    assert not stats.exhausted
    rig.close()


def test_nothing_is_written_twice() -> None:
    store = MemoryStore()
    rig = Rig(store=store)
    for _ in range(4):
        rig.serve(A)
        rig.settle()
    assert sum(store.groups) == 3
    rig.close()


def test_more_than_the_day_allows_is_not_written() -> None:
    store = MemoryStore()
    rig = Rig(store=store)
    limited(rig, 2)
    rig.serve(A)
    rig.settle()
    assert len(store.rows) == 2
    assert rig.pager.writeback.admission.statistics().exhausted
    assert len(rig.notices) == 1 and "nvme_daily_writes" in rig.notices[0]
    rig.serve(A)
    rig.settle()
    assert len(rig.notices) == 1
    rig.check()
    rig.close()


def test_the_second_half_of_the_day_is_for_pages_that_came_back() -> None:
    store = MemoryStore()
    rig = Rig(device=40, host=0, store=store)
    limited(rig, 10).spend(5 * RECORD_BYTES)
    rig.serve(A)
    rig.settle()
    assert not store.rows
    assert rig.pager.writeback.admission.skipped_pages == 3
    rig.serve([*A, 50])
    rig.settle()
    assert stored(store) == [tuple(A[start : start + PAGE_TOKENS]) for start in (0, 4, 8)]
    rig.check()
    rig.close()


def test_a_failed_write_is_given_back_to_the_day() -> None:
    store = MemoryStore()
    store.fail_write = OSError("broken")
    rig = Rig(store=store)
    budget = limited(rig, 9)
    rig.serve(A)
    rig.settle()
    assert budget.spent_bytes == 0
    rig.close()


def test_a_page_on_its_way_out_is_dropped_and_counted_when_the_day_is_used_up() -> None:
    rig = Rig(device=4, host=0, store=MemoryStore())
    limited(rig, 8).spend(8 * RECORD_BYTES)
    rig.serve(A)
    assert rig.pager.evictor.make_room(4)
    assert rig.pager.writeback.admission.statistics().refused_pages == 3
    assert rig.pager.statistics().known_pages == 0
    assert rig.pager.statistics().known_pages <= 4
    rig.check()
    rig.close()


def test_pages_that_waited_for_their_write_go_when_the_day_ends_meanwhile() -> None:
    rig = Rig(device=4, host=0, store=MemoryStore())
    budget = limited(rig, 8)
    rig.poll()
    rig.serve(A)
    rig.pager.evictor.make_room(3)
    assert rig.pager.evictor.in_motion == 2
    budget.spend(8 * RECORD_BYTES)
    rig.settle()
    assert rig.pager.evictor.in_motion == 0
    assert rig.serve(list(range(100, 116))) == 0
    rig.settle()
    rig.check()
    rig.close()


def test_a_store_full_of_better_pages_takes_no_new_ones() -> None:
    store = MemoryStore(3)
    rig = Rig(device=40, host=0, store=store)
    rig.serve(A)
    rig.serve(A)
    rig.settle()
    before = stored(store)
    rig.serve(list(range(100, 120)))
    rig.settle()
    assert stored(store) == before
    rig.check()
    rig.close()


def test_a_page_that_came_back_takes_the_place_of_one_that_did_not() -> None:
    store = MemoryStore(3)
    rig = Rig(device=40, host=0, store=store)
    rig.serve(list(range(100, 112)))
    rig.settle()
    rig.serve(A)
    rig.settle()
    rig.serve(A)
    rig.settle()
    assert len(set(stored(store)) & {tuple(A[:4]), tuple(A[4:8]), tuple(A[8:])}) >= 2
    rig.check()
    rig.close()


def test_a_chain_longer_than_the_store_keeps_its_head() -> None:
    store = MemoryStore(2)
    rig = Rig(device=40, host=0, store=store)
    rig.serve(list(range(1, 41)))
    rig.settle()
    assert stored(store) == [(1, 2, 3, 4), (5, 6, 7, 8)]
    assert sum(store.groups) == 2
    rig.check()
    rig.close()
