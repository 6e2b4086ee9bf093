"""What the daemon tells `top`, as typed structs. Every field has a default: what is not sent is shown as not reported.

Two answers make a frame: that of `status`, which every daemon gives, and that of `top`, which says what lies where. A
daemon without `top` is asked for `pages` instead, and the panels say what they miss. Unknown fields are ignored, so
that a newer daemon can be looked at.

The request `top` holds `model` and what the screen has already, so that the daemon sends only news:
`maps` {tier: version}, `prefixes` (version), `events_after` (number). It must not load a model.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any, TypeVar

import msgspec

from tierd.daemon.errors import ProtocolError

CELL_STATE = 0x07  # low bits of a cell: one of the states below
FREE, PRIVATE, PINNED, IDLE, FILLING, DRAINING, DAMAGED = range(7)
CELL_PARTIAL = 0x08  # fewer tokens than a page holds
CELL_IN_HOST = 0x10  # a copy lies in CPU memory as well (of a device page)
CELL_DURABLE = 0x20  # a copy lies on disk as well
CELL_MOVING = 0x40  # a copy from or to it is in flight
CELL_KEPT = 0x80  # pinned by the user


class TierReport(msgspec.Struct, frozen=True):
    """One tier. `free + used + cached + in_flight = total`, in pages; the same in bytes."""

    total_pages: int = 0
    free_pages: int = 0
    used_pages: int = 0  # needed by a live request
    cached_pages: int = 0
    in_flight_pages: int = 0
    page_bytes: int = 0
    evictions: int = 0
    weights_bytes: int | None = None  # of the model, in the same memory
    reserved_bytes: int | None = None  # address space or disk that is set aside and not usable yet
    high_water_pages: int | None = None  # the most that were not free at once
    evict_at_pages: int | None = None  # eviction starts when so many are not free


class LinkReport(msgspec.Struct, frozen=True):
    """One way between two tiers."""

    total_bytes: int = 0  # since the start
    busy_s: float = 0.0
    count: int = 0
    errors: int = 0
    queued: int = 0
    bytes_per_s: float = 0.0  # moving average of one transfer's rate
    peak_bytes_per_s: float | None = None  # measured by the daemon
    p99_bytes_per_s: float | None = None
    compute_wait_s: float | None = None  # seconds that steps have waited for this link, since the start


class PagerReport(msgspec.Struct, frozen=True):
    """Counters of the pager, since the start."""

    known_pages: int = 0
    leases: int = 0
    fetching: int = 0
    lookups: int = 0
    lookup_tokens: int = 0
    hit_device_tokens: int = 0
    hit_host_tokens: int = 0
    hit_nvme_tokens: int = 0
    loaded_pages: int = 0  # brought from the store to memory
    demotions: int = 0
    spills: int = 0  # pages of live requests that left the device
    written_pages: int = 0
    failed_writes: int = 0
    dirty_pages: int = 0
    writing_pages: int = 0
    misses: dict[str, int] = {}
    nvme_on: bool = False


class EngineReport(msgspec.Struct, frozen=True):
    """One engine, as `status` lists it. None: it has not said so (it may be starting)."""

    model: str = ""
    state: str = ""
    pid: int | None = None
    uptime_s: float | None = None
    rss_bytes: int | None = None
    context: int | None = None
    running: int = 0
    waiting: int = 0
    fetching: int | None = None
    requests: int | None = None
    step_ms: float | None = None
    tokens_in: int | None = None
    tokens_out: int | None = None
    cached_tokens: int | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    preemptions: int | None = None
    failures: int | None = None
    tiers: dict[str, TierReport] = {}
    links: dict[str, LinkReport] = {}
    pager: PagerReport | None = None
    notices: tuple[str, ...] = ()


class QueueReport(msgspec.Struct, frozen=True):
    """Generations that run or wait."""

    live: int = 0
    running: int = 0
    waiting: int = 0
    max: int | None = None


class DaemonReport(msgspec.Struct, frozen=True):
    """The answer of `status`."""

    pid: int | None = None
    state: str = ""
    model: str | None = None
    version: str = ""
    uptime_s: float | None = None
    socket: str = ""
    http: str = ""
    engines: tuple[EngineReport, ...] = ()
    queue: QueueReport = QueueReport()


class PageMap(msgspec.Struct, frozen=True):
    """One byte a page of one tier, in the order of its slots; or what has changed since another version.

    `used`, `owners` and `prefixes` may be empty: not reported. Numbers are little-endian.
    """

    tier: str  # device | host | nvme
    version: int = 0
    base: int = -1  # -1: whole; else the version that `changed` is relative to
    slots: int = 0
    changed: bytes = b""  # u32 a changed slot; the columns below then hold these slots alone
    cells: bytes = b""  # u8: CELL_STATE bits and CELL_* flags
    used: bytes = b""  # u32: second of the engine's `clock_s` at the last use, 0: never
    owners: bytes = b""  # u16: 1 + index into `sequences` of the request that holds it, 0: none
    prefixes: bytes = b""  # u16: 1 + index into the prefix rows, 0: none; 65535: beyond


class SequenceRow(msgspec.Struct, frozen=True):
    """A request that holds pages, or waits for them."""

    id: int
    phase: str  # waiting | fetching | prefill | decode
    # Along the tokens: where (device, host, nvme, moving, missing, dropped), and how many.
    runs: tuple[tuple[str, int], ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    age_s: float | None = None
    tokens_per_s: float | None = None
    restore_done: int | None = None  # pages that have arrived, of `restore_total`
    restore_total: int | None = None
    tenant: str = ""


class PrefixRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run of pages without a branch. `parent`: index of its row, -1 for the first one of a conversation."""

    key: bytes  # of its last page
    parent: int
    tokens: int  # of this run alone
    hits: int
    device_bytes: int
    host_bytes: int
    nvme_bytes: int
    used_s: float  # of the engine's `clock_s`
    kept: bool  # pinned by the user
    tenant: str
    text: str  # how it begins


