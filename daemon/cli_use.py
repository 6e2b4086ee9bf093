"""Verbs about loaded models: ps, load, unload."""

from __future__ import annotations

from typing import Any

import click

from tierd.daemon.cli_common import (
    connect,
    human_bytes,
    human_seconds,
    json_option,
    load_model,
    load_settings,
    note,
    print_json,
    print_table,
    settings_options,
)
from tierd.daemon.errors import BadRequest

UNLOAD_TIMEOUT_S = 120.0  # pages that only memory holds are written first


@click.command()
@settings_options("socket")
@json_option
def ps(flags: dict[str, Any], as_json: bool) -> None:
    """List the models that are loaded."""
    with connect(load_settings(flags)) as client:
        engines = client.call("ps").get("engines", [])
    if as_json:
        print_json({"engines": engines})
        return
    print_table(
        ("MODEL", "STATE", "PID", "MEMORY", "RUNNING", "WAITING", "UNLOADS IN"),
        (
            (
                engine.get("model", "?"), engine.get("state", "?"), engine.get("pid") or "-",
                human_bytes(engine.get("rss_bytes")), engine.get("running", 0), engine.get("waiting", 0),
                human_seconds(engine.get("expires_in_s")),
            )
            for engine in engines
        ),
    )  # fmt: skip


@click.command()
@click.argument("model")
@settings_options("socket")
@json_option
def load(flags: dict[str, Any], model: str, as_json: bool) -> None:
    """Load a model and return when it is ready."""
    with connect(load_settings(flags)) as client:
        result = load_model(client, model)
    if as_json:
        print_json(result)
    else:
        note(f"{result.get('model', model)} is ready")


@click.command()
@click.argument("model", required=False)
@click.option("--all", "every", is_flag=True, help="Every loaded model.")
@settings_options("socket")
@json_option
def unload(flags: dict[str, Any], model: str | None, every: bool, as_json: bool) -> None:
    """Unload a model; its pages stay in the store."""
    if (model is None) == (not every):
        raise BadRequest("name one model, or give --all", hint="`tierd ps` lists what is loaded")
    arguments: dict[str, Any] = {"all": True} if every else {"model": model}
    with connect(load_settings(flags)) as client:
        result = client.call("unload", wait_s=UNLOAD_TIMEOUT_S, **arguments)
    unloaded = [str(name) for name in result.get("unloaded", [])]
    if as_json:
        print_json({"unloaded": unloaded})
    elif unloaded:
        note(f"unloaded {', '.join(unloaded)}")
    else:
        note(f"{model} was not loaded" if model else "nothing was loaded")
