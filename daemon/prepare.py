"""The configuration of an engine: how much of the machine it may use, and how much of the disk cap is left for it."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import msgspec

from tierd.daemon import kv_quota
from tierd.daemon.child import EngineProcess
from tierd.daemon.config import Settings, engine_config, kv_root, resolve_sizes
from tierd.daemon.machine import Machine, Sizes, probe_machine
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.plan.auto import choose_sizes
from tierd.daemon.supervisor import Model

log = logging.getLogger("tierd.prepare")


class Preparer:
    """Gives engines their share. `root` is the directory of all page stores."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.root = kv_root(settings)

    async def __call__(self, model: Model) -> str:
        """An `EngineConfig` as JSON. Measures the disk, so it may take a while."""
        return await asyncio.to_thread(self._prepare, model)

    def note(self, engine: EngineProcess) -> None:
        """Remember which store an engine opened, for the next share. To be called when it is ready."""
        namespace = engine.info.get("namespace")
        if isinstance(namespace, str):
            kv_quota.note_owner(self.root, namespace, self._owner(engine.model))

    def _owner(self, name: str) -> kv_quota.Owner:
        return kv_quota.Owner(name, self._settings.kv_format)

    def _prepare(self, model: Model) -> str:
        machine = probe_machine(self._settings.cache_dir)
        # What the page stores hold is theirs already: without it an automatic cap would shrink as they fill.
        held_bytes = sum(namespace.bytes for namespace in kv_quota.namespaces(self.root))
        sizes = self._sizes(model, machine._replace(free_disk=machine.free_disk + held_bytes))
        if sizes.nvme_bytes:
            share_bytes = kv_quota.share(self.root, self._owner(model.name), sizes.nvme_bytes)
            log.info("%s may use %d of %d bytes on disk", model.name, share_bytes, sizes.nvme_bytes)
            sizes = sizes._replace(nvme_bytes=share_bytes)
        return msgspec.json.encode(engine_config(self._settings, sizes, Path(model.directory))).decode()

    def _sizes(self, model: Model, machine: Machine) -> Sizes:
        """The sizes that suit the machine and this model."""
        try:
            manifest = load_manifest(Path(model.directory))
        except ModelFileError:
            return resolve_sizes(self._settings, machine)  # the engine says what is wrong with it
        threads = self._settings.threads or len(os.sched_getaffinity(0))
        sizes, why = choose_sizes(self._settings, machine, manifest.spec, manifest.bytes, manifest.context, threads)
        for reason in why:
            log.info("%s: %s", model.name, reason)
        return sizes
