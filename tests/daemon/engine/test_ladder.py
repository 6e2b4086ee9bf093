"""ladder: what a request says follows from its tokens alone, whatever copies were left; and none is left pinned."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counts import counted
from tests.daemon.engine.fakes import PAGE, expected, expected_on
from tests.daemon.engine.rig import Rig, fail
from tierd.daemon.engine.ladder import before, behind, blocks, page_salt
from tierd.daemon.engine.runner import GaveWay
from tierd.daemon.engine.speculate import Draft, Speculator
from tierd.daemon.engine.stepping import Logits, Work
from tierd.daemon.errors import BadRequest
from tierd.kernels.rows import Ladder
from tierd.tiers.keys import salted_root
from tierd.tiers.page import PageKey

MOST = Ladder(64, 64)
LADDER = Ladder(32, 32)
MODE = "exact_first=32,exact_last=32"
PROMPT = [place % 50 for place in range(77)]


def ladder_rig(**more: Any) -> Rig:
    return Rig(**{"slots": 80, "context": 400, "ladder": MOST} | more)


class Prophet(Speculator):
    """Drafts what will be said, and now and then something else."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.texts: list[list[int]] = []
        self._chance = chance

    def propose(self, draft: Draft, tokens: Sequence[int], most: int, streams: int) -> int:
        known = list(tokens)
        following = next((text[len(known) :] for text in self.texts if text[: len(known)] == known), [])
        draft.tokens = draft.looked = [
            token if self._chance.random() < 0.8 else 63 - token for token in following[: max(min(most, 9), 0)]
        ]
        return len(draft.tokens)


def replace_method(obj: object, method: str, function: Callable[..., object]) -> None:
    setattr(obj, method, function)


class Watched:
    """What every step of a rig computes: how many rows, and which tokens of which request."""

    def __init__(self, rig: Rig) -> None:
        self.steps: list[int] = []
        self.computed: dict[int, set[int]] = {}
        run = rig.streams._steps.run

        def watched(work: list[Work], awaited: Callable[[], bool]) -> list[Logits] | None:
            found = run(work, awaited)
            self.steps.append(sum(item.rows for item in work))
            for item in work if found is not None else ():
                for part in item.parts:
                    mine = self.computed.setdefault(item.request.id, set())
                    mine.update(range(part.start, part.start + len(part.tokens)))
            return found

        replace_method(rig.streams._steps, "run", watched)


def forget_copies(rig: Rig) -> None:
    """All that nobody has pinned."""
    assert rig.ladders is not None
    pages = rig.ladders.pages
    while pages._idle:
        pages._forget(pages._known[next(iter(pages._idle))])


def cached(rig: Rig, number: int) -> int:
    (done,) = rig.of(number, "done")
    (accepted,) = rig.of(number, "accepted")
    found: int = done["usage"].cached_tokens
    assert accepted["cached_tokens"] == found
    return found


@pytest.mark.parametrize("max_rows", [8, 16, 200])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 77])
def test_alone_it_says_what_it_sees(length: int, max_rows: int) -> None:
    rig = ladder_rig(max_rows=max_rows)
    rig.submit(1, PROMPT[:length], 40, kv_mode=MODE)
    rig.run()
    assert rig.tokens(1) == expected_on(LADDER, PROMPT[:length], 40)
    assert rig.of(1, "done")[0]["usage"].kv_mode == MODE


def test_the_next_turn_computes_nothing_that_is_there() -> None:
    rig = ladder_rig()
    rig.submit(1, PROMPT, 9, kv_mode=MODE)
    rig.run()
    turn = [*PROMPT, *rig.tokens(1), 7, 8]
    rig.submit(2, turn, 9, kv_mode=MODE)
    rig.run()
    assert rig.tokens(2) == expected_on(LADDER, turn, 9)
    assert cached(rig, 2) == len(turn) - 3  # the last token of the answer was drawn, and never computed
    assert rig.ladders is not None and rig.ladders.made_up_rows == 0


@pytest.mark.parametrize("length", [20, 64, 70, 77, 97])
def test_copies_that_are_gone_are_made_up_and_counted(length: int) -> None:
    rig = ladder_rig(max_rows=9)
    prompt = [place % 50 for place in range(length)]
    rig.submit(1, prompt, 3, kv_mode=MODE)
    rig.run()
    assert rig.ladders is not None
    forget_copies(rig)
    rows = rig.decoder.rows
    rig.submit(2, prompt, 3, kv_mode=MODE)
    rig.run()
    assert rig.tokens(2) == rig.tokens(1) == expected_on(LADDER, prompt, 3)
    block = LADDER.block(length - 1)
    again = min(32, block) + length - 1 - block  # its first tokens, and those of its last block
    assert rig.ladders.made_up_rows == again
    assert cached(rig, 2) == length - 1 - again
    assert rig.decoder.rows - rows == again + 1 + 2


