"""The plain loop: short enough to be right by reading, and the same tokens as the one with overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.daemon.engine.fakes import expected
from tests.daemon.engine.rig import Rig
from tests.tiers.fakes import damaged
from tierd.daemon.engine import step_plain
from tierd.daemon.engine.batch import Batch
from tierd.daemon.engine.runner import Logits
from tierd.daemon.errors import EngineFailed
from tierd.daemon.protocol import Sampling, Submit
from tierd.tiers.errors import StagingLost
from tierd.tiers.page import PageKey

LONG = [place * 7 % 60 for place in range(90)]


def plain(rig: Rig, tokens: list[int], count: int = 12) -> list[int]:
    submit = Submit("m", tokens=tuple(tokens), sampling=Sampling(temperature=0.0, ignore_eos=True, max_tokens=count))
    request = rig.intake.request(1, submit, rig.clock())
    return step_plain.generate(rig.pager, rig.streams._runner, request, 16, rig.clock)


@pytest.mark.parametrize(("slots", "host", "store"), [(64, 0, 0), (4, 40, 0), (4, 3, 60), (1, 0, 60)])
def test_the_tokens_of_the_other_loop(slots: int, host: int, store: int) -> None:
    rig = Rig(slots=slots, host=host, store=store)
    assert plain(rig, LONG) == expected(LONG, 12)
    assert plain(rig, LONG) == expected(LONG, 12)  # from whatever tier holds it now
    rig.check_quiet()
    rig.submit(2, LONG, 12)
    rig.run()
    assert rig.tokens(2) == expected(LONG, 12)


def test_a_lost_page_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(slots=4, store=60)
    run, lost = rig.streams._runner.run, []

    def lose_one(rows: Batch, streamed: Sequence[PageKey] = (), **more: Any) -> Logits:
        if len(streamed) > 20 and not lost:
            lost.append(streamed[7])
            raise damaged(lost)
        return run(rows, streamed, **more)

    monkeypatch.setattr(rig.streams._runner, "run", lose_one)
    assert plain(rig, LONG, 30) == expected(LONG, 30)
    assert lost and rig.pager.statistics().misses
    rig.check_quiet()


def test_a_page_that_comes_back_while_slots_are_waited_for_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(slots=4, host=3, store=60)
    other = [*range(5, 17)]
    plain(rig, other, 1)
    holder = rig.pager.match([*other, 1])  # three pages of memory that become free in a moment
    rig.pager.fetch(holder, 1e9)
    run, allocate, late, refusals = rig.streams._runner.run, rig.pager.allocate, [], []

    def be_late_once(rows: Batch, streamed: Sequence[PageKey] = (), **more: Any) -> Logits:
        if len(streamed) > 10 and not late:
            late.append(streamed[0])
            refusals.extend(range(8))
            rig.pager.release(holder, [])
            raise StagingLost(late, "not in time")
        return run(rows, streamed, **more)

    def refuse(*args: Any) -> bool:
        if refusals:
            refusals.pop()
            return False
        return allocate(*args)

    monkeypatch.setattr(rig.streams._runner, "run", be_late_once)
    monkeypatch.setattr(rig.pager, "allocate", refuse)
    assert plain(rig, LONG, 30) == expected(LONG, 30)
    assert late and not refusals and rig.pager.statistics().loaded_pages > 0
    rig.check_quiet()


def test_pages_that_never_come_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(slots=4)
    monkeypatch.setattr(rig.pager, "allocate", lambda *_: False)
    monkeypatch.setattr(step_plain, "TIMEOUT_S", 0.1)
    with pytest.raises(EngineFailed, match="no page came"):
        plain(rig, LONG[:5])
    rig.check_quiet()
