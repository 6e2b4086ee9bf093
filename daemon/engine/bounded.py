"""Requests whose rows see, or read, less than all before them: which pages they are given, keep and share. See
`kv_mode`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tierd.daemon.engine import fetch
from tierd.daemon.engine.heavy import OBSERVED_TOKENS, Heavy
from tierd.daemon.engine.ladder import Ladders
from tierd.daemon.engine.request import Request
from tierd.daemon.engine.scheduler import Limits, pages_for
from tierd.daemon.engine.selection import Lesson, Pick, Selection
from tierd.daemon.errors import OutOfSpace
from tierd.daemon.kv_mode import KvMode
from tierd.kernels.rows import Bound
from tierd.tiers.commit import THINNED_PAGES
from tierd.tiers.lease import Addresses, Lease
from tierd.tiers.pager import Pager


def bound_of(request: Request, start: int, page_tokens: int, window: int = 0) -> Bound:
    """What rows from `start` on see, and the pages that they are given. One that chooses is alone, and sees all that it
    is given. `window`: that of the model, if all of its layers were trained with one."""
    mode = request.mode or (KvMode(window) if window else None)
    if mode is None:
        return Bound()
    if (heavy := request.heavy) is not None:
        missing = start // page_tokens + 1 - len(heavy.kept) if start >= request.exact_end else 0
        return Bound(base=missing * page_tokens)
    if not mode.selects:
        return Bound(*mode.bound(start, page_tokens))
    end = (start // page_tokens + 1) * page_tokens
    return Bound(base=end - mode.read) if chooses(request, start) else Bound()


def unseen_pages(request: Request, tokens: int, limits: Limits) -> int:
    """So many first pages no row after `tokens` known ones sees: with their keys they stay known, but nothing has to
    bring them to memory."""
    plain = request.mode is None and request.rungs is None and request.beams is None and not request.private
    if not limits.window or not plain:
        return 0
    return bound_of(request, tokens, limits.page_tokens, limits.window).base // limits.page_tokens


def chooses(request: Request, start: int) -> bool:
    """Whether the rows from `start` on choose their pages."""
    return request.mode is not None and request.mode.selects and start >= request.exact_end


def wanted_by(request: Request, lease: Lease, start: int, end: int, page_tokens: int) -> Pick | Lesson | None:
    """What rows from `start` to `end` choose, one of them, or learn: the last exact one reads all pages before it."""
    selection = request.selection
    if selection is None:
        return None
    if chooses(request, start):
        return Pick(selection, lease.table[:0], lambda place: lease.nodes[place].key, end % page_tokens == 0)
    return Lesson(selection, end // page_tokens) if end == request.exact_end else None


def begin(request: Request, new_selection: Callable[[], Selection], page_tokens: int) -> None:
    """Makes what its rows choose or keep pages by, where its mode wants that and it has none."""
    mode = request.mode
    if mode is None:
        return
    if mode.selects and request.selection is None:
        request.selection = new_selection()
    if mode.thins and request.heavy is None:
        first = request.exact_end - OBSERVED_TOKENS
        request.heavy = Heavy(mode.kept // page_tokens, mode.recent // page_tokens, first, page_tokens)


def thin(pager: Pager, request: Request, lease: Lease) -> None:
    """Decides which pages later rows see, when that is to be decided, and gives others back."""
    heavy, position = request.heavy, request.computed
    if heavy is None or position < request.exact_end or lease.absent:
        return
    if heavy.is_due(position):
        heavy.decide(position)
    device, slots = pager.device, THINNED_PAGES if heavy.thinned else 0
    # Where one slot is free, each copy makes room for the next: it must be done before the answer takes that slot.
    while slots and (slots := pager.committer.thin(lease, heavy.numbers, slots)) and device.cached:
        pager.evictor.make_room(min(slots, device.cached))  # what nobody uses
        if not device.num_free:
            return  # tried again in the next turn


def kept_places(request: Request, lease: Lease, start: int) -> Addresses | None:
    """Where in the table of its lease those pages stand that rows from `start` on see; None where that is not for it to
    say."""
    if (heavy := request.heavy) is None or start < request.exact_end:
        return None
    known = len(lease.nodes)
    first = int(np.searchsorted(heavy.kept, known))
    return np.concatenate((heavy.kept[:first], np.arange(known, known + len(heavy.kept) - first)))


def pages_of(
    pager: Pager, lease: Lease, end: int, bound: Bound, wanted: Pick | Lesson | None, kept: Addresses | None = None
) -> tuple[Addresses, Pick | Lesson | None]:
    """The pages that rows up to `end` are given, as they lie now. `kept`: see `kept_places`."""
    if kept is not None:
        pager.tables.refresh(lease)
        return lease.table[kept], wanted
    stop, first = pages_for(end, pager.page_tokens), bound.base // pager.page_tokens
    if not isinstance(wanted, Pick):
        return pager.tables.addresses(lease, stop, first, bound.lead), wanted
    table = pager.tables.addresses(lease, stop)
    # Until the row has chosen, all of them are the one that it writes to.
    return np.full(stop - first, table[-1]), wanted._replace(table=table)


def match(pager: Pager, request: Request, ladders: Ladders | None) -> Lease:
    """Pins what is known of its tokens, exact copies included."""
    again = request.private or request.times.admitted_s > 0.0 or request.resumed > 0
    known = [] if request.private else request.findable
    lease = pager.match(known, request.salt, again=again, tenant=request.tenant, quota_pages=request.quota_pages)
    if ladders is not None and request.rungs is not None:
        ladders.open(request.rungs, lease)
    return lease


def promise(request: Request, lease: Lease, ladders: Ladders | None) -> None:
    """After `Request.covered`: of what was found, exact copies may have to be computed."""
    if ladders is not None and request.rungs is not None:
        ladders.prepare(request.rungs, lease, request.computed)
        request.recount()


def commit(pager: Pager, request: Request, lease: Lease, ladders: Ladders | None = None) -> None:
    """Names the pages that others may use, and gives back those that no later row sees."""
    pager.commit(lease, request.exact)
    if ladders is not None and request.rungs is not None:
        ladders.settle(request.rungs, lease, request.computed)
    if (mode := request.mode) is not None and not mode.spares_prompt:
        size = pager.page_tokens
        pager.committer.let_go(lease, pages_for(mode.sinks, size), mode.first_seen(request.computed) // size)


def release(pager: Pager, request: Request, lease: Lease, known: list[int], ladders: Ladders | None) -> None:
    """Gives pages and exact copies back; those of `known` tokens stay known."""
    if ladders is not None and request.rungs is not None:
        ladders.close(request.rungs, lease, known)
    pager.release(lease, known)


def fits(pager: Pager, request: Request) -> bool:
    """Whether there are pages for it at all. Without keys, pages can go nowhere: they stay on the device."""
    size, tokens = pager.page_tokens, len(request.tokens)
    if (mode := request.mode) is not None and tokens > request.exact_end:
        if mode.thins:
            needed = _thinning(pager, request, mode)
            return needed.private <= pager.device.slots and needed.pages <= pager.capacity_pages
        if mode.selects:
            return pages_for(tokens, size) - request.exact_end // size <= pager.device.slots and tokens <= (
                size * pager.capacity_pages
            )
        if pages_for(mode.window, size) + 2 > pager.device.slots:
            return False
        tokens = mode.most_tokens(size)
    return tokens <= size * (pager.device.slots if request.private else pager.capacity_pages)


class _Thinning(NamedTuple):
    """Pages that a sequence needs whose pages are thinned out."""

    private: int  # on the device
    pages: int  # in all
    leaves: bool  # its prompt does: all that is kept of it may be copied (`Committer.thin`)


def _thinning(pager: Pager, request: Request, mode: KvMode) -> _Thinning:
    """What it needs to become as long as it is now."""
    size, kept = pager.page_tokens, mode.kept // pager.page_tokens
    private = min(kept, max(pages_for(len(request.tokens), size) - request.exact_end // size, 0))
    leaves = 2 * kept <= pager.device.slots
    # Beside its exact pages, until they have left: one to copy to, and those that its rows begin meanwhile.
    beside = min(private, 2 + kept // (THINNED_PAGES * size)) if leaves else private
    return _Thinning(private, pages_for(request.exact_end, size) + beside, leaves)


def no_room(pager: Pager, request: Request) -> OutOfSpace:
    """The error of a request that does not fit (any more)."""
    tokens = len(request.tokens)
    if request.mode is None or request.keeps_all and tokens > pager.capacity_pages * pager.page_tokens:
        return fetch.no_room(pager, tokens)
    if request.mode.thins and (needed := _thinning(pager, request, request.mode)).private <= pager.device.slots:
        why = (
            "that it has until it is thinned out" if needed.leaves else
            "of its exact tokens and of what it keeps, which can't take the place of the others: it is more than half "
            f"of the device's {pager.device.slots}"
        )  # fmt: skip
        return OutOfSpace(
            f"with kv_mode {request.mode} this text of {tokens} tokens needs the {needed.pages} pages {why}; all tiers "
            f"together hold {pager.capacity_pages}",
            hint="give tierd more memory with --device-mem, or keep fewer tokens",
        )
    return OutOfSpace(
        f"with kv_mode {request.mode} all but the exact pages lie on the device, whose {pager.device.slots} pages are "
        f"too few for this text of {tokens} tokens",
        hint="give tierd more memory with --device-mem, or leave kv_mode out",
    )
