"""Requests whose rows see less than all before them: which pages they are given, keep and share. See `kv_mode`."""

from __future__ import annotations

from tierd.daemon.engine.request import Request
from tierd.daemon.engine.scheduler import pages_for
from tierd.kernels.rows import Bound
from tierd.tiers.lease import Lease
from tierd.tiers.pager import Pager


def bound_of(request: Request, start: int, page_tokens: int) -> Bound:
    """What rows from `start` on see, and the pages that they are given."""
    return Bound() if request.mode is None else Bound(*request.mode.bound(start, page_tokens))


def commit(pager: Pager, request: Request, lease: Lease) -> None:
    """Names the pages that others may use, and gives back those that no later row sees."""
    pager.commit(lease, request.exact)
    if (mode := request.mode) is not None:
        size = pager.page_tokens
        pager.committer.let_go(lease, pages_for(mode.sinks, size), mode.first_seen(request.computed) // size)


def fits(pager: Pager, request: Request) -> bool:
    """Whether there are pages for it at all. Without keys, pages can go nowhere: they stay on the device."""
    size, tokens = pager.page_tokens, len(request.tokens)
    if (mode := request.mode) is not None and tokens > mode.exact_tokens:
        if pages_for(mode.window, size) + 2 > pager.device.slots:
            return False
        tokens = mode.most_tokens(size)
    return tokens <= size * (pager.device.slots if request.private else pager.capacity_pages)
