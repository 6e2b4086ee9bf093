"""Prepared models with another chat template than their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from tierd.daemon.models.catalog import MANIFEST, TEMPLATE, load_manifest
from tierd.daemon.models.digests import file_digest


def with_template(model: Path, directory: Path, text: str) -> Path:
    """A copy of a prepared model that says this template to be its own."""
    shutil.copytree(model, directory)
    (directory / TEMPLATE).write_text(text)
    manifest = msgspec.structs.replace(
        load_manifest(directory), template_digest=file_digest(directory / TEMPLATE).hex()
    )
    (directory / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return directory