class PrefixTable(msgspec.Struct, frozen=True):
    """All prefixes, parents before children. `rows` is a msgpack array of `PrefixRow`: one value for the frame's
    limits, decoded only when `version` is new. None: the version that was asked with still stands."""

    version: int = 0
    rows: bytes | None = None
    total: int | None = None  # prefixes there are, when not all of them are in `rows`
    pending: bool = False  # they are being gathered for the first time: no rows does not mean that there are none


class EventRow(msgspec.Struct, frozen=True):
    """Something that happened. `number` grows; `at_s` is Unix time."""

    number: int
    kind: str  # evict | spill | restore | persist | damage | prefix | resize | load | unload | crash | notice | ...
    text: str
    at_s: float | None = None
    tier: str = ""
    slot: int = -1
    key: bytes = b""  # of the page that it concerns


class EventLog(msgspec.Struct, frozen=True):
    """The answer of `events` {after}: what happened to the daemon and its engines."""

    events: tuple[EventRow, ...] = ()


class WeightRow(msgspec.Struct, frozen=True):
    """A layer, or an expert of one."""

    name: str
    bytes: int
    tier: str
    hits: int | None = None
    uses: int | None = None


class PlanRow(msgspec.Struct, frozen=True):
    """A figure that was planned at the start, and what it is now."""

    name: str
    unit: str
    planned: float
    measured: float | None = None


class TopAnswer(msgspec.Struct, frozen=True):
    """The answer of `top`. None: this daemon does not report it."""

    model: str = ""
    engine: EngineReport | None = None  # the figures of `status` at the moment of the maps
    clock_s: float | None = None  # the engine's clock, for ages
    page_tokens: int | None = None
    page_format: str = ""
    maps: tuple[PageMap, ...] = ()
    sequences: tuple[SequenceRow, ...] | None = None
    prefixes: PrefixTable | None = None
    events: tuple[EventRow, ...] | None = None
    weights: tuple[WeightRow, ...] | None = None
    plan: tuple[PlanRow, ...] | None = None
    plan_note: str = ""  # what the plan rests on, or why there is none


