"""When a draft model guesses: where that gains, and never so that it costs much."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from tests.daemon.engine.fakes import expected
from tests.daemon.engine.rig import Rig
from tierd.daemon.engine.guesses import (
    INVEST,
    MOST_STEPS,
    PLAIN_STEPS,
    PROBE_STEPS,
    START_STEPS,
    Costs,
    Guess,
    Guesses,
    Wish,
    best_lengths,
)
from tierd.daemon.engine.speculate import MAX_DRAFT, Draft, Pace, Speculate

STEP_S = 1.0
STREAMED = Costs(STEP_S, 0.02, True)


@dataclass
class Oracle:
    """A draft model that is right with some chance: `answers` says what comes next. Passes take time by `clock`."""

    answers: dict[int, Sequence[int]]
    chance: float = 1.0
    pass_s: float = 0.05
    catch_up_s: float = 0.0
    name: str = "oracle"
    memory_bytes: int = 1000
    on_card: bool = False
    now_s: float = 0.0
    kept: set[int] = field(default_factory=set)
    asked: list[list[int]] = field(default_factory=list)
    fail: bool = False
    sure: int = MAX_DRAFT

    def __post_init__(self) -> None:
        self._random = random.Random(1)
        self._known: dict[int, int] = {}

    def clock(self) -> float:
        return self.now_s

    def keep(self, owners: Iterable[int]) -> None:
        self.kept = set(owners)

    def guess(self, wishes: Sequence[Wish], counts: Sequence[int]) -> list[Guess]:
        if self.fail:
            raise RuntimeError("no more")
        self.asked.append(list(counts))
        self.now_s += max(counts) * self.pass_s
        for wish in wishes:
            self.now_s += self.catch_up_s * (len(wish.tokens) - self._known.get(wish.owner, 0))
            self._known[wish.owner] = len(wish.tokens)
        return [
            Guess([self._token(wish, len(wish.tokens) + more) for more in range(count)], min(count, self.sure))
            for wish, count in zip(wishes, counts, strict=True)
        ]

    def _token(self, wish: Wish, place: int) -> int:
        answer = self.answers[wish.owner]
        token = answer[place] if place < len(answer) else 1
        return token if self._random.random() < self.chance else token + 1


def wish(owner: int, tokens: list[int], draft: Draft | None = None, most: int = MAX_DRAFT) -> Wish:
    return Wish(owner, tokens, draft or Draft(), most, lambda _logits, _place: (0, 1.0))


def decoded(oracle: Oracle, steps: int, costs: Costs, *, guesses: Guesses | None = None) -> tuple[float, int]:
    """Seconds and tokens of one request after another, a hundred tokens each, on a machine with these costs."""
    guesses = guesses or Guesses(oracle, Speculate.AUTO, oracle.clock)
    begun_s, told, tokens, draft = oracle.now_s, 0, [0] * 20, Draft()
    for step in range(steps):
        if step % 100 == 0:
            tokens, draft = [0] * 20, Draft()
            oracle._known.clear()
        oracle.answers[step // 100] = range(10**6)
        (count,) = guesses.draft([wish(step // 100, tokens, draft)], costs)
        step_s = costs.plain_s * (1.0 + costs.row_share * count)
        oracle.now_s += step_s
        guesses.ran(step_s, count)
        drawn = []
        for guess in [*draft.tokens[:count], None]:
            drawn.append(len(tokens))
            tokens.append(len(tokens))
            if guess != drawn[-1]:
                break
        if draft.guessed:
            guesses.learn(draft, drawn, count)
        draft.learn(drawn)
        told += len(drawn)
    return oracle.now_s - begun_s, told


@pytest.mark.parametrize("row_share", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("pass_s", [0.01, 0.1, 0.5])
def test_text_that_cannot_be_guessed_is_written_as_fast_as_without(row_share: float, pass_s: float) -> None:
    oracle = Oracle({}, chance=0.0, pass_s=pass_s, catch_up_s=pass_s / 10)
    seconds, tokens = decoded(oracle, 600, Costs(STEP_S, row_share, True))
    assert tokens / seconds >= 0.97 * 1.0 / STEP_S
    assert seconds - 600 * STEP_S <= (START_STEPS + 600 * INVEST + 6) * STEP_S


def test_text_that_can_be_guessed_is_written_sooner() -> None:
    seconds, tokens = decoded(Oracle({}, chance=0.85, pass_s=0.05, catch_up_s=0.01), 300, STREAMED)
    assert tokens / seconds > 2.0


def test_what_it_saved_is_not_all_lost_when_the_text_changes() -> None:
    oracle = Oracle({}, chance=0.95)
    guesses = Guesses(oracle, Speculate.AUTO, oracle.clock)
    decoded(oracle, 300, STREAMED, guesses=guesses)
    assert guesses._purse_s == pytest.approx(MOST_STEPS * STEP_S)
    oracle.chance = 0.0
    seconds, tokens = decoded(oracle, 400, STREAMED, guesses=guesses)
    assert tokens / seconds >= 0.97 / STEP_S
    oracle.chance = 0.95
    seconds, tokens = decoded(oracle, 400, STREAMED, guesses=guesses)
    assert tokens / seconds > 1.5 / STEP_S  # it tries now and then, and finds out


def test_left_to_itself_it_guesses_only_while_weights_are_read_and_a_step_was_measured() -> None:
    oracle = Oracle({1: range(100)})
    guesses = Guesses(oracle, Speculate.AUTO, oracle.clock)
    for costs in (Costs(0.0, 0.02, True), Costs(STEP_S, 0.02, False)):
        assert guesses.draft([wish(1, [0])], costs) == [0]
    assert not oracle.asked
    assert guesses.draft([wish(1, [0])], STREAMED)[0] > 0
    always = Guesses(oracle, Speculate.ON, oracle.clock)
    assert always.draft([wish(1, [0])], Costs(0.0, 0.02, False))[0] > 0


def test_who_has_a_draft_or_no_room_is_not_asked_for() -> None:
    oracle = Oracle({1: range(100), 2: range(100), 3: range(100)})
    guesses, drafts = Guesses(oracle, Speculate.ON, oracle.clock), [Draft(tokens=[7]), Draft(), Draft()]
    found = guesses.draft([wish(1, [0], drafts[0], 0), wish(2, [0], drafts[1], 3), wish(3, [0], drafts[2])], STREAMED)
    assert found == [0, 3, 8] and oracle.kept == {1, 2, 3}
    assert drafts[0].tokens == [7] and not drafts[0].guessed
    assert drafts[1].tokens == [1, 2, 3] and drafts[1].guessed


def test_what_is_unlikely_is_not_computed_and_yet_learned() -> None:
    oracle, draft = Oracle({1: range(100)}, sure=0), Draft()
    guesses = Guesses(oracle, Speculate.ON, oracle.clock)
    assert guesses.draft([wish(1, [0], draft)], STREAMED) == [0] and draft.guessed
    before = guesses.statistics()["chance"]
    guesses.learn(draft, [1], 0)  # it was right
    after = guesses.statistics()
    assert after["chance"] > before and after["drafted_tokens"] == after["right_drafts"] == 0


def test_a_step_without_drafts_comes_now_and_then() -> None:
    oracle = Oracle({1: range(10_000)})
    guesses, draft, tokens, asked = Guesses(oracle, Speculate.AUTO, oracle.clock), Draft(), [0], []
    for _ in range(3 * PLAIN_STEPS):
        (count,) = guesses.draft([wish(1, tokens, draft)], STREAMED)
        asked.append(count)
        guesses.ran(STEP_S, count)
        if draft.guessed:
            guesses.learn(draft, [*draft.tokens, 0], count)
        draft.learn([0])
    assert 2 <= asked.count(0) <= 3 and asked[PLAIN_STEPS] == 0


def test_one_that_was_always_wrong_is_asked_again_after_a_while() -> None:
    oracle = Oracle({1: range(100)})
    guesses = Guesses(oracle, Speculate.AUTO, oracle.clock)
    draft = Draft(guess_pace=Pace(0.0))
    found = [guesses.draft([wish(1, [0], draft)], STREAMED) for _ in range(PROBE_STEPS + 2)]
    assert [count for (count,) in found] == [0] * PROBE_STEPS + [1, 0]


def test_a_draft_model_that_fails_is_off_and_says_why() -> None:
    oracle = Oracle({1: range(100)}, fail=True)
    guesses = Guesses(oracle, Speculate.ON, oracle.clock)
    assert guesses.draft([wish(1, [0])], STREAMED) == [0]
    assert guesses.statistics()["off"] == "it failed: no more" and oracle.kept == set()
    oracle.fail = False
    assert guesses.draft([wish(1, [0])], STREAMED) == [0] and not oracle.asked


@pytest.mark.parametrize(
    ("chances", "row_share", "pass_share", "streams", "chosen", "least", "most"),
    [
        ([0.9], 0.02, 0.05, 1, 1, 5, 15),
        ([0.9], 0.02, 0.5, 1, 1, 1, 3),
        ([0.2], 0.02, 0.3, 1, 0, 0, 0),
        ([0.9] * 4, 0.02, 0.05, 4, 4, 4, 15),
        ([0.9, 0.9, 0.1], 0.1, 0.05, 3, 2, 1, 8),  # the third would cost a row, and gain a tenth of a token
        ([0.9], 0.02, 0.5, 8, 0, 0, 0),  # seven others would wait
        ([], 0.02, 0.05, 1, 0, 0, 0),
    ],
)
def test_for_whom_and_how_far(
    chances: list[float], row_share: float, pass_share: float, streams: int, chosen: int, least: int, most: int
) -> None:
    found, length = best_lengths(chances, row_share, pass_share, streams)
    assert found == chosen and least <= length <= most


def test_the_tokens_are_those_that_come_without_a_draft_model() -> None:
    chance = random.Random(5)
    one = Rig(slots=14, host=9, store=40, max_streams=3)
    wanted = {}
    oracle = Oracle({}, chance=0.7)
    one.streams._steps.speculator.guesses = Guesses(oracle, Speculate.ON, one.clock)
    for number in range(1, 13):
        prompt = [chance.choice((1, 2, 3)) for _ in range(chance.randint(1, 20))]
        wanted[number] = expected(prompt, chance.randint(1, 16))
        oracle.answers[number] = [*prompt, *wanted[number]]
        one.submit(number, prompt, len(wanted[number]), priority=chance.randint(0, 2))
        one.turn(chance.randint(0, 6))
        one.disturb(number, chance)
    one.run()
    for number, answer in wanted.items():
        if one.terminal(number) != ["aborted"]:
            assert one.terminal(number) == ["done"] and one.tokens(number) == answer
    totals, told = one.streams.totals, one.streams.speculation["draft"]
    assert isinstance(told, dict) and 10 < told["right_drafts"] <= totals.right_drafts
    assert told["right_drafts"] < told["drafted_tokens"] <= totals.drafted_tokens


def test_a_request_tells_what_was_drafted_for_it() -> None:
    one, oracle = Rig(), Oracle({})
    oracle.answers[1] = [*[5, 6, 7], *expected([5, 6, 7], 20)]
    one.streams._steps.speculator.guesses = Guesses(oracle, Speculate.ON, one.clock)
    one.submit(1, [5, 6, 7], 20)
    one.run()
    timings = one.of(1, "done")[0]["timings"]
    assert timings.accepted == timings.drafted >= 16 and one.tokens(1) == expected([5, 6, 7], 20)


def test_the_look_up_comes_first() -> None:
    one, oracle = Rig(), Oracle({1: [9] * 200})
    one.streams._steps.speculator.guesses = Guesses(oracle, Speculate.ON, one.clock)
    one.streams._steps.speculator.mode = Speculate.ON
    prompt = [1, 2, 3, 4, 1, 2, 3]
    one.submit(1, prompt, 2)
    request = one.streams._requests[1]
    request.draft.lookup = SimpleNamespace(find=lambda _tokens, most: [4] * most)
    one.run()
    assert not any(map(any, oracle.asked))


class Plain(Guesses):
    """One that wants a step without drafts whenever the test says so, and guesses nothing itself."""

    wants = False

    @property
    def wants_plain_step(self) -> bool:
        return self.wants


def test_a_step_without_drafts_is_one_without_look_ups_too() -> None:
    """So it comes, and the draft model goes on, whatever repeats itself in the text of one of many."""
    one, answer = Rig(context=1000, max_rows=64), [1, 2, 3, *expected([1, 2, 3], 80)]
    oracle = Oracle({1: []})
    plain = Plain(oracle, Speculate.AUTO, oracle.clock)
    speculator = one.streams._steps.speculator
    speculator.guesses, speculator.mode = plain, Speculate.ON
    one.submit(1, answer[:3], 80)
    one.streams._requests[1].draft.lookup = SimpleNamespace(
        find=lambda tokens, most: answer[len(tokens) : len(tokens) + min(most, 2)]
    )
    one.turn(4)
    drafted = []
    for step in range(6):
        plain.wants = step % 2 == 0
        before = one.streams.totals.drafted_tokens
        one.turn()
        drafted.append(one.streams.totals.drafted_tokens - before)
    assert drafted == [0, 2, 0, 2, 0, 2]
    one.run()
    assert one.tokens(1) == answer[3:]


def test_look_ups_bring_the_step_without_drafts_on() -> None:
    oracle = Oracle({1: range(100)})
    guesses = Guesses(oracle, Speculate.AUTO, oracle.clock)
    assert guesses.draft([wish(1, [0])], STREAMED)[0] > 0
    for _ in range(PLAIN_STEPS):
        assert not guesses.wants_plain_step
        guesses.ran(STEP_S, 1)
    assert guesses.wants_plain_step and guesses.draft([wish(1, [0])], STREAMED) == [0]
    guesses.ran(STEP_S, 0)
    assert not guesses.wants_plain_step and guesses.draft([wish(1, [0])], STREAMED)[0] > 0
