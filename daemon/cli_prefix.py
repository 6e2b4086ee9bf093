"""Verbs about known prefixes: prefix ls, pin, unpin, drop, persist, evict."""

from __future__ import annotations

from typing import Any

import click

from tierd.clients.blocking import Client
from tierd.daemon.cli_common import (
    confirm,
    connect,
    json_option,
    note,
    print_json,
    print_table,
    settings_anyway,
    settings_options,
    yes_option,
)
from tierd.daemon.units import counted, human_seconds

SHOWN_ID_DIGITS = 12
SHOWN_TEXT_CHARS = 40
ACTION_TIMEOUT_S = 900.0  # a model that is named is loaded first
model_option = click.option("--model", help="Of this model; without it: of the one used last.")


@click.group(no_args_is_help=False)
def prefix() -> None:
    """Look at the prefixes that are known, keep some for good, forget others."""


@prefix.command("ls")
@settings_options("socket")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="The newest so many.")
@model_option
@json_option
def list_(flags: dict[str, Any], limit: int, model: str | None, as_json: bool) -> None:
    """List known prefixes: each run of pages up to a branch or an end, with what lies on the way to it."""
    with connect(settings_anyway(flags)) as client:
        answer = _ask(client, "ls", model, limit=limit)
    if as_json:
        print_json(answer)
        return
    found, total = answer.get("prefixes", []), answer.get("total", 0)
    if not found:
        note(f"{answer.get('model', 'the model')} knows no prefix")
        return
    print_table(
        ("ID", "TOKENS", "PAGES", "DEVICE", "HOST", "NVME", "HITS", "IDLE", "STATE", "TEXT"),
        (
            (
                str(one.get("id", ""))[:SHOWN_ID_DIGITS], one.get("tokens"), one.get("pages"), one.get("device"),
                one.get("host"), one.get("nvme"), one.get("hits"), human_seconds(one.get("idle_s")), _state(one),
                _shortened(one),
            )
            for one in found
        ),
    )  # fmt: skip
    if total > len(found):
        note(f"{total - len(found)} more; --limit shows them")


@prefix.command()
@click.argument("prefix_id", metavar="ID")
@settings_options("socket")
@model_option
@json_option
def pin(flags: dict[str, Any], prefix_id: str, model: str | None, as_json: bool) -> None:
    """Keep a prefix: its pages are not evicted, and stay over a restart once they are on disk."""
    _change("pin", "kept", flags, prefix_id, model, as_json)


@prefix.command()
@click.argument("prefix_id", metavar="ID")
@settings_options("socket")
@model_option
@json_option
def unpin(flags: dict[str, Any], prefix_id: str, model: str | None, as_json: bool) -> None:
    """Let a prefix that was pinned be evicted again, and those that go on from it."""
    _change("unpin", "no longer kept", flags, prefix_id, model, as_json)


@prefix.command()
@click.argument("prefix_id", metavar="ID")
@settings_options("socket")
@model_option
@yes_option
@json_option
def drop(flags: dict[str, Any], prefix_id: str, model: str | None, yes: bool, as_json: bool) -> None:
    """Forget a prefix in all tiers, and all that goes on from it; what other prefixes share with it stays."""
    confirm(f"Forget prefix {prefix_id} and all that goes on from it, in every tier?", yes=yes)
    _change("drop", "forgotten", flags, prefix_id, model, as_json)


@prefix.command()
@click.argument("prefix_id", metavar="ID")
@settings_options("socket")
@model_option
@json_option
def persist(flags: dict[str, Any], prefix_id: str, model: str | None, as_json: bool) -> None:
    """Write a prefix to disk at once; when this ends it is durable."""
    _change("persist", "written", flags, prefix_id, model, as_json)


@prefix.command()
@click.argument("prefix_id", metavar="ID")
@settings_options("socket")
@model_option
@json_option
def evict(flags: dict[str, Any], prefix_id: str, model: str | None, as_json: bool) -> None:
    """Drop a prefix, and all that goes on from it, from memory: it stays on disk. Refused while it is not there."""
    _change("evict", "left memory", flags, prefix_id, model, as_json)


def _change(action: str, done: str, flags: dict[str, Any], prefix_id: str, model: str | None, as_json: bool) -> None:
    with connect(settings_anyway(flags)) as client:
        answer = _ask(client, action, model, id=prefix_id)
    if as_json:
        print_json(answer)
    else:
        print(f"{prefix_id}: {counted(answer.get('pages', 0), 'page')} {done}")


def _ask(client: Client, action: str, model: str | None, **arguments: Any) -> dict[str, Any]:
    return client.call("prefix", action=action, model=model, wait_s=ACTION_TIMEOUT_S, **arguments)


def _state(one: dict[str, Any]) -> str:
    kept = "kept for a while" if one.get("wished") else "pinned" if one.get("pinned") else ""
    return " ".join(word for word in (kept, "in use" if one.get("in_use") else "") if word)


def _shortened(one: dict[str, Any]) -> str:
    text = str(one.get("text", ""))
    text = text if len(text) <= SHOWN_TEXT_CHARS else text[: SHOWN_TEXT_CHARS - 3] + "..."
    return f"... {text}" if one.get("parent") else text
