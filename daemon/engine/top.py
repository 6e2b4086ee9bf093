"""What `tierd top` is told: which page lies where, which request uses it, what is remembered, what happened.

The step thread looks at the books between two steps: only while somebody asks, at most four times a second, and less
often when a look takes long, so that looking never costs more than one part in 200 of its time. What it sees is frozen;
the io thread cuts from it what each asker lacks. The fields are those that `top` reads, see docs/top.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tierd.daemon.engine import page_events, sequence_rows
from tierd.daemon.engine.foresight import Foresight, Row, Seen
from tierd.daemon.engine.model.held import HeldWeights
from tierd.daemon.engine.model.weights_status import WeightRow
from tierd.daemon.engine.page_maps import DiskSketch, Sketch, TierMap
from tierd.daemon.engine.prefix_tree import PrefixTree, TreeWalk
from tierd.daemon.engine.streams import Streams
from tierd.daemon.errors import BadRequest, NotFound, TierdError
from tierd.daemon.machine import Sizes
from tierd.tiers.journal import MAX_ENTRIES, What
from tierd.tiers.keys import unpack_tokens
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.pager import Pager
from tierd.tiers.prefix import Node
from tierd.tiers.prefixes import Prefixes
from tierd.tiers.promote import Verdict

if TYPE_CHECKING:
    from tierd.daemon.engine.assemble import Engine

LOOK_EVERY_S = 0.25
SORT_EVERY_S = 1.0  # the tree of prefixes: a walk over all pages, in slices
BUSY_SLICE_S, IDLE_SLICE_S = 0.004, 0.02
FIRST_BUSY_SLICE_S, FIRST_IDLE_SLICE_S = 0.02, 0.1  # nothing at all is known of the tree: once, 10,000 or 50,000 pages
TAKEN_AT_ONCE = 4000  # pages
SHARE = 1 / 400  # of the step thread's time, for looking and for walking
CHECK_S = 2.0  # for the disk to read a page that somebody looks at
UNWATCHED_S = 10.0  # nobody has asked for so long: the books need not be followed any more
PREVIEW_CHARS = 80
TEXTS_AT_ONCE = 100  # requests need the tokenizer as well


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """One look at the books: all of it holds at the same moment, but the tree of the version that it says.

    `clock_s`: on the scale of `Pager.page_time`.
    """

    version: int
    clock_s: float
    maps: tuple[TierMap, ...]
    sequences: tuple[dict[str, Any], ...]
    tree: PrefixTree
    events: tuple[dict[str, Any], ...]
    figures: Mapping[str, Any]  # of `status`
    weights: Sequence[WeightRow]
    plan_of: tuple[Seen, Sizes, int] | None  # the arguments of `Foresight.rows`


class Beside(NamedTuple):
    """What is looked at beside the books; with nothing given it is not told.

    Attributes:
        figures: those of `status`, made anew.
        weights: where the weights lie.
        foresight: what was planned.
    """

    figures: Callable[[], Mapping[str, Any]] = dict
    weights: HeldWeights | None = None
    foresight: Foresight | None = None


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    maps: dict[str, int] = {}
    prefixes: int | None = None
    events_after: int = 0


class _PageAsked(msgspec.Struct, forbid_unknown_fields=True):
    tier: str = ""
    slot: int = -1
    key: str = ""


class TopBoard:
    """Threading: `refresh`, `page` and `rest` on the step thread; the rest on the io thread.

    Args:
        streams, pager, prefixes: what is looked at.
        page_format: name of the format of keys and values.
        beside: what else is told.
        wall: Unix time, for the log.
    """

    def __init__(
        self, streams: Streams, pager: Pager, prefixes: Prefixes, page_format: str, beside: Beside | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._streams = streams
        self._pager = pager
        self._prefixes = prefixes
        self._format = page_format
        # Milliseconds since the machine started: no version of an earlier engine comes again, for looks are rarer.
        self._version = int(pager.clock() * 1000)
        index = pager.index
        self._beside = beside if beside is not None else Beside()
        self._disk = DiskSketch(pager)
        self._sketches: tuple[Sketch | DiskSketch, ...] = (
            Sketch(Tier.DEVICE, pager.device, index), Sketch(Tier.HOST, pager.host, index), self._disk,
        )  # fmt: skip
        self._wall = wall
        self._events: tuple[dict[str, Any], ...] = ()  # the log, as it is told
        self._counted = (0, 0)  # preemptions and failures that are in the log
        pager.residency.journal.tell(What.ENGINE, f"the engine began with {len(index)} pages on disk")
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
        self._plan: tuple[tuple[Seen, Sizes, int], list[Row], str] | None = None  # the last one, and of what
        self._planning = asyncio.Lock()

    # -- on the io thread ------------------------------------------------------------------------------------------

    async def answer(self, engine: Engine, tokenizer: Executor, args: Mapping[str, Any]) -> dict[str, Any]:
        """What the asker lacks who has `maps` {tier: version}, the `prefixes` of a version and the events up to
        `events_after`. Raises BadRequest."""
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
        tree = picture.tree
        table: dict[str, Any] = {"version": tree.version, "total": tree.total, "pending": tree.version == 0}
        if asked.prefixes != tree.version:
            table["rows"] = await self._pack(engine, tokenizer, tree)
        plan = await self._planned(picture)
        return {
            "model": engine.model,
            "engine": picture.figures,
            "events": [row for row in picture.events if row["number"] > asked.events_after],
            "weights": [row._asdict() for row in picture.weights],
            **plan,
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
        if asked.key:
            key = _key(asked.key)
            call, is_read = engine.loop.call(lambda: self.page_of(key)), False  # a jump: where it leads is looked at
        elif (tier := Tier.__members__.get(asked.tier.upper())) is not None and asked.tier.islower():
            call, is_read = engine.loop.call(lambda: self.page(tier, asked.slot)), True
        else:
            raise BadRequest("tier must be device, host or nvme", param="tier")
        told: dict[str, Any] | None = await asyncio.wrap_future(call)
        if told is None:
            where = f"slot {asked.slot} of {asked.tier}" if not asked.key else "any tier any more"
            raise NotFound(f"no known page lies in {where}", param="slot" if not asked.key else "key")
        packed = told.pop("packed")
        loop = asyncio.get_running_loop()
        if is_read and told["checksum"] is not None:
            told["checksum"] = await self._checksum(engine, PageKey(bytes.fromhex(told["key"])))
        text = await loop.run_in_executor(tokenizer, engine.intake.text_of, unpack_tokens(packed))
        return told | {"text": text, "format": self._format}

    async def _checksum(self, engine: Engine, key: PageKey) -> str | None:
        """Whether the copy on disk is what was written, for which it is read; None where there is none any more."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[str] = loop.create_future()

        def take(verdict: Verdict) -> None:
            if not found.done():
                found.set_result(verdict.value)

        def tell(verdict: Verdict) -> None:
            loop.call_soon_threadsafe(take, verdict)

        def begin() -> bool:
            node = self._pager.index.get(key)
            if node is None or not node.durable:
                return False
            self._pager.promoter.inspect(node, tell)
            return True

        if not await asyncio.wrap_future(engine.loop.call(begin)):
            return None
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(found, CHECK_S)
        return Verdict.UNREAD.value

    async def _planned(self, picture: Picture) -> dict[str, Any]:
        """Plan and measurement. Made on a thread of its own: the step thread and this one go on meanwhile."""
        foresight, wanted = self._beside.foresight, picture.plan_of
        if foresight is None or wanted is None:
            return {"plan": None}
        async with self._planning:  # one thread at a time
            if self._plan is None or self._plan[0] != wanted:
                self._plan = (wanted, *await asyncio.to_thread(foresight.rows, *wanted))
        return {"plan": [row._asdict() for row in self._plan[1]], "plan_note": self._plan[2]}

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
        sequences, owners = sequence_rows.rows(self._streams, pager, self._disk, again_s)
        now_s = pager.page_time()
        self._count()
        self._log()
        maps = tuple(
            sketch.look(self._version, now_s, owned) for sketch, owned in zip(self._sketches, owners, strict=True)
        )
        weights = self._beside.weights.rows() if self._beside.weights is not None else ()
        self._picture = Picture(
            self._version, now_s, maps, sequences, self._tree, self._events, self._beside.figures(), weights,
            self._plan_of(),
        )  # fmt: skip
        looked_s += clock() - again_s
        # Taking in what was there before happens once, in pieces.
        self._due_s = started_s + max(LOOK_EVERY_S, 0.0 if self._untaken else looked_s / SHARE)

    def rest(self) -> None:
        """Follow the books no longer when nobody has asked for a while."""
        if self._pager.clock() - self._asked_s >= UNWATCHED_S:
            self._pager.residency.touched = None
            self._picture = self._walk = None
            self._untaken, self._unsorted = [], True

    def _log(self) -> None:
        """The newest entries of the log, at Unix times."""
        after = self._events[-1]["number"] if self._events else 0
        rows = page_events.rows(self._pager, after, lambda tier, node: self._sketches[tier].slot_of(node))
        if rows:
            lead_s = self._wall() - self._pager.clock()
            told = [row | {"at_s": round(row["at_s"] + lead_s, 3)} for row in rows]
            self._events = (*self._events, *told)[-MAX_ENTRIES:]

    def page(self, tier: Tier, slot: int) -> dict[str, Any] | None:
        """What the books say of the page in a slot, or on disk in a place of the map; None when no known one is
        there."""
        sketch, nodes = self._sketches[tier], self._pager.index.nodes
        key = sketch.key_at(slot)
        node = nodes.get(key) if key is not None else None
        if slot >= 0 and (node is None or sketch.slot_of(node) != slot):  # it came since the last look
            node = next((node for node in nodes.values() if sketch.slot_of(node) == slot), None)
        return None if node is None or slot < 0 else self._told(node)

    def page_of(self, key: PageKey) -> dict[str, Any] | None:
        """The same of a page by its key."""
        node = self._pager.index.get(key)
        return None if node is None or not node.has_copy else self._told(node)

    def _told(self, node: Node) -> dict[str, Any]:
        tier, heaps = node.nearest, self._pager.residency.heaps
        may_go = self._pager.residency.evictable(node, tier)
        return {
            "key": node.key.hex(),
            "packed": node.packed,
            "tokens": node.num_tokens,
            "first_token": node.depth * self._pager.page_tokens,
            "leases": node.pins,
            "kept": node.kept,
            "used_s": node.last_use_s,
            "hits": node.hits,
            "copies": [one.name.lower() for one in Tier if node.is_in(one)],
            "places": {
                one.name.lower(): slot for one in Tier if (slot := self._sketches[one].slot_of(node)) >= 0
            },
            "victim_rank": heaps[tier].before(node) if may_go else None,
            "checksum": Verdict.UNREAD.value if node.durable else None,
        }

    def _plan_of(self) -> tuple[Seen, Sizes, int] | None:
        """What the plan is made of: the load, the sizes of the tiers, and the memory that weights take."""
        foresight, weights = self._beside.foresight, self._beside.weights
        if foresight is None or weights is None:
            return None
        pager, record_bytes = self._pager, self._pager.device.record_bytes
        budget = weights.budget_bytes
        sizes = Sizes(
            pager.device.slots * record_bytes, pager.host.slots * record_bytes,
            pager.residency.store_slots * pager.residency.stored_bytes, 0,
            weights.total_bytes if budget is None else budget,
        )  # fmt: skip
        return foresight.watch(self._streams), sizes, weights.memory_bytes

    def _count(self) -> None:
        """What befell requests since the last look goes to the log as well."""
        totals, journal = self._streams.totals, self._pager.residency.journal
        counts = (totals.preemptions, totals.failures)
        for what, now, before in zip((What.PREEMPT, What.FAILURE), counts, self._counted, strict=True):
            if now > before:
                journal.tell(what, "", count=now - before)
        self._counted = counts

    def _sort(self, started_s: float) -> None:
        """Walks on over all pages, for as long as may be; a walk that ends makes a new tree."""
        clock, slices = self._pager.clock, (IDLE_SLICE_S, BUSY_SLICE_S)
        if self._walk is None:
            if self._tree.version == 0:
                slices = (FIRST_IDLE_SLICE_S, FIRST_BUSY_SLICE_S)
            self._walk, self._unsorted = TreeWalk(self._pager, self._prefixes, self._disk), False
        busy = len(self._streams) > 0
        began_s = clock()
        pause_s = LOOK_EVERY_S
        if self._walk.go_on(clock, slices[busy]):
            self._tree, by_tier = self._walk.result(self._version)
            for sketch, (slots, numbers) in zip(self._sketches, by_tier, strict=True):
                sketch.sort_in(slots, numbers)
            self._walk = None
            pause_s = SORT_EVERY_S
        self._sort_due_s = started_s + max(pause_s, (clock() - began_s) / SHARE if busy else 0.0)


def _key(text: str) -> PageKey:
    try:
        return PageKey(bytes.fromhex(text))
    except ValueError:
        raise BadRequest("key must be hexadecimal", param="key") from None


def _texts(engine: Engine, heads: list[bytes]) -> list[str]:
    return [engine.intake.text_of(unpack_tokens(head))[:PREVIEW_CHARS] for head in heads]
