"""What this machine has, and how much of it the tiers take when nobody says.

`auto_sizes` is pure; the rest looks at the system.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from tierd.daemon.card_memory import CardMemory, probe_card
from tierd.daemon.paths import nearest_existing


class Machine(NamedTuple):
    """What the sizes are computed from, in bytes. `card`: one that can be computed on."""

    total_ram: int
    available_ram: int
    free_disk: int
    card: CardMemory | None = None


class Sizes(NamedTuple):
    """Bytes of each tier, of the disk that stays free, and of weights in memory: the device's, where there is a card.

    `host_weights_bytes`: in CPU memory, of what a card does not take; None without one.
    """

    device_bytes: int
    host_bytes: int
    nvme_bytes: int
    nvme_min_free_bytes: int
    weights_bytes: int
    host_weights_bytes: int | None = None


_GB = 10**9
_MIB = 1 << 20


def auto_sizes(total_ram: int, available_ram: int, free_disk: int) -> Sizes:
    """Sizes that suit a machine; pure.

    Both memory tiers lie in RAM, beside the weights: a quarter of what is available (at most 8 GB) for the device
    arena, 15% (at most 16 GB) below it. The disk tier takes a tenth of the free disk (at most 50 GB), and 5% of it (at
    most 5 GB) stay free. Under 64 MiB a tier holds too few pages to be worth its misses: the device arena never gets
    less, and the other two turn off. Weights may have what these leave, but for a tenth of the memory: the rest of
    tierd, and whatever else runs.
    """
    usable = max(0, min(available_ram, total_ram))
    device, host = max(min(usable // 4, 8 * _GB), 64 * _MIB), min(usable * 15 // 100, 16 * _GB)
    min_free = min(free_disk // 20, 5 * _GB)
    nvme = min(free_disk // 10, 50 * _GB)
    host = whole_tier(host)
    return Sizes(device, host, whole_tier(nvme), min_free, auto_weights(usable, device, host))


def auto_weights(available_ram: int, device_bytes: int, host_bytes: int) -> int:
    """Memory for weights beside arenas of these sizes."""
    return max(0, available_ram - available_ram // 10 - device_bytes - host_bytes)


def whole_tier(tier_bytes: int) -> int:
    """A tier of so many bytes, or none where that is too little to be one."""
    return tier_bytes if tier_bytes >= 64 * _MIB else 0


def probe_machine(cache_dir: Path) -> Machine:
    """Measure this machine: memory (a container's limit counts), a card, the disk that `cache_dir` is or will be on."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    available = page * os.sysconf("SC_AVPHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # SC_AVPHYS_PAGES leaves the page cache out: a lower, safe figure
    limit = _cgroup_left_bytes()
    if limit is not None:
        total, available = min(total, limit), min(available, limit)
    disk = os.statvfs(nearest_existing(cache_dir))
    return Machine(total, available, disk.f_bavail * disk.f_frsize, probe_card())


def total_memory_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that a process here could take if nothing else ran: the machine's, or its container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int((root / "memory.max").read_text("ascii")))
    except (OSError, ValueError):  # no cgroup v2 here, or the word "max"
        return total


def _cgroup_left_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that this control group may still take; None without a limit."""
    try:
        limit = int((root / "memory.max").read_text("ascii"))
        used = int((root / "memory.current").read_text("ascii"))
    except (OSError, ValueError):  # no cgroup v2 here, or the word "max"
        return None
    return max(0, limit - used)
