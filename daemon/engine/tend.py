"""Operations on what an engine keeps: known prefixes, the disk tier, sizes of arenas. They run on the io thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tierd.daemon.engine.model.weights_status import NotMoved
from tierd.daemon.errors import (
    BadRequest,
    Conflict,
    EngineFailed,
    NotFound,
    OutOfSpace,
    TimedOut,
    TooBusy,
    Unsupported,
)
from tierd.daemon.machine import total_memory_bytes
from tierd.daemon.models.placement import DoesNotFit
from tierd.daemon.models.placement_card import DoesNotFitHost
from tierd.daemon.units import human_bytes
from tierd.tiers.errand import Errand
from tierd.tiers.errors import PrefixInUse, PrefixNotDurable, PrefixUnknown, StoreFull, TierFull
from tierd.tiers.upkeep import Collection
from tierd.tiers.verify import Verification

if TYPE_CHECKING:
    from tierd.daemon.engine.assemble import Engine
    from tierd.tiers.prefix import Node

MAX_LISTED = 1000
LISTED = 50
PREVIEW_CHARS = 80
RESIZE_TIMEOUT_S = 30.0
PERSIST_TIMEOUT_S = 30.0
VERIFY_TIMEOUT_S = 3600.0  # some terabytes
GC_TIMEOUT_S = 600.0  # the index is rewritten: seconds for a million pages
_TELL_EVERY_S = 0.25
_WAKE_EVERY_S = 0.02
_MOVE_HINT = "answers go on; say it again when other programs have left the card, or with another --weights-mem"

T = TypeVar("T")


class _Prefix(msgspec.Struct, forbid_unknown_fields=True):
    action: str
    id: str = ""
    limit: int = LISTED


class _Resize(msgspec.Struct, forbid_unknown_fields=True):
    device_bytes: int | None = None
    host_bytes: int | None = None
    weights_bytes: int | None = None
    timeout_s: float = RESIZE_TIMEOUT_S


async def prefix(engine: Engine, tokenizer: Executor, args: Mapping[str, Any]) -> dict[str, Any]:
    """`ls` {prefixes, total}; `pin`, `unpin`, `drop`, `persist` or `evict` {pages}: how many it concerned.

    Texts are decoded on the tokenizer's thread. Raises NotFound for an id that no page has, Conflict for pages in use,
    for pins that leave too little room and for pages that are not on disk, OutOfSpace when they don't get there.
    """
    wanted = _typed(args, _Prefix, "prefix")
    prefixes = engine.prefixes
    match wanted.action:
        case "ls":
            if not 1 <= wanted.limit <= MAX_LISTED:
                raise BadRequest(f"limit must be from 1 to {MAX_LISTED}", param="limit")
            found, total = await asyncio.wrap_future(engine.loop.call(lambda: prefixes.listing(wanted.limit)))
            texts = await asyncio.get_running_loop().run_in_executor(
                tokenizer, lambda: [engine.intake.text_of(info.head)[:PREVIEW_CHARS] for info in found]
            )
            rows = [asdict(info) | {"text": text} for info, text in zip(found, texts, strict=True)]
            for row in rows:
                del row["head"]  # the text says it
            return {"prefixes": rows, "total": total}
        case "pin":
            return {"pages": await _change(engine, prefixes.pin, wanted.id)}
        case "unpin":
            return {"pages": await _change(engine, prefixes.unpin, wanted.id)}
        case "drop":
            return {"pages": await _change(engine, prefixes.drop, wanted.id)}
        case "evict":
            return {"pages": await _change(engine, prefixes.evict, wanted.id)}
        case "persist":
            return {"pages": await _persist(engine, wanted.id)}
        case other:
            hint = "ls, pin, unpin, drop, persist or evict"
            raise Unsupported(f"no prefix action {other[:64]!r}", hint=hint, param="action")


async def _persist(engine: Engine, prefix_id: str) -> int:
    """Waits until the pages of a prefix are durable; returns how many had to be written."""
    deadline_s = engine.pager.clock() + PERSIST_TIMEOUT_S
    prefixes = engine.prefixes
    way: list[Node] = []

    def begin(prefix_id: str) -> int:
        way.extend(prefixes.way(prefix_id))
        return prefixes.persist(way, anew=True)

    missing = left = await _change(engine, begin, prefix_id)
    while left:
        if engine.pager.clock() >= deadline_s:
            raise OutOfSpace(
                f"{left} of {missing} pages were not written within {PERSIST_TIMEOUT_S:g} s",
                hint="`tierd status` says whether the disk tier is full or slow",
            )
        await asyncio.sleep(_WAKE_EVERY_S)
        engine.loop.wake()  # it may have nothing else to do
        left = await _change(engine, lambda _: prefixes.persist(way), prefix_id)
    return missing


async def _change(engine: Engine, verb: Callable[[str], int], prefix_id: str) -> int:
    try:
        pages: int = await asyncio.wrap_future(engine.loop.call(lambda: verb(prefix_id)))
    except PrefixUnknown as exc:
        raise NotFound(str(exc), hint="`tierd prefix ls` lists the ids", param="id") from None
    except PrefixInUse as exc:
        raise Conflict(str(exc), hint="wait for the request, or `tierd prefix unpin`") from None
    except PrefixNotDurable as exc:
        raise Conflict(str(exc), hint=exc.remedy) from None
    except TierFull as exc:
        raise Conflict(str(exc), hint="unpin another prefix, or give tierd more memory") from None
    return pages


async def verify(engine: Engine, repair: bool, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Looks at every page in slices while streams go on: {findings, pages}. `tell` gets the data of progress events.

    Ends early, with a finding that says so, after `VERIFY_TIMEOUT_S`; at once when it is cancelled.
    """
    pager = engine.pager
    errand = Verification(pager, repair, pager.clock() + VERIFY_TIMEOUT_S)
    told_s = float("-inf")
    async for _ in _slices(engine, errand):
        now_s = pager.clock()
        if now_s - told_s >= _TELL_EVERY_S:
            told_s, (done, total) = now_s, (errand.read_pages, errand.total_pages)
            tell({"stage": "verify", "done": done, "total": total, "text": f"{done} of {total} pages are read"})
    never_opened = engine.notes if pager.store is None else ()  # why, if a store was wanted
    return {"findings": [*never_opened, *errand.findings], "pages": errand.read_pages}


