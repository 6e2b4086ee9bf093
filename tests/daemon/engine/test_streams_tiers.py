"""Requests whose pages lie below the device, or in no memory at all: same tokens, nothing computed twice."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon.engine.fakes import PAGE, expected
from tests.daemon.engine.rig import Rig
from tierd.daemon.engine.scheduler import Phase
from tierd.daemon.engine.stepping import MAX_LOST_STEPS
from tierd.tiers.errors import LostReason, PageLost
from tierd.tiers.links import Link
from tierd.tiers.page import PageKey, Tier

LONG = [place * 7 % 60 for place in range(90)]


def cold(rig: Rig) -> None:
    """Leaves every page in the store only."""
    assert rig.pager.flush(rig.clock() + 10.0) == 0
    for node in list(rig.pager.index.nodes.values()):
        if node.device >= 0:
            rig.pager.residency.evict(node, Tier.DEVICE)
    rig.check_quiet()


def test_a_sequence_longer_than_the_device_spills_and_is_read_in_cpu_memory() -> None:
    rig = Rig(slots=4, host=40)
    rig.submit(1, LONG, 12)
    rig.run()
    assert rig.tokens(1) == expected(LONG, 12)
    stats = rig.pager.statistics()
    assert stats.spills >= 20 and rig.staged.passes == 0
    assert stats.links[Link.HOST_TO_DEVICE].count == 0  # nothing is brought back to be read


def test_a_sequence_longer_than_all_memory_is_streamed() -> None:
    rig = Rig(slots=4, host=3, store=60)
    rig.submit(1, LONG, 12)
    rig.run()
    assert rig.tokens(1) == expected(LONG, 12)
    assert rig.staged.passes > 10 and rig.pager.statistics().spills >= 20


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize(("host", "store"), [(40, 0), (0, 60), (2, 60)])
def test_a_device_of_a_few_pages_serves_several(slots: int, host: int, store: int) -> None:
    rig = Rig(slots=slots, host=host, store=store)
    for number in (1, 2, 3):
        rig.submit(number, LONG[number : number + 30], 6)
    rig.run()
    for number in (1, 2, 3):
        assert rig.tokens(number) == expected(LONG[number : number + 30], 6)


@pytest.mark.parametrize("slots", [1, 3, 5])
@pytest.mark.parametrize(("host", "store"), [(40, 0), (40, 200), (0, 90)])
def test_pages_on_their_way_out_are_waited_for_and_cost_nobody_his_pages(slots: int, host: int, store: int) -> None:
    rig = Rig(slots=slots, host=host, store=store, max_streams=3)
    prompts = {number: LONG[number * 3 : number * 3 + 15 * (1 + number % 3)] for number in range(1, 7)}
    for number, prompt in prompts.items():
        rig.submit(number, prompt, 8)
    busy = 0  # turns in a row that did nothing, and asked for another one at once
    for _ in range(2000):
        steps = rig.streams.totals.steps
        if not rig.streams.turn():
            busy = 0
            if not rig.mover.run():  # one copy or read a nap
                rig.clock.now_s += 0.05
        busy = busy + 1 if steps == rig.streams.totals.steps else 0
        assert busy <= 4
        rig.events += rig.streams.take_events()
        if not len(rig.streams):
            break
    assert rig.streams.totals.preemptions <= 2
    for number, prompt in prompts.items():
        assert rig.tokens(number) == expected(prompt, 8)
    rig.check_quiet()


def test_without_a_lower_tier_a_long_prompt_is_refused_with_the_figure() -> None:
    rig = Rig(slots=4)
    with pytest.raises(Exception, match="holds 16 of one sequence"):
        rig.submit(1, LONG, 12)


def test_a_prefix_comes_from_the_store_and_is_not_computed_again() -> None:
    rig = Rig(store=60)
    rig.submit(1, LONG, 4)
    rig.run()
    cold(rig)
    rows = rig.decoder.rows
    rig.submit(2, LONG, 4)
    rig.run()
    assert rig.tokens(2) == rig.tokens(1)
    (done,) = rig.of(2, "done")
    assert done["timings"].hit_nvme == len(LONG) - 1 and rig.decoder.rows - rows == 1 + 3


def test_prefill_and_loads_meet_in_the_middle() -> None:
    rig = Rig(store=60)
    rig.submit(1, LONG, 4)
    rig.run()
    cold(rig)
    rows = rig.decoder.rows
    rig.submit(2, LONG, 4)
    rig.streams.turn()
    rig.clock.now_s += 3.0  # the disk is slow: nothing came in three seconds
    while rig.streams.count(Phase.FETCHING, Phase.PREFILL):
        rig.streams.turn()
        rig.mover.run()
        rig.mover.run()
        rig.events += rig.streams.take_events()
    rig.run()
    assert rig.tokens(2) == rig.tokens(1)
    usage = rig.of(2, "done")[0]["usage"]
    computed = rig.decoder.rows - rows - 3
    assert 0 < usage.cached_tokens < len(LONG) - 1 and computed == len(LONG) - usage.cached_tokens
    assert rig.of(2, "accepted") == [{"prompt_tokens": len(LONG), "cached_tokens": usage.cached_tokens}]


def test_a_lost_page_is_the_only_one_computed_again() -> None:
    rig = Rig(store=60)
    rig.submit(1, LONG, 4)
    rig.run()
    cold(rig)
    lease = rig.pager.match(LONG)
    key = lease.nodes[7].key
    rig.pager.release(lease, [])
    assert rig.store is not None
    del rig.store.rows[key]
    rows = rig.decoder.rows
    rig.submit(2, LONG, 4)
    rig.run()
    assert rig.tokens(2) == rig.tokens(1)
    assert rig.of(2, "done")[0]["usage"].cached_tokens == len(LONG) - 1 - PAGE
    assert rig.decoder.rows - rows == PAGE + 1 + 3


def test_a_streamed_page_that_is_lost_costs_its_own_rows() -> None:
    rig = Rig(slots=4, store=60)
    rig.submit(1, LONG, 30)
    while len(rig.tokens(1)) < 8:
        rig.turn()
    (lease,) = rig.pager.leases
    rows = rig.decoder.rows
    rig.staged.lost.append(lease.nodes[5].key)
    while not rig.streams.totals.lost_steps:
        rig.turn()
    rig.staged.lost.clear()
    rig.run()
    assert rig.tokens(1) == expected(LONG, 30)
    assert rig.streams.totals.lost_steps == 1 and rig.decoder.rows - rows < 30 + PAGE
    assert rig.of(1, "done")[0]["usage"].cached_tokens == 0


def test_a_disk_that_loses_every_page_is_turned_off_and_the_request_told() -> None:
    rig = Rig(slots=4, store=60)
    rig.submit(1, LONG, 30)
    while len(rig.tokens(1)) < 8:
        rig.turn()

    class Everything(list[bytes]):
        def __contains__(self, key: object) -> bool:
            return True

    rig.staged.lost = Everything()
    rig.run()
    assert rig.streams.totals.lost_steps == MAX_LOST_STEPS
    assert rig.terminal(1) == ["failed"] and rig.of(1, "failed")[0]["code"] == "out_of_space"
    assert any("NVMe tier is off" in text for text in rig.notices)
    rig.submit(2, LONG[:9], 3)
    rig.run()
    assert rig.tokens(2) == expected(LONG[:9], 3)


def test_fifty_ask_for_one_prefix_of_the_store_and_it_is_read_once() -> None:
    rig = Rig(slots=256, store=60, max_streams=50, max_rows=64)
    rig.submit(1, LONG, 1)
    rig.run()
    cold(rig)
    assert rig.store is not None
    rig.store.reads.clear()
    rows = rig.decoder.rows
    for number in range(2, 52):
        rig.submit(number, [*LONG, number % 60], 3)
    rig.run()
    assert len(rig.store.reads) == len(set(rig.store.reads)) == len(LONG) // PAGE + 1
    assert rig.decoder.rows - rows == 50 * (1 + 2)
    for number in range(2, 52):
        assert rig.tokens(number) == expected([*LONG, number % 60], 3)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_any_tiers_and_any_faults_give_the_same_tokens(seed: int) -> None:
    chance = random.Random(seed)
    host, store = chance.choice((0, 0, 3, 12)), chance.choice((0, 30, 90))
    rig = Rig(slots=chance.choice((1, 2, 5, 9)), host=host, store=store, max_streams=chance.randint(1, 4))
    capacity = rig.pager.capacity_pages * PAGE
    wanted: dict[int, tuple[list[int], int]] = {}
    doomed: set[PageKey] = set()

    def fail_once(key: PageKey) -> Exception | None:
        if key not in doomed:
            return None
        doomed.remove(key)  # its slot is set aside: the page is written to another one next time
        return PageLost(LostReason.PAYLOAD)

    if rig.store is not None:
        rig.store.fail_read = fail_once
    for number in range(1, 9):
        shared = [place % 5 for place in range(chance.choice((0, 8, 21)))]
        prompt = shared + [chance.choice((1, 2)) for _ in range(chance.randint(1, 40))]
        count = chance.randint(1, 12)
        if len(prompt) + count > capacity - PAGE:
            continue
        wanted[number] = (prompt, count)
        rig.submit(number, prompt, count, priority=chance.randint(0, 2))
        for _ in range(chance.randint(0, 6)):
            rig.streams.turn()
            for _ in range(chance.randint(0, 3)):
                rig.mover.run(0)
            rig.events += rig.streams.take_events()
            if rig.store is not None and rig.store.rows and chance.random() < 0.1:
                doomed.add(chance.choice(list(rig.store.rows)))
    rig.run(6000)
    for number, (prompt, count) in wanted.items():
        if not rig.pager.writeback.on and rig.terminal(number) == ["failed"]:
            assert rig.of(number, "failed")[0]["code"] == "out_of_space"  # the tier it needed was turned off
            continue
        assert rig.terminal(number) == ["done"], rig.of(number, "failed")
        assert rig.tokens(number) == expected(prompt, count)
        timings, usage = rig.of(number, "done")[0]["timings"], rig.of(number, "done")[0]["usage"]
        assert timings.hit_device + timings.hit_host + timings.hit_nvme == usage.cached_tokens
        assert usage.cached_tokens + timings.recomputed == usage.prompt_tokens == len(prompt)


def test_requests_that_share_a_prefix_share_its_memory() -> None:
    rig = Rig(slots=40, max_streams=8, max_rows=64)
    rig.submit(1, LONG, 1)
    rig.run()
    for number in range(2, 10):
        rig.submit(number, [*LONG, number], 6)
    rig.turn(2)
    assert rig.streams.count(Phase.WAITING) == 0  # 8 x 23 pages, 22 of them the same
    rig.run()
    assert rig.streams.totals.preemptions == 0
    for number in range(2, 10):
        assert rig.tokens(number) == expected([*LONG, number], 6)
