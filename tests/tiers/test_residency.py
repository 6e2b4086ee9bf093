from __future__ import annotations

import pytest

from tierd.tiers.arena import Arena, SlotState
from tierd.tiers.journal import Journal
from tierd.tiers.keys import pack_tokens, page_key, root_key
from tierd.tiers.page import Tier
from tierd.tiers.prefix import Node, PrefixIndex
from tierd.tiers.residency import Residency

ROOT = root_key("test")


class Books:
    def __init__(self) -> None:
        self.index = PrefixIndex(4)
        self.device, self.host = Arena("device", 4, 64), Arena("host", 4, 64)
        self.journal = Journal(lambda: 0.0)
        self.residency = Residency(self.index, self.device, self.host, 10, self.journal)

    def page(self, parent: Node | None, *tokens: int, tiers: tuple[Tier, ...] = (Tier.DEVICE,)) -> Node:
        key = parent.key if parent is not None else ROOT
        node = Node(page_key(key, pack_tokens(tokens)), key, pack_tokens(tokens))
        self.index.add(node)
        for tier in tiers:
            slot = None
            if tier is not Tier.NVME:
                slot = (self.device if tier is Tier.DEVICE else self.host).alloc(SlotState.FILLING)
            self.residency.place(node, tier, slot or 0)
        return node


def test_tails_go_before_heads() -> None:
    books = Books()
    head = books.page(None, 1, 2, 3, 4)
    tail = books.page(head, 5, 6, 7, 8)
    head.last_use_s, tail.last_use_s = 0, 1000  # even if the head looks older
    assert books.residency.victim(Tier.DEVICE) is tail
    books.residency.evict(tail, Tier.DEVICE)
    assert not tail.alive
    assert books.residency.victim(Tier.DEVICE) is head


def test_a_page_under_a_lease_is_no_victim() -> None:
    books = Books()
    node = books.page(None, 1, 2, 3, 4, tiers=(Tier.DEVICE, Tier.HOST, Tier.NVME))
    books.residency.pin(node)
    assert books.device.state(node.device) is SlotState.PINNED
    assert books.residency.durable_pinned == 1
    assert books.residency.victim(Tier.DEVICE) is None
    assert books.residency.victim(Tier.NVME) is None
    assert books.residency.victim(Tier.HOST) is node  # the lease has the device copy
    books.residency.offer(node)
    books.residency.unpin(node)
    assert books.device.state(node.device) is SlotState.IDLE
    assert books.residency.victim(Tier.DEVICE) is node


def test_host_copies_of_device_pages_go_first() -> None:
    books = Books()
    old = books.page(None, 1, 2, 3, 4, tiers=(Tier.HOST,))
    double = books.page(None, 5, 6, 7, 8, tiers=(Tier.DEVICE, Tier.HOST))
    old.last_use_s, double.last_use_s = 0, 10_000
    assert books.residency.victim(Tier.HOST) is double
    assert books.residency.victim(Tier.HOST) is old


def test_a_busy_page_is_no_victim() -> None:
    books = Books()
    node = books.page(None, 1, 2, 3, 4)
    node.moves = 1
    assert books.residency.victim(Tier.DEVICE) is None
    node.moves = 0
    books.residency.settle(node)
    assert books.residency.victim(Tier.DEVICE) is node


def test_the_last_copy_takes_the_page_along() -> None:
    books = Books()
    node = books.page(None, 1, 2, 3, 4, tiers=(Tier.DEVICE, Tier.HOST, Tier.NVME))
    books.residency.evict(node, Tier.DEVICE)
    assert node.alive
    books.residency.evict(node, Tier.NVME)
    assert list(books.residency.dropped_rows) == [node.key]
    books.residency.evict(node, Tier.HOST)
    assert not node.alive
    assert len(books.index) == 0
    assert books.residency.evictions == [1, 1, 1]
    assert books.device.check() + books.host.check() == []


