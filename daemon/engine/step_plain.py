"""The loop without overlap: one request, one thing after another. For readers, and as the oracle of tests.

It waits for every page before it computes, reads streamed layers when they are needed, and shares its steps with
nobody. The tokens are those of `streams`.
"""

from __future__ import annotations

from collections.abc import Callable

from tierd.daemon.engine import batch, bounded
from tierd.daemon.engine.request import Request
from tierd.daemon.engine.runner import Logits, Runner
from tierd.daemon.errors import EngineFailed
from tierd.tiers.errors import StagingLost
from tierd.tiers.lease import END, Lease
from tierd.tiers.pager import Pager

WAIT_S = 0.05
TIMEOUT_S = 60.0  # without any page that came


def generate(pager: Pager, runner: Runner, request: Request, max_rows: int, clock: Callable[[], float]) -> list[int]:
    """The tokens of the answer. Raises EngineFailed when pages do not come, TierFull when they can't, and ValueError
    for a request under a ladder: this loop keeps no exact copies.

    `runner` should be one with `overlap=False`.
    """
    if request.rungs is not None:
        raise ValueError(f"there are no exact copies here for {request.rungs}")
    lease = pager.match(request.findable, request.salt)
    bounded.begin(request, runner.new_selection, pager.page_tokens)
    try:
        pager.fetch(lease, clock() + TIMEOUT_S)
        _wait(pager, clock, lambda: lease.ready or not pager.promoter.is_coming(lease))
        while request.over is None:
            logits = _step(pager, runner, lease, request, max_rows, clock)
            if logits is not None:
                _, over = request.append(request.sampler.sample(logits, len(request.tokens)), clock())
                if over is not None:
                    break
    finally:
        pager.release(lease, request.exact)
    return request.tokens[request.prompt_tokens :]


def _step(
    pager: Pager, runner: Runner, lease: Lease, request: Request, max_rows: int, clock: Callable[[], float]
) -> Logits | None:
    """Compute the next rows; the logits of the last one when a token is to be drawn from them."""
    size = pager.page_tokens
    pager.tables.refresh(lease)
    if lease.absent and lease.private and not pager.writable_pages:
        pager.committer.shorten(lease)
    start = min(request.computed, min(lease.absent, default=END) * size)
    start = request.computed = lease.skip(start)
    held = lease.held_until(start)
    room = max(held + pager.writable_pages * size, start + 1)
    bounded.thin(pager, request, lease)
    stop = len(request.tokens)
    if request.mode is not None and request.mode.spares_prompt:
        page_end = start + 1 if request.mode.selects else (start // size + 1) * size
        stop = request.exact_end if start < request.exact_end else page_end
    end = min(len(request.tokens), stop, lease.limit(start), start + max_rows, room)
    _wait(pager, clock, lambda: pager.allocate(lease, start, end) or lease.skip(start) > start)
    if not lease.has_slot(start // size):
        return None  # a streamed page has come back to memory just before it was to be computed
    bound = bounded.bound_of(request, start, size)
    wanted = bounded.wanted_by(request, lease, start, end, size)
    kept = bounded.kept_places(request, lease, start)
    pages, wanted = bounded.pages_of(pager, lease, end, bound, wanted, kept)
    heavy = request.heavy
    observed = heavy.observes(start, end) if heavy is not None else 0
    is_last = end == len(request.tokens)
    rows = batch.build([batch.Rows(request.tokens[start:end], start, pages, is_last, bound, observed)], size)
    try:
        streamed = (
            pager.tables.streamed(lease, pages, bound.base // size, bound.lead) if kept is None
            else pager.tables.streamed_at(lease, kept)
        )  # fmt: skip
        logits = runner.run(rows, streamed, wanted=[] if wanted is None else [(0, wanted)])
    except StagingLost as lost:
        pager.tables.lose(lost, pager.leases)
        return None
    if heavy is not None and observed:
        heavy.take(end, runner.masses())
    request.computed = end
    bounded.commit(pager, request, lease)
    return logits[0] if is_last else None


def _wait(pager: Pager, clock: Callable[[], float], done: Callable[[], bool]) -> None:
    """Poll until something is true."""
    until_s = clock() + TIMEOUT_S
    while not done():
        if clock() >= until_s:
            raise EngineFailed(f"no page came for {TIMEOUT_S:.0f} s")
        if not pager.poll(clock()):
            pager.wait(WAIT_S)

