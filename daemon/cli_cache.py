"""Verbs about the page store: cache ls, verify, gc, clear."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import msgspec

from tierd.clients.blocking import Client
from tierd.daemon import kv_quota
from tierd.daemon.cli_common import (
    Progress,
    confirm,
    connect,
    connect_if_running,
    json_option,
    leave,
    load_settings,
    note,
    print_json,
    print_table,
    settings_anyway,
    settings_options,
    yes_option,
)
from tierd.daemon.settled import kv_root
from tierd.daemon.units import counted, human_bytes

SILENCE_S = 900.0  # between two signs of progress
model_option = click.option("--model", help="Only this model; it is loaded if need be.")


@click.group(no_args_is_help=False)
def cache() -> None:
    """Look after the pages on disk."""


@cache.command("ls")
@settings_options("cache_dir")
@json_option
def list_(flags: dict[str, Any], as_json: bool) -> None:
    """List the page stores on disk, one a model (and way to compute). Works without a daemon.

    ON DISK is what the files take, the room in them for pages to come included; `tierd status` counts the pages.
    """
    root = kv_root(load_settings(flags))
    stores = kv_quota.namespaces(root)
    if as_json:
        print_json({"root": str(root), "namespaces": [msgspec.to_builtins(store) for store in stores]})
        return
    if not stores:
        note(f"no pages are kept below {root}")
        return
    rows = []
    for store in stores:
        used = datetime.datetime.fromtimestamp(store.last_use_s).strftime("%Y-%m-%d %H:%M")
        state = "open" if store.open else "closed"
        rows.append((store.name, store.model or "?", human_bytes(store.bytes), state, used))
    print_table(("NAMESPACE", "MODEL", "ON DISK", "STATE", "LAST USE"), rows)


@cache.command()
@settings_options("socket")
@click.option("--repair", is_flag=True, help="Set damaged pages aside.")
@model_option
@json_option
def verify(flags: dict[str, Any], repair: bool, model: str | None, as_json: bool) -> None:
    """Read every stored page of the loaded models and check it. Exit code 1 when something was wrong, mended or not.

    Answers go on meanwhile. Ctrl-C ends it; pages that were set aside by then stay so.
    """
    with connect(settings_anyway(flags)) as client:
        answer = _ask(client, "verify", model, repair=repair)
    findings = {name: _findings(part) for name, part in answer["engines"].items()}
    if as_json:
        print_json(answer)
    else:
        for name, lines in findings.items():
            pages = counted(answer["engines"][name].get("pages", 0), "page")
            print(f"{name}: {pages} read, {counted(len(lines), 'finding') if lines else 'all sound'}")
            for line in lines:
                print(f"{name}: {line}")
        _tell_untouched(answer, "verify")
    if any(findings.values()):
        leave(1)


@cache.command()
@settings_options("socket")
@model_option
@json_option
def gc(flags: dict[str, Any], model: str | None, as_json: bool) -> None:
    """Give back disk space that no page needs, in the stores of the loaded models."""
    with connect(settings_anyway(flags)) as client:
        answer = _ask(client, "gc", model)
    if as_json:
        print_json(answer)
        return
    for name, part in answer["engines"].items():
        freed, removed = human_bytes(part.get("freed_bytes", 0)), part.get("removed_pages", 0)
        # Most of it lay free in the files: room that pages had which were evicted or dropped before.
        print(f"{name}: {freed} of disk given back, {counted(removed, 'page')} removed that nothing could reach")
    _tell_untouched(answer, "gc")


@cache.command()
@settings_options("socket", "cache_dir")
@model_option
@yes_option
@json_option
def clear(flags: dict[str, Any], model: str | None, yes: bool, as_json: bool) -> None:
    """Delete the stored pages, pinned ones too.

    Through the daemon when one runs, else the directories that nobody has open.
    """
    settings = load_settings(flags)
    root = kv_root(settings)
    before = {store.name: store for store in kv_quota.namespaces(root)}
    pins = _pins(root, [store for store in before.values() if model in (None, store.model)])
    also = f" {counted(pins, 'pinned prefix goes', 'pinned prefixes go')} with them." if pins else ""
    confirm(f"Delete the pages of {model or 'all models'} below {root}?{also}", yes=yes)
    removed_pages: dict[str, Any] = {}
    client = connect_if_running(settings)
    if client is not None:
        with client:
            answer = _ask(client, "clear", model, yes=True)
        removed_pages = {name: part.get("removed_pages") for name, part in answer["engines"].items()}
    else:
        for store in before.values():
            if model in (None, store.model):
                kv_quota.remove(root, store.name)
    left = kv_quota.namespaces(root)
    after = {store.name: store.bytes for store in left}
    removed_pins = pins - _pins(root, [store for store in left if model in (None, store.model)])
    freed_bytes = sum(max(0, store.bytes - after.get(name, 0)) for name, store in before.items())
    if as_json:
        told = {"freed_bytes": freed_bytes, "removed_pages": removed_pages, "removed_pins": removed_pins}
        print_json(told | {"left": sorted(after)})
        return
    for name, count in removed_pages.items():
        print(f"{name}: {counted(count, 'page')} deleted")
    if removed_pins:
        print(f"{counted(removed_pins, 'prefix', 'prefixes')} pinned no more")
    print(f"{human_bytes(freed_bytes)} of disk given back")  # an open store may keep some for its next pages


def _pins(root: Path, stores: Iterable[kv_quota.Namespace]) -> int:
    """Prefixes that are pinned by hand in these stores."""
    return sum(kv_quota.pins(root, store.name) for store in stores)


def _ask(client: Client, action: str, model: str | None, **arguments: Any) -> dict[str, Any]:
    """The answer of the daemon: `engines` by model, `closed` stores that it did not touch."""
    progress = Progress()
    try:
        answer = client.call(
            "cache", action=action, model=model, wait_s=SILENCE_S, on_progress=progress.on_event, **arguments
        )
    finally:
        progress.finish()
    return {"engines": answer.get("engines", {}), "closed": answer.get("closed", [])}


def _findings(answer: object) -> list[str]:
    found = answer.get("findings", []) if isinstance(answer, dict) else []
    return [str(line) for line in found]


def _tell_untouched(answer: dict[str, Any], action: str) -> None:
    if not answer["engines"]:
        note("no model is loaded, so no store was touched")
    for store in answer["closed"]:
        owner = store.get("model") or store.get("name")
        note(f"{owner}: not loaded, left alone; `tierd cache {action} --model {owner}` loads it")
