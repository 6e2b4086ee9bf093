from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.tiers.fakes import ROOT, Rig, open_store, verify
from tests.tiers.stand_ins import MemoryStore
from tests.tiers.test_upkeep import chain
from tierd.tiers.mover import Mover
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.store import PageMeta, Store, Verified
from tierd.tiers.verify import BOOK_PAGES, READ_PAGES, Verification

MANY = 3000
A, B = list(range(1, 13)), list(range(31, 51))
STRANGE = PageKey(b"s" * 16)


def many_pages() -> Rig:
    """A pager over a store with thousands of pages."""
    store = MemoryStore(MANY + 100)
    for meta in chain(MANY):
        store.rows[meta.key] = (meta, b"\0" * 64)
    return Rig(store=store)


def step(rig: Rig, verification: Verification) -> bool:
    """What happens between two steps of the model."""
    rig.manual.run()
    rig.poll()
    return verification.advance()


def test_thousands_of_pages_are_looked_at_between_the_steps_of_a_sequence() -> None:
    rig = many_pages()
    verification = Verification(rig.pager, repair=False)
    served = looked = 0
    while not step(rig, verification):
        looked += 1
        if looked % 20 == 0:
            rig.serve([served + 100, *A])
            served += 1
    assert verification.findings == [] and verification.total_pages == MANY <= verification.read_pages
    assert looked > MANY // BOOK_PAGES + MANY // READ_PAGES and served > 3
    rig.check()
    rig.close()


def test_pages_that_come_and_go_meanwhile_are_no_findings() -> None:
    rig = Rig(device=8, host=0, store=MemoryStore(40))  # a store that is always full
    for number in range(12):
        rig.serve([number, *B])
    for repair in (False, True):
        verification = Verification(rig.pager, repair)
        number = 0
        while not step(rig, verification):
            number += 1
            rig.now_s += 0.1
            rig.serve([1000 + number % 30, *B])
        assert verification.findings == []
        rig.settle()
        rig.check()
    rig.close()


def test_it_is_stopped_at_once_and_says_how_far_it_came() -> None:
    rig = many_pages()
    verification = Verification(rig.pager, repair=True)
    while verification.read_pages < 2 * READ_PAGES:
        step(rig, verification)
    verification.stop("it was cancelled")
    assert verification.ended
    assert verification.findings == [
        f"stopped, for it was cancelled: {2 * READ_PAGES} of {MANY} stored pages were read"
    ]
    rig.settle()
    rig.check()
    assert verify(rig.pager, repair=False) == [], "another one begins anew"
    rig.close()


def test_its_deadline_ends_it() -> None:
    rig = many_pages()
    verification = Verification(rig.pager, repair=False, deadline_s=rig.now_s + 5)
    while not step(rig, verification):
        rig.now_s += 1
    assert verification.findings[-1].startswith("stopped, for its time was over: ")
    rig.close()


def test_rows_that_nobody_knows_go_and_those_on_their_way_out_are_not_told() -> None:
    store = MemoryStore()
    rig = Rig(store=store)
    rig.serve(A)
    rig.pager.flush(rig.now_s + 1)
    store.rows[STRANGE] = (PageMeta(STRANGE, ROOT, (1, 2), 0, 0.0), b"")
    node = next(node for node in rig.pager.index.nodes.values() if not rig.pager.index.children(node.key))
    rig.pager.residency.evict(node, Tier.NVME)  # its row is to be deleted
    found = verify(rig.pager, repair=False)
    assert found == ["the store has 1 rows too many and 0 too few"]
    assert verify(rig.pager, repair=True) == found
    assert STRANGE not in store.rows and verify(rig.pager, repair=False) == []
    rig.settle()
    rig.check()
    rig.close()


def test_a_lost_page_that_is_being_loaded_is_forgotten_when_that_is_over() -> None:
    store = MemoryStore()
    rig = Rig(device=8, host=0, store=store)
    rig.serve(A)
    rig.pager.flush(rig.now_s + 1)
    for node in list(rig.pager.index.nodes.values()):
        rig.pager.residency.evict(node, Tier.DEVICE)
    lease = rig.pager.match([*A, 1])
    rig.pager.fetch(lease, 1e9)
    gone = lease.nodes[-1]
    del store.rows[gone.key]
    verification = Verification(rig.pager, repair=True)
    while not verification.advance():  # the load was submitted first, but runs when all is known
        if verification.findings:
            rig.manual.run()
        elif verification.waits:
            rig.manual.run(rig.manual.queued - 1)
        rig.poll()
    assert verification.findings == ["the store has 0 rows too many and 1 too few"]
    assert not gone.durable
    rig.settle()
    rig.pager.release(lease, A[:8])
    rig.check()
    rig.close()


