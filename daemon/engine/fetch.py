"""When a request whose pages are on their way begins to compute: the figures behind `loading.choose`. And what it is
told when none are on their way."""

from __future__ import annotations

from collections.abc import Collection

from tierd.daemon.engine import loading
from tierd.daemon.engine.loading import Choice, Progress
from tierd.daemon.engine.request import Request
from tierd.daemon.engine.scheduler import ACTIVE, Limits, Phase
from tierd.daemon.errors import EngineFailed, OutOfSpace, TierdError
from tierd.tiers.lease import Lease
from tierd.tiers.links import Link
from tierd.tiers.pager import Pager

JOIN_S = 0.02  # a copy in memory takes a millisecond


def may_compute(pager: Pager, request: Request, lease: Lease, now_s: float) -> bool:
    """Whether to compute what is absent by now. Starts no more loads where computing is much sooner."""
    if lease.ready or not pager.promoter.is_coming(lease):
        return True
    found = progress(pager, request, lease, now_s)
    choice = loading.choose(found)
    request.guessed_row_s = pager.residency.cost.token_s if loading.is_guess(found) else 0.0
    if choice is Choice.COMPUTE:
        pager.promoter.stop_loading(lease)
    return choice is not Choice.WAIT


def has_place(requests: Collection[Request], limits: Limits) -> bool:
    """Whether whoever comes now can be let in: a place is free, or one in the background gives its own."""
    active = [request for request in requests if request.phase in ACTIVE]
    return len(active) < limits.max_streams or any(request.priority > 0 for request in active)


def is_joining(requests: Collection[Request], now_s: float) -> bool:
    """Whether one that was let in just now lacks nothing but the copy of a tail, and no answer goes on meanwhile.

    A step of others would take longer than that.
    """
    return all(request.phase is not Phase.DECODE for request in requests) and any(
        request.phase is Phase.FETCHING
        and now_s - request.fetched_s < JOIN_S
        and request.lease is not None
        and not request.lease.absent
        for request in requests
    )


def progress(pager: Pager, request: Request, lease: Lease, now_s: float) -> Progress:
    """How far the loads of a request are, and what computing would cost."""
    size, stored_bytes, absent = pager.page_tokens, pager.residency.stored_bytes, len(lease.absent)
    cost = pager.residency.cost
    return Progress(
        absent_bytes=absent * stored_bytes,
        arrived_bytes=max(request.fetched_pages - absent, 0) * stored_bytes,
        elapsed_s=now_s - request.fetched_s,
        link_bytes_per_s=pager.mover.statistics()[Link.DISK_READ].bytes_per_s,
        compute_s=sum(cost.seconds(size, place * size) for place in lease.absent),
    )


def no_room(pager: Pager, tokens: int) -> OutOfSpace:
    """The error of a sequence that can't become so long."""
    return OutOfSpace(
        f"{tokens} tokens do not fit the {pager.capacity_pages} pages that all tiers hold together",
        hint="give tierd more memory with --device-mem, --host-mem or --nvme-mem",
    )


def stuck(pager: Pager, tokens: int) -> TierdError:
    """The error of a request that gets no page for so many tokens, and waits for nothing that would bring one."""
    if (dead := pager.mover.dead) is not None:
        what = f"there is no page for its next token, and none can be moved any more: {dead}"
        return EngineFailed(what, hint="`tierd unload` the model: the next request loads it anew")
    return no_room(pager, tokens)
