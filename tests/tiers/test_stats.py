from __future__ import annotations

import msgspec

from tests.tiers.fakes import FAR_S, Rig, lost_key, stored
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers.stats import TierStats

A = list(range(1, 13))


def test_figures_say_what_happened() -> None:
    rig = Rig(device=4, host=8, store=MemoryStore(100))
    rig.serve(A)
    rig.serve([*A[:8], 50])
    rig.pager.flush(rig.now_s + 1)
    stats = rig.pager.statistics()
    assert (stats.lookups, stats.lookup_tokens, stats.hit_device_tokens) == (2, 21, 8)
    assert stats.written_pages == 4
    assert stats.nvme == TierStats(100, 96, 0, 4, 0, 64, 0)
    assert stats.device.total_bytes == 4 * 64
    assert stats.links["disk_write"].total_bytes == 4 * 64
    assert stats.nvme_on
    assert stats.known_pages == 4
    rig.close()


def test_figures_travel_as_messages() -> None:
    rig = Rig()
    rig.serve(A)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(rig.pager.statistics()))
    assert decoded["device"]["total_pages"] == 8
    assert decoded["misses"] == {}
    rig.close()


def test_a_ledger_that_does_not_add_up_says_so() -> None:
    assert TierStats(10, 5, 2, 2, 1, 64, 0).balanced
    assert not TierStats(10, 5, 2, 2, 2, 64, 0).balanced


def test_the_page_map_has_a_byte_for_each_slot() -> None:
    rig = Rig(device=5)
    rig.serve(A[:6])
    assert sorted(rig.pager.page_map()) == [0, 0, 0, 3, 3 | 8]
    rig.close()


def test_pages_that_left_the_device_under_their_lease_are_counted() -> None:
    rig = Rig(device=3, host=3)
    lease = rig.start(A)
    rig.grow(lease, A, 0)
    rig.allocate(rig.pager.match([7]), 0, 8)
    stats = rig.pager.statistics()
    assert (stats.spills, stats.demotions, stats.device.evictions) == (2, 2, 2)
    assert (stats.device.used_pages, stats.host.used_pages) == (3, 2)
    rig.close()


def test_loaded_pages_and_those_that_were_not_are_counted() -> None:
    rig, store = stored(A)
    lease = rig.pager.match([*A, 1])
    store.fail_read = lost_key(lease.nodes[0].key)
    rig.pager.fetch(lease, FAR_S)
    assert rig.pager.statistics().fetching == 1
    rig.settle()
    stats = rig.pager.statistics()
    assert (stats.loaded_pages, stats.misses, stats.fetching) == (2, {"payload": 1}, 1)
    rig.grow(lease, A, 0)
    rig.poll()
    assert rig.pager.statistics().fetching == 0
    rig.close()
