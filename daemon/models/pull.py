"""`tierd pull`: a reference -> a prepared model. Fetches, compares with what is there, imports."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from tierd.daemon.errors import Conflict, ModelInvalid, PermissionDenied, TierdError
from tierd.daemon.models import catalog, fetch
from tierd.daemon.models.catalog import Manifest
from tierd.daemon.models.digests import source_digest
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.hub import Hub, Progress
from tierd.daemon.models.importer import import_model, survey
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.models.weights import AUTO, parse_format
from tierd.daemon.paths import cache_dir as default_cache_dir

Choose = Callable[[ModelSpec, str, int], str | None]  # shape, format and bytes as they are: another format, or None
UNCHANGED = "unchanged"  # the stage reported when nothing had to be done


def pull(
    ref: str,
    models_dir: Path,
    *,
    name: str | None = None,
    weights: str | None = None,
    progress: Progress,
    offline: bool = False,
    force: bool = False,
    cache_dir: Path | None = None,
    hub: Hub | None = None,
    choose: Choose | None = None,
) -> Manifest:
    """Prepare the model that `ref` means and return its manifest.

    `choose` says which weight format a model gets when `weights` is None; without it that of its source.

    What is prepared already from the same content, in the same weight format, stays as it is: the stage `unchanged` is
    reported then. Stages: `check`, `download`, `unpack`, `import`, `unchanged`. Raises only `TierdError`s: BadRequest
    (reference, name), DownloadFailed, ModelInvalid (the files can't be used), OutOfSpace, Conflict (the name belongs to
    a model of another source and not `force`, or another pull runs).
    """
    try:
        target = catalog.parse_ref(name) if name is not None else fetch.default_name(ref)
        wanted = parse_format(weights) or AUTO
        current = _current(models_dir, target)
        kept = current if current is not None and current.weights == wanted and not force else None
        label = _label(ref)
        if kept is not None and fetch.packaged(ref) is not None and kept.source == label:
            # What such a reference means never changes, so there is nothing to fetch and compare.
            progress(UNCHANGED, 1, 1)
            return kept
        source = fetch.resolve(ref, cache_dir or default_cache_dir(), progress, offline, hub=hub)
        if weights is None and choose is not None:
            weights = choose(*survey(source))
            if weights is not None and current is not None and current.weights == weights and not force:
                kept = current
        digest = source_digest(source)
        if kept is not None and kept.source_digest == digest:
            progress(UNCHANGED, 1, 1)
            return kept
        if current is not None and not force and current.source != label and current.source_digest != digest:
            raise Conflict(
                f"{target!r} is a model from {current.source}",
                hint="give the new one another name with --name, or replace the old one with --force",
            )
        known = fetch.packaged(ref)
        sampling = None if known is None else known.sampling
        return import_model(
            source, models_dir, target, weights, progress, source_ref=label, sampling=sampling, replace=True
        )
    except ModelFileError as exc:
        raise ModelInvalid(str(exc)) from exc
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what = "is on a read-only file system" if exc.errno == errno.EROFS else "can't be written to: no permission"
            hint = "check who owns it, or choose other places with --models-dir and --cache-dir"
            raise PermissionDenied(f"{exc.filename or models_dir} {what}", hint=hint) from exc
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise fetch.no_space(Path(exc.filename).parent if exc.filename else models_dir) from exc
        raise TierdError(f"pulling {ref} failed: {exc.strerror or exc}", hint="check the disk") from exc


def _label(ref: str) -> str:
    """How the manifest names the source: one spelling for a packaged model, an absolute path for a file."""
    if fetch.packaged(ref) is not None:
        return catalog.parse_ref(ref)
    return ref if ref.startswith("hf:") else str(Path(ref).expanduser().resolve())


def _current(models_dir: Path, name: str) -> Manifest | None:
    """The manifest under this name, None if there is none or it is broken (it is replaced then)."""
    try:
        return catalog.load_manifest(models_dir / name)
    except ModelFileError:
        return None