async def gc(engine: Engine) -> dict[str, Any]:
    """Has the store give back what it does not need: {removed_pages, freed_bytes}. Raises TimedOut."""
    pager = engine.pager
    errand = Collection(pager, pager.clock() + GC_TIMEOUT_S)
    async for _ in _slices(engine, errand):
        pass
    if errand.stopped:
        raise TimedOut(f"the disk did not get to it within {GC_TIMEOUT_S:g} s", hint="try again when it is less busy")
    return {"removed_pages": errand.removed_pages, "freed_bytes": errand.freed_bytes}


async def _slices(engine: Engine, errand: Errand) -> AsyncIterator[None]:
    """Advances an errand on the step thread until it has ended. Raises what it raised; stops it when cancelled."""
    try:
        while True:
            try:
                if await asyncio.wrap_future(engine.loop.call(errand.advance)):
                    break
            except TooBusy:  # its inbox is full just now
                pass
            yield
            await asyncio.sleep(_WAKE_EVERY_S if errand.waits else 0)
    except asyncio.CancelledError:
        with contextlib.suppress(TooBusy, EngineFailed):  # then it just is not advanced any more
            engine.loop.call(lambda: errand.stop("it was cancelled"))
        raise
    if isinstance(errand.error, StoreFull):
        raise OutOfSpace(str(errand.error), hint="make room on the disk, then say it again")
    if errand.error is not None:
        raise errand.error


async def resize(engine: Engine, args: Mapping[str, Any]) -> dict[str, Any]:
    """Changes the sizes of the arenas, and the memory of weights, while streams go on; returns the sizes then.

    Raises OutOfSpace, with the number that would do, when it can't be: more than the machine has, less than running
    requests need, or slots that did not become free in time. The old sizes hold then.
    """
    wanted = _typed(args, _Resize, "resize")
    pager, record_bytes = engine.pager, engine.pager.device.record_bytes
    if wanted.device_bytes is None and wanted.host_bytes is None and wanted.weights_bytes is None:
        raise BadRequest("give device_bytes, host_bytes or weights_bytes", param="device_bytes")
    if not 0 <= wanted.timeout_s <= 600:
        raise BadRequest("timeout_s must be a number of seconds from 0 to 600", param="timeout_s")
    device_slots = None if wanted.device_bytes is None else wanted.device_bytes // record_bytes
    host_slots = None if wanted.host_bytes is None else wanted.host_bytes // record_bytes
    for name in ("device_bytes", "host_bytes", "weights_bytes"):
        size: int | None = getattr(wanted, name)
        if size is not None and size < 0:
            raise BadRequest(f"{name} must not be negative", param=name)
    if device_slots == 0:
        raise BadRequest(
            f"{human_bytes(wanted.device_bytes)} of device memory hold no page: one takes {human_bytes(record_bytes)}",
            hint=f"a sequence of 1,000 tokens takes {human_bytes(record_bytes * -(-1000 // pager.page_tokens))}",
            param="device_bytes",
        )
    _check_memory(wanted, engine, total_memory_bytes())
    if wanted.weights_bytes is not None:
        await _move_weights(engine, wanted.weights_bytes, pager.clock() + wanted.timeout_s)
    if device_slots is not None or host_slots is not None:
        await _resize_arenas(engine, device_slots, host_slots, wanted.timeout_s)
    _tell_capacity(engine)
    return {
        "device_bytes": pager.device.slots * record_bytes,
        "host_bytes": pager.host.slots * record_bytes,
        "device_pages": pager.device.slots,
        "host_pages": pager.host.slots,
        "weights_bytes": engine.weights.memory_bytes,
        "weights_total_bytes": engine.weights.total_bytes,
    }


