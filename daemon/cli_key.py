"""Verbs about API keys: key add, key ls, key rm. They change a file alone; a running daemon sees what became of it."""

from __future__ import annotations

import time
from typing import Any

import click

from tierd.daemon import keys
from tierd.daemon.cli_common import json_option, load_settings, note, print_json, print_table, settings_options


@click.group()
def key() -> None:
    """API keys of the HTTP door: each is a tenant of its own, with limits of its own."""


@key.command()
@settings_options("keys_file")
@click.argument("name")
@click.option("--quota-pages", type=click.IntRange(1), help="Pages that it may have in the cache; no bound without.")
@click.option("--max-requests", type=click.IntRange(1), help="Requests that run or wait at once; no bound without.")
@json_option
def add(
    flags: dict[str, Any], name: str, quota_pages: int | None, max_requests: int | None, as_json: bool
) -> None:
    """Make a key and print it, this once. From the first one on HTTP requests need a key."""
    path = load_settings(flags).keys_file
    made, text = keys.add(path, name, quota_pages=quota_pages or 0, max_requests=max_requests or 0)
    if as_json:
        print_json({"id": made.id, "name": made.name, "key": text})
        return
    print(text)
    note(f"key {made.name} (tenant key:{made.id}); it is not kept and can't be shown again")


@key.command()
@settings_options("keys_file")
@json_option
def ls(flags: dict[str, Any], as_json: bool) -> None:
    """List the keys: their names and limits."""
    known = keys.read(load_settings(flags).keys_file)
    if as_json:
        print_json([{name: getattr(one, name) for name in ("id", "name", "created_s", *_LIMITS)} for one in known])
        return
    rows = [
        (one.name, one.id, time.strftime("%Y-%m-%d", time.gmtime(one.created_s)), *map(_bound, _limits(one)))
        for one in known
    ]
    print_table(("NAME", "ID", "MADE", "PAGES", "REQUESTS"), rows)


@key.command()
@settings_options("keys_file")
@click.argument("name")
def rm(flags: dict[str, Any], name: str) -> None:
    """Remove a key by its name or id; what runs in its name may end."""
    path = load_settings(flags).keys_file
    removed = keys.remove(path, name)
    print(f"key {removed.name} is removed")
    if not keys.read(path):
        note("no key is left: on the loopback address HTTP takes requests without one, unless api_key is set")


_LIMITS = ("quota_pages", "max_requests")


def _limits(one: keys.ApiKey) -> list[int]:
    return [getattr(one, name) for name in _LIMITS]


def _bound(limit: int) -> str:
    return str(limit) if limit else "-"
