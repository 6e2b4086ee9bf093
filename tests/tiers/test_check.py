"""Each invariant is broken on purpose, and `check` sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tiers.fakes import FAR_S, Rig, stored
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers.arena import SlotState
from tierd.tiers.keys import pack_tokens, root_key
from tierd.tiers.lease import Lease
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.prefix import Leaving, Node
from tierd.tiers.store import PageMeta

A = list(range(1, 13))


class Case:
    """Three durable pages and a partial one; a lease on two of them, with a private page."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.rig = Rig(device=10, host=4, store=self.store)
        self.rig.serve([*A, 1])
        self.rig.pager.flush(self.rig.now_s + 1)
        self.lease: Lease = self.rig.start(A[:8])
        self.rig.grow(self.lease, A[:10], 8)
        self.rig.settle()
        self.nodes = list(self.rig.pager.index.nodes.values())
        self.first, self.second, self.third, self.partial = self.nodes

    @property
    def pager(self):  # type: ignore[no-untyped-def]
        return self.rig.pager


def orphan(case: Case) -> None:
    case.pager.index._children.pop(case.second.key)


def copyless(case: Case) -> None:
    case.pager.residency.take(case.partial, Tier.NVME)
    case.pager.residency.take(case.partial, Tier.DEVICE)


def strange_node(case: Case) -> None:
    node = Node(PageKey(b"x" * 16), root_key("elsewhere"), b"")
    node.durable = True
    case.pager.index.add(node)


def child_of_partial(case: Case) -> None:
    node = Node(PageKey(b"x" * 16), case.partial.key, pack_tokens([1]))
    node.durable = True
    case.pager.index.add(node)


def strange_row(case: Case) -> None:
    key = PageKey(b"z" * 16)
    case.store.rows[key] = (PageMeta(key, key, (1,), 0, 0.0), b"")


def computed_by_nobody(case: Case) -> None:
    case.lease.absent.add(1)
    case.lease.filling[1] = 9


BREAKS: list[tuple[str, Callable[[Case], object]]] = [
    ("pins, 1 leases", lambda case: setattr(case.first, "pins", 5)),
    ("2 leases", lambda case: case.pager.leases.add(twin(case))),
    ("does not follow", lambda case: case.lease.nodes.reverse()),
    ("absent are [5]", lambda case: case.lease.absent.add(5)),
    ("being computed [1]", lambda case: case.lease.filling.update({1: case.lease.private[0]})),
    ("that another lease computes", computed_by_nobody),
    ("the index holds it as", lambda case: case.pager.index.nodes.update({b"y" * 16: case.first})),
    ("no tier holds it", copyless),
    ("0 tokens", strange_node),
    ("in flight and not counted", lambda case: setattr(case.third, "writing", True)),
    ("the evictor counts", lambda case: setattr(case.third, "leaving", Leaving.WRITE)),
    ("the evictor counts", lambda case: setattr(case.pager.evictor, "in_motion", 3)),
    ("not linked to their parents", orphan),
    ("a partial page has children", child_of_partial),
    ("its counts say", lambda case: case.first.kids.__setitem__(0, 0)),
    ("a child is under a lease", lambda case: setattr(case.first, "pins", 0)),
    ("a gap that is none", lambda case: case.pager.index.gaps.add(case.first.key)),
    ("and to another", lambda case: setattr(case.third, "device", case.first.device)),
    ("there is no slot", lambda case: setattr(case.third, "host", 99)),
    ("not IDLE", lambda case: case.rig.device.set_state(case.third.device, SlotState.PINNED)),
    ("not PINNED", lambda case: case.rig.device.set_state(case.first.device, SlotState.IDLE)),
    ("some leaked", lambda case: case.rig.device.alloc(SlotState.PRIVATE)),
    ("none is in flight", lambda case: case.rig.host.alloc(SlotState.FILLING)),
    ("no candidate there", lambda case: setattr(case.partial, "queued", 0)),
    ("are durable, the ledger", lambda case: setattr(case.pager.residency, "durable_pages", 1)),
    ("under leases, the ledger", lambda case: setattr(case.pager.residency, "durable_pinned", 1)),
    ("need not be", lambda case: case.pager.residency.dirty.update({case.first.key: case.first})),
    ("1 rows too many", strange_row),
    ("1 too few", lambda case: case.store.rows.pop(case.first.key)),
    ("device: slots by state", lambda case: case.rig.device.counts.__setitem__(1, 7)),
    ("host: a slot is on the free list twice", lambda case: case.rig.host._free.append(0)),
]


def twin(case: Case) -> Lease:
    other = Lease(case.lease.root, 4)
    other.nodes = case.lease.nodes[:1]
    return other


def test_the_case_itself_is_right() -> None:
    case = Case()
    assert case.pager.check() == []
    assert case.partial.num_tokens == 1
    assert len(case.lease.nodes) == 2
    case.rig.close()


@pytest.mark.usefixtures("broken_books")
@pytest.mark.parametrize(("words", "break_it"), BREAKS, ids=[words for words, _ in BREAKS])
def test_each_broken_invariant_is_found(words: str, break_it: Callable[[Case], object]) -> None:
    case = Case()
    break_it(case)
    findings = case.pager.check()
    assert any(words in finding for finding in findings), findings
    case.rig.close()


@pytest.mark.usefixtures("broken_books")
def test_a_page_without_a_copy_is_right_only_under_a_lease() -> None:
    case = Case()
    case.pager.residency.take(case.second, Tier.NVME)
    case.pager.residency.take(case.second, Tier.DEVICE)
    assert not case.second.has_copy
    assert not [finding for finding in case.pager.check() if "no tier holds it" in finding]
    case.second.pins = 0
    assert [finding for finding in case.pager.check() if "no tier holds it" in finding]
    case.rig.close()


def test_books_balance_while_pages_load_into_both_arenas() -> None:
    rig, _ = stored(A, device=2, host=2)
    lease = rig.pager.match([*A, 1])
    rig.pager.fetch(lease, FAR_S)
    rig.check()
    stats = rig.pager.statistics()
    assert (stats.device.in_flight_pages, stats.host.in_flight_pages) == (2, 1)
    while rig.manual.run():
        rig.check()
        rig.poll()
        rig.check()
    assert lease.ready
    rig.close()
