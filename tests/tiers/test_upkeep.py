from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiers.fakes import ROOT, Rig, gc, open_store, run, verify
from tests.tiers.stand_ins import ManualMover, MemoryStore
from tierd.tiers import memory, upkeep
from tierd.tiers.errors import StoreFull
from tierd.tiers.keys import pack_tokens, page_key
from tierd.tiers.links import Link
from tierd.tiers.mover import Mover
from tierd.tiers.store import PageMeta

A = list(range(1, 13))


def chain(pages: int) -> list[PageMeta]:
    parent, found = ROOT, []
    for number in range(pages):
        tokens = tuple(range(number * 4, number * 4 + 4))
        key = page_key(parent, pack_tokens(tokens))
        found.append(PageMeta(key, parent, tokens, number, float(number)))
        parent = key
    return found


@pytest.mark.parametrize("order", [1, -1])
def test_pages_may_come_before_their_parents(order: int) -> None:
    store = MemoryStore()
    for meta in chain(5)[::order]:
        store.rows[meta.key] = (meta, b"")
    rig = Rig(store=store)
    rig.check()
    assert sorted(node.depth for node in rig.pager.index.nodes.values()) == [0, 1, 2, 3, 4]
    assert rig.pager.match(range(21)).hit_nvme == 20
    assert not store.reads
    rig.close()


def test_orphans_are_harmless_and_leave_in_their_turn() -> None:
    store = MemoryStore(4)
    for meta in chain(5)[1:]:
        store.rows[meta.key] = (replace(meta, hits=0), b"")
    rig = Rig(store=store)
    assert rig.pager.match(range(21)).num_tokens == 0
    rig.check()
    rig.now_s += 7200  # nobody asked for them in all that time
    rig.serve(A)
    assert rig.pager.flush(rig.now_s + 1) == 0
    assert {tuple(A[:4]), tuple(A[4:8]), tuple(A[8:])} <= {meta.tokens for meta in store.pages()}
    rig.check()
    rig.close()


def test_gc_drops_what_lies_below_a_lost_page() -> None:
    store = MemoryStore()
    for meta in chain(4):
        store.rows[meta.key] = (meta, b"")
    rig = Rig(store=store)
    second = rig.pager.index.nodes[chain(4)[1].key]
    rig.pager.residency.drop_row(second)
    rig.pager.residency.settle(second)
    assert gc(rig.pager, rig.now_s + 1) == 2
    rig.settle()
    assert len(store.rows) == 1
    rig.check()
    rig.close()


def test_verify_drops_rows_and_pages_that_do_not_agree() -> None:
    store = MemoryStore()
    rig = Rig(store=store)
    rig.serve(A)
    rig.pager.flush(rig.now_s + 1)
    gone, (meta, record) = next(iter(store.rows.items()))
    del store.rows[gone]
    store.rows[page_key(ROOT, b"strange")] = (PageMeta(page_key(ROOT, b"strange"), ROOT, (1, 2), 0, 0.0), record)
    assert len(verify(rig.pager, repair=False)) == 1
    verify(rig.pager, repair=True)
    assert verify(rig.pager, repair=False) == []
    assert page_key(ROOT, b"strange") not in store.rows
    assert meta.key == gone
    rig.check()
    rig.close()


def test_rows_of_another_page_size_are_ignored() -> None:
    store = MemoryStore()
    store.rows[ROOT] = (PageMeta(ROOT, ROOT, tuple(range(9)), 0, 0.0), b"")
    rig = Rig(store=store)
    assert rig.pager.statistics().known_pages == 0
    verify(rig.pager, repair=True)
    assert not store.rows
    rig.close()


def test_flush_ends_though_the_store_takes_nothing() -> None:
    store = MemoryStore()
    store.fail_write = StoreFull("full")
    rig = Rig(store=store)
    rig.serve(A)
    assert rig.pager.flush(rig.now_s + 1) == 3
    rig.check()
    rig.close()


def test_flush_without_a_store_has_nothing_to_do() -> None:
    rig = Rig()
    rig.serve(A)
    assert rig.pager.flush(rig.now_s + 1) == 0
    rig.close()


def test_flush_and_verify_keep_their_deadlines() -> None:
    class Stuck(ManualMover):
        def wait(self, timeout_s: float) -> bool:
            rig.now_s += timeout_s
            return False

    store = MemoryStore()
    rig = Rig(store=store, mover=Stuck(1))
    rig.serve(A)
    assert rig.pager.flush(rig.now_s + 1) == 3
    assert "stopped, for its time was over: 0 of 0" in verify(rig.pager, repair=False, deadline_s=rig.now_s + 1)[0]
    rig.settle()
    rig.check()
    rig.close()


