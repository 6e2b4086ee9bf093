"""Who waits for pages that an earlier request is computing: many that come at once with one prefix compute it once.

Of all requests whose next page is the same, the first in rank leads; it computes that page, and the others take it over
when it is committed (`Pager.adopt`). This is found anew before every step and from nothing but where each request
stands. So when a leader ends, is preempted, loses a page or is passed by one of higher rank, the next step knows of
another leader or of none, and nobody waits for somebody who waits for him: leaders are earlier in rank.

Pages of different salts have different keys and are never the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from tierd.daemon.engine.request import Request
from tierd.daemon.engine.scheduler import Limits, Phase, Stream
from tierd.tiers.page import PageKey
from tierd.tiers.pager import Pager


@dataclass(frozen=True, slots=True)
class Following:
    """What one request waits for: that `leader` computes the pages up to token `until`."""

    leader: int
    until: int


def look(
    requests: Collection[Request], pager: Pager, limits: Limits, now_s: float
) -> tuple[tuple[Stream, ...], dict[int, Following]]:
    """What the scheduler sees of all requests, and who of them waits for whom."""
    size = limits.page_tokens
    waiting, leaders = following(requests, size), leading(requests, size)
    # Where nobody is let in it does not matter what those share that wait for it; neither while there is nothing.
    is_open = 0 < len(pager.leases) < limits.max_streams
    streams: list[Stream] = []
    for request in requests:
        found = waiting.get(request.id)
        if found is not None:
            pages = (found.until - request.computed) // size
            seen = replace(request.seen(now_s, limits, pages), leader=found.leader, shared_until=found.until)
        else:
            shared = _shared(request, pager, leaders) if is_open and request.phase is Phase.WAITING else 0
            seen = request.seen(now_s, limits, shared)
        streams.append(seen if request.beams is None else request.beams.seen(seen, request, size))
    return tuple(streams), waiting


def keys_of(request: Request, pager: Pager) -> list[PageKey]:
    """The keys of the pages that its tokens fill, computed once. None of a request that shares nothing."""
    if not request.keys and not request.private:
        request.keys = pager.chain(request.findable, request.salt)
    return request.keys


def following(requests: Iterable[Request], page_tokens: int) -> dict[int, Following]:
    """By id, the requests that wait. Only those with nothing left to load wait or lead."""
    groups: dict[PageKey, list[Request]] = {}
    for request in requests:
        lease = request.lease
        if request.phase is Phase.PREFILL and lease is not None and lease.ready and not lease.unkeyed:
            place = request.computed // page_tokens
            if place < len(request.keys):
                groups.setdefault(request.keys[place], []).append(request)
    found: dict[int, Following] = {}
    for group in groups.values():
        if len(group) > 1:
            found |= _waiting(group, page_tokens)
    return found


def leading(requests: Iterable[Request], page_tokens: int) -> dict[PageKey, Request]:
    """The requests that are about to compute pages, by the key of the next one."""
    return {
        request.keys[request.computed // page_tokens]: request
        for request in requests
        if request.phase is Phase.PREFILL and request.computed // page_tokens < len(request.keys)
    }


def common_pages(mine: list[PageKey], others: list[PageKey], start: int) -> int:
    """How many pages two sequences share whose pages before `start` are the same. A key names all pages before it."""
    return bisect_left(range(min(len(mine), len(others))), True, start, key=lambda place: mine[place] != others[place])


def _shared(request: Request, pager: Pager, leaders: Mapping[PageKey, Request]) -> int:
    """Pages of a waiting request that cost no memory, for live ones need them anyway."""
    keys = keys_of(request, pager)
    held = pager.leased_pages(keys)
    leader = leaders.get(keys[held]) if held < len(keys) else None
    return held if leader is None else common_pages(keys, leader.keys, held)


def _waiting(group: list[Request], page_tokens: int) -> dict[int, Following]:
    """All of a group, which need the same page next, but the first.

    None has its token later for that: apart, it would get two rows of three in each step; together, the shared rows
    come first, alone, and then there are fewer rows of its own to share a step with.
    """
    leader, *others = sorted(group, key=lambda request: request.rank)
    found: dict[int, Following] = {}
    for request in others:
        until = common_pages(request.keys, leader.keys, request.computed // page_tokens) * page_tokens
        found[request.id] = Following(leader.id, until)
    return found
