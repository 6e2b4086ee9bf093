"""The configuration of an engine: how much of the machine it may use, and how much of the disk cap is left for it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tierd.daemon import kv_quota, room
from tierd.daemon.child import EngineProcess, EngineState
from tierd.daemon.config import Settings, engine_config, kv_root, resolve_sizes
from tierd.daemon.errors import TierdError
from tierd.daemon.machine import Machine, Sizes, probe_machine
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.plan.auto import LEAST_ARENA_BYTES, choose_sizes
from tierd.daemon.plan.workspace import engine_bytes
from tierd.daemon.room import Arenas, Held
from tierd.daemon.supervisor import Model, NoRoom

log = logging.getLogger("tierd.prepare")

RESIZE_S = 10.0  # for slots of a running engine to become free
_SIZES = ("device_bytes", "host_bytes", "weights_bytes")  # of a resize, and fields of `Sizes`


class _Need(NamedTuple):
    """The sizes of an engine that is alone, and what it takes beside its arenas when its weights are all in memory."""

    sizes: Sizes
    weights_bytes: int
    workspace_bytes: int


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
        self._cap = Arenas(0, 0)
        self._usable_bytes = 0

    async def __call__(self, model: Model, engines: Mapping[str, EngineProcess]) -> str:
        """An `EngineConfig` as JSON. Measures the disk, so it may take a while.

        `engines`: all that run, this one among them. Raises NoRoom when it has to wait until one of them ends.
        """
        async with self._one_at_a_time:
            self._held = {name: held for name, held in self._held.items() if name in engines and name != model.name}
            machine = await asyncio.to_thread(self._machine)
            need = await asyncio.to_thread(self._need, model, machine)
            sizes = need.sizes._replace(**self._resized.get(model.name, {}))
            if self._held:
                arenas = await self._beside(model, need, machine, engines)
                sizes = sizes._replace(
                    device_bytes=arenas.device, host_bytes=arenas.host, weights_bytes=need.weights_bytes
                )
            else:
                arenas = Arenas(sizes.device_bytes, sizes.host_bytes)
                usable = min(machine.available_ram, machine.total_ram)
                self._cap, self._usable_bytes = arenas, usable - usable // 10
            fixed_bytes = min(sizes.weights_bytes, need.weights_bytes) + need.workspace_bytes
            self._held[model.name] = Held(arenas, fixed_bytes)
            sizes = await asyncio.to_thread(self._on_disk, model, sizes)
        return msgspec.json.encode(engine_config(self._settings, sizes, Path(model.directory))).decode()

    def note(self, engine: EngineProcess) -> None:
        """Remember which store an engine opened, for the next share. To be called when it is ready."""
        namespace = engine.info.get("namespace")
        if isinstance(namespace, str):
            kv_quota.note_owner(self.root, namespace, self._owner(engine.model))

    async def resize(self, engine: EngineProcess, args: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Change the memory of an engine; the next one of its model gets as much. Raises what the engine answers."""
        told = await engine.call("resize", args, timeout_s)
        sizes = {name: told[name] for name in _SIZES if name in args and name in told}
        self._resized[engine.model] = self._resized.get(engine.model, {}) | sizes
        if (held := self._held.get(engine.model)) is not None:
            device, host = held.arenas
            arenas = Arenas(sizes.get("device_bytes", device), sizes.get("host_bytes", host))
            self._cap = Arenas(self._cap.device + arenas.device - device, self._cap.host + arenas.host - host)
            self._held[engine.model] = held._replace(arenas=arenas)
        return told

    async def give_back(self, ended: str, engines: Mapping[str, EngineProcess]) -> None:
        """An engine has ended: the others get its part of the arenas."""
        async with self._one_at_a_time:
            if ended in engines or self._held.pop(ended, None) is None:
                return
            self._held = {name: held for name, held in self._held.items() if name in engines}
            await self._resize_all(room.regrown(self._cap, self._held), engines)

    async def _beside(
        self, model: Model, need: _Need, machine: Machine, engines: Mapping[str, EngineProcess]
    ) -> Arenas:
        """The arenas of one more engine; the others have made room for it then."""
        fixed_bytes = need.weights_bytes + need.workspace_bytes
        division = room.divide(self._usable_bytes, self._held, fixed_bytes, self._least_device_bytes())
        if division is None or fixed_bytes + division.newcomer.device > machine.available_ram:
            raise NoRoom(model.name)
        if any(engines[name].state is not EngineState.READY for name in self._held):
            raise NoRoom(model.name)  # one that starts or ends can't make room
        await self._resize_all(division.others, engines)
        left = room.left_of(self._cap, {name: held.arenas for name, held in self._held.items()})
        if left.device < self._least_device_bytes():
            raise NoRoom(model.name)  # running answers need what the others have
        return left

    async def _resize_all(self, wanted: Mapping[str, Arenas], engines: Mapping[str, EngineProcess]) -> None:
        """Resize those that differ. One that can't stays as it is."""
        for name, arenas in wanted.items():
            held, engine = self._held[name], engines.get(name)
            if engine is None or engine.state is not EngineState.READY or arenas == held.arenas:
                continue
            args = {"device_bytes": arenas.device, "host_bytes": arenas.host, "timeout_s": RESIZE_S}
            try:
                await engine.call("resize", args, 2 * RESIZE_S)
            except TierdError as exc:
                log.info("%s keeps its memory: %s", name, exc)
                continue
            log.info("%s has %d bytes of pages on the device now, %d below", name, *arenas)
            self._held[name] = held._replace(arenas=arenas)

    def _least_device_bytes(self) -> int:
        asked = self._settings.device_mem
        return LEAST_ARENA_BYTES if asked is None else min(asked // 4, LEAST_ARENA_BYTES)

    def _owner(self, name: str) -> kv_quota.Owner:
        return kv_quota.Owner(name, self._settings.kv_format)

    def _machine(self) -> Machine:
        machine = self._probe(self._settings.cache_dir)
        # What the page stores hold is theirs already: without it an automatic cap would shrink as they fill.
        held_bytes = sum(namespace.bytes for namespace in kv_quota.namespaces(self.root))
        return machine._replace(free_disk=machine.free_disk + held_bytes)

    def _on_disk(self, model: Model, sizes: Sizes) -> Sizes:
        if not sizes.nvme_bytes:
            return sizes
        share_bytes = kv_quota.share(self.root, self._owner(model.name), sizes.nvme_bytes)
        log.info("%s may use %d of %d bytes on disk", model.name, share_bytes, sizes.nvme_bytes)
        return sizes._replace(nvme_bytes=share_bytes)

    def _need(self, model: Model, machine: Machine) -> _Need:
        """The sizes that suit the machine and this model."""
        settings = self._settings
        try:
            manifest = load_manifest(Path(model.directory))
        except ModelFileError:
            return _Need(resolve_sizes(settings, machine), 0, 0)  # the engine says what is wrong with it
        threads = settings.threads or len(os.sched_getaffinity(0))
        sizes, why = choose_sizes(settings, machine, manifest.spec, manifest.bytes, manifest.context, threads)
        for reason in why:
            log.info("%s: %s", model.name, reason)
        workspace = engine_bytes(
            manifest.spec, kv_format=settings.kv_format, device_bytes=sizes.device_bytes, host_bytes=sizes.host_bytes,
            nvme_bytes=sizes.nvme_bytes, context=settings.ctx or manifest.context, max_batch=settings.max_batch,
            max_streams=settings.max_streams, threads=threads,
        ).workspace  # fmt: skip
        weights = manifest.bytes if settings.weights_mem is None else min(settings.weights_mem, manifest.bytes)
        return _Need(sizes, weights, workspace)
