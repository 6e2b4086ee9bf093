from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiers.fakes import Rig
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers.budget import WriteBudget
from tierd.tiers.errors import PrefixInUse, PrefixNotDurable, PrefixUnknown, TierFull
from tierd.tiers.journal import What
from tierd.tiers.page import Tier
from tierd.tiers.prefix import Node
from tierd.tiers.prefix_info import PrefixInfo
from tierd.tiers.prefixes import Prefixes

SYSTEM = list(range(1, 9))  # two pages
ONE = [*SYSTEM, *range(11, 19)]  # two more
TWO = [*SYSTEM, *range(21, 26)]  # one more, and a partial one
OTHER = list(range(31, 35))


def served(store: MemoryStore | None = None, device: int = 40) -> Rig:
    rig = Rig(device=device, host=0, store=store)
    rig.poll()
    for tokens in (ONE, TWO, OTHER):
        rig.serve(tokens)
        rig.now_s += 10
    return rig


def by_tokens(prefixes: Prefixes) -> dict[int, PrefixInfo]:
    return {info.tokens: info for info in prefixes.listing(100)[0]}


def test_runs_without_a_branch_are_one_line() -> None:
    rig = served()
    found = by_tokens(Prefixes(rig.pager, None))
    assert sorted(found) == [4, 8, 13, 16]
    one, two, system = found[16], found[13], found[8]
    assert (one.parent, two.parent, system.parent) == (system.id, system.id, "")
    assert (one.pages, one.own_tokens, one.device, one.nvme) == (4, 8, 4, 0)
    assert (two.pages, two.own_tokens) == (4, 5)
    assert (system.head, one.head) == (tuple(SYSTEM), tuple(ONE[8:]))
    assert (system.hits, one.hits) == (1, 0)
    assert one.idle_s == 30 and not one.in_use
    rig.close()


def test_the_newest_come_first_and_the_rest_is_counted() -> None:
    rig = served()
    found, count = Prefixes(rig.pager, None).listing(2)
    assert count == 4
    assert found[0].tokens == len(OTHER)
    assert len(found) == 2
    rig.close()


def test_a_running_request_is_seen() -> None:
    rig = served()
    lease = rig.start([*ONE, 99])
    assert by_tokens(Prefixes(rig.pager, None))[16].in_use
    rig.pager.release(lease, ONE)
    rig.close()


def test_pages_under_pressure_go_and_pinned_ones_stay() -> None:
    rig = served(device=20)
    prefixes = Prefixes(rig.pager, None)
    assert prefixes.pin(by_tokens(prefixes)[16].id[:8]) == 4
    assert by_tokens(prefixes)[16].pinned
    for start in range(1000, 2000, 40):
        rig.serve(list(range(start, start + 40)))
    found = by_tokens(prefixes)
    assert 16 in found and 13 not in found
    rig.check()
    assert prefixes.unpin(found[16].id) == 4
    for start in range(2000, 3000, 40):
        rig.serve(list(range(start, start + 40)))
    assert 16 not in by_tokens(prefixes)
    rig.check()
    rig.close()


def test_a_pin_ends_where_it_was_set() -> None:
    rig = served()
    prefixes = Prefixes(rig.pager, None)
    system = by_tokens(prefixes)[8].id
    prefixes.pin(system)
    found = by_tokens(prefixes)
    assert found[8].pinned and not found[16].pinned
    rig.serve([*OTHER, *range(40, 48)])
    first = next(info for info in prefixes.listing(9)[0] if info.head[:4] == tuple(OTHER))
    key = next(node.key.hex() for node in rig.pager.index.nodes.values() if node.packed[:1] == bytes([31]))
    prefixes.pin(key)
    runs = [info for info in prefixes.listing(9)[0] if info.tokens in (4, 12)]
    assert first.tokens == 12
    assert [(info.tokens, info.pinned) for info in sorted(runs, key=lambda info: info.tokens)] == [
        (4, True), (12, False),
    ]  # fmt: skip
    rig.close()


def test_unpinning_what_is_not_pinned() -> None:
    rig = served()
    prefixes = Prefixes(rig.pager, None)
    with pytest.raises(PrefixUnknown, match="is not pinned"):
        prefixes.unpin(by_tokens(prefixes)[16].id)
    rig.close()


