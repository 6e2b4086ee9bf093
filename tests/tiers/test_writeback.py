from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.tiers.fakes import Rig
from tests.tiers.stand_ins import ManualMover, MemoryStore
from tierd.tiers import writeback
from tierd.tiers.errors import PrefixNotDurable, StoreFull
from tierd.tiers.page import PageKey
from tierd.tiers.policy import WRITE_GROUP_PAGES, WRITE_GROUP_WAIT_S
from tierd.tiers.prefixes import Prefixes
from tierd.tiers.writeback import PAUSE_S

A = list(range(1, 13))
B = list(range(101, 113))


def test_pages_wait_for_a_group_but_not_for_long() -> None:
    store = MemoryStore()
    rig = Rig(store=store)
    rig.poll()
    rig.serve(A)
    rig.poll()
    assert rig.pager.statistics().dirty_pages == 3
    rig.now_s += WRITE_GROUP_WAIT_S * 1.1
    rig.poll()
    assert rig.pager.statistics().writing_pages == 3
    rig.check()
    rig.settle()
    assert store.groups == [3]
    rig.check()
    rig.close()


def test_a_full_group_does_not_wait_and_groups_are_bounded() -> None:
    store = MemoryStore()
    rig = Rig(device=100, store=store)
    rig.poll()
    rig.serve(list(range(4 * 80)))
    rig.poll()
    rig.poll()
    rig.poll()
    assert rig.pager.writeback.groups == 2
    rig.check()
    rig.settle()
    assert store.groups == [WRITE_GROUP_PAGES, WRITE_GROUP_PAGES, 16]
    rig.close()


def test_nothing_is_lost_when_the_queue_is_full() -> None:
    store = MemoryStore()
    rig = Rig(store=store, mover=ManualMover(1, capacity=1))
    rig.serve(A)
    rig.now_s += 1
    lease = rig.pager.match(A[:4])
    rig.pager.fetch(lease, rig.now_s + 9)  # its copy takes the only place
    rig.poll()
    assert rig.pager.statistics().dirty_pages == 3
    rig.check()
    rig.settle()
    assert len(store.rows) == 3
    rig.check()
    rig.close()


def test_a_page_evicted_from_a_small_store_is_not_written_again_before_it_is_used() -> None:
    store = MemoryStore(2)
    rig = Rig(device=8, host=0, store=store)
    rig.serve(A)
    for _ in range(20):
        rig.now_s += 1
        rig.settle()
    assert sum(store.groups) <= 4
    rig.check()
    rig.close()


def test_a_full_store_pauses_the_writes() -> None:
    store = MemoryStore()
    store.fail_write = store.no_room = StoreFull("no space")
    rig = Rig(store=store)
    rig.serve(A)
    rig.now_s += 1
    rig.settle()
    assert rig.pager.writeback.paused
    (told,) = rig.notices
    failed = rig.pager.statistics().failed_writes
    rig.settle()
    assert rig.pager.statistics().failed_writes == failed
    store.fail_write = store.no_room = None
    rig.now_s += PAUSE_S
    rig.settle()
    assert len(store.rows) == 3
    assert rig.notices == [told, told.replace("notice:", "notice_over:")], "it is true no more"
    rig.check()
    rig.close()


def test_a_disk_without_any_space_keeps_what_is_there() -> None:
    store = MemoryStore(8)
    rig = Rig(device=32, host=0, store=store)
    rig.serve(A)
    rig.now_s += 1
    rig.settle()
    kept = set(store.rows)
    store.fail_write = store.no_room = StoreFull("no space for the index")
    for start in range(100, 300, 20):
        rig.serve(list(range(start, start + 12)))
        rig.now_s += PAUSE_S
        rig.settle()
        rig.check()
    assert set(store.rows) == kept and len(rig.notices) == 1
    store.fail_write = store.no_room = None
    rig.now_s += PAUSE_S
    rig.settle()
    assert len(store.rows) == 8, "there is room again"
    rig.check()
    rig.close()


