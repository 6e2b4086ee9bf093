from __future__ import annotations

import random

import pytest

from tierd.daemon.engine.fair import Fair


def test_what_is_put_is_found() -> None:
    one: Fair[str, int] = Fair(3)
    assert one.put("a", 1, b"x") == [] and one.get("a") == one.peek("a") == 1 and "a" in one and len(one) == 1
    assert one.put("a", 2, b"x") == [] and one.get("a") == 2 and len(one) == 1
    one.drop("a")
    one.drop("a")
    assert one.get("a") is one.peek("a") is None and "a" not in one and not len(one)
    one.put("b", 1, b"x")
    one.clear()
    assert not len(one) and one.put("c", 1, b"x", 9) == []


def test_the_least_recently_used_goes() -> None:
    one: Fair[str, int] = Fair(2)
    one.put("a", 1, b"x")
    one.put("b", 2, b"x")
    one.peek("a")
    assert one.get("a") == 1 and one.put("c", 3, b"x") == ["b"] and one.put("d", 4, b"x") == ["a"]


def test_the_tenant_with_the_most_makes_room() -> None:
    one: Fair[str, int] = Fair(4)
    one.put("mine", 1, b"me")
    for name in "abcdefgh":
        gone = one.put(name, 1, b"other")
    assert gone == ["e"] and "mine" in one
    assert one.put("mine too", 1, b"me") == ["f"]


def test_the_newest_stays() -> None:
    one: Fair[str, int] = Fair(10)
    one.put("small", 1, b"me", 3)
    assert one.put("large", 1, b"other", 30) == ["small"]
    assert one.put("larger", 1, b"other", 40) == ["large"] and one.peek("larger") == 1


@pytest.mark.parametrize("seed", range(3))
def test_costs_add_up(seed: int) -> None:
    chance, one = random.Random(seed), Fair[int, int](50)
    kept: dict[int, tuple[bytes, int]] = {}
    for _ in range(2000):
        key, owner, cost = chance.randrange(40), chance.choice([b"a", b"b", b"c"]), chance.randrange(1, 20)
        before = {name: sum(c for o, c in kept.values() if o == name) for name in (b"a", b"b", b"c")}
        gone = one.put(key, key, owner, cost)
        kept[key] = (owner, cost)
        for old in gone:
            # Nobody under a third of the room loses anything to others, but for one that has this value alone.
            alone = sum(o == owner for o, _ in kept.values()) == 1
            assert alone or kept[old][0] == owner or before[kept[old][0]] > 50 // 3
            del kept[old]
        assert len(one) == len(kept) and all(one.peek(key) == key for key in kept)
        assert sum(cost for _, cost in kept.values()) <= 50
        if chance.random() < 0.1:
            one.drop(key)
            kept.pop(key, None)
