"""The memory of an engine's pages: arenas of device and host, and that of exact copies."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierd.daemon.engine.backend import Backend
from tierd.daemon.engine.ladder import Ladders
from tierd.daemon.engine.memory_check import flag_of
from tierd.daemon.engine.scheduler import Limits
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.errors import BadConfig
from tierd.daemon.kv_mode import Kind
from tierd.daemon.machine import total_memory_bytes
from tierd.daemon.plan.workspace import copies_needed
from tierd.daemon.units import human_bytes
from tierd.kernels.layout import PageLayout
from tierd.kernels.rows import Ladder
from tierd.tiers.arena import Arena
from tierd.tiers.blocks import Block
from tierd.tiers.exact import ExactPages
from tierd.tiers.store_io import address_of


def arenas(slots: int, host_slots: int, layout: PageLayout, backend: Backend) -> tuple[Arena, Arena]:
    """The arenas of device and host."""
    record_bytes = layout.record_bytes
    device = _arena("device", slots, layout, backend.device_block, "device_mem", backend.device_memory[1])
    return device, _arena(
        "host", host_slots, layout, lambda size, most: backend.host_block(size, most, record_bytes), "host_mem",
        total_memory_bytes(),
    )  # fmt: skip


class Copies(NamedTuple):
    """What keeps exact copies, and the memory of the one page that is written for nobody."""

    ladders: Ladders
    nowhere: npt.NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        """Memory of both."""
        arena = self.ladders.pages.arena
        return arena.total * arena.record_bytes + self.nowhere.nbytes


def ladders(config: EngineConfig, layout: PageLayout, limits: Limits, backend: Backend) -> Copies | None:
    """What a ladder needs; None without one.

    Raises BadConfig where the backend has no ladders, and if there is no memory for them.
    """
    if not config.kv_exact_last:
        return None
    if Kind.LADDER not in backend.modes:
        raise BadConfig(
            "exact tokens beside packed pages are not there on the card yet", hint="leave kv_exact_last out",
            param="kv_exact_last",
        )  # fmt: skip
    most = Ladder(config.kv_exact_first, config.kv_exact_last)
    record = replace(layout, format=backend.copy_format)
    slots = copies_needed(most, limits.max_rows, limits.max_streams)
    nowhere = backend.ring(layout.record_bytes)  # of a card's, in CPU memory: only rows that are made up write there
    copies = ExactPages(_arena("exact", slots, record, backend.device_block, "kv_exact_last"), backend.copy)
    return Copies(Ladders(copies, most, address_of(nowhere), layout.page_tokens), nowhere)


def _arena(
    name: str, slots: int, layout: PageLayout, make_block: Callable[[int, int], Block], setting: str,
    total_bytes: int = 0,
) -> Arena:  # fmt: skip
    """An arena with address space to grow to `total_bytes`. Raises BadConfig if the system has no memory for it."""
    size_bytes = slots * layout.record_bytes
    most = max(slots, total_bytes // layout.record_bytes)
    try:
        return Arena(name, slots, layout.record_bytes, max_slots=most, make_block=make_block)
    except OSError as exc:
        if exc.errno != errno.ENOMEM:
            raise
        raise BadConfig(
            f"the system refuses {human_bytes(size_bytes)} of memory for {setting}; this machine has "
            f"{human_bytes(total_bytes or total_memory_bytes())}",
            hint=f"give less with {flag_of(setting)}{', or auto' if total_bytes else ''}; "
            "a limit (ulimit -v) may be lower",
            param=setting,
        ) from exc