def test_too_much_can_not_be_pinned() -> None:
    rig = served(device=20)
    rig.serve(list(range(500, 544)))
    prefixes = Prefixes(rig.pager, None)
    with pytest.raises(TierFull, match="11 more would be more than half of the 20 pages"):
        prefixes.pin(by_tokens(prefixes)[44].id)
    assert not by_tokens(prefixes)[44].pinned
    rig.close()


def test_drop_forgets_a_run_and_what_goes_on_from_it() -> None:
    store = MemoryStore()
    rig = served(store)
    rig.settle()
    prefixes = Prefixes(rig.pager, None)
    assert prefixes.drop(by_tokens(prefixes)[16].id) == 2
    assert sorted(by_tokens(prefixes)) == [4, 13]  # what is left of the tree has no branch any more
    rig.settle()
    assert len(store.rows) == 5
    rig.check()
    assert prefixes.drop(by_tokens(prefixes)[13].id) == 4
    assert sorted(by_tokens(prefixes)) == [4]
    rig.settle()
    rig.check()
    rig.close()


def test_what_is_in_use_is_not_dropped() -> None:
    rig = served()
    prefixes = Prefixes(rig.pager, None)
    lease = rig.start([*ONE, 99])
    with pytest.raises(PrefixInUse, match="2 of the 2 pages"):
        prefixes.drop(by_tokens(prefixes)[16].id)
    rig.pager.release(lease, ONE)
    assert prefixes.drop(by_tokens(prefixes)[16].id) == 2
    rig.close()


def test_what_is_pinned_is_not_dropped() -> None:
    rig = served()
    prefixes = Prefixes(rig.pager, None)
    prefixes.pin(by_tokens(prefixes)[16].id)
    with pytest.raises(PrefixInUse, match="is pinned"):
        prefixes.drop(by_tokens(prefixes)[8].id)
    assert prefixes.drop(by_tokens(prefixes)[13].id) == 2
    rig.close()


@pytest.mark.parametrize(
    ("prefix", "words"), [("12", "at least 4"), ("nonsense", "hexadecimal"), ("0" * 32, "is known"), ("", "at least")]
)
def test_ids_that_mean_nothing(prefix: str, words: str) -> None:
    rig = served()
    prefixes = Prefixes(rig.pager, None)
    for verb in (prefixes.pin, prefixes.unpin, prefixes.drop):
        with pytest.raises(PrefixUnknown, match=words):
            verb(prefix)
    rig.close()


def test_an_id_of_several_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = served(device=200)
    monkeypatch.setattr("tierd.tiers.prefixes.MIN_ID_DIGITS", 1)
    first = next(iter(rig.pager.index.nodes)).hex()[0]
    rig.serve(list(range(100, 300)))
    assert sum(key.hex()[0] == first for key in rig.pager.index.nodes) > 1
    with pytest.raises(PrefixUnknown, match="give more digits"):
        Prefixes(rig.pager, None).pin(first)
    rig.close()


def test_pins_outlive_a_restart(tmp_path: Path) -> None:
    store, file = MemoryStore(), tmp_path / "pinned.json"
    rig = served(store)
    prefixes = Prefixes(rig.pager, file)
    prefixes.pin(by_tokens(prefixes)[16].id)
    rig.pager.flush(rig.now_s + 1)
    rig.close()
    assert file.stat().st_mode & 0o777 == 0o600
    rig = Rig(device=40, host=0, store=store)
    found = by_tokens(Prefixes(rig.pager, file))
    assert found[16].pinned and not found[13].pinned
    rig.check()
    rig.close()


@pytest.mark.parametrize("content", [b"", b"{}", b'["zz"]', b"[1]", b'["abcd"]', b'{"pinned": [], "until_s": 3}'])
def test_a_damaged_file_pins_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "pinned.json"
    file.write_bytes(content)
    rig = served()
    prefixes = Prefixes(rig.pager, file)
    assert not any(info.pinned for info in prefixes.listing(9)[0])
    rig.close()


def test_a_file_from_before_pins_could_end_still_pins(tmp_path: Path) -> None:
    file = tmp_path / "pinned.json"
    rig = served()
    key = by_tokens(Prefixes(rig.pager, None))[16].id
    file.write_text(json.dumps([key]))
    assert by_tokens(Prefixes(rig.pager, file))[16].pinned
    rig.close()


