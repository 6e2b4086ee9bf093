"""exact: copies are found by key while there is room, the one used least recently goes first, the books balance."""

from __future__ import annotations

import random

import pytest

from tests.counts import counted
from tierd.tiers.arena import Arena
from tierd.tiers.exact import Copy, ExactPages
from tierd.tiers.page import PageKey


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(16, "little"))


def pages(slots: int) -> ExactPages:
    return ExactPages(Arena("exact", slots, 64, poison=True))


def known(of: ExactPages, number: int, tokens: int = 16) -> Copy:
    copy = of.make()
    of.arena.array[copy.slot] = number
    of.name(copy, key(number), tokens)
    of.drop(copy)
    return copy


def test_the_one_used_least_recently_goes() -> None:
    exact = pages(2)
    known(exact, 1)
    known(exact, 2)
    found = exact.find(key(1), 16)
    assert found is not None
    exact.drop(found)
    mine = exact.make()
    assert exact.find(key(2), 16) is None
    assert exact.find(key(1), 16) is found
    assert exact.check() == []
    with pytest.raises(AssertionError, match="pin more copies than were counted"):
        exact.make()
    exact.drop(mine)
    assert exact.statistics() == (2, 1, 0, 128)


def test_a_copy_of_fewer_tokens_is_found_for_as_many() -> None:
    exact = pages(2)
    known(exact, 7, tokens=5)
    assert exact.find(key(7), 6) is None
    source = exact.find(key(7), 5)
    assert source is not None
    own = exact.make(source)
    assert (exact.arena.array[own.slot] == 7).all()
    assert (own.key, own.tokens) == (None, 5)
    for copy in (source, own):
        exact.drop(copy)
    assert exact.arena.num_free == 1
    assert exact.check() == []


def test_a_second_copy_of_one_page_stays_unknown() -> None:
    exact = pages(2)
    first = known(exact, 1)
    second = exact.make()
    exact.name(second, key(1), 16)
    exact.drop(second)
    assert exact.find(key(1), 16) is first
    assert exact.arena.num_free == 1
    assert exact.check() == []


def test_the_books_balance_whatever_happens() -> None:
    chance, exact, held = random.Random(1), pages(8), list[Copy]()
    for _ in range(counted(5000, 300)):
        number = chance.randrange(12)
        if held and (chance.random() < 0.5 or len(held) == 8):
            copy = held.pop(chance.randrange(len(held)))
            if chance.random() < 0.7:
                exact.name(copy, key(number), 16)
            exact.drop(copy)
        else:
            held.append(exact.find(key(number), 16) or exact.make())
        assert exact.check() == []
    for copy in held:
        exact.drop(copy)
    assert exact.arena.used == 0
    assert exact.check() == []


def test_check_tells_of_each_fault() -> None:
    exact = pages(3)
    one, other = known(exact, 1), known(exact, 2)
    one.pins = 1
    assert "slot 0 has 1 pins and is IDLE" in exact.check()[0]
    one.pins, other.slot = 0, one.slot
    assert "exact: two known copies lie in one slot" in exact.check()
    del exact._known[key(2)]
    assert exact.check() == ["exact: a slot that counts as known is not"]