@contextlib.contextmanager
def damaged(path: Path) -> Iterator[tuple[Rig, Store]]:
    """A pager over a real store whose page in slot 2 fails its checksum."""
    with open_store(path, 64) as store:
        rig = Rig(device=6, host=0, store=store, mover=Mover(1))
        for number in range(6):
            rig.serve([number, *B])
        assert rig.pager.flush(rig.now_s + 1) == 0
        with open(path / "slab-00000.pages", "r+b") as file:
            file.seek(store.statistics().slot_bytes * 2 + 4096)
            file.write(b"damage")
            os.fsync(file.fileno())
        yield rig, store
        rig.close()


@pytest.mark.parametrize("repair", [False, True])
def test_a_damaged_page_on_a_real_disk_while_a_sequence_goes_on(tmp_path: Path, repair: bool) -> None:
    with damaged(tmp_path / "kv") as (rig, store):
        stored = len(list(store.pages()))
        lease = rig.start(A)
        verification = Verification(rig.pager, repair)
        while not verification.advance():
            rig.mover.wait(0.05)
            rig.poll()
        rig.grow(lease, A, 0)
        rig.expect(lease, A)
        rig.pager.release(lease, A)
        (finding,) = verification.findings
        assert "in slot 2: " in finding and ("; removed" in finding) == repair
        assert verification.read_pages == stored
        rig.settle()
        rig.check()
        assert len(verify(rig.pager, repair=False)) == (not repair)


@pytest.mark.parametrize("heard", [False, True])
def test_what_a_repair_removed_is_booked_out_even_when_it_is_stopped(tmp_path: Path, heard: bool) -> None:
    with damaged(tmp_path / "kv") as (rig, store):
        looked, look = threading.Event(), store.verify_pages

        def look_and_tell(after_slot: int, count: int, repair: bool) -> Verified:
            found = look(after_slot, count, repair)
            if repair:
                looked.set()
            return found

        store.verify_pages = look_and_tell
        verification = Verification(rig.pager, repair=True)
        while not verification.findings if heard else not looked.is_set():
            verification.advance()
            rig.mover.wait(0.01)
            if heard or not looked.is_set():
                rig.poll()
        verification.stop("it was cancelled")
        rig.settle()
        rig.check()
        assert verify(rig.pager, repair=False) == []


def off(rig: Rig, when: str) -> Verification:
    """A repair while which the disk tier goes off, without an error of the store: before it, while rows are compared,
    or while what is wrong is removed. It is advanced a bounded number of times."""
    store, pager = rig.pager.store, rig.pager
    assert isinstance(store, MemoryStore)
    verification = Verification(pager, repair=True)
    plain = store.missing

    def missing(keys: Sequence[PageKey]) -> list[PageKey]:
        if when == "compare":
            pager.writeback.turn_off("a test said so")
        return plain(keys)

    store.missing = missing
    if when == "before":
        pager.writeback.turn_off("a test said so")
    for _ in range(200):
        if verification.advance():
            break
        if when == "mend" and verification.findings:
            pager.writeback.turn_off("a test said so")
        rig.manual.run()
        rig.poll()
    return verification


@pytest.mark.parametrize("when", ["before", "compare", "mend"])
def test_a_repair_ends_when_the_disk_tier_goes_off(when: str) -> None:
    store = MemoryStore()
    rig = Rig(store=store)
    rig.serve(A)
    rig.pager.flush(rig.now_s + 1)
    store.rows[STRANGE] = (PageMeta(STRANGE, ROOT, (1, 2), 0, 0.0), b"")
    verification = off(rig, when)
    assert verification.ended and verification.error is None
    assert verification.findings[-1].endswith("the disk tier is off, not all pages were read: a test said so")
    assert sum("rows too many" in finding for finding in verification.findings) == (when == "mend")
    rig.settle()
    rig.check()
    rig.close()


def test_a_repair_looks_no_page_up_on_the_thread_of_the_steps(tmp_path: Path) -> None:
    with damaged(tmp_path / "kv") as (rig, store):
        asked: list[threading.Thread] = []
        plain = store.missing

        def missing(keys: Sequence[PageKey]) -> list[PageKey]:
            asked.append(threading.current_thread())
            return plain(keys)

        store.missing = missing
        findings = verify(rig.pager, repair=True)
        assert len(findings) == 1 and findings[0].endswith("; removed")
        assert asked and threading.current_thread() not in asked
        rig.settle()
        rig.check()
