"""The planner alone, and driven by a simulation of pages and steps."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.daemon.engine import scheduler
from tierd.daemon.engine.scheduler import Limits, Phase, Rates, Snapshot, Stream

LIMITS = Limits(max_rows=64, max_streams=4, page_tokens=4)
MEASURED = Rates(decode_s=0.01, row_s=0.004, mixed=True)


def stream(number: int, phase: Phase, known: int, computed: int = 0, pages: int = 0, waited_s: float = 0.0) -> Stream:
    """One whose pages all lie on the device."""
    held_until = max(pages * LIMITS.page_tokens, computed)
    return Stream(number, (float(number), number), phase, known, computed, pages, held_until, waited_s=waited_s)


def planned(
    *streams: Stream, free: int = 1000, device: int = 1000, rates: Rates = MEASURED, limits: Limits = LIMITS
) -> scheduler.Plan:
    return scheduler.plan(Snapshot(streams, free, device, rates), limits)


def test_decoding_streams_get_one_row_each() -> None:
    plan = planned(stream(1, Phase.DECODE, 10, 9, 3), stream(2, Phase.DECODE, 21, 20, 5))
    assert [(chunk.id, chunk.start, chunk.count, chunk.sample) for chunk in plan.chunks] == [
        (1, 9, 1, True),
        (2, 20, 1, True),
    ]


def test_prompts_get_rows_for_a_step_of_the_length_that_others_can_wait() -> None:
    limits, alone = Limits(max_rows=512, max_streams=4, page_tokens=4), stream(1, Phase.PREFILL, 5000)

    def rows(row_s: float, reads_weights: bool = False) -> list[int]:
        snapshot = Snapshot((alone,), 4000, 4000, Rates(0.0, row_s), reads_weights)
        return [chunk.count for chunk in scheduler.plan(snapshot, limits).chunks]

    assert rows(0.0) == [128]  # nothing measured yet
    assert rows(0.002) == [250]
    assert rows(0.0001) == [512]
    assert rows(0.1) == [48]  # fewer would be slower for everybody
    assert rows(0.002, reads_weights=True) == [512]


def test_a_step_in_which_a_short_prompt_ends_is_a_short_step() -> None:
    limits = Limits(max_rows=512, max_streams=4, page_tokens=4)
    rates = Rates(0.0, 0.001)
    one, short, long = stream(1, Phase.PREFILL, 2000), stream(2, Phase.PREFILL, 10), stream(3, Phase.PREFILL, 900)
    assert {c.id: c.count for c in planned(one, short, limits=limits, rates=rates).chunks} == {1: 5, 2: 10}
    assert {c.id: c.count for c in planned(one, long, limits=limits, rates=rates).chunks} == {1: 167, 3: 333}
    assert {c.id: c.count for c in planned(one, limits=limits, rates=rates).chunks} == {1: 500}


def test_nobody_is_let_in_behind_one_that_gets_no_page() -> None:
    active = stream(2, Phase.PREFILL, 100, 16, 4), stream(3, Phase.DECODE, 17, 16, 4)
    plan = planned(*active, stream(4, Phase.WAITING, 5), stream(1, Phase.WAITING, 5), free=60, device=1)
    assert [chunk.id for chunk in plan.chunks] == [2] and plan.preempt == ()
    assert plan.admit == (1,)  # 4 would be preempted for 3 at once
    assert planned(*active, stream(4, Phase.WAITING, 5), free=60, device=9).admit == (4,)


def test_the_last_chunk_of_a_prompt_samples() -> None:
    plan = planned(stream(1, Phase.PREFILL, 100, 64, 16))
    assert [(chunk.start, chunk.count, chunk.sample) for chunk in plan.chunks] == [(64, 36, True)]


def test_rows_that_are_computed_once_more_come_first_and_take_no_pages() -> None:
    def rows(again: int, free: int = 1000) -> tuple[int, int, int, bool]:
        one = replace(stream(1, Phase.PREFILL, 100, 96, 24), again=again)
        (chunk,) = planned(one, free=free, device=free).chunks
        return chunk.start, chunk.again, chunk.count, chunk.sample

    assert rows(20) == (96, 20, 4, True)
    assert rows(20, free=0) == (96, 20, 0, False)
    assert rows(62) == (96, 62, 2, False)
    assert rows(64) == rows(90) == (96, 64, 0, False)
    beside = replace(stream(2, Phase.PREFILL, 100, 97, 25), again=90)
    plan = planned(stream(1, Phase.DECODE, 10, 9, 3), beside, rates=Rates(0.01, 0.01, mixed=True))
    assert [(chunk.id, chunk.again, chunk.count) for chunk in plan.chunks] == [(1, 0, 1), (2, 4, 0)]


def test_prompt_rows_beside_decoding_streams_keep_the_step_near_its_target() -> None:
    plan = planned(stream(1, Phase.DECODE, 10, 9, 3), stream(2, Phase.PREFILL, 500))
    # 50 ms target, 10 ms of them for decoding, 4 ms a row
    assert [chunk.count for chunk in plan.chunks] == [1, 10]


def test_a_long_decode_step_may_be_doubled() -> None:
    assert scheduler.prefill_rows(LIMITS, Rates(decode_s=0.2, row_s=0.01, mixed=True), 3) == 20


@pytest.mark.parametrize("decoding", [0, 3])
def test_where_nobody_looks_on_prompts_take_the_whole_step(decoding: int) -> None:
    slow, several = Rates(decode_s=0.2, row_s=0.5, mixed=True), [stream(n, Phase.PREFILL, 5) for n in range(2)]
    assert scheduler.prefill_rows(LIMITS, slow, decoding, several) < 64
    assert scheduler.prefill_rows(replace(LIMITS, throughput=True), slow, decoding, several) == 64


def test_a_slow_machine_still_prefills() -> None:
    assert scheduler.prefill_rows(LIMITS, Rates(decode_s=0.01, row_s=9.0, mixed=True), 1) == scheduler.MIN_PREFILL_ROWS


def test_rates_are_learned_from_steps() -> None:
    rates = Rates().after(1.0, 0, 100)
    assert rates.row_s == pytest.approx(0.01)
    rates = rates.after(0.02, 2, 0)
    assert rates.decode_s == pytest.approx(0.02)
    rates = rates.after(0.12, 2, 10)  # the first mixed step replaces what prompts alone cost
    assert rates.row_s == pytest.approx(0.01) and rates.mixed
    assert rates.after(9.0, 0, 9) == rates  # prompt rows alone are cheaper each: no measure for mixed steps


def test_a_third_of_the_rows_is_the_oldest_prompts_and_the_rest_goes_to_the_shortest() -> None:
    rows = scheduler.share(
        20, [stream(1, Phase.PREFILL, 1000), stream(2, Phase.PREFILL, 300), stream(3, Phase.PREFILL, 6)]
    )
    assert rows == {1: 7, 3: 6, 2: 7}


def test_rows_that_nobody_else_needs_go_to_the_oldest() -> None:
    assert scheduler.share(20, [stream(1, Phase.PREFILL, 1000), stream(2, Phase.PREFILL, 3)]) == {1: 17, 2: 3}


def test_admission_is_by_rank_and_bounded() -> None:
    plan = planned(*(stream(number, Phase.WAITING, 8) for number in (5, 3, 1, 4, 2)))
    assert plan.admit == (1, 2, 3, 4)


def test_the_background_gives_one_place_to_the_first_that_waits_for_it() -> None:
    behind = [replace(stream(n, Phase.DECODE, 8, 7, 2), background=True) for n in (5, 6, 7)]
    first = stream(1, Phase.DECODE, 8, 7, 2)
    waiting = [stream(2, Phase.WAITING, 8), stream(3, Phase.WAITING, 8)]
    found = planned(first, *behind, *waiting)
    assert found.preempt == (7,) and found.admit == ()
    assert planned(first, *behind[:2], *waiting).admit == (2,)


def test_nobody_gives_a_place_to_the_background_or_to_those_that_rank_behind() -> None:
    behind = [replace(stream(n, Phase.DECODE, 8, 7, 2), background=True) for n in (1, 2, 3, 4)]
    assert planned(*behind, replace(stream(0, Phase.WAITING, 8), background=True)).preempt == ()
    assert planned(*behind, stream(9, Phase.WAITING, 8)).preempt == ()  # it came so late that they are before it


def test_what_would_begin_again_gives_its_place_only_before_it_has_begun() -> None:
    begun = replace(stream(5, Phase.PREFILL, 80, 8, 2), background=True, restarts=True)
    others = [stream(n, Phase.DECODE, 8, 7, 2) for n in (1, 2, 3)]
    waiting = stream(4, Phase.WAITING, 8)
    assert planned(*others, begun, waiting).preempt == ()
    assert planned(*others, replace(begun, computed_tokens=0), waiting).preempt == (5,)


def test_the_background_is_not_let_in_past_one_that_waits_for_pages() -> None:
    active, large = stream(1, Phase.DECODE, 8, 7, 2), stream(2, Phase.WAITING, 400)
    small = stream(3, Phase.WAITING, 4)
    assert planned(active, large, small, free=20).admit == (3,)
    assert planned(active, large, replace(small, background=True), free=20).admit == ()


def test_admission_needs_pages_beside_what_active_streams_still_need() -> None:
    active = stream(1, Phase.PREFILL, 40, 0, 0)  # 10 pages, and one to go on
    assert planned(active, stream(2, Phase.WAITING, 39), free=20).admit == ()
    assert planned(active, stream(2, Phase.WAITING, 39), free=31).admit == (2,)


def test_a_small_request_passes_a_large_one_until_that_lost_patience() -> None:
    active = stream(1, Phase.DECODE, 8, 7, 2)
    large, small = stream(2, Phase.WAITING, 400), stream(3, Phase.WAITING, 4)
    assert planned(active, large, small, free=20).admit == (3,)
    tired = dataclasses.replace(large, waited_s=scheduler.PATIENCE_S)
    assert planned(active, tired, small, free=20).admit == ()


def test_when_pages_run_out_the_last_in_rank_gives_its_own_back() -> None:
    first, last = stream(1, Phase.DECODE, 9, 8, 2), stream(2, Phase.DECODE, 6, 5, 2)
    plan = planned(first, last, stream(3, Phase.WAITING, 4), free=0)
    assert plan.preempt == (2,) and plan.admit == () and plan.chunks == ()


def test_the_last_in_rank_waits_for_pages_itself() -> None:
    first, last = stream(1, Phase.DECODE, 7, 6, 2), stream(2, Phase.DECODE, 9, 8, 2)
    plan = planned(first, last, free=0)
    assert plan.preempt == () and [chunk.id for chunk in plan.chunks] == [1]


def test_the_first_in_rank_may_outgrow_memory_when_nobody_can_give_way() -> None:
    first = stream(1, Phase.PREFILL, 100, 40, 10)
    assert [(chunk.start, chunk.count) for chunk in planned(first, free=0, device=3).chunks] == [(40, 12)]
    plan = planned(first, stream(2, Phase.DECODE, 9, 8, 2), free=0, device=3)
    assert plan.preempt == (2,) and plan.chunks == ()


def test_a_chunk_takes_no_more_pages_than_can_be_written_on_the_device() -> None:
    plan = planned(stream(1, Phase.PREFILL, 100), stream(2, Phase.PREFILL, 100), free=100, device=5)
    assert sum(chunk.count for chunk in plan.chunks) == 20


def test_rows_end_where_known_pages_begin() -> None:
    hole = dataclasses.replace(stream(1, Phase.PREFILL, 100, 8, 2), limit=16)
    assert [(chunk.start, chunk.count, chunk.sample) for chunk in planned(hole).chunks] == [(8, 8, False)]
    waits = dataclasses.replace(hole, limit=8)
    assert planned(waits).chunks == ()


def test_contradicting_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="max_rows"):
        Limits(max_rows=4, max_streams=4, page_tokens=4)
    with pytest.raises(ValueError, match="positive"):
        Limits(max_rows=4, max_streams=0, page_tokens=4)


streams_strategy = st.lists(
    st.builds(
        lambda number, phase, known, done, spare, again: replace(
            stream(
                number,
                phase,
                known,
                0 if phase is Phase.WAITING else min(done, known - 1) if phase is not Phase.DECODE else known - 1,
                0
                if phase in (Phase.WAITING, Phase.FETCHING)
                else scheduler.pages_for(known - 1 if phase is Phase.DECODE else min(done, known - 1), 4) + spare,
            ),
            again=min(again, done, known - 1) if phase is Phase.PREFILL else 0,
        ),
        st.integers(0, 10_000),
        st.sampled_from([Phase.WAITING, Phase.FETCHING, Phase.PREFILL, Phase.DECODE]),
        st.integers(1, 300),
        st.integers(0, 300),
        st.integers(0, 1),
        st.integers(0, 100),
    ),
    max_size=4,
    unique_by=lambda one: one.id,
)


@settings(deadline=None, max_examples=60)
@given(streams_strategy, st.integers(0, 40), st.floats(0, 0.1), st.floats(0, 0.1))
def test_every_plan_is_valid(streams: list[Stream], free: int, decode_s: float, row_s: float) -> None:
    plan = planned(*streams, free=free, device=free, rates=Rates(decode_s, row_s, mixed=True))
    by_id = {one.id: one for one in streams}
    assert sum(chunk.count + chunk.again for chunk in plan.chunks) <= LIMITS.max_rows
    new_pages = 0
    for chunk in plan.chunks:
        one = by_id[chunk.id]
        assert one.phase in (Phase.PREFILL, Phase.DECODE) and chunk.id not in plan.preempt
        assert chunk.start == one.computed_tokens and 1 <= chunk.count + chunk.again <= one.remaining
        assert chunk.again == one.again if chunk.count else chunk.again <= one.again
        assert chunk.sample == (chunk.start + chunk.count == one.known_tokens)
        new_pages += max(scheduler.pages_for(chunk.start + chunk.count, 4) - one.pages, 0)
    assert new_pages <= free
    assert all(by_id[number].phase is Phase.WAITING for number in plan.admit)
    active = sum(one.phase is not Phase.WAITING for one in streams)
    assert active + len(plan.admit) <= max(LIMITS.max_streams, active)
    first = min((one.rank for one in streams), default=None)
    assert all(by_id[number].rank != first for number in plan.preempt)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=12),
    st.integers(24, 40),
)
def test_everybody_finishes_and_the_first_never_stands_still(jobs: list[tuple[int, int, int]], total: int) -> None:
    """`jobs`: (prompt tokens, answer tokens, step of arrival). 24 pages of 4 tokens hold the largest of them alone."""
    waiting = dict(enumerate(jobs))
    live: dict[int, Stream] = {}
    answered = dict.fromkeys(waiting, 0)
    for step in range(3000):
        for number, (prompt, _answer, arrival) in list(waiting.items()):
            if arrival <= step:
                del waiting[number]
                live[number] = Stream(number, (float(arrival), number), Phase.WAITING, prompt)
        if not waiting and not live:
            break
        first = min(live.values(), key=lambda one: one.rank) if live else None
        free = total - sum(one.pages for one in live.values())
        plan = scheduler.plan(Snapshot(tuple(live.values()), free, free, MEASURED), LIMITS)
        for number in plan.preempt:
            live[number] = dataclasses.replace(
                live[number], phase=Phase.WAITING, computed_tokens=0, pages=0, held_until=0
            )
        for number in plan.admit:
            live[number] = dataclasses.replace(live[number], phase=Phase.PREFILL)
        moved = set(plan.admit) | set(plan.preempt)
        for chunk in plan.chunks:
            one = live[chunk.id]
            end = chunk.start + chunk.count
            pages = max(one.pages, scheduler.pages_for(end, 4))
            one = dataclasses.replace(one, computed_tokens=end, pages=pages, held_until=pages * 4)
            moved.add(chunk.id)
            if chunk.sample:
                answered[chunk.id] += 1
                one = dataclasses.replace(one, phase=Phase.DECODE, known_tokens=one.known_tokens + 1)
            live[chunk.id] = one
            if answered[chunk.id] == jobs[chunk.id][1]:
                del live[chunk.id]
        assert sum(one.pages for one in live.values()) <= total
        if first is not None and first.phase is not Phase.WAITING:
            assert first.id in moved or plan.preempt  # it moves, or somebody gives pages back for it
    assert not waiting and not live


def follower(number: int, known: int, computed: int, leader: int, until: int) -> Stream:
    return dataclasses.replace(
        stream(number, Phase.PREFILL, known, computed), leader=leader, shared_until=until,
        shared=(until - computed) // LIMITS.page_tokens,
    )  # fmt: skip


def test_one_that_waits_for_pages_gives_its_rows_to_the_leader() -> None:
    assert scheduler.share(20, [stream(1, Phase.PREFILL, 100), follower(2, 50, 0, 1, 48)]) == {1: 20}
    old, leader = stream(1, Phase.PREFILL, 1000), stream(2, Phase.PREFILL, 500)
    assert scheduler.share(20, [old, leader, stream(3, Phase.PREFILL, 400)]) == {1: 7, 3: 13}
    waiting = follower(4, 50, 0, 2, 48)
    assert scheduler.share(20, [old, leader, stream(3, Phase.PREFILL, 400), waiting]) == {1: 7, 2: 13}


def test_a_leaders_chunk_ends_where_the_first_of_the_others_goes_its_own_way() -> None:
    streams = [stream(1, Phase.PREFILL, 100, 8, 2), follower(2, 90, 8, 1, 80), follower(3, 90, 8, 1, 24)]
    assert scheduler.share(64, streams) == {1: 16}
    plan = planned(*streams)
    assert [(chunk.id, chunk.start, chunk.count, chunk.sample) for chunk in plan.chunks] == [(1, 8, 16, False)]
    first, *others = streams
    assert scheduler.share(64, [replace(first, again=7), *others]) == {1: 23}


def test_pages_that_others_compute_need_no_room() -> None:
    leader = stream(1, Phase.PREFILL, 40, 0, 0)  # 10 pages, and one to go on
    # 9 for the chunk of this step, 11 for the leader, 2 for the one that waits, 4 for the new one
    assert planned(leader, follower(2, 40, 0, 1, 36), stream(3, Phase.WAITING, 15), free=26).admit == (3,)
    assert planned(leader, stream(2, Phase.PREFILL, 40), stream(3, Phase.WAITING, 15), free=26).admit == ()


def test_a_stream_with_a_window_is_let_in_where_its_window_fits() -> None:
    long = stream(2, Phase.WAITING, 1000)
    running = stream(1, Phase.DECODE, 10, 9, 3)
    assert planned(running, long, free=30).admit == ()
    assert planned(running, replace(long, most_pages=20), free=30).admit == (2,)


def test_a_stream_with_a_window_keeps_no_more_from_others_than_it_can_have() -> None:
    prompt = replace(stream(1, Phase.PREFILL, 1000, 100, 12), most_pages=20)
    waiting = stream(2, Phase.WAITING, 50)
    assert planned(prompt, waiting, free=40).admit == (2,)
    assert planned(replace(prompt, most_pages=40), waiting, free=40).admit == ()
