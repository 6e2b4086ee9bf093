"""Verbs about loaded models: ps, load, unload, resize."""

from __future__ import annotations

from typing import Any

import click

from tierd.daemon.cli_common import (
    connect,
    exclusive_shown,
    json_option,
    load_model,
    note,
    print_json,
    print_table,
    settings_anyway,
    settings_options,
    written_today,
)
from tierd.daemon.config_values import size_bytes
from tierd.daemon.errors import BadRequest
from tierd.daemon.units import human_bytes, human_seconds

RESIZE_EXTRA_S = 60.0  # beyond its timeout
UNLOAD_TIMEOUT_S = 120.0  # pages that only memory holds are written first


@click.command()
@settings_options("socket")
@json_option
def ps(flags: dict[str, Any], as_json: bool) -> None:
    """List the models that are loaded."""
    with connect(settings_anyway(flags)) as client:
        told = client.call("ps")
    engines = told.get("engines", [])
    if as_json:
        print_json({"engines": engines, "exclusive": told.get("exclusive")})
        return
    print_table(
        ("MODEL", "STATE", "PID", "MEMORY", "RUNNING", "WAITING", "WRITTEN TODAY", "UNLOADS IN"),
        (
            (
                engine.get("model", "?"), engine.get("state", "?"), engine.get("pid") or "-",
                human_bytes(engine.get("rss_bytes")), engine.get("running", 0), engine.get("waiting", 0),
                written_today(engine.get("writes")),
                human_seconds(engine.get("expires_in_s")),
            )
            for engine in engines
        ),
    )  # fmt: skip
    if text := exclusive_shown(told.get("exclusive")):
        note(text)


@click.command()
@click.argument("model")
@settings_options("socket")
@json_option
def load(flags: dict[str, Any], model: str, as_json: bool) -> None:
    """Load a model and return when it is ready."""
    with connect(settings_anyway(flags)) as client:
        result = load_model(client, model)
    if as_json:
        print_json(result)
    else:
        print(f"{result.get('model', model)} is ready")


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
    with connect(settings_anyway(flags)) as client:
        result = client.call("unload", wait_s=UNLOAD_TIMEOUT_S, **arguments)
    unloaded = [str(name) for name in result.get("unloaded", [])]
    if as_json:
        print_json({"unloaded": unloaded})
    elif unloaded:
        print(f"unloaded {', '.join(unloaded)}")
    else:
        print(f"{model} was not loaded" if model else "nothing was loaded")


@click.command()
@click.argument("model", required=False)
@settings_options("socket")
@click.option("--device-mem", metavar="SIZE", help="Pages beside the computation, such as 6GB, or auto.")
@click.option("--host-mem", metavar="SIZE", help="Pages in CPU memory, 0 for no such tier, or auto.")
@click.option("--weights-mem", metavar="SIZE", help="Weights in memory, or auto; the rest is streamed.")
@click.option("--timeout", type=click.FloatRange(0, 600), default=30.0, show_default=True, help="Seconds it may take.")
@json_option
def resize(
    flags: dict[str, Any],
    model: str | None,
    device_mem: str | None,
    host_mem: str | None,
    weights_mem: str | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Give a loaded model more or less memory while it works; without MODEL: the one used last.

    It lasts as long as the daemon, also when the model is unloaded and loaded again; `auto` lets the daemon choose.
    """
    sizes: dict[str, Any] = {
        f"{tier}_bytes": _size(f"--{tier}-mem", text)
        for tier, text in (("device", device_mem), ("host", host_mem), ("weights", weights_mem))
        if text is not None
    }
    if not sizes:
        raise BadRequest("say what to change", hint="for example --device-mem 6GB or --weights-mem 2GB")
    with connect(settings_anyway(flags)) as client:
        result = client.call("resize", model=model, timeout_s=timeout, wait_s=timeout + RESIZE_EXTRA_S, **sizes)
    if as_json:
        print_json(result)
        return
    print(
        f"{result.get('model', model)}: {human_bytes(result.get('device_bytes'))} on the device, "
        f"{human_bytes(result.get('host_bytes'))} in CPU memory, {_weights(result)}"
    )


def _weights(result: dict[str, Any]) -> str:
    kept, total = result.get("weights_bytes"), result.get("weights_total_bytes")
    if not isinstance(kept, int) or not isinstance(total, int):
        return f"{human_bytes(kept)} of weights"
    if kept >= total:
        return f"all {human_bytes(total)} of weights"
    return f"{human_bytes(kept)} of {human_bytes(total)} of weights, the rest is streamed"


def _size(flag: str, text: str) -> int | str:
    if text.strip().lower() == "auto":
        return "auto"
    try:
        return size_bytes(text)
    except ValueError as exc:
        raise BadRequest(f"{flag} must be {exc}, not {text!r}", param=flag) from None