def test_rows_that_make_copies_up_are_those_of_a_prompt() -> None:
    """No step has more than it may have, and whoever comes meanwhile is not behind all of them."""
    ladder = Ladder(64, 256)
    rig, prompt = ladder_rig(ladder=ladder, max_rows=16, slots=100), [place % 50 for place in range(250)]
    mode, more = "exact_first=64,exact_last=256", [60, 61, 62]
    rig.submit(1, prompt, 3, kv_mode=mode)
    rig.run()
    forget_copies(rig)
    watched = Watched(rig)
    rig.submit(2, prompt, 9, kv_mode=mode)
    rig.turn(2)
    rig.submit(3, more, 2)
    rig.turn(3)
    assert rig.terminal(3) == ["done"] and rig.tokens(3) == expected(more, 2)
    assert not rig.tokens(2)
    rig.run()
    assert rig.tokens(2) == expected_on(ladder, prompt, 9)
    assert max(watched.steps) <= 16
    assert rig.ladders is not None and rig.ladders.made_up_rows == len(prompt) - 1


def test_what_was_made_up_is_kept_when_a_step_is_void() -> None:
    rig = ladder_rig(max_rows=9)
    rig.submit(1, PROMPT, 3, kv_mode=MODE)
    rig.run()
    forget_copies(rig)
    rig.submit(2, PROMPT, 3, kv_mode=MODE)
    rig.turn(3)
    runner = rig.streams._runner
    fail(runner, "run", GaveWay())
    rig.turn(2)
    del vars(runner)["run"]
    rig.run()
    assert rig.tokens(2) == expected_on(LADDER, PROMPT, 3)
    assert rig.ladders is not None and rig.ladders.made_up_rows == 32 + len(PROMPT) - 1 - 64


def test_other_ladders_share_no_page() -> None:
    rig = ladder_rig()
    modes = (MODE, "exact_first=0,exact_last=32", "exact_first=32,exact_last=64", "exact", None)
    for number, mode in enumerate(modes):
        rig.submit(number, PROMPT, 5, kv_mode=mode)
        rig.run()
    assert [cached(rig, number) for number in range(5)] == [0, 0, 0, 0, len(PROMPT) - 1]
    assert rig.tokens(1) == expected_on(Ladder(0, 32), PROMPT, 5)
    assert rig.tokens(2) == expected_on(Ladder(32, 64), PROMPT, 5)
    assert rig.tokens(3) == rig.tokens(4) == expected(PROMPT, 5)


def test_roots_differ_whatever_salts_are_called() -> None:
    root = PageKey(bytes(16))
    salts = [salt.encode() for salt in ("", "32 32", "\xff32 32\xff", "ÿ32 32ÿa", "a")]
    roots = {salted_root(root, page_salt(salt, one)) for salt in salts for one in (None, LADDER, MOST)}
    assert len(roots) == 3 * len(salts)
    assert salted_root(root, page_salt(b"", None)) == root


def test_many_that_come_at_once_compute_their_beginning_once() -> None:
    rig = ladder_rig(slots=200)
    for number in range(1, 5):
        rig.submit(number, [*PROMPT, number], 6, kv_mode=MODE)
    rig.run()
    for number in range(1, 5):
        assert rig.tokens(number) == expected_on(LADDER, [*PROMPT, number], 6)
    assert rig.decoder.rows <= len(PROMPT) + 4 * (PAGE + 1 + 6)


def test_a_resumed_one_goes_on_where_it_was() -> None:
    said = expected_on(LADDER, PROMPT, 30)
    rig = ladder_rig()
    rig.submit(1, PROMPT, 30, kv_mode=MODE, resume=tuple(said[:21]))
    rig.run()
    assert rig.tokens(1) == said[21:]