async def _resize_arenas(engine: Engine, device_slots: int | None, host_slots: int | None, timeout_s: float) -> None:
    pager, record_bytes = engine.pager, engine.pager.device.record_bytes
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()

    def done(reason: str) -> None:
        loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(reason))

    deadline_s = pager.clock() + timeout_s
    try:
        call = engine.loop.call(lambda: pager.resizer.start(device_slots, host_slots, deadline_s, done))
        await asyncio.wrap_future(call)
    except TierFull as exc:
        raise OutOfSpace(f"{exc} (a page has {human_bytes(record_bytes)})") from None
    while not ended.done():
        if not engine.loop.alive:
            raise EngineFailed("the engine stopped")
        engine.loop.wake()  # it may have nothing else to do
        await asyncio.wait([ended], timeout=_WAKE_EVERY_S)
    if reason := ended.result():
        raise OutOfSpace(
            f"{reason} after {timeout_s:g} s; the old sizes hold", hint="try again when fewer requests run"
        )


async def _move_weights(engine: Engine, weights_bytes: int, deadline_s: float) -> None:
    """Records leave memory or come into it one by one, each between two steps."""
    if not engine.weights.can_move:
        raise Unsupported("the weights of this engine can't be moved", param="weights_bytes")
    try:
        await asyncio.wrap_future(engine.loop.call(lambda: engine.weights.retarget(weights_bytes)))
    except DoesNotFitHost as exc:
        raise OutOfSpace(
            f"what the card would have no room for then needs {human_bytes(exc.needed_bytes)} of CPU memory",
            hint=f"start with --host-weights-mem {-(-exc.needed_bytes // 10**6)}MB, or leave more on the card",
            param="weights_bytes",
        ) from None
    except DoesNotFit as exc:
        raise OutOfSpace(
            f"{human_bytes(weights_bytes)} are too little for the weights: even streamed they need "
            f"{human_bytes(exc.needed_bytes)}",
            hint=f"--weights-mem {-(-exc.needed_bytes // 10**6)}MB does",
            param="weights_bytes",
        ) from None
    except NotMoved as exc:
        raise OutOfSpace(f"the weights stay as they were: {exc}", hint=_MOVE_HINT, param="weights_bytes") from None
    while await _settled(engine):
        if engine.pager.clock() >= deadline_s:
            raise OutOfSpace(
                "not all weights came into memory in time; those that did not go on being streamed",
                hint="say it once more, with a larger --timeout",
            )


async def _settled(engine: Engine) -> bool:
    """Brings one record to its place, between two steps."""
    try:
        moved: bool = await asyncio.wrap_future(engine.loop.call(engine.weights.settle))
    except NotMoved as exc:
        has = human_bytes(engine.weights.memory_bytes)
        raise OutOfSpace(
            f"not all weights came to their places, {has} have; the others go on being streamed: {exc}",
            hint=_MOVE_HINT, param="weights_bytes",
        ) from None  # fmt: skip
    return moved


def _check_memory(wanted: _Resize, engine: Engine, total_bytes: int) -> None:
    """All of it lies in RAM, with a card the host's pages alone: it refuses itself what it has no memory for.

    Raises OutOfSpace that says how much would fit.
    """
    pager, record_bytes = engine.pager, engine.pager.device.record_bytes
    now = {"device": pager.device.slots * record_bytes, "host": pager.host.slots * record_bytes}
    asked = {"device": wanted.device_bytes, "host": wanted.host_bytes}
    if wanted.weights_bytes is not None:  # otherwise they are not counted: those in the page cache can leave it
        asked["weights"], now["weights"] = min(wanted.weights_bytes, engine.weights.total_bytes), 0
    if engine.on_card:
        now, asked = {"host": now["host"]}, {"host": asked["host"]}
    sizes = {name: now[name] if size is None else size for name, size in asked.items()}
    copies_bytes = 0 if engine.on_card else engine.copies_bytes
    if sum(sizes.values()) + copies_bytes <= total_bytes:
        return
    name = next(name for name, size in asked.items() if size is not None)
    others = sum(sizes.values()) - sizes[name] + copies_bytes
    whole = " and ".join(f"{human_bytes(size)} of {each} memory" for each, size in sizes.items())
    whole += f" and {human_bytes(copies_bytes)} of exact copies" if copies_bytes else ""
    raise OutOfSpace(
        f"{whole} are more than this machine's memory of {human_bytes(total_bytes)}; "
        f"{human_bytes(max(0, total_bytes - others))} of {name} memory would fit",
        hint=f"--{name}-mem {max(0, total_bytes - others) // 10**6}MB is the most that this machine has for it",
        param=f"{name}_bytes",
    )


def _tell_capacity(engine: Engine) -> None:
    """What one sequence may have from now on."""
    pager = engine.pager
    capacity_tokens = min(engine.position_tokens, pager.capacity_pages * pager.page_tokens)
    engine.intake.facts = dataclasses.replace(engine.intake.facts, capacity_tokens=capacity_tokens)


def _typed(args: Mapping[str, Any], kind: type[T], what: str) -> T:
    try:
        return msgspec.convert(dict(args), kind, strict=True)
    except msgspec.ValidationError as exc:
        raise BadRequest(f"{what}: {str(exc).replace('`', '')}") from None
