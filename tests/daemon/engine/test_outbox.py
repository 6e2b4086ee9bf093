"""What requests tell while their prompt is computed."""

from __future__ import annotations

from tests.daemon.engine.rig import Rig
from tierd.daemon.engine.outbox import PROGRESS_EVERY_S

PROMPT = [number % 60 for number in range(120)]


def run(turn_s: float) -> Rig:
    rig = Rig()
    rig.submit(1, PROMPT, 4)
    while len(rig.streams):
        rig.clock.now_s += turn_s
        rig.turn()
    return rig


def test_a_long_prompt_tells_how_far_it_is_a_few_times_a_second() -> None:
    rig = run(PROGRESS_EVERY_S / 2)
    told = rig.of(1, "progress")
    done = [data["done"] for data in told]
    assert 2 <= len(told) <= 5 and done == sorted(set(done)) and max(done) < len(PROMPT)
    assert {(data["stage"], data["total"]) for data in told} == {("prompt", len(PROMPT))}
    kinds = [event.ev for event in rig.events]
    assert kinds.index("accepted") < kinds.index("progress")
    assert "progress" not in kinds[kinds.index("text") :], "after text it would mean that an engine was lost"


def test_a_short_one_says_nothing() -> None:
    assert run(0.0).of(1, "progress") == []


def test_the_tokens_of_the_prompt_are_told_to_who_asks() -> None:
    rig = Rig()
    rig.submit(1, PROMPT, 2)
    rig.submit(2, PROMPT, 2, tell_prompt=True)
    while len(rig.streams):
        rig.turn()
    assert "prompt" not in rig.of(1, "done")[0] and rig.of(2, "done")[0]["prompt"] == PROMPT
