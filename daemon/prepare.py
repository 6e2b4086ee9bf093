"""The configuration of an engine: how much of the machine it may use, and how much of the disk cap is left for it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tierd.daemon import kv_quota
from tierd.daemon.books import Books
from tierd.daemon.child import EngineProcess, EngineState
from tierd.daemon.config import Settings
from tierd.daemon.engine_config import EngineConfig, engine_config
from tierd.daemon.errors import LOGS_HINT, EngineFailed, TierdError, TryLater
from tierd.daemon.machine import Machine, Sizes, probe_machine, whole_tier
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.need import Need, find_need, machine_for
from tierd.daemon.plan import rates
from tierd.daemon.plan.block import Block, Extent, choose_block
from tierd.daemon.plan.draft import Draft
from tierd.daemon.plan.subject import prepared_subject
from tierd.daemon.room import Arenas
from tierd.daemon.settled import kv_root, settle
from tierd.daemon.supervisor import Model, NoRoom
from tierd.daemon.units import human_bytes

log = logging.getLogger("tierd.prepare")

RESIZE_S = 10.0  # for slots of a running engine to become free
STATUS_S = 5.0  # for an engine to say what it has
AUTO = "auto"  # as a size: what the daemon chooses
_SIZES = ("device_bytes", "host_bytes", "weights_bytes")  # of a resize, and fields of `Sizes`


def _chosen(config: EngineConfig, format: str, why: tuple[str, ...]) -> dict[str, Any]:
    """What an engine gets, as `status` tells it."""
    names = ["device_bytes", "host_bytes", "nvme_bytes", "weights_bytes", "kv_format", "store_format",
             "max_streams", "max_batch_rows"]
    names += ["host_weights_bytes"] if config.card else []
    return {name: getattr(config, name) for name in names} | {"weights_format": format, "why": list(why)}


def _arenas(sizes: Sizes) -> Arenas:
    return Arenas(sizes.device_bytes, sizes.host_bytes)


class Preparer:
    """Gives engines their share. `root` is the directory of all page stores.

    Threading: for one event loop.
    """

    def __init__(self, settings: Settings, probe: Callable[[Path], Machine] = probe_machine) -> None:
        self._settings = settings
        self._probe = probe
        self.root = kv_root(settings)
        self._one_at_a_time = asyncio.Lock()
        self.books = Books(settings)
        self._resized: dict[str, dict[str, int]] = {}  # models, and what somebody gave them by hand
        self._blocks: dict[str, Block] = {}  # models whose next engine is for a batch alone
        self._formats: dict[str, str] = {}  # of the pages of each model's last engine
        self._resizes: set[asyncio.Task[dict[str, Any]]] = set()  # at most one: they hold the lock

    async def __call__(self, model: Model, engines: Mapping[str, EngineProcess]) -> str:
        """An `EngineConfig` as JSON. Measures the disk, so it may take a while.

        `engines`: all that run, this one among them. Raises NoRoom when it has to wait until one of them ends.
        """
        async with self._one_at_a_time:
            self.books.keep(engines.keys() - {model.name})
            if self.books.on_card:
                self._check_at_rest(model, engines)
            settings, machine = await asyncio.to_thread(self._settled, model)
            if machine.card is not None and self.books.on_card:  # as if the others were not there
                self.books.look(machine.card)
                machine = machine._replace(card=machine.card._replace(free_bytes=self.books.usable_bytes))
            need = await asyncio.to_thread(find_need, settings, Path(model.directory), machine, self._threads())
            block = self._blocks.get(model.name)
            if block is not None:  # it fills the steps without guesses
                need = need._replace(
                    sizes=block.sizes, workspace_bytes=block.workspace_bytes, draft=Draft(), why=block.why,
                    later_device_bytes=0,
                )
            wish = self._resized.get(model.name, {}) if block is None else {}
            if self.books.held:
                sizes = await self._beside(model, need, wish, machine, engines)
            else:
                sizes = self._alone(need, wish, machine)
            self.books.book(model.name, need, need.held(sizes), need.later_device_bytes)
            self._formats[model.name] = settings.page_formats
            self._tell(model.name, sizes, wish, engines)
            sizes = await asyncio.to_thread(self._on_disk, model, sizes)
        draft = need.draft
        draft_dir = draft.model.directory if draft.model is not None else None
        config = engine_config(settings, sizes, Path(model.directory), draft_dir, draft.off_reason, draft.on_card)
        if block is not None:
            config = msgspec.structs.replace(
                config, max_streams=block.streams, max_batch_rows=block.rows, throughput=True
            )
        if (engine := engines.get(model.name)) is not None:
            engine.chosen = _chosen(config, need.format, need.why)
        return msgspec.json.encode(config).decode()

    def give_block(self, name: str, block: Block | None) -> None:
        """The next engines of a model are for a batch alone; None: as usual again."""
        if block is None:
            self._blocks.pop(name, None)
        else:
            self._blocks[name] = block

    def plan_block(self, model: Model, extent: Extent, streams: int | None) -> Block | None:
        """The block of a batch that has the machine for itself. Reads the disk: for a thread."""
        manifest = load_manifest(Path(model.directory))
        settings, machine = self._settled(model)
        threads = self._threads()
        measured = rates.of_this_machine(settings.cache_dir, threads)
        subject = prepared_subject(Path(model.directory), manifest)
        return choose_block(subject, extent, settings, machine, measured, threads, streams)

    def _threads(self) -> int:
        return self._settings.threads or len(os.sched_getaffinity(0))

    def note(self, engine: EngineProcess) -> None:
        """Remember which store an engine opened, for the next share. To be called when it is ready."""
        namespace = engine.info.get("namespace")
        formats = self._formats.get(engine.model)
        if isinstance(namespace, str) and formats is not None:
            kv_quota.note_owner(self.root, namespace, kv_quota.Owner(engine.model, formats))

    async def resize(self, engine: EngineProcess, args: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Change the memory of an engine; the next ones of its model get as much, as long as this daemon lives.

        A size may be `AUTO`: what the daemon would choose now, and will choose next. Raises OutOfSpace when it does not
        fit beside what else there is, and what the engine answers. One that has begun is finished and booked although
        its caller is cancelled; until then nothing else is given or taken.
        """
        await self._one_at_a_time.acquire()  # who goes away until here has changed nothing

        def over(done: asyncio.Task[dict[str, Any]]) -> None:
            self._one_at_a_time.release()
            self._resizes.discard(done)
            _ = done.cancelled() or done.exception()  # seen, even if nobody waits for it any more

        # The engine goes on when the client goes away, and what it then has is to be booked.
        work = asyncio.create_task(self._resize(engine, args, timeout_s), name=f"resize of {engine.model}")
        self._resizes.add(work)
        work.add_done_callback(over)
        await asyncio.wait((work,))
        return work.result()

    async def _resize(self, engine: EngineProcess, args: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        books = self.books
        held = books.held.get(engine.model)
        if held is None:
            raise EngineFailed(f"the engine of {engine.model} has ended", hint=LOGS_HINT)
        auto = [name for name in _SIZES if args.get(name) == AUTO]
        wanted = {**args, **{name: books.auto_bytes(engine.model, name) for name in auto}}
        books.check_fits(engine.model, held, wanted)
        try:
            told = await engine.call("resize", wanted, timeout_s)
        except TierdError:
            if wanted.get("weights_bytes") is not None:  # they move first, so they may have although the rest did not
                books.held[engine.model] = held._replace(weights=await self._weights_bytes(engine, held.weights))
            raise
        sizes = {name: told[name] for name in _SIZES if name in args and name in told}
        mine = self._resized.get(engine.model, {}) | sizes
        self._resized[engine.model] = {name: size for name, size in mine.items() if name not in auto}
        device, host = held.arenas
        arenas = Arenas(sizes.get("device_bytes", device), sizes.get("host_bytes", host))
        books.resized(engine.model, arenas, sizes.get("weights_bytes", held.weights))
        if "device_bytes" in sizes:
            books.yielded.pop(engine.model, None)
        return told

    def device_bytes(self, name: str) -> int | None:
        """What a model that runs may have on the device."""
        held = self.books.held.get(name)
        return None if held is None else held.arenas.device

    async def yield_device(self, engine: EngineProcess, device_bytes: int) -> None:
        """Have an engine use less of its part of the device, or all of it again; booked it stays.

        Raises TryLater, and has waited for nothing, while memory is given or taken for something else: afterwards the
        figures that this was decided by are old. Raises TierdError.
        """
        try:
            async with asyncio.timeout(0):  # taken at once, or not at all
                await self._one_at_a_time.acquire()
        except TimeoutError:
            raise TryLater("memory is given or taken for something else", hint="try again in a moment") from None
        try:
            booked = self.device_bytes(engine.model)
            if booked is None or engine.state is not EngineState.READY:
                raise EngineFailed(f"the engine of {engine.model} has ended", hint=LOGS_HINT)
            wanted = min(device_bytes, booked)
            await engine.call("resize", {"device_bytes": wanted, "timeout_s": RESIZE_S}, 2 * RESIZE_S)
            self.books.yielded[engine.model] = wanted
            if wanted == booked:
                del self.books.yielded[engine.model]
        finally:
            self._one_at_a_time.release()

    async def _weights_bytes(self, engine: EngineProcess, before_bytes: int) -> int:
        """The weights that an engine has in memory; `before_bytes` when it does not say."""
        try:
            status = await engine.call("status", {}, STATUS_S)
        except TierdError as exc:
            log.info("%s does not say what it has: %s", engine.model, exc)
            return before_bytes
        memory_bytes = status.get("weights", {}).get("memory_bytes")
        return memory_bytes if isinstance(memory_bytes, int) else before_bytes

    def _tell(self, name: str, sizes: Sizes, wish: Mapping[str, int], engines: Mapping[str, EngineProcess]) -> None:
        """Say what an engine got instead of what somebody once gave it by hand."""
        less = [tier for tier in _SIZES if getattr(sizes, tier) != wish.get(tier, getattr(sizes, tier))]
        if (engine := engines.get(name)) is not None and less:
            got = ", ".join(
                f"{human_bytes(getattr(sizes, tier))} of {tier.removesuffix('_bytes')} memory instead of the "
                f"{human_bytes(wish[tier])}"
                for tier in less
            )
            engine.notice(f"{name} has {got} that `tierd resize` gave it: there is no room for more just now")

    async def give_back(self, ended: str, engines: Mapping[str, EngineProcess]) -> None:
        """An engine has ended: the others get its part of the arenas."""
        async with self._one_at_a_time:
            books = self.books
            if ended in engines or ended not in books.held:
                return
            books.keep(engines.keys())
            if books.on_card and all(one.state is EngineState.READY for one in engines.values()):
                machine = await asyncio.to_thread(self._probe, self._settings.cache_dir)
                books.look(machine.card)
            await self._resize_all(books.regrown(), engines)

    def _check_at_rest(self, model: Model, engines: Mapping[str, EngineProcess]) -> None:
        """Raises NoRoom while one of the others starts or ends: it can't make room, and what it takes is not known."""
        held = self.books.held
        if any((one := engines.get(name)) is None or one.state is not EngineState.READY for name in held):
            raise NoRoom(model.name)

    def _alone(self, need: Need, wish: Mapping[str, int], machine: Machine) -> Sizes:
        """The sizes of the only engine; what somebody once gave it by hand where that fits."""
        usable, books = min(machine.available_ram, machine.total_ram), self.books
        books.usable_bytes = need.card_bytes or usable - usable // 10
        books.card_bytes = 0 if machine.card is None else machine.card.total_bytes
        books.auto_cap = _arenas(need.sizes)
        wished = need.sizes._replace(**wish)
        fits = need.held(wished).total <= max(books.usable_bytes, need.held(need.sizes).total)
        return wished if fits else need.sizes

    async def _beside(
        self, model: Model, need: Need, wish: Mapping[str, int], machine: Machine, engines: Mapping[str, EngineProcess]
    ) -> Sizes:
        """The sizes of one more engine; the others have made room for it then, or have what they had before."""
        books, on_card = self.books, need.card_bytes > 0
        if on_card != books.on_card:
            raise NoRoom(model.name)  # a card's engines and those of the processors take turns
        before = dict(books.held)
        for weights_bytes in books.weights_to_try(need, wish):
            fixed_bytes = weights_bytes + need.workspace_bytes
            division, is_wish = books.divide(fixed_bytes, wish)
            if division is not None and (
                on_card
                or fixed_bytes + division.newcomer.device <= machine.available_ram + division.freed_bytes(before)
            ):
                break
        else:
            raise NoRoom(model.name)
        self._check_at_rest(model, engines)
        await self._resize_all(division.others, engines)
        # What the others had may have been untouched, so that giving it up left no more memory than before.
        _, machine = await asyncio.to_thread(self._settled, model)
        if on_card:
            books.look(machine.card)
        arenas = books.left_for(division, fixed_bytes)
        if is_wish:
            arenas = Arenas(min(arenas.device, division.newcomer.device), min(arenas.host, division.newcomer.host))
        too_much = not on_card and fixed_bytes + arenas.device > machine.available_ram
        if arenas.device < books.least_device_bytes or too_much:
            await self._resize_all(books.restored(before), engines)
            raise NoRoom(model.name)  # running answers need what the others have
        sizes = need.sizes._replace(
            device_bytes=arenas.device, host_bytes=arenas.host, weights_bytes=weights_bytes
        )
        return self._below(sizes, need, machine) if on_card else sizes

    def _below(self, sizes: Sizes, need: Need, machine: Machine) -> Sizes:
        """The same with as much of the computer's memory, below a card, as there is now."""
        usable = min(machine.available_ram, machine.total_ram)
        usable = max(usable - usable // 10 - need.draft.ram_bytes, 0)
        host = whole_tier(min(sizes.host_bytes, usable))
        weights = self._settings.host_weights_mem
        return sizes._replace(host_bytes=host, host_weights_bytes=usable - host if weights is None else weights)

    async def _resize_all(self, wanted: Mapping[str, Arenas], engines: Mapping[str, EngineProcess]) -> None:
        """Resize those that differ. One that can't stays as it is."""
        for name, arenas in wanted.items():
            held, engine = self.books.held[name], engines.get(name)
            if engine is None or engine.state is not EngineState.READY or arenas == held.arenas:
                continue
            device_bytes = min(arenas.device, self.books.yielded.get(name, arenas.device))
            args = {"device_bytes": device_bytes, "host_bytes": arenas.host, "timeout_s": RESIZE_S}
            try:
                await engine.call("resize", args, 2 * RESIZE_S)
            except TierdError as exc:
                log.info("%s keeps its memory: %s", name, exc)
                continue
            log.info("%s has %d bytes of pages on the device now, %d below", name, device_bytes, arenas.host)
            self.books.held[name] = held._replace(arenas=arenas)

    def _settled(self, model: Model) -> tuple[Settings, Machine]:
        """The machine as it is now, and what the settings mean on it: the card may have come or gone since the last
        look, and with it the format of pages."""
        machine = machine_for(self._probe(self._settings.cache_dir), Path(model.directory))
        settings, machine = settle(self._settings, machine)
        # What the page stores hold is theirs already: without it an automatic cap would shrink as they fill.
        held_bytes = sum(namespace.bytes for namespace in kv_quota.namespaces(self.root))
        return settings, machine._replace(free_disk=machine.free_disk + held_bytes)

    def _on_disk(self, model: Model, sizes: Sizes) -> Sizes:
        if not sizes.nvme_bytes:
            return sizes
        owner = kv_quota.Owner(model.name, self._formats[model.name])
        share_bytes = kv_quota.share(self.root, owner, sizes.nvme_bytes)
        log.info("%s may use %d of %d bytes on disk", model.name, share_bytes, sizes.nvme_bytes)
        return sizes._replace(nvme_bytes=share_bytes)
