"""Verbs about settings: config show, config path, version."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from tierd.daemon import config, keys, paths
from tierd.daemon.cli_common import json_option, leave, print_error, print_json, print_table, settings_options
from tierd.daemon.config_values import duration_s
from tierd.daemon.machine import probe_machine
from tierd.daemon.settled import resolve_sizes, settle
from tierd.daemon.units import human_bytes
from tierd.daemon.version import version as package_version


@click.group("config", no_args_is_help=False)
def config_() -> None:
    """Show the settings."""


@config_.command()
@settings_options()
@click.option("--origin", is_flag=True, help="Also where each value comes from.")
@json_option
def show(flags: dict[str, Any], origin: bool, as_json: bool) -> None:
    """Print every setting with its value; `auto` sizes with what they mean on this machine.

    What is wrong in the config file or the variables is told below, with exit code 78: the daemon would not start.
    """
    (settings, origins), faults = config.load_anyway(flags)
    _print_settings(settings, origins, origin=origin, as_json=as_json)
    if not faults:
        keys.check_reach(settings)  # looks into the file of keys, as the daemon does before it listens
    for fault in faults:
        print_error(fault)
    if faults:
        leave(faults[0].exit_code)


def _print_settings(settings: config.Settings, origins: dict[str, str], *, origin: bool, as_json: bool) -> None:
    asked, machine = settle(settings, probe_machine(settings.cache_dir))
    if machine.card is None:
        sizes = resolve_sizes(asked, machine)
        auto = dict(zip(("device_mem", "host_mem", "nvme_mem", "nvme_min_free", "weights_mem"), sizes, strict=False))
    else:  # what pages and weights take of the card depends on the model
        found = resolve_sizes(asked, machine)
        auto = {"host_mem": found.host_bytes, "nvme_mem": found.nvme_bytes, "nvme_min_free": found.nvme_min_free_bytes}
    means = {"kv_format": asked.kv_format, "card": "off" if machine.card is None else machine.card.name}
    if as_json:
        print_json(
            {
                doc.key: {
                    "value": _plain(doc, getattr(settings, doc.name)),
                    "origin": origins[doc.name],
                    **({"bytes": auto[doc.name]} if doc.name in auto else {}),
                    **({"means": means[doc.name]} if doc.name in means else {}),
                }
                for doc in config.setting_docs()
            }
        )
        return
    rows = []
    for doc in config.setting_docs():
        value = str(_plain(doc, getattr(settings, doc.name)))
        if doc.name in auto:
            size = human_bytes(auto[doc.name])
            value = f"auto ({size})" if value == "auto" else size
        elif value == "auto" and doc.name in means:
            value = f"auto ({means[doc.name]})"
        rows.append((doc.key, value or '""', origins[doc.name]) if origin else (doc.key, value or '""'))
    print_table(("SETTING", "VALUE", "ORIGIN") if origin else ("SETTING", "VALUE"), rows)


def _plain(doc: config.SettingDoc, value: object) -> object:
    """A value as it is written in the file; a secret only says that it is set."""
    if doc.secret:
        return "(set)" if value else ""
    if value is None:
        return "never" if doc.parse is duration_s else "auto"
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value) if isinstance(value, Path) else value


@config_.command()
def path() -> None:
    """Print where the config file is looked for."""
    print(paths.config_file(os.environ))


@click.command()
def version() -> None:
    """Print the version."""
    print(f"tierd {package_version()}")