def test_a_disk_that_takes_no_more_pages_but_rows_has_old_pages_make_room() -> None:
    store = MemoryStore()
    rig = Rig(device=32, host=0, store=store)
    rig.serve(A)
    rig.now_s += 1
    rig.settle()
    store.capacity = 3  # the disk is full of other files, the index has room
    rig.now_s += 1000
    rig.serve(B)
    for _ in range(3):
        rig.now_s += PAUSE_S
        rig.settle()
    assert {meta.tokens for meta in store.pages()} == {tuple(B[at : at + 4]) for at in (0, 4, 8)}
    rig.check()
    rig.close()


@pytest.mark.parametrize("keep_one", [False, True])
def test_a_removal_that_finds_the_disk_full_is_tried_again(keep_one: bool) -> None:
    class Stubborn(MemoryStore):
        refusals = 1

        def remove(self, keys: Iterable[PageKey]) -> None:
            if self.refusals:
                self.refusals -= 1
                raise StoreFull("no space for the journal")
            super().remove(keys)

        def clear(self) -> None:
            self.remove(list(self.rows))

    store = Stubborn()
    rig = Rig(store=store)
    rig.serve(A)
    rig.pager.flush(rig.now_s + 1)
    if keep_one:
        rig.start([*A[:4], 9])
    rig.pager.clear()
    rig.settle()
    assert len(store.rows) == 3
    rig.check()
    rig.now_s += PAUSE_S
    rig.settle()
    assert len(store.rows) == keep_one
    rig.check()
    rig.close()


def rewritten(store: MemoryStore) -> Rig:
    """A rig that has dropped the rows of A and is about to write them anew."""
    rig = Rig(store=store)
    rig.serve(A)
    rig.pager.flush(rig.now_s + 1)
    for node in reversed(list(rig.pager.index.nodes.values())):
        rig.pager.residency.forget(node)
    return rig


def test_no_removal_comes_after_the_write_that_replaces_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "_ROW_BATCH", 2)
    store = MemoryStore()
    rig = rewritten(store)
    rig.serve(A)
    rig.settle()
    assert len(store.rows) == 3
    rig.check()
    rig.close()


def test_a_removal_that_failed_is_not_tried_on_the_page_written_since(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    rig = rewritten(store)
    remove, refusals = store.remove, [StoreFull("no space for the journal")]
    monkeypatch.setattr(store, "remove", lambda keys: remove(keys) if not refusals else _raise(refusals.pop()))
    rig.poll()  # the removal is queued
    rig.serve(A)
    rig.now_s += 1
    rig.poll()  # the write behind it
    rig.settle()
    rig.now_s += PAUSE_S
    rig.settle()
    assert not refusals and len(store.rows) == 3
    rig.check()
    rig.close()


def _raise(error: Exception) -> None:
    raise error


def test_uses_reach_the_store() -> None:
    store = MemoryStore()
    rig = Rig(store=store)
    rig.serve(A)
    rig.pager.flush(rig.now_s + 1)
    rig.now_s += 50
    rig.serve(A)
    rig.now_s += 50
    rig.settle()
    hits = {meta.tokens: (meta.hits, meta.last_use_s) for meta in store.pages()}
    assert hits[tuple(A[:4])][0] == 1
    assert hits[tuple(A[:4])][1] >= 150
    rig.close()


def test_who_asks_for_a_prefix_on_disk_does_not_wait_for_the_end_of_a_pause() -> None:
    store = MemoryStore()
    store.fail_write = store.no_room = StoreFull("no space")
    rig = Rig(store=store)
    rig.serve(A)
    prefixes = Prefixes(rig.pager, None)
    way = prefixes.way(prefixes.listing(9)[0][0].id)

    def persist() -> int:
        left = prefixes.persist(way, anew=True)
        while left:
            rig.settle()
            left = prefixes.persist(way)
        return left

    for _ in range(2):
        with pytest.raises(PrefixNotDurable, match="is full") as caught:
            persist()
        assert "persist" not in caught.value.remedy, "that is what was tried"
    store.fail_write = store.no_room = None
    assert persist() == 0 and len(store.rows) == 3
    rig.close()