@pytest.mark.parametrize("seed", range(counted(20, 2)))
def test_drafts_reach_over_the_end_of_a_block(seed: int) -> None:
    prophet = Prophet(random.Random(seed))
    rig = ladder_rig(speculator=prophet, max_rows=30)
    wanted = {number: expected_on(LADDER, PROMPT[number:], 40) for number in range(1, 4)}
    prophet.texts = [[*PROMPT[number:], *said] for number, said in wanted.items()]
    for number in wanted:
        rig.submit(number, PROMPT[number:], 40, kv_mode=MODE)
    rig.run()
    assert {number: rig.tokens(number) for number in wanted} == wanted
    assert rig.streams.totals.right_drafts > 40
    assert rig.ladders is not None and rig.ladders.made_up_rows == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kv_mode": "exact_last=128"}, "memory for the first 64 tokens and a block of 64"),
        ({"kv_mode": "exact_first=65,exact_last=32"}, "asks for the first 96 tokens and a block of 32"),
        ({"kv_mode": MODE, "beam_width": 3}, "beam search keeps no exact copies"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message) as refused:
        ladder_rig().submit(1, PROMPT, 5, **more)
    assert refused.value.param == "kv_mode" and refused.value.hint


def test_a_daemon_without_packed_pages_says_how_to_get_them() -> None:
    with pytest.raises(BadRequest, match="there is memory for none") as refused:
        Rig().submit(1, PROMPT, 5, kv_mode=MODE)
    assert "--kv-exact-first 32 --kv-exact-last 32" in (refused.value.hint or "")


def test_blocks_of_some_tokens() -> None:
    assert list(blocks(LADDER, 30, 70, 100)) == [(30, 32), (32, 64), (64, 70)]
    assert list(blocks(LADDER, 30, 70, 20)) == [(30, 32), (32, 52), (52, 64), (64, 70)]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20))), st.integers(0, 99))
def test_the_first_of_some_spans(starts: list[tuple[int, int]], count: int) -> None:
    spans = [(first, first + length) for first, length in starts]

    def tokens(of: list[tuple[int, int]]) -> list[int]:
        return [token for first, stop in of for token in range(first, stop)]

    assert tokens(before(spans, count)) == tokens(spans)[:count]
    assert tokens(behind(spans, count)) == tokens(spans)[count:]


@settings(max_examples=counted(300, 6), deadline=None)
@given(st.integers(0, 10**9))
def test_random_lives_under_ladders_leave_nothing_that_is_wrong(seed: int) -> None:
    """Ladders and none, of texts that begin alike, in little memory: pages spill, are lost, and come back. What is
    said to be cached under a ladder was never computed, not even for a copy."""
    chance = random.Random(seed)
    prophet = Prophet(chance)
    rig = Rig(
        slots=chance.choice((40, 60)), host=chance.choice((0, 20)), store=chance.choice((0, 200)), max_streams=3,
        max_rows=chance.choice((8, 40)), context=400, ladder=LADDER, speculator=prophet,
    )  # fmt: skip
    watched, prompts = Watched(rig), {}
    wanted: dict[int, list[int]] = {}
    ended: set[int] = set()
    for number in range(1, 9):
        prompt = [chance.choice((1, 2)) if place > 90 else place % 50 for place in range(chance.randint(1, 120))]
        ladder = chance.choice((LADDER, LADDER, Ladder(0, 32), None))
        count, window = chance.randint(1, 24), chance.choice((0, 40))
        prompts[number] = len(prompt) if ladder else 0
        wanted[number] = expected_on(ladder, prompt, count) if ladder else expected(prompt, count, window)
        prophet.texts += [[*prompt, *wanted[number]]] * chance.randint(0, 1)
        mode = f"window={window}" if window else "exact"
        mode = f"exact_first={ladder.first},exact_last={ladder.last}" if ladder else mode
        rig.submit(number, prompt, count, kv_mode=mode, priority=chance.randint(0, 2))
        for _ in range(chance.randint(0, 9)):
            rig.turn()
            rig.disturb(number, chance)
            if chance.random() < 0.1:
                forget_copies(rig)
            if chance.random() < 0.1 and rig.store is not None and rig.pager.index.nodes:
                rig.staged.lost.append(chance.choice(list(rig.pager.index.nodes)))
    rig.run()
    for number, tokens in wanted.items():
        if rig.terminal(number) == ["done"]:
            assert rig.tokens(number) == tokens
            computed = {token for token in watched.computed[number] if token < prompts[number]}
            usage = rig.of(number, "done")[0]["usage"]
            assert not prompts[number] or usage.cached_tokens == prompts[number] - len(computed)
        else:
            assert rig.terminal(number) in (["aborted"], ["failed"])
            ended.add(number)
    assert any(rig.terminal(number) != ["failed"] for number in wanted)
    assert max(watched.steps) <= rig.streams._limits.max_rows
    if not ended:
        ends = [rig.of(number, "done")[0]["usage"].cached_tokens for number in wanted]
        assert rig.streams.totals.cached_tokens == sum(ends)
