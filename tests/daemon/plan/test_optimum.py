"""The linear program against trying everything."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from tierd.daemon.plan.cost import Machine, Placement, Work, fits, seconds
from tierd.daemon.plan.optimum import best

GB = 10**9


def grid(work: Work, machine: Machine) -> Iterator[Placement]:
    """Every number of layers in each tier, and pages by tenths."""
    count, tenths = work.layers, [n / 10 for n in range(11)]
    hosts = range(count + 1) if not machine.unified else [0]
    for device, host in itertools.product(range(count + 1), hosts):
        if device + host > count:
            continue
        weights = device / count, host / count, (count - device - host) / count
        for kv_device, kv_host in itertools.product(tenths, tenths if not machine.unified else [0.0]):
            if kv_device + kv_host > 1 + 1e-9:
                continue
            for attended in (0.0, kv_host / 2, kv_host) if machine.host_attend else (0.0,):
                yield Placement(*weights, kv_device, kv_host, max(1 - kv_device - kv_host, 0.0), attended)


def least_s(work: Work, machine: Machine) -> float | None:
    found = [seconds(work, machine, at).step for at in grid(work, machine) if fits(work, machine, at)]
    return min(found, default=None)


def scene(seed: int) -> tuple[Work, Machine]:
    pick = random.Random(seed)
    unified = seed % 3 == 0
    layers = pick.choice([4, 7])
    weights = pick.randint(1, 60) * GB
    work = Work(
        fixed_bytes=GB, fixed_host_bytes=0, slots_bytes=3 * weights // layers, weights_bytes=weights,
        step_bytes=weights * pick.choice([1.0, 0.3]), kv_bytes=pick.randint(0, 30) * GB, layers=layers,
        compute_s=pick.choice([0.01, 0.2, 4.0]), attend_s=pick.choice([0.001, 0.1, 1.0]),
        host_attend_s=pick.choice([0.01, 0.5]),
    )  # fmt: skip
    machine = Machine(
        unified=unified, device_bytes=pick.choice([16, 24, 80]) * GB,
        host_bytes=0 if unified else pick.randint(0, 64) * GB,
        disk_bytes=pick.choice([0, 20, 200]) * GB, link_bytes_per_s=12e9, disk_bytes_per_s=2e9,
        page_disk_bytes_per_s=1e9, read_cost_s=1e-10 if unified else 0.0, page_read_cost_s=2e-10 if unified else 0.0,
        host_attend=not unified and pick.random() < 0.5,
    )  # fmt: skip
    return work, machine


@pytest.mark.parametrize("seed", range(18))
def test_nothing_on_a_grid_is_better_by_a_twentieth(seed: int) -> None:
    work, machine = scene(seed)
    placed, least = best(work, machine), least_s(work, machine)
    if placed is None:
        assert least is None
        return
    assert fits(work, machine, placed)
    assert sum(placed[:3]) == pytest.approx(1) and sum(placed[3:6]) == pytest.approx(1)
    assert all((share * work.layers) % 1 == pytest.approx(0, abs=1e-6) or
               (share * work.layers) % 1 == pytest.approx(1, abs=1e-6) for share in placed[:3])  # fmt: skip
    assert least is None or seconds(work, machine, placed).step <= 1.05 * least


def test_never_streams_what_fits() -> None:
    work = Work(GB, 0, 3 * GB, 19 * GB, 19.0 * GB, 3 * GB, 32, 0.05, 0.01)
    machine = Machine(False, 24 * GB, 64 * GB, 100 * GB, 12e9, 2e9, 1e9)
    assert best(work, machine) == Placement(1.0, 0.0, 0.0, 1.0, 0.0, 0.0)


def test_the_processors_attend_where_that_is_sooner() -> None:
    work = Work(GB, 0, GB, 10 * GB, 10.0 * GB, 40 * GB, 32, 0.05, 0.2, host_attend_s=2.0)
    machine = Machine(False, 24 * GB, 64 * GB, 0, 12e9, 2e9, 1e9, host_attend=True)
    placed = best(work, machine)
    assert placed is not None and 0 < placed.kv_attended < placed.kv_host
    alone = best(work, machine._replace(host_attend=False))
    assert alone is not None
    assert seconds(work, machine, placed).step < 0.7 * seconds(work, machine, alone).step


@pytest.mark.parametrize("limit", ["kv_bytes", "device_bytes", "disk_bytes"])
def test_nothing_fits(limit: str) -> None:
    work = Work(GB, 0, 0, 1, 1.0, 5 * GB, 8, 0.05, 0.01)
    machine = Machine(True, 24 * GB, 0, 0, 1.0, 2e9, 1e9)
    assert best(work, machine) is not None
    changed = machine._replace(**{limit: GB // 2}) if limit != "disk_bytes" else machine._replace(kv_bytes=0)
    assert best(work, changed) is None