def test_a_superseded_partial_goes_when_nobody_uses_it() -> None:
    books = Books()
    partial = books.page(None, 1, 2, tiers=(Tier.DEVICE, Tier.NVME))
    books.residency.pin(partial)
    books.page(None, 1, 2, 3, 4)
    books.residency.settle(partial)
    assert partial.alive
    books.residency.unpin(partial)
    assert not partial.alive
    assert list(books.residency.dropped_rows) == [partial.key]


def test_misuse_is_our_bug() -> None:
    books = Books()
    node = books.page(None, 1, 2, 3, 4)
    with pytest.raises(AssertionError, match="already"):
        books.residency.place(node, Tier.DEVICE, 1)
    books.residency.pin(node)
    with pytest.raises(AssertionError, match="in use"):
        books.residency.forget(node)


def test_pages_on_the_device_under_leases_are_known_the_longest_there_first() -> None:
    books = Books()
    first, second = books.page(None, 1, 2, 3, 4), books.page(None, 5, 6, 7, 8)
    third = books.page(None, 9, 10, 11, 12, tiers=(Tier.HOST,))
    for node in (second, first, third):
        books.residency.pin(node)
    assert list(books.residency.leased.values()) == [second, first]
    books.residency.take(second, Tier.DEVICE)
    books.residency.place(third, Tier.DEVICE, books.device.alloc(SlotState.FILLING) or 0)
    assert list(books.residency.leased.values()) == [first, third]
    books.residency.unpin(first)
    books.residency.unpin(third)
    assert not books.residency.leased


def test_a_page_that_a_lease_needs_stays_known_without_a_copy() -> None:
    books = Books()
    node = books.page(None, 1, 2, 3, 4)
    books.residency.pin(node)
    books.residency.evict(node, Tier.DEVICE)
    assert node.alive
    assert not node.has_copy
    books.residency.unpin(node)
    assert not node.alive
    assert len(books.index) == 0


def test_the_version_tells_of_what_leases_see() -> None:
    books = Books()
    node, idle = books.page(None, 1, 2, 3, 4), books.page(None, 5, 6, 7, 8)
    books.residency.pin(node)
    before = books.residency.version
    books.residency.take(idle, Tier.DEVICE)
    assert books.residency.version == before
    books.residency.place(node, Tier.HOST, books.host.alloc(SlotState.FILLING) or 0)
    placed = books.residency.version
    assert placed > before
    books.residency.take(node, Tier.DEVICE)
    assert books.residency.version > placed


def test_a_page_under_a_lease_may_leave_the_device_if_it_can_be_read_below() -> None:
    books = Books()
    node = books.page(None, 1, 2, 3, 4)
    books.residency.pin(node)
    assert books.residency.spillable(node)
    assert not books.residency.droppable(node)
    books.residency.place(node, Tier.HOST, books.host.alloc(SlotState.FILLING) or 0)
    assert books.residency.droppable(node)
    node.moves = 1
    assert not books.residency.spillable(node)
    assert not books.residency.droppable(node)


@pytest.mark.parametrize(
    ("copies", "leaves"),
    [
        ((Tier.DEVICE,), [Tier.DEVICE]),  # it goes down, for there is a tier below
        ((Tier.HOST,), []),
        ((Tier.NVME,), []),
        ((Tier.HOST, Tier.NVME), [Tier.HOST, Tier.NVME]),
        ((Tier.DEVICE, Tier.HOST), [Tier.DEVICE, Tier.HOST]),
        ((Tier.DEVICE, Tier.NVME), [Tier.DEVICE, Tier.NVME]),
    ],
)
def test_the_last_copy_of_a_page_that_is_kept_stays(copies: tuple[Tier, ...], leaves: list[Tier]) -> None:
    books = Books()
    node = books.page(None, 1, 2, 3, 4, tiers=copies)
    node.kept = True
    assert [tier for tier in Tier if books.residency.evictable(node, tier)] == leaves


def test_a_page_that_is_kept_stays_on_the_device_when_there_is_nothing_below() -> None:
    books = Books()
    books.residency.store_slots = 0
    books.residency.host = Arena("host", 0, 64)
    node = books.page(None, 1, 2, 3, 4)
    assert books.residency.evictable(node, Tier.DEVICE)
    node.kept = True
    assert not books.residency.evictable(node, Tier.DEVICE)