def test_pages_in_use_are_flushed_too() -> None:
    store = MemoryStore()
    rig = Rig(store=store)
    lease = rig.start(A)
    rig.grow(lease, A, 0)
    assert rig.pager.flush(rig.now_s + 1) == 0
    assert len(store.rows) == 3
    rig.check()
    rig.close()


def test_clear_gives_the_space_back_when_nothing_is_left() -> None:
    class Counting(MemoryStore):
        clears = 0

        def clear(self) -> None:
            self.clears += 1
            super().clear()

    store = Counting()
    rig = Rig(store=store)
    rig.serve(A)
    rig.pager.flush(rig.now_s + 1)
    lease = rig.start([*A[:4], 9])
    rig.pager.clear()
    rig.pager.flush(rig.now_s + 1)
    assert (store.clears, len(store.rows)) == (0, 1)
    rig.pager.release(lease, A[:4])
    rig.pager.clear()
    rig.pager.flush(rig.now_s + 1)
    assert (store.clears, len(store.rows)) == (1, 0)
    rig.check()
    assert rig.serve(A) == 0
    assert rig.pager.flush(rig.now_s + 1) == 0
    assert len(store.rows) == 3
    rig.check()
    rig.close()


def test_verify_says_why_the_store_is_off(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", 64) as store:
        rig = Rig(store=store, mover=Mover(1))
        rig.serve(A)
        assert rig.pager.flush(rig.now_s + 1) == 0
        assert verify(rig.pager, repair=False) == []
        shutil.rmtree(tmp_path / "kv")
        for repair in (False, True):
            (finding,) = verify(rig.pager, repair)
            assert "the disk tier is off" in finding and "was removed or replaced" in finding
        assert len(rig.notices) == 1
        assert not rig.pager.statistics().nvme_on
        rig.check()
        rig.close()


def test_what_a_running_sequence_streams_survives_clear() -> None:
    store = MemoryStore()
    rig = Rig(device=2, host=0, store=store)
    tokens = list(range(1, 21))
    lease = rig.start(tokens)
    rig.grow(lease, tokens, 0)
    rig.settle()
    assert rig.pager.clear() == 0
    rig.settle()
    rig.expect(lease, tokens)
    rig.check()
    rig.close()


def test_a_streamed_page_whose_row_is_gone_is_a_hole_after_verify() -> None:
    store = MemoryStore()
    rig = Rig(device=2, host=0, store=store)
    tokens = list(range(1, 21))
    lease = rig.start(tokens)
    rig.grow(lease, tokens, 0)
    rig.settle()
    gone = next(node for node in lease.nodes if not node.readable)
    del store.rows[gone.key]
    verify(rig.pager, repair=True)
    rig.pager.tables.refresh(lease)
    assert [lease.nodes[place] for place in lease.absent] == [gone]
    rig.grow(lease, tokens, len(tokens))
    rig.expect(lease, tokens)
    rig.check()
    rig.close()


@pytest.mark.parametrize(("pages", "device", "made"), [(5, 8, 5), (5, 3, 3), (0, 8, 0)])
def test_memory_for_the_first_loads_is_made_ahead(
    monkeypatch: pytest.MonkeyPatch, pages: int, device: int, made: int
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(memory, "populate", lambda address, size: asked.append((address, size)))
    store = MemoryStore()
    for meta in chain(pages):
        store.rows[meta.key] = (meta, b"")
    rig = Rig(device=device, store=store)
    upkeep.warm(rig.pager)
    rig.manual.run_all()
    assert asked == ([(rig.device.address(0), made * rig.device.record_bytes)] if made else [])
    assert rig.mover.outstanding == 0 and rig.mover.statistics()[Link.DEVICE_TO_DEVICE].total_bytes == 0
    rig.close()


def test_a_collection_that_waits_for_the_store_to_forget_says_so() -> None:
    rig = Rig(store=MemoryStore())
    rig.serve(list(range(1, 13)))
    rig.pager.flush(rig.now_s + 1)
    head = next(node for node in rig.pager.index.nodes.values() if node.depth == 0)
    rig.pager.residency.forget(head)  # those after it are found by nobody
    rig.settle()
    collection = upkeep.Collection(rig.pager, 1e9)
    assert not collection.advance() and collection.waits and not rig.manual.queued
    run(rig.pager, collection)
    assert collection.removed_pages and not collection.stopped
    rig.close()
