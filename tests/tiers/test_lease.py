from __future__ import annotations

import random

import pytest

from tierd.tiers.keys import pack_tokens, root_key
from tierd.tiers.lease import END, Lease, LeaseState, TailCopy
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.prefix import Node

PAGE = 4


def lease_of(pages: int, absent: set[int], reached: int, *, tail: bool = False) -> Lease:
    """A live lease on known pages of 4 tokens, then private ones up to `reached`."""
    lease = Lease(root_key("test"), PAGE)
    lease.state = LeaseState.LIVE
    for number in range(pages):
        lease.nodes.append(Node(PageKey(b"%d" % number), lease.root, pack_tokens(range(PAGE))))
    lease.origins = [Tier.NVME] * pages
    lease.private = list(range(-(-(reached - pages * PAGE) // PAGE)))
    lease.absent, lease.reached = set(absent), reached
    lease.tail = TailCopy(None) if tail else None
    return lease


def test_hits_are_counted_by_where_pages_were_found() -> None:
    lease = Lease(root_key("test"), 16)
    lease.origins = [Tier.DEVICE, Tier.HOST, Tier.NVME, None, Tier.NVME]
    lease.tail_tokens, lease.tail_origin = 5, Tier.HOST
    assert lease.num_tokens == 69  # a page that had to be computed was no hit
    assert (lease.hit_device, lease.hit_host, lease.hit_nvme) == (16, 21, 32)
    assert not lease.ready
    assert "69 tokens" in repr(lease)


@pytest.mark.parametrize(
    ("lease", "ready"),
    [
        (lease_of(2, set(), 8), True),
        (lease_of(2, {1}, 8), False),
        (lease_of(2, set(), 8, tail=True), False),
        (Lease(root_key("test"), PAGE), False),
    ],
    ids=["all there", "a page absent", "a tail to come", "not fetched"],
)
def test_a_lease_is_ready_when_nothing_is_to_come(lease: Lease, ready: bool) -> None:
    assert lease.ready is ready


@pytest.mark.parametrize(
    ("lease", "position", "skip", "limit"),
    [
        (lease_of(4, set(), 18), 0, 18, END),
        (lease_of(4, set(), 16), 0, 16, END),
        (lease_of(0, set(), 0), 0, 0, END),
        (lease_of(4, set(), 18), 18, 18, END),
        (lease_of(4, {0, 1, 3}, 16), 0, 0, 8),
        (lease_of(4, {0, 1, 3}, 16), 8, 12, END),  # the last page is absent: on into private ones
        (lease_of(4, {0, 1, 3}, 18), 8, 12, 16),  # but not over tokens that are there
        (lease_of(4, {0, 1, 3}, 18), 16, 18, END),
        (lease_of(4, {1, 2}, 16), 5, 5, 12),  # in the middle of a page
        (lease_of(4, {1}, 16), 5, 5, 8),
        (lease_of(4, {3}, 16, tail=True), 0, 12, 16),
        (lease_of(4, set(), 16, tail=True), 0, 16, 16),  # nothing can be computed before the tail is there
    ],
)
def test_rows_go_from_hole_to_hole(lease: Lease, position: int, skip: int, limit: int) -> None:
    assert lease.skip(position) == skip
    assert lease.limit(skip) == limit


@pytest.mark.parametrize("seed", range(50))
def test_a_walk_computes_every_hole_once_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    pages, private = rng.randint(0, 8), rng.randint(0, 6)
    lease = lease_of(pages, {place for place in range(pages) if rng.random() < 0.5}, pages * PAGE + private)
    wanted = [place * PAGE + offset for place in sorted(lease.absent) for offset in range(PAGE)]
    wanted += range(lease.reached, lease.reached + 10)
    computed: list[int] = []
    position = lease.skip(0)
    while position < lease.reached + 10:
        end = min(position + rng.randint(1, 7), lease.limit(position), lease.reached + 10)
        computed += range(position, end)
        lease.absent -= {place for place in lease.absent if (place + 1) * PAGE in range(position + 1, end + 1)}
        position = lease.skip(end)
    assert computed == wanted


def test_rows_can_be_written_where_there_are_slots() -> None:
    lease = lease_of(3, {1}, 14)
    assert [lease.has_slot(page) for page in range(5)] == [False, False, False, True, False]
    assert lease.held_until(4) == 4
    assert lease.held_until(14) == 16
    assert lease.held_until(18) == 18
    lease.filling[1] = 7
    assert lease.has_slot(1)
    assert lease.held_until(5) == 8
    lease.filling[2] = 8
    assert lease.held_until(5) == 16  # from pages that are computed again on into private ones


def test_pages_are_known_ones_then_private_ones() -> None:
    lease = lease_of(2, {0}, 10)
    lease.filling[0] = 5
    assert lease.num_pages == 3