def test_pins_of_what_was_cleared_are_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "pinned.json"
    rig = served()
    prefixes = Prefixes(rig.pager, file)
    prefixes.pin(by_tokens(prefixes)[16].id)
    rig.pager.clear()
    rig.serve(OTHER)
    prefixes.pin(by_tokens(prefixes)[4].id)
    assert len(json.loads(file.read_text())["pinned"]) == 1
    rig.close()


def test_what_is_persisted_is_durable_once_nothing_is_missing_any_more() -> None:
    rig = served(MemoryStore())
    prefixes = Prefixes(rig.pager, None)
    one = by_tokens(prefixes)[16]
    before = prefixes.persist(prefixes.way(one.id))
    assert before > 0
    for _ in range(50):
        rig.work()
        if not (left := prefixes.persist(prefixes.way(one.id))):
            break
    assert left == 0 and by_tokens(prefixes)[16].nvme == 4
    assert not rig.pager.writeback.admission.asked
    rig.close()


def test_what_is_worth_no_write_is_written_when_somebody_asks() -> None:
    rig = served(MemoryStore())
    rig.settle()
    rig.serve([*SYSTEM, 77])  # a partial page
    rig.pager.writeback.admission.budget = WriteBudget(1000 * rig.pager.device.record_bytes)
    rig.pager.writeback.admission.budget.spend(700 * rig.pager.device.record_bytes)
    rig.settle()
    prefixes = Prefixes(rig.pager, None)
    partial = by_tokens(prefixes)[9]
    assert partial.nvme == 2  # the second half of the day's writes is not for it
    assert prefixes.persist(prefixes.way(partial.id)) == 1
    rig.settle()
    assert prefixes.persist(prefixes.way(partial.id)) == 0 and by_tokens(prefixes)[9].nvme == 3
    rig.close()


def test_nothing_is_persisted_where_nothing_can_be_written() -> None:
    rig = served()
    prefixes = Prefixes(rig.pager, None)
    with pytest.raises(PrefixNotDurable, match="there is none"):
        prefixes.persist(prefixes.way(by_tokens(prefixes)[16].id))
    rig.close()
    rig = served(MemoryStore())
    prefixes, record_bytes = Prefixes(rig.pager, None), rig.pager.device.record_bytes
    rig.pager.writeback.admission.budget = WriteBudget(record_bytes)
    rig.pager.writeback.admission.budget.spend(record_bytes)
    with pytest.raises(PrefixNotDurable, match="today"):
        prefixes.persist(prefixes.way(by_tokens(prefixes)[16].id))
    rig.pager.writeback.turn_off("broken")
    with pytest.raises(PrefixNotDurable, match="broken"):
        prefixes.persist(prefixes.way(by_tokens(prefixes)[16].id))
    rig.close()


def test_an_evicted_prefix_leaves_memory_and_comes_back_from_disk() -> None:
    rig = served(MemoryStore())
    rig.settle()
    prefixes = Prefixes(rig.pager, None)
    one = by_tokens(prefixes)[16]
    assert prefixes.evict(one.id) == 2  # up to the branch
    found = by_tokens(prefixes)
    assert (found[16].device, found[16].host, found[16].nvme) == (2, 0, 4)
    assert found[13].device == 4
    assert prefixes.evict(found[8].id) == 4 and by_tokens(prefixes)[13].device == 0
    lease = rig.start([*ONE, 99])
    assert lease.hit_nvme == 16
    rig.pager.release(lease, ONE)
    rig.close()


def test_a_prefix_in_memory_alone_or_in_use_is_not_evicted() -> None:
    rig = served(MemoryStore())
    prefixes = Prefixes(rig.pager, None)
    rig.serve([51, 52, 53, 54, 55])
    new = by_tokens(prefixes)[5]
    assert new.nvme == 0
    with pytest.raises(PrefixNotDurable, match="2 of the 2"):
        prefixes.evict(new.id)
    rig.settle()
    lease = rig.start([*ONE, 99])
    with pytest.raises(PrefixInUse, match="in use"):
        prefixes.evict(by_tokens(prefixes)[16].id)
    rig.pager.release(lease, ONE)
    rig.close()


