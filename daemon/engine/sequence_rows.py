"""The rows of requests for `tierd top`: along the tokens of each where they lie; and which request holds which page.

Threading: step thread only.
"""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tierd.daemon.engine.page_maps import DiskSketch
from tierd.daemon.engine.request import Request
from tierd.daemon.engine.scheduler import Phase
from tierd.daemon.engine.streams import Streams
from tierd.tiers.lease import Lease
from tierd.tiers.pager import Pager

Owners: TypeAlias = npt.NDArray[np.uint16]
Places: TypeAlias = npt.NDArray[np.uint8]

MAX_SEQUENCES = 256
MAX_RUNS = 400  # of one sequence: more are drawn together
PLACES = ("device", "host", "nvme", "moving", "missing", "dropped")  # of the pages of a sequence, by code
_DEVICE, _HOST, _NVME, _MOVING, _MISSING, _DROPPED = range(len(PLACES))


def rows(
    streams: Streams, pager: Pager, disk: DiskSketch, now_s: float
) -> tuple[tuple[dict[str, Any], ...], tuple[Owners, Owners, Owners]]:
    """A row a request, and by tier which of them holds each slot: 1 + its place, 0 for none."""
    slots = (len(pager.device.states), len(pager.host.states), disk.slots)
    owners = (np.zeros(slots[0], np.uint16), np.zeros(slots[1], np.uint16), np.zeros(slots[2], np.uint16))
    told = []
    for number, request in enumerate(itertools.islice(streams, MAX_SEQUENCES), 1):
        lease = request.lease
        places = _places(lease, number, pager, disk, owners) if lease is not None else np.empty(0, np.uint8)
        told.append(_sequence(request, places, pager.page_tokens, now_s))
    return tuple(told), owners


def _places(
    lease: Lease, number: int, pager: Pager, disk: DiskSketch, owners: tuple[Owners, Owners, Owners]
) -> Places:
    """Where each page of a sequence lies, as codes of `PLACES`; slots of its lease are marked in `owners`."""
    pager.tables.refresh(lease)
    table, record_bytes = lease.table, pager.device.record_bytes
    places = np.full(len(table), _NVME, np.uint8)
    for code, arena, owned in ((_DEVICE, pager.device, owners[0]), (_HOST, pager.host, owners[1])):
        first = arena.address(0)
        held = (table >= first) & (table < first + len(owned) * record_bytes)
        owned[(table[held] - first) // record_bytes] = number
        places[held] = code
    for place in lease.absent:
        node = lease.nodes[place]
        if place in lease.filling or not (lease.loading and node.durable):
            places[place] = _MISSING
        elif node.load is not None:
            places[place] = _MOVING
    for place in np.flatnonzero((places == _NVME) | (places == _MOVING)).tolist():
        if place < len(lease.nodes) and (slot := disk.slot_of(lease.nodes[place])) >= 0:
            owners[2][slot] = number
    if not lease.dropped:
        return places
    shown = np.full(len(table) + lease.dropped, _DROPPED, np.uint8)
    shown[: len(lease.nodes)], shown[lease.numbers] = places[: len(lease.nodes)], places[len(lease.nodes) :]
    return shown


def _sequence(request: Request, places: Places, page_tokens: int, now_s: float) -> dict[str, Any]:
    lease, timings = request.lease, request.timings()
    row = {
        "id": request.id,
        "phase": request.phase.value,
        "runs": _runs(request, places, page_tokens),
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.generated,
        "cached_tokens": request.cached_tokens if request.accepted else None,
        "age_s": round(now_s - request.times.arrived_s, 3),
        "tokens_per_s": round(timings.decode_tokens_per_s, 2) if request.phase is Phase.DECODE else None,
    }
    if lease is not None and request.fetched_pages and lease.absent:
        row["restore_done"] = max(request.fetched_pages - len(lease.absent), 0)
        row["restore_total"] = request.fetched_pages
    return row


def _runs(request: Request, places: Places, page_tokens: int) -> list[tuple[str, int]]:
    """Along the tokens: where they lie, and how many in a row do. What no page holds yet is missing."""
    known = len(request.tokens)
    nodes = len(request.lease.nodes) if request.lease is not None else 0
    covered = min(max(request.computed, nodes * page_tokens), len(places) * page_tokens, known)
    places = places[: -(-covered // page_tokens)]
    if len(places) > MAX_RUNS and np.count_nonzero(np.diff(places)) >= MAX_RUNS:
        stride = -(-len(places) // MAX_RUNS)
        places = np.repeat(places[::stride], stride)[: len(places)]
    starts = np.flatnonzero(np.diff(places, prepend=np.uint8(len(PLACES)))).tolist() if len(places) else []
    ends = [start * page_tokens for start in starts[1:]] + [covered]
    runs = [
        (PLACES[places[start]], end - start * page_tokens) for start, end in zip(starts, ends, strict=False)
    ]
    if covered < known:
        ahead = runs.pop()[1] if runs and runs[-1][0] == PLACES[_MISSING] else 0
        runs.append((PLACES[_MISSING], ahead + known - covered))
    return runs