class ListedPrefix(msgspec.Struct, frozen=True):
    """A row of the answer of `prefix ls`. Pages and tiers are those of the whole way from the start."""

    id: str
    parent: str = ""
    own_tokens: int = 0
    device: int = 0
    host: int = 0
    nvme: int = 0
    hits: int = 0
    idle_s: float = 0.0
    pinned: bool = False
    text: str = ""


class PrefixList(msgspec.Struct, frozen=True):
    """The answer of `prefix ls`: the newest ones."""

    prefixes: tuple[ListedPrefix, ...] = ()
    total: int = 0


class PageDetail(msgspec.Struct, frozen=True):
    """The answer of `page` {model, tier, slot} or {model, key}: everything about one page."""

    key: str = ""
    text: str | None = None
    tokens: int | None = None
    first_token: int | None = None  # its place in its sequence
    leases: int | None = None
    kept: bool | None = None
    format: str | None = None
    checksum: str | None = None  # good | bad | unread
    used_s: float | None = None
    copies: tuple[str, ...] | None = None
    places: dict[str, int] | None = None  # by tier, its slot in the map
    hits: int | None = None  # uses since it was computed
    victim_rank: int | None = None  # 0: the next to be evicted


_Kind = TypeVar("_Kind", bound=msgspec.Struct)


def convert(data: Any, kind: type[_Kind]) -> _Kind:
    """`data` of an answer as a struct. Raises ProtocolError that names what does not fit."""
    try:
        return msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError as exc:
        hint = "this tierd and the daemon are of different versions; restart the daemon with `tierd stop`"
        raise ProtocolError(f"{kind.__name__} as the daemon sent it: {str(exc).replace('`', '')}", hint=hint) from None


_ROWS = msgspec.msgpack.Decoder(tuple[PrefixRow, ...])
_PARENT = operator.attrgetter("parent")


def prefix_rows(packed: bytes) -> tuple[PrefixRow, ...]:
    """The rows of a `PrefixTable`. Raises ProtocolError."""
    try:
        rows = _ROWS.decode(packed)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ProtocolError(f"prefix rows cannot be read: {exc}") from None
    if any(map(operator.ge, map(_PARENT, rows), itertools.count())):
        raise ProtocolError("a prefix row stands before its parent")
    return rows


def rows_of(listed: PrefixList, page_bytes: int, clock_s: float) -> tuple[PrefixRow, ...]:
    """The rows of a tree from a flat list. A row whose parent was not listed is left out: its own share is not known.

    Raises ProtocolError for ids that are no hex.
    """
    by_id = {one.id: one for one in listed.prefixes}
    children: dict[str, list[ListedPrefix]] = {}
    for one in listed.prefixes:
        children.setdefault(one.parent, []).append(one)
    rows: list[PrefixRow] = []
    stack = [(one, -1) for one in reversed(children.get("", ()))]
    while stack and len(rows) < len(by_id):
        one, parent = stack.pop()
        way = by_id.get(one.parent, ListedPrefix(""))
        try:
            key = bytes.fromhex(one.id)
        except ValueError:
            raise ProtocolError(f"a prefix with the id {one.id[:40]!r}") from None
        device, host, nvme = ((one.device - way.device), (one.host - way.host), (one.nvme - way.nvme))
        rows.append(
            PrefixRow(
                key, parent, one.own_tokens, one.hits, device * page_bytes, host * page_bytes, nvme * page_bytes,
                clock_s - one.idle_s, one.pinned, "", one.text,
            )  # fmt: skip
        )
        stack += [(child, len(rows) - 1) for child in reversed(children.get(one.id, ()))]
    return tuple(rows)
