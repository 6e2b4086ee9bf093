"""Pins that end by themselves: their bookkeeping, and what they keep in the tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.fakes import Rig
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers import keeps as keeps_module
from tierd.tiers.errors import PrefixUnknown
from tierd.tiers.keeps import MAX_KEEPS, MAX_TTL_S, Keeps
from tierd.tiers.page import PageKey
from tierd.tiers.prefix import Node
from tierd.tiers.prefixes import Prefixes

LONG = list(range(1, 17))  # four pages
OTHER = list(range(101, 113))  # three


class Wall:
    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(16, "big"))


def last_page(rig: Rig, tokens: list[int]) -> Node:
    lease = rig.start([*tokens, 99])
    node = lease.nodes[-1]
    rig.pager.release(lease, [])
    return node


def served(store: MemoryStore | None = None, device: int = 20) -> Rig:
    rig = Rig(device=device, host=0, store=store)
    rig.serve(LONG)
    return rig


def test_a_wish_ends_and_a_repeated_one_goes_on() -> None:
    keeps = Keeps({}, 0.0)
    assert keeps.add(key(1), 300.0, 100.0) == keeps.add(key(2), 100.0, 100.0) == (True, None)
    assert not keeps.expire(199.0) and keeps.expire(200.0) and list(keeps) == [key(1)]
    assert not keeps.add(key(1), 300.0, 101.0).gained  # gains too little to be written down
    assert keeps.add(key(1), 300.0, 350.0).gained
    assert not keeps.expire(600.0) and keeps.expire(650.0) and not len(keeps)


def test_a_shorter_wish_takes_nothing_away() -> None:
    keeps = Keeps({}, 0.0)
    keeps.add(key(1), 3600.0, 0.0)
    assert not keeps.add(key(1), 300.0, 10.0).gained and keeps.until_s() == {key(1): 3600.0}


def test_the_number_and_the_length_of_wishes_is_bounded() -> None:
    keeps = Keeps({key(1): 10.0 * MAX_TTL_S, key(2): -1.0}, 0.0)
    assert keeps.until_s() == {key(1): MAX_TTL_S}
    displaced = [keeps.add(key(number), 100.0 + number, 0.0).displaced for number in range(3, MAX_KEEPS + 4)]
    assert displaced == [None] * (MAX_KEEPS - 1) + [key(3), key(4)]
    assert len(keeps) == MAX_KEEPS and key(1) in keeps and key(3) not in keeps
    assert keeps.soonest() == key(5)


def test_kept_pages_stay_until_their_time_is_over() -> None:
    rig, wall = served(device=10), Wall()
    prefixes = Prefixes(rig.pager, None, wall)
    assert prefixes.keep(last_page(rig, LONG), 300.0)
    for start in range(200, 300, 20):
        rig.serve(list(range(start, start + 16)))
    assert rig.serve([*LONG, 99]) == 16
    rig.check()
    wall.now_s += 300.0
    rig.now_s += 1e5  # and nobody has used it for long
    prefixes.expire()
    assert not any(node.kept for node in rig.pager.index.nodes.values())
    for start in range(300, 600, 20):
        rig.serve(list(range(start, start + 16)))
    assert rig.serve([*LONG, 99]) == 0
    rig.check()
    rig.close()


def test_a_wish_that_had_to_go_for_another_keeps_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeps_module, "MAX_KEEPS", 3)
    rig = served(device=40)
    prefixes = Prefixes(rig.pager, None, Wall())
    chains = [[*LONG[:8], *range(start, start + 8)] for start in range(200, 300, 10)]  # they share two pages
    for place, tokens in enumerate(chains):
        rig.serve(tokens)
        assert prefixes.keep(last_page(rig, tokens), 300.0 + place)
        alive = chains[max(place - 2, 0) : place + 1]
        wanted = {page for tokens in alive for page in rig.pager.chain([*tokens, 1])}
        kept = {node.key for node in rig.pager.index.nodes.values() if node.kept}
        assert kept == wanted and prefixes._kept_pages == len(wanted)
    rig.check()
    rig.close()


def test_more_than_half_is_not_kept() -> None:
    rig = served(device=7)
    prefixes = Prefixes(rig.pager, None, Wall())
    assert not prefixes.keep(last_page(rig, LONG), 300.0)
    assert prefixes.keep(last_page(rig, LONG[:12]), 300.0)
    assert sum(node.kept for node in rig.pager.index.nodes.values()) == 3
    rig.close()


def test_a_pin_by_hand_takes_the_room_of_wishes() -> None:
    rig = served(device=10)
    prefixes = Prefixes(rig.pager, None, Wall())
    rig.serve(OTHER)
    assert prefixes.keep(last_page(rig, LONG[:8]), 300.0) and prefixes.keep(last_page(rig, OTHER[:4]), 900.0)
    assert prefixes.pin(last_page(rig, OTHER).key.hex()) == 3  # 2 wished for, 3 more would be 5 of 5
    assert prefixes.keep(last_page(rig, LONG[:8]), 300.0)
    assert not prefixes.keep(last_page(rig, LONG), 300.0)
    rig.close()


def test_a_pin_by_hand_that_finds_room_leaves_wishes_alone_and_one_that_does_not_ends_the_soonest() -> None:
    rig = served(device=12)
    prefixes = Prefixes(rig.pager, None, Wall())
    rig.serve(OTHER)
    prefixes.keep(last_page(rig, LONG[:8]), 300.0)
    prefixes.keep(last_page(rig, OTHER[:4]), 900.0)
    prefixes.pin(last_page(rig, LONG).key.hex())
    kept = {node.key for node in rig.pager.index.nodes.values() if node.kept}
    assert len(kept) == 5 and last_page(rig, OTHER[:4]).key in kept
    prefixes.pin(last_page(rig, OTHER[:8]).key.hex())
    with pytest.raises(PrefixUnknown, match="is not pinned"):
        prefixes.unpin(last_page(rig, OTHER).key.hex())
    rig.check()
    rig.close()


def test_unpin_and_drop_end_wishes_too() -> None:
    rig = served()
    prefixes = Prefixes(rig.pager, None, Wall())
    prefixes.keep(last_page(rig, LONG), 300.0)
    assert prefixes.unpin(last_page(rig, LONG[:8]).key.hex()) == 4
    prefixes.keep(last_page(rig, LONG), 300.0)
    assert prefixes.drop(last_page(rig, LONG).key.hex()) == 4
    rig.check()
    rig.close()


def test_wishes_outlive_a_restart_and_end_on_time(tmp_path: Path) -> None:
    store, file, wall = MemoryStore(), tmp_path / "pinned.json", Wall()
    rig = served(store)
    Prefixes(rig.pager, file, wall).keep(last_page(rig, LONG), 300.0)
    rig.pager.flush(rig.now_s + 1)
    rig.close()
    wall.now_s += 200.0
    rig = Rig(device=20, host=0, store=store)
    prefixes = Prefixes(rig.pager, file, wall)
    assert sum(node.kept for node in rig.pager.index.nodes.values()) == 4
    wall.now_s += 100.0
    prefixes.expire()
    assert not any(node.kept for node in rig.pager.index.nodes.values())
    rig.close()
    rig = Rig(device=20, host=0, store=store)
    Prefixes(rig.pager, file, wall)
    assert not any(node.kept for node in rig.pager.index.nodes.values())
    rig.close()


def test_a_tenant_with_a_bound_keeps_half_of_it() -> None:
    rig = Rig(device=40, host=0)
    prefixes = Prefixes(rig.pager, None, Wall())
    lease = rig.pager.match(LONG, b"t", tenant=b"t", quota_pages=6)
    rig.pager.fetch(lease, 1e9)
    rig.grow(lease, LONG, 0, b"t")
    assert not prefixes.keep(lease.nodes[3], 300.0)
    assert prefixes.keep(lease.nodes[2], 300.0) and prefixes.keep(lease.nodes[2], 900.0)
    rig.pager.release(lease, LONG)
    rig.close()


def test_a_page_that_is_gone_is_not_kept() -> None:
    rig = served()
    node = last_page(rig, LONG)
    rig.pager.clear()
    assert not Prefixes(rig.pager, None, Wall()).keep(node, 300.0)
    rig.close()
