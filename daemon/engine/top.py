"""What `tierd top` is told: which page lies where, which request uses it, what is remembered.

The step thread looks at the books between two steps: only while somebody asks, at most four times a second, and less
often when a look takes long, so that looking never costs more than one part in 200 of its time. What it sees is frozen;
the io thread cuts from it what each asker lacks. The fields are those that `top` reads, see docs/top.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tierd.daemon.engine.page_maps import Sketch, TierMap
from tierd.daemon.engine.prefix_tree import PrefixTree, TreeWalk
from tierd.daemon.engine.request import Request
from tierd.daemon.engine.scheduler import Phase
from tierd.daemon.engine.streams import Streams
from tierd.daemon.errors import BadRequest, NotFound, TierdError
from tierd.tiers.keys import unpack_tokens
from tierd.tiers.lease import Lease
from tierd.tiers.page import Tier
from tierd.tiers.pager import Pager
from tierd.tiers.prefix import Node
from tierd.tiers.prefixes import Prefixes

if TYPE_CHECKING:
    from tierd.daemon.engine.assemble import Engine

Owners = npt.NDArray[np.uint16]
Places = npt.NDArray[np.uint8]

LOOK_EVERY_S = 0.25
SORT_EVERY_S = 1.0  # the tree of prefixes: a walk over all pages, in slices
BUSY_SLICE_S, IDLE_SLICE_S = 0.004, 0.02
TAKEN_AT_ONCE = 4000  # pages
SHARE = 1 / 400  # of the step thread's time, for looking and for walking
UNWATCHED_S = 10.0  # nobody has asked for so long: the books need not be followed any more
MAX_SEQUENCES = 256
MAX_RUNS = 400  # of one sequence: more are drawn together
PREVIEW_CHARS = 80
TEXTS_AT_ONCE = 100  # requests need the tokenizer as well
PLACES = ("device", "host", "nvme", "moving", "missing")  # of the pages of a sequence, by code
_DEVICE, _HOST, _NVME, _MOVING, _MISSING = range(len(PLACES))


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """One look at the books. `clock_s`: on the scale of `Pager.page_time`."""

    version: int
    clock_s: float
    maps: tuple[TierMap, ...]
    sequences: tuple[dict[str, Any], ...]
    tree: PrefixTree


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    maps: dict[str, int] = {}
    prefixes: int | None = None


class _PageAsked(msgspec.Struct, forbid_unknown_fields=True):
    tier: str
    slot: int


class TopBoard:
    """Threading: `refresh`, `page` and `rest` on the step thread; the rest on the io thread.

    Args:
        streams, pager, prefixes: what is looked at.
        page_format: name of the format of keys and values.
    """

    def __init__(self, streams: Streams, pager: Pager, prefixes: Prefixes, page_format: str) -> None:
        self._streams = streams
        self._pager = pager
        self._prefixes = prefixes
        self._format = page_format
        # Milliseconds since the machine started: no version of an earlier engine comes again, for looks are rarer.
        self._version = int(pager.clock() * 1000)
        index = pager.index
        self._sketches = (Sketch(Tier.DEVICE, pager.device, index), Sketch(Tier.HOST, pager.host, index))
        self._untaken: list[Node] = []  # touched pages that the sketches have not seen yet
        self._tree = PrefixTree()
        self._walk: TreeWalk | None = None
        self._unsorted = True  # something changed since the last walk began
        self._due_s = self._sort_due_s = float("-inf")
        self._asked_s = float("-inf")
        self._picture: Picture | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._texts: dict[bytes, str] = {}  # packed tokens -> how they read
        self._packed: tuple[int, bytes] = (-1, b"")  # the rows as they are sent, and their version

    # -- on the io thread ------------------------------------------------------------------------------------------

    async def answer(self, engine: Engine, tokenizer: Executor, args: Mapping[str, Any]) -> dict[str, Any]:
        """What the asker lacks who has `maps` {tier: version} and the `prefixes` of a version. Raises BadRequest."""
        try:
            asked = msgspec.convert(dict(args), _Asked, strict=True)
        except msgspec.ValidationError as exc:
            raise BadRequest(f"top: {str(exc).replace('`', '')}") from None
        self._asked_s = self._pager.clock()
        if self._picture is None or self._asked_s >= self._due_s:
            await asyncio.wrap_future(engine.loop.call(self.refresh))
        loop = asyncio.get_running_loop()
        if self._rest is not None:
            self._rest.cancel()
        self._rest = loop.call_later(UNWATCHED_S + LOOK_EVERY_S, self._leave, engine)
        picture = self._picture
        assert picture is not None  # `refresh` makes one
        table: dict[str, Any] = {"version": picture.tree.version, "total": picture.tree.total}
        if asked.prefixes != picture.tree.version:
            table["rows"] = await self._pack(engine, tokenizer, picture.tree)
        return {
            "model": engine.model,
            "clock_s": picture.clock_s,
            "page_tokens": self._pager.page_tokens,
            "page_format": self._format,
            "maps": [tier.part(picture.version, asked.maps.get(tier.tier)) for tier in picture.maps],
            "sequences": list(picture.sequences),
            "prefixes": table,
        }

    async def detail(self, engine: Engine, tokenizer: Executor, args: Mapping[str, Any]) -> dict[str, Any]:
        """Everything about the page in a slot. Raises BadRequest, NotFound when no known page lies there."""
        try:
            asked = msgspec.convert(dict(args), _PageAsked, strict=True)
        except msgspec.ValidationError as exc:
            raise BadRequest(f"page: {str(exc).replace('`', '')}") from None
        if asked.tier not in ("device", "host"):
            raise BadRequest("tier must be device or host", param="tier")
        tier = Tier.DEVICE if asked.tier == "device" else Tier.HOST
        told: dict[str, Any] | None = await asyncio.wrap_future(engine.loop.call(lambda: self.page(tier, asked.slot)))
        if told is None:
            raise NotFound(f"no known page lies in slot {asked.slot} of {asked.tier}", param="slot")
        packed = told.pop("packed")
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(tokenizer, engine.intake.text_of, unpack_tokens(packed))
        return told | {"text": text, "format": self._format}

    def _leave(self, engine: Engine) -> None:
        with contextlib.suppress(TierdError):  # its loop has ended
            engine.loop.call(self.rest)

    async def _pack(self, engine: Engine, tokenizer: Executor, tree: PrefixTree) -> bytes:
        """The rows as msgpack, with the texts of their beginnings."""
        if self._packed[0] == tree.version:
            return self._packed[1]
        texts = {head: self._texts.get(head) for *_, head in tree.rows}
        unread = [head for head, text in texts.items() if text is None]
        for start in range(0, len(unread), TEXTS_AT_ONCE):
            heads = unread[start : start + TEXTS_AT_ONCE]
            found = await asyncio.get_running_loop().run_in_executor(tokenizer, _texts, engine, heads)
            texts |= zip(heads, found, strict=True)
        self._texts = {head: text or "" for head, text in texts.items()}
        rows = [(*row, "", self._texts[head]) for *row, head in tree.rows]
        self._packed = (tree.version, msgspec.msgpack.encode(rows))
        return self._packed[1]

    # -- on the step thread ----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Look at the books, unless that was just done."""
        pager, clock = self._pager, self._pager.clock
        started_s = clock()
        if self._picture is not None and started_s < self._due_s:
            return
        self._version += 1
        touched = pager.residency.touched
        if touched is None:  # nobody looked until now
            self._untaken = list(pager.index.nodes.values())
        else:
            self._untaken += touched
            self._unsorted |= bool(touched)
        pager.residency.touched = set()
        taken, self._untaken = self._untaken[-TAKEN_AT_ONCE:], self._untaken[:-TAKEN_AT_ONCE]
        for sketch in self._sketches:
            sketch.take(taken)
        looked_s = clock() - started_s
        if (self._unsorted or self._walk is not None) and started_s >= self._sort_due_s:
            self._sort(started_s)
        again_s = clock()
        sequences, owners = self._sequences(again_s)
        now_s = pager.page_time()
        maps = tuple(
            sketch.look(self._version, now_s, owned) for sketch, owned in zip(self._sketches, owners, strict=True)
        )
        self._picture = Picture(self._version, now_s, maps, sequences, self._tree)
        looked_s += clock() - again_s
        # Taking in what was there before happens once, in pieces.
        self._due_s = started_s + max(LOOK_EVERY_S, 0.0 if self._untaken else looked_s / SHARE)

    def rest(self) -> None:
        """Follow the books no longer when nobody has asked for a while."""
        if self._pager.clock() - self._asked_s >= UNWATCHED_S:
            self._pager.residency.touched = None
            self._picture = self._walk = None
            self._untaken, self._unsorted = [], True

    def page(self, tier: Tier, slot: int) -> dict[str, Any] | None:
        """What the books say of the page in a slot; None when no known one is there."""
        for node in self._pager.index.nodes.values():
            if slot >= 0 and (node.device if tier is Tier.DEVICE else node.host) == slot:
                return {
                    "key": node.key.hex(),
                    "packed": node.packed,
                    "tokens": node.num_tokens,
                    "first_token": node.depth * self._pager.page_tokens,
                    "leases": node.pins,
                    "kept": node.kept,
                    "used_s": node.last_use_s,
                    "copies": [one.name.lower() for one in Tier if node.is_in(one)],
                }
        return None

    def _sort(self, started_s: float) -> None:
        """Walks on over all pages, for as long as may be; a walk that ends makes a new tree."""
        clock = self._pager.clock
        if self._walk is None:
            self._walk, self._unsorted = TreeWalk(self._pager, self._prefixes), False
        busy = len(self._streams) > 0
        began_s = clock()
        pause_s = LOOK_EVERY_S
        if self._walk.go_on(clock, BUSY_SLICE_S if busy else IDLE_SLICE_S):
            self._tree, by_arena = self._walk.result(self._version)
            for sketch, (slots, numbers) in zip(self._sketches, by_arena, strict=True):
                sketch.sort_in(slots, numbers)
            self._walk = None
            pause_s = SORT_EVERY_S
        self._sort_due_s = started_s + max(pause_s, (clock() - began_s) / SHARE if busy else 0.0)

    def _sequences(self, now_s: float) -> tuple[tuple[dict[str, Any], ...], tuple[Owners, Owners]]:
        """A row a request, and by arena which of them holds each slot."""
        device, host = self._pager.device, self._pager.host
        owners = (np.zeros(len(device.states), np.uint16), np.zeros(len(host.states), np.uint16))
        rows = []
        for number, request in enumerate(itertools.islice(self._streams, MAX_SEQUENCES), 1):
            places = np.empty(0, np.uint8) if request.lease is None else self._places(request.lease, number, owners)
            rows.append(_sequence(request, places, self._pager.page_tokens, now_s))
        return tuple(rows), owners

    def _places(self, lease: Lease, number: int, owners: tuple[Owners, Owners]) -> Places:
        """Where each page of a lease lies, as codes of `PLACES`; its slots are marked in `owners`."""
        self._pager.tables.refresh(lease)
        table, record_bytes = lease.table, self._pager.device.record_bytes
        places = np.full(len(table), _NVME, np.uint8)
        arenas = ((_DEVICE, self._pager.device, owners[0]), (_HOST, self._pager.host, owners[1]))
        for code, arena, owned in arenas:
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
        return places


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


def _texts(engine: Engine, heads: list[bytes]) -> list[str]:
    return [engine.intake.text_of(unpack_tokens(head))[:PREVIEW_CHARS] for head in heads]
