"""Verbs about prepared models: pull, list, show, rm. They work on the disk; the daemon need not run."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from tierd.daemon.cli_common import (
    Progress,
    confirm,
    connect_if_running,
    json_option,
    leave,
    load_settings,
    note,
    print_json,
    print_table,
    settings_options,
    yes_option,
)
from tierd.daemon.config import Settings
from tierd.daemon.errors import Conflict
from tierd.daemon.machine import probe_machine
from tierd.daemon.models import catalog
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.units import counted, human_bytes


@click.command()
@click.argument("ref")
@click.option("--name", help="Name of the prepared model.")
@click.option("--weights", metavar="FORMAT",
              help="fp32, bf16, int8, int8-g32, int4-g32, int5-g32, or auto: as they are. "
              "If not given: as they are where they fit into memory, else narrower.")  # fmt: skip
@click.option("--force", is_flag=True, help="Prepare it again even if it is there.")
@settings_options("models_dir", "cache_dir", "offline", "weights_mem")
@json_option
def pull(
    flags: dict[str, Any], ref: str, name: str | None, weights: str | None, force: bool, as_json: bool
) -> None:
    """Fetch a model and prepare it. REF: smollm2:135m, hf:owner/name, or a path to GGUF or safetensors."""
    settings = load_settings(flags)
    manifest = pull_with_progress(settings, ref, name=name, weights=weights, force=force)
    if as_json:
        print_json({part: getattr(manifest, part) for part in ("name", "format", "bytes", "digest")})
    else:
        size = human_bytes(manifest.bytes)
        print(f"{manifest.name} is ready: {manifest.format}, {size}; try `tierd run {manifest.name}`")


def pull_with_progress(
    settings: Settings, ref: str, *, name: str | None = None, weights: str | None = None, force: bool = False
) -> catalog.Manifest:
    """`models.pull.pull` with its progress on the standard error."""
    from tierd.daemon.models.pull import pull as pull_model  # numpy and the importers: only a pull needs them

    progress = Progress()
    try:
        return pull_model(
            ref,
            settings.models_dir,
            cache_dir=settings.cache_dir,
            name=name,
            weights=weights,
            progress=progress,
            offline=settings.offline,
            force=force,
            choose=functools.partial(_choose, settings, progress),
        )
    finally:
        progress.finish()


def _choose(settings: Settings, progress: Progress, spec: ModelSpec, own_format: str, own_bytes: int) -> str | None:
    """The format of weights that nobody asked for by name: as they are where they fit."""
    from tierd.daemon.plan.choose_format import choose_format

    chosen = choose_format(spec, own_format, own_bytes, settings, probe_machine(settings.cache_dir))
    if chosen.why:
        progress.finish()
        note(f"{chosen.why}; `--weights auto` keeps them as they are")
    return chosen.format


@click.command("list")
@settings_options("models_dir")
@json_option
def list_(flags: dict[str, Any], as_json: bool) -> None:
    """List the prepared models."""
    models = catalog.list_models(load_settings(flags).models_dir)
    if as_json:
        print_json({"models": [_summary(model) for model in models]})
        return
    if not models:
        note("no model is prepared; try `tierd pull smollm2:135m`")
        return
    rows: list[tuple[object, ...]] = []
    for model in models:
        if manifest := model.manifest:
            made = datetime.datetime.fromtimestamp(manifest.created_s).strftime("%Y-%m-%d")
            rows.append(
                (model.name, manifest.spec.family, manifest.format, manifest.context, human_bytes(manifest.bytes), made)
            )
        else:
            rows.append((model.name, "broken", "-", "-", "-", "-"))
            note(f"{model.name}: {model.problem}")
    print_table(("NAME", "FAMILY", "FORMAT", "CONTEXT", "SIZE", "MADE"), rows)


def _summary(model: catalog.Listed) -> dict[str, Any]:
    manifest = model.manifest
    if manifest is None:
        return {"name": model.name, "path": model.path, "problem": model.problem}
    return {
        "name": model.name,
        "path": model.path,
        **catalog.summary(manifest),
        "problem": None,
    }


@click.command()
@click.argument("model")
@click.option("--verify", is_flag=True, help="Read every file and check its digest.")
@settings_options("models_dir")
@json_option
def show(flags: dict[str, Any], model: str, verify: bool, as_json: bool) -> None:
    """Show what is known about a model."""
    path, manifest = catalog.find(load_settings(flags).models_dir, model)
    findings = _findings(path, manifest) if verify else []
    facts: dict[str, Any] = _summary(catalog.Listed(manifest.name, str(path), manifest, None))
    del facts["problem"]
    facts |= {"weights": manifest.weights, "spec": msgspec.to_builtins(manifest.spec)}
    facts |= {"active_parameters": manifest.spec.active_parameters}
    facts |= {"sampling": msgspec.to_builtins(manifest.sampling), "records": len(manifest.records)}
    if verify:
        facts |= {"verified": not findings, "findings": findings}
    if as_json:
        print_json(facts)
    else:
        for name, text in _readable(facts, manifest):
            print(f"{name:<11} {text}")
    if findings:
        note(f"error: {manifest.name} is damaged: {'; '.join(findings)}")
        note(f"hint: `tierd pull {manifest.source} --force` makes the model again")
        leave(1)


def _readable(facts: dict[str, Any], manifest: catalog.Manifest) -> Iterator[tuple[str, str]]:
    """What `show` says to people; programs get all of it with --json."""
    spec = manifest.spec
    sampling = ", ".join(f"{name} {value}" for name, value in facts["sampling"].items())
    yield "name", manifest.name
    yield "from", f"{manifest.source}, made {datetime.datetime.fromtimestamp(manifest.created_s):%Y-%m-%d %H:%M}"
    yield "model", f"{spec.family}, {spec.parameters / 1e6:,.0f} M parameters, {counted(spec.num_layers, 'layer')}"
    if (experts := spec.experts) is not None:
        layers = counted(len(experts.layers), "layer")
        active = f"{spec.active_parameters / 1e6:,.0f} M parameters"
        yield "experts", f"{experts.count} in each of {layers}, {experts.used} of them for a token, which uses {active}"
    heads = counted(spec.heads, "head")
    yield "attention", f"{heads} over {spec.kv_heads} of keys and values, each {spec.head_dim} wide"
    yield "vocabulary", counted(spec.vocab, "token")
    yield "context", counted(manifest.context, "token")
    yield "weights", f"{manifest.format}, {human_bytes(manifest.bytes)} in {counted(len(manifest.records), 'record')}"
    yield "sampling", sampling or "nothing is recommended"
    yield "directory", str(facts["path"])
    yield "digest", manifest.digest
    if "verified" in facts:
        yield "verified", "every file is as it was made" if facts["verified"] else "; ".join(facts["findings"])


def _findings(path: Path, manifest: catalog.Manifest) -> list[str]:
    """`models.digests.verify` with its progress on the standard error."""
    from tierd.daemon.models.digests import verify  # numpy: only those who verify pay for it

    progress = Progress()
    try:
        return verify(path, manifest, progress)
    finally:
        progress.finish()


@click.command()
@click.argument("model")
@settings_options("models_dir", "socket")
@yes_option
def rm(flags: dict[str, Any], model: str, yes: bool) -> None:
    """Delete a prepared model."""
    settings = load_settings(flags)
    name = catalog.parse_ref(model)
    if client := connect_if_running(settings):
        with client:
            if any(engine.get("model") == name for engine in client.call("ps").get("engines", [])):
                raise Conflict(f"{name} is loaded", hint=f"`tierd unload {name}` first")
    if (settings.models_dir / name).is_dir():
        confirm(f"Delete {name} from {settings.models_dir}?", yes=yes)
    print(f"deleted {catalog.remove(settings.models_dir, model)}")
