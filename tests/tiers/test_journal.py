from __future__ import annotations

from tests.tiers.fakes import Rig
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers import journal
from tierd.tiers.journal import Journal, What
from tierd.tiers.keys import pack_tokens, page_key, root_key
from tierd.tiers.page import Tier
from tierd.tiers.prefix import NOWHERE, Node


class Clock:
    def __init__(self) -> None:
        self.now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def page(number: int) -> Node:
    packed, root = pack_tokens([number]), root_key("journal")
    return Node(page_key(root, packed), root, packed)


def test_like_things_soon_after_each_other_are_one_entry() -> None:
    clock = Clock()
    told = Journal(clock)
    for number in range(3):
        told.page(What.EVICT, page(number), Tier.DEVICE, number)
        clock.now_s += 0.1
    told.page(What.RESTORE, page(7), Tier.HOST, 4)
    evicted, restored = told.since(0)
    assert (evicted.what, evicted.count, evicted.tier, evicted.slot) == (What.EVICT, 3, Tier.DEVICE, 2)
    assert evicted.key == page(2).key
    assert evicted.at_s == 10.2 and restored.at_s > evicted.at_s
    assert [entry.number for entry in (evicted, restored)] == [1, 2]


def test_what_was_told_grows_no_more() -> None:
    told = Journal(Clock())
    told.page(What.EVICT, page(1), Tier.DEVICE, 1)
    [first] = told.since(0)
    told.page(What.EVICT, page(2), Tier.DEVICE, 2)
    [second] = told.since(first.number)
    assert (first.count, second.count) == (1, 1)
    assert told.since(second.number) == []


def test_an_entry_sums_up_a_second_at_most_though_nobody_looks() -> None:
    clock = Clock()
    told = Journal(clock)
    for number in range(25):
        told.page(What.EVICT, page(number), Tier.DEVICE, number)
        clock.now_s += 0.1
    assert len(told.since(0)) >= 2
    assert sum(entry.count for entry in told.since(0)) == 25


def test_a_single_event_comes_after_what_was_before_it() -> None:
    told = Journal(Clock())
    node = page(1)
    node.host = 5
    told.page(What.DEMOTE, node, Tier.HOST, 5)
    told.tell(What.DAMAGE, "it was wrong", node)
    demoted, damaged = told.since(0)
    assert (damaged.what, damaged.text, damaged.slot, damaged.tier) == (What.DAMAGE, "it was wrong", 5, Tier.HOST)
    assert demoted.number < damaged.number


def test_it_is_bounded_and_keeps_the_newest() -> None:
    told = Journal(Clock())
    for number in range(journal.MAX_ENTRIES + 10):
        told.tell(What.RESIZE, str(number))
    kept = told.since(0)
    assert len(kept) == journal.MAX_ENTRIES and kept[-1].text == str(journal.MAX_ENTRIES + 9)
    assert [entry.text for entry in told.since(kept[-3].number)] == [entry.text for entry in kept[-2:]]
    assert told.since(kept[-1].number + 50) == []  # of another engine


def test_a_pager_tells_what_it_does_to_pages() -> None:
    rig = Rig(device=4, host=2, store=MemoryStore())
    rig.poll()
    for start in (1, 31, 61, 91):
        rig.serve(list(range(start, start + 8)))
        rig.settle()
    rig.serve([*range(1, 9), 99])  # from the store
    entries = rig.pager.residency.journal.since(0)
    told = {what: sum(entry.count for entry in entries if entry.what is what) for what in What}
    stats = rig.pager.statistics()
    assert told[What.PERSIST] == stats.written_pages and told[What.DEMOTE] == stats.demotions
    assert told[What.EVICT] + told[What.SPILL] == sum(
        tier.evictions for tier in (stats.device, stats.host, stats.nvme)
    )
    assert told[What.RESTORE] == stats.loaded_pages > 0
    assert all(entry.slot == NOWHERE for entry in entries if entry.tier is Tier.NVME)
    rig.close()
