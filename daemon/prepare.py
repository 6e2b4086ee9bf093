"""The configuration of an engine: how much of the machine it may use, and how much of the disk cap is left for it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import msgspec

from tierd.daemon import kv_quota, room
from tierd.daemon.child import EngineProcess, EngineState
from tierd.daemon.config import Settings
from tierd.daemon.engine_config import EngineConfig, engine_config
from tierd.daemon.errors import LOGS_HINT, EngineFailed, OutOfSpace, TierdError, TryLater, Unsupported
from tierd.daemon.machine import Machine, Sizes, probe_machine
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.need import Need, find_need, machine_for
from tierd.daemon.plan import rates
from tierd.daemon.plan.auto import LEAST_ARENA_BYTES
from tierd.daemon.plan.block import Block, Extent, choose_block
from tierd.daemon.plan.draft import Draft
from tierd.daemon.plan.subject import prepared_subject
from tierd.daemon.room import Arenas, Held
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
        self._held: dict[str, Held] = {}
        self._resized: dict[str, dict[str, int]] = {}  # models, and what somebody gave them by hand
        self._yielded: dict[str, int] = {}  # those that have less on the device than is booked, and how much
        self._blocks: dict[str, Block] = {}  # models whose next engine is for a batch alone
        self._formats: dict[str, str] = {}  # of the pages of each model's last engine
        self._needs: dict[str, Need] = {}  # of those in `_held`
        self._resizes: set[asyncio.Task[dict[str, Any]]] = set()  # at most one: they hold the lock
        self._auto_cap = self._cap = Arenas(0, 0)  # as the daemon chose it, and with what was resized by hand
        self._usable_bytes = 0

    async def __call__(self, model: Model, engines: Mapping[str, EngineProcess]) -> str:
        """An `EngineConfig` as JSON. Measures the disk, so it may take a while.

        `engines`: all that run, this one among them. Raises NoRoom when it has to wait until one of them ends.
        """
        async with self._one_at_a_time:
            self._keep(engines.keys() - {model.name})
            settings, machine = await asyncio.to_thread(self._settled, model)
            need = await asyncio.to_thread(find_need, settings, Path(model.directory), machine, self._threads())
            block = self._blocks.get(model.name)
            if block is not None:  # it fills the steps without guesses
                need = need._replace(
                    sizes=block.sizes, workspace_bytes=block.workspace_bytes, draft=Draft(), why=block.why
                )
            wish = self._resized.get(model.name, {}) if block is None else {}
            if self._held:
                sizes = await self._beside(model, need, wish, machine, engines)
            else:
                sizes = self._alone(need, wish, machine)
            self._needs[model.name] = need
            self._held[model.name] = need.held(sizes)
            self._formats[model.name] = settings.page_formats
            if len(self._held) == 1:
                self._cap = _arenas(sizes)
            taken = room.total_of(held.arenas for held in self._held.values())
            self._cap = Arenas(max(self._cap.device, taken.device), max(self._cap.host, taken.host))
            self._tell(model.name, sizes, wish, engines)
            self._book_later(model.name, need, sizes)
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
        if machine.card is not None:
            raise Unsupported(
                "a batch that has the card for itself is not planned yet", hint="leave --exclusive out, or `card = off`"
            )
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
        held = self._held.get(engine.model)
        if held is None:
            raise EngineFailed(f"the engine of {engine.model} has ended", hint=LOGS_HINT)
        auto = [name for name in _SIZES if args.get(name) == AUTO]
        wanted = {**args, **{name: self._auto_bytes(engine.model, name) for name in auto}}
        self._check_fits(engine.model, held, wanted)
        try:
            told = await engine.call("resize", wanted, timeout_s)
        except TierdError:
            if wanted.get("weights_bytes") is not None:  # they move first, so they may have although the rest did not
                self._held[engine.model] = held._replace(weights=await self._weights_bytes(engine, held.weights))
            raise
        sizes = {name: told[name] for name in _SIZES if name in args and name in told}
        mine = self._resized.get(engine.model, {}) | sizes
        self._resized[engine.model] = {name: size for name, size in mine.items() if name not in auto}
        device, host = held.arenas
        arenas = Arenas(sizes.get("device_bytes", device), sizes.get("host_bytes", host))
        self._cap = Arenas(self._cap.device + arenas.device - device, self._cap.host + arenas.host - host)
        self._held[engine.model] = held._replace(arenas=arenas, weights=sizes.get("weights_bytes", held.weights))
        if "device_bytes" in sizes:
            self._yielded.pop(engine.model, None)
        return told

    def device_bytes(self, name: str) -> int | None:
        """What a model that runs may have on the device."""
        held = self._held.get(name)
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
            self._yielded[engine.model] = wanted
            if wanted == booked:
                del self._yielded[engine.model]
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

    def _keep(self, names: AbstractSet[str]) -> None:
        """Forget what all other engines had."""
        self._held = {name: held for name, held in self._held.items() if name in names}
        self._needs = {name: need for name, need in self._needs.items() if name in names}
        self._yielded = {name: size for name, size in self._yielded.items() if name in names}

    def _auto_bytes(self, name: str, size: str) -> int:
        """One of the sizes of a running engine as the daemon would choose it, beside the others that run."""
        if size == "weights_bytes":
            return self._needs[name].sizes.weights_bytes
        part = self._auto_cap.device if size == "device_bytes" else self._auto_cap.host
        return part // max(len(self._held), 1)

    def _most_bytes(self, name: str) -> int:
        """What a model may have: what the others leave, and alone as much as it gets unasked."""
        others = {model: held for model, held in self._held.items() if model != name}
        left_bytes = room.left_beside(self._usable_bytes, others)
        need = self._needs[name]
        return left_bytes if others else max(left_bytes, need.held(need.sizes).total)

    def _check_fits(self, name: str, held: Held, wanted: Mapping[str, Any]) -> None:
        """Raises OutOfSpace for a model that is to have more than it has and than what is left beside all else."""
        whole = self._needs[name].weights_bytes
        now = {"device": held.arenas.device, "host": held.arenas.host, "weights": held.weights}
        named = {tier: size for tier in now if (size := wanted.get(f"{tier}_bytes")) is not None}
        if "weights" in named:
            named["weights"] = min(named["weights"], whole)
        then, most_bytes = now | named, max(self._most_bytes(name), held.total)
        if held.apart:  # the engine knows how much of the computer's memory there is
            named.pop("host", None)
            del then["host"]
        if not named or sum(then.values()) + held.workspace <= most_bytes:
            return
        tier = max(named, key=lambda each: then[each] - now[each])
        size = then[tier]
        left_bytes = max(most_bytes - held.workspace - sum(then.values()) + size, 0)
        beside, less = ("pages", "--device-mem") if tier == "weights" else ("weights", "--weights-mem")
        flags = " ".join(f"--{each}-mem {size // 10**6}MB" for each, size in (named | {tier: left_bytes}).items())
        does = f"`tierd resize {name} {flags}` does; " if left_bytes else ""
        raise OutOfSpace(
            f"{human_bytes(size)} of {tier} memory do not fit: {beside}, workspace and other models leave "
            f"{human_bytes(left_bytes)} of {human_bytes(self._usable_bytes)} for it",
            hint=f"{does}less {less} leaves more",
            param=f"{tier}_bytes",
        )

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
            if ended in engines or ended not in self._held:
                return
            self._keep(engines.keys())
            await self._resize_all(room.regrown(self._cap, self._held), engines)

    def _alone(self, need: Need, wish: Mapping[str, int], machine: Machine) -> Sizes:
        """The sizes of the only engine; what somebody once gave it by hand where that fits."""
        usable = min(machine.available_ram, machine.total_ram)
        self._usable_bytes = need.card_bytes or usable - usable // 10
        self._auto_cap = _arenas(need.sizes)
        wished = need.sizes._replace(**wish)
        fits = need.held(wished).total <= max(self._usable_bytes, need.held(need.sizes).total)
        return wished if fits else need.sizes

    async def _beside(
        self, model: Model, need: Need, wish: Mapping[str, int], machine: Machine, engines: Mapping[str, EngineProcess]
    ) -> Sizes:
        """The sizes of one more engine; the others have made room for it then, or have what they had before."""
        if need.card_bytes:
            raise NoRoom(model.name)  # what is free on a card is planned for one model
        before = dict(self._held)
        for weights_bytes in self._weights_to_try(need, wish):
            fixed_bytes = weights_bytes + need.workspace_bytes
            division, is_wish = self._divide(fixed_bytes, wish)
            if division is not None and (
                fixed_bytes + division.newcomer.device <= machine.available_ram + division.freed_bytes(before)
            ):
                break
        else:
            raise NoRoom(model.name)
        if any((one := engines.get(name)) is None or one.state is not EngineState.READY for name in before):
            raise NoRoom(model.name)  # one that starts or ends can't make room
        await self._resize_all(division.others, engines)
        kept = room.total_of(held.arenas for held in self._held.values())
        wanted = room.total_of((*division.others.values(), division.newcomer))
        cap = Arenas(max(self._cap.device, wanted.device), max(self._cap.host, wanted.host))
        arenas = room.left_of(cap, {"": kept})
        if is_wish:
            arenas = Arenas(min(arenas.device, division.newcomer.device), min(arenas.host, division.newcomer.host))
        # What the others had may have been untouched, so that giving it up left no more memory than before.
        _, machine = await asyncio.to_thread(self._settled, model)
        if arenas.device < self._least_device_bytes() or fixed_bytes + arenas.device > machine.available_ram:
            await self._resize_all(room.regrown(self._cap, before), engines)
            raise NoRoom(model.name)  # running answers need what the others have
        return need.sizes._replace(
            device_bytes=arenas.device, host_bytes=arenas.host, weights_bytes=weights_bytes
        )

    def _weights_to_try(self, need: Need, wish: Mapping[str, int]) -> list[int]:
        """Bytes of weights for one more engine: as somebody once gave it by hand, then as the settings say if less."""
        asked = self._settings.weights_mem
        unasked_bytes = need.weights_bytes if asked is None else min(asked, need.weights_bytes)
        wished_bytes = min(wish.get("weights_bytes", unasked_bytes), need.weights_bytes)
        return [wished_bytes] if wished_bytes <= unasked_bytes else [wished_bytes, unasked_bytes]

    def _divide(self, fixed_bytes: int, wish: Mapping[str, int]) -> tuple[room.Division | None, bool]:
        """Room for one more engine, and whether it has what somebody once gave it by hand: it does where that fits."""
        part = room.divide(self._usable_bytes, self._held, fixed_bytes, self._least_device_bytes())
        if part is None or not wish.keys() & {"device_bytes", "host_bytes"}:
            return part, False
        device, host = part.newcomer
        wished = Arenas(wish.get("device_bytes", device), wish.get("host_bytes", host))
        found = room.divide(self._usable_bytes, self._held, fixed_bytes, self._least_device_bytes(), wished)
        return found or part, found is not None

    async def _resize_all(self, wanted: Mapping[str, Arenas], engines: Mapping[str, EngineProcess]) -> None:
        """Resize those that differ. One that can't stays as it is."""
        for name, arenas in wanted.items():
            held, engine = self._held[name], engines.get(name)
            if engine is None or engine.state is not EngineState.READY or arenas == held.arenas:
                continue
            device_bytes = min(arenas.device, self._yielded.get(name, arenas.device))
            args = {"device_bytes": device_bytes, "host_bytes": arenas.host, "timeout_s": RESIZE_S}
            try:
                await engine.call("resize", args, 2 * RESIZE_S)
            except TierdError as exc:
                log.info("%s keeps its memory: %s", name, exc)
                continue
            log.info("%s has %d bytes of pages on the device now, %d below", name, device_bytes, arenas.host)
            self._held[name] = held._replace(arenas=arenas)

    def _least_device_bytes(self) -> int:
        asked = self._settings.device_mem
        return LEAST_ARENA_BYTES if asked is None else min(asked // 4, LEAST_ARENA_BYTES)

    def _book_later(self, name: str, need: Need, sizes: Sizes) -> None:
        """What others hold of a card is the pages' when they have left, where somebody watches for that."""
        later_bytes = need.later_device_bytes
        if self._settings.yield_device_mem and sizes.device_bytes == need.sizes.device_bytes < later_bytes:
            held = self._held[name]
            self._held[name] = held._replace(arenas=held.arenas._replace(device=later_bytes))
            self._yielded[name] = sizes.device_bytes

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