def test_actions_are_in_the_journal() -> None:
    rig = served(MemoryStore())
    rig.settle()
    prefixes, told = Prefixes(rig.pager, None), rig.pager.residency.journal
    start = told.since(0)[-1].number
    one = by_tokens(prefixes)[16].id
    prefixes.pin(one)
    prefixes.unpin(one)
    prefixes.evict(one)
    prefixes.drop(one)
    entries = [entry for entry in told.since(start) if entry.what is What.PREFIX]
    words = ("pinned", "unpinned", "evicted", "dropped")
    assert [word in entry.text for word, entry in zip(words, entries, strict=True)] == [True] * 4
    assert entries[0].slot >= 0 and entries[2].tier is Tier.NVME and entries[3].key is None
    rig.close()


def test_what_is_persisted_is_looked_up_once_and_may_be_forgotten_meanwhile() -> None:
    rig = served(MemoryStore())
    prefixes = Prefixes(rig.pager, None)
    way = prefixes.way(by_tokens(prefixes)[16].id)
    assert [node.depth for node in way] == [3, 2, 1, 0]
    for node in way[:2]:
        rig.pager.residency.forget(node)
    with pytest.raises(PrefixUnknown, match="forgotten"):
        prefixes.persist(way)
    rig.close()


def test_pins_of_what_only_memory_has_end_where_nobody_could_go_on_else(tmp_path: Path) -> None:
    rig, file = served(device=12), tmp_path / "pinned.json"
    prefixes = Prefixes(rig.pager, file)
    one, other = by_tokens(prefixes)[16].id, by_tokens(prefixes)[4].id
    prefixes.pin(one)
    last = rig.pager.index.get(prefixes.way(other)[0].key)
    assert last is not None and prefixes.keep(last, 300.0)
    assert prefixes.give_up() == 5 and prefixes.clear() == 0
    assert not any(info.pinned for info in by_tokens(prefixes).values())
    prefixes.pin(other)  # all is marked anew, and there is room
    assert [tokens for tokens, info in by_tokens(prefixes).items() if info.pinned] == [4]
    assert not any(info.pinned for tokens, info in by_tokens(Prefixes(rig.pager, file)).items() if tokens != 4)
    assert prefixes.give_up() == 1 and prefixes.give_up() == 0
    rig.check()
    rig.close()


def test_what_a_request_wants_kept_is_told_apart_from_pins_by_hand() -> None:
    rig = served()
    prefixes = Prefixes(rig.pager, None)

    def kept() -> dict[int, bool]:
        return {tokens: info.wished for tokens, info in by_tokens(prefixes).items() if info.pinned}

    def page_of(tokens: int) -> Node:
        node = rig.pager.index.get(prefixes.way(by_tokens(prefixes)[tokens].id)[0].key)
        assert node is not None
        return node

    end = page_of(16)
    middle = rig.pager.index.get(end.parent)
    assert middle is not None and prefixes.keep(end, 300.0)
    wished = kept()
    assert wished and all(wished.values())
    prefixes.pin(middle.key.hex())
    found = kept()
    assert found[16] and not found[16 - end.num_tokens]  # also where nothing but the pin ends
    prefixes.pin(end.key.hex())
    assert not any(kept().values())
    rig.close()


def test_pins_of_what_is_on_disk_stay_when_others_have_to_go() -> None:
    rig = served(MemoryStore())
    rig.settle()
    prefixes = Prefixes(rig.pager, None)
    prefixes.pin(by_tokens(prefixes)[16].id)
    rig.settle()
    assert prefixes.give_up() == 0 and by_tokens(prefixes)[16].pinned
    rig.close()


def test_a_clear_ends_pins_of_pages_that_are_not_known_too(tmp_path: Path) -> None:
    rig, file = served(), tmp_path / "pinned.json"
    prefixes = Prefixes(rig.pager, file)
    prefixes.pin(by_tokens(prefixes)[16].id)
    rig.pager.clear()
    assert prefixes.clear() == 1 and prefixes.clear() == 0
    rig.serve(ONE)
    assert not any(info.pinned for info in by_tokens(Prefixes(rig.pager, file)).values())
    rig.close()
