"""The prepared models as the daemon serves them: found by whatever name a client uses, listed, shown."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Container
from typing import Any

import msgspec

from tierd.daemon.config import Settings
from tierd.daemon.models import catalog
from tierd.daemon.supervisor import Model


class Shelf:
    """Reads a manifest again only when its file has changed. Threading: for one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._contexts: dict[str, tuple[tuple[int, int], int]] = {}  # by model: which file said so, and what it said

    def find(self, ref: str) -> tuple[Model, int]:
        """A model, and the context in tokens that its engine serves. An empty `ref` is the default model.

        Raises BadRequest, ModelNotFound, ModelInvalid.
        """
        ref = ref or self._settings.default_model
        name = catalog.parse_ref(ref)
        directory = self._settings.models_dir / name
        try:
            info = os.stat(directory / catalog.MANIFEST)
            stamp = (info.st_mtime_ns, info.st_ino)
        except OSError:
            stamp = (0, 0)
        known = self._contexts.get(name)
        if known is None or known[0] != stamp or stamp == (0, 0):
            found, manifest = catalog.find(self._settings.models_dir, ref)
            known = self._contexts[found.name] = (stamp, manifest.context)
        return Model(name, directory), self._settings.ctx or known[1]

    async def list(self, loaded: Container[str]) -> list[dict[str, Any]]:
        """Every prepared model, broken ones with their `problem`."""
        listed = await asyncio.to_thread(catalog.list_models, self._settings.models_dir)
        return [
            {"name": item.name, "loaded": item.name in loaded, "problem": item.problem}
            | (catalog.summary(item.manifest) if item.manifest else {})
            for item in listed
        ]

    async def show(self, ref: str, loaded: Container[str]) -> dict[str, Any]:
        """One model with its shape. Raises ModelNotFound."""
        directory, manifest = await asyncio.to_thread(catalog.find, self._settings.models_dir, ref)
        return {
            "name": directory.name,
            "path": str(directory),
            "loaded": directory.name in loaded,
            "spec": msgspec.to_builtins(manifest.spec),
            "sampling": msgspec.to_builtins(manifest.sampling),
            **catalog.summary(manifest),
        }
