"""What a step costs."""

from __future__ import annotations

import pytest

from tierd.daemon.plan.cost import Machine, Placement, Work, fits, seconds, use

GB = 10**9
CARD = Machine(False, 24 * GB, 64 * GB, 100 * GB, 10e9, 2e9, 1e9, host_attend=True)
CPU = Machine(True, 24 * GB, 0, 100 * GB, 1.0, 2e9, 1e9, read_cost_s=1e-10, page_read_cost_s=2e-10)
WORK = Work(GB, 0, 3 * GB, 20 * GB, 20.0 * GB, 10 * GB, 10, compute_s=0.1, attend_s=0.02, host_attend_s=1.0)


def test_all_on_the_device_is_computing_alone() -> None:
    step = seconds(WORK, CARD, Placement(1, 0, 0, 1, 0, 0))
    assert step.step == pytest.approx(0.12) and step.bound == "device"


def test_the_link_carries_what_comes_from_cpu_memory_and_from_the_disk() -> None:
    step = seconds(WORK, CARD, Placement(0.5, 0.3, 0.2, 0.5, 0.5, 0, 0.2))
    assert step.link == pytest.approx((0.5 * 20 + 0.3 * 10) / 10)
    assert step.disk == pytest.approx(0.2 * 20 / 2) and step.filling == pytest.approx(step.disk / 10)
    assert step.host == pytest.approx(0.2)
    assert step.bound == "disk" and step.step == pytest.approx(2.2)


def test_without_a_card_there_is_no_link_and_reading_costs_the_processors() -> None:
    step = seconds(WORK, CPU, Placement(0.5, 0, 0.5, 0.9, 0, 0.1))
    assert step.link == 0
    assert step.device == pytest.approx(0.12 + 10 * 0.1 + 1 * 0.2)
    assert step.disk == pytest.approx(10 / 2 + 1 / 1)


def test_pages_come_in_parts_of_their_own_however_few_layers_are_streamed() -> None:
    pages_alone = Placement(1, 0, 0, 0.5, 0, 0.5)
    whole = WORK._replace(layers=1, kv_parts=6)
    assert seconds(whole, CPU, pages_alone).filling == pytest.approx(0.5 * 10 / 1 / 6)
    assert seconds(WORK, CPU, pages_alone).filling == pytest.approx(0.5 * 10 / 1 / 10)
    both = seconds(WORK._replace(kv_parts=5), CPU, Placement(0.5, 0, 0.5, 0.5, 0, 0.5))
    assert both.filling == pytest.approx(10 / 2 / 10 + 5 / 1 / 5)


def test_slots_take_memory_only_where_layers_are_streamed() -> None:
    assert use(WORK, CPU, Placement(1, 0, 0, 1, 0, 0)).device == 31 * GB
    assert use(WORK, CPU, Placement(0.5, 0, 0.5, 1, 0, 0)).device == 24 * GB
    assert fits(WORK, CPU, Placement(0.5, 0, 0.5, 1, 0, 0))
    assert not fits(WORK, CPU, Placement(0.6, 0, 0.4, 1, 0, 0))
    assert not fits(WORK, CPU._replace(kv_bytes=9 * GB), Placement(0.5, 0, 0.5, 1, 0, 0))
    assert not fits(WORK, CPU._replace(weights_bytes=9 * GB), Placement(0.5, 0, 0.5, 1, 0, 0))
