"""The memory of an engine's pages: arenas of device and host, and that of exact copies; and whether it can be had."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import NamedTuple

from tierd.daemon.engine.backend import Backend
from tierd.daemon.engine.ladder import Ladders
from tierd.daemon.engine.scheduler import Limits
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.errors import BadConfig
from tierd.daemon.machine import total_memory_bytes
from tierd.daemon.models.catalog import Manifest
from tierd.daemon.plan.workspace import copies_needed, exact_bytes
from tierd.daemon.units import human_bytes
from tierd.kernels.layout import PageLayout
from tierd.kernels.rows import Ladder
from tierd.tiers.arena import Arena
from tierd.tiers.blocks import Block, HostBlock
from tierd.tiers.exact import ExactPages


def check_memory(config: EngineConfig, manifest: Manifest, total_bytes: int) -> None:
    """All of it lies in RAM. Asking for more than there is would map, and be killed when the pages fill."""
    weights_bytes = min(config.weights_bytes or 0, manifest.bytes)  # those that nobody bounds may leave it any time
    sizes = {"device_mem": config.device_bytes, "host_mem": config.host_bytes} | (
        {"weights_mem": weights_bytes} if weights_bytes else {}
    )
    ladder = config.kv_exact_first, config.kv_exact_last
    if copies_bytes := exact_bytes(manifest.spec, ladder, config.max_batch_rows, config.max_streams):
        sizes["kv_exact_last"] = copies_bytes
    if sum(sizes.values()) <= total_bytes:
        return
    alone = [name for name, size in sizes.items() if size > total_bytes]
    blamed = alone or list(sizes)
    asked = " and ".join(f"{name} of {human_bytes(sizes[name])}" for name in blamed)
    raise BadConfig(
        f"{asked} {'is' if len(blamed) == 1 else 'are'} more than this machine's memory of {human_bytes(total_bytes)}",
        hint=f"give less with {' and '.join(_flag(name) for name in blamed)}, or auto",
        param=blamed[0],
    )


def arenas(slots: int, host_slots: int, layout: PageLayout, backend: Backend) -> tuple[Arena, Arena]:
    """The arenas of device and host."""
    record_bytes = layout.record_bytes
    device = _arena("device", slots, layout, backend.device_block, "device_mem")
    return device, _arena(
        "host", host_slots, layout, lambda size, most: backend.host_block(size, most, record_bytes), "host_mem"
    )


class Copies(NamedTuple):
    """What keeps exact copies, and the arena of the one page that is written for nobody."""

    ladders: Ladders
    nowhere: Arena


def ladders(config: EngineConfig, layout: PageLayout, limits: Limits, backend: Backend) -> Copies | None:
    """What a ladder needs; None without one.

    Raises BadConfig on a card, and if there is no memory for them.
    """
    if not config.kv_exact_last:
        return None
    if backend.on_card:
        raise BadConfig(
            "exact tokens beside packed pages are not there on the card yet", hint="leave kv_exact_last out",
            param="kv_exact_last",
        )  # fmt: skip
    most = Ladder(config.kv_exact_first, config.kv_exact_last)
    record = PageLayout(layout.num_layers, layout.kv_heads, layout.head_dim)
    slots = copies_needed(most, limits.max_rows, limits.max_streams)
    nowhere = _arena("nowhere", 1, layout, HostBlock, "kv_exact_last")
    copies = _arena("exact", slots, record, HostBlock, "kv_exact_last")
    return Copies(Ladders(ExactPages(copies), most, nowhere.address(0), layout.page_tokens), nowhere)


def _arena(
    name: str, slots: int, layout: PageLayout, make_block: Callable[[int, int], Block], setting: str
) -> Arena:
    """The arena of a tier, with address space to grow. Raises BadConfig if the system has no memory for it."""
    size_bytes = slots * layout.record_bytes
    grows = setting.endswith("_mem")
    most = max(slots, total_memory_bytes() // layout.record_bytes) if grows else slots
    try:
        return Arena(name, slots, layout.record_bytes, max_slots=most, make_block=make_block)
    except OSError as exc:
        if exc.errno != errno.ENOMEM:
            raise
        raise BadConfig(
            f"the system refuses {human_bytes(size_bytes)} of memory for {setting}; this machine has "
            f"{human_bytes(total_memory_bytes())}",
            hint=f"give less with {_flag(setting)}{', or auto' if grows else ''}; a limit (ulimit -v) may be lower",
            param=setting,
        ) from exc


def _flag(setting: str) -> str:
    return "--" + setting.replace("_", "-")
