"""Long prompts that nobody repeats leave a prefix that many share where it is: on the real pager, with small records.

Sizes in pages are those of a system prompt of 1,000 tokens (63 pages of 16), a prompt of 8,000 and arenas of 128 and 64
pages. Without a large store such a prompt does not fit; then as many pages come as several shorter ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiers.fakes import PAGE_TOKENS, ROOT, Rig
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers.keys import pack_tokens

DEVICE, HOST = 128, 64
HOT = list(range(1, 63 * PAGE_TOKENS + 1))
SCAN_PAGES = 512
FITS_PAGES = 120
CHUNK_TOKENS = 32 * PAGE_TOKENS

STORES = {"no store": None, "small store": 200, "store": 2000}


@pytest.fixture(params=STORES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    capacity = STORES[request.param]
    rig = Rig(device=DEVICE, host=HOST, store=None if capacity is None else MemoryStore(capacity))
    yield rig
    rig.settle()
    rig.check()
    rig.close()


def serve(rig: Rig, tokens: list[int]) -> int:
    """A whole request whose bytes nobody looks at; the tokens that were cached."""
    lease = rig.start(tokens)
    cached = lease.num_tokens
    for start in range(cached, len(tokens), CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, len(tokens))
        rig.allocate(lease, start, end)
        rig.pager.commit(lease, tokens[:end])
        rig.poll()
    rig.pager.release(lease, tokens)
    rig.settle()
    return cached


def hot(rig: Rig, question: int) -> int:
    """A request of somebody who has the hot prefix."""
    return serve(rig, [*HOT, *range(10_000 * question, 10_000 * question + 9)])


def scan(rig: Rig, number: int) -> None:
    """A prompt of 8,000 tokens, all new; where that does not fit, as many pages of shorter ones."""
    start = 1_000_000 * number
    pages = SCAN_PAGES if rig.pager.capacity_pages > SCAN_PAGES else FITS_PAGES
    for first in range(0, SCAN_PAGES, pages):
        count = min(pages, SCAN_PAGES - first) * PAGE_TOKENS
        serve(rig, list(range(start + first * PAGE_TOKENS, start + first * PAGE_TOKENS + count)))


def known_tokens(rig: Rig) -> int:
    """Tokens of the hot prefix that a look-up would find; finds out without using them."""
    found, _, _ = rig.pager.index.match(ROOT, pack_tokens(HOT))
    return len(found) * PAGE_TOKENS


def test_a_prefix_in_use_every_few_seconds(rig: Rig) -> None:
    for question in range(1, 6):
        hot(rig, question)
    scan(rig, 1)
    assert known_tokens(rig) == len(HOT)
    assert hot(rig, 6) >= len(HOT)


def test_a_prefix_seen_twice(rig: Rig) -> None:
    hot(rig, 1)
    hot(rig, 2)
    scan(rig, 1)
    assert known_tokens(rig) == len(HOT)


def test_several_scans_in_a_row(rig: Rig) -> None:
    hot(rig, 1)
    hot(rig, 2)
    for number in range(1, 5):
        scan(rig, number)
        assert known_tokens(rig) == len(HOT)


def test_a_prefix_not_seen_for_twenty_minutes(rig: Rig) -> None:
    hot(rig, 1)
    hot(rig, 2)
    rig.now_s += 1200
    scan(rig, 1)
    assert known_tokens(rig) == len(HOT)


def test_a_prefix_used_often_and_not_seen_for_an_hour(rig: Rig) -> None:
    for question in range(1, 11):
        hot(rig, question)
    rig.now_s += 3600
    scan(rig, 1)
    assert known_tokens(rig) == len(HOT)


def test_scans_before_the_prefix_is_known_do_not_keep_it_out(rig: Rig) -> None:
    scan(rig, 1)
    hot(rig, 1)
    assert hot(rig, 2) >= len(HOT)
    scan(rig, 2)
    assert known_tokens(rig) == len(HOT)


def test_a_prefix_that_nobody_uses_any_more_goes_in_the_end() -> None:
    rig = Rig(device=DEVICE, host=HOST)
    for question in range(1, 4):
        hot(rig, question)
    rig.now_s += 12 * 3600
    for number in range(1, 4):
        scan(rig, number)
    assert known_tokens(rig) < len(HOT)
    rig.close()
