"""What a machine has, and what the tiers take of it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from tierd.daemon.machine import _cgroup_left_bytes, auto_sizes, probe_machine, total_memory_bytes

GB = 10**9


@pytest.mark.parametrize(
    ("total", "available", "disk"),
    list(itertools.product((GB, 16 * GB, 512 * GB), (0, GB, 400 * GB), (0, GB, 4000 * GB))),
)
def test_auto_sizes_fit_the_machine(total: int, available: int, disk: int) -> None:
    sizes = auto_sizes(total, available, disk)
    assert sizes.host_bytes <= min(total, available) // 4
    assert sizes.device_bytes + sizes.host_bytes <= max(min(total, available) * 4 // 10, 64 << 20)
    assert sizes.nvme_bytes <= min(50 * GB, disk // 10)
    assert sizes.nvme_min_free_bytes <= min(5 * GB, disk // 20)
    assert sizes.device_bytes >= 64 << 20


def test_auto_sizes_of_known_machines() -> None:
    assert auto_sizes(16 * GB, 12 * GB, 100 * GB) == (3 * GB, 1_800_000_000, 10 * GB, 5 * GB, 6 * GB, None)
    assert auto_sizes(128 * GB, 120 * GB, 2000 * GB) == (8 * GB, 16 * GB, 50 * GB, 5 * GB, 84 * GB, None)
    small = auto_sizes(GB, GB // 5, GB // 2)
    assert small == (64 << 20, 0, 0, 25_000_000, GB // 5 - GB // 50 - (64 << 20), None), "a small machine still works"


def test_cgroup_limit(tmp_path: Path) -> None:
    assert _cgroup_left_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert _cgroup_left_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("300\n")
    assert _cgroup_left_bytes(tmp_path) == 200


def test_total_memory(tmp_path: Path) -> None:
    machine = total_memory_bytes(tmp_path)
    assert machine == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "memory.max").write_text("max\n")
    assert total_memory_bytes(tmp_path) == machine
    (tmp_path / "memory.max").write_text(f"{machine // 2}\n")
    assert total_memory_bytes(tmp_path) == machine // 2


def test_probe(tmp_path: Path) -> None:
    machine = probe_machine(tmp_path / "not" / "yet")
    assert 0 < machine.available_ram <= machine.total_ram
    assert machine.free_disk > 0
