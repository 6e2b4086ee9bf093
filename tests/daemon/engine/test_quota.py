"""A tenant's bound on cached pages, from the request to the pager."""

from __future__ import annotations

import random

from tests.daemon.engine.fakes import PAGE
from tests.daemon.engine.rig import Rig
from tierd.tiers.keys import salted_root


def pages_of(rig: Rig, salt: bytes) -> int:
    stack, count = [salted_root(rig.pager.root, salt)], 0
    while stack:
        for child in rig.pager.index.children(stack.pop()):
            count += 1
            stack.append(child.key)
    return count


def test_a_tenant_keeps_no_more_than_its_bound_whatever_its_salts() -> None:
    rig, rng = Rig(slots=64, store=64), random.Random(2)
    for number in range(1, 13):
        tokens = [rng.randrange(60) for _ in range(5 * PAGE)]
        salt = {} if number % 3 else {"salt": "mine"}
        rig.submit(number, tokens, max_tokens=2, tenant="key:1", quota_pages=6, **salt)
        rig.run()
        assert rig.terminal(number) == ["done"]
        rig.turn(3)  # pages on their way to the store go when they have arrived
        assert pages_of(rig, b"key:1") + pages_of(rig, b"key:1\0mine") <= 6


def test_several_requests_at_once_end_within_it() -> None:
    rig, rng = Rig(slots=64), random.Random(3)
    for number in range(1, 5):
        rig.submit(number, [rng.randrange(60) for _ in range(4 * PAGE)], tenant="key:1", quota_pages=5)
    rig.run()
    assert all(rig.terminal(number) == ["done"] for number in range(1, 5))
    assert pages_of(rig, b"key:1") <= 5


def test_without_one_everything_is_kept() -> None:
    rig, rng = Rig(slots=64), random.Random(4)
    for number in range(1, 4):
        rig.submit(number, [rng.randrange(60) for _ in range(5 * PAGE)], max_tokens=1, tenant="key:1")
        rig.run()
    assert pages_of(rig, b"key:1") >= 15
