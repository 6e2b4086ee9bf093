"""What settings come to on a machine: sizes and formats that are `auto`, paths and modes that follow from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tierd.daemon.config import Settings
from tierd.daemon.kv_mode import KvMode
from tierd.daemon.machine import Machine, Sizes, auto_sizes, auto_weights


def settle(settings: Settings, machine: Machine) -> tuple[Settings, Machine]:
    """What `auto` means where it is no size, and the machine as the settings want it used: perhaps without its card.

    Both are as they were when they are given again.
    """
    if settings.card == "off":
        machine = machine._replace(card=None)
    if settings.kv_format == "auto":
        settings = dataclasses.replace(settings, kv_format="fp32" if machine.card is None else "bf16")
    return settings, machine


def resolve_sizes(settings: Settings, machine: Machine) -> Sizes:
    """The sizes to use: what was asked for, and `auto_sizes` where that is `auto`."""
    auto = auto_sizes(machine.total_ram, machine.available_ram, machine.free_disk)
    asked = (settings.device_mem, settings.host_mem, settings.nvme_mem, settings.nvme_min_free, settings.weights_mem)
    sizes = Sizes(*(found if wanted is None else wanted for wanted, found in zip(asked, auto[:5], strict=True)))
    if settings.weights_mem is None:  # what arenas of the sizes that were asked for leave
        usable = min(machine.available_ram, machine.total_ram)
        sizes = sizes._replace(weights_bytes=auto_weights(usable, sizes.device_bytes, sizes.host_bytes))
    return sizes


def default_mode(settings: Settings) -> str:
    """The memory mode of requests that name none."""
    if not settings.kv_exact_last:
        return settings.kv_mode
    return str(KvMode(exact_first=settings.kv_exact_first, exact_last=settings.kv_exact_last))


def kv_root(settings: Settings) -> Path:
    """Where the page stores lie, one directory a namespace."""
    return settings.cache_dir / "kv"
