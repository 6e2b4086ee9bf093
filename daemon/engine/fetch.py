"""When a request whose pages are on their way begins to compute: the figures behind `loading.choose`."""

from __future__ import annotations

from tierd.daemon.engine import loading
from tierd.daemon.engine.loading import Choice, Progress
from tierd.daemon.engine.request import Request
from tierd.tiers.lease import Lease
from tierd.tiers.links import Link
from tierd.tiers.pager import Pager


def may_compute(pager: Pager, request: Request, lease: Lease, now_s: float) -> bool:
    """Whether to compute what is absent by now. Starts no more loads where computing is much sooner."""
    if lease.ready or not pager.promoter.is_coming(lease):
        return True
    choice = loading.choose(progress(pager, request, lease, now_s))
    if choice is Choice.COMPUTE:
        pager.promoter.stop_loading(lease)
    return choice is not Choice.WAIT


def progress(pager: Pager, request: Request, lease: Lease, now_s: float) -> Progress:
    """How far the loads of a request are, and what computing would cost."""
    size, record_bytes, absent = pager.page_tokens, pager.device.record_bytes, len(lease.absent)
    cost = pager.residency.cost
    return Progress(
        absent_bytes=absent * record_bytes,
        arrived_bytes=max(request.fetched_pages - absent, 0) * record_bytes,
        elapsed_s=now_s - request.fetched_s,
        link_bytes_per_s=pager.mover.statistics()[Link.DISK_READ].bytes_per_s,
        compute_s=sum(cost.seconds(size, place * size) for place in lease.absent),
    )
